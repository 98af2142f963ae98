"""The optimizer in backward: gradients are freed as they are applied."""

from __future__ import annotations

from typing import Any

import pytest

from sim.errors import UserError
from sim.memory.ledger import peak
from sim.model import optimizer_kernels
from sim.parallel import Lowered, lower
from sim.program import Kind
from sim.scenario import resolve


def lowered(at_once: bool, strategy: str = "none", gpus: int = 1, steps: int = 1, **software: Any) -> Lowered:
    return lower(resolve({
        "name": "t", "cluster": {"topology": "dgx-a100-80g", "gpus_per_node": gpus},
        "model": {"kind": "decoder", "layers": 4, "hidden": 512, "heads": 8, "vocab": 8000, "positions": "rotary"},
        "training": {"micro_batch": 1, "global_batch": gpus * steps, "sequence": 256, "precision": "pure-bf16",
                     "optimizer_in_backward": at_once},
        "parallel": {"strategy": strategy}, "software": {"framework": "pytorch", "year": 2025, **software}}))


def optimizer_bytes(low: Lowered) -> float:
    p = low.job.programs[0]
    return sum(n * p.kernels[row].bytes for s, n in p.schedule for kind, payload in zip(
        p.sections[s].kind, p.sections[s].payload, strict=True) if kind == Kind.KERNELS
        for row in p.segments[payload].kernels if p.kernels[row].op == "optimizer")


@pytest.mark.parametrize(("strategy", "gpus"), [("none", 1), ("fsdp", 8)])
def test_the_same_update_without_the_gradients(strategy: str, gpus: int) -> None:
    after, at_once = lowered(False, strategy, gpus), lowered(True, strategy, gpus)
    assert optimizer_bytes(at_once) == pytest.approx(optimizer_bytes(after), rel=1e-3)
    late, early = peak(after.job.programs[0]), peak(at_once.job.programs[0])
    assert early.steady and late.steady
    gradients = after.architecture.parameters * 2 / gpus
    assert late.category_peaks["gradients"] >= gradients
    largest = max(layer.numel for layer in at_once.architecture.stack) * 2
    assert early.category_peaks["gradients"] <= (1 + 1 / gpus) * 2 * largest
    assert early.highest["optimizer"] < late.highest["optimizer"]


def test_one_call_for_each_parameter() -> None:
    low = lowered(True, optimizer_kernel="fused")
    p, block = low.job.programs[0], low.architecture.stack[1]
    section = p.sections[0]
    task = next(t for t, label in enumerate(section.label) if p.labels[label] == ("block3", "backward", "adamw"))
    training = {"micro_batch": 1, "global_batch": 8, "sequence": 16, "precision": "pure-bf16"}
    given = {"name": "t", "cluster": {"topology": "dgx-a100-80g"}, "model": {"preset": "gpt2"}, "training": training}
    precision = resolve(given).training.precision
    wanted = [optimizer_kernels(q.numel, 1, precision, "adamw", "fused", clip=False)[0] for q in block.parameters]
    assert [p.kernels[row] for row in p.segments[section.payload[task]].kernels] == wanted


def test_fsdp_2_runs_it_on_the_stream_of_its_reductions() -> None:
    p = lowered(True, "fsdp", 8).job.programs[0]
    section = p.sections[0]
    streams = {section.stream[t] for t, label in enumerate(section.label) if p.labels[label].name == "adamw"}
    assert [p.streams[s] for s in streams] == ["reduce_scatter"]
    assert not any(p.labels[label].name == "adamw" for label in p.sections[-1].label)


@pytest.mark.parametrize(("strategy", "gpus", "steps", "software"), [
    ("ddp", 8, 1, {}), ("fsdp", 8, 1, {"fsdp": 1}), ("none", 1, 2, {}), ("zero2", 8, 1, {"framework": "deepspeed"})])
def test_what_keeps_gradients_to_the_end_excludes_it(
    strategy: str, gpus: int, steps: int, software: dict[str, Any],
) -> None:
    with pytest.raises(UserError) as caught:
        lowered(True, strategy, gpus, steps, **software)
    assert {f.field for f in caught.value.faults} == {"training.optimizer_in_backward"}
