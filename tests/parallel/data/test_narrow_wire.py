"""Megatron's fp8 parameters on the wire, its gradient buffers of half width and its experts' launches, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sim.parallel import Lowered, lower
from sim.report.numbers.traffic import traffic_totals
from sim.scenario import resolve

HIDDEN, FFN, VOCAB = 1024, 4096, 32768


def lowered(strategy: str, compute: str = "fp8", year: int = 2025, gradients: str = "fp32", **changes: Any) -> Lowered:
    return lower(resolve({
        "name": "x", "cluster": {"topology": changes.pop("topology", "dgx-h100"), "nodes": 1},
        "model": {"kind": "decoder", "layers": 2, "hidden": HIDDEN, "heads": 8, "ffn": FFN, "gated_mlp": True,
                  "norm": "rmsnorm", "positions": "rotary", "bias": False, "dropout": False, "vocab": VOCAB,
                  "tied_embeddings": False, **changes.pop("model", {})},
        "training": {"micro_batch": 1, "global_batch": 16, "sequence": 1024, "optimizer": "adam", "attention": "flash",
                     "precision": {"compute": compute, "parameters": "bf16", "master": "fp32", "gradients": gradients,
                                   "optimizer": "fp32", "gather": "bf16", "reduce": gradients}},
        "parallel": {"strategy": strategy, **changes.pop("parallel", {})},
        "software": {"framework": changes.pop("framework", "megatron"), "year": year}}))


def moved(low: Lowered, kind: str) -> float:
    return sum(row["bytes"] for row in traffic_totals(low.job, 0) if row["kind"] == kind)


@pytest.mark.parametrize("strategy", ["fsdp", "zero1"])
def test_fp8_parameters_are_gathered_in_fp8(strategy: str) -> None:
    narrow, wide = (lowered(strategy, compute) for compute in ("fp8", "bf16"))
    kept = 2 * 2 * VOCAB * HIDDEN * (2 if strategy == "fsdp" else 1)  # embedding and head stay in bf16; micro-steps
    expected = kept + (moved(wide, "all_gather") - kept) / 2
    assert moved(narrow, "all_gather") == pytest.approx(expected, rel=1e-3)
    assert moved(narrow, "reduce_scatter") == pytest.approx(moved(wide, "reduce_scatter"), rel=1e-3)


def test_block_scaled_and_recast_parameters_are_gathered_wide() -> None:
    on_b200 = [moved(lowered("zero1", compute, topology="hgx-b200"), "all_gather") for compute in ("mxfp8", "bf16")]
    assert on_b200[0] == pytest.approx(on_b200[1], rel=1e-3)
    pytorch = [moved(lowered("fsdp", compute, framework="pytorch"), "all_gather") for compute in ("fp8", "bf16")]
    assert pytorch[0] == pytest.approx(pytorch[1], rel=1e-3)


def kernels(low: Lowered, variant: str) -> list[Any]:
    return [k for op in low.architecture.stack[1].operators for k in (*op.forward, *op.backward)
            if variant in (k.variant, k.op)]


def test_half_buffers_are_added_to_by_products_from_2023_on() -> None:
    """A product that adds reads its output too: 2 bytes more of each weight, in the place of a pass of its own."""
    weights = (4 * HIDDEN + 3 * FFN) * HIDDEN
    now, before = (lowered("zero1", "bf16", year, "bf16") for year in (2023, 2022))
    more = sum(k.bytes for k in kernels(now, "nt")) - sum(k.bytes for k in kernels(before, "nt"))
    assert more == 2 * weights
    assert not kernels(now, "main_grad_add") and not kernels(before, "main_grad_add")


def test_every_expert_s_product_is_launched() -> None:
    moe = {"moe": {"experts": 8, "top_k": 2, "expert_ffn": 1024, "shared_experts": 0, "every": 1}}
    looped, grouped = (lowered("zero1", "fp8", framework=framework, model=moe) for framework in ("megatron", "pytorch"))
    experts = [k for k in kernels(looped, "gemm") if k.shape[0] == 8]
    assert experts and all(k.launches == 8 for k in experts)
    assert all(k.launches == 1 for k in kernels(grouped, "gemm"))
    assert max(k.launches for k in kernels(looped, "quantise")) == 2 * 8  # the maximum and the cast of each
    delayed = lowered("zero1", "fp8", 2024, model=moe)
    assert max(k.launches for k in kernels(delayed, "quantise")) == 1  # one kernel for all with scales of earlier steps
