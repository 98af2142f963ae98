"""DeepSpeed's pipeline engine: transfers in turn, partitioned tensors, reductions behind the last backward."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

import sim.api as sim
from sim.parallel import lower
from sim.program import Kind, Program
from sim.scenario import Scenario, resolve


def job(framework: str = "deepspeed", year: int = 2022, stages: int = 3, **parallel: Any) -> Scenario:
    return resolve({
        "name": "engine", "cluster": {"topology": "dgx-a100-80g", "nodes": 3},
        "model": {"kind": "decoder", "layers": 6, "hidden": 4096, "heads": 32, "vocab": 32000},
        "training": {"micro_batch": 1, "global_batch": 16, "sequence": 2048, "precision": "mixed-fp16"},
        "parallel": {"strategy": "zero1", "tensor": 4, "sequence_parallel": False, "pipeline": stages,
                     "schedule": "1f1b", **parallel},
        "software": {"framework": framework, "year": year}})


def tasks(program: Program) -> list[tuple[str, str, str]]:
    """(kind, collective, phase) of every task of a step in host order."""
    return [(Kind(kind).name, program.collectives[payload].kind if kind == Kind.COLLECTIVE else "",
             program.labels[label].phase)
            for number in program.section_runs() for section in [program.sections[number]]
            for kind, payload, label in zip(section.kind, section.payload, section.label, strict=True)]


def test_neighbours_call_in_the_same_order() -> None:
    """Of what meets between two stages, outputs go before gradients on both sides (or both would wait for ever)."""
    middle = [(c, phase) for kind, c, phase in tasks(lower(job()).job.programs[1]) if c in ("send", "recv")]
    steady = middle[len(middle) // 2 - 6:len(middle) // 2 + 6]
    text = " ".join(f"{c}-{phase}" for c, phase in steady)
    assert "send-forward recv-backward recv-forward send-backward" in text


def test_every_transfer_ends_before_the_next_begins() -> None:
    """Both ways at once take as long as one way; in turn they take twice as long."""
    program = lower(job()).job.programs[1]
    chained = 0
    for section in program.sections:
        transfers = [i for i, (kind, payload) in enumerate(zip(section.kind, section.payload, strict=True))
                     if kind == Kind.COLLECTIVE and program.collectives[payload].kind in ("send", "recv")]
        for first, second in pairwise(transfers):
            if second == first + 1:
                assert first in section.waits[second]
                chained += 1
    assert chained


@pytest.mark.parametrize("framework,gathers", [("deepspeed", (1, 2)), ("megatron", (1, 1))])
def test_an_output_is_gathered_again_before_backward(framework: str, gathers: tuple[int, int]) -> None:
    program = lower(job(framework, 2022 if framework == "deepspeed" else 2021)).job.programs[1]
    found = set()
    for segment in program.segments:
        inline = [program.collectives[program.inlines[-1 - k].collective] for k in segment.kernels if k < 0]
        count = sum(call.kind == "all_gather" for call in inline)
        if count:
            found.add(count)
    assert found == set(gathers)


@pytest.mark.parametrize("year,kind", [(2020, "reduce_scatter"), (2022, "all_reduce"), (2024, "all_reduce")])
def test_a_bucket_is_reduced_as_the_release_does(year: int, kind: str) -> None:
    reduced = [c for _, c, phase in tasks(lower(job(year=year)).job.programs[0])
               if c in ("reduce_scatter", "reduce", "all_reduce") and phase == "backward"]
    assert set(reduced) == {kind}


def test_reductions_begin_behind_the_last_backward() -> None:
    """Nothing of them is hidden, asked for or not; asked for, the host waits for the device before each."""
    asked, not_asked = (sim.run(job(overlap=overlap)).step_time_s for overlap in (True, False))
    assert not_asked <= asked < 1.01 * not_asked
