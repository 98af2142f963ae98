"""What families of models have of their own: biases of queries, keys and values, two norms side by side, GELU spelled
out by name, ReLU's output, LoRA without dropout. Beside PyTorch: `tests/validation/data/oracle_*_families.yaml`."""

from __future__ import annotations

from typing import Any

import pytest

from sim.model import Architecture, build
from sim.model.eager import layer_profile
from sim.model.eager.tensors.storage import KINDS
from sim.scenario import resolve
from sim.software import stack_for

#: Two query heads of 16 on one of keys and values, an MLP of 96; 64 tokens of bf16.
HIDDEN, KV, FFN, TOKENS = 32, 16, 96, 64


def made(finetune: dict[str, Any] | None = None, modules: str = "transformers", **model: Any) -> Architecture:
    training = {"micro_batch": 1, "micro_steps": 1, "sequence": TOKENS, "precision": "pure-bf16"}
    scenario = resolve({
        "name": "t", "cluster": {"topology": "single-h100-80g-sxm"},
        "model": {"kind": "decoder", "layers": 3, "hidden": HIDDEN, "heads": 2, "kv_heads": 1, "ffn": FFN, "vocab": 128,
                  "positions": "rotary", "norm": "rmsnorm", "bias": False, "tied_embeddings": False} | model,
        "training": training | ({"finetune": finetune} if finetune else {}),
        "software": {"framework": "pytorch", "modules": modules}})
    return build(scenario, stack_for("pytorch", modules=modules), 1)


def kept(architecture: Architecture) -> int:
    """Bytes of activations that a block keeps for backward."""
    return layer_profile(architecture.stack[2], "none", True).forward.net[KINDS.index("activations")]


def names(architecture: Architecture) -> list[str]:
    return [op.name for op in architecture.stack[2].operators]


@pytest.mark.parametrize("modules", ["transformers", "plain"])
def test_biases_of_queries_keys_and_values_alone(modules: str) -> None:
    plain, biased = made(modules=modules), made(modules=modules, qkv_bias=True)
    assert biased.parameters - plain.parameters == 3 * (HIDDEN + 2 * KV)
    assert kept(biased) == kept(plain)
    assert made(modules=modules, qkv_bias=False, bias=True).parameters == made(
        modules=modules, qkv_bias=True, bias=True).parameters


def test_attention_and_mlp_side_by_side_with_a_norm_each() -> None:
    one, two = made(parallel_block=True), made(parallel_block=True, parallel_norms=2)
    assert "norm2" not in names(one) and names(two).index("norm2") == names(two).index("residual1") + 1
    assert two.parameters - one.parameters == 3 * HIDDEN
    assert kept(two) > kept(one)  # what the second norm keeps, and its output


def test_gelu_is_spelled_out_where_it_is_named_so() -> None:
    fused, spelled = made(activation="gelu"), made(activation="gelu-new")
    plain = made(None, "plain", activation="gelu-new")
    launches = [next(op for op in one.stack[2].operators if op.name == "activation").forward[0].launches
                for one in (fused, spelled, plain)]
    assert launches == [1, 8, 1]
    assert kept(spelled) - kept(fused) == 3 * TOKENS * FFN * 2  # four tensors for one


def test_relu_keeps_its_result_which_the_product_behind_reads() -> None:
    """GELU keeps its input beside what the product reads."""
    assert kept(made(activation="gelu")) - kept(made(activation="relu")) == TOKENS * FFN * 2


@pytest.mark.parametrize(("dropout", "masks"), [(0.05, 2), (None, 2), (0.0, 0), (False, 0), (True, 2)])
def test_lora_reads_its_input_through_dropout_unless_it_is_told_not_to(dropout: float | None, masks: int) -> None:
    tuned = made({"method": "lora", "rank": 4, "targets": ["query", "value"], "dropout": dropout})
    found = [t for op in tuned.stack[2].operators for t in op.saved if t.name == "lora_dropout_mask"]
    assert len(found) == masks
