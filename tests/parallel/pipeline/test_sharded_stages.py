"""FSDP inside pipeline stages: gathers and reductions of every schedule counted by hand, memory of a stage."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sim
from sim.errors import UserError
from sim.parallel import lower
from sim.parallel.lower import layout_of, sharded_groups
from sim.program import Kind
from sim.report.numbers.traffic import traffic_totals
from sim.scenario import resolve

LAYERS, HIDDEN, SEQUENCE, VOCAB, STAGES, MICRO = 8, 256, 128, 1024, 4, 8
#: Elements of a block: four square products of attention, two four times as wide of the feed-forward part, two norms.
BLOCK = 12 * HIDDEN**2 + 2 * HIDDEN


def scenario(fsdp: int = 2, nodes: int = 2, framework: str = "pytorch", precision: str = "fsdp-bf16",
             strategy: str = "fsdp", model: dict[str, Any] | None = None, **parallel: Any) -> Any:
    """Two blocks a stage, eight micro-batches, four replicas of the stages on two nodes."""
    depth = parallel.setdefault("pipeline", STAGES)
    replicas = 8 * nodes // (depth * parallel.get("tensor", 1))
    return resolve({
        "name": "sharded stages", "cluster": {"topology": "dgx-a100-80g", "nodes": nodes},
        "model": {"kind": "decoder", "layers": LAYERS, "hidden": HIDDEN, "heads": 8, "vocab": VOCAB, "bias": False,
                  "positions": "rotary", "norm": "rmsnorm", "dropout": False, "tied_embeddings": False,
                  **(model or {})},
        "training": {"micro_batch": 1, "global_batch": MICRO * replicas, "sequence": SEQUENCE, "precision": precision,
                     "optimizer": "adamw", "attention": "flash"},
        "parallel": {"strategy": strategy, **parallel},
        "software": {"framework": framework, "year": 2025, "fsdp": fsdp}})


def calls(what: Any, stage: int) -> Counter[tuple[str, str]]:
    """(phase, kind) -> calls among the replicas of a stage in one step; the norm's four bytes left out."""
    found: Counter[tuple[str, str]] = Counter()
    for row in traffic_totals(lower(what).job, stage):
        if row["kind"] in ("all_gather", "reduce_scatter", "all_reduce") and row["bytes"] // row["count"] > 4:
            found[row["phase"], row["kind"]] += row["count"]
    return found


@pytest.mark.parametrize("fsdp", [1, 2])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_kept_parameters_are_gathered_and_reduced_once_a_step(fsdp: int, schedule: str) -> None:
    what = scenario(fsdp, reshard_after_forward=False, schedule=schedule)
    assert calls(what, 1) == {("forward", "all_gather"): 2, ("backward", "reduce_scatter"): 2}
    # first and last stage have a root beside their two blocks: embedding; final norm and head
    for stage in (0, STAGES - 1):
        assert calls(what, stage) == {("forward", "all_gather"): 3, ("backward", "reduce_scatter"): 3}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_fsdp_1_gathers_blocks_for_every_action(schedule: str) -> None:
    what = scenario(1, reshard_after_forward=True, schedule=schedule)
    assert calls(what, 1) == {("forward", "all_gather"): 2 * MICRO, ("backward", "all_gather"): 2 * MICRO,
                              ("backward", "reduce_scatter"): 2}


def test_fsdp_2_keeps_blocks_after_backward() -> None:
    # Stage 1 of 4: forwards 0 1 2 gather; from then on each backward follows a forward that has freed its blocks, and
    # each forward one that has not; the last two backwards follow a backward.
    what = scenario(2, reshard_after_forward=True, schedule="1f1b")
    assert calls(what, 1) == {("forward", "all_gather"): 2 * 3, ("backward", "all_gather"): 2 * 6,
                              ("backward", "reduce_scatter"): 2}
    # gpipe: every forward follows a forward, the first backward too, and nothing is freed after it
    what = scenario(2, reshard_after_forward=True, schedule="gpipe")
    assert calls(what, 1) == {("forward", "all_gather"): 2 * MICRO, ("backward", "all_gather"): 2,
                              ("backward", "reduce_scatter"): 2}


def test_bytes_are_those_of_the_stage() -> None:
    rows = traffic_totals(lower(scenario(reshard_after_forward=False)).job, 1)
    moved = {r["kind"]: r["bytes"] for r in rows if r["kind"] in ("all_gather", "reduce_scatter")}
    assert moved == {"all_gather": 2 * BLOCK * 2, "reduce_scatter": 2 * BLOCK * 2}


def test_hybrid_shards_add_an_all_reduce_of_the_shard() -> None:
    what = scenario(sharding_factor=2, reshard_after_forward=False)
    assert calls(what, 1)["backward", "all_reduce"] == 2
    groups = sharded_groups(what, layout_of(what))
    assert groups["shard"].shape[1] == groups["replicate"].shape[1] == 2


def test_states_are_sharded_over_the_stages_own_replicas() -> None:
    program = lower(scenario()).job.programs[1]
    states = sum(size for _, size, category in program.resident if category == "optimizer_states")
    assert states == pytest.approx(2 * 4 * 2 * BLOCK / 4, rel=1e-2)


def test_kept_parameters_cost_memory_of_the_stage() -> None:
    peaks = [sim.run(scenario(1, reshard_after_forward=reshard)).memory.stages[1].category_peaks[
        "gathered_parameters"] for reshard in (True, False)]
    assert peaks == pytest.approx([BLOCK * 2, 2 * BLOCK * 2], rel=1e-3)


@settings(max_examples=25, deadline=None)
@given(fsdp=st.sampled_from([1, 2]), reshard=st.booleans(), factor=st.sampled_from([1, 2, 4]),
       recompute=st.sampled_from(["none", "full"]),
       schedule=st.sampled_from([("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-2p", 1),
                                 ("zb-v", 2)]))
def test_every_stage_ends_where_it_began(fsdp: int, reshard: bool, factor: int, recompute: str,
                                         schedule: tuple[str, int]) -> None:
    what = scenario(fsdp, reshard_after_forward=reshard, sharding_factor=factor, schedule=schedule[0],
                    virtual_stages=schedule[1])
    what = what.model_copy(update={"training": what.training.model_copy(update={"recompute": recompute})})
    result = sim.run(what)
    assert all(stage.steady for stage in result.memory.stages)
    if recompute == "none":
        whole = scenario(fsdp, pipeline=1)
        assert result.hardware_flops / what.training.global_batch == pytest.approx(
            sim.run(whole).hardware_flops / whole.training.global_batch, rel=1e-6)


def test_parameters_stay_whole_in_a_pipeline_unless_asked() -> None:
    assert scenario(2).parallel.reshard_after_forward is False
    assert scenario(2, reshard_after_forward=True).parallel.reshard_after_forward is True
    assert scenario(1).parallel.reshard_after_forward is True
    assert scenario(2, pipeline=1).parallel.reshard_after_forward is True


def test_zero_2_and_3_without_deepspeed_are_fsdp() -> None:
    assert calls(scenario(2, strategy="zero2", reshard_after_forward=True), 1) == {
        ("forward", "all_gather"): 2, ("backward", "reduce_scatter"): 2}
    assert calls(scenario(1, strategy="zero3"), 1)["forward", "all_gather"] == 2 * MICRO


@pytest.mark.parametrize(("changes", "match"), [
    ({"framework": "deepspeed", "strategy": "zero2"}, "DeepSpeed refuses ZeRO-2 and ZeRO-3 with pipeline"),
    ({"framework": "deepspeed", "strategy": "zero3"}, "DeepSpeed refuses ZeRO-2 and ZeRO-3 with pipeline"),
    ({"schedule": "dualpipe", "virtual_stages": 2}, "in opposite orders"),
    ({"model": {"tied_embeddings": True}}, "tied embeddings"),
    ({"reshard_after_forward": 2}, "resharded to fewer")])
def test_what_stages_exclude_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        lower(scenario(**changes))


def offloaded(stage: int, what: Any) -> tuple[Counter[str], int]:
    """Bytes of a step's copies by direction, and host memory of one rank of a stage."""
    lowered = lower(what)
    program = next(lowered.job.programs[c.program] for c in lowered.job.classes
                   if layout_of(what).coordinate("pipeline")[c.representative] == stage)
    found: Counter[str] = Counter()
    for number in program.section_runs():
        section = program.sections[number]
        for kind, payload in zip(section.kind, section.payload, strict=True):
            if kind == Kind.COPY:
                found[program.copies[payload].direction] += program.copies[payload].size_bytes
    return found, sum(size for _, size, _ in program.host_resident)


@pytest.mark.parametrize(("frees", "gathers"), [(False, 1), (True, 3 + 6)])
def test_offloaded_stages_copy_shards_in_front_of_every_gather(frees: bool, gathers: int) -> None:
    """Stage 1: two blocks over 4 replicas, fp32 both ways, gradients once a step; 16 bytes an element on the host."""
    places = {"offload": {"parameters": "cpu", "optimizer": "cpu"}}
    copies, host = offloaded(1, scenario(reshard_after_forward=frees, **places))
    shard = 2 * BLOCK / 4
    assert copies == {"h2d": 4 * shard * gathers, "d2h": 4 * shard}
    assert 16 * shard <= host <= 1.5 * 16 * shard  # pinned memory comes in powers of two
    assert calls(scenario(reshard_after_forward=frees, **places), 1) == calls(scenario(reshard_after_forward=frees), 1)


@pytest.mark.parametrize("parallel", [
    {}, {"virtual_stages": 2}, {"schedule": "zb-h1"}, {"reshard_after_forward": True}])
def test_offloaded_stages_hold_no_states_and_wait_for_the_host(parallel: dict[str, Any]) -> None:
    there = sim.run(scenario(**parallel))
    away = sim.run(scenario(offload={"parameters": "cpu", "optimizer": "cpu"}, **parallel))
    assert away.breakdown.offload > 0.0 and away.step_time_s > there.step_time_s
    states = ("parameters", "optimizer_states", "master_parameters")
    assert all(away.memory.use.at_peak[name] == 0 for name in states)
    assert there.memory.use.at_peak["parameters"] > 0
    assert away.memory.host is not None and away.memory.host.needed_bytes > 0


def test_the_host_waits_for_gradients_behind_every_chunk() -> None:
    what = scenario(virtual_stages=2, offload={"parameters": "cpu", "optimizer": "cpu"})
    program = lower(what).job.programs[0]
    waits = [program.labels[label].name for n in program.section_runs() for label in program.sections[n].label]
    assert waits.count("gradients in host memory") == 2


def test_fsdp_1_offloads_no_stages() -> None:
    with pytest.raises(UserError, match="outside no_sync"):
        lower(scenario(1, offload={"parameters": "cpu", "optimizer": "cpu"}))
