"""Muon's update of one matrix in each code: kernels, collectives of tensor ranks, tensors at its highest point.

Momentum of a matrix is brought near the closest orthogonal one by Newton-Schulz iterations in bf16: of X, its smaller
side first, X Xᵀ, the square of that added to it, and the product of both with X added to X. `torch.addmm` of matrices
copies what it adds to into its result first (aten/src/ATen/native/cuda/Blas.cpp, addmm_out_cuda_impl; recalled), then
multiplies on top of it.

Read, and replayed operator by operator: torch 2.13.0 optim/_muon.py (held against fake tensors:
tests/model/update/test_newton_schulz.py); emerging-optimizers 0.3.0 orthogonalized_optimizer.py and muon_utils.py of
orthogonalized_optimizers/ as megatron-core 0.16.1 optimizer/muon.py calls them (likewise); torchtitan 0.3.0
distributed/flex_shard/dist_muon.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from sim.model.eager import rounded
from sim.model.kernels import elementwise, product, width
from sim.model.update.muon import Matrix, Recipe
from sim.work import Kernel

_HALF, _WIDE = "bf16", "fp32"


class Call(NamedTuple):
    """A collective of the tensor ranks in the middle of an update, without ranks.

    Attributes:
        kind: all_gather or all_reduce.
        size_bytes: of the whole buffer.
        dtype: of what travels.
    """

    kind: str
    size_bytes: float
    dtype: str


class Update(NamedTuple):
    """The update of one matrix: what runs in order, and bytes of tensors at its highest point, in the allocator's
    blocks."""

    row: tuple[Kernel | Call, ...]
    peak_bytes: int

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Without collectives."""
        return tuple(item for item in self.row if isinstance(item, Kernel))


@lru_cache(maxsize=4096)
def muon_update(matrix: Matrix, recipe: Recipe) -> Update:
    """The update of one matrix from its gradient."""
    tape = _Tape()
    _CODES[recipe.code](tape, matrix, recipe)
    return Update(tuple(tape.row), round(tape.peak))


@dataclass
class _Tape:
    """What runs, and the bytes that are alive."""

    row: list[Kernel | Call] = field(default_factory=list)
    live: float = 0.0
    peak: float = 0.0

    def new(self, elements: int, dtype: str) -> float:
        """A tensor; returns its bytes, by which it goes again."""
        size = rounded(elements, dtype)
        self.live += size
        self.peak = max(self.peak, self.live)
        return size

    def drop(self, *sizes: float) -> None:
        """Tensors go."""
        self.live -= sum(sizes)

    def over(self, name: str, elements: int, per_element: float, dtype: str = _WIDE, launches: int = 1) -> None:
        """An element-wise pass, or a sum, at so many bytes an element."""
        self.row.append(elementwise(name, elements, per_element, dtype, launches, "optimizer"))

    def times(self, batch: int, m: int, n: int, k: int, variant: str, added: bool) -> None:
        """A product in bf16, on top of what is there if it is `added`: copied there by a kernel of its own."""
        if added:
            self.over("added matrix", batch * m * n, 2 * width(_HALF), _HALF)
        self.row.append(product(batch, m, n, k, variant, _HALF, _HALF, accumulate=added, category="optimizer"))


def _momentum(tape: _Tape, numel: int, recipe: Recipe) -> float:
    """Momentum, and what is orthogonalised where that is another tensor."""
    g, s = width(recipe.gradients), width(recipe.states)
    tape.over("momentum", numel, 2 * s + g)
    if not recipe.nesterov:
        return 0.0
    update = tape.new(numel, recipe.gradients)
    tape.over("nesterov", numel, 2 * g + s)
    return update


def _normalised(tape: _Tape, numel: int, batch: int) -> None:
    """The norm, kept from zero, and the division in place."""
    tape.over("norm", numel, width(_HALF), _HALF)
    tape.over("clamp", batch, 2 * width(_HALF), _HALF)
    tape.over("normalise", numel, 2 * width(_HALF), _HALF)


def _iterated(tape: _Tape, batch: int, small: int, large: int, recipe: Recipe, x: float, turned: bool,
              scoped: bool = False, summed: bool = False) -> float:
    """Newton-Schulz iterations by `addmm`; returns the bytes of the result.

    Args:
        x: bytes of the input if it goes with the first iteration, 0 where somebody else still holds it.
        turned: the input is the transpose of how it lies.
        scoped: an iteration is a function of its own, whose two small matrices go with it.
        summed: tensor ranks add their parts of X Xᵀ up.
    """
    gram = square = 0.0
    for step in range(recipe.steps):
        fresh = tape.new(batch * small * small, _HALF)
        tape.drop(gram)
        gram = fresh
        tape.times(batch, small, small, large, "nt" if turned and step == 0 else "tn", False)
        if summed:
            tape.row.append(Call("all_reduce", batch * small * small * width(_HALF), _HALF))
        fresh = tape.new(batch * small * small, _HALF)
        tape.times(batch, small, small, small, "nn", True)
        tape.drop(square)
        square = fresh
        fresh = tape.new(batch * small * large, _HALF)
        tape.times(batch, small, large, small, "nn", True)
        if scoped:
            tape.drop(gram, square)
            gram = square = 0.0
        tape.drop(x)
        x = fresh
    tape.drop(gram, square)
    return x


def _torch(tape: _Tape, matrix: Matrix, recipe: Recipe) -> None:
    """torch.optim.Muon: a tensor at a time."""
    numel, p = matrix.numel, width(recipe.parameters)
    held = _momentum(tape, numel, recipe)
    narrow = recipe.gradients == _HALF
    if not narrow:
        x = tape.new(numel, _HALF)
        tape.over("to bf16", numel, width(recipe.gradients) + width(_HALF))
    _normalised(tape, numel, matrix.batch)
    small, large = sorted((matrix.rows, matrix.cols))
    x = _iterated(tape, matrix.batch, small, large, recipe, 0.0 if narrow else x, matrix.rows > matrix.cols)
    tape.drop(held)
    tape.over("weight decay", numel, 2 * p)
    tape.over("step", numel, 2 * p + width(_HALF))
    tape.drop(x)


def _owned(tape: _Tape, matrix: Matrix, recipe: Recipe) -> None:
    """The owner's part of torchtitan's DistMuon: what has arrived is copied, orthogonalised and written over it.
    Momentum before it and the step behind it run on shards (`owned_shard`)."""
    numel = matrix.numel
    x = tape.new(numel, _HALF)
    tape.over("to bf16", numel, width(recipe.gradients) + width(_HALF))
    _normalised(tape, numel, matrix.batch)
    small, large = sorted((matrix.rows, matrix.cols))
    x = _iterated(tape, matrix.batch, small, large, recipe, x, matrix.rows > matrix.cols)
    tape.over("update", numel, width(recipe.gradients) + width(_HALF))
    tape.drop(x)


def _emerging(tape: _Tape, matrix: Matrix, recipe: Recipe) -> None:
    """Megatron's TensorParallelMuon on fp32 master parameters, gradients and momentum."""
    numel, p, wide = matrix.numel, width(recipe.parameters), width(_WIDE)
    tape.over("weight decay", numel, 2 * p)
    held = _momentum(tape, numel, recipe)
    if not matrix.parts:
        x = _scaled(tape, matrix, recipe)
    else:
        sizes = [rows * matrix.groups for rows in matrix.parts]
        copies = [tape.new(rows * matrix.cols, _WIDE) for rows in sizes] if matrix.groups > 1 else []
        if copies:
            tape.over("split", numel, 2 * wide, launches=len(copies))
        parts = [_scaled(tape, matrix._replace(rows=rows), recipe) for rows in sizes]
        tape.drop(*copies)
        x = tape.new(numel, _WIDE)
        tape.over("joined", numel, 2 * wide)
        tape.drop(*parts)
    tape.over("step", numel, 2 * p + wide)
    tape.drop(x, held)


def _scaled(tape: _Tape, matrix: Matrix, recipe: Recipe) -> float:
    """`scaled_orthogonalize_fn`: two factors behind Newton-Schulz, each a pass."""
    x = _over_ranks(tape, matrix, recipe)
    first = tape.new(matrix.numel, _WIDE)
    second = tape.new(matrix.numel, _WIDE)
    tape.over("scale", matrix.numel, 4 * width(_WIDE), launches=2)
    tape.drop(x, first)
    return second


def _over_ranks(tape: _Tape, matrix: Matrix, recipe: Recipe) -> float:
    """`newton_schulz_tp`: a slice by itself, the whole matrix on every rank, or slices that add up their X Xᵀ. Returns
    the bytes of what holds the result."""
    wide, shared = width(_WIDE), matrix.cut is not None and recipe.tensor > 1
    if not shared or recipe.mode == "blockwise":
        small, large = sorted((matrix.rows, matrix.cols))
        return _wide_newton_schulz(tape, small, large, recipe, matrix.rows > matrix.cols)
    if recipe.mode == "distributed":
        own, other = (matrix.rows, matrix.cols) if matrix.cut == 0 else (matrix.cols, matrix.rows)
        return _wide_newton_schulz(tape, other, own, recipe, matrix.cut == 0, summed=True)
    whole = matrix.numel * recipe.tensor
    rows = matrix.rows * (recipe.tensor if matrix.cut == 0 else 1)
    shards = [tape.new(matrix.numel, _WIDE) for _ in range(recipe.tensor)]
    tape.row.append(Call("all_gather", whole * wide, _WIDE))
    joined = tape.new(whole, _WIDE)
    tape.over("joined", whole, 2 * wide)
    small, large = sorted((rows, whole // rows))
    x = _wide_newton_schulz(tape, small, large, recipe, rows > whole // rows)
    tape.drop(*shards, joined)
    return x


def _wide_newton_schulz(tape: _Tape, small: int, large: int, recipe: Recipe, turned: bool,
                        summed: bool = False) -> float:
    """`newton_schulz` with "medium" products of fp32: to bf16 and back. `summed`: tensor ranks share the sum over
    `large`, whose part this rank has."""
    numel, wide, half = small * large, width(_WIDE), width(_HALF)
    if summed:
        squares = tape.new(numel, _WIDE)
        tape.over("squares", numel, 2 * wide)
        tape.over("norm", numel, wide)
        tape.drop(squares)
        tape.row.append(Call("all_reduce", wide, _WIDE))
        tape.over("clamp", 1, 4 * wide, launches=2)
    else:
        tape.over("norm", numel, wide)
        tape.over("clamp", 1, 2 * wide)
    normalised = tape.new(numel, _WIDE)
    tape.over("normalise", numel, 2 * wide)
    x = tape.new(numel, _HALF)
    tape.over("to bf16", numel, wide + half)
    tape.drop(normalised)
    x = _iterated(tape, 1, small, large, recipe, x, turned, scoped=True, summed=summed)
    back = tape.new(numel, _WIDE)
    tape.over("to fp32", numel, wide + half)
    tape.drop(x)
    return back


_CODES = {"torch": _torch, "emerging": _emerging, "owned": _owned}


def owned_shard(numel: int, recipe: Recipe) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """What torchtitan's DistMuon runs on this rank's shard of a matrix: momentum and packing before it leaves,
    unpacking, decay and step when it has come back."""
    before, behind = _Tape(), _Tape()
    g, p = width(recipe.gradients), width(recipe.parameters)
    before.over("momentum", numel, 2 * width(recipe.states) + g)
    before.over("nesterov" if recipe.nesterov else "copied momentum", numel,
                (2 * g if recipe.nesterov else g) + width(recipe.states))
    before.over("packed", numel, 2 * g)
    behind.over("unpacked", numel, 2 * g)
    behind.over("weight decay", numel, 2 * p)
    behind.over("step", numel, 2 * p + g)
    return _kernels(before.row), _kernels(behind.row)


def _kernels(row: Sequence[Kernel | Call]) -> tuple[Kernel, ...]:
    return tuple(item for item in row if isinstance(item, Kernel))
