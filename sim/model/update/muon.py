"""Muon: which parameters it takes, as what matrices, and what it keeps of them.

Sources: Jordan et al. 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025 (Moonlight), arXiv 2502.16982; code as
named below. What runs on a matrix: `newton_schulz.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sim.model.architecture import Layer, Parameter
from sim.model.style import Style

#: How operators' slices of the width are cut: outputs (rows of the weight) or inputs (its columns).
_CUT = {"column": 0, "row": 1}


class Matrix(NamedTuple):
    """A parameter that Muon takes, as this rank's slice of the width has it.

    Attributes:
        rows, cols: of the tensor; `batch` such matrices lie in one tensor, each orthogonalised by itself.
        parts: rows of each part that is orthogonalised by itself (queries, keys, values), times `groups`; () = whole.
        groups: runs of such parts (key heads), which lie behind one another.
        cut: dimension that tensor ranks share, None = whole on each.
        routed: of an expert that tokens are routed to.
    """

    rows: int
    cols: int
    batch: int = 1
    parts: tuple[int, ...] = ()
    groups: int = 1
    cut: int | None = None
    routed: bool = False

    @property
    def numel(self) -> int:
        """Elements."""
        return self.batch * self.rows * self.cols


@dataclass(frozen=True, slots=True)
class Recipe:
    """How matrices are orthogonalised.

    Attributes:
        code: torch, emerging or owned (`Stack.muon`).
        steps: Newton-Schulz iterations.
        nesterov: Nesterov momentum.
        tensor: ranks that share the width; `mode`: what they do: blockwise, duplicated or distributed.
        parameters, gradients, states: dtypes of what is updated, of what it reads, of momentum.
    """

    code: str
    steps: int
    nesterov: bool
    tensor: int = 1
    mode: str = "blockwise"
    parameters: str = "fp32"
    gradients: str = "fp32"
    states: str = "fp32"


def takes(layer: Layer, parameter: Parameter) -> bool:
    """Whether Muon takes a parameter: matrices of hidden layers, routers among them. Embeddings, heads, norms and
    biases have AdamW (megatron-core 0.16.1 optimizer/muon.py: 2-D and no embedding or output; torchtitan's pattern for
    Kimi has the router's; DeepSpeed's names without "embed" and "lm_head")."""
    return layer.kind == "block" and len(parameter.shape) >= 2


def matrices_of(layer: Layer, splits_qkv: bool) -> dict[str, Matrix]:
    """Matrices of a layer by the names of their parameters.

    Args:
        splits_qkv: queries, keys and values that lie in one matrix are taken apart; latent attention's are not
            (megatron-core 0.16.1 optimizer/muon.py: linear_qkv.weight alone).
    """
    cut = {parameter.name: _CUT.get(op.joint.kind) for op in layer.operators if op.joint is not None
           for parameter in op.parameters}
    found = {}
    for parameter in layer.parameters:
        if takes(layer, parameter):
            *batch, rows, cols = parameter.shape
            parts, groups = _parts(layer, parameter) if splits_qkv else ((), 1)
            found[parameter.name] = Matrix(rows, cols, batch[0] if batch else 1, parts, groups,
                                           cut.get(parameter.name), parameter.routed)
    return found


def _parts(layer: Layer, parameter: Parameter) -> tuple[tuple[int, ...], int]:
    """Rows of queries, keys and values of one key head, and how many such heads there are."""
    style: Style | None = layer.program.style if layer.program is not None else None
    if style is None or not parameter.name.endswith("linear_qkv.weight"):
        return (), 1
    parts = (style.heads // style.kv_heads * style.head_dim, style.head_dim, style.head_dim)
    return (parts, style.kv_heads) if sum(parts) * style.kv_heads == parameter.shape[0] else ((), 1)


def newton_schulz_flops(matrix: Matrix, steps: int) -> float:
    """FLOPs of the products, by which matrices are dealt out evenly: 4 s²·l + 2 s³ an iteration."""
    sides = [sorted((rows * matrix.groups, matrix.cols)) for rows in matrix.parts or (matrix.rows,)]
    return steps * matrix.batch * sum(4.0 * small * small * large + 2.0 * small**3 for small, large in sides)
