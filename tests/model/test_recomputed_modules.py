"""Megatron's `recompute_modules`, one by one: bytes that a block keeps and kernels that run again, counted by hand."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from sim.errors import UserError
from sim.memory.ledger import peak
from sim.model.architecture import Layer
from sim.model.eager import layer_profile
from sim.model.recompute import MODULES, joined, module_operators, modules_of
from sim.parallel import lower
from sim.scenario import Scenario, resolve

TOKENS, HIDDEN, HEADS, FFN, EXPERT, EXPERTS, TOP = 256, 512, 8, 2048, 256, 8, 2
Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 256, 128, 64, 32, 64
MLA = {"q_rank": Q_RANK, "kv_rank": KV_RANK, "nope_dim": NOPE, "rope_dim": ROPE, "value_dim": VALUE}
MOE = {"experts": EXPERTS, "top_k": TOP, "expert_ffn": EXPERT, "shared_experts": 1, "first_dense": 1}
DENSE, MIXED = 1, 2  # positions in the stack


def asked(recompute: Any = "none", precision: str = "megatron-bf16", framework: str = "megatron",
          fused: bool = True, **more: Any) -> Scenario:
    model = {"layers": 2, "hidden": HIDDEN, "heads": HEADS, "vocab": 1024, "ffn": FFN, "gated_mlp": True,
             "norm": "rmsnorm", "bias": False, "positions": "rotary", "mla": MLA, "moe": MOE, **more.pop("model", {})}
    software = {"framework": framework, "year": 2025, "fused": fused, **more.pop("software", {})}
    return resolve({
        "name": "modules", "cluster": {"topology": "dgx-h100", "nodes": 1}, "model": model,
        "training": {"micro_batch": 1, "micro_steps": 2, "sequence": TOKENS, "precision": precision,
                     "recompute": recompute},
        "parallel": {"strategy": "zero1", **more}, "software": software})


def block(number: int, precision: str = "megatron-bf16", fused: bool = True, **model: Any) -> Layer:
    return lower(asked(precision=precision, model=model, fused=fused)).architecture.stack[number]


def saved(number: int, *modules: str, precision: str = "megatron-bf16") -> int:
    """Bytes that a block does not keep because modules are recomputed."""
    layer = block(number, precision)
    kept = [sum(layer_profile(layer, policy, keep_gradients=False).forward.net)
            for policy in ("none", joined(modules))]
    return kept[0] - kept[1]


WHOLE = TOKENS * HEADS * (NOPE + ROPE)
EXPANSION = 2 * (2 * WHOLE + TOKENS * HEADS * VALUE + TOKENS * (Q_RANK + KV_RANK)) + 4 * 2 * TOKENS  # two norms' sums
ROWS = TOKENS * TOP


@pytest.mark.parametrize(("number", "modules", "bytes_"), [
    (DENSE, ["mla_up_proj"], EXPANSION),
    (MIXED, ["mla_up_proj"], EXPANSION),
    (DENSE, ["core_attn"], 4 * TOKENS * HEADS + 2 * 512),  # log-sum-exps and the random state; the output is projected
    (DENSE, ["layernorm"], 2 * TOKENS * HIDDEN + 4 * TOKENS),
    (MIXED, ["layernorm"], 2 * (2 * TOKENS * HIDDEN + 4 * TOKENS)),
    (DENSE, ["mlp"], 2 * TOKENS * (HIDDEN + 3 * FFN) + 4 * TOKENS),  # the norm's output, gate and up, what down reads
    (MIXED, ["moe_act"], 2 * ROWS * EXPERT),
    (MIXED, ["shared_experts"], 2 * TOKENS * 3 * EXPERT),  # its input is the router's
    (MIXED, ["layernorm", "mla_up_proj"], EXPANSION + 2 * (2 * TOKENS * HIDDEN + 4 * TOKENS)),
    (DENSE, ["moe_act"], 0),
    (MIXED, ["mlp"], 0),
])
def test_what_a_module_keeps_and_the_next_one_reads_goes(number: int, modules: list[str], bytes_: int) -> None:
    assert saved(number, *modules) == bytes_


def test_a_mixture_that_is_recomputed_keeps_what_it_reads() -> None:
    """And everything else of it goes: scores, choices, rows on their way, products and shared experts."""
    kept = sum(layer_profile(block(MIXED), "moe", keep_gradients=False).forward.net)
    without = sum(layer_profile(block(MIXED), "moe+layernorm+mla_up_proj+core_attn", False).forward.net)
    assert kept - without == EXPANSION + 2 * (2 * TOKENS * HIDDEN + 4 * TOKENS) + 4 * TOKENS * HEADS + 2 * 512
    residual, compressed = 2 * TOKENS * HIDDEN, 2 * TOKENS * (Q_RANK + KV_RANK + ROPE)
    assert without == residual + compressed + 2 * TOKENS * HEADS * VALUE + (2 * TOKENS * HIDDEN)  # and its own output


def test_in_8_bits_what_is_given_up_is_not_kept_quantised_either() -> None:
    """Linear layers behind it keep what they read (given up), not its copy in 8 bits."""
    assert saved(MIXED, "moe_act", precision="fp8") == ROWS * EXPERT
    # both compressions' copies in 8 bits; the router's input in 16 and the shared experts' copy
    assert saved(MIXED, "layernorm", precision="fp8") == TOKENS * HIDDEN * (2 + 2 + 1) + 2 * 4 * TOKENS


def test_fused_kernels_write_keys_and_values_once() -> None:
    """Queries' rotary columns in place and the one key's, keys and values read side by side and written apart."""
    fused, spelled = (next(op for op in block(DENSE, fused=fused).operators if op.name == "assemble")
                      for fused in (True, False))
    moved = 2 * TOKENS * (2 * (HEADS + 1) * ROPE + HEADS * (2 * NOPE + ROPE + 2 * VALUE))
    assert [sum(k.bytes for k in kernels) for kernels in (fused.forward, fused.backward)] == [moved, moved]
    assert sum(k.bytes for k in spelled.forward) > moved
    assert sum(k.launches for k in fused.forward) == 2


@pytest.mark.parametrize("precision", ["megatron-bf16", "fp8"])
@pytest.mark.parametrize("fused", [True, False])
def test_nothing_is_left_behind_whatever_is_recomputed(precision: str, fused: bool) -> None:
    for number in (DENSE, MIXED):
        layer = block(number, precision, fused)
        for count in (1, 2, 7):
            for modules in combinations(MODULES, count):
                one = layer_profile(layer, joined(modules), keep_gradients=False)
                assert [sum(pair) for pair in zip(one.forward.net, one.backward.net, strict=True)] == [0] * 5, modules


@pytest.mark.parametrize(("number", "modules", "names"), [
    (DENSE, ["mla_up_proj"], ["q_norm", "q_up", "kv_norm", "kv_up", "assemble"]),
    (DENSE, ["layernorm"], ["norm1"]),
    (MIXED, ["layernorm"], ["norm1", "norm2"]),
    (DENSE, ["mlp"], ["norm2", "up", "activation", "down"]),
    (MIXED, ["moe_act"], ["activation"]),
    (MIXED, ["shared_experts"], ["up", "activation", "down"]),
    (MIXED, ["moe"], ["router", "dispatch", "up", "activation", "down", "combine", "up", "activation", "down",
                      "shared_add"]),
    (MIXED, ["core_attn", "mlp"], ["attention"]),
])
def test_operators_that_run_again(number: int, modules: list[str], names: list[str]) -> None:
    layer = block(number)
    again = [op for op in layer.operators if op.recomputed or op.core]
    found = module_operators(layer, modules_of(joined(modules)))
    assert [op.name for op in found] == [n for n in names if n in {op.name for op in again}]


def test_norms_in_front_of_a_linear_layer_are_one_module_with_it() -> None:
    layer = block(1, mla=None, moe=None, kv_heads=HEADS)
    assert module_operators(layer, modules_of("layernorm")) == ()


def test_selective_is_the_attention_core() -> None:
    assert modules_of("selective") == {"core_attn"}
    assert modules_of("none") == modules_of("full") == modules_of("selective-op") == frozenset()
    assert joined(["moe", "core_attn", "moe"]) == "core_attn+moe"


@pytest.mark.parametrize("parallel", [{}, {"tensor": 2, "sequence_parallel": True}, {"expert": 4}, {"pipeline": 2},
                                      {"context": 2}, {"strategy": "fsdp"}])
def test_a_job_with_modules_ends_as_it_began_and_takes_less_memory(parallel: dict[str, Any]) -> None:
    highest = []
    for recompute in ("none", {"modules": ["mla_up_proj", "layernorm", "mlp", "moe_act", "shared_experts"]}):
        peaks = [peak(program) for program in lower(asked(recompute, **parallel)).job.programs]
        assert all(one.steady for one in peaks)
        highest.append(max(one.peak_allocated_bytes for one in peaks))
    assert highest[1] <= highest[0]


@pytest.mark.parametrize(("modules", "model", "words"), [
    (["mla_up_proj"], {"mla": None}, "no latent attention"),
    (["moe"], {"moe": None}, "no experts"),
    (["shared_experts"], {"moe": {**MOE, "shared_experts": 0}}, "no shared experts"),
    (["mlp"], {"moe": {**MOE, "first_dense": 0}}, "no dense MLP"),
    (["layernorm"], {"moe": None, "mla": None}, "no norm that stands alone"),
])
def test_modules_that_a_model_lacks_are_refused(modules: list[str], model: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        asked({"modules": modules}, model=model)


def test_modules_are_megatrons() -> None:
    with pytest.raises(UserError, match="recomputation of named modules is Megatron's"):
        lower(asked({"modules": ["mlp"]}, "amp-bf16", "pytorch", strategy="ddp"))
    with pytest.raises(UserError, match="not one of"):
        asked({"modules": ["attention"]})


@pytest.mark.parametrize("framework", ["megatron", "deepspeed"])
def test_reentrant_checkpoints_run_the_last_product_again(framework: str) -> None:
    """Megatron's and DeepSpeed's own CheckpointFunction know no early stop, in no year; torch's has one since 2.1."""
    model = {"mla": None, "moe": None}
    layer = lower(asked("full", "megatron-bf16", framework, model=model)).architecture.stack[1]
    assert all(op.recomputed for op in layer.operators)
    stopped = lower(asked("full", "pure-bf16", "pytorch", strategy="fsdp", model=model)).architecture.stack[1]
    assert next(op.name for op in stopped.operators if not op.recomputed) == "down"


@pytest.mark.parametrize(("strategy", "year", "whole"), [("ddp", 2024, True), ("ddp", 2026, False),
                                                         ("fsdp", 2024, False)])
def test_hugging_faces_checkpoints_are_reentrant_before_transformers_5(strategy: str, year: int, whole: bool) -> None:
    """`gradient_checkpointing_enable`; recipes of FSDP ask for the other kind."""
    written = asked("full", "pure-bf16", "pytorch", strategy=strategy, model={"mla": None, "moe": None},
                    software={"modules": "transformers", "year": year})
    layer = lower(written).architecture.stack[1]
    assert all(op.recomputed for op in layer.operators) is whole
