"""Offload as an axis of the search: only what techniques have code for, and the answer of simulating everything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sizing_once import Once

from sim.errors import UserError
from sim.scenario import resolve
from sim.scenario.dump import dump
from sim.scenario.fields.schema import Offload
from sim.sizing import Choice, size
from sim.sizing.bounds.steps import bounds
from sim.sizing.space.base import alone, following
from sim.sizing.space.layouts import STRATEGIES, Space, build_space
from sim.sizing.space.offloads import OFFLOADS, narrowed, variants
from sim.sizing.words.size import lines as _size_lines

CHOICE = Choice([8], context=[1], tensor=[1, 2], micro_batch=[1, 2], recompute=["none", "full"],
                partial_recompute=False, schedules=["1f1b"], pipeline=[1, 2])


def scenario(framework: str, **model: Any) -> Any:
    return resolve({"name": "small", "cluster": {"topology": "dgx-a100-80g"}, "model": {"preset": "gpt2"} | model,
                    "training": {"micro_batch": 1, "global_batch": 16, "sequence": 512, "precision":
                                 "mixed-bf16" if framework == "deepspeed" else "fsdp-bf16"},
                    "software": {"framework": framework, "year": 2023}}, "small")


def spread(framework: str, **model: Any) -> Space:
    return build_space(variants([alone(scenario(framework, **model), None)], list(OFFLOADS)), CHOICE, narrowed)


@pytest.mark.whole
@pytest.mark.parametrize("framework", ["pytorch", "deepspeed"])
def test_the_answer_is_that_of_simulating_everything(framework: str, once: Once) -> None:
    space = spread(framework, layers=4)
    plain = [following(one) for one in space.clusters]
    outcomes = [once(("", plain[space.columns["cluster"][row]], space.sets(row), 8)) for row in range(len(space))]
    assert {one.outcome for one in outcomes} == {"ok"}  # nothing that a technique refuses
    every = sorted((one.step_time_s, row) for row, one in enumerate(outcomes) if one.fits)
    found = size(scenario(framework, layers=4), CHOICE, offload=list(OFFLOADS), top=5)
    assert found.proven and found.covered == len(space)
    assert [row["set"] for row in found.best] == [space.sets(row) for _, row in every[:5]]
    below = bounds(space)
    assert all(below.time_s[row] <= one.step_time_s and below.memory_bytes[row] <= one.device_used_bytes
               for row, one in enumerate(outcomes))


def test_each_technique_keeps_outside_what_it_has_code_for() -> None:
    for framework, states, optimizer in (("pytorch", {"zero2", "fsdp"}, set()), ("deepspeed", {"zero3", "fsdp"},
                                                                        {"zero1", "zero2", "zero3"})):
        space = spread(framework, layers=4)
        places = {name: {STRATEGIES[s] for s, c in zip(space.columns["strategy"], space.columns["cluster"],
                                                      strict=True) if c == number}
                  for number, name in enumerate(OFFLOADS)}
        assert places["states"] == places["everything"] == states
        assert places["optimizer"] == optimizer
        assert "ddp" in places["activations"]
        outside = space.columns["cluster"] > 0
        assert (space.columns["pipeline"][outside] == 1).all() and (space.columns["pipeline"] == 2).any()


def test_one_place_says_nothing_of_it_and_a_wrong_one_is_named() -> None:
    base = alone(scenario("pytorch"), None)
    assert not any("offload" in name for name in build_space([base], CHOICE, narrowed).sets(0))
    with pytest.raises(UserError) as caught:
        variants([base], ["state"])
    assert caught.value.faults[0].field == "--offload" and "states" in str(caught.value)


def test_what_a_framework_keeps_nowhere_else_is_refused_by_name() -> None:
    with pytest.raises(UserError) as caught:
        size(scenario("pytorch"), CHOICE, offload=["optimizer"])
    assert caught.value.faults[0].field == "--offload" and "optimizer" in str(caught.value)


def test_a_place_without_code_in_a_list_is_named() -> None:
    """FSDP has no optimizer on the CPU of its own: `states` is tried, `optimizer` is not, and both are said."""
    one = Choice([8], context=[1], tensor=[1], micro_batch=[1], recompute=["none"], partial_recompute=False,
                 schedules=["1f1b"], pipeline=[1], strategies=["fsdp"])
    found = size(scenario("pytorch", layers=2), one, offload=["none", "optimizer", "states"], top=1)
    assert found.not_offloaded == found.to_json()["not_offloaded"] == ["optimizer"]
    first = next(_size_lines(found))
    assert first.startswith("not tried: --offload optimizer, which nothing of this framework keeps on the host")
    assert {row["set"]["parallel.offload.optimizer"] for row in found.rows} <= {"none", "cpu"}
    whole = size(scenario("pytorch", layers=2), one, offload=["none", "states"], top=1)
    assert whole.not_offloaded == [] and [row["set"] for row in whole.rows] == [row["set"] for row in found.rows]
    assert not next(_size_lines(whole)).startswith("not tried")


PLACES = [{"activations": "cpu"}, {"optimizer": "cpu"}, {"parameters": "cpu", "optimizer": "cpu"},
          {"parameters": "cpu", "optimizer": "cpu", "activations": "cpu"}, {"activations": "nvme"},
          {"optimizer": "nvme"}, {"parameters": "cpu", "optimizer": "nvme", "activations": "nvme"}]


def kept(framework: str, year: int, **changes: Any) -> Space:
    """A space of every place that the framework has."""
    base = alone(resolve(dump(scenario(framework, layers=4)) | changes, "small", {"software.year": year}), None)
    places = PLACES if framework == "deepspeed" else PLACES[:4]
    bases = [base.model_copy(update={"parallel": base.parallel.model_copy(update={
        "offload": Offload.model_validate(place)})}) for place in places]
    choice = Choice([8], context=[1], tensor=[1, 2], micro_batch=[1, 2], recompute=["none", "full"],
                    partial_recompute=True, schedules=["1f1b"], pipeline=[1])
    return build_space(bases, choice, narrowed)


@pytest.mark.parametrize(("framework", "year"), [("pytorch", 2023), ("pytorch", 2025), ("deepspeed", 2021),
                                                 ("deepspeed", 2024)])
def test_bounds_of_what_is_kept_outside_hold(framework: str, year: int, once: Once) -> None:
    """Seconds of copies and of the optimizer on the CPU, bytes of what stays: never more than simulated."""
    space = kept(framework, year)
    below, plain = bounds(space), [following(one) for one in space.clusters]
    held = 0
    for row in np.random.default_rng(year).permutation(len(space))[:60].tolist():
        one = once(("", plain[space.columns["cluster"][row]], space.sets(row), 8))
        held += one.outcome == "ok"
        if one.outcome == "refused":  # disks are for ZeRO-3
            continue
        assert below.time_s[row] <= one.step_time_s, space.sets(row)
        assert below.memory_bytes[row] <= one.device_used_bytes, space.sets(row)
    assert held >= 30


def test_bounds_count_the_optimizer_on_the_cpu_and_what_does_not_leave(once: Once) -> None:
    """13B on 8 A100-40GB. Adam on the CPU passes 4 + 12 + 12 + 2 bytes and more of 1.6e9 parameters through an eighth
    of a host's memory; where only activations leave, DDP's 16 bytes of 13e9 parameters do not fit."""
    of = resolve({"name": "13b", "cluster": {"topology": "p4d"}, "model": {"preset": "gpt3-13b"},
                  "training": {"micro_batch": 1, "global_batch": 8, "sequence": 512, "precision": "mixed-bf16"},
                  "software": {"framework": "deepspeed", "year": 2023}}, "13b")
    base = alone(of, None)
    choice = Choice([8], context=[1], tensor=[1], micro_batch=[1], recompute=["full"], partial_recompute=False,
                    schedules=["1f1b"], pipeline=[1], strategies=["ddp", "zero3"])
    space = build_space(variants([base], ["activations", "states"]), choice, narrowed)
    names = [STRATEGIES[number] for number in space.columns["strategy"]]
    outside = [space.sets(row)["parallel.offload.optimizer"] == "cpu" for row in range(len(space))]
    below = bounds(space)
    ddp, zero3 = names.index("ddp"), next(i for i, n in enumerate(names) if n == "zero3" and outside[i])
    assert below.memory_bytes[ddp] > below.capacity_bytes[ddp]
    assert below.memory_bytes[zero3] < below.capacity_bytes[zero3]
    one = once(("", following(space.clusters[space.columns["cluster"][zero3]]), space.sets(zero3), 8))
    assert 0.6 * one.step_time_s < below.time_s[zero3] <= one.step_time_s


@pytest.mark.parametrize(("framework", "place", "strategies", "pipeline"), [
    ("pytorch", {"activations": "cpu"}, ["fsdp", "zero2", "ddp"], 1), ("nanotron", {"activations": "cpu"}, ["ddp"], 1),
    ("megatron", {"optimizer": "cpu"}, ["zero1"], 2), ("megatron", {"optimizer": "cpu"}, ["zero1"], 1),
    ("megatron", {"optimizer": "cpu", "optimizer_fraction": 0.5}, ["zero1"], 1),
    ("megatron", {"parameters": "cpu", "optimizer": "cpu"}, ["fsdp"], 1)])
def test_bounds_hold_where_copies_hide_a_slow_network_and_of_megatrons_part(
        framework: str, place: dict[str, Any], strategies: list[str], pipeline: int, once: Once) -> None:
    """Collectives run beside saved tensors on their way; Megatron copies gradients and updates a part of them only."""
    base = alone(resolve({
        "name": "small", "cluster": {"topology": "dgx-a100-80g", "inter_gbps_per_node": 50},
        "model": {"preset": "gpt2", "layers": 6}, "parallel": {"strategy": "ddp", "offload": place},
        "training": {"micro_batch": 1, "global_batch": 32, "sequence": 512, "precision": "amp-bf16"},
        "software": {"framework": framework, "year": 2025}}, "small"), None)
    space = build_space([base], Choice([16], context=[1], tensor=[1], micro_batch=[1, 2], recompute=["none", "full"],
                                       partial_recompute=False, schedules=["1f1b", "interleaved"], pipeline=[pipeline],
                                       strategies=strategies))
    below, plain = bounds(space), following(base)
    outcomes = [once(("", plain, space.sets(row), 16)) for row in range(len(space))]
    assert {one.outcome for one in outcomes} == {"ok"} and len(space) > 1
    shares = [below.time_s[row] / one.step_time_s for row, one in enumerate(outcomes)]
    assert max(shares) <= 1 and max(shares) > (0.35 if pipeline == 1 else 0.15)
