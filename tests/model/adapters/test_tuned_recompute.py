"""Recomputation beside frozen weights: by product and by Megatron's names, against PyTorch and by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sim.software.choice as stacks
from sim.memory.ledger import peak
from sim.model import build
from sim.model.architecture import Layer
from sim.model.eager import KINDS, layer_profile
from sim.model.recompute import joined, kept_kernels, module_operators, modules_of, output_elements
from sim.parallel import lower
from sim.scenario import resolve
from sim.software import stack_for
from sim.validation.cases.oracle_memory import predicted

LLAMA = {"kind": "decoder", "gated_mlp": True, "activation": "silu", "positions": "rotary", "norm": "rmsnorm",
         "bias": False, "tied_embeddings": False, "layers": 4, "hidden": 1024, "heads": 16, "kv_heads": 8,
         "ffn": 4096, "vocab": 512, "dropout": 0.0}
MIXTURE = {"moe": {"experts": 8, "top_k": 2, "expert_ffn": 512, "shared_experts": 1}}
LATENT = {"kv_heads": 16, "mla": {"q_rank": 256, "kv_rank": 128, "nope_dim": 64, "rope_dim": 32, "value_dim": 64}}
ALL = ["query", "key", "value", "projection", "mlp"]
ACTIVATIONS = KINDS.index("activations")


def scenario(recompute: Any, targets: list[str], *, model: dict[str, Any] | None = None, base: str = "bf16",
             precision: str = "pure-bf16", modules: str = "transformers", method: str = "lora",
             training: dict[str, Any] | None = None, **parallel: Any) -> Any:
    gpus = parallel.get("tensor", 1)
    return resolve({
        "name": "t", "cluster": {"topology": "dgx-a100-80g", "nodes": 1, "gpus_per_node": gpus},
        "model": {**LLAMA, **(model or {})},
        "training": {"micro_batch": 2, "global_batch": 2, "sequence": 512, "precision": precision,
                     "recompute": recompute, "attention": "flash",
                     "finetune": {"method": method, "rank": 8, "targets": targets, "base": base,
                                  **({"dropout": 0.0} if method != "adapter" else {})}, **(training or {})},
        "parallel": {"strategy": "none", **parallel},
        "software": {"framework": "megatron" if modules == "megatron" else "pytorch", "year": 2026,
                     "modules": modules, "optimizer_kernel": "foreach"}})


def block_of(asked: Any) -> Layer:
    """A block of one rank's slice."""
    software = asked.software
    return build(asked, stack_for(software.framework, 2026, modules=software.modules), 2).stack[1]


#: peft 0.21.2 on transformers 5.23's Llama under torchtitan 0.2's policy of every second `mm`, PyTorch 2.13 on fake
#: tensors: what a block keeps, the peaks of forward and backward.
ORACLE = [
    (["query", "value"], "bf16", "pure-bf16", True, 21038080, 240200704, 284282880),
    (ALL, "bf16", "pure-bf16", True, 31572992, 292269056, 321835008),
    (ALL, "bf16", "pure-bf16", False, 31572992, 292269056, 319737856),
    (["query", "value"], "fp32", "amp-bf16", True, 23135232, 381776896, 438269952),
]


@pytest.mark.parametrize(("targets", "base", "precision", "stops", "retained", "forward", "backward"), ORACLE)
def test_every_second_product_is_kept_as_pytorch_keeps_them(
    targets: list[str], base: str, precision: str, stops: bool, retained: int, forward: int, backward: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the byte: products are counted as modules run them, base, A, B, and each kept output is as wide as it is.
    (Under autocast PyTorch's forward peaks 2 MiB higher; see `tests/model/adapters/test_fine_tuning.py`.)"""
    made = stacks._stack
    monkeypatch.setattr(stacks, "_stack", lambda *key: replace(
        made(*key), tuning_upcast=False, early_stop=stops, cuda_kernels=False))
    got = predicted(lower(scenario("selective-op", targets, base=base, precision=precision)), "selective-op", False)
    assert (got["block_retained"], got["phase_peaks"]["forward"], got["phase_peaks"]["backward"]) == (
        retained, forward, backward)


@pytest.mark.parametrize("modules", ["transformers", "plain", "megatron"])
@pytest.mark.parametrize("base", ["bf16", "nf4", "int8"])
@pytest.mark.parametrize("targets", [["query", "value"], ["key"], ["projection"], ALL])
def test_kernels_that_do_not_run_again_are_those_whose_outputs_are_kept(
    targets: list[str], base: str, modules: str,
) -> None:
    """Of a block: the stream, the kept outputs of products, and attention's output with its sums and random state."""
    method = "lora" if base == "bf16" else "qlora"
    block = block_of(scenario("selective-op", targets, base=base, modules=modules, method=method))
    stream = 1024 * 1024 * 2
    kept = sum(2 * output_elements(kernel) for kernel in kept_kernels(block))
    measured = layer_profile(block, "selective-op", True).forward.net[ACTIVATIONS]
    assert measured == stream + kept + 1024 * 16 * 4 + 2 * 512


def test_products_are_counted_in_the_order_of_modules() -> None:
    """By hand: q, A, B; k; v, A, B; o; gate; up; down. The first, third, fifth ... stay."""
    block = block_of(scenario("selective-op", ["query", "value"]))
    kept = [kernel.shape[2:] for kernel in kept_kernels(block) if kernel.op == "gemm"]
    q, q_b, v, v_b = (1024, 1024), (1024, 8), (512, 1024), (512, 8)
    o, gate, down = (1024, 1024), (4096, 1024), (1024, 4096)
    runs = [q, (8, 1024), q_b, v, v, (8, 1024), v_b, o, gate, gate, down]  # k is as wide as v
    assert sorted(kept) == sorted(runs[::2])
    assert q in kept and v_b in kept and down in kept


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_cut_models_products_are_counted_alike(tensor: int) -> None:
    """Branches of a cut model stand behind their operator; what is kept is the same share."""
    layer = block_of(scenario("selective-op", ["query", "value"], tensor=tensor))
    assert len([kernel for kernel in kept_kernels(layer) if kernel.op == "gemm"]) == 6


@given(st.sampled_from([{}, LATENT, MIXTURE, {**LATENT, **MIXTURE}]), st.sampled_from([1, 2]), st.booleans(),
       st.lists(st.sampled_from(["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]),
                min_size=1, unique=True), st.lists(st.sampled_from(ALL), min_size=1, unique=True))
@settings(max_examples=30, deadline=None)
def test_megatrons_modules_run_again_beside_frozen_weights(
    model: dict[str, Any], tensor: int, scattered: bool, named: list[str], targets: list[str],
) -> None:
    """Memory balances, nothing more is kept than without (but a checkpoint's input, which narrow frozen experts need
    not keep, or which is part of the product of queries, keys and values), and what runs again are these modules'
    kernels, the branches beside their layers among them."""
    mixture, latent = "moe" in model, "mla" in model
    modules = [name for name in named if not (
        (name in ("moe", "moe_act", "shared_experts") and not mixture) or (name == "mlp" and mixture)
        or (name == "mla_up_proj" and not latent) or (name == "layernorm" and not (mixture or latent))
        or (name in ("moe_act", "shared_experts") and "moe" in named))] or ["core_attn"]
    asked = scenario({"modules": modules}, targets, model=model, modules="megatron", tensor=tensor,
                     sequence_parallel=scattered and tensor > 1)
    assert peak(lower(asked).job.programs[0]).steady
    block, policy = block_of(asked), joined(modules)
    kept = [layer_profile(block, one, True).forward.net[ACTIVATIONS] for one in (policy, "none")]
    checkpoints = len({"mlp", "moe", "shared_experts"} & set(modules))
    product = "core_attn" in modules and "mla" not in model
    assert kept[0] <= kept[1] + checkpoints * 1024 * 1024 * 2 + product * 1024 * (1024 + 2 * 512) * 2
    again = [op.name for op in module_operators(block, modules_of(policy))]
    if "mlp" in modules:
        branches = [op.name for op in block.operators if op.name.startswith(("up_lora", "down_lora"))]
        assert set(again) >= {"norm2", "up", "down", *branches}
        assert bool(branches) == ("mlp" in targets and tensor > 1)


def test_an_adapter_stays_outside_the_checkpoint_of_its_module() -> None:
    """NeMo's hangs behind `self.mlp`: down and up, 8 columns, their input and the norm's stay as they were."""
    block = block_of(scenario({"modules": ["mlp"]}, ["mlp"], modules="megatron", method="adapter"))
    assert [op.name for op in module_operators(block, modules_of("mlp"))] == ["norm2", "up", "activation", "down"]
    whole, bare = (layer_profile(one, "mlp", True).forward.net[ACTIVATIONS] for one in (
        block, block_of(scenario({"modules": ["mlp"]}, ["query"], modules="megatron"))))
    stream, rank = 1024 * 1024 * 2, 1024 * 8 * 2
    # its input, what it made in front of its norm, both sides of its activation, the norm's mean and deviation; less
    # what LoRA keeps beside queries: its input and A's output
    assert whole - bare == 2 * stream + 2 * rank + 2 * 1024 * 4 - stream - rank


@pytest.mark.parametrize("method", ["lora", "adapter"])
def test_an_optimizer_in_backward_leaves_no_gradients(method: str) -> None:
    """Of 4 blocks: those of one block and of norms outside of them are there at a time."""
    lows = [lower(scenario("none", ALL, method=method, training={"optimizer_in_backward": at_once}))
            for at_once in (False, True)]
    held = [peak(low.job.programs[0]) for low in lows]
    assert all(one.steady for one in held)
    every = 2 * lows[0].architecture.parameters
    assert held[0].category_peaks["gradients"] >= every
    assert held[1].category_peaks["gradients"] < every / 3
