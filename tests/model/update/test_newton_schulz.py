"""Muon's update of one matrix: what runs, what it holds, held against the optimizers' own code on fake tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sim.model.update.muon import Matrix, Recipe, newton_schulz_flops
from sim.model.update.newton_schulz import Call, muon_update, owned_shard
from sim.work import Kernel

PEAKS: dict[str, list[list[Any]]] = yaml.safe_load(
    (Path(__file__).parents[1] / "data" / "muon_peaks.yaml").read_text(encoding="utf-8"))
TORCH, EMERGING = Recipe("torch", 5, True), Recipe("emerging", 5, False)


def products(row: tuple[Kernel | Call, ...]) -> list[Kernel]:
    return [item for item in row if isinstance(item, Kernel) and item.op == "gemm"]


@pytest.mark.parametrize(("rows", "cols", "dtype", "steps", "nesterov", "peak"), PEAKS["torch"])
def test_torch_holds_as_much(rows: int, cols: int, dtype: str, steps: int, nesterov: bool, peak: int) -> None:
    recipe = Recipe("torch", steps, nesterov, parameters=dtype, gradients=dtype, states=dtype)
    assert muon_update(Matrix(rows, cols), recipe).peak_bytes == peak


@pytest.mark.parametrize(("rows", "cols", "parts", "mode", "cut", "nesterov", "peak"), PEAKS["emerging"])
def test_megatron_holds_as_much(rows: int, cols: int, parts: list[int], mode: str, cut: int | None, nesterov: bool,
                                peak: int) -> None:
    matrix = Matrix(rows, cols, parts=tuple(parts), groups=rows // sum(parts) if parts else 1, cut=cut)
    assert muon_update(matrix, Recipe("emerging", 5, nesterov, 4, mode)).peak_bytes == peak


@pytest.mark.parametrize(("rows", "cols"), [(1024, 4096), (4096, 1024)])
def test_the_smaller_side_is_squared(rows: int, cols: int) -> None:
    found = products(muon_update(Matrix(rows, cols), TORCH).row)
    assert [kernel.shape for kernel in found] == [(1, 1024, 1024, 4096), (1, 1024, 1024, 1024),
                                                  (1, 1024, 4096, 1024)] * 5
    assert [kernel.variant for kernel in found[:4]] == ["nt" if rows > cols else "tn", "nn", "nn", "tn"]
    assert {kernel.dtype for kernel in found} == {"bf16"} and {kernel.category for kernel in found} == {"optimizer"}


@given(rows=st.integers(1, 3000), cols=st.integers(1, 3000), steps=st.integers(1, 8), batch=st.integers(1, 3))
def test_flops_are_the_closed_form(rows: int, cols: int, steps: int, batch: int) -> None:
    small, large = sorted((rows, cols))
    matrix, recipe = Matrix(rows, cols, batch), Recipe("torch", steps, True)
    told = sum(kernel.flops for kernel in products(muon_update(matrix, recipe).row))
    assert told == newton_schulz_flops(matrix, steps) == steps * batch * (4 * small**2 * large + 2 * small**3)


def test_bytes_of_torch_by_hand() -> None:
    """fp32, one iteration, 4 x 8 elements: momentum 12 + nesterov 12 + cast 6 + norm 2 + division 4, weight decay 8 and
    step 8 + 2 bytes an element; a scalar clamped; of the iteration the copies and the products' own."""
    found = muon_update(Matrix(4, 8), Recipe("torch", 1, True))
    passes = 32 * (12 + 12 + 6 + 2 + 4 + 8 + 10) + 4
    copies = 4 * (16 + 32)
    gram, square, update = 2 * (32 + 32 + 16), 2 * (16 + 16 + 2 * 16), 2 * (16 + 32 + 2 * 32)
    assert sum(kernel.bytes for kernel in found.kernels) == passes + copies + gram + square + update
    assert sum(kernel.launches for kernel in found.kernels) == 6 + 5 + 2


def test_parts_of_one_matrix_are_orthogonalised_apart() -> None:
    """Four key heads of three queries: 512 x 4 rows of queries, 128 x 4 of keys and of values."""
    found = products(muon_update(Matrix(3072, 1024, parts=(512, 128, 128), groups=4), EMERGING).row)
    assert [kernel.shape[1] for kernel in found[::3]] == [1024] * 5 + [512] * 10
    assert sum(kernel.flops for kernel in found) == newton_schulz_flops(
        Matrix(3072, 1024, parts=(512, 128, 128), groups=4), 5)


def test_tensor_ranks_gather_or_add_up() -> None:
    """A column-cut slice of 256 of 1,024 rows by 512 columns, over four ranks."""
    slice_ = Matrix(256, 512, cut=0)

    def calls(mode: str) -> list[Call]:
        row = muon_update(slice_, Recipe("emerging", 5, False, 4, mode)).row
        return [item for item in row if isinstance(item, Call)]
    assert calls("blockwise") == []
    assert calls("duplicated") == [Call("all_gather", 1024 * 512 * 4, "fp32")]
    assert calls("distributed") == [Call("all_reduce", 4, "fp32"), *[Call("all_reduce", 512 * 512 * 2, "bf16")] * 5]
    whole = products(muon_update(slice_, Recipe("emerging", 5, False, 4, "duplicated")).row)
    assert [kernel.shape for kernel in whole[:3]] == [(1, 512, 512, 1024), (1, 512, 512, 512), (1, 512, 1024, 512)]
    shared = products(muon_update(slice_, Recipe("emerging", 5, False, 4, "distributed")).row)
    assert [kernel.shape for kernel in shared[:3]] == [(1, 512, 512, 256), (1, 512, 512, 512), (1, 512, 256, 512)]


def test_a_matrix_that_is_not_cut_asks_nobody() -> None:
    for mode in ("duplicated", "distributed"):
        row = muon_update(Matrix(256, 512), Recipe("emerging", 5, False, 4, mode)).row
        assert row == muon_update(Matrix(256, 512), EMERGING).row


def test_owner_and_shards_share_the_work() -> None:
    """What DistMuon runs on shards and at owners is torch's update and the copies between them."""
    recipe = Recipe("owned", 5, True)
    before, behind = owned_shard(64 * 128, recipe)
    at_owner = muon_update(Matrix(64, 128), recipe)
    assert products(at_owner.row) == products(muon_update(Matrix(64, 128), TORCH).row)
    assert [k.variant for k in before] == ["momentum", "nesterov", "packed"]
    assert [k.variant for k in behind] == ["unpacked", "weight decay", "step"]
