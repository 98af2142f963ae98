"""Houlsby's adapters behind every kind of sub-layer: T5's against PyTorch, those of mixtures by hand."""

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
from sim.model.eager import KINDS, layer_profile, profile
from sim.parallel import lower
from sim.scenario import resolve
from sim.software import stack_for
from sim.validation.cases.oracle_memory import predicted

T5 = {"kind": "encoder-decoder", "gated_mlp": False, "activation": "relu", "positions": "relative", "norm": "rmsnorm",
      "bias": False, "tied_embeddings": True, "layers": 4, "decoder_layers": 4, "hidden": 1024, "heads": 16,
      "head_dim": 64, "ffn": 4096, "vocab": 512, "dropout": 0.0}
LLAMA = {"kind": "decoder", "gated_mlp": True, "activation": "silu", "positions": "rotary", "norm": "rmsnorm",
         "bias": False, "tied_embeddings": False, "layers": 3, "hidden": 1024, "heads": 16, "kv_heads": 16,
         "ffn": 2048, "vocab": 512, "dropout": 0.0}
MIXTURE = {**LLAMA, "moe": {"experts": 8, "top_k": 2, "expert_ffn": 512}}
SHARED = {**LLAMA, "moe": {"experts": 8, "top_k": 2, "expert_ffn": 512, "shared_experts": 1}}
LATENT = {**LLAMA, "mla": {"q_rank": 256, "kv_rank": 128, "nope_dim": 64, "rope_dim": 32, "value_dim": 64}}
ALL = ["query", "key", "value", "projection", "mlp"]
TOKENS, HIDDEN, RANK = 1024, 1024, 64


def scenario(model: dict[str, Any], targets: list[str], *, method: str = "adapter", recompute: Any = "none",
             modules: str = "transformers", base: str = "bf16", **parallel: Any) -> Any:
    gpus = 2 if parallel.get("strategy", "none") != "none" or parallel.get("tensor") else 1
    return resolve({
        "name": "t", "cluster": {"topology": "dgx-a100-80g", "nodes": 1, "gpus_per_node": gpus}, "model": model,
        "training": {"micro_batch": 2, "micro_steps": 1, "sequence": 512, "precision": "pure-bf16",
                     "recompute": recompute, "attention": "flash",
                     "finetune": {"method": method, "rank": RANK, "targets": targets, "base": base}},
        "parallel": {"strategy": "none", **parallel},
        "software": {"framework": "megatron" if modules == "megatron" else "pytorch", "year": 2026,
                     "modules": modules, "optimizer_kernel": "foreach"}})


def block_of(model: dict[str, Any], targets: list[str], **options: Any) -> Layer:
    """The last block of one rank's slice."""
    asked = scenario(model, targets, **options)
    stack = stack_for(asked.software.framework, 2026, modules=asked.software.modules)
    return build(asked, stack, 2).stack[-2]


def kept(layer: Layer, recompute: str = "none") -> int:
    return layer_profile(layer, recompute, True).forward.net[KINDS.index("activations")]


#: `Adapter` of adapters 1.3.0 (methods/modeling.py, without its product with a scale of 1) behind the dropout of every
#: sub-layer of transformers 5.23's T5, norms trained, PyTorch 2.13 on fake tensors: dropout, what the middle block of
#: each stack keeps, peaks of backward and of the optimizer.
ORACLE = [(0.0, [46736384, 65943552], 729947136, 262643712), (0.1, [53027840, 73283584], 785521664, 262643712)]


@pytest.mark.parametrize(("dropout", "retained", "backward", "optimizer"), ORACLE)
def test_memory_of_t5_is_what_pytorch_allocates(
    dropout: float, retained: list[int], backward: int, optimizer: int, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the byte."""
    made = stacks._stack
    monkeypatch.setattr(stacks, "_stack", lambda *key: replace(made(*key), tuning_upcast=False))
    lowered = lower(scenario({**T5, "dropout": dropout}, ALL))
    stack = lowered.architecture.stack
    assert [kept(stack[3]), kept(stack[8])] == retained
    phases = predicted(lowered, "none", False)["phase_peaks"]
    assert (phases["backward"], phases["optim"]) == (backward, optimizer)


def test_cross_attention_has_an_adapter_of_its_own() -> None:
    """2md + d + m each (Houlsby et al., section 2.1), and three norms without biases; T5's stand behind the dropout."""
    block = block_of({**T5, "dropout": 0.1}, ALL)
    names = [op.name for op in block.operators]
    places = {name: names[names.index(name) - 1] for name in names if name.endswith("_adapter")}
    assert places == {"attention_adapter": "dropout1", "cross_adapter": "dropout2", "mlp_adapter": "dropout3"}
    assert block.numel == 3 * (2 * RANK * HIDDEN + HIDDEN + RANK) + 3 * HIDDEN
    assert block_of(T5, ["mlp"]).numel == 2 * RANK * HIDDEN + HIDDEN + RANK + 3 * HIDDEN


@pytest.mark.parametrize(("model", "behind"), [(MIXTURE, "combine"), (SHARED, "shared_add"), (LLAMA, "down")])
def test_a_mixture_has_one_adapter_behind_all_its_experts(model: dict[str, Any], behind: str) -> None:
    block = block_of(model, ["mlp"])
    names = [op.name for op in block.operators]
    assert names[names.index("mlp_adapter") - 1] == behind and names.count("mlp_adapter") == 1
    assert block.numel == 2 * RANK * HIDDEN + HIDDEN + RANK + 2 * HIDDEN


@pytest.mark.parametrize("model", [LLAMA, MIXTURE, SHARED, LATENT])
@pytest.mark.parametrize("modules", ["transformers", "megatron"])
def test_what_an_adapter_keeps(model: dict[str, Any], modules: str) -> None:
    """Its input, and both sides of its activation; NeMo's what its own norm reads, and two numbers a row, too. (Of
    latent attention the projection's output was nowhere kept before, and neither was that of the experts.)"""
    own = TOKENS * HIDDEN * 2 + 2 * TOKENS * RANK * 2
    own += (TOKENS * HIDDEN * 2 + 2 * TOKENS * 4) if modules == "megatron" else 0
    both, attention = (kept(block_of(model, targets, modules=modules)) for targets in (["query", "mlp"], ["query"]))
    assert both - attention == own


def test_kernels_of_an_adapter_behind_latent_attention() -> None:
    """Two products forward, four backward; the frozen ones beside them make no weight gradients."""
    block = block_of(LATENT, ["projection"])
    products = [k for op in block.operators if "adapter" in op.name for k in (*op.forward, *op.backward)
                if k.op == "gemm"]
    assert sorted(k.shape[1:] for k in products) == sorted(
        2 * [(TOKENS, RANK, HIDDEN), (TOKENS, HIDDEN, RANK)] + [(RANK, HIDDEN, TOKENS), (HIDDEN, RANK, TOKENS)])
    assert sum(k.variant == "nt" for op in block.operators for k in op.backward if k.category == "gemm") == 2


def test_full_recomputation_runs_all_that_stands_in_front_of_an_adapter() -> None:
    """A checkpoint that stops early would leave out the sum of the experts, which the adapter reads."""
    for model in (MIXTURE, SHARED):
        block = block_of(model, ["mlp"])
        names = [op.name for op in block.operators]
        assert all(op.recomputed for op in block.operators[:names.index("mlp_adapter") + 1])


@given(st.sampled_from([T5, MIXTURE, SHARED, LATENT]), st.sampled_from(["none", "ddp", "fsdp", "zero2", "zero3"]),
       st.sampled_from(["none", "full", "selective", "selective-op"]), st.sampled_from(["bf16", "nf4"]),
       st.sampled_from(["transformers", "plain", "megatron"]), st.lists(st.sampled_from(ALL), min_size=1, unique=True))
@settings(max_examples=40, deadline=None)
def test_memory_balances(model: dict[str, Any], strategy: str, recompute: str, base: str, modules: str,
                         targets: list[str]) -> None:
    given = "plain" if modules == "megatron" and strategy in ("fsdp", "zero2", "zero3") else modules
    asked = scenario(model, targets, recompute=recompute, base=base, modules=given, strategy=strategy)
    assert peak(lower(asked).job.programs[0]).steady


@pytest.mark.parametrize("model", [MIXTURE, LATENT])
def test_cut_adapters_behind_mixtures_and_latent_attention(model: dict[str, Any]) -> None:
    """NeMo's: half the columns of each matrix on a rank of two."""
    whole, half = (block_of(model, ["query", "mlp"], modules="megatron", **parallel)
                   for parallel in ({}, {"tensor": 2}))
    matrices = [sum(p.numel for p in layer.parameters if "linear" in p.name) for layer in (whole, half)]
    assert matrices[0] == 2 * matrices[1] == 2 * 2 * RANK * HIDDEN
    assert peak(lower(scenario(model, ["query", "mlp"], modules="megatron", tensor=2)).job.programs[0]).steady


def test_a_compiled_block_keeps_what_its_last_adapter_reads() -> None:
    """The output of the last product is dropped if nothing reads it in backward: with an adapter behind it one does."""
    found = []
    for targets in (["query", "mlp"], ["query"]):
        program = block_of(LLAMA, targets, modules="plain").program
        assert program is not None
        compiled = replace(program.style, stack=replace(program.style.stack, compile=True))
        found.append(profile(replace(program, style=compiled), "selective-op", True))
    both, one = (p.forward.net[KINDS.index("activations")] for p in found)
    assert both - one == TOKENS * HIDDEN * 2
