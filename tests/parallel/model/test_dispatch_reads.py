"""The host reads how many rows go where before it can launch a dispatch: which tasks that makes, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sim.parallel import lower
from sim.parallel.compute import reads
from sim.program import CollectiveCall, InlineCall, Kind, Program, Read, Section
from sim.scenario import resolve
from sim.work import Kernel

READ_S = 15e-6
GATHER, TRAVEL = (InlineCall(CollectiveCall(kind, 8, "bf16", 0)) for kind in ("all_gather", "all_to_all"))
BLOCKS = 3


def program(year: int, software: dict[str, Any] | None = None, moe: dict[str, Any] | None = None,
            recompute: str = "none", batch: int = 4, **parallel: Any) -> Program:
    found = lower(resolve({
        "name": "x", "cluster": {"topology": "dgx-h100", "gpus_per_node": 4},
        "model": {"kind": "decoder", "norm": "rmsnorm", "positions": "rotary", "gated_mlp": True, "layers": BLOCKS,
                  "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 32000, "moe": {"experts": 8, "top_k": 2,
                                                                                 **(moe or {})}},
        "training": {"micro_batch": 1, "global_batch": batch, "sequence": 1024, "precision": "megatron-bf16",
                     "recompute": recompute},
        "parallel": {"strategy": "zero1", "expert": 4, **parallel},
        "software": {"framework": "megatron", "year": year, **(software or {})}}))
    return found.job.programs[0]


def rows(of: Program, section: Section, task: int) -> list[str]:
    """A KERNELS task's items by kind or variant."""
    def name(row: int) -> str:
        if row >= 0:
            return of.kernels[row].variant
        return of.collectives[of.inlines[-1 - row].collective].kind
    return [name(row) for row in of.segments[section.payload[task]].kernels]


def hosts(of: Program) -> list[tuple[Section, int]]:
    return [(section, task) for section in of.sections for task, kind in enumerate(section.kind)
            if kind == Kind.HOST and of.labels[section.label[task]].name == "read"]


def test_where_the_host_stops_among_items() -> None:
    kernel = Kernel("elementwise", "bf16", (1,), "copy", 0.0, 1.0, "memory_bound")
    asks, told = TRAVEL._replace(reads_s=1.0), GATHER._replace(told=True)
    assert reads([kernel, GATHER, kernel, TRAVEL]) == ()
    assert reads([kernel, told, kernel, kernel, asks, kernel]) == (Read(2, 4, 1.0),)
    assert reads([kernel, GATHER, kernel, asks]) == (Read(3, 3, 1.0),)
    # the second dispatch knows nothing of what the first one's counts said
    assert reads([told, asks, kernel, asks]) == (Read(1, 1, 1.0), Read(3, 3, 1.0))


def test_counts_are_read_beside_the_permutation() -> None:
    found = hosts(of := program(2025, {"dispatcher": "alltoall"}))
    assert len(found) == BLOCKS
    for section, task in found:
        awaited, = section.waits[task]
        assert section.host_s[task] == READ_S and section.joins[task] == ()
        assert rows(of, section, awaited)[-2:] == ["route", "all_gather"]
        assert awaited == task - 2 and rows(of, section, task - 1) == ["dispatch"]
        assert rows(of, section, task + 1)[0] == "all_to_all"


@pytest.mark.parametrize(("year", "software", "in_front"), [
    (2024, {}, ["all_gather", "dispatch"]), (2025, {"dispatcher": "flex"}, ["route", "dispatch"])])
def test_what_stands_in_front_of_a_dispatch_is_over(year: int, software: dict[str, Any], in_front: list[str]) -> None:
    found = hosts(of := program(year, software))
    assert len(found) == BLOCKS
    for section, task in found:
        assert section.waits[task] == (task - 1,) and rows(of, section, task - 1)[-2:] == in_front


def test_recomputation_reads_again_and_backward_knows() -> None:
    assert len(hosts(program(2025, recompute="full"))) == 2 * BLOCKS
    plain = program(2025)
    assert all(plain.labels[section.label[task]].phase == "forward" for section, task in hosts(plain))


@pytest.mark.parametrize("moe", [{"capacity": 1.0}, {"capacity": 1.0, "padded": False}])
def test_padded_experts_have_nothing_to_tell(moe: dict[str, Any]) -> None:
    assert len(hosts(program(2025, moe=moe))) == (0 if moe.get("padded", True) else BLOCKS)


@pytest.mark.parametrize(("overlap", "reading"), [("none", 2), ("batches", 1)])
def test_a_dispatch_behind_another_batch_s_experts_waits_for_nothing(overlap: str, reading: int) -> None:
    """Of two micro-batches the first forward stands alone, the second runs with its backward."""
    of = program(2025, {"dispatcher": "alltoall"}, batch=8, overlap_experts=overlap)
    sections = [id(section) for section, _ in hosts(of)]
    assert sum(repeats * sections.count(id(of.sections[number])) for number, repeats in of.schedule) == reading * BLOCKS


def test_no_segment_is_lost() -> None:
    def launched(of: Program) -> dict[str, int]:
        counted: dict[str, int] = {}
        for number, repeats in of.schedule:
            section = of.sections[number]
            for task, kind in enumerate(section.kind):
                for name in rows(of, section, task) if kind == Kind.KERNELS else ():
                    counted[name] = counted.get(name, 0) + repeats
        return counted
    waits, knows = program(2025, {"dispatcher": "alltoall"}), program(2025, {"dispatcher": "alltoall"},
                                                                      moe={"capacity": 1.0})
    both = launched(waits), launched(knows)
    for one in both:
        one.pop("all_gather", None)
    assert both[0] == both[1]
