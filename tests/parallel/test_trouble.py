"""Slow GPUs, other GPUs, spread clocks and bad links: who is split off, and what they cost, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sim
from sim.api import machine_for
from sim.engine import simulate
from sim.errors import UserError
from sim.parallel import Lowered, lower
from sim.report.pictures.pipeline_rows import boxes_of
from sim.report.terminal.render import as_text
from sim.scenario import Scenario
from sim.scenario.load import resolve


def scenario(parallel: dict[str, Any], nodes: int = 2, batch: int = 32, framework: str = "pytorch",
             **cluster: Any) -> Scenario:
    return resolve({
        "name": "trouble", "cluster": {"topology": "dgx-a100-80g", "nodes": nodes, **cluster},
        "model": {"preset": "gpt3-1.3b"},
        "training": {"micro_batch": 2, "global_batch": batch, "sequence": 1024},
        "parallel": parallel, "software": {"framework": framework}})


def step_s(low: Lowered, of: Scenario) -> float:
    return simulate(low.job, machine_for(of, low)).step_time_s


TECHNIQUES = [
    ({"strategy": "ddp"}, "pytorch"), ({"strategy": "fsdp", "sharding_factor": 4}, "pytorch"),
    ({"strategy": "zero3"}, "deepspeed"), ({"strategy": "zero1", "tensor": 4}, "megatron"),
    ({"strategy": "ddp", "tensor": 2, "pipeline": 4}, "megatron"),
    ({"strategy": "ddp", "pipeline": 2, "virtual_stages": 2}, "megatron"),
]
TROUBLES: list[dict[str, Any]] = [
    {"slow_gpus": [{"gpu": 3, "clock": 0.5}]},
    {"other_gpus": [{"gpu": "a100-40g-sxm", "first_node": 1}], "slow_gpus": [{"gpu": 9, "memory_bandwidth": 0.5}]},
    {"degraded": [{"link": "nic", "index": 3, "share": 0.5}]},
    {"degraded": [{"link": "nic", "index": 3, "share": 0}]},
    {"degraded": [{"link": "gpu", "index": 3, "share": 0.25}]},
    {"clock_spread": {"sigma": 0.02, "seed": 3}},
]


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda t: "+".join(t))
@pytest.mark.parametrize(("parallel", "framework"), TECHNIQUES, ids=lambda p: "-".join(map(str, p.values()))
                         if isinstance(p, dict) else str(p))
def test_folded_and_unfolded_jobs_agree(parallel: dict[str, Any], framework: str, trouble: dict[str, Any]) -> None:
    of = scenario(parallel, framework=framework, **trouble)
    folded, whole = lower(of), lower(of, fold=False)
    assert len(folded.job.classes) <= len(whole.job.classes) == 16
    assert sum(len(c.members) for c in folded.job.classes) == 16
    assert step_s(folded, of) == pytest.approx(step_s(whole, of), rel=1e-9)


_DATA_FIRST = ["data", "tensor", "context", "expert", "pipeline"]


@pytest.mark.parametrize("parallel", [{"context": 2, "tensor": 2}, {"tensor": 2, "order": _DATA_FIRST},
                                      {"context": 2, "order": _DATA_FIRST}], ids=str)
def test_collectives_inside_segments_share_links_however_ranks_are_told_apart(parallel: dict[str, Any]) -> None:
    """Two stages of two nodes with two cards and one NIC each, which both groups of two cross at once. A GPU that is
    hardly slower tells ranks apart and changes nothing that can be seen."""
    parallel = {"pipeline": 2, "strategy": "ddp", **parallel}
    even, slow = (scenario(parallel, nodes=4, framework="megatron", topology="pcie-8x-a40", gpus_per_node=2, **trouble)
                  for trouble in ({}, {"slow_gpus": [{"gpu": 3, "clock": 1 - 1e-7}]}))
    folded, whole, split = lower(even), lower(even, fold=False), lower(slow)
    assert len(folded.job.classes) < len(split.job.classes) <= len(whole.job.classes) == 8
    assert step_s(folded, even) == pytest.approx(step_s(whole, even), rel=1e-9)
    assert step_s(split, slow) == pytest.approx(step_s(folded, even), rel=1e-5)


def test_a_pipeline_of_alike_ranks_folds_to_its_stages() -> None:
    of = scenario({"strategy": "ddp", "tensor": 2, "pipeline": 4}, framework="megatron")
    folded, whole = lower(of), lower(of, fold=False)
    assert (len(folded.job.classes), len(whole.job.classes)) == (4, 16)
    assert step_s(folded, of) == pytest.approx(step_s(whole, of), rel=1e-9)


def test_half_the_clock_doubles_the_matrix_products_and_ddp_waits_for_them() -> None:
    ddp = {"strategy": "ddp"}
    slow, plain = (sim.run(scenario(ddp, **cluster)) for cluster in ({"slow_gpus": [{"gpu": 3, "clock": 0.5}]}, {}))
    # the critical rank is the slow one: its products take twice as long (but for kernel starts, memory, and what
    # collectives take of it), its
    # memory-bound kernels and optimizer as long as before
    assert slow.breakdown.compute["gemm"] == pytest.approx(2 * plain.breakdown.compute["gemm"], rel=0.05)
    assert slow.breakdown.compute["optimizer"] == pytest.approx(plain.breakdown.compute["optimizer"], rel=1e-9)
    longer = sum(slow.breakdown.compute[name] - plain.breakdown.compute[name] for name in ("gemm", "attention"))
    assert slow.step_time_s - plain.step_time_s == pytest.approx(longer, rel=0.15)
    assert [len(c.members) for c in slow.detail.lowered.job.classes] == [3 + 12, 1]


def test_only_the_stage_of_a_slow_gpu_is_slower() -> None:
    parallel = {"strategy": "ddp", "pipeline": 4}
    of = scenario(parallel, batch=64, framework="megatron", slow_gpus=[{"gpu": 6, "clock": 0.5}])
    low = lower(of)
    machine = machine_for(of, low)
    slow = [c for c in low.job.classes if low.variety.kinds[c.device].clock == 0.5]
    # order tensor, data, pipeline: 16 GPUs are 4 replicas of 4 stages, GPU 6 is replica 2 of stage 1
    assert [(c.program, c.members.tolist()) for c in slow] == [(1, [6])]
    mine = low.job.classes.index(slow[0])
    twin = next(i for i, c in enumerate(low.job.classes) if c.program == 1 and i != mine)
    products = [i for i, kernel in enumerate(low.job.programs[1].kernels) if kernel.op == "gemm"]
    ratio = machine.kernel_s(mine)[products] / machine.kernel_s(twin)[products]
    assert 1.7 < ratio.min() <= ratio.max() <= 2.0
    # per stage: the slow replica and the three others
    assert sorted(len(c.members) for c in low.job.classes) == [1, 1, 1, 1, 3, 3, 3, 3]


def test_a_slow_stage_lengthens_the_step_by_its_own_micro_batches() -> None:
    parallel = {"strategy": "ddp", "pipeline": 2}
    results = [sim.run(scenario(parallel, nodes=1, batch=512, framework="megatron", **cluster)) for cluster in (
        {}, {"slow_gpus": [{"gpu": 7, "clock": 0.5}]})]
    plain, slow = results
    # 64 micro-batches over 2 stages: m + p - 1 = 65 slots of which 64 are the slow stage's; its share of arithmetic
    # doubles, so the step grows by about the arithmetic of one rank
    arithmetic = plain.breakdown.compute["gemm"] + plain.breakdown.compute["attention"]
    assert slow.step_time_s - plain.step_time_s == pytest.approx(arithmetic, rel=0.15)


def test_the_slowdown_of_each_trouble_is_reported() -> None:
    of = scenario({"strategy": "ddp"}, slow_gpus=[{"gpu": 3, "clock": 0.5}],
                  degraded=[{"link": "nic", "index": 1, "share": 0.5}])
    result = sim.run(of)
    slow, link, both = result.troubles
    assert (slow.field, link.field, both.field) == ("cluster.slow_gpus.0", "cluster.degraded.0", "cluster")
    assert both.without_s == sim.run(scenario({"strategy": "ddp"})).step_time_s
    without = sim.run(scenario({"strategy": "ddp"}, degraded=[{"link": "nic", "index": 1, "share": 0.5}]))
    assert slow.without_s == without.step_time_s
    assert slow.slowdown == result.step_time_s / without.step_time_s > 1.3
    assert result.to_json()["troubles"][0]["what"] == "GPU 3 at 50% of its clock"
    assert sim.run(scenario({"strategy": "ddp"})).troubles == []


def test_two_slow_gpus_cost_together_what_either_hides() -> None:
    result = sim.run(scenario({"strategy": "ddp"}, slow_gpus=[{"gpu": 3, "clock": 0.5}, {"gpu": 9, "clock": 0.5}]))
    one, other, both = result.troubles
    assert one.slowdown == other.slowdown == pytest.approx(1, rel=1e-3)
    assert both.slowdown > 1.3
    text = as_text(result)
    assert "all of these: step +" in text and "s without them" in text


def test_a_mixed_cluster_has_the_mean_of_its_peaks_and_both_names() -> None:
    result = sim.run(scenario({"strategy": "ddp"}, other_gpus=[{"gpu": "h100-80g-sxm", "first_node": 1}]))
    assert result.peak_flops_per_gpu == pytest.approx((312e12 + 989e12) / 2)
    assert result.mfu == pytest.approx(result.model_flops / result.step_time_s / (8 * 312e12 + 8 * 989e12))
    text = as_text(result)
    assert "8 × a100-80g-sxm + 8 × h100-80g-sxm (2 × dgx-a100-80g)" in text
    assert "h100-80g-sxm on node 1: step " in text


def test_a_spread_of_nothing_is_chips_that_are_all_alike() -> None:
    """Where the power limit binds, a job otherwise waits for the hungriest of its chips."""
    def step(**cluster: Any) -> float:
        return sim.run(scenario({"strategy": "ddp"}, topology="dgx-h100", **cluster)).step_time_s

    alike = step(clock_spread={"sigma": 0})
    assert alike < step()
    assert alike <= step(clock_spread={"sigma": 0.02})


def test_spread_clocks_are_drawn_by_seed() -> None:
    def clocks(seed: int) -> tuple[list[float], list[int]]:
        low = lower(scenario({"strategy": "ddp"}, clock_spread={"sigma": 0.02, "seed": seed}))
        assert low.variety.devices is not None
        return [k.clock for k in low.variety.kinds], low.variety.devices.tolist()

    assert clocks(1) == clocks(1) != clocks(2)
    values, kinds = clocks(5)
    drawn = np.random.default_rng(5).standard_normal(16) * 0.02 + 1
    assert np.abs(np.array(values)[kinds] - drawn).max() <= 0.02 / 16 + 1e-12


def test_sixteen_thousand_gpus_with_a_slow_one_stay_few_classes() -> None:
    of = resolve({
        "name": "big",
        "cluster": {"topology": "hgx-h100-3200", "nodes": 2048, "slow_gpus": [{"gpu": 77, "clock": 0.7}]},
        "model": {"preset": "llama-3-405b"},
        "training": {"micro_batch": 1, "global_batch": 2048, "sequence": 8192, "precision": "megatron-bf16"},
        "parallel": {"strategy": "zero1", "tensor": 8, "sequence_parallel": True, "pipeline": 16},
        "software": {"framework": "megatron"}})
    job = lower(of).job
    # 16 stages x {slow tensor place or the 7 others} x {its replica or the 127 others}
    assert len(job.classes) == 64
    assert sum(len(c.members) for c in job.classes) == 16_384


@pytest.mark.parametrize(("cluster", "field"), [
    ({"slow_gpus": [{"gpu": 16, "clock": 0.5}]}, "cluster.slow_gpus.0.gpu"),
    ({"slow_gpus": [{"gpu": 1, "clock": 0.5}, {"gpu": 1, "clock": 0.6}]}, "cluster.slow_gpus.1.gpu"),
    ({"other_gpus": [{"gpu": "a100-80g-sxn", "first_node": 0}]}, "cluster.other_gpus.0.gpu"),
    ({"other_gpus": [{"gpu": "v100-32g-sxm", "first_node": 1, "nodes": 2}]}, "cluster.other_gpus.0.nodes"),
    ({"other_gpus": [{"gpu": "v100-32g-sxm", "first_node": 1}, {"gpu": "h200", "first_node": 0, "nodes": 2}]},
     "cluster.other_gpus.1.first_node"),
    ({"slow_gpus": [{"gpu": 1, "clock": 0}]}, "cluster.slow_gpus.0.clock"),
    ({"degraded": [{"link": "nic", "share": 0.5}, {"link": "nic", "share": 0.2}]}, "cluster.degraded.1"),
    ({"other_gpus": [{"gpu": "mi300x", "first_node": 1}]}, "cluster.other_gpus.0.gpu"),
])
def test_trouble_that_cannot_be_is_refused(cluster: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError) as caught:
        scenario({"strategy": "ddp"}, **cluster)
    assert field in [fault.field for fault in caught.value.faults]


def test_a_stage_is_told_once_by_its_slowest_ranks() -> None:
    parallel = {"strategy": "ddp", "tensor": 2, "pipeline": 4}
    result = sim.run(scenario(parallel, framework="megatron", slow_gpus=[{"gpu": 5, "clock": 0.5}]))
    assert [stage.stage for stage in result.stages] == [0, 1, 2, 3]
    assert [stage.rank for stage in result.stages if stage.ranks == 1 and stage.stage == 1] == [5]
    # its tensor peer waits for it inside the stage: exposed communication, not a bubble
    boxes = boxes_of(result)
    assert boxes is not None  # the picture shows one rank of each stage: 8 micro-batches forwards and backwards on each
    assert len(boxes.stage) == 4 * 8 * 2
    assert result.stages[1].busy_s == max(stage.busy_s for stage in result.stages)


def test_memory_alone_tells_kinds_of_gpus_apart() -> None:
    plan = sim.plan_memory(scenario({"strategy": "ddp"}, slow_gpus=[{"gpu": 5, "clock": 0.5}],
                                    other_gpus=[{"gpu": "a100-40g-sxm", "first_node": 1}]))
    assert sorted((stage.name, stage.ranks) for stage in plan.stages) == [
        ("every rank on a100-40g-sxm", 8), ("every rank on a100-80g-sxm", 8)]
    capacity = {stage.name.split()[-1]: stage.memory.capacity_bytes for stage in plan.stages}
    assert capacity["a100-40g-sxm"] < 45e9 < 80e9 < capacity["a100-80g-sxm"]
