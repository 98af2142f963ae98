"""What must hold for any job: coarsening, skipping and folding change nothing; contention never helps."""

from __future__ import annotations

from dataclasses import replace

import engine_random as random
import numpy as np
import pytest
from engine_fakes import NAME, FakeDevice, FakeNetwork, kernel
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sim.engine import LongestPath, Machine, Timeline, longest_path, simulate
from sim.network import Coflow
from sim.program import CollectiveCall, Communicator, Job, Kind, Program, ProgramBuilder, RankClass

SECTIONS = st.lists(st.tuples(random.recipes(), st.integers(1, 7)), min_size=1, max_size=3)
CONTENDED = {"latency_s": 0.11717, "channels": 20, "hbm": 1.5, "capacities": {"x": 1700.0}}
SLOW = (1.0, 1.3717)


def machine(job: Job, **options: bool) -> Machine:
    """Two kinds of device, one shared link, every sort of contention."""
    return Machine([FakeDevice(slow, per_bps=0.07e-3) for slow in SLOW], FakeNetwork(**CONTENDED), job, **options)


def ends(timeline: Timeline, number: int) -> np.ndarray:
    return timeline.columns(number).end_s


@settings(max_examples=50, deadline=None)
@given(SECTIONS, st.integers(1, 2), st.booleans(), st.sampled_from([0.0, 0.13]))
def test_coarsening_changes_nothing(sections: list, parties: int, synchronise: bool, drain_s: float) -> None:
    """A segment of n kernels and n segments of one kernel give the same times."""
    timelines = []
    for split in (False, True):
        program = random.program(sections, split=split, drain_s=drain_s, synchronise=synchronise)
        job = random.job([program], parties)
        timelines.append(simulate(job, machine(job)))
    coarse, fine = timelines
    assert coarse.step_time_s == pytest.approx(fine.step_time_s, abs=1e-9)
    for number in range(parties):
        last = [i for i, kind in enumerate(coarse.columns(number).kind) if kind != Kind.KERNELS]
        other = [i for i, kind in enumerate(fine.columns(number).kind) if kind != Kind.KERNELS]
        np.testing.assert_allclose(ends(coarse, number)[last], ends(fine, number)[other], rtol=0, atol=1e-9)


#: Host and device meet at one instant here, by a launch queue that has room again and by a collective that ends: which
#: comes first by rounding must not decide whether a collective waits for thread blocks.
QUEUE_AND_COLLECTIVE = (
    random.Recipe("collective", 3, (), 4, 1, 0.0, (), ()),
    random.Recipe("host", -1, (), 3, 0, 0.4807625975838, (0,), ()),
    random.Recipe("collective", 3, (), 1, 1, 0.0230288324859, (), ()),
    random.Recipe("kernels", 0, (0.354325195, 2.359067441, 3.54325195, 0.151990655), 2, 0, 0.0, (), ()),
    random.Recipe("kernels", 1, (0.24177208794687388, 0.6933915794650338, 0.5048272988108063, 0.36748160838302546,
                                 1.6169190768853123), 4, 0, 0.1265336372529, (3, 1), ()))
TWO_RANKS_AND_COLLECTIVE = (
    random.Recipe("copy", 4, (), 3, 0, 0.0, (), ()),
    random.Recipe("collective", 3, (), 2, 0, 0.0, (0,), ()),
    random.Recipe("kernels", 1, (0.29398528670642043, 0.420689415675672, 0.420689415675672, 1.4912095564491605), 2, 1,
                  0.0, (), (3,)),
    random.Recipe("collective", 2, (), 5, 0, 0.0, (), ()),
    random.Recipe("kernels", 0, (0.425190234,), 1, 0, 0.0, (), ()),
    random.Recipe("collective", 3, (), 3, 0, 0.0, (), (1,)),
    random.Recipe("collective", 3, (), 1, 0, 0.0, (), ()),
    random.Recipe("kernels", 0, (0.7897760060000001, 0.37484634899999997, 2.541839827, 0.425190234), 4, 0,
                  0.0696098064834, (3, 5), ()))


@settings(max_examples=50, deadline=None)
@given(SECTIONS, st.integers(1, 2), st.booleans(), st.sampled_from([3, 12, 1024]))
@example([(QUEUE_AND_COLLECTIVE, 2)], 1, True, 12)
@example([(TWO_RANKS_AND_COLLECTIVE, 2)], 2, True, 12)
def test_skipping_changes_nothing(sections: list, parties: int, synchronise: bool, launch_queue: int) -> None:
    sections = [(tasks, repeats * 3) for tasks, repeats in sections]
    program = random.program(sections, synchronise=synchronise, launch_queue=launch_queue, drain_s=0.07)
    job = random.job([program], parties)
    skipped, full = (simulate(job, machine(job), skip_repeats=skip) for skip in (True, False))
    assert skipped.step_time_s == pytest.approx(full.step_time_s, abs=1e-9)
    assert skipped.tasks <= full.tasks
    for number in range(parties):
        for a, b in zip(skipped.runs(number), full.runs(number), strict=True):
            assert a.section == b.section
            for name in ("issue_s", "start_s", "end_s", "starved_s"):
                np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=0, atol=1e-9)


def test_classes_whose_runs_take_different_times_skip_nothing() -> None:
    """Every run of the first takes two of the second's: the machine looks the same, but two runs have passed."""
    programs = []
    for seconds, repeats in ((1.0, 12), (0.5 / SLOW[1], 24)):
        builder = ProgramBuilder(("compute",), ())
        section = builder.section("micro")
        section.host(0.0, NAME, (section.kernels(0, builder.segment([kernel(seconds)], [0.0]), NAME),))
        builder.run(section, repeats)
        programs.append(builder.build())
    job = random.job(programs, 2, communicators=0)
    skipped, full = (simulate(job, machine(job), skip_repeats=skip) for skip in (True, False))
    for number in range(2):
        np.testing.assert_allclose(ends(skipped, number), ends(full, number), rtol=0, atol=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(random.recipes(second_stream=False), st.integers(1, 3)), min_size=1, max_size=3),
       st.integers(1, 2), st.booleans(), st.sampled_from([3, 12, 1024]), st.integers(1, 3))
def test_without_contention_the_longest_path_is_the_step(sections: list, parties: int, synchronise: bool,
                                                         launch_queue: int, steps: int) -> None:
    """Two programs that share no code but the durations agree on every step."""
    program = random.program(sections, synchronise=synchronise, launch_queue=launch_queue)
    job = random.job([program], parties)
    free = machine(job, contention=False)
    assert simulate(job, free, steps=steps).step_time_s == pytest.approx(longest_path(job, free, steps=steps), abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(SECTIONS, st.integers(1, 2), st.sampled_from([3, 12, 1024]))
def test_the_longest_path_is_a_lower_bound(sections: list, parties: int, launch_queue: int) -> None:
    """Contention, draining and kernels on two streams with one launch queue only ever make a step longer."""
    program = random.program(sections, launch_queue=launch_queue, drain_s=0.07)
    job = random.job([program], parties)
    contended = machine(job)
    path = LongestPath(job, contended)
    first = simulate(job, contended, steps=1).step_time_s
    assert path.step_ends_s()[0] <= first + 1e-9
    if parties == 1:  # every step begins on an idle machine
        assert longest_path(job, contended) <= simulate(job, contended).step_time_s + 1e-9
        assert longest_path(job, contended, infinite_network=True) <= longest_path(job, contended) + 1e-9


@settings(max_examples=50, deadline=None)
@given(SECTIONS, st.integers(1, 2), st.sampled_from([3, 1024]))
def test_rules_of_streams_and_communicators(sections: list, parties: int, launch_queue: int) -> None:
    """Read off the finished timeline: order on streams and communicators, waits, joins, issue before start."""
    program = random.program(sections, launch_queue=launch_queue, drain_s=0.07)
    job = random.job([program], parties)
    timeline = simulate(job, machine(job))
    for number in range(parties):
        streams: dict[int, float] = {}
        fifos: dict[int, float] = {}
        clock = -np.inf
        for run in timeline.runs(number):
            section = program.sections[run.section]
            for task, kind in enumerate(section.kind):
                begin, end = run.start_s[task], run.end_s[task]
                assert run.issue_s[task] >= clock - 1e-9
                assert end >= begin >= run.issue_s[task] - 1e-9
                after = [run.end_s[w] for w in section.waits[task]]
                after += [streams[j] for j in section.joins[task] if j in streams]
                if kind == Kind.HOST:
                    clock = end
                else:
                    clock = run.issue_s[task] + section.host_s[task]
                    after.append(streams.get(section.stream[task], -np.inf))
                    streams[section.stream[task]] = end
                if kind == Kind.COLLECTIVE:
                    communicator = program.collectives[section.payload[task]].communicator
                    after.append(fifos.get(communicator, -np.inf))
                    fifos[communicator] = end
                assert all(begin >= other - 1e-9 for other in after)
                assert end - begin - run.starved_s[task] >= timeline.alone_s[number][run.section][task] - 1e-9


@settings(max_examples=25, deadline=None)
@given(SECTIONS)
def test_same_input_same_output_bit_for_bit(sections: list) -> None:
    job = random.job([random.program(sections, drain_s=0.07)], 2)
    one, two = (simulate(job, machine(job)) for _ in range(2))
    assert one.step_time_s == two.step_time_s
    assert (one.events, one.tasks) == (two.events, two.tasks)
    for number in range(2):
        assert ends(one, number).tobytes() == ends(two, number).tobytes()


def sharded(micro_steps: int) -> Program:
    """A small hybrid-sharded step: gathers and scatters in a shard group, all-reduce of the shards across groups."""
    builder = ProgramBuilder(("compute", "gather", "scatter", "reduce"), ("shard", "replicate"))
    section = builder.section("micro")
    for layer in range(4):
        arrived = section.collective(1, CollectiveCall("all_gather", 3 + layer, "bf16", 0), 0.01, NAME)
        work = builder.segment([kernel(0.31, 0.01), kernel(0.77, 0.02)], [0.05, 0.05])
        before = section.kernels(0, work, NAME, (arrived,))
        done = section.collective(2, CollectiveCall("reduce_scatter", 4, "bf16", 0), 0.01, NAME, (before,))
        section.collective(3, CollectiveCall("all_reduce", 2, "bf16", 1), 0.01, NAME, (done,))
    builder.run(section, micro_steps)
    end = builder.section("end")
    end.kernels(0, builder.segment([kernel(0.2)], [0.05]), NAME, (), (3,))
    end.host(0.1, NAME, (), (0, 1, 2, 3))
    builder.run(end)
    return builder.build()


class RowNetwork(FakeNetwork):
    """Each instance has a link of its own inside, and all share one outside."""

    def coflow(self, kind: str, size_bytes: int, ranks: np.ndarray, dtype: str = "bf16") -> Coflow:
        flat = super().coflow(kind, size_bytes, ranks, dtype)
        links = (*(("inside", int(row[0])) for row in ranks), "x")
        loads = (*(1.0 for _ in ranks), 0.5 * len(ranks))
        return replace(flat, links=links, loads=loads)

    def capacity(self, link: object) -> float:
        return 9.1 if link == "x" else 6.3


@pytest.mark.parametrize("micro_steps", [1, 2, 9])
def test_folded_and_unfolded_agree(micro_steps: int) -> None:
    """Eight ranks in two shard groups of four: one class, or eight."""
    program = sharded(micro_steps)
    shard = np.arange(8).reshape(2, 4)
    replicate = shard.T
    everyone = np.arange(8, dtype=np.int64)
    folded = Job([program], [RankClass(0, everyone, 0, 0, (0, 1))],
                 [Communicator("shard", shard, 1), Communicator("replicate", replicate, 1)], 8)
    unfolded = Job(
        [program], [RankClass(r, everyone[r:r + 1], 0, 0, (r // 4, 2 + r % 4)) for r in range(8)],
        [Communicator("shard", row[None, :], 4) for row in shard]
        + [Communicator("replicate", row[None, :], 2) for row in replicate], 8)
    network = RowNetwork(latency_s=0.021, channels=7, hbm=0.3)
    timelines = [simulate(job, Machine([FakeDevice(per_bps=0.01)], network, job)) for job in (folded, unfolded)]
    assert timelines[0].step_time_s == pytest.approx(timelines[1].step_time_s, abs=1e-9)
    for number in range(8):
        for name in ("issue_s", "start_s", "end_s"):
            np.testing.assert_allclose(getattr(timelines[0].columns(0), name),
                                       getattr(timelines[1].columns(number), name), rtol=0, atol=1e-9)
