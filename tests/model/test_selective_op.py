"""Recomputation that keeps attention and every second product, held against PyTorch 2.13 on fake tensors.

The figures are what the oracle scripts behind scenarios/published/oracle/memory.yaml print when their checkpoint policy
is torchtitan's (attention, and the first, third ... of mm and addmm), one process per case; batch, sequence and
precision as below.
"""

from __future__ import annotations

from typing import Any

import pytest

from sim.model import build
from sim.model.architecture import Layer
from sim.model.eager import KINDS, layer_profile
from sim.model.recompute import again_operators, kept_kernels
from sim.parallel import Lowered, lower
from sim.parallel.compute import Compute
from sim.parallel.model.joints import joints
from sim.program import InlineCall, ProgramBuilder
from sim.scenario import resolve
from sim.software import Stack, stack_for
from sim.validation.cases.oracle_memory import predicted
from sim.work import Kernel

ACTIVATIONS = KINDS.index("activations")
GPT = {"kind": "decoder", "gated_mlp": False, "positions": "learned", "norm": "layernorm", "bias": True,
       "tied_embeddings": True, "layers": 12, "hidden": 768, "heads": 12, "ffn": 3072, "vocab": 50304,
       "max_positions": 512}
LLAMA = {"kind": "decoder", "gated_mlp": True, "activation": "silu", "positions": "rotary", "norm": "rmsnorm",
         "bias": False, "tied_embeddings": True, "layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8,
         "head_dim": 64, "ffn": 8192, "vocab": 128256}


def lowered(model: dict[str, Any], modules: str, recompute: str, compiled: bool = False, **training: Any) -> Lowered:
    batch = training.setdefault("micro_batch", 1)
    return lower(resolve({
        "name": "t", "cluster": {"topology": "dgx-a100-80g", "gpus_per_node": 1}, "model": model,
        "training": {"global_batch": batch, "optimizer": "adamw", "recompute": recompute, "attention": "flash",
                     **training},
        "parallel": {"strategy": "none"},
        "software": {"framework": "pytorch", "year": 2026, "modules": modules, "optimizer_kernel": "foreach",
                     "compile": compiled}}))


@pytest.mark.parametrize(("model", "modules", "training", "block", "forward", "backward"), [
    (GPT, "plain", {"sequence": 512, "precision": "pure-bf16"}, 7103488, 934350848, 1070724096),
    (GPT, "plain", {"sequence": 512, "precision": "amp-bf16"}, 7889920, 2039395328, 2141438976),
    (GPT, "plain", {"sequence": 512, "precision": "pure-bf16", "attention": "eager"}, 6291456, 924606464, 1070724096),
    (GPT | {"dropout": 0.1}, "plain", {"sequence": 512, "precision": "amp-bf16", "micro_batch": 8}, 63112192,
     4164125696, 4406181376),
    (LLAMA, "transformers", {"sequence": 2048, "precision": "pure-bf16"}, 69469184, 11187231232, 11712550912),
    (LLAMA, "transformers", {"sequence": 2048, "precision": "amp-bf16"}, 77857792, 21233519104, 20840515584),
])
def test_a_block_keeps_to_the_byte_what_pytorch_keeps(
    model: dict[str, Any], modules: str, training: dict[str, Any], block: int, forward: int, backward: int,
) -> None:
    got = predicted(lowered(model, modules, "selective-op", **training), "selective-op", False)
    assert got["block_retained"] == block
    assert got["phase_peaks"]["forward"] == pytest.approx(forward, rel=1e-5)
    assert got["phase_peaks"]["backward"] == pytest.approx(backward, rel=1e-5)


def test_compiled_the_last_product_is_not_kept() -> None:
    """Nothing reads it in backward: its 2048 x 2048 elements of 2 bytes are dead code, where eager keeps by policy."""
    eager, compiled = (predicted(lowered(LLAMA, "plain", "selective-op", compiled=c, sequence=2048, micro_batch=1,
                                         precision="pure-bf16"), "selective-op", False) for c in (False, True))
    assert eager["block_retained"] - compiled["block_retained"] == 2048 * 2048 * 2


def test_a_llama_block_keeps_query_value_attention_and_gate() -> None:
    low = lowered(LLAMA, "transformers", "selective-op", sequence=2048, precision="pure-bf16")
    block = low.architecture.stack[1]
    kept = [kernel.op if kernel.op == "attention" else kernel.shape[2] for kernel in kept_kernels(block)]
    assert kept == [2048, 512, "attention", 8192, 2048], "of q, k, v, o, gate, up, down: the 1st, 3rd, 5th and 7th"
    again = [k.shape[2] for op in again_operators(block) for k in op.forward if k.op == "gemm"]
    assert again == [512, 2048, 8192], "k, o and up run again"


def test_it_lies_between_full_recomputation_and_none() -> None:
    kept, again = [], []
    for policy in ("none", "selective-op", "full"):
        low = lowered(LLAMA, "transformers", policy, sequence=2048, precision="pure-bf16")
        kept.append(predicted(low, policy, False)["block_retained"])
        again.append(sum(k.flops for s in low.job.programs[0].segments for k in (
            low.job.programs[0].kernels[row] for row in s.kernels)))
    assert kept[0] > kept[1] > kept[2] and again[0] < again[1] < again[2]


def cut(compiled: bool = False, sequence_parallel: bool = True) -> tuple[Layer, Stack]:
    """A block of a tensor rank, one of four, and its stack."""
    scenario = resolve({
        "name": "t", "cluster": {"topology": "dgx-h100", "gpus_per_node": 8}, "model": LLAMA | {"dropout": 0.0},
        "training": {"global_batch": 2, "micro_batch": 1, "sequence": 2048, "optimizer": "adamw",
                     "precision": "fsdp-bf16", "recompute": "selective-op", "attention": "flash"},
        "parallel": {"strategy": "fsdp", "tensor": 4, "sequence_parallel": sequence_parallel},
        "software": {"framework": "torchtitan", "year": 2025, "compile": compiled}})
    stack = stack_for("torchtitan", 2025, compile_=compiled)
    return build(scenario, stack, 1).stack[1], stack


def again(block: Layer, stack: Stack, scattered: bool = True) -> tuple[list[str], int]:
    """What runs again of a block: its collectives, and how many products."""
    names = ("data", "tensor")
    met = joints(stack, names, sequence=scattered, pipelined=False, parts=4)
    items = Compute(ProgramBuilder(("compute",), names), stack, met).recomputed(block, "selective-op")
    calls = [item.call.kind for item in items if isinstance(item, InlineCall)]
    return calls, sum(item.op == "gemm" for item in items if isinstance(item, Kernel))


def test_scattered_sums_are_kept() -> None:
    """PyTorch 2.13 on fake tensors with torchtitan's `_save_list`: no reduce-scatter runs again, gathers and products
    that are not kept do: keys, attention's last and the MLP's second; compiled, attention's last is dead code."""
    assert again(*cut()) == (["all_gather", "all_gather"], 3)
    assert again(*cut(compiled=True)) == (["all_gather", "all_gather"], 2)
    assert again(*cut(sequence_parallel=False), scattered=False) == (["all_reduce"], 3)


def test_what_is_scattered_lies_in_every_block() -> None:
    """Two sums, of attention and of the MLP, of 2048 x 2048 elements of 2 bytes over 4 ranks; compiled the MLP's is
    not kept, and its product neither."""
    def kept(compiled: bool) -> float:
        return layer_profile(cut(compiled)[0], "selective-op", True).forward.net[ACTIVATIONS]

    whole = 2048 * 2048 * 2
    assert kept(False) - kept(True) == whole + whole // 4
    heads = (32 + 8) * 64 * 2048 * 2 // 4  # queries and values
    lse = 32 * 2048 * 4 // 4
    gate = 8192 * 2048 * 2 // 4
    stream, attention, sums = whole // 4, whole // 4, whole // 4
    assert kept(True) == pytest.approx(stream + heads + attention + lse + gate + sums, rel=1e-3)
