"""Layouts whose context ranks exchange tokens for heads: which are tried, and bounds below what is simulated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sizing_once import Once

from sim.parallel import lower
from sim.scenario import Scenario, resolve
from sim.sizing import Choice, size
from sim.sizing.bounds.steps import bounds
from sim.sizing.space.base import alone, following
from sim.sizing.space.layouts import build_space

GPUS = 16


def asked(framework: str, inner: int | None = None, **model: Any) -> Scenario:
    """A decoder of 16 heads, and of keys and values four."""
    return resolve({
        "name": "s", "cluster": {"topology": "dgx-h100", "nodes": 2},
        "model": {"kind": "decoder", "layers": 4, "hidden": 1024, "heads": 16, "kv_heads": 4, "vocab": 4096,
                  "positions": "rotary", "norm": "rmsnorm", "gated_mlp": True, "bias": False, "dropout": False,
                  "tied_embeddings": False, **model},
        "training": {"micro_batch": 1, "global_batch": 32, "sequence": 2048, "attention": "flash",
                     "precision": "megatron-bf16" if framework == "megatron" else "mixed-bf16"},
        "parallel": {"context_exchange": "all-to-all", "context_all_to_all": inner},
        "software": {"framework": framework, "year": 2025}}, "s")


@pytest.mark.parametrize(("framework", "inner", "model"), [
    ("megatron", None, {}), ("megatron", 2, {}), ("pytorch", None, {}), ("deepspeed", None, {}), ("ideal", 4, {}),
    ("megatron", None, {"moe": {"experts": 8, "top_k": 2, "expert_ffn": 512}})])
def test_bounds_are_below_what_is_simulated(once: Once, framework: str, inner: int | None,
                                            model: dict[str, Any]) -> None:
    base = alone(asked(framework, inner, **model), None)
    choice = Choice([GPUS], micro_batch=[1, 2], pipeline=[1, 2], strategies=["zero1", "fsdp", "zero3"],
                    context=[2, 4, 8], recompute=["none", "full", "selective"], partial_recompute=False)
    space, plain = build_space([base], choice), following(base)
    cut = np.flatnonzero(space.columns["context"] > 1)
    below = bounds(space)
    for row in np.random.default_rng(1).choice(cut, 8, replace=False).tolist():
        one = once(("", plain, space.sets(row), GPUS))
        assert one.outcome == "ok", one.reason
        assert below.time_s[row] <= one.step_time_s
        assert below.memory_bytes[row] <= one.device_used_bytes


@pytest.mark.parametrize(("framework", "inner", "expected"), [
    ("megatron", None, {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1), (8, 1), (16, 1)}),  # four heads of keys
    ("megatron", 2, {(1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (2, 1), (2, 2), (2, 4), (2, 8), (4, 1), (8, 1), (16, 1)}),
    ("pytorch", None, {(t, c) for t in (1, 2, 4, 8, 16) for c in (1, 2, 4, 8, 16) if t * c <= 16})])
def test_heads_that_ranks_do_not_share_out_evenly_are_no_layout(framework: str, inner: int | None,
                                                                expected: set[tuple[int, int]]) -> None:
    space = build_space([alone(asked(framework, inner), None)], Choice([GPUS], pipeline=[1], micro_batch=[1]))
    tensor, context = (space.columns[name].tolist() for name in ("tensor", "context"))
    assert set(zip(tensor, context, strict=True)) == expected


def test_the_best_of_a_search_can_be_run() -> None:
    found = size(asked("megatron"), Choice([GPUS], context=[4], pipeline=[1], micro_batch=[1], recompute=["none"],
                                           partial_recompute=False))
    assert found.proven
    best = resolve(asked("megatron").model_dump(exclude_unset=True), "s", found.best[0]["set"])
    assert lower(best).job and best.head_ranks == 4
