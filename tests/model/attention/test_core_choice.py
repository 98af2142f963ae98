"""Which kernel computes the core of attention: by call, GPU and release, and what it launches and keeps, by hand."""

from __future__ import annotations

from typing import Any

import pytest

import sim
from sim.errors import UserError
from sim.model.architecture import Layer
from sim.model.attention.core_choice import fused_kernel, kernel_name, masked
from sim.model.scenario_style import style_of
from sim.model.style import Style
from sim.parallel import lower
from sim.scenario import Scenario, resolve
from sim.software import sdpa_kernels, stack_for, stack_of

SEQUENCE, HIDDEN, HEADS, GROUPS, WINDOW = 1024, 1024, 16, 4, 256


def scenario(gpu: str = "a100-80g-sxm", model: dict[str, Any] | None = None, *, dtype: str = "bf16",
             attention: str = "sdpa", batch: int = 2, parallel: dict[str, Any] | None = None,
             training: dict[str, Any] | None = None, **software: Any) -> Scenario:
    return resolve({
        "name": "x", "cluster": {"topology": f"single-{gpu}"} if parallel is None else {"topology": "dgx-a100-80g"},
        "model": {"kind": "decoder", "positions": "rotary", "norm": "rmsnorm", "bias": False, "gated_mlp": True,
                  "layers": 2, "hidden": HIDDEN, "heads": HEADS, "kv_heads": GROUPS, "ffn": 2816, "vocab": 8000,
                  "tied_embeddings": False, **(model or {})},
        "training": {"micro_batch": batch, "global_batch": batch * (1 if parallel is None else 4),
                     "attention": attention, "sequence": SEQUENCE,
                     "precision": "fp32" if dtype == "fp32" else f"pure-{dtype}"},
        "software": {"framework": "pytorch", "year": 2026, "modules": "transformers", **software},
        **({} if parallel is None else {"parallel": parallel})})


def style(*args: Any, **options: Any) -> Style:
    asked = scenario(*args, **options)
    return style_of(asked, stack_of(asked.software), asked.training.micro_batch)


def block(*args: Any, **options: Any) -> Layer:
    found = lower(scenario(*args, **options))
    return next(layer for layer in found.architecture.stack if layer.kind == "block")


OLD, MIDDLE = {"torch": "2.1.2", "transformers": "4.40.0"}, {"torch": "2.6.0", "transformers": "4.56.2"}


@pytest.mark.parametrize(("gpu", "dtype", "model", "versions", "kernel"), [
    ("a100-80g-sxm", "bf16", {}, {}, "flash"),
    ("h100-80g-sxm", "bf16", {}, {}, "cudnn"),  # preferred from PyTorch 2.9 on
    ("h100-80g-sxm", "bf16", {}, MIDDLE, "flash"),
    ("b300", "bf16", {}, {}, "flash"),  # 10.3 is none of the capabilities that prefer cuDNN
    ("mi300x", "bf16", {}, {}, "flash"),
    ("v100-32g-sxm", "fp16", {}, {}, ""),  # grouped heads, which the memory-efficient kernel does not take
    ("v100-32g-sxm", "fp16", {"kv_heads": HEADS}, {}, "efficient"),
    ("v100-32g-sxm", "fp16", {}, OLD, "efficient"),  # heads repeated by transformers
    ("t4", "fp16", {}, OLD, "flash"),  # FlashAttention 1 runs on Turing
    ("t4", "fp16", {"kv_heads": HEADS}, {}, "efficient"),
    ("a100-80g-sxm", "fp32", {}, {}, ""),
    ("a100-80g-sxm", "fp32", {"kv_heads": HEADS}, {}, "efficient"),
    ("a100-80g-sxm", "fp32", {"kv_heads": HEADS, "head_dim": 66}, {}, ""),  # 264 bytes are no multiple of 16
    ("a100-80g-sxm", "bf16", {"window": WINDOW}, {}, "efficient"),
    ("h100-80g-sxm", "bf16", {"window": WINDOW}, {}, "cudnn"),
    ("a100-80g-sxm", "bf16", {"window": SEQUENCE}, {}, "flash"),  # no narrower than the sequence
    ("a100-80g-sxm", "bf16", {"head_dim": 256}, {}, "flash"),
    ("a100-80g-sxm", "bf16", {"head_dim": 256}, OLD, "efficient"),  # FlashAttention 1: up to 128
    ("a100-80g-sxm", "bf16", {"head_dim": 320}, {}, "efficient"),
    ("rtx3090", "bf16", {"head_dim": 128}, OLD, "efficient"),
    ("rtx3090", "bf16", {"head_dim": 128}, {}, "flash"),
    ("a100-80g-sxm", "bf16", {"kv_heads": 1}, {}, "flash"),
    ("a100-80g-sxm", "bf16", {"kv_heads": 1, "fused_qkv": "groups"}, {}, ""),  # Falcon
    ("a100-80g-sxm", "bf16", {"kv_heads": 4, "fused_qkv": "groups"}, MIDDLE, "flash"),
])
def test_the_first_kernel_that_takes_the_call(gpu: str, dtype: str, model: dict[str, Any], versions: dict[str, str],
                                              kernel: str) -> None:
    assert fused_kernel(style(gpu, model, dtype=dtype, versions=versions)) == kernel


def test_dropout_and_windows_are_refused_by_the_memory_efficient_kernel_of_torch_2_0() -> None:
    versions = {"torch": "2.0.1", "transformers": "4.36.2"}
    assert fused_kernel(style("v100-32g-sxm", {}, dtype="fp16", versions=versions)) == "efficient"
    assert fused_kernel(style("v100-32g-sxm", {"dropout": 0.1}, dtype="fp16", versions=versions)) == ""
    assert fused_kernel(style("v100-32g-sxm", {"window": WINDOW}, dtype="fp16", versions=versions)) == ""


def test_rates_are_those_of_the_kernel_that_runs() -> None:
    assert kernel_name(style()) == "flash2"
    assert kernel_name(style(versions=OLD)) == "flash1"
    assert kernel_name(style("h100-80g-sxm")) == "flash3"
    assert kernel_name(style(model={"window": WINDOW})) == "efficient"
    assert kernel_name(style(attention="flash", model={"window": WINDOW})) == "flash2"


def test_kernels_of_a_release_by_capability() -> None:
    stack = stack_for("pytorch", 2026)
    assert sdpa_kernels(stack, "9.0") == ("cudnn", "flash", "efficient")
    assert sdpa_kernels(stack, "12.0") == ("flash", "efficient")
    assert sdpa_kernels(stack, "7.5") == ("efficient",)
    assert sdpa_kernels(stack, "gfx942") == ("flash", "efficient")
    assert sdpa_kernels(stack_for("pytorch", 2022), "8.0") == ()


def attention(layer: Layer) -> Any:
    return next(op for op in layer.operators if op.name == "attention")


def kernel(layer: Layer) -> Any:
    return next(k for k in attention(layer).forward if k.op == "attention")


def test_a_window_is_a_mask_that_every_block_keeps_and_that_skips_nothing() -> None:
    layer, plain = block(model={"window": WINDOW}), block(attention="flash", model={"window": WINDOW})
    pairs = 2 * SEQUENCE * SEQUENCE
    assert {t.name: t.elements for t in attention(layer).saved if t.name == "score_mask"} == {"score_mask": pairs}
    assert kernel(layer).shape[4] == SEQUENCE and not kernel(layer).causal
    assert kernel(layer).bytes - kernel(plain).bytes == pytest.approx(
        2 * HEADS * pairs + 2 * 2 * 2 * SEQUENCE * (HIDDEN - HIDDEN * GROUPS // HEADS))  # each head's, and wide keys
    assert kernel(layer).flops == kernel(plain).flops  # the band's, as utilization counts
    copied = [k for op in layer.operators for k in op.forward if k.variant == "expand_kv"]
    assert len(copied) == 1
    assert copied[0].bytes == 2 * 2 * 2 * SEQUENCE * (HIDDEN + HIDDEN * GROUPS // HEADS)


def test_a_mask_of_numbers_was_made_once_before_transformers_4_53() -> None:
    layer = block(model={"window": WINDOW}, versions=OLD)
    assert masked(style(model={"window": WINDOW}, versions=OLD))
    assert "score_mask" not in {t.name for t in attention(layer).saved}


def test_where_flash_takes_the_call_nothing_differs_from_flash() -> None:
    ours, theirs = block().operators, block(attention="flash").operators
    assert [(a.forward, a.backward, a.saved) for a in ours] == [(b.forward, b.backward, b.saved) for b in theirs]


def test_math_computes_halves_in_fp32_and_keeps_its_softmax() -> None:
    layer = block("v100-32g-sxm", dtype="fp16")
    scores = 2 * HEADS * SEQUENCE**2
    assert [(t.name, t.elements, t.dtype) for t in attention(layer).saved] == [("softmax", scores, "fp32")]
    products = [k for k in attention(layer).forward if k.op == "gemm"]
    assert [(k.shape, k.dtype) for k in products] == [
        ((2 * HEADS, SEQUENCE, SEQUENCE, 64), "fp32"), ((2 * HEADS, SEQUENCE, 64, SEQUENCE), "fp32")]
    old = block("v100-32g-sxm", {"dropout": 0.1}, dtype="fp16", versions={"torch": "2.0.1", "transformers": "4.36.2"})
    assert {k.dtype for k in attention(old).forward if k.op == "gemm"} == {"fp16"}  # before 2.5 in their own
    assert [t.name for t in attention(old).saved] == ["softmax", "attention_dropout_mask", "attention_dropped"]


@pytest.mark.parametrize(("options", "words"), [
    ({"modules": "megatron", "framework": "megatron"}, "Megatron's modules have kernels of their own"),
    ({"versions": {"transformers": "4.30.0"}}, "transformers 4.36 brought it"),
    ({"versions": {"torch": "1.13.1"}, "modules": "plain"}, "PyTorch 2.0"),
    ({"model": {"score_softcap": True}}, "no bound for scores"),
    ({"model": {"positions": "alibi"}}, "ALiBi"),
    ({"model": {"window": WINDOW}, "parallel": {"strategy": "fsdp", "context": 2}}, "cut over context ranks"),
])
def test_what_nobody_has_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        lower(scenario(**options))
    assert "training.attention" in str(caught.value)


def test_a_ring_runs_on_flash_kernels() -> None:
    assert lower(scenario(parallel={"strategy": "fsdp", "context": 2})).architecture.stack


@pytest.mark.parametrize(("release", "kernel"), [(None, "flash2"), ("2.8", "flash2"), ("3.0", "flash3")])
def test_flash_attention_3_is_a_release_that_is_named(release: str | None, kernel: str) -> None:
    named = {} if release is None else {"versions": {"flash_attn": release}}
    found = block("h100-80g-sxm", attention="flash", **named)
    attention = [k for op in found.operators for k in (*op.forward, *op.backward) if k.op == "attention"]
    assert {k.kernel for k in attention} == {kernel}


def test_flash_attention_3_is_faster_on_hopper_alone() -> None:
    for gpu, faster in (("h100-80g-sxm", True), ("a100-80g-sxm", False)):
        second, third = (sim.run(scenario(gpu, attention="flash", versions=named))
                         for named in ({"flash_attn": "2.8"}, {"flash_attn": "3.0"}))
        assert (third.step_time_s < second.step_time_s) is faster


def test_flash_attention_3_takes_grouped_heads_as_they_are() -> None:
    copied = [any("expand_kv" in k.variant for op in block(attention="flash", modules="plain", **named).operators
                  for k in op.forward) for named in ({}, {"versions": {"flash_attn": "3.0"}})]
    assert copied == [True, False]
