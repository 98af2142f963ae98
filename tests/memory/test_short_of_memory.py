"""The allocator at the end of its memory: what waits for events comes back, and every repeat of a section counts."""

from __future__ import annotations

import pytest

from sim.catalog import table
from sim.memory.allocator import Allocator, OutOfMemoryError
from sim.memory.reserved import Reserved, replayed, under_pressure
from sim.memory.tensors import TensorReplay
from sim.program import Label, Program, ProgramBuilder

MIB = 2**20
LABEL = Label("layer", "forward", "kernel")


def test_a_retry_waits_for_other_streams_first() -> None:
    allocator = Allocator(100 * MIB)
    block = allocator.allocate(60 * MIB, 1)
    allocator.drop(block)
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(60 * MIB)
    waiting = [block]
    allocator.settle = lambda: allocator.free(waiting.pop()) if waiting else None
    allocator.allocate(60 * MIB)
    assert (allocator.retries, allocator.released) == (2, 1)


def job(repeats: int, large: int) -> Program:
    """Micro-steps in which 60 MiB of one stream and then of another come and go."""
    builder = ProgramBuilder(("compute", "gather"), ())
    section = builder.section("micro-step")
    for stream in (0, 1):
        section.allocate(f"tensor:{stream}", large * MIB, "activations", stream)
        section.host(0.0, LABEL)
        section.free(f"tensor:{stream}", large * MIB, "activations", stream)
    builder.run(section, repeats)
    return builder.build()


@pytest.mark.parametrize("repeats", [1, 2, 5, 40])
def test_every_repeat_runs_short(repeats: int) -> None:
    """Each stream has to get back what the other one's pool holds, twice in every micro-step."""
    found = under_pressure(job(repeats, 60), 100 * MIB)
    assert found.retries == 2 * repeats
    assert found.released_bytes == 2 * repeats * 60 * MIB


def test_with_room_for_both_nothing_is_given_back() -> None:
    found = under_pressure(job(40, 60), 120 * MIB)
    assert (found.retries, found.released_bytes) == (0, 0)
    assert under_pressure(job(1, 60), 50 * MIB).retries is None


def test_near_the_end_the_answer_is_a_mean_over_what_the_driver_may_take() -> None:
    """One stream's 2 GiB go back for the other's, twice a step, where less than both fit: at some of three limits."""
    program, both = job(1, 2048), 4096 * MIB
    answers = [replayed(program, both + more * MIB, 2048 * MIB) for more in (-600, -1, 0, 511, 512)]
    assert [answer.retries for answer in answers] == pytest.approx([2.0, 2 * 2 / 3, 2 / 3, 2 / 3, 0.0])
    assert answers[1].released_bytes == pytest.approx(2048 * MIB * 2 * 2 / 3)


@pytest.mark.parametrize(("limit", "retries"), [(512, 2.0), (100, 0.0)])
def test_a_job_that_the_replay_would_stop_pays_as_with_the_least_that_saves_it(limit: int, retries: float) -> None:
    """2 GiB of one stream and then of another, said to be 100 MiB at their highest: 512 + 1024 MiB stop the replay,
    512 + 1536 hold one of them. 100 + 2048 are as much as it all comes to, where nothing has to go back."""
    assert all(under_pressure(job(1, 2048), (limit + more) * MIB).retries is None for more in (-512, 0, 512, 1024))
    found = replayed(job(1, 2048), limit * MIB, 100 * MIB)
    assert found.retries == retries
    assert found.released_bytes == retries * 2048 * MIB


def test_seconds_are_retries_and_bytes() -> None:
    figures = table("memory/retries.yaml")
    by_hand_s = 3 * figures["synchronise"]["value"] + 2.5 * figures["remapped_per_gib"]["value"]
    assert Reserved(0, 3.0, 2.5 * 2**30).seconds == pytest.approx(by_hand_s)
    low, high = figures["remapped_per_gib"]["range"]
    assert low < figures["remapped_per_gib"]["value"] < high


def test_a_cache_that_comes_to_fit_runs_short_no_more() -> None:
    """The first steps leave a segment that serves nobody; once it went back, what is cached serves every step."""
    builder = ProgramBuilder(("compute",), ())
    section = builder.section("step")
    for number, size in enumerate((60, 70)):
        section.allocate(f"tensor:{number}", size * MIB, "activations", 0)
        section.host(0.0, LABEL)
        section.free(f"tensor:{number}", size * MIB, "activations", 0)
    builder.run(section)
    allocator = Allocator(115 * MIB)
    replay = TensorReplay(builder.build(), allocator)
    replay.step()
    assert allocator.retries == 1
    found = under_pressure(builder.build(), 115 * MIB)
    assert (found.retries, found.released_bytes) == (0, 0)


@pytest.mark.parametrize(("launches", "waits"), [(1023, True), (2000, False)])
def test_the_launch_queue_bounds_how_far_the_host_is_ahead(launches: int, waits: bool) -> None:
    """A tensor that another stream used is free once so much has been launched behind it that it must be over."""
    from sim.work import Kernel

    builder = ProgramBuilder(("compute", "gather"), ())
    section = builder.section("micro-step")
    kernel = Kernel("elementwise", "bf16", (1,), "copy", 0.0, 2.0, "memory_bound", launches=launches)
    segment = builder.segment_of(builder.rows((kernel,)), (0.0,))
    for number in range(3):
        section.allocate(f"tensor:{number}", 60 * MIB, "activations", 1)
        section.kernels(0, segment, LABEL)
        section.free(f"tensor:{number}", 60 * MIB, "activations", 1, (0,))
    builder.run(section)
    allocator = Allocator(130 * MIB)
    replay = TensorReplay(builder.build(), allocator)
    allocator.settle = replay.settle
    for _ in range(3):
        replay.step()
    assert bool(allocator.retries) == waits


@pytest.mark.parametrize("gathers", [1, 2, 3, 4, 6, 7, 10, 11, 15])
def test_new_memory_waits_for_the_device(gathers: int) -> None:
    """A host that runs ahead of its gathers takes a new segment where all are in use; cudaMalloc waits for them, so
    each of the segments serves once more before the next is needed: k segments for up to k (k + 1) / 2 gathers."""
    from sim.memory.pools import Pools

    builder = ProgramBuilder(("compute", "gather"), ())
    section = builder.section("step")
    for _ in range(gathers):
        section.allocate("flat", 60 * MIB, "workspace")
        section.free("flat", 60 * MIB, "workspace", used_on=(1,))
        section.host(0.0, LABEL)
    builder.run(section)
    pools = Pools()
    TensorReplay(builder.build(), pools).step()
    segments = next(k for k in range(1, gathers + 1) if k * (k + 1) // 2 >= gathers)
    assert pools.reserved == segments * 60 * MIB
