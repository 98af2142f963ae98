"""Kernels that stand in for parts of Hugging Face's modules and write over what they read (Liger Kernel's)."""

from __future__ import annotations

from typing import Any

import pytest

from sim.api import run
from sim.model import build
from sim.model.architecture import Layer
from sim.model.eager.mlp import inner
from sim.model.eager.tensors import operations as op
from sim.model.eager.tensors.autograd import Boundary, Run, Tensor
from sim.model.scenario_style import style_of
from sim.report.result import Result
from sim.scenario import Scenario, resolve
from sim.software import stack_of

LIGER = {"liger_kernel": "0.8"}
KIB = 1024


def asked(versions: dict[str, str], model: Any = None, **training: Any) -> Scenario:
    return resolve({
        "name": "x", "cluster": {"topology": "single-h100-80g-sxm"}, "model": model or {"preset": "llama-3.1-8b"},
        "training": {"micro_batch": 1, "global_batch": 1, "sequence": 4096, "precision": "pure-bf16",
                     "attention": "flash", **training},
        "software": {"framework": "pytorch", "year": 2026, "modules": "transformers", "versions": versions}})


def tuned(versions: dict[str, str], **training: Any) -> Result:
    return run(asked(versions, finetune={"method": "lora", "rank": 16}, **training))


def block(scenario: Scenario) -> Layer:
    stack = build(scenario, stack_of(scenario.software), 1).stack
    return next(layer for layer in stack if layer.kind == "block")


@pytest.mark.parametrize("training", [{}, {"chunked_loss": True}, {"chunked_loss": True, "recompute": "full"}])
def test_a_fine_tune_is_faster_and_needs_no_more_memory(training: dict[str, Any]) -> None:
    without, with_ = tuned({}, **training), tuned(LIGER, **training)
    assert with_.step_time_s < without.step_time_s
    assert with_.memory.stages[0].peak_allocated_bytes < without.memory.stages[0].peak_allocated_bytes
    assert with_.memory.device_used_bytes <= without.memory.device_used_bytes


def test_an_rms_norm_is_one_kernel_each_way_and_its_frozen_weight_spares_a_sum() -> None:
    (forward,), (backward,) = next(
        (one.forward, one.backward) for one in block(asked(LIGER)).operators if one.name == "norm1")
    assert (forward.kernel, forward.launches, backward.kernel, backward.launches) == ("persistent", 1, "per_sm", 3)
    assert backward.bytes == 3 * 2 * 4096 * 4096  # gradient and input read, gradient written
    frozen = block(asked(LIGER, finetune={"method": "lora", "rank": 16}))
    (backward,) = next(one.backward for one in frozen.operators if one.name == "norm1")
    assert (backward.bytes, backward.launches) == (3 * 2 * 4096 * 4096, 1)


@pytest.mark.parametrize("model", [
    {"preset": "gpt2"}, {"preset": "bert-base"}, {"preset": "t5-base"}, {"preset": "pythia-6.9b"}])
def test_models_without_a_patch_run_as_they_are(model: dict[str, Any]) -> None:
    """liger_kernel's monkey_patch.py: no GPT-2, BERT, T5 or GPT-NeoX."""
    told = {"sequence": 512, "attention": "eager"}
    plain, same = (asked(versions, model, **told) for versions in ({}, LIGER))
    assert [one.forward for one in block(plain).operators] == [one.forward for one in block(same).operators]
    assert [one.backward for one in block(plain).operators] == [one.backward for one in block(same).operators]


def test_gradients_of_gate_and_up_are_written_over_what_was_kept() -> None:
    """Of 1,024 elements in bf16: forward keeps gate and up beside the result (2 KiB each); backward adds nothing."""
    style = style_of(asked(LIGER), stack_of(asked(LIGER).software), 1)
    engine, boundary = Run("", True, True), Boundary()
    made = inner(engine, style, KIB, lambda _: op.unary(engine, engine.tensor(KIB, "bf16", boundary)))
    made.storage.hand_over()
    engine.memory.mark()
    assert engine.memory.total == 2 * 2 * KIB
    gradient = engine.new(KIB, "bf16")
    assert made.sink is not None
    made.sink.receive(engine, gradient)
    del gradient, made
    engine.backward()
    # the gradient that came in, gate and up; then, at the two operators in front, one new gradient at a time
    assert engine.memory.top == 3 * 2 * KIB


def test_an_operator_that_overwrites_needs_nothing_of_its_own() -> None:
    engine, boundary = Run("", True, True), Boundary()
    x = op.overwritten(engine, Tensor(engine.new(KIB, "bf16"), KIB, "bf16", boundary))
    y = op.layer_norm(engine, x, KIB, 0, 1, "bf16", in_place=True)
    del x
    y.storage.hand_over()
    assert engine.memory.total == 2 * KIB + 512  # the norm's input and a number a row
    gradient = engine.new(KIB, "bf16")
    assert y.sink is not None
    y.sink.receive(engine, gradient)
    del gradient, y
    engine.memory.mark()
    engine.backward()
    assert engine.memory.top == 2 * 2 * KIB + 512
    assert boundary.gradient is not None and engine.memory.total == 2 * KIB
