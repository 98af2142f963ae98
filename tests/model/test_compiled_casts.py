"""Casts to 8 bits under torch.compile: bytes by hand, in bytes per element of the stream, and what Inductor made."""

from __future__ import annotations

from typing import Any

import pytest

from sim.memory.ledger import peak
from sim.model import build
from sim.model.architecture import Layer, Operator
from sim.model.eager import layer_profile
from sim.model.recompute import again_operators
from sim.parallel import Lowered, lower
from sim.scenario import resolve
from sim.software import stack_for
from sim.work import Kernel

BATCH, SEQUENCE, HIDDEN, FFN = 4, 1024, 1024, 2816
UNIT = BATCH * SEQUENCE * HIDDEN
#: The inner width, and all weights of a Llama block with four heads of keys, over elements of the stream.
F, W = FFN / HIDDEN, (2.5 * HIDDEN**2 + 3 * HIDDEN * FFN) / UNIT
LLAMA = {"kv_heads": 4, "ffn": FFN, "gated_mlp": True, "norm": "rmsnorm", "positions": "rotary"}
GPT = {"ffn": 4096, "gated_mlp": False, "activation": "gelu", "norm": "layernorm", "positions": "learned"}


def lowered(model: dict[str, Any] = LLAMA, framework: str = "torchtitan", gather: str = "bf16", bias: bool = False,
            compiled: bool = True, compute: str = "fp8", **changes: Any) -> Lowered:
    return lower(resolve({
        "name": "t", "cluster": {"topology": "hgx-b200"},
        "model": {"kind": "decoder", "layers": 2, "hidden": HIDDEN, "heads": 16, "vocab": 32000, "bias": bias,
                  "dropout": False, "tied_embeddings": False, **model},
        "training": {"micro_batch": BATCH, "global_batch": 8 * BATCH, "sequence": SEQUENCE, "attention": "sdpa",
                     "precision": {"compute": compute, "parameters": "fp32", "master": "none", "gradients": "fp32",
                                   "optimizer": "fp32", "gather": gather, "reduce": "fp32"}},
        "parallel": {"strategy": "fsdp"},
        "software": {"framework": framework, "year": 2025, "compile": compiled, "modules": "plain"}}, "t", changes))


def block(*args: Any, **changes: Any) -> Layer:
    return lowered(*args, **changes).architecture.stack[1]


def moved(kernels: tuple[Kernel, ...] | list[Kernel]) -> float:
    """Bytes of kernels that Inductor writes: ATen's product of complex numbers, attention and products apart."""
    return sum(k.bytes for k in kernels if k.op not in ("gemm", "attention") and k.kernel != "scalar") / UNIT


def way(layer: Layer, backward: bool) -> float:
    return moved([k for op in layer.operators for k in (op.backward if backward else op.forward)])


def named(layer: Layer, name: str) -> Operator:
    return next(op for op in layer.operators if op.name == name)


@pytest.mark.parametrize(("model", "framework", "bias", "forward", "backward"), [
    (LLAMA, "torchtitan", False, 89.66, 135.98), (LLAMA, "pytorch", False, 78.98, 121.08),
    (GPT, "pytorch", True, 67.04, 117.3)])
def test_a_block_moves_what_inductor_moved(
        model: dict[str, Any], framework: str, bias: bool, forward: float, backward: float) -> None:
    """torch 2.13.0 on fake tensors, torchao 0.13.0, tensorwise; queries, keys and values apart as complex numbers,
    joint with cos and sin, joint without positions (there with biases of norms alone)."""
    layer = block(model, framework, bias=bias)
    sums = sum(k.bytes for op in layer.operators for k in op.backward if k.variant == "bias_gradient") / UNIT
    assert way(layer, False) == pytest.approx(forward, rel=0.02)
    assert way(layer, True) - sums == pytest.approx(backward, rel=0.025)


def test_with_recomputation_by_operator_too() -> None:
    """Weights came in 8 bits; the products of queries, values, gate and down are kept, as are attention's outputs."""
    layer = block(gather="fp8")
    again = moved([k for op in again_operators(layer) for k in op.forward])
    assert way(layer, False) == pytest.approx(72.79, rel=0.02)
    assert again + way(layer, True) == pytest.approx(173.33, rel=0.02)


def test_with_full_recomputation_attention_gets_copies_of_its_own() -> None:
    """Narrowed queries and keys, and keys and values copied out, are written once for either kernel of attention."""
    layer = block(gather="fp8")
    again = moved([k for op in layer.operators if op.recomputed for k in op.rerun.forward])
    assert again + way(layer, True) == pytest.approx(188.83, rel=0.035)
    assert moved(named(layer, "attention").rerun.forward) == (4 + 2) * 1.25 + 2 * (2 / 4 + 2)
    assert "attention" not in [op.name for op in again_operators(layer)]


def test_forward_makes_a_norm_twice_and_an_activation_twice() -> None:
    layer = block()
    casts = {op.name: [k for k in op.forward if k.variant == "quantise"] for op in layer.operators}
    assert moved(named(layer, "norm1").forward) == 2  # finds the maximum, writes nothing
    assert moved(casts["qkv"][:1]) == 2 + 3  # three products, a copy each
    assert moved(casts["projection"][:1]) == 2 + 2 + 1  # attention's output is in memory
    assert moved(named(layer, "residual1").forward) + moved(named(layer, "norm2").forward) == 2 + 2  # branch, stream
    assert moved(casts["up"][:1]) == 2 + 2 + 1
    assert moved(named(layer, "activation").forward) == 2 * 2 * F
    assert moved(casts["down"][:1]) == pytest.approx((2 + 2 + 1) * F)
    assert moved(named(layer, "residual2").forward) == 2 + 2 + 2 + 2
    sizes = {HIDDEN**2, HIDDEN**2 // 4, HIDDEN * FFN}
    weights = [k for made in casts.values() for k in made if k.shape[0] in sizes]
    assert moved(weights) == pytest.approx((2 + 2 + 1 + 1) * W)


def test_backward_writes_all_copies_of_a_gated_activations_gradients_at_once() -> None:
    layer = block()
    found = [moved([k]) for k in named(layer, "up").backward if k.variant == "quantise"]
    assert moved(named(layer, "activation").backward) == pytest.approx(3 * 2 * F)
    # of up: both gradients' inputs, its two copies and the activation's own; of gate its two copies; their input
    assert found == pytest.approx([(3 * 2 + 2 + 1) * F, 2 * F, 2 + 2 + 1])
    # of down the gradient alone: from outside, so that its maximum is a pass of its own
    assert [moved([k]) for k in named(layer, "down").backward if k.variant == "quantise"] == [2 + 2 + 2]
    assert [moved([k]) for k in named(layer, "projection").backward if k.variant == "quantise"] == [2 + 2, 2 + 2 + 1]
    # values, keys and queries: from attention, and of complex numbers' fp32
    assert [moved([k]) for k in named(layer, "qkv").backward if k.variant == "quantise"] == pytest.approx(
        [(2 + 2 + 2) / 4, (4 + 2) / 4, 4 + 2, 2 + 3])


def test_weights_that_came_in_8_bits_are_turned_in_backward() -> None:
    layer = block(gather="fp8")
    turned = [k for op in layer.operators for k in op.backward if k.variant == "transpose"]
    assert len(turned) == 7 and moved(turned) == pytest.approx(2 * W)
    assert way(block(), False) - way(layer, False) == pytest.approx(6 * W)


def test_what_a_checkpoint_brings_back_is_what_backward_does_not_make() -> None:
    layer = block(gather="fp8")
    again = {op.name: moved(op.rerun.forward) for op in layer.operators if op.name not in ("rotary", "attention")}
    assert again == {"norm1": 0, "qkv": 2 + 3, "projection": 1, "residual1": 0, "norm2": 0, "up": 2 + 2 + 1,
                     "activation": 0, "down": 0, "residual2": 0}
    assert named(layer, "rotary").again is None


@pytest.mark.parametrize(("model", "framework", "kept"), [(LLAMA, "pytorch", 25.758), (GPT, "pytorch", 23.078)])
@pytest.mark.parametrize("gather", ["bf16", "fp8"])
def test_kept_are_turned_weights_and_what_nothing_makes_again(
        model: dict[str, Any], framework: str, gather: str, kept: float) -> None:
    """To the byte of what Inductor's partitioner kept (it counted the block's output, here its input)."""
    net = layer_profile(block(model, framework, gather), "none", True).forward.net
    assert sum(net) / UNIT == pytest.approx(kept, abs=6e-4)


def test_a_checkpoint_keeps_no_turned_weights() -> None:
    layer = block(gather="fp8")
    assert sum(layer_profile(layer, "full", True).forward.net) == 2 * UNIT
    # the stream, queries, values, gate, attention's output and its statistics
    assert sum(layer_profile(layer, "selective-op", True).forward.net) / UNIT == pytest.approx(
        2 + 2 + 0.5 + 2 * F + 2 + 0.0625, abs=1e-3)


def test_a_norm_of_five_tensors_is_written() -> None:
    """LayerNorm with a bias reads its input, two statistics, weight and bias; without one, behind a sum, two summands.
    Inductor makes a buffer of it, forward and again in backward."""
    with_bias, without = block(GPT, "pytorch", bias=True), block(GPT, "pytorch")
    layers = (with_bias, without)
    assert [moved(named(layer, "norm1").forward) for layer in layers] == [2 + 2, 2]
    assert [moved(named(layer, "norm2").forward) for layer in layers] == [2 + 2, 2 + 2]
    casts = [[moved([k]) for k in named(layer, "qkv").backward if k.variant == "quantise"][1] for layer in layers]
    assert casts == [2 + 2 + 2 + 1, 2 + 1]


@pytest.mark.parametrize("changes", [{"compiled": False}, {"compute": "mxfp8"}, {"compute": "bf16", "gather": "bf16"},
                                     {"model": {**LLAMA, "moe": {"experts": 8, "top_k": 2}}}])
def test_other_casts_stay_as_they_were(changes: dict[str, Any]) -> None:
    assert all(op.again is None for op in block(**changes).operators)


@pytest.mark.parametrize("recompute", ["none", "selective-op", "full"])
@pytest.mark.parametrize("gather", ["bf16", "fp8"])
def test_memory_balances(recompute: str, gather: str) -> None:
    low = lowered(gather=gather, **{"training.recompute": recompute})
    assert peak(low.job.programs[0]).steady


def test_tensor_ranks_write_the_sum_behind_attention() -> None:
    """As Inductor does (two ranks, own tokens): 3 of a norm's maximum, 1.5 of its cast, 3 of the block's output."""
    scenario = resolve({
        "name": "t", "cluster": {"topology": "hgx-b200"},
        "model": {"kind": "decoder", "layers": 2, "hidden": HIDDEN, "heads": 16, "vocab": 32000, "bias": False,
                  "dropout": False, "tied_embeddings": False, **LLAMA},
        "training": {"micro_batch": BATCH, "global_batch": 4 * BATCH, "sequence": SEQUENCE, "attention": "sdpa",
                     "precision": {"compute": "fp8", "parameters": "fp32", "master": "none", "gradients": "fp32",
                                   "optimizer": "fp32", "gather": "fp8", "reduce": "fp32"}},
        "parallel": {"strategy": "fsdp", "tensor": 2, "sequence_parallel": True},
        "software": {"framework": "torchtitan", "year": 2025, "compile": True}})
    layer = build(scenario, stack_for("torchtitan", 2025, compile_=True), BATCH).stack[1]
    sums, norm, cast, out = (named(layer, name).forward[:1] for name in ("residual1", "norm2", "up", "residual2"))
    assert moved(sums) + moved(norm) == 3 and moved(cast) == 1.5 and moved(out) == 3
    found = [moved([k]) for k in named(layer, "up").backward if k.variant == "quantise"]
    assert sum(found) == pytest.approx((3 * 2 + 4 + 1) * F / 2)  # the activation's own, turned, forward there
    assert moved(named(layer, "residual1").rerun.forward) == 2
