"""Tokens exchanged for heads: what attention sees, what is copied and sent, and what is alive, by hand and by the own
code of DeepSpeed and TransformerEngine.

Bytes of half precision: Q of a slice's queries; keys and values of `kv` heads are Q·kv/16 each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ring_slices import GROUPS, HEADS, TOKENS, WIDE, scenario, stack_of

from sim.model import build
from sim.model.architecture import Layer, Operator
from sim.model.attention.head_exchange import within
from sim.model.eager import layer_profile
from sim.model.eager.attention.modules import attended
from sim.model.eager.estimate import estimate
from sim.model.eager.tensors.autograd import Boundary, Run
from sim.model.scenario_style import style_of
from sim.model.style import Style
from sim.scenario import Scenario

Q = 2 * TOKENS * HEADS * WIDE


def exchanging(slices: int, framework: str = "megatron", inner: int | None = None, batch: int = 1,
               modules: str = "megatron", **model: Any) -> Scenario:
    sets = {"parallel.context_exchange": "all-to-all", "parallel.context_all_to_all": inner,
            "training.micro_batch": batch, "software.modules": modules}
    if framework != "megatron":
        sets["training.precision"] = "pure-bf16"
    return scenario(slices, framework, sets, **model)


def block(of: Scenario) -> Layer:
    return next(layer for layer in build(of, stack_of(of), of.training.micro_batch).stack if layer.kind == "block")


def core(of: Scenario) -> dict[str, Operator]:
    """Attention's core by operator, in forward order."""
    return {op.name: op for op in block(of).operators if op.core}


def told(operator: Operator, backward: bool = False) -> list[tuple[str, int]]:
    """Names of copies and elements."""
    kernels = operator.backward if backward else operator.forward
    return [(k.variant.removeprefix("heads_"), k.shape[0]) for k in kernels]


@pytest.mark.parametrize("framework", ["megatron", "deepspeed", "ideal"])
@pytest.mark.parametrize("model", [{}, {"window": 512}, {"kind": "encoder", "positions": "learned"}])
def test_attention_is_that_of_all_tokens_and_a_share_of_the_heads(framework: str, model: dict[str, Any]) -> None:
    """Kernels as without context parallelism, of a quarter of the heads."""
    shared, whole = (core(exchanging(4, framework, **model))["attention"],
                     core(scenario(1, framework, {"training.sequence": 4 * TOKENS, "training.precision": "pure-bf16"},
                                   **model))["attention"])
    for mine, alone in zip(shared.forward + shared.backward, whole.forward + whole.backward, strict=True):
        batch, heads, groups, *rest = alone.shape
        assert mine.shape == (batch, heads // 4, groups // 4, *rest) and mine.causal == alone.causal
        assert mine.flops == pytest.approx(alone.flops / 4)
    assert shared.joint is None


def test_inside_a_ring_attention_is_that_of_a_set_of_ranks() -> None:
    """Two sets of four: two steps, on a half of the sequence, of a quarter of the heads."""
    made = core(exchanging(8, inner=4))["attention"]
    shapes = [(k.shape[1:5], k.causal) for k in made.forward if k.op == "attention"]
    assert shapes == [((4, 1, 4 * TOKENS, 4 * TOKENS), True), ((4, 1, 4 * TOKENS, 2 * TOKENS), False)]
    assert made.joint is not None and made.joint.kind == "ring"
    assert made.joint.elements == 2 * TOKENS * GROUPS * WIDE  # as many as a slice has of all heads


def test_copies_of_transformer_engine_by_hand() -> None:
    """Every tensor is packed and put into order, both ways; inside a ring the output comes once more in backward."""
    q, kv = TOKENS * HEADS * WIDE, TOKENS * GROUPS * WIDE
    made = core(exchanging(4))
    assert told(made["to_heads"]) == [(name, n) for n in (q, kv, kv) for name in ("packed", "reordered")]
    assert told(made["to_heads"], True) == [(name, n) for n in (kv, kv, q) for name in ("packed", "reordered")]
    assert told(made["to_tokens"]) == told(made["to_tokens"], True) == [("packed", q), ("reordered", q)]
    assert told(core(exchanging(8, inner=2))["to_tokens"], True) == 2 * [("packed", q), ("reordered", q)]
    assert all(k.bytes == 4 * k.shape[0] for op in ("to_heads", "to_tokens") for k in made[op].forward)


def test_copies_of_deepspeed_by_hand() -> None:
    q, kv = TOKENS * HEADS * WIDE, TOKENS * GROUPS * WIDE
    made = core(exchanging(2, "deepspeed"))
    assert told(made["to_heads"]) == [("packed", q), ("packed", kv), ("packed", kv)]
    assert told(made["to_heads"], True) == [("unpacked", kv), ("unpacked", kv), ("unpacked", q)]
    assert told(made["to_tokens"]) == [("unpacked", q)] and told(made["to_tokens"], True) == [("packed", q)]
    assert [told(op) + told(op, True) for name, op in core(exchanging(2, "ideal")).items() if name != "attention"] == [
        [], []]


def test_fewer_heads_of_keys_than_ranks_are_repeated() -> None:
    """Eight ranks, four heads: each twice; one head of one sequence is in no other order in front of tokens."""
    q, kv = TOKENS * HEADS * WIDE, TOKENS * GROUPS * WIDE
    made = core(exchanging(8, "pytorch", modules="transformers"))
    assert told(made["to_heads"]) == [("repeated", 2 * kv)] * 2 + [("packed", q)] + [("packed", 2 * kv)] * 2 + [
        ("turned", q)]
    assert made["to_heads"].forward[0].bytes == 3 * kv * 2  # a half read, all written
    assert told(made["to_heads"], True) == [("unpacked", 2 * kv)] * 2 + [
        ("turned", q), ("unpacked", q)] + [("repeated", 2 * kv)] * 2
    assert told(made["to_tokens"]) == [("turned", q), ("unpacked", q)]
    assert sum(t.elements for t in made["to_heads"].saved) == 2 * kv
    assert made["attention"].forward[0].shape[:3] == (1, 2, 1)


def played(of: Scenario) -> tuple[int, int, int]:
    """Bytes beside queries, keys and values: highest in forward, kept behind it (without what came in, where nothing
    holds it), highest in backward beside the output's gradient."""
    style = _without_sums(style_of(of, stack_of(of), of.training.micro_batch))
    run, rows = Run("", False, True), style.tokens * WIDE
    query, key, value = (run.tensor(rows * heads, "bf16", Boundary())
                         for heads in (style.heads, style.kv_heads, style.kv_heads))
    start = run.memory.total
    run.memory.mark()
    out = attended(run, style, query, key, value, "none", variables=[])
    forward = run.memory.top - start
    start -= query.storage.size + key.storage.size + value.storage.size
    del query, key, value
    kept = run.memory.total - start
    gradient = run.new(rows * style.heads, "bf16")
    start = run.memory.total
    run.memory.mark()
    assert out.sink is not None
    out.sink.receive(run, gradient)
    run.backward()
    return forward, kept, run.memory.top - start


def _without_sums(style: Style) -> Style:
    """With a kernel that adds no gradients up in fp32: flash-attn's workspace is not the exchange's."""
    return replace(style, stack=replace(style.stack, attention_kernel="flash3"))


@pytest.mark.parametrize(("framework", "modules", "slices", "inner", "batch", "groups", "expected"), [
    # DistributedAttention (sbhd) around SDPA's flash kernel
    ("deepspeed", "megatron", 4, None, 1, 16, (12649472, 10552320, 8388608)),
    ("deepspeed", "megatron", 4, None, 1, 8, (10552320, 8455168, 6291456)),
    ("deepspeed", "megatron", 4, None, 2, 8, (21103616, 16909312, 12582912)),
    # UlyssesSPAttentionHF
    ("pytorch", "transformers", 4, None, 1, 16, (14746624, 10552320, 8388608)),
    ("pytorch", "transformers", 4, None, 1, 8, (12649472, 8455168, 6291456)),
    ("pytorch", "transformers", 4, None, 2, 8, (29492224, 16909312, 12582912)),
    ("pytorch", "transformers", 4, None, 1, 2, (11600896, 7406592, 5242880)),
    # AttnFuncWithCPAndQKVOA2A
    ("megatron", "megatron", 4, None, 1, 16, (14746112, 10551808, 23068672)),
    ("megatron", "megatron", 4, None, 1, 8, (12648960, 8454656, 15728640)),
    ("megatron", "megatron", 4, None, 2, 8, (25297408, 16908800, 31457280)),
    # AttnFuncWithCPAndKVP2P with cp_size_a2a; 1 KiB of lengths is left out
    ("megatron", "megatron", 4, 2, 1, 16, (27461632, 8456192, 44040192)),
    ("megatron", "megatron", 4, 2, 1, 8, (21169152, 6358016, 28311552)),
    ("megatron", "megatron", 8, 2, 2, 8, (59378688, 12717056, 56623104)),
    ("megatron", "megatron", 8, 4, 1, 8, (21169152, 6358016, 28311552)),
])
def test_what_is_alive_is_what_the_sources_allocate(framework: str, modules: str, slices: int, inner: int | None,
                                                    batch: int, groups: int, expected: tuple[int, int, int]) -> None:
    """Bytes counted by a dispatch mode over fake cuda tensors while the files of deepspeed 0.19.8 and TransformerEngine
    2.8.0 ran on PyTorch 2.13 (November 2026), collectives and cuDNN's attention replaced by tensors of their shapes."""
    found = played(exchanging(slices, framework, inner, batch, modules, kv_heads=groups))
    assert found[2] == expected[2]
    left = 1024 if inner else 0
    assert all(0 <= real - mine <= left for mine, real in zip(found, expected, strict=True))


def test_a_block_keeps_the_output_twice() -> None:
    """As attention made it and as it came back; exchanged queries, keys and values take the place of the projection's
    (queries, keys and values in one tensor) and of the turned queries and keys."""
    alone, cut = (layer_profile(block(of), "none", False) for of in (scenario(1, "deepspeed", {
        "training.precision": "pure-bf16"}), exchanging(2, "deepspeed")))
    assert sum(cut.forward.net) - sum(alone.forward.net) == -(2 * TOKENS * GROUPS * WIDE)


def test_recomputation_of_the_core_exchanges_again_and_keeps_what_goes_in() -> None:
    """The output of heads goes (with log-sum-exps and a state); the turned queries and keys stay, and what the
    projection made, of which values are a part, comes in place of the exchanged queries, keys and values."""
    whole, again = (layer_profile(block(exchanging(4)), policy, False) for policy in ("none", "selective"))
    groups = 2 * TOKENS * GROUPS * WIDE
    assert sum(whole.forward.net) - sum(again.forward.net) == Q + 4 * TOKENS * HEADS + 512 - (Q + groups)
    said = [estimate(block(exchanging(4)), policy, False) for policy in ("none", "selective")]
    assert sum(said[0].forward.net) - sum(said[1].forward.net) == Q + 4 * TOKENS * HEADS + 1024


@pytest.mark.parametrize("exchanges", [1, 2, 4])
def test_a_share_of_heads_has_as_many_elements(exchanges: int) -> None:
    style = replace(style_of(scenario(4), stack_of(scenario(4)), 1), exchanges=exchanges)
    inner = within(style)
    assert inner.tokens * inner.query_width == style.tokens * style.query_width
    assert inner.sequence * inner.context == style.sequence * style.context and inner.exchanges == 1
