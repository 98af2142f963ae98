"""Searches on part of a node, and what sizing refuses."""

from __future__ import annotations

from typing import Any

import pytest

from sim.errors import UserError
from sim.scenario import Scenario, resolve
from sim.sizing import Choice, size
from sim.sizing.base import alone
from sim.sizing.space import build_space, with_parts

PLAIN: dict[str, Any] = {
    "name": "small", "cluster": {"topology": "dgx-a100-80g"}, "model": {"preset": "gpt2"},
    "training": {"micro_batch": 1, "global_batch": 16, "sequence": 1024}}


def scenario(**changes: Any) -> Scenario:
    return resolve({**PLAIN, **changes}, "small")


def test_counts_below_a_node_use_its_first_gpus() -> None:
    choice = Choice([2, 4, 8, 16])
    space = build_space(with_parts([alone(scenario(), None)], choice), choice)
    seen = {(int(gpus), space.sets(row)["cluster.nodes"], space.sets(row)["cluster.gpus_per_node"])
            for row, gpus in enumerate(space.gpus)}
    assert seen == {(2, 1, 2), (4, 1, 4), (8, 1, 8), (16, 2, 8)}  # never two nodes of four of eight


def test_whole_nodes_say_nothing_of_gpus_per_node() -> None:
    choice = Choice([8, 16])
    space = build_space(with_parts([alone(scenario(), None)], choice), choice)
    assert "cluster.gpus_per_node" not in space.sets(0)


def test_a_part_of_a_named_cluster_is_found() -> None:
    found = size(scenario(), Choice([2], strategies=["ddp"], recompute=["none"], partial_recompute=False, tensor=[1],
                                    context=[1], pipeline=[1], micro_batch=[1]), clusters=["dgx-h100"])
    assert found.proven and found.best[0]["gpus"] == 2
    assert found.best[0]["set"]["cluster.gpus_per_node"] == 2


def test_a_count_that_fills_no_node_says_so() -> None:
    with pytest.raises(UserError, match=r"12 GPUs are neither part of a node nor whole nodes of 8.*multiple of 8"):
        size(scenario(), Choice([12]))


@pytest.mark.parametrize(("training", "said"), [
    ({"chunked_loss": True, "finetune": {"method": "lora", "targets": ["head"]}}, "which has no autocast"),
    ({"precision": "mxfp8"}, "has no tensor cores for mxfp8")])
def test_what_no_layout_makes_possible_is_refused_before_the_search(training: dict[str, Any], said: str) -> None:
    cross = {"kind": "encoder-decoder", "layers": 2, "hidden": 64, "heads": 2, "vocab": 128}
    with pytest.raises(UserError, match=said):
        size(scenario(model=cross, training={**PLAIN["training"], **training}), Choice([4]))
