"""Operators of decoders by hand, and what must hold for any of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.model import Architecture, Layer, accumulation_kernels, build
from sim.scenario import resolve
from sim.software import stack_for
from sim.work import CATEGORIES, Kernel

GPT = {"kind": "decoder", "layers": 2, "hidden": 64, "heads": 4, "vocab": 1000, "max_positions": 128,
       "positions": "learned", "norm": "layernorm", "bias": True, "tied_embeddings": True}
LLAMA = {"kind": "decoder", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 192, "gated_mlp": True,
         "activation": "silu", "vocab": 1000, "positions": "rotary", "norm": "rmsnorm", "bias": False,
         "tied_embeddings": False}


def made(model: dict[str, Any] | None = None, batch: int = 2, **given_fields: Any) -> Architecture:
    """The architecture of a small scenario; keywords starting with a framework's fact go to `software`."""
    software = given_fields.pop("software", {})
    training = {"micro_batch": batch, "global_batch": batch, "sequence": 128, "precision": "pure-bf16"} | given_fields
    strategy = "fsdp" if str(training["precision"]).startswith("fsdp") else "none"
    scenario = resolve({"name": "small", "cluster": {"topology": "single-a100-80g-sxm"}, "model": model or GPT,
                        "training": training, "parallel": {"strategy": strategy}, "software": software})
    named = scenario.software
    stack = stack_for(named.framework, named.year, named.compile, named.versions, named.modules)
    return build(scenario, stack, batch)


def block(architecture: Architecture) -> Layer:
    return architecture.stack[1]


def kernels(layers: Iterable[Layer]) -> list[Kernel]:
    return [k for layer in layers for op in layer.operators for k in (*op.forward, *op.backward)]


def moved(layer: Layer) -> float:
    return sum(k.bytes for k in kernels([layer]))


def test_up_projection_by_hand() -> None:
    up = next(op for op in block(made()).operators if op.name == "up")
    tokens, hidden, ffn = 2 * 128, 64, 256
    forward, data, weight, bias = (*up.forward, *up.backward)
    assert forward == Kernel("gemm", "bf16", (1, tokens, ffn, hidden), "tn", 2.0 * tokens * hidden * ffn,
                             2.0 * (tokens * hidden + hidden * ffn + tokens * ffn), "gemm")
    assert (data.shape, data.variant) == ((1, tokens, hidden, ffn), "nn")
    assert (weight.shape, weight.variant) == ((1, ffn, hidden, tokens), "nt")
    assert bias.bytes == 2 * tokens * ffn
    assert [p.name for p in up.parameters] == ["up.bias", "up.weight"]


def test_equal_blocks_are_one_object_and_builds_are_remembered() -> None:
    first, again = made(), made()
    assert first is again
    assert first.stack[1] is first.stack[2]
    assert [layer.kind for layer in first.stack] == ["embedding", "block", "block", "head"]


def test_tied_head_multiplies_by_the_embedding() -> None:
    tied, untied = made(), made(GPT | {"tied_embeddings": False})
    assert untied.parameters - tied.parameters == 1000 * 64
    assert tied.forward_flops == untied.forward_flops
    assert [p.name for p in tied.stack[-1].parameters] == ["ln_f.weight", "ln_f.bias"]
    assert tied.stack[0].gradient_order[-1].name == "wte.weight"


def test_registration_order_of_the_three_module_styles() -> None:
    def names(**software: Any) -> list[str]:
        model = LLAMA if software["modules"] == "transformers" else GPT
        return [p.name for p in block(made(model, software=software)).parameters]
    assert names(modules="plain")[:5] == ["ln1.weight", "ln1.bias", "ln2.weight", "ln2.bias", "qkv.weight"]
    assert names(modules="transformers") == [
        "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight",
        "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
        "input_layernorm.weight", "post_attention_layernorm.weight"]
    assert names(modules="megatron")[2] == "self_attention.linear_qkv.weight"


def test_conv1d_registers_input_first() -> None:
    shapes = {p.name: p.shape for p in block(made(software={"modules": "transformers"})).parameters}
    assert shapes["attn.c_attn.weight"] == (64, 192)
    assert shapes["mlp.c_proj.weight"] == (256, 64)


@pytest.mark.parametrize(("changes", "products"), [
    ({}, 1), ({"activation": "relu"}, 3),                  # GPT-2's Conv1D; OPT's q_proj, k_proj and v_proj
    ({"kv_heads": 1, "fused_qkv": "parts"}, 1), ({"fused_qkv": "heads"}, 1)])   # GPT-BigCode's linear layer, two ways
def test_only_gpt_2s_own_code_stores_weights_input_first(changes: dict[str, Any], products: int) -> None:
    layer = block(made({**GPT, **changes}, software={"modules": "transformers"}))
    assert ("attn.c_attn.weight" in {p.name for p in layer.parameters}) == (not changes)
    qkv = next(op for op in layer.operators if op.name == "qkv")
    assert [k.op for k in qkv.forward] == ["gemm"] * products


def test_gradients_arrive_backwards() -> None:
    order = [p.name for p in block(made(LLAMA, software={"modules": "transformers"})).gradient_order]
    assert order == [
        "mlp.down_proj.weight", "mlp.up_proj.weight", "mlp.gate_proj.weight", "post_attention_layernorm.weight",
        "self_attn.o_proj.weight", "self_attn.v_proj.weight", "self_attn.k_proj.weight", "self_attn.q_proj.weight",
        "input_layernorm.weight"]


def test_autocast_casts_every_weight_once_per_forward_and_its_gradient_back() -> None:
    layer = block(made(precision="amp-bf16"))
    matrices = sum(p.numel for p in layer.parameters if len(p.shape) == 2)
    casts = [k for op in layer.operators for k in op.forward if k.variant == "weight_cast"]
    assert sum(k.bytes for k in casts) == 6 * matrices
    back = [k for op in layer.operators for k in op.backward if k.variant == "weight_gradient_cast"]
    assert sum(k.bytes for k in back) == 6 * matrices
    assert layer.input.dtype == "fp32"
    assert not [k for k in kernels([block(made())]) if "cast" in k.variant]


def test_fsdp_mixed_precision_computes_in_half_throughout() -> None:
    wrapped, pure = made(precision="fsdp-bf16"), made(precision="pure-bf16")
    assert kernels([block(wrapped)]) == kernels([block(pure)])


def test_megatron_adds_weight_gradients_in_the_product() -> None:
    software = {"framework": "megatron", "modules": "megatron", "year": 2024}
    fused = made(precision="megatron-bf16", software=software)
    plain = made(precision="megatron-bf16", software=software | {"year": 2021})
    assert not [k for k in kernels([block(fused)]) if k.variant == "main_grad_add"]
    matrices = sum(p.numel for p in block(plain).parameters if len(p.shape) == 2)
    added = [k for k in kernels([block(plain)]) if k.variant == "main_grad_add"]
    assert sum(k.bytes for k in added) == 10 * matrices


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_early_stop_skips_the_last_product_unless_a_mask_follows(dropout: float) -> None:
    stopped = block(made(GPT | {"dropout": dropout}))
    skipped = [op.name for op in stopped.operators if not op.recomputed]
    assert skipped == (["residual2"] if dropout else ["down", "residual2"])
    whole = block(made(GPT | {"dropout": dropout}, software={"year": 2021, "versions": {"torch": "1.13"}}))
    assert all(op.recomputed for op in whole.operators)


def test_attention_in_full_and_causal() -> None:
    core = next(op for op in block(made(LLAMA)).operators if op.core)
    forward, backward = core.forward[0], core.backward[0]
    assert forward.shape == (2, 4, 4, 128, 128, 16)  # grouped keys and values are copied out in front of it
    assert forward.causal and forward.kernel == "flash2"
    assert forward.flops == 4 * 2 * 128 * 128 * 64
    assert backward.flops == 2.5 * forward.flops


def test_window_counts_the_band() -> None:
    core = next(op for op in block(made(GPT | {"window": 32})).operators if op.core)
    pairs = sum(min(i + 1, 32) for i in range(128))
    assert core.forward[0].flops == pytest.approx(4 * 2 * pairs * 64, rel=0.01)
    assert not core.forward[0].causal


def test_eager_attention_does_four_products_backward() -> None:
    eager, flash = made(attention="eager"), made(attention="flash")
    assert eager.forward_flops == flash.forward_flops
    core = next(op for op in block(eager).operators if op.core)
    assert sum(k.flops for k in core.backward) == 2 * sum(k.flops for k in core.forward)
    assert {k.category for k in core.forward} == {"attention"}


def test_loss_bytes_per_logit() -> None:
    def per_logit(**fields: Any) -> float:
        architecture = made(**fields)
        loss = architecture.stack[-1].operators[-1]
        return sum(k.bytes for k in (*loss.forward, *loss.backward)) / (2 * 128 * 1000)
    assert per_logit(precision="amp-bf16") == 4 + 6 + 4 + 6 + 8  # log-softmax in halves, nll in fp32
    assert per_logit(precision="pure-bf16") == 14
    assert per_logit(precision="fp32") == 28
    composer = {"framework": "composer", "year": 2023, "versions": {"composer": "0.13.3", "torch": "1.13.1"}}
    assert per_logit(precision="fsdp-bf16", software=composer) == 6 + 4 + 6  # flash-attn's loss, and one metric
    composer["versions"] = {"composer": "0.12.1", "torch": "1.13.1"}
    assert per_logit(precision="fsdp-bf16", software=composer) == 14 + 2 * (4 + 6)


def test_predicted_tokens_shrink_the_head_only() -> None:
    few, every = made(predicted_tokens=16), made()
    assert few.stack[1] == every.stack[1]
    assert few.stack[-1].forward_flops * 8 == every.stack[-1].forward_flops


def test_accumulation_reads_two_and_writes_one() -> None:
    (kernel,) = accumulation_kernels(1000, 3, "fp32")
    assert (kernel.bytes, kernel.launches) == (12000, 3)


MODELS = st.fixed_dictionaries({
    "kind": st.just("decoder"), "layers": st.integers(1, 3), "hidden": st.just(64), "heads": st.just(8),
    "kv_heads": st.sampled_from([1, 2, 8]), "ffn": st.sampled_from([96, 256]), "gated_mlp": st.booleans(),
    "vocab": st.integers(100, 2000), "max_positions": st.just(128),
    "positions": st.sampled_from(["learned", "rotary", "alibi", "none"]),
    "norm": st.sampled_from(["layernorm", "rmsnorm"]), "bias": st.booleans(), "tied_embeddings": st.booleans(),
    "dropout": st.sampled_from([0.0, 0.1]), "parallel_block": st.booleans()})
ANY = {
    "model": MODELS, "modules": st.sampled_from(["plain", "transformers", "megatron"]),
    "precision": st.sampled_from(["fp32", "amp-bf16", "fsdp-bf16", "pure-fp16", "megatron-bf16", "fp8"]),
    "attention": st.sampled_from(["eager", "flash"]), "batch": st.integers(1, 3)}


@settings(max_examples=40, deadline=None)
@given(**ANY)
def test_any_decoder(model: dict[str, Any], modules: str, precision: str, attention: str, batch: int) -> None:
    """Closed forms of parameters and FLOPs, and every gradient exactly once."""
    attention = "eager" if precision == "fp32" else attention
    got = made(model, batch, precision=precision, attention=attention, software={"modules": modules})
    h, kv, f, v, tokens = 64, 8 * model["kv_heads"], model["ffn"], model["vocab"], batch * 128
    matrices = h * (h + 2 * kv) + h * h + (3 if model["gated_mlp"] else 2) * h * f
    dense = model["layers"] * matrices + h * v
    scores = model["layers"] * 4 * batch * 128 * 128 * h
    assert got.forward_flops == 2 * tokens * dense + scores
    assert got.backward_flops == 4 * tokens * dense + scores * (2.5 if attention == "flash" else 2)
    norms = (1 if model["parallel_block"] else 2) * model["layers"] + 1
    small = norms * h * (2 if model["norm"] == "layernorm" and model["bias"] else 1)
    biases = model["layers"] * (h + 2 * kv + h + h + f * (2 if model["gated_mlp"] else 1)) if model["bias"] else 0
    tables = v * h * (1 if model["tied_embeddings"] else 2) + (128 * h if model["positions"] == "learned" else 0)
    assert got.parameters == model["layers"] * matrices + small + biases + tables
    for layer in got.stack:
        assert sorted(p.name for p in layer.gradient_order) == sorted(p.name for p in layer.parameters)
    for kernel in kernels(got.stack):
        assert kernel.bytes > 0 or kernel.kernel == "one_warp"
        assert kernel.launches >= 0 and kernel.category in CATEGORIES


@settings(max_examples=25, deadline=None)
@given(**ANY)
def test_compiling_never_adds_bytes_or_launches(
    model: dict[str, Any], modules: str, precision: str, attention: str, batch: int,
) -> None:
    attention = "eager" if precision == "fp32" else attention
    eager, compiled = (made(model, batch, precision=precision, attention=attention,
                            software={"modules": modules, "compile": flag}) for flag in (False, True))
    assert moved(block(compiled)) <= moved(block(eager))
    assert sum(k.launches for k in kernels([block(compiled)])) < sum(k.launches for k in kernels([block(eager)]))
    assert compiled.forward_flops == eager.forward_flops


@settings(max_examples=25, deadline=None)
@given(**ANY)
def test_more_sequences_cost_more_of_everything(
    model: dict[str, Any], modules: str, precision: str, attention: str, batch: int,
) -> None:
    attention = "eager" if precision == "fp32" else attention
    less, more = (made(model, size, precision=precision, attention=attention, software={"modules": modules})
                  for size in (batch, batch + 1))
    assert moved(block(less)) < moved(block(more))
    assert less.forward_flops < more.forward_flops
    kept = [sum(t.size_bytes for t in block(a).saved) for a in (less, more)]
    assert kept[0] < kept[1]


@pytest.mark.parametrize(("software", "hidden", "passes", "kernel"), [
    ({"framework": "pytorch", "year": 2024}, 64, 5, ""),
    ({"framework": "megatron", "year": 2021}, 1024, 5, ""),
    ({"framework": "megatron", "year": 2022}, 1024, 3, "persistent"),
    ({"framework": "megatron", "year": 2022}, 1088, 5, ""),  # not among the widths apex's kernel was built for
    ({"framework": "megatron", "year": 2024}, 1088, 3, "persistent"),
    ({"framework": "nanotron", "year": 2025}, 64, 3, "persistent")])
def test_norms_read_their_input_once_where_the_kernel_is_persistent(
    software: dict[str, Any], hidden: int, passes: int, kernel: str,
) -> None:
    norm = block(made(GPT | {"hidden": hidden, "heads": 4}, software=software)).operators[0]
    (forward,), backward = norm.forward, norm.backward
    size = 2 * 128 * hidden * 2
    assert (forward.bytes, sum(k.bytes for k in backward)) == (2 * size, passes * size)
    assert {forward.kernel, *(k.kernel for k in backward)} == {kernel}
    assert [k.variant for k in backward] == (["backward"] if kernel else ["inputs", "weights"])


@pytest.mark.parametrize(("framework", "year", "precision", "tied", "expected"), [
    ("nanotron", 2025, "megatron-bf16", False, 10), ("megatron", 2024, "megatron-bf16", False, 10),
    ("megatron", 2024, "megatron-bf16", True, 10),  # the head adds its part in its own product
    ("nanotron", 2025, "megatron-bf16", True, 0),  # the head's addition adds the sum of both
    ("megatron", 2021, "megatron-fp16", False, 0),  # a buffer no wider than the gradient: see data.bucketed
    ("pytorch", 2024, "mixed-bf16", False, 0)])
def test_a_gradient_buffer_gets_the_table_s_gradient_too(
    framework: str, year: int, precision: str, tied: bool, expected: int,
) -> None:
    """2 bytes of the dense half gradient read, 4 of the buffer read and written."""
    model = (GPT if tied else LLAMA) | {"vocab": 1024}
    lookup = made(model, precision=precision, software={"framework": framework, "year": year}).stack[0].operators[0]
    assert sum(k.bytes for k in lookup.backward if k.variant == "main_grad_add") == expected * 1024 * 64


@pytest.mark.parametrize(("framework", "name"), [("pytorch", "gelu"), ("megatron", "activation")])
def test_only_an_exact_gelu_is_told_from_other_activations(framework: str, name: str) -> None:
    """PyTorch's takes erf, 53 instructions an element; Megatron's fused one tanh."""
    named = {kernel.variant for operator in block(made(software={"framework": framework})).operators
             for kernel in (*operator.forward, *operator.backward) if kernel.op == "elementwise"}
    assert {name, f"{name}_backward"} <= named
    assert not {"gelu", "activation"} - {name} & named
