"""Memory along the host's clock: the same highest points as the ledger's, at the right times."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine import SectionRun
from sim.memory.curve import Replay, envelope
from sim.memory.ledger import CATEGORIES, peak
from sim.program import CollectiveCall, Label, Program, ProgramBuilder
from sim.work import Kernel

ACTIVATIONS, PARAMETERS = CATEGORIES.index("activations"), CATEGORIES.index("parameters")


def program_of(sizes: list[int], repeats: int) -> Program:
    """Tasks of one second of the host each; before task i an allocation of sizes[i], all freed at the end."""
    builder = ProgramBuilder(("compute",), ("shard",))
    builder.resident = [("shards", 100, "parameters")]
    kernel = builder.segment([Kernel("elementwise", "bf16", (1,), "", 0.0, 1.0, "memory_bound")], [1.0])
    section = builder.section("micro-step")
    for number, size in enumerate(sizes):
        if size:
            section.allocate(f"t{number}", size, "activations")
        section.collective(0, CollectiveCall("all_gather", 1, "bf16", 0), 0.0, Label("block0", "forward", "gather"))
        section.kernels(0, kernel, Label("block0", "forward", "work"))
    for number, size in enumerate(sizes):
        if size:
            section.free(f"t{number}", size, "activations")
    builder.run(section, repeats)
    return builder.build()


def run_of(program: Program, repeats: int) -> SectionRun:
    """Collectives are issued in no time, kernels in a second."""
    tasks = len(program.sections[0])
    issue = np.repeat(np.arange(tasks // 2, dtype=np.float64), 2)
    return SectionRun(0, issue, issue, issue + 1.0, np.zeros(tasks), repeats, tasks / 2)


def test_levels_change_when_the_host_passes() -> None:
    program = program_of([30, 0, 50], 1)
    times, levels = Replay(program).run(run_of(program, 1))
    # the first allocation comes before anything; the second after the second kernel; two frees within the last kernel
    assert times.tolist() == [0.0, 2.0, 2.5, 3.0]
    assert levels[:, ACTIVATIONS].tolist() == [30, 80, 50, 0]
    assert set(levels[:, PARAMETERS].tolist()) == {100}


def test_the_envelope_keeps_the_fullest_moment_of_each_bin() -> None:
    program = program_of([30, 0, 50], 1)
    levels = envelope(program, [run_of(program, 1)], np.array([0.0, 1.0, 2.0, 3.0, 4.0]))
    assert levels[:, ACTIVATIONS].tolist() == [30, 30, 80, 50]  # what ends at an edge belongs to both sides of it
    assert levels.sum(axis=1).tolist() == [130, 130, 180, 150]


def test_what_happens_outside_the_bins_counts_as_their_level() -> None:
    program = program_of([30, 0, 50], 1)
    levels = envelope(program, [run_of(program, 1)], np.array([1.25, 1.5, 1.75]))
    assert levels[:, ACTIVATIONS].tolist() == [30, 30]


def test_runs_skipped_leave_the_level_they_would_have_left() -> None:
    builder = ProgramBuilder(("compute",), ())
    section = builder.section("grows")
    section.host(1.0, Label("step", "forward", "work"))
    section.allocate("kept", 7, "gradients")
    builder.run(section, 5)
    replay = Replay(builder.build())
    replay.skip(0, 5)
    assert replay.level.sum() == 35


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=6), repeats=st.integers(1, 5), bins=st.integers(1, 50))
def test_the_highest_bin_is_the_ledgers_peak(sizes: list[int], repeats: int, bins: int) -> None:
    program = program_of(sizes, repeats)
    edges = np.linspace(0.0, len(sizes) * repeats + 1.0, bins + 1)
    levels = envelope(program, [run_of(program, repeats)], edges)
    assert levels.sum(axis=1).max() == peak(program).peak_allocated_bytes
    assert (levels.sum(axis=1) >= 100).all()
