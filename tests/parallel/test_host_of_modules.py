"""What the host spends on an operator: its own launch, and the Python around it where the model's modules run."""

from __future__ import annotations

from typing import Any

import pytest

import sim.api as sim
from sim.parallel import lower
from sim.scenario import Scenario, resolve
from sim.software import stack_for


def job(hidden: int = 256, **software: Any) -> Scenario:
    return resolve({
        "name": "small", "cluster": {"topology": "dgx-a100-80g", "gpus_per_node": 1},
        "model": {"kind": "decoder", "layers": 4, "hidden": hidden, "heads": 4, "vocab": 1000},
        "training": {"micro_batch": 1, "global_batch": 1, "sequence": 64, "precision": "mixed-bf16"},
        "parallel": {"strategy": "none"}, "software": {"framework": "pytorch", "year": 2024, **software}})


def host_s(phase: str) -> list[float]:
    """Host time of every launch of a phase of a block."""
    program = lower(job()).job.programs[0]
    found: list[float] = []
    for number in program.section_runs():
        section = program.sections[number]
        for payload, label in zip(section.payload, section.label, strict=True):
            name = program.labels[label]
            if name.phase == phase and name.layer == "block0" and payload >= 0:
                segment = program.segments[payload]
                found += [s / program.kernels[k].launches
                          for k, s in zip(segment.kernels, segment.host_s, strict=True) if k >= 0]
    return found


def test_modules_cost_python_and_autograd_does_not() -> None:
    stack = stack_for("pytorch", 2024)
    assert host_s("forward") == pytest.approx([stack.host_forward_s + stack.host_module_s] * len(host_s("forward")))
    assert host_s("backward") == pytest.approx([stack.host_backward_s] * len(host_s("backward")))


def test_a_small_step_is_bound_by_the_host_unless_compiled() -> None:
    eager, compiled = sim.run(job()), sim.run(job(compile=True))
    launches = len(host_s("forward")) * 4
    assert eager.step_time_s > launches * 25e-6
    assert compiled.step_time_s < 0.7 * eager.step_time_s
