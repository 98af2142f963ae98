"""Sizes of gradient buckets that a scenario asks for, stack by stack."""

from __future__ import annotations

from typing import Any

import pytest

from sim.errors import UserError
from sim.parallel import Lowered, lower
from sim.parallel.data.buckets import bucket_elements
from sim.report.numbers.traffic import traffic_totals
from sim.scenario import resolve

MIB = 2**20


def lowered(framework: str, precision: str, **parallel: Any) -> Lowered:
    return lower(resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": 2},
        "model": {"kind": "decoder", "layers": 8, "hidden": 1024, "heads": 8, "vocab": 32768, "tied_embeddings": True},
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 1024, "precision": precision},
        "parallel": parallel, "software": {"framework": framework, "year": 2024}}))


def reductions(found: Lowered) -> list[int]:
    """How many calls reduce gradients, and the bytes they take together."""
    rows = [row for row in traffic_totals(found.job) if row["kind"] in ("reduce_scatter", "all_reduce")
            and row["bytes"] > MIB]
    return [sum(row["count"] for row in rows), sum(row["bytes"] for row in rows)]


@pytest.mark.parametrize(("framework", "precision", "strategy"), [
    ("deepspeed", "mixed-fp16", "zero1"), ("deepspeed", "mixed-fp16", "zero2"), ("deepspeed", "mixed-fp16", "zero3"),
    ("megatron", "megatron-bf16", "zero1"), ("megatron", "megatron-bf16", "ddp"), ("pytorch", "amp-bf16", "ddp")])
def test_smaller_buckets_are_more_calls_of_the_same_bytes(framework: str, precision: str, strategy: str) -> None:
    (some, whole), (more, again) = (reductions(lowered(framework, precision, strategy=strategy, bucket_mb=size))
                                    for size in (400, 40))
    assert more > some and whole == again


def test_the_default_leaves_each_stack_its_own_size() -> None:
    """DDP's 25 MiB is the field's default: DeepSpeed keeps reduce_bucket_size, 5e8 elements."""
    plain = resolve({"name": "x", "cluster": {"topology": "dgx-a100-80g"}, "model": {"preset": "gpt2"},
                     "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128},
                     "parallel": {"strategy": "zero2"}, "software": {"framework": "deepspeed"}}).parallel
    assert bucket_elements(plain, 2, 5e8) == 5e8
    assert bucket_elements(plain.model_copy(update={"bucket_mb": 100.0}), 2, 5e8) == 50 * MIB


def test_experts_that_are_not_there_have_nothing_to_hide() -> None:
    with pytest.raises(UserError, match="overlap_experts hides all-to-alls of experts"):
        lowered("megatron", "megatron-bf16", strategy="zero1", overlap_experts="shared")
