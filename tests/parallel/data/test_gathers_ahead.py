"""Megatron's parameter gather beside the next forward, and the buckets of its DDP, by hand."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.api import run
from sim.parallel import Lowered, lower
from sim.program import Kind, Program, Section
from sim.report.numbers.traffic import traffic_totals
from sim.scenario import resolve
from sim.software import stack_for, trial

HIDDEN, LAYERS, VOCAB = 2048, 8, 32768
BLOCK = 4 * HIDDEN**2 + 2 * HIDDEN * 4 * HIDDEN  # matrices of a block; there are no biases
NORMS = 2 * HIDDEN


def scenario(year: int = 2024, compute: str = "bf16", nodes: int = 1, **parallel: Any) -> Any:
    parallel = {"strategy": "zero1", **parallel}
    return resolve({
        "name": "x", "cluster": {"topology": "dgx-h100", "nodes": nodes},
        "model": {"kind": "decoder", "layers": LAYERS, "hidden": HIDDEN, "heads": 16, "norm": "rmsnorm", "vocab": VOCAB,
                  "positions": "rotary", "bias": False, "dropout": False, "tied_embeddings": False},
        "training": {"micro_batch": 1, "global_batch": 64 * nodes, "sequence": 1024, "optimizer": "adam",
                     "attention": "flash",
                     "precision": {"compute": compute, "parameters": "bf16", "master": "fp32", "gradients": "fp32",
                                   "optimizer": "fp32", "gather": "bf16", "reduce": "fp32"}},
        "parallel": parallel, "software": {"framework": "megatron", "year": year}})


@pytest.fixture(autouse=True)
def gathered_ahead() -> Iterator[None]:
    """Also with the buckets of 2024, which are small enough to be several here."""
    with trial({("pytorch", "gathers_ahead"): True}):
        yield


def sections(program: Program) -> list[Section]:
    return [program.sections[number] for number, _ in program.schedule]


def calls(program: Program, section: Section, kind: str) -> list[tuple[int, float]]:
    """(task, bytes) of the collectives of a kind in a section, in the host's order."""
    rows = [(task, program.collectives[section.payload[task]]) for task, what in enumerate(section.kind)
            if what == Kind.COLLECTIVE]
    return [(task, call.size_bytes) for task, call in rows if call.kind == kind]


def test_gathers_stand_in_the_first_forward_where_their_parameters_are_used() -> None:
    """Buckets of 40 million: a head of 67 million; a block of 50 million each, its norms with the block before it in
    backward's order; what is left, the embedding."""
    low = lower(scenario())
    program = low.job.programs[0]
    first, *others = sections(program)
    gathers = calls(program, first, "all_gather")
    assert len(gathers) == 1 + LAYERS + 1
    assert sum(size for _, size in gathers) == 2 * low.architecture.parameters
    assert gathers[-1][1] == 2 * (VOCAB * HIDDEN)  # the head's matrix closes its bucket alone
    assert not any(calls(program, section, "all_gather") for section in others)
    for (task, _), (behind, _) in pairwise(gathers):
        waiting = [t for t, waits in enumerate(first.waits) if task in waits]
        assert len(waiting) == 1 and waiting[0] > behind > task  # the next is sent before compute waits
        assert 0 in first.joins[behind]


def test_the_head_is_waited_for_at_its_product_and_not_at_its_norm() -> None:
    program = lower(scenario()).job.programs[0]
    first = sections(program)[0]
    task = calls(program, first, "all_gather")[-1][0]
    waiting = next(t for t, waits in enumerate(first.waits) if task in waits)
    names = [program.kernels[row].variant for row in program.segments[first.payload[waiting]].kernels if row >= 0]
    assert "rmsnorm" not in " ".join(map(str, names[:1]))
    assert program.labels[first.label[waiting]].layer == "head"


@pytest.mark.parametrize(("year", "overlap"), [(2023, True), (2025, False)])
def test_without_overlap_the_gathers_stand_behind_the_optimizer(year: int, overlap: bool) -> None:
    with trial({("pytorch", "gathers_ahead"): year > 2023}):
        low = lower(scenario(year, overlap=overlap))
    program = low.job.programs[0]
    *others, last = sections(program)
    assert sum(size for _, size in calls(program, last, "all_gather")) == 2 * low.architecture.parameters
    assert not any(calls(program, section, "all_gather") for section in others)


def test_only_the_first_ranks_first_chunk_is_cut_into_buckets() -> None:
    low = lower(scenario(pipeline=2))
    counts = []
    for program in low.job.programs:
        found = [calls(program, section, "reduce_scatter") for section in sections(program)]
        counts.append(sum(map(len, found)))
    assert counts == [LAYERS // 2 + 1, 1]


def test_a_later_stage_gathers_all_of_it_when_its_first_micro_batch_has_come() -> None:
    program = lower(scenario(pipeline=2)).job.programs[1]
    section = next(s for s in sections(program) if calls(program, s, "all_gather"))
    (task, size), = calls(program, section, "all_gather")
    assert size == 2 * (LAYERS // 2 * (BLOCK + NORMS) + HIDDEN + VOCAB * HIDDEN)
    assert 0 in section.joins[task]
    assert section.kind[task - 1] == Kind.KERNELS and section.joins[task - 1]  # joins the stream of the receive


def test_chunks_that_take_turns_are_gathered_ahead_of_them() -> None:
    """Four chunks on two ranks: two before anything else, the third in front of the second's first forward on rank 0
    and one forward earlier on rank 1, the fourth likewise."""
    low = lower(scenario(pipeline=2, schedule="interleaved", virtual_stages=4))
    for rank, program in enumerate(low.job.programs):
        order = sections(program)
        # rank 0's first chunk: block, norms and embedding are two buckets; the second chunk is one
        assert len(calls(program, order[0], "all_gather")) == 3 - rank
        forwards, at = 0, []
        for section in order[1:]:
            for task, kind in enumerate(section.kind):
                if kind == Kind.COLLECTIVE and program.collectives[section.payload[task]].kind == "all_gather":
                    at.append(forwards)
                label = program.labels[section.label[task]]
                forwards += kind == Kind.KERNELS and label.phase == "forward" and label.layer.startswith("chunk")
        assert at == [2 - rank, 4 - rank]  # forwards in front of it: two micro-batches of each chunk before the next


def test_chunks_that_take_turns_are_reduced_behind_their_last_backward() -> None:
    low = lower(scenario(pipeline=2, schedule="interleaved", virtual_stages=4))
    program = low.job.programs[0]
    found = [len(calls(program, section, "reduce_scatter")) for section in sections(program)]
    assert sum(found) == 3 + 2 and found[-1] == 0
    reducing = [s for s in sections(program) if calls(program, s, "reduce_scatter")]
    for section in reducing:
        first = calls(program, section, "reduce_scatter")[0][0]
        assert section.waits[first] == (first - 1,) or section.kind[first - 1] == Kind.KERNELS


def test_what_is_not_narrowed_joins_the_last_bucket_of_what_is() -> None:
    """In fp8 embedding, norms and head have buffers of their own: since 2025 one call moves them with the blocks'."""
    matrices, others = LAYERS * BLOCK, LAYERS * NORMS + HIDDEN + 2 * VOCAB * HIDDEN
    sizes = {}
    for year in (2024, 2025):
        program = lower(scenario(year, "fp8")).job.programs[0]
        sizes[year] = [size for _, size in calls(program, sections(program)[0], "all_gather")]
        assert sum(sizes[year]) == matrices + 2 * others
    assert len(sizes[2024]) > 3 and sizes[2025][1:] == [32 * HIDDEN**2] * 2  # of 96: buckets of 128 Mi
    assert sizes[2025][0] == 32 * HIDDEN**2 + 2 * others


def reduced(low: Lowered) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in traffic_totals(low.job, 0):
        found[row["kind"]] = found.get(row["kind"], 0.0) + row["bytes"]
    return found


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([2, 1]), st.sampled_from(["bf16", "fp8"]))
def test_overlap_moves_the_same_bytes_and_costs_no_time(pipeline: int, virtual: int, compute: str) -> None:
    """But where chunks do not take turns: a stage then gathers when its input is there, one stage after another."""
    schedule = {"schedule": "interleaved", "virtual_stages": virtual} if virtual > 1 and pipeline > 1 else {}
    steps, moved = [], []
    for overlap in (False, True):
        made = scenario(2025, compute, pipeline=pipeline, overlap=overlap, **schedule)
        moved.append(reduced(lower(made)))
        steps.append(run(made).step_time_s)
    assert moved[0] == pytest.approx(moved[1])
    if pipeline == 1 or schedule:
        assert steps[1] <= steps[0] * (1 + 5e-3)  # collectives beside kernels hold SMs


def test_from_nemo_2_on() -> None:
    with trial({("pytorch", "gathers_ahead"): False}):
        assert [stack_for("megatron", year).gathers_ahead for year in (2023, 2024, 2025)] == [False, False, True]
