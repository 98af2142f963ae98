"""Streams and the host, worked out by hand."""

from __future__ import annotations

import pytest
from engine_fakes import NAME, FakeDevice, FakeNetwork, folded, kernel, segment

from sim.engine import DeadlockError, Machine, Timeline, longest_path, simulate
from sim.program import Copy, Program, ProgramBuilder, Read


def run(program: Program, **options: int) -> Timeline:
    job = folded(program)
    return simulate(job, Machine([FakeDevice()], FakeNetwork(), job), **options)


def test_two_streams_overlap_and_events_order_them() -> None:
    builder = ProgramBuilder(("a", "b"), ("c",))
    s = builder.section("s")
    first = s.kernels(0, segment(builder, 2.0), NAME)
    s.kernels(1, segment(builder, 3.0), NAME)
    s.kernels(0, segment(builder, 1.0), NAME)
    s.kernels(1, segment(builder, 1.5), NAME, waits=(first,))
    last = s.kernels(0, segment(builder, 0.5), NAME, joins=(1,))
    s.host(0.0, NAME, waits=(last,))
    builder.run(s)
    (only,) = run(builder.build()).runs(0)
    assert only.start_s.tolist() == [0.0, 0.0, 2.0, 3.0, 4.5, 5.0]
    assert only.end_s.tolist() == [2.0, 3.0, 3.0, 4.5, 5.0, 5.0]


def test_joins_reach_back_to_earlier_sections() -> None:
    builder = ProgramBuilder(("a", "b"), ("c",))
    s = builder.section("s")
    s.kernels(1, segment(builder, 4.0), NAME)
    builder.run(s)
    t = builder.section("t")
    t.kernels(0, segment(builder, 1.0), NAME)
    t.kernels(0, segment(builder, 1.0), NAME, joins=(1,))
    t.host(0.0, NAME, joins=(0,))
    builder.run(t)
    timeline = run(builder.build())
    _, second = timeline.runs(0)
    assert second.start_s.tolist() == [0.0, 4.0, 5.0]
    assert timeline.step_time_s == 5.0


def test_a_late_host_starves_the_gpu_kernel_by_kernel() -> None:
    builder = ProgramBuilder(("a",), ("c",))
    s = builder.section("s")
    work = builder.segment([kernel(1.0), kernel(5.0), kernel(1.0), kernel(1.0)], [2.0, 2.0, 2.0, 4.0])
    s.kernels(0, work, NAME)
    s.host(1.0, NAME, joins=(0,))
    builder.run(s)
    timeline = run(builder.build())
    (only,) = timeline.runs(0)
    # launched at 2, 4, 6, 10: kernels run 2-3, 4-9, 9-10, 10-11; one second of waiting inside, after 3
    assert only.start_s[0] == 2.0
    assert only.end_s.tolist() == [11.0, 12.0]
    assert only.starved_s.tolist() == [1.0, 0.0]
    assert timeline.step_time_s == 12.0
    assert timeline.alone_s[0][0].tolist() == [8.0, 1.0]


def test_host_waits_and_works() -> None:
    builder = ProgramBuilder(("a",), ("c",))
    s = builder.section("s")
    first = s.kernels(0, segment(builder, 4.0, host_s=1.0), NAME)
    s.host(0.5, NAME)  # no wait: only host work
    s.host(0.25, NAME, waits=(first,))
    s.kernels(0, segment(builder, 1.0, host_s=1.0), NAME)
    s.host(0.0, NAME, joins=(0,))
    builder.run(s)
    timeline = run(builder.build())
    (only,) = timeline.runs(0)
    assert only.issue_s.tolist() == [0.0, 1.0, 1.5, 5.25, 6.25]
    assert only.start_s.tolist() == [1.0, 1.0, 5.0, 6.25, 7.25]
    assert only.end_s.tolist() == [5.0, 1.5, 5.25, 7.25, 7.25]
    begins, ends = timeline.host_intervals(0)
    assert begins.tolist() == [0.0, 1.0, 5.0, 5.25, 7.25]
    assert ends.tolist() == [1.0, 1.5, 5.25, 6.25, 7.25]


def test_copies_take_their_time_on_their_stream() -> None:
    builder = ProgramBuilder(("a", "copy"), ("c",))
    s = builder.section("s")
    first = s.copy(1, Copy("d2h", 3), 0.5, NAME)
    s.copy(1, Copy("h2d", 2), 0.5, NAME)
    s.kernels(0, segment(builder, 1.0), NAME, waits=(first,))
    s.host(0.0, NAME, joins=(0, 1))
    builder.run(s)
    (only,) = run(builder.build()).runs(0)
    assert only.start_s.tolist() == [0.5, 3.5, 3.5, 5.5]
    assert only.end_s.tolist() == [3.5, 5.5, 4.5, 5.5]


def test_launch_queue_holds_the_host() -> None:
    builder = ProgramBuilder(("a",), ("c",), launch_queue=4)
    s = builder.section("s")
    for _ in range(3):
        s.kernels(0, segment(builder, 1.0, 1.0, host_s=0.25), NAME)
    s.kernels(0, segment(builder, *[1.0] * 6, host_s=0.25), NAME)  # more than the queue holds: only when it is empty
    s.host(0.0, NAME, joins=(0,))
    builder.run(s)
    job = folded(builder.build())
    machine = Machine([FakeDevice()], FakeNetwork(), job)
    (only,) = simulate(job, machine).runs(0)
    # first two at once; the third when the first has ended (2.25), the fourth when all have (6.25)
    assert only.issue_s.tolist() == [0.0, 0.5, 2.25, 6.25, 7.75]
    assert only.end_s.tolist() == [2.25, 4.25, 6.25, 12.5, 12.5]
    assert longest_path(job, machine) == 12.5


def test_launches_of_a_kernel_count_in_the_queue() -> None:
    builder = ProgramBuilder(("a",), ("c",), launch_queue=4)
    s = builder.section("s")
    for _ in range(2):
        s.kernels(0, builder.segment([kernel(2.0, launches=3)], [0.5]), NAME)
    s.host(0.0, NAME, joins=(0,))
    builder.run(s)
    (only,) = run(builder.build()).runs(0)
    assert only.issue_s.tolist() == [0.0, 2.5, 3.0]


def test_the_hosts_lead_is_carried_into_the_next_step() -> None:
    builder = ProgramBuilder(("a",), ("c",))
    s = builder.section("s")
    s.kernels(0, segment(builder, 3.0, host_s=1.0), NAME)
    builder.run(s)
    timeline = run(builder.build())
    (only,) = timeline.runs(0)
    # step one ends at 4; step two was issued at 1 and runs without a gap
    assert timeline.step_time_s == 3.0
    assert (only.issue_s[0], only.start_s[0], only.end_s[0]) == (-3.0, 0.0, 3.0)
    assert timeline.steps == 2
    assert run(builder.build(), steps=1).step_time_s == 4.0


def test_equal_micro_steps_are_simulated_a_few_times_only() -> None:
    """Thirty repeats without any communication, the host held back by its launch queue."""
    builder = ProgramBuilder(("a",), ("c",), launch_queue=3)
    s = builder.section("micro-step")
    s.kernels(0, segment(builder, 1.0, 1.5, host_s=0.125), NAME)
    s.kernels(0, segment(builder, 2.0, host_s=0.125), NAME)
    builder.run(s, 30)
    end = builder.section("end")
    end.host(0.0, NAME, joins=(0,))
    builder.run(end)
    timeline = run(builder.build())
    assert timeline.step_time_s == 0.125 + 30 * 4.5
    assert timeline.tasks < 20
    assert len(list(timeline.runs(0))) == 31
    full = run(builder.build(), skip_repeats=False)
    assert full.tasks == 2 * 61
    assert full.columns(0).start_s.tolist() == timeline.columns(0).start_s.tolist()


def test_empty_segments_and_sections() -> None:
    builder = ProgramBuilder(("a",), ("c",))
    builder.run(builder.section("nothing"), 5)
    s = builder.section("s")
    s.kernels(0, builder.segment([], []), NAME)
    s.kernels(0, segment(builder, 1.0), NAME)
    builder.run(s)
    timeline = run(builder.build())
    assert timeline.step_time_s == 1.0
    assert len(list(timeline.runs(0))) == 6


def test_columns_are_flat_and_in_host_order() -> None:
    builder = ProgramBuilder(("a", "b"), ("c",))
    s = builder.section("s")
    s.kernels(0, segment(builder, 1.0, host_s=0.5), NAME)
    s.copy(1, Copy("h2d", 2), 0.5, NAME)
    s.host(0.0, NAME, joins=(0, 1))
    builder.run(s, 6)
    timeline = run(builder.build())
    columns = timeline.columns(0)
    assert columns.task.tolist() == [0, 1, 2] * 6
    assert columns.kind.tolist() == [0, 2, 3] * 6
    assert columns.alone_s.tolist() == [1.0, 2.0, 0.0] * 6
    assert columns.end_s[2::3].tolist() == [3.0, 6.0, 9.0, 12.0, 15.0, 18.0]
    assert len(columns.issue_s) == len(columns.starved_s) == 18


def test_wrong_jobs_are_refused() -> None:
    builder = ProgramBuilder(("a",), ("c",))
    s = builder.section("s")
    s.kernels(0, segment(builder, 1.0), NAME, waits=(0,))
    builder.run(s)
    job = folded(builder.build())
    with pytest.raises(ValueError, match="comes later"):
        Machine([FakeDevice()], FakeNetwork(), job)
    assert issubclass(DeadlockError, RuntimeError)


@pytest.mark.parametrize(("behind", "read_s", "begins"), [
    (1, 0.5, 3.0),  # the first kernel ends at 1.5, the host goes on at 2, its launch is over by 2.25: the second's end
    (1, 2.0, 3.75), (2, 0.5, 3.75)])
def test_a_host_reads_what_a_part_of_a_segment_made(behind: int, read_s: float, begins: float) -> None:
    """Three kernels of 1.25, 1.5 and 1 s, launched in 0.25 s each; the third waits for a read."""
    builder = ProgramBuilder(("compute",), ("data",))
    whole = builder.segment_of(builder.rows([kernel(1.25), kernel(1.5), kernel(1.0)]), (0.25,) * 3,
                               (Read(behind, 2, read_s),))
    section = builder.section("step")
    last = section.kernels(0, whole, NAME)
    section.host(0.0, NAME, waits=(last,))
    builder.run(section)
    assert run(builder.build()).step_time_s == begins + 1.0
