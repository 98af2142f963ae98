"""The invariants of the machine, on small decoder jobs drawn at random, through the rooms' public functions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sim.api import machine_for, run
from sim.engine import longest_path, simulate
from sim.memory.ledger import peak
from sim.parallel import lower
from sim.report import Result
from sim.report.numbers.traffic import traffic_totals
from sim.scenario import resolve

#: Kernel times have steps (tiles, waves): more work of a smaller shape may be this much faster.
KERNEL_STEPS = 0.02
#: A faster collective takes more memory bandwidth from the kernels it meets, and may meet others than before.
CONTENTION_STEPS = 0.10

Mapping = dict[str, Any]
quick = settings(max_examples=20, deadline=None)


@st.composite
def jobs(draw: st.DrawFn, strategies: tuple[str, ...] = ("ddp", "zero1", "zero2", "zero3", "fsdp"),
         framework: str | None = None) -> Mapping:
    """A decoder of a few layers on one to four nodes of two to eight GPUs, with accumulation."""
    nodes, per_node = draw(st.sampled_from([(1, 2), (1, 8), (2, 4), (4, 2), (4, 8)]))
    heads = draw(st.sampled_from([2, 4]))
    micro = draw(st.integers(1, 3))
    strategy = draw(st.sampled_from(strategies))
    gpus = nodes * per_node
    parallel: Mapping = {"strategy": strategy}
    if strategy == "fsdp":
        factors = [f for f in (1, 2, 4, 8, 16, 32) if f <= gpus]
        parallel["sharding_factor"] = draw(st.sampled_from([*factors, "full"]))
        parallel["reshard_after_forward"] = draw(st.booleans())
    return {
        "name": "drawn", "cluster": {"topology": "dgx-a100-80g", "nodes": nodes, "gpus_per_node": per_node},
        "model": {"kind": "decoder", "layers": draw(st.integers(1, 5)), "hidden": 64 * heads, "heads": heads,
                  "ffn": 256 * heads, "vocab": 1024, "positions": "learned", "norm": "layernorm", "bias": True,
                  "tied_embeddings": draw(st.booleans()), "max_positions": 256, "dropout": 0},
        "training": {"micro_batch": micro, "global_batch": gpus * micro * draw(st.integers(1, 3)), "sequence": 256,
                     "precision": draw(st.sampled_from(["pure-bf16", "fsdp-bf16", "amp-bf16", "fp32"])),
                     "recompute": draw(st.sampled_from(["none", "full"])), "attention": "eager"},
        "parallel": parallel,
        "software": {"framework": framework or draw(st.sampled_from(["pytorch", "deepspeed", "ideal"])),
                     "year": draw(st.sampled_from([2022, 2024, 2026]))},
    }


def small(nodes: int, per_node: int, model: Mapping, training: Mapping, strategy: str, framework: str) -> Mapping:
    """A job that was drawn once and failed."""
    return {
        "name": "drawn", "cluster": {"topology": "dgx-a100-80g", "nodes": nodes, "gpus_per_node": per_node},
        "model": {"kind": "decoder", "vocab": 1024, "positions": "learned", "norm": "layernorm", "bias": True,
                  "tied_embeddings": False, "max_positions": 256, "dropout": 0, **model},
        "training": {"sequence": 256, "recompute": "none", "attention": "eager", **training},
        "parallel": {"strategy": strategy}, "software": {"framework": framework, "year": 2022}}


#: Gradients' copies stood for one kernel a part of a layer, so that cutting its backward cost a start.
CUT = small(1, 2, {"layers": 3, "hidden": 256, "heads": 4, "ffn": 1024},
            {"micro_batch": 1, "global_batch": 2, "precision": "fsdp-bf16"}, "ddp", "ideal")
#: A gather that waits longer, issued, than it moves.
WAITING = small(4, 8, {"layers": 1, "hidden": 128, "heads": 2, "ffn": 512},
                {"micro_batch": 2, "global_batch": 64, "precision": "amp-bf16"}, "zero2", "pytorch")


def changed(job: Mapping, **tables: Mapping) -> Mapping:
    """A copy of `job` with fields of its tables replaced."""
    return {**job, **{name: {**job[name], **fields} for name, fields in tables.items()}}


def predicted(job: Mapping) -> Result:
    return run(resolve(job))


def traffic(job: Mapping) -> dict[str, int]:
    """Bytes per collective kind in forward and backward , without the optimizer's."""
    sums: dict[str, int] = {}
    for row in traffic_totals(lower(resolve(job)).job):
        if row["phase"] != "optimizer":
            sums[row["kind"]] = sums.get(row["kind"], 0) + row["bytes"]
    return sums


@quick
@given(jobs())
def test_flops_equal_the_closed_form(job: Mapping) -> None:
    """Per token: 24 h² + 4 s h for each block and 2 h V for the head forward, twice that backward (Megatron)."""
    model, training = job["model"], job["training"]
    h, s, tokens = model["hidden"], training["sequence"], training["global_batch"] * training["sequence"]
    forward = model["layers"] * (24 * h * h + 4 * s * h) + 2 * h * model["vocab"]
    result = predicted(job)
    assert result.model_flops == pytest.approx(3 * forward * tokens, rel=1e-12)
    if training["recompute"] == "none":
        assert result.hardware_flops == pytest.approx(result.model_flops, rel=1e-12)
    else:
        again = result.hardware_flops - result.model_flops
        assert 0 < again <= forward * tokens


@quick
@given(jobs(strategies=("ddp", "fsdp")))
def test_gradients_cross_the_wire_once_per_reduction(job: Mapping) -> None:
    scenario = resolve(job)
    lowered, sums = lower(scenario), traffic(job)
    width = {"bf16": 2, "fp16": 2, "fp32": 4}
    reductions = scenario.micro_steps if scenario.parallel.reduce_every_micro_step else 1
    once = lowered.architecture.parameters * width[scenario.training.precision.reduce]
    if scenario.parallel.strategy == "ddp":
        assert sums == {"all_reduce": once * reductions}
    elif scenario.parallel.sharding_factor == scenario.data_parallel:
        assert once * reductions <= sums["reduce_scatter"] <= 1.02 * once * reductions  # padding to the factor
        assert "all_reduce" not in sums


@quick
@given(jobs())
def test_a_step_is_never_shorter_than_its_bounds(job: Mapping) -> None:
    scenario = resolve(job)
    lowered = lower(scenario)
    machine = machine_for(scenario, lowered)
    result = run(scenario)
    at_peak = result.hardware_flops / result.gpus / result.peak_flops_per_gpu
    path = longest_path(lowered.job, machine)
    assert result.step_time_s >= at_peak
    assert result.step_time_s >= path * (1 - 1e-9)
    assert path >= longest_path(lowered.job, machine, infinite_network=True) * (1 - 1e-9)
    assert result.slowdown >= 1 - 1e-9


def contention_free_s(job: Mapping) -> float:
    scenario = resolve(job)
    lowered = lower(scenario)
    return longest_path(lowered.job, machine_for(scenario, lowered))


@quick
@given(jobs(framework="ideal"))
def test_better_hardware_or_less_work_is_never_slower(job: Mapping) -> None:
    step_time_s = predicted(job).step_time_s
    base = step_time_s * (1 + KERNEL_STEPS)
    faster_links = {"intra_gbps_per_gpu": 9600, "inter_gbps_per_node": 6400}
    quicker = changed(job, cluster=faster_links)
    assert predicted(quicker).step_time_s <= step_time_s * (1 + CONTENTION_STEPS)
    assert contention_free_s(quicker) <= contention_free_s(job) * (1 + 1e-9)
    if job["model"]["layers"] > 1:
        assert predicted(changed(job, model={"layers": job["model"]["layers"] - 1})).step_time_s <= base
    training = job["training"]
    micro_steps = training["global_batch"] // (resolve(job).gpus * training["micro_batch"])
    if micro_steps > 1:
        fewer = training["global_batch"] * (micro_steps - 1) // micro_steps
        assert predicted(changed(job, training={"global_batch": fewer})).step_time_s <= base
    if training["micro_batch"] > 1:
        smaller = training["micro_batch"] - 1
        batch = training["global_batch"] // training["micro_batch"] * smaller
        less = changed(job, training={"micro_batch": smaller, "global_batch": batch})
        assert predicted(less).step_time_s <= base


@quick
@given(jobs(strategies=("fsdp",)))
def test_sharding_over_one_gpu_moves_what_ddp_moves(job: Mapping) -> None:
    """In the reduce dtype: FSDP casts gradients to it, DDP sends them in their own."""
    training = {"precision": "pure-bf16"}
    accumulating = {"reduce_every_micro_step": True}
    one = changed(job, training=training, parallel={"sharding_factor": 1, **accumulating})
    ddp = changed(one, training=training)
    ddp["parallel"] = {"strategy": "ddp", **accumulating}
    assert traffic(one) == traffic(ddp)


@quick
@given(jobs(strategies=("zero3",), framework="pytorch"))
def test_full_sharding_moves_what_zero3_moves(job: Mapping) -> None:
    fsdp = {**job, "parallel": {"strategy": "fsdp", "sharding_factor": "full"}}
    assert traffic(job) == traffic(fsdp)


@quick
@example(WAITING)
@given(jobs())
def test_exposed_communication_is_part_of_the_time_on_the_link(job: Mapping) -> None:
    result = predicted(job)
    for kind, groups in result.breakdown.exposed_communication.items():
        for group, exposed in groups.items():
            assert exposed <= result.breakdown.communication_total[kind][group] * (1 + 1e-9) + 1e-12
    rows = result.breakdown.compute_s + result.breakdown.exposed_s + result.breakdown.host
    assert rows == pytest.approx(result.step_time_s, rel=1e-6)


@quick
@example(CUT)
@given(jobs(strategies=("ddp", "fsdp"), framework="ideal"))
def test_overlap_never_slows_a_job_without_contention(job: Mapping) -> None:
    """Without host costs: on a busy host, launching a collective earlier delays the kernels behind it."""
    paths = []
    for overlap in (True, False):
        scenario = resolve(changed(job, parallel={"overlap": overlap}))
        lowered = lower(scenario)
        paths.append(longest_path(lowered.job, machine_for(scenario, lowered)))
    assert paths[0] <= paths[1] * (1 + 1e-9)


@quick
@given(jobs())
def test_memory_returns_to_where_it_began(job: Mapping) -> None:
    use = peak(lower(resolve(job)).job.programs[0])
    assert use.steady, use.net_bytes
    tensors = {name: level for name, level in use.category_peaks.items() if name not in ("context", "fragmentation")}
    assert use.peak_allocated_bytes >= max(tensors.values())


@quick
@given(jobs(strategies=("fsdp",)))
def test_more_sharding_never_needs_more_for_model_states(job: Mapping) -> None:
    states = ("parameters", "optimizer_states", "master_parameters")
    sizes = []
    for factor in (f for f in (1, 2, 4, 8, 16, 32) if f <= resolve(job).gpus):
        use = peak(lower(resolve(changed(job, parallel={"sharding_factor": factor}))).job.programs[0])
        sizes.append(sum(use.phases["optimizer_step"].get(s, 0) for s in states))
    assert sizes == sorted(sizes, reverse=True)


@quick
@given(jobs(), st.sampled_from(["40 GB", "64 GB", "120 GB"]))
def test_more_memory_never_stops_fitting_and_changes_no_time(job: Mapping, memory: str) -> None:
    less, more = predicted(job), predicted(changed(job, cluster={"gpu": {"memory": "200 GB"}}))
    other = predicted(changed(job, cluster={"gpu": {"memory": memory}}))
    assert more.memory.fits >= max(less.memory.fits, other.memory.fits)
    assert less.step_time_s == more.step_time_s == other.step_time_s


@quick
@given(jobs())
def test_same_input_same_output_bit_for_bit(job: Mapping) -> None:
    first, second = (predicted(job).to_json() for _ in range(2))
    for result in (first, second):
        result["simulation"].pop("wall_s")
    assert json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)


@settings(max_examples=10, deadline=None)
@given(jobs())
def test_folded_equals_unfolded(job: Mapping) -> None:
    scenario = resolve(job)
    times = []
    for fold in (True, False):
        lowered = lower(scenario, fold=fold)
        times.append(simulate(lowered.job, machine_for(scenario, lowered)).step_time_s)
    assert times[0] == pytest.approx(times[1], rel=1e-9)


@quick
@given(jobs(), st.integers(2, 4))
def test_skipping_repeats_changes_nothing(job: Mapping, more: int) -> None:
    longer = changed(job, training={"global_batch": more * job["training"]["global_batch"]})
    scenario = resolve(longer)
    lowered = lower(scenario)
    machine = machine_for(scenario, lowered)
    skipping, plain = (simulate(lowered.job, machine, skip_repeats=s).step_time_s for s in (True, False))
    assert skipping == pytest.approx(plain, rel=1e-9)


@quick
@given(jobs())
def test_degrees_of_one_add_nothing(job: Mapping) -> None:
    ones = {"tensor": 1, "pipeline": 1, "context": 1, "expert": 1}
    assert predicted(changed(job, parallel=ones)).step_time_s == predicted(job).step_time_s
