"""LoRA of latent attention beside mixtures of experts (DeepSeek-V3's shapes in small), counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sim.memory.ledger import peak
from sim.model import build
from sim.model.architecture import Layer
from sim.parallel import lower
from sim.scenario import resolve
from sim.software import stack_for

HIDDEN, HEADS, RANK = 1024, 8, 16
MLA = {"q_rank": 256, "kv_rank": 128, "nope_dim": 64, "rope_dim": 32, "value_dim": 64}
ATTENTION = ["query", "key", "value", "projection"]


def asked(targets: list[str], base: str = "bf16", modules: str = "transformers", framework: str = "pytorch",
          mla: dict[str, int] | None = None, **parallel: Any) -> Any:
    return resolve({
        "name": "x", "cluster": {"topology": "dgx-h100", "nodes": 1},
        "model": {"kind": "decoder", "layers": 3, "hidden": HIDDEN, "heads": HEADS, "ffn": 2048, "vocab": 4096,
                  "gated_mlp": True, "norm": "rmsnorm", "positions": "rotary", "bias": False, "dropout": False,
                  "tied_embeddings": False, "mla": mla or MLA,
                  "moe": {"experts": 8, "top_k": 2, "expert_ffn": 512, "shared_experts": 1, "first_dense": 1}},
        "training": {"micro_batch": 1, "global_batch": 8 // parallel.get("tensor", 1), "sequence": 256,
                     "precision": "pure-bf16", "optimizer": "adamw",
                     "finetune": {"method": "lora" if base == "bf16" else "qlora", "rank": RANK, "base": base,
                                  "targets": targets}},
        "parallel": {"strategy": "ddp", **parallel}, "software": {"framework": framework, "modules": modules}})


def block(targets: list[str], number: int = 1, **options: Any) -> Layer:
    scenario = asked(targets, **options)
    return build(scenario, stack_for("pytorch", 2024, modules="transformers"), 1).stack[number]


def test_both_steps_of_each_low_rank_projection_are_targets() -> None:
    """q_a, q_b; kv_a with the shared rotary columns, kv_b with keys and values of every head; o."""
    def pair(inputs: int, outputs: int) -> int:
        return RANK * (inputs + outputs)

    query = pair(HIDDEN, 256) + pair(256, HEADS * 96)
    values = pair(HIDDEN, 128 + 32) + pair(128, HEADS * 128)
    assert block(["query"]).numel == query
    assert block(["key"]).numel == block(["value"]).numel == block(["key", "value"]).numel == values
    assert block(ATTENTION).numel == query + values + pair(HEADS * 64, HIDDEN)


def test_an_uncompressed_query_is_one_target() -> None:
    assert block(["query"], mla={**MLA, "q_rank": 0}).numel == RANK * (HIDDEN + HEADS * 96)


def test_nothing_of_a_frozen_projection_is_multiplied_for_its_gradient() -> None:
    """The trained one has these products: A and B of q_a and q_b."""
    weights = [k for op in block(["query"]).operators for k in op.backward if k.op == "gemm" and k.variant == "nt"]
    assert sorted((k.shape[1:3]) for k in weights) == sorted([(256, 16), (768, 16), (16, HIDDEN), (16, 256)])


def test_a_mixture_behind_latent_attention() -> None:
    dense, mixed = block(["mlp"]), block(["mlp"], number=2)
    one = 3 * RANK * (HIDDEN + 512)
    assert dense.numel == 3 * RANK * (HIDDEN + 2048)
    assert mixed.numel == 8 * one + one  # eight routed experts and a shared one
    assert mixed.routed == 8 * one


@pytest.mark.parametrize("base", ["bf16", "nf4"])
@pytest.mark.parametrize("parallel", [{}, {"tensor": 2}, {"tensor": 2, "sequence_parallel": True},
                                      {"tensor": 2, "sequence_parallel": True, "expert": 4},
                                      {"strategy": "fsdp", "expert": 4}])
def test_memory_balances(base: str, parallel: dict[str, Any]) -> None:
    for modules, framework in (("transformers", "pytorch"), ("megatron", "megatron")):
        if framework == "megatron" and parallel.get("strategy"):
            continue
        got = lower(asked([*ATTENTION, "mlp"], base, modules, framework, **parallel))
        assert all(peak(program).steady for program in got.job.programs)
