"""User buffers of tensor parallelism: what travels beside which product, scales that ranks share, and who quantises."""

from __future__ import annotations

from typing import Any

import pytest

from sim.model import build
from sim.model.architecture import Operator
from sim.parallel.model.joints import joints
from sim.program import InlineCall
from sim.scenario import resolve
from sim.software import stack_for
from sim.work import Kernel

TOKENS, HIDDEN, FFN, PARTS = 4096, 2048, 8192, 4
WHOLE = TOKENS * HIDDEN  # elements that ranks share out along the sequence


def operators(year: int, compute: str = "fp8", **parallel: Any) -> tuple[Any, dict[str, Operator]]:
    scenario = resolve({
        "name": "x", "cluster": {"topology": "dgx-h100", "nodes": 1},
        "model": {"kind": "decoder", "layers": 2, "hidden": HIDDEN, "heads": 16, "ffn": FFN, "vocab": 32768,
                  "positions": "rotary", "bias": False, "dropout": False, "tied_embeddings": False},
        "training": {"micro_batch": 1, "global_batch": 8, "sequence": TOKENS, "attention": "flash",
                     "precision": {"compute": compute, "parameters": "bf16", "master": "fp32", "gradients": "fp32",
                                   "optimizer": "fp32", "gather": "bf16", "reduce": "fp32"}},
        "parallel": {"strategy": "zero1", "tensor": PARTS, "sequence_parallel": True, **parallel},
        "software": {"framework": "megatron", "year": year}})
    stack = stack_for("megatron", year, modules="megatron")
    block = next(layer for layer in build(scenario, stack, 1).stack if layer.kind == "block")
    made = joints(stack, ("data", "tensor"), sequence=True, pipelined=scenario.parallel.async_tensor, parts=PARTS,
                  sms=132)
    return made, {op.name: op for op in block.operators}


def told(items: Any) -> list[Any]:
    """Names of kernels; calls with their bytes and what runs beside them."""
    return [(i.call.kind, i.call.size_bytes, "+".join(k.variant for k in i.beside)) if isinstance(i, InlineCall)
            else i.variant for i in items]


def test_fp8_recipes_of_2024_reduce_in_quarters_and_in_8_bits() -> None:
    made, block = operators(2024)
    assert told(made.forward(block["down"])) == [
        "quantise", ("reduce_scatter", WHOLE * 3 // 4, "tn"), ("reduce_scatter", WHOLE // 4, "")]
    assert told(made.forward(block["up"])) == [("all_gather", WHOLE, "tn")]  # the norm wrote it in 8 bits
    plain, piped = block["down"].forward[-1], made.forward(block["down"])[1].beside[0]
    assert piped.shape == (1, round(TOKENS * 132 / 112), *plain.shape[2:])  # 20 SMs are the reductions'
    assert piped.flops == plain.flops


def test_later_ones_go_round_a_ring_and_share_scales() -> None:
    made, block = operators(2025)
    largest = ("all_reduce", 4, "")
    assert told(made.forward(block["down"])) == [
        "quantise", ("reduce_scatter", 2 * WHOLE, "tn"), "partial_sums"]
    sums = made.forward(block["down"])[-1]
    assert isinstance(sums, Kernel) and sums.bytes == 2 * WHOLE * (1 + 1 / PARTS)  # all parts read, one written
    assert told(made.forward(block["up"])) == ["quantise", largest, ("all_gather", WHOLE, "tn")]
    assert told(made.backward(block["down"])) == [
        "quantise", largest, ("all_gather", WHOLE, "nn"), "transpose", "nt"]


@pytest.mark.parametrize("gather", ["fp8", "bf16"])
def test_tensors_of_torchtitan_s_ranks_have_one_scale_each(gather: str) -> None:
    """As counted on fake tensors: a feed-forward with wide weights makes 5 all-reduces of one fp64 forward, 6 back."""
    scenario = resolve({
        "name": "x", "cluster": {"topology": "dgx-h100", "nodes": 1},
        "model": {"kind": "decoder", "layers": 2, "hidden": HIDDEN, "heads": 16, "ffn": FFN, "vocab": 32768,
                  "positions": "rotary", "bias": False, "dropout": False, "activation": "silu", "gated_mlp": True,
                  "norm": "rmsnorm"},
        "training": {"micro_batch": 1, "global_batch": 2, "sequence": TOKENS, "attention": "flash",
                     "precision": {"compute": "fp8", "parameters": "fp32", "master": "none", "gradients": "fp32",
                                   "optimizer": "fp32", "gather": gather, "reduce": "fp32"}},
        "parallel": {"strategy": "fsdp", "tensor": PARTS, "sequence_parallel": True},
        "software": {"framework": "torchtitan", "year": 2025}})
    stack = stack_for("torchtitan", 2025)
    block = next(layer for layer in build(scenario, stack, 1).stack if layer.kind == "block")
    made = joints(stack, ("data", "tensor"), sequence=True, pipelined=False, parts=PARTS)
    feed = [op for op in block.operators if op.name in ("up", "gate", "down", "gate_up")]

    def largest(direction: Any) -> int:
        items = [item for op in feed for item in direction(op)]
        return sum(isinstance(item, InlineCall) and item.call.size_bytes == 8 for item in items)

    weights = 0 if gather == "fp8" else 3
    assert (largest(made.forward), largest(made.backward)) == (2 + weights, 3 + weights)
    for direction in (made.forward, made.backward):  # no cast but those: inputs come quantised and are kept so
        assert largest(direction) == sum(told(direction(op)).count("quantise") for op in feed)
    up = next(told(made.forward(op)) for op in feed if op.name != "down")
    assert up[:3] == [("all_reduce", 8, ""), "quantise", ("all_gather", WHOLE, "")] or gather != "fp8"


def test_the_gradient_of_a_row_cut_product_is_gathered_beside_it() -> None:
    made, block = operators(2024)
    assert told(made.backward(block["down"])) == ["quantise", ("all_gather", WHOLE, "nn"), "transpose", "nt"]
    alone, block = operators(2024, async_tensor=False)
    assert told(alone.backward(block["down"]))[0] == ("all_gather", WHOLE, "")


@pytest.mark.parametrize(("year", "maximum"), [(2024, 0), (2025, 2)])
def test_every_rank_quantises_its_own_tokens(year: int, maximum: int) -> None:
    """One copy in 8 bits of a rank's share before it is gathered; the whole is transposed for the weight gradient."""
    _, block = operators(year)
    own = next(k for k in block["down"].backward if k.variant == "quantise")
    assert own.bytes == WHOLE / PARTS * (2 + 1 + maximum)
    for norm, reader in (("norm1", "qkv"), ("norm2", "up")):  # which writes the copy, or has found the maximum
        casts = [k.bytes for k in block[reader].forward if k.variant == "quantise"]
        assert casts == ([WHOLE / PARTS * (2 + 1)] if maximum else [])
        assert block[norm].forward[0].bytes == WHOLE / PARTS * (2 + 2 if maximum else 2 + 1)
    turned = [k for name in ("qkv", "projection", "up", "down") for k in block[name].backward
              if k.variant == "transpose"]
    assert [k.bytes for k in turned] == [2.0 * WHOLE] * 4
    # what is cut by columns is not gathered: both copies at once
    other = next(k for k in block["down"].forward if k.variant == "quantise")
    assert other.bytes == TOKENS * FFN / PARTS * (2 + 2 + maximum)


def test_scales_of_blocks_are_not_shared_and_their_copies_travel() -> None:
    _, block = operators(2025, "mxfp8")
    own = next(k for k in block["up"].forward if k.variant == "quantise")
    assert own.bytes == WHOLE / PARTS * (2 + 2 * 33 / 32) or own.bytes == WHOLE / PARTS * (2 + 2)
    assert not any(k.variant == "transpose" for op in block.values() for k in op.backward)
    made, block = operators(2025, "mxfp8")
    assert not any(isinstance(i, InlineCall) and i.call.kind == "all_reduce" for i in made.forward(block["up"]))
