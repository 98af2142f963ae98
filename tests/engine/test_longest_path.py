"""The longest path by itself: hand-worked cases, and many variants in one sweep."""

from __future__ import annotations

import engine_random as random
import numpy as np
import pytest
from engine_fakes import NAME, FakeDevice, FakeNetwork, folded, gather, kernel, segment, two_classes
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine import LongestPath, Machine, longest_path
from sim.program import Kind, ProgramBuilder


def test_three_lanes_by_hand() -> None:
    """Host 1 s per launch; a gather of 0.5 + 4 s; compute waits for it."""
    builder = ProgramBuilder(("compute", "gather"), ("c",))
    s = builder.section("s")
    arrived = s.collective(1, gather(4), 1.0, NAME)
    s.kernels(0, segment(builder, 2.0, 2.0, host_s=1.0), NAME)  # launched at 2 and 3: until 6
    s.kernels(0, segment(builder, 3.0, host_s=1.0), NAME, waits=(arrived,))  # 6 to 9; the gather ends at 5.5
    s.host(0.5, NAME, joins=(0,))
    builder.run(s, 2)
    job = folded(builder.build())
    machine = Machine([FakeDevice()], FakeNetwork(latency_s=0.5), job)
    assert longest_path(job, machine, steps=1) == 19.0
    assert longest_path(job, machine) == 19.0
    # no waiting for bytes: nothing changes, compute is the longest
    assert longest_path(job, machine, infinite_network=True) == 19.0


def test_a_host_that_is_the_bottleneck() -> None:
    builder = ProgramBuilder(("compute",), ("c",))
    s = builder.section("s")
    s.kernels(0, segment(builder, 1.0, 1.0, 1.0, host_s=2.0), NAME)
    builder.run(s, 3)
    job = folded(builder.build())
    machine = Machine([FakeDevice()], FakeNetwork(), job)
    assert longest_path(job, machine, steps=1) == 19.0  # the ninth launch at 18
    assert longest_path(job, machine, steps=3) == 18.0


def test_a_circle_is_refused() -> None:
    """Two ranks put two communicators' operations on one stream in opposite orders."""
    programs = []
    for order in ((0, 1), (1, 0)):
        builder = ProgramBuilder(("comm",), ("c0", "c1"))
        s = builder.section("s")
        for communicator in order:
            s.collective(0, gather(1, communicator), 0.0, NAME)
        builder.run(s)
        programs.append(builder.build())
    job = two_classes(programs, communicators=2)
    with pytest.raises(ValueError, match="circle"):
        longest_path(job, Machine([FakeDevice()], FakeNetwork(), job))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(random.recipes(), st.integers(1, 2)), min_size=1, max_size=2), st.integers(1, 2),
       st.booleans(), st.lists(st.sampled_from([0.5, 0.77, 1.0, 1.9]), min_size=1, max_size=4))
def test_many_variants_in_one_sweep(sections: list, parties: int, synchronise: bool, speeds: list[float]) -> None:
    """Row v of the durations is the same job on devices `speeds[v]` times as slow."""
    job = random.job([random.program(sections, synchronise=synchronise)], parties)

    def machine(slow: float) -> Machine:
        network = FakeNetwork(latency_s=0.1, capacities={"x": 1700.0})
        return Machine([FakeDevice(slow), FakeDevice(1.3 * slow)], network, job)

    path = LongestPath(job, machine(1.0))
    compute = np.concatenate([s.kind for s in job.programs[0].sections]) == Kind.KERNELS
    rows = [np.where(compute, alone * np.array(speeds)[:, None], alone) for alone in path.alone_s]
    swept = path.step_time_s(rows)
    assert swept.shape == (len(speeds),)
    np.testing.assert_allclose(swept, [longest_path(job, machine(slow)) for slow in speeds], rtol=0, atol=1e-9)


def test_longer_durations_never_shorten_the_path() -> None:
    builder = ProgramBuilder(("compute", "gather"), ("c",))
    s = builder.section("s")
    arrived = s.collective(1, gather(2), 0.1, NAME)
    s.kernels(0, builder.segment([kernel(0.3), kernel(0.4)], [0.2, 0.2]), NAME, waits=(arrived,))
    s.kernels(0, segment(builder, 1.0), NAME)
    s.host(0.1, NAME, joins=(0, 1))
    builder.run(s)
    job = folded(builder.build())
    path = LongestPath(job, Machine([FakeDevice()], FakeNetwork(), job))
    base = path.alone_s[0]
    rows = np.vstack([base, *(base * (1.0 + 0.5 * (np.arange(len(base)) == i)) for i in range(len(base)))])
    swept = path.step_time_s([rows])
    assert swept[0] == path.step_time_s() == longest_path(job, path.machine)
    assert (swept >= swept[0]).all() and swept.max() > swept[0]
