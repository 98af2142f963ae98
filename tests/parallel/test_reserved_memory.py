"""Steps replayed tensor by tensor: the allocator is asked for what the ledger counts, and nothing leaks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replayed_steps import asked_twice

import sim
from sim.memory.allocator import Allocator, OutOfMemoryError, Settings
from sim.memory.ledger import peak
from sim.memory.reserved import fragmentation_bytes, replayed, under_pressure
from sim.memory.tensors import TensorReplay
from sim.parallel import lower
from sim.program import Program, ProgramBuilder
from sim.scenario import resolve


def programs(parallel: dict[str, Any] | None = None, sequence: int = 256, batch: int = 2, micro_steps: int = 2,
             **training: Any) -> list[Program]:
    parallel = {"strategy": "ddp", **(parallel or {})}
    replicas = 8 // parallel.get("pipeline", 1)
    return lower(resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": 1},
        "model": {"kind": "decoder", "layers": 8, "hidden": 1024, "heads": 8, "vocab": 8192},
        "training": {"global_batch": batch * replicas * micro_steps, "micro_batch": batch, "sequence": sequence,
                     "precision": "amp-bf16", "optimizer": "adamw", **training},
        "parallel": parallel, "software": {"modules": "plain", "optimizer_kernel": "foreach"}})).job.programs


def test_the_layout_nearest_to_the_limit_is_not_the_quickest() -> None:
    """MPT-7B on A100s of 40 GB: with 11 and 13 blocks recomputed cached segments go back, with 16 all fits."""
    def waits_s(blocks: int) -> float:
        (program,) = lower(resolve({
            "name": "x", "cluster": {"topology": "hgx-a100-40g-1600"}, "model": {"preset": "mpt-7b"},
            "training": {"micro_batch": 4, "global_batch": 64, "sequence": 2048, "precision": "fsdp-bf16",
                         "recompute": {"layers": blocks}},
            "parallel": {"strategy": "fsdp"}, "software": {"framework": "composer", "year": 2023}})).job.programs
        allocated, limit = peak(program).peak_allocated_bytes, int(38.26 * 2**30)
        assert allocated <= limit
        return replayed(program, limit, allocated).seconds
    assert waits_s(11) > waits_s(13) > waits_s(16) == 0


jobs = st.fixed_dictionaries({
    "recompute": st.sampled_from(["none", "selective", "full"]),
    "parallel": st.sampled_from([
        {"strategy": "ddp"}, {"strategy": "ddp", "gradient_as_bucket_view": True}, {"strategy": "fsdp"},
        {"strategy": "fsdp", "sharding_factor": 2}, {"pipeline": 2, "schedule": "1f1b"},
        {"pipeline": 4, "schedule": "1f1b"}, {"pipeline": 2, "schedule": "gpipe"}]),
    "micro_steps": st.sampled_from([2, 5]),
    "batch": st.sampled_from([1, 2]),
})


@settings(max_examples=25, deadline=None)
@given(jobs)
def test_the_allocator_is_asked_for_what_the_ledger_counts(job: dict[str, Any]) -> None:
    for program in programs(**job):
        allocator = asked_twice(program)
        counted = peak(program).peak_allocated_bytes
        assert allocator.top_asked == pytest.approx(counted, rel=0.01)
        assert allocator.top_reserved >= allocator.top_allocated >= allocator.top_asked


@settings(max_examples=25, deadline=None)
@given(jobs)
def test_pools_without_limit_reserve_what_the_whole_allocator_does(job: dict[str, Any]) -> None:
    for program in programs(**job):
        allocator = Allocator()
        replay = TensorReplay(program, allocator)
        replay.construct()
        for _ in range(2):
            replay.step()
        assert fragmentation_bytes(program) == allocator.top_reserved - allocator.top_asked


@pytest.mark.parametrize(("field", "values"), [("batch", (1, 2, 4)), ("sequence", (256, 512, 1024))])
def test_reserved_grows_with_the_work(field: str, values: tuple[int, ...]) -> None:
    found = []
    for value in values:
        program = programs(**{field: value})[0]
        allocated = peak(program).peak_allocated_bytes
        found.append(allocated + replayed(program, 2**40, allocated).fragmentation_bytes)
    assert found == sorted(found)


def test_expandable_segments_waste_less_and_need_no_retries_where_fixed_ones_do() -> None:
    program = programs({"strategy": "fsdp"}, sequence=1024, batch=4)[0]
    allocated = peak(program).peak_allocated_bytes
    growing, split = Settings(expandable_segments=True), Settings(max_split_bytes=64 * 2**20)
    fixed, less = (fragmentation_bytes(program, one) for one in (Settings(), growing))
    assert 0 < less < fixed and fragmentation_bytes(program, split) != fixed
    assert under_pressure(program, allocated + less, growing).retries == 0
    assert replayed(program, 2**40, allocated, growing).fragmentation_bytes == less


def test_expandable_segments_end_the_retries_of_a_job_whose_cache_is_too_large() -> None:
    """Llama-2-13B sharded over 8 of 32 A100s of 40 GB: 34 GiB of tensors, and 6 GiB of blocks that fit none of them."""
    def waits_s(grows: bool) -> float:
        memory = sim.plan_memory(resolve({
            "name": "x", "cluster": {"topology": "dgx-a100-40g", "nodes": 4}, "model": {"preset": "llama-2-13b"},
            "training": {"micro_batch": 2, "global_batch": 384, "sequence": 4608, "precision": "fsdp-bf16",
                         "recompute": "full"},
            "parallel": {"strategy": "fsdp", "sharding_factor": 8},
            "software": {"allocator": {"expandable_segments": grows}}})).memory
        assert memory.fits
        return memory.reserved.seconds

    assert waits_s(False) > 1.0 and waits_s(True) == 0.0


def test_short_of_memory_cached_blocks_are_given_back_before_a_job_is_lost() -> None:
    program = programs({"strategy": "fsdp"}, sequence=1024, batch=4)[0]
    allocated = peak(program).peak_allocated_bytes
    enough = allocated + replayed(program, 2**40, allocated).fragmentation_bytes
    assert replayed(program, enough, allocated).retries == 0
    short = replayed(program, enough - 2**20, allocated)
    assert short.retries is not None
    assert allocated + short.fragmentation_bytes <= enough - 2**20
    lost = replayed(program, allocated - 1, allocated)
    assert lost.retries is None
    assert lost.seconds == 0
    assert under_pressure(program, allocated // 2).retries is None


class _EveryRun(TensorReplay):
    skips = False


def _counted(replay: TensorReplay) -> list[int]:
    """Numbers of the sections that are run, in order."""
    runs: list[int] = []
    run = replay._run

    def counting(number: int) -> None:
        runs.append(number)
        run(number)

    replay._run = counting  # type: ignore[method-assign]
    return runs


def _after_three_steps(program: Program, kind: type[TensorReplay], limit: int | None) -> tuple[object, list[int]]:
    allocator = Allocator(limit)
    replay = kind(program, allocator)
    runs = _counted(replay)
    try:
        replay.construct()
        for _ in range(3):
            replay.step()
    except OutOfMemoryError:
        return "out of memory", runs
    return (allocator.free_blocks(), allocator.reserved, allocator.top_reserved, allocator.top_allocated,
            allocator.top_asked, allocator.asked, allocator.retries, allocator.released), runs


@settings(max_examples=25, deadline=None)
@given(jobs, st.sampled_from([None, 1.0, 0.7, 0.3, 0.05]))
def test_skipping_what_changes_nothing_changes_no_answer(job: dict[str, Any], share: float | None) -> None:
    for program in programs(**job):
        limit = None
        if share is not None:
            allocated = peak(program).peak_allocated_bytes
            limit = allocated + int(share * replayed(program, 2**40, allocated).fragmentation_bytes)
        skipped, few = _after_three_steps(program, TensorReplay, limit)
        every, all_runs = _after_three_steps(program, _EveryRun, limit)
        assert skipped == every
        assert len(few) <= len(all_runs)


def test_a_micro_step_that_leaves_all_as_it_was_runs_once() -> None:
    program = programs({"strategy": "fsdp"}, micro_steps=5)[0]
    _, few = _after_three_steps(program, TensorReplay, None)
    _, every = _after_three_steps(program, _EveryRun, None)
    assert len(few) < len(every)


def test_a_run_that_gets_higher_than_before_is_no_repeat() -> None:
    builder = ProgramBuilder(("compute",), ())
    builder.resident = [("weights", 2**30, "parameters"), ("moments", 2**31, "optimizer_states")]
    step = builder.section("micro-step")
    step.allocate("work", 2**28, "workspace")
    step.free("work", 2**28, "workspace")
    builder.run(step, 3)
    builder.run(builder.section("optimizer step"))
    program = builder.build()
    # the first step has no moments yet: the same blocks are free in the second, which is higher all the same
    assert replayed(program, 2**40, peak(program).peak_allocated_bytes).fragmentation_bytes == 0
