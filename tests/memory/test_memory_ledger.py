"""The ledger against levels counted by hand and against a plain loop."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.memory.ledger import CATEGORIES, allocated_bytes, peak
from sim.program import Label, Program, ProgramBuilder
from sim.work import Kernel

KERNEL = Kernel("elementwise", "fp32", (1,), "", 0.0, 8.0, "memory_bound")


def _fsdp_like() -> Program:
    builder = ProgramBuilder(("compute",), ())
    builder.resident = [("shards", 100, "parameters"), ("adam", 200, "optimizer_states"), ("cuda", 1000, "context")]
    segment = builder.segment([KERNEL], [0.0])
    step = builder.section("micro")
    for layer in ("block0", "block1"):
        step.allocate(f"{layer}.gathered", 40, "gathered_parameters")
        step.allocate(f"{layer}.saved", 7, "activations")
        step.kernels(0, segment, Label(layer, "forward", "forward"))
        step.free(f"{layer}.gathered", 40, "gathered_parameters")
    for layer in ("block1", "block0"):
        step.allocate(f"{layer}.gathered", 40, "gathered_parameters")
        step.allocate(f"{layer}.grad", 80, "gradients")
        step.kernels(0, segment, Label(layer, "backward", "backward"))
        step.free(f"{layer}.gathered", 40, "gathered_parameters")
        step.free(f"{layer}.grad", 80, "gradients")
        step.free(f"{layer}.saved", 7, "activations")
    builder.run(step, 3)
    update = builder.section("optimizer")
    update.allocate("temporary", 5, "workspace")
    update.kernels(0, segment, Label("optimizer", "optimizer", "step"))
    update.free("temporary", 5, "workspace")
    builder.run(update)
    return builder.build()


def test_peak_by_hand() -> None:
    use = peak(_fsdp_like())
    assert use.peak_allocated_bytes == 100 + 200 + 14 + 40 + 80
    assert allocated_bytes(use.at_peak) == use.peak_allocated_bytes
    assert use.at_peak["context"] == 1000
    assert use.where is not None
    assert (use.where.section, use.where.layer, use.where.phase) == ("micro", "block1", "backward")
    assert use.steady


def test_phase_levels_by_hand() -> None:
    phases = peak(_fsdp_like()).phases
    assert {name: allocated_bytes(level) for name, level in phases.items()} == {
        "after_init": 100, "end_of_forward": 300 + 14 + 40, "peak_in_backward": 434, "optimizer_step": 305}


def test_forward_and_backward_in_separate_sections() -> None:
    builder = ProgramBuilder(("compute",), ())
    segment = builder.segment([KERNEL], [0.0])
    forward = builder.section("forward")
    forward.allocate("saved", 10, "activations")
    forward.kernels(0, segment, Label("b", "forward", "f"))
    backward = builder.section("backward")
    backward.kernels(0, segment, Label("b", "backward", "b"))
    backward.free("saved", 10, "activations")
    builder.run(forward, 4)
    builder.run(backward, 4)
    use = peak(builder.build())
    assert use.peak_allocated_bytes == 40
    assert allocated_bytes(use.phases["end_of_forward"]) == 40
    assert use.steady


def test_resident_only() -> None:
    builder = ProgramBuilder((), ())
    builder.resident = [("p", 12, "parameters")]
    use = peak(builder.build())
    assert use.peak_allocated_bytes == 12
    assert use.where is None


def test_unknown_category_is_refused() -> None:
    builder = ProgramBuilder((), ())
    builder.resident = [("p", 12, "weights")]
    with pytest.raises(ValueError, match="weights"):
        peak(builder.build())


OPERATION = st.tuples(st.integers(0, 5), st.integers(1, 1000), st.sampled_from(CATEGORIES))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.lists(OPERATION, max_size=6), st.integers(1, 4), st.booleans()), max_size=4))
def test_equals_a_plain_walk(plan: list[tuple[list[tuple[int, int, str]], int, bool]]) -> None:
    """Random sections; those marked leave their allocations to the end of the step, where they are released."""
    builder = ProgramBuilder(("compute",), ())
    segment = builder.segment([KERNEL], [0.0])
    owed: list[tuple[str, int, str]] = []
    for number, (operations, repeats, keep) in enumerate(plan):
        section = builder.section(f"s{number}")
        for position, size, category in sorted(operations):
            while len(section.section) < position:
                section.kernels(0, segment, Label("l", ("forward", "backward")[number % 2], "k"))
            section.allocate("t", size, category)
        for _, size, category in operations:
            if keep:
                owed += [("t", size, category)] * repeats
            else:
                section.free("t", size, category)
        builder.run(section, repeats)
    release = builder.section("release")
    for tensor, size, category in owed:
        release.free(tensor, size, category)
    builder.run(release)
    program = builder.build()
    use = peak(program)

    level = dict.fromkeys(CATEGORIES, 0)
    highest, own = 0, dict(level)
    for number in program.section_runs():
        for op in program.sections[number].memory:
            level[op.category] += op.size_bytes
            own[op.category] = max(own[op.category], level[op.category])
            highest = max(highest, allocated_bytes(level))
    assert use.peak_allocated_bytes == highest
    assert use.category_peaks == own
    assert use.steady
    assert all(highest >= size for name, size in own.items() if name not in ("context", "fragmentation"))
