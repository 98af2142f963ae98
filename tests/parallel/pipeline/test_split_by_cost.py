"""Stages that get blocks by cost: nanotron's rule, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.parallel import lower
from sim.parallel.pipeline.stages import by_cost
from sim.scenario import resolve


def test_a_stage_takes_blocks_until_its_share_is_exceeded() -> None:
    """16 blocks and a head worth 4: shares of 10. At the tenth block the sum is the share, not more: an eleventh."""
    assert by_cost(16, 2, 1, 4) == [11, 5]
    assert by_cost(16, 2, 10, 39) == [10, 6]  # a share of 99.5 is exceeded by the tenth
    assert by_cost(80, 16, 973, 1074) == [6, *[5] * 13, 6, 3]
    assert by_cost(4, 8, 1, 1) is None  # five blocks and head would fill five of eight stages


@given(st.integers(1, 200), st.integers(1, 16), st.integers(1, 1000), st.integers(0, 3000))
def test_no_stage_but_the_last_is_more_than_a_block_above_its_share(blocks: int, stages: int, block: int,
                                                                    head: int) -> None:
    found = by_cost(blocks, stages, block, head)
    if found is not None:
        assert (sum(found), len(found)) == (blocks, stages)
        share, done = (blocks * block + head) / stages, 0
        for stage, count in enumerate(found[:-1], 1):
            done += count * block
            assert share * stage < done <= share * stage + block


def job(**parallel: Any) -> dict[str, Any]:
    return {"name": "x", "cluster": {"topology": "p5", "nodes": 2},
            "model": {"kind": "decoder", "positions": "rotary", "norm": "rmsnorm", "bias": False, "gated_mlp": True,
                      "layers": 16, "hidden": 2048, "heads": 32, "ffn": 8192, "vocab": 131072,
                      "tied_embeddings": False},
            "training": {"micro_batch": 1, "global_batch": 64, "sequence": 1024, "precision": "megatron-bf16"},
            "parallel": {"strategy": "zero1", "pipeline": 2, "schedule": "1f1b", **parallel},
            "software": {"framework": "nanotron", "year": 2025}}


@pytest.mark.parametrize(("parallel", "first"), [
    ({}, 11), ({"split": [8, 8]}, 8), ({"split_slots": {"head": 2}}, 9), ({"pipeline": 1}, 16)])
def test_nanotron_splits_so_unless_the_scenario_says_how(parallel: dict[str, Any], first: int) -> None:
    layers = lower(resolve(job(**parallel))).layers_of(0)
    assert sum("block" in name for name in layers) == first
