"""Searches on part of a node, and what sizing refuses."""

from __future__ import annotations

from typing import Any

import pytest

from sim.errors import UserError
from sim.scenario import Scenario, resolve
from sim.sizing import Choice, size
from sim.sizing.modes import bases_of, listed_space
from sim.sizing.space.base import alone
from sim.sizing.space.layouts import build_space, with_parts
from sim.sizing.wish import Wish

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


@pytest.mark.parametrize(("cluster", "gpus", "nodes"), [
    ({"gpus_per_node": 4}, [4, 8], {(4, 4, 1), (8, 8, 1)}),  # a part of one node: more of it, then whole ones
    ({"gpus_per_node": 4}, [4], {(4, 4, 1)}), ({"gpus_per_node": 4}, [12], {(12, 4, 3)}),  # no whole nodes
    ({"gpus_per_node": 4, "nodes": 2}, [8], {(8, 4, 2)})])  # nodes of which four are used
def test_a_file_with_part_of_one_node_is_searched_on_whole_ones(
        cluster: dict[str, Any], gpus: list[int], nodes: set[tuple[int, int, int]]) -> None:
    of = scenario(cluster={"topology": "dgx-a100-80g", **cluster}, training={**PLAIN["training"], "global_batch": 48})
    choice = Choice(gpus, strategies=["ddp"], recompute=["none"], tensor=[1], context=[1], pipeline=[1],
                    micro_batch=[1])
    space, _, _ = listed_space(of, bases_of(of, [None], choice, ())[0], choice, Wish(), (), False)
    assert {(int(space.gpus[row]), space.clusters[space.columns["cluster"][row]].cluster.gpus_per_node,
             space.sets(row)["cluster.nodes"]) for row in range(len(space))} == nodes


def test_requests_are_searched_on_whole_nodes_too_and_the_search_says_so() -> None:
    request = {"inference": {"prompt": 64, "generate": 4, "batch": 1}}
    of = resolve({**PLAIN, "cluster": {"topology": "dgx-a100-80g", "gpus_per_node": 2},
                  "training": {"precision": "pure-bf16", "mode": request}, "parallel": {"tensor": 2}}, "small")
    found = size(of, Choice([2, 4], tensor=[2, 4], pipeline=[1], batch=[1]))
    assert {(row["gpus"], row["set"].get("cluster.gpus_per_node")) for row in found.rows} == {(2, 2), (4, 4)}
    assert found.hints == [
        "cluster: the file takes 2 of the 8 GPUs of one dgx-a100-80g; the search has whole ones"]


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
