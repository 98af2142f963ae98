"""Blocks with a window among blocks that attend to all tokens: FLOPs and caches counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sim.model import Architecture, build
from sim.model.inference.kinds import rank_of
from sim.model.scenario_style import style_of
from sim.parallel.serving.request import Weights
from sim.scenario import resolve
from sim.software import stack_for
from sim.work import Kernel

#: Two query heads of 8 on one of keys and values, a gated MLP of 48.
HIDDEN, HEADS, HEAD, FFN, VOCAB = 16, 2, 8, 48, 100


def made(layers: int = 2, sequence: int = 64, **model: Any) -> Architecture:
    scenario = resolve({
        "name": "t", "cluster": {"topology": "single-h100-80g-sxm"},
        "model": {"kind": "decoder", "layers": layers, "hidden": HIDDEN, "heads": HEADS, "kv_heads": 1, "ffn": FFN,
                  "vocab": VOCAB, "gated_mlp": True, "positions": "rotary", "norm": "rmsnorm", "bias": False} | model,
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": sequence, "precision": "pure-bf16"}})
    return build(scenario, stack_for("megatron", 2024), 1)


def cores(architecture: Architecture) -> list[Kernel]:
    """Attention's forward kernel of every block."""
    return [op.forward[0] for layer in architecture.stack for op in layer.operators if op.core]


def test_flops_of_gemma_2_s_pattern_by_hand() -> None:
    """Block 0 sees 16 tokens of 64, block 1 all: 904 pairs (16 · 64 - 16 · 15 / 2; as 14 whole keys a query), and the
    square in full."""
    both = made(window=16, full_every=2)
    projections = 2 * 64 * HIDDEN * (HIDDEN + 2 * HEAD + HIDDEN + 3 * FFN)
    head = 2 * 64 * HIDDEN * 128  # the vocabulary is padded to a multiple of 128
    attention = [4 * 64 * 14 * HEADS * HEAD, 4 * 64 * 64 * HEADS * HEAD]
    assert round((16 * 64 - 16 * 15 // 2) / 64) == 14
    assert [k.flops for k in cores(both)] == attention
    assert both.forward_flops == 2 * projections + sum(attention) + head
    assert both.backward_flops == 2 * (2 * projections + head) + 2.5 * sum(attention)


def test_chunks_attend_to_themselves_by_hand() -> None:
    """Of 56 tokens three chunks of 16 and one of 8: 3 · 136 + 36 pairs = 444, 8 keys a query."""
    (windowed, full) = cores(made(sequence=56, window=16, full_every=2, chunked_window=True))
    assert (windowed.shape[4], full.shape[4]) == (round(444 / 56), 56)
    assert not windowed.causal and full.causal
    (slid, _) = cores(made(sequence=56, window=16, full_every=2))
    assert windowed.flops < slid.flops


@pytest.mark.parametrize(("model", "full"), [
    ({}, []), ({"full_every": 2}, [1, 3, 5]), ({"full_every": 6}, [5]), ({"first_full": 2}, [0, 1]),
    ({"first_full": 1, "full_every": 3}, [0, 3]), ({"first_full": 6}, list(range(6)))])
def test_the_pattern_names_its_blocks(model: dict[str, Any], full: list[int]) -> None:
    blocks = made(layers=6, window=16, **model).stack[1:-1]
    assert [i for i, block in enumerate(blocks) if not block.window] == full
    assert {block.window for block in blocks} <= {0, 16}
    assert len({id(block) for block in blocks}) == len({block.window for block in blocks})  # equal layers are one


def test_a_window_as_long_as_the_sequence_is_none() -> None:
    assert made(window=64, full_every=2).stack == made().stack
    assert len({id(block) for block in made(window=64, full_every=2).stack[1:-1]}) == 1


def test_mixtures_and_windows_alternate_by_themselves() -> None:
    blocks = made(layers=4, window=16, full_every=2, moe={"experts": 4, "top_k": 2, "every": 4}).stack[1:-1]
    routed = [block.routed > 0 for block in blocks]
    assert [block.window for block in blocks] == [16, 0, 16, 0] and routed == [False, False, False, True]
    assert len({id(block) for block in blocks}) == 3


def serving(tokens: int, window: int, every: int, chunked: bool = False) -> tuple[int, list[int]]:
    """Cache bytes of 12 blocks for so many tokens of 2 sequences, and the keys a token behind them meets in each."""
    scenario = resolve({
        "name": "t", "cluster": {"topology": "single-h100-80g-sxm"},
        "model": {"kind": "decoder", "layers": 12, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32,
                  "vocab": 100, "window": window, "full_every": every, "chunked_window": chunked},
        "training": {"micro_batch": 1, "mode": {"inference": {"prompt": tokens, "generate": 1, "batch": 2}},
                     "sequence": tokens, "precision": "pure-bf16"}})
    style = style_of(scenario, stack_for(), 2)
    of = rank_of(style, 2, 1, tokens - 1, Weights("", True, False))
    layers = of.architecture().stack
    met = [k.shape[4] for layer in layers for k in of.forward(layer) if isinstance(k, Kernel) and k.op == "attention"]
    return of.cache_bytes(tokens, layers), met


@pytest.mark.parametrize("chunked", [False, True])
def test_cache_of_gemma_3_s_five_to_one_by_hand(chunked: bool) -> None:
    """Twelve blocks of which two keep all 5000 tokens and ten the last 1024; a token and block is 2 · 2 heads · 32
    values of 2 bytes, of each of 2 sequences. A token attends to as much."""
    size, met = serving(5000, 1024, 6, chunked)
    assert size == 2 * (2 * 5000 + 10 * 1024) * 2 * 2 * 32 * 2
    assert met == ([1024] * 5 + [5000]) * 2
    short, met = serving(1000, 1024, 6, chunked)
    assert short == 2 * 12 * 1000 * 2 * 2 * 32 * 2 and met == [1000] * 12
