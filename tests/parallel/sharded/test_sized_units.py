"""FSDP 1 wrapped by size: large linear layers are units of their own."""

from __future__ import annotations

from typing import Any

import pytest

import sim
from sim.memory.ledger import peak
from sim.parallel import Lowered, lower
from sim.scenario import Scenario, resolve

HIDDEN, LAYERS = 1024, 3
LINEAR = HIDDEN * HIDDEN  # the smallest product of a block is that large


def scenario(wrap: str | int, recompute: str = "full", **changes: Any) -> Scenario:
    return resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": 1},
        "model": {"kind": "decoder", "layers": LAYERS, "hidden": HIDDEN, "heads": 8, "vocab": 8192, "bias": False},
        "training": {"global_batch": 16, "micro_batch": 1, "sequence": 512, "precision": "fsdp-bf16",
                     "recompute": recompute},
        "parallel": {"strategy": "fsdp", "wrap": wrap}, "software": {"fsdp": 1, "year": 2022}}, "x", changes)


def moved(lowered: Lowered, kind: str) -> int:
    """Bytes that collectives of a kind bring together in one micro-step."""
    program = lowered.job.programs[0]
    section = program.sections[0]
    return sum(program.collectives[payload].size_bytes for task, payload in enumerate(section.payload)
               if program.labels[section.label[task]].name == kind)


@pytest.mark.parametrize(("recompute", "gathers"), [("none", 2), ("full", 3)])
def test_each_part_is_gathered_once_a_direction_and_once_for_recomputation(recompute: str, gathers: int) -> None:
    whole, cut = lower(scenario("block", recompute)), lower(scenario(LINEAR, recompute))
    blocks = sum(p.numel for layer in whole.architecture.stack if layer.kind == "block" for p in layer.parameters)
    rest = whole.architecture.parameters - blocks
    assert moved(whole, "all_gather") == pytest.approx(2 * (2 * blocks + rest), rel=1e-3)
    assert moved(cut, "all_gather") == pytest.approx(2 * (gathers * blocks + rest), rel=1e-3)
    assert moved(cut, "reduce_scatter") == pytest.approx(moved(whole, "reduce_scatter"), rel=1e-3)


def test_a_single_large_layer_is_whole_at_a_time() -> None:
    whole, cut = (peak(lower(scenario(wrap)).job.programs[0]) for wrap in ("block", LINEAR))
    assert cut.steady
    assert cut.category_peaks["gathered_parameters"] < whole.category_peaks["gathered_parameters"]
    block = 12 * HIDDEN * HIDDEN * 2
    largest = 4 * HIDDEN * HIDDEN * 2
    root = whole.category_peaks["gathered_parameters"] - 2 * block
    assert cut.category_peaks["gathered_parameters"] <= root + 3 * largest + 10**5
    assert cut.category_peaks["gradients"] < whole.category_peaks["gradients"]


def test_states_do_not_depend_on_how_parameters_are_wrapped() -> None:
    for category in ("parameters", "optimizer_states"):
        sizes = [sum(size for _, size, kind in lower(scenario(wrap)).job.programs[0].resident if kind == category)
                 for wrap in ("block", LINEAR)]
        assert sizes[0] == pytest.approx(sizes[1], rel=1e-3)


def test_more_gathers_cost_time_and_the_result_is_whole() -> None:
    slow = {"cluster.nodes": 4, "cluster.inter_gbps_per_node": 10, "training.global_batch": 64}
    whole, cut = (sim.run(scenario(wrap, **slow)) for wrap in ("block", LINEAR))
    assert cut.step_time_s > 1.1 * whole.step_time_s
    assert cut.memory.use.steady


def test_blocks_without_large_layers_stay_whole() -> None:
    assert lower(scenario(8 * LINEAR)).job.programs[0].sections[0].name
    assert moved(lower(scenario(8 * LINEAR)), "all_gather") == moved(lower(scenario("block")), "all_gather")
