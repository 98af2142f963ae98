"""Communicators, contention and rendezvous, worked out by hand."""

from __future__ import annotations

import pytest
from engine_fakes import (
    NAME,
    FakeDevice,
    FakeNetwork,
    folded,
    gather,
    kernel,
    scatter,
    segment,
    two_classes,
)

from sim.engine import DeadlockError, Machine, longest_path, simulate
from sim.program import Program, ProgramBuilder


def test_a_waiting_reduce_scatter_blocks_later_all_gathers() -> None:
    """One communicator is one FIFO, although the gathers have a stream to themselves."""
    builder = ProgramBuilder(("compute", "gather", "scatter"), ("c",))
    s = builder.section("s")
    work = s.kernels(0, segment(builder, 5.0), NAME)
    s.collective(1, gather(1), 0.0, NAME)
    s.collective(2, scatter(2), 0.0, NAME, waits=(work,))
    s.collective(1, gather(1), 0.0, NAME)
    s.host(0.0, NAME, joins=(0, 1, 2))
    builder.run(s)
    job = folded(builder.build())
    machine = Machine([FakeDevice()], FakeNetwork(), job)
    (only,) = simulate(job, machine).runs(0)
    assert only.start_s.tolist() == [0.0, 0.0, 5.0, 7.0, 8.0]
    assert longest_path(job, machine) == 8.0


def test_two_communicators_share_a_link() -> None:
    """Both at half rate until one has ended, then the other alone; latency first, at no cost of bytes."""
    builder = ProgramBuilder(("a", "b"), ("c0", "c1"))
    s = builder.section("s")
    s.collective(0, gather(2, 0), 0.0, NAME)
    s.collective(1, gather(4, 1), 0.0, NAME)
    s.host(0.0, NAME, joins=(0, 1))
    builder.run(s)
    job = folded(builder.build(), communicators=2)
    (only,) = simulate(job, Machine([FakeDevice()], FakeNetwork(latency_s=1.0), job)).runs(0)
    # 2 bytes at 1/2: 1 + 4 = 5; the other has then moved 2 of 4 and ends at 7
    assert only.end_s.tolist() == [5.0, 7.0, 7.0]
    free = Machine([FakeDevice()], FakeNetwork(latency_s=1.0), job, contention=False)
    assert simulate(job, free).step_time_s == 5.0 == longest_path(job, free)


def test_a_flow_that_begins_during_anothers_latency() -> None:
    """Latency is not lost or paid twice when rates change in it."""
    builder = ProgramBuilder(("a", "b"), ("c0", "c1"))
    s = builder.section("s")
    s.collective(0, gather(2, 0), 0.0, NAME)
    s.collective(1, gather(4, 1), 0.75, NAME)
    s.host(0.0, NAME, joins=(0, 1))
    builder.run(s)
    job = folded(builder.build(), communicators=2)
    (only,) = simulate(job, Machine([FakeDevice()], FakeNetwork(latency_s=1.0), job)).runs(0)
    # the first: latency until 1, then 2 bytes at 1/2 until 5; the second: latency until 1.75, 3.25 s at 1/2, then
    # 2.375 bytes alone
    assert only.start_s[:2].tolist() == [0.0, 0.75]
    assert only.end_s.tolist() == [5.0, 7.375, 7.375]


def test_contention_while_the_host_is_late() -> None:
    """Kernels launched at 2, 4, 4.25; 100 SMs taken from 4.5 to 6.5 make them half as fast."""
    builder = ProgramBuilder(("compute", "other", "gather"), ("c",))
    s = builder.section("s")
    before = s.kernels(1, segment(builder, 4.5), NAME)
    s.collective(2, gather(2), 0.0, NAME, waits=(before,))
    s.kernels(0, builder.segment([kernel(1.0)] * 3, [2.0, 2.0, 0.25]), NAME)
    s.host(0.0, NAME, joins=(0, 1, 2))
    builder.run(s)
    job = folded(builder.build())
    (only,) = simulate(job, Machine([FakeDevice()], FakeNetwork(channels=100), job)).runs(0)
    # the second is half done at 4.5 and ends at 5.5; the third has done half at 6.5 and ends at 7
    assert only.end_s.tolist() == [4.5, 6.5, 7.0, 7.0]
    assert only.starved_s.tolist() == [0.0, 0.0, 1.0, 0.0]


def test_contention_that_begins_between_two_launches() -> None:
    """The segment waits for its second launch when the state changes, and again when it changes back."""
    builder = ProgramBuilder(("compute", "other", "gather"), ("c",))
    s = builder.section("s")
    before = s.kernels(1, segment(builder, 3.25), NAME)
    s.collective(2, gather(1), 0.0, NAME, waits=(before,))
    s.kernels(0, segment(builder, 1.0, 1.0, 1.0, host_s=2.0), NAME)
    s.host(0.0, NAME, joins=(0, 1, 2))
    builder.run(s)
    job = folded(builder.build())
    (only,) = simulate(job, Machine([FakeDevice()], FakeNetwork(channels=100), job)).runs(0)
    # 2-3, then idle until 4; from 4 to 4.25 an eighth is done, the rest until 5.125; 6-7
    assert only.end_s.tolist() == [3.25, 4.25, 7.0, 7.0]
    assert only.starved_s.tolist() == [0.0, 0.0, 1.875, 0.0]


def test_flows_on_different_links_do_not_meet() -> None:
    builder = ProgramBuilder(("a", "b"), ("c0", "c1"))
    s = builder.section("s")
    s.collective(0, gather(2, 0), 0.0, NAME)
    s.collective(1, scatter(4, 1), 0.0, NAME)
    s.host(0.0, NAME, joins=(0, 1))
    builder.run(s)
    job = folded(builder.build(), communicators=2)
    network = FakeNetwork(capacities={"x": 1.0, "y": 2.0}, routes={"reduce_scatter": ("x", "y"), "all_gather": ("y",)})
    (only,) = simulate(job, Machine([FakeDevice()], network, job)).runs(0)
    # on y each may have 1; the scatter is held to 1 by x as well
    assert only.end_s.tolist() == [2.0, 4.0, 4.0]


def slowed(split: bool) -> Program:
    builder = ProgramBuilder(("compute", "gather"), ("c",))
    s = builder.section("s")
    first = s.kernels(0, segment(builder, 2.0), NAME)
    if split:
        s.kernels(0, segment(builder, 4.0), NAME)
        s.kernels(0, segment(builder, 6.0), NAME)
    else:
        s.kernels(0, segment(builder, 4.0, 6.0), NAME)
    s.collective(1, gather(2), 1.0, NAME, waits=(first,))
    s.host(0.0, NAME, joins=(0, 1))
    builder.run(s)
    return builder.build()


@pytest.mark.parametrize("split", [False, True])
def test_contention_in_the_middle_of_a_segment(split: bool) -> None:
    """25 SMs taken from 2 to 4.5: 2 s of the 4 s kernel's work take 2.5 s."""
    job = folded(slowed(split))
    machine = Machine([FakeDevice()], FakeNetwork(channels=25, latency_s=0.5), job)
    timeline = simulate(job, machine)
    (only,) = timeline.runs(0)
    assert only.end_s[-2] == 4.5
    assert timeline.step_time_s == pytest.approx(12.5, abs=1e-12)
    assert float(timeline.alone_s[0][0][:-1].sum()) == 14.5
    assert longest_path(job, machine) == 12.0


def test_memory_bandwidth_taken_is_the_mean_over_latency_and_transfer() -> None:
    """2 bytes in 0.5 + 2 s at 3 bytes of traffic each: 2.4 bytes/s; at 1/10 per byte/s kernels run at 1/1.24."""
    job = folded(slowed(False))
    timeline = simulate(job, Machine([FakeDevice(per_bps=0.1)], FakeNetwork(hbm=3.0, latency_s=0.5), job))
    assert timeline.step_time_s == pytest.approx(4.5 + 10.0 - 2.5 / 1.24, abs=1e-12)


def test_a_collective_waits_until_thread_blocks_have_drained() -> None:
    builder = ProgramBuilder(("compute", "gather"), ("c",))
    s = builder.section("s")
    first = s.kernels(0, segment(builder, 1.0), NAME)
    s.kernels(0, segment(builder, 2.0, drain_s=0.25), NAME)
    s.collective(1, gather(1), 0.0, NAME, waits=(first,))
    s.collective(1, gather(4), 0.0, NAME)
    s.collective(1, gather(1), 0.0, NAME)
    s.host(0.0, NAME, joins=(0, 1))
    builder.run(s)
    job = folded(builder.build())
    (only,) = simulate(job, Machine([FakeDevice()], FakeNetwork(), job)).runs(0)
    assert only.start_s[2:5].tolist() == [1.25, 2.5, 6.5]  # the last finds no kernel running
    (only,) = simulate(job, Machine([FakeDevice()], FakeNetwork(), job, drain=False)).runs(0)
    assert only.start_s[2:5].tolist() == [1.0, 2.0, 6.0]


def test_a_late_host_delays_a_collective() -> None:
    builder = ProgramBuilder(("compute", "gather"), ("c",))
    s = builder.section("s")
    s.host(3.0, NAME)
    arrived = s.collective(1, gather(1), 1.0, NAME)
    s.kernels(0, segment(builder, 1.0), NAME, waits=(arrived,))
    s.host(0.0, NAME, joins=(0,))
    builder.run(s)
    job = folded(builder.build())
    machine = Machine([FakeDevice()], FakeNetwork(), job)
    (only,) = simulate(job, machine).runs(0)
    assert only.start_s.tolist() == [0.0, 4.0, 5.0, 6.0]
    assert longest_path(job, machine) == 6.0


def worker(before_s: float, after_s: float) -> Program:
    builder = ProgramBuilder(("compute", "comm"), ("c",))
    s = builder.section("s")
    first = s.kernels(0, segment(builder, before_s), NAME)
    arrived = s.collective(1, gather(2), 0.0, NAME, waits=(first,))
    s.kernels(0, segment(builder, after_s), NAME, waits=(arrived,))
    s.host(0.0, NAME, joins=(0, 1))
    builder.run(s)
    return builder.build()


def test_two_classes_meet() -> None:
    job = two_classes([worker(1.0, 5.0), worker(4.0, 1.0)])
    machine = Machine([FakeDevice()], FakeNetwork(), job)
    timeline = simulate(job, machine)
    early, late = (next(timeline.runs(c)) for c in range(2))
    # step one: they meet at 4, move until 6, the first ends at 11, the second at 7 and goes ahead into step two:
    # there it is ready at 11, the first at 12; they move until 14, end at 19 and 15
    assert timeline.step_time_s == 8.0
    assert (early.start_s + 11.0).tolist() == [11.0, 12.0, 14.0, 19.0]
    assert (late.start_s + 11.0).tolist() == [7.0, 12.0, 14.0, 15.0]
    assert longest_path(job, machine) == 8.0


def test_classes_that_end_together_have_only_one_step_simulated() -> None:
    job = two_classes([worker(1.0, 5.0), worker(4.0, 5.0)])
    timeline = simulate(job, Machine([FakeDevice()], FakeNetwork(), job))
    assert (timeline.steps, timeline.step_time_s) == (1, 11.0)
    assert simulate(job, Machine([FakeDevice()], FakeNetwork(), job), skip_repeats=False).step_time_s == 11.0


def test_send_and_receive_are_one_flow() -> None:
    programs = []
    for kind in ("send", "recv"):
        builder = ProgramBuilder(("compute", "p2p"), ("c",))
        s = builder.section("s")
        call = gather(3).__class__(kind, 3, "bf16", 0)
        if kind == "send":
            work = s.kernels(0, segment(builder, 2.0), NAME)
            s.collective(1, call, 0.0, NAME, waits=(work,))
        else:
            arrived = s.collective(1, call, 0.0, NAME)
            s.kernels(0, segment(builder, 2.0), NAME, waits=(arrived,))
        s.host(0.0, NAME, joins=(0, 1))
        builder.run(s)
        programs.append(builder.build())
    job = two_classes(programs)
    machine = Machine([FakeDevice()], FakeNetwork(), job)
    assert len(machine.flows) == 1
    assert simulate(job, machine, steps=1).step_time_s == 7.0


def test_disagreement_and_deadlock_are_told() -> None:
    other = ProgramBuilder(("compute", "comm"), ("c",))
    s = other.section("s")
    s.collective(1, scatter(2), 0.0, NAME)
    other.run(s)
    job = two_classes([worker(1.0, 1.0), other.build()])
    with pytest.raises(ValueError, match="disagree"):
        simulate(job, Machine([FakeDevice()], FakeNetwork(), job))
    idle = ProgramBuilder(("compute", "comm"), ("c",))
    s = idle.section("s")
    s.kernels(0, segment(idle, 1.0), NAME)
    idle.run(s)
    job = two_classes([worker(1.0, 1.0), idle.build()])
    with pytest.raises(DeadlockError, match="class 0, section 's', task 1"):
        simulate(job, Machine([FakeDevice()], FakeNetwork(), job))


def test_an_infinite_network_takes_no_time_and_disturbs_nothing() -> None:
    job = folded(slowed(False))
    machine = Machine([FakeDevice()], FakeNetwork(channels=25, latency_s=0.5), job)
    assert simulate(job, machine.infinite()).step_time_s == 12.0
    assert longest_path(job, machine, infinite_network=True) == 12.0


def test_a_warm_machine_asks_no_model() -> None:
    job = folded(slowed(False))
    device, network = FakeDevice(), FakeNetwork(channels=25, latency_s=0.5)
    machine = Machine([device], network, job)
    first = simulate(job, machine)
    calls = device.calls, network.calls
    second = simulate(job, machine)
    assert (device.calls, network.calls) == calls
    assert first.columns(0).end_s.tobytes() == second.columns(0).end_s.tobytes()


def test_a_flow_without_bandwidth_is_refused() -> None:
    job = folded(slowed(False))
    with pytest.raises(ValueError, match="no bandwidth"):
        Machine([FakeDevice()], FakeNetwork(capacities={"x": 0.0}), job)
