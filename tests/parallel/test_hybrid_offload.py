"""Optimizers on the CPU behind a pipeline's stages, and Megatron's, of which a part may stay on the GPU: by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.api import machine_for
from sim.engine import simulate
from sim.errors import UserError
from sim.memory.ledger import peak
from sim.parallel import Lowered, lower
from sim.program import Kind, Program
from sim.scenario import Scenario, resolve


def scenario(framework: str = "megatron", pipeline: int = 1, offload: dict[str, Any] | None = None, year: int = 2025,
             strategy: str = "zero1", micro_steps: int = 4, **more: Any) -> Scenario:
    places = {"optimizer": "cpu"} if offload is None else offload
    # DeepSpeed's bucket has its size however small the model is
    parallel = {"strategy": strategy, "pipeline": pipeline, "offload": places, "bucket_mb": 1}
    return resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": 1},
        "model": {"kind": "decoder", "layers": 8, "hidden": 512, "heads": 8, "vocab": 4096, "tied_embeddings": False},
        "training": {"micro_batch": 1, "global_batch": micro_steps * 8 // pipeline // more.get("tensor", 1),
                     "sequence": 256, "precision": "megatron-bf16" if framework == "megatron" else "megatron-fp16",
                     "optimizer": more.pop("optimizer", "adamw")},
        "parallel": parallel | more, "software": {"framework": framework, "year": year}})


def copied(program: Program, direction: str) -> int:
    """Bytes of a step."""
    return sum(program.copies[payload].size_bytes for number in program.section_runs()
               for kind, payload in zip(program.sections[number].kind, program.sections[number].payload, strict=True)
               if kind == Kind.COPY and program.copies[payload].direction == direction)


def held(program: Program, category: str) -> int:
    return sum(size for _, size, of in program.resident if of == category)


def shares(low: Lowered, replicas: int) -> list[float]:
    """Parameters of each program whose optimizer a rank has."""
    stack, programs = low.architecture.stack, low.job.programs
    per = (len(stack) - 2) // len(programs)
    cuts = [stack[1 + i * per:1 + (i + 1) * per] for i in range(len(programs))]
    cuts[0] = (stack[0], *cuts[0])
    cuts[-1] = (*cuts[-1], stack[-1])
    return [sum(layer.numel for layer in cut) / replicas for cut in cuts]


@pytest.mark.parametrize("pipeline", [1, 2, 4])
@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.1])
def test_megatrons_part_goes_down_in_fp32_and_comes_back_in_bf16(pipeline: int, fraction: float) -> None:
    """HybridDeviceOptimizer: once a step, whatever the micro-batches; of master copy and states the rest stays."""
    low = lower(scenario(pipeline=pipeline, offload={"optimizer": "cpu", "optimizer_fraction": fraction}))
    for program, share in zip(low.job.programs, shares(low, 8 // pipeline), strict=True):
        assert copied(program, "d2h") == pytest.approx(4 * fraction * share, rel=1e-4)
        assert copied(program, "h2d") == pytest.approx(2 * fraction * share, rel=1e-4)
        assert held(program, "optimizer_states") == pytest.approx(8 * (1 - fraction) * share, rel=1e-4, abs=512)
        assert held(program, "master_parameters") == pytest.approx(4 * (1 - fraction) * share, rel=1e-4, abs=512)
        outside = sum(size for name, size, _ in program.host_resident if name == "optimizer_states")
        assert outside == pytest.approx(8 * fraction * share, rel=1e-4)


def test_megatrons_norm_is_on_the_gpu_and_its_optimizer_is_not() -> None:
    program = lower(scenario()).job.programs[0]
    section = program.sections[-1]
    names = [program.labels[number].name for number in section.label]
    assert names.index("clip") < names.index("to the optimizer d2h") < names.index("adamw on the CPU")
    assert "adamw" not in names


@pytest.mark.parametrize("micro_steps", [1, 4])
@pytest.mark.parametrize("pipeline", [2, 4])
def test_deepspeeds_stages_hand_their_part_over_once_a_step(pipeline: int, micro_steps: int) -> None:
    """ZeRO-1: gradients are summed on the device, reduced behind the last backward and go down as fp32, whatever the
    micro-batches; updated parameters come up as fp32 masters did (`Offload.update`)."""
    low = lower(scenario("deepspeed", pipeline, micro_steps=micro_steps, year=2023))
    plain = lower(scenario("deepspeed", pipeline, {}, micro_steps=micro_steps, year=2023))
    for program, other, share in zip(low.job.programs, plain.job.programs, shares(low, 8 // pipeline), strict=True):
        assert copied(program, "d2h") == pytest.approx(4 * share, rel=1e-3)
        assert held(program, "optimizer_states") == held(program, "master_parameters") == 0
        assert peak(program).peak_allocated_bytes < peak(other).peak_allocated_bytes


def test_stages_wait_for_the_norm_of_all_of_them() -> None:
    """An optimizer on the CPU clips by the norm of all stages too: without it the first would be through early."""
    for framework in ("megatron", "deepspeed"):
        low = lower(scenario(framework, 4, year=2025 if framework == "megatron" else 2023))
        for program in low.job.programs:
            number = program.communicators.index("model")
            last = program.sections[-1]
            calls = [payload for kind, payload in zip(last.kind, last.payload, strict=True) if kind == Kind.COLLECTIVE]
            assert any(program.collectives[row].communicator == number for row in calls)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(["megatron", "deepspeed"]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]),
       st.sampled_from([1, 3, 8]), st.sampled_from([0.25, 1.0]))
def test_any_offloaded_optimizer_is_steady_and_takes_longer(framework: str, pipeline: int, tensor: int,
                                                            micro_steps: int, fraction: float) -> None:
    year = 2025 if framework == "megatron" else 2023
    offload = {"optimizer": "cpu", "optimizer_fraction": fraction if framework == "megatron" else 1.0}
    of, plain = (scenario(framework, pipeline, places, year, micro_steps=micro_steps, tensor=tensor)
                 for places in (offload, {}))
    low, other = lower(of), lower(plain)
    for program, whole in zip(low.job.programs, other.job.programs, strict=True):
        use = peak(program)
        assert use.steady
        assert use.peak_allocated_bytes <= peak(whole).peak_allocated_bytes
    times = [simulate(one.job, machine_for(s, one)).step_time_s for s, one in ((of, low), (plain, other))]
    assert times[0] > times[1]


@pytest.mark.parametrize(("more", "said"), [
    ({"year": 2023}, "in this framework stays on the GPU"),
    ({"strategy": "ddp"}, "distributed optimizer only"),
    ({"offload": {"optimizer": "nvme"}}, "no optimizer states on disks"),
    ({"optimizer": "lamb"}, "no lamb on the CPU"),
    ({"pipeline": 2, "offload": {"activations": "cpu"}}, "saved tensors of pipeline stages"),
    ({"framework": "deepspeed", "offload": {"optimizer": "cpu", "optimizer_fraction": 0.5}}, "HybridDeviceOptimizer"),
    ({"offload": {"optimizer_fraction": 0.5}}, "HybridDeviceOptimizer")])
def test_what_no_framework_has_is_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        lower(scenario(**more))


def test_shards_kept_outside_are_no_part_of_megatrons_optimizer() -> None:
    """FSDP hands gradients over as they come, also in Megatron's stack of 2025: once, and nothing comes back but what
    is gathered."""
    places = {"parameters": "cpu", "optimizer": "cpu"}
    for framework in ("megatron", "pytorch"):
        low = lower(scenario(framework, offload=places, strategy="fsdp", micro_steps=1))
        program, whole = low.job.programs[0], low.architecture.parameters
        width = 4 if framework == "megatron" else 2
        assert copied(program, "d2h") == pytest.approx(width * whole / 8, rel=1e-3)
        names = [program.labels[number].name for number in program.sections[-1].label]
        assert "to the optimizer d2h" not in names and "updated h2d" not in names
