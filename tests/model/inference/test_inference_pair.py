"""Encoder-decoders in inference: one pass of the encoder, then tokens that read two caches; and encoders alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sim.model.inference.kinds import rank_of
from sim.model.inference.pair import PairRank
from sim.model.inference.rank import Rank, Sum
from sim.model.inference.weights import Weights
from sim.model.scenario_style import style_of
from sim.scenario import resolve
from sim.software import stack_of
from sim.work import Kernel

GROWING = Weights("", False, True)
H, HEADS, DIM, FFN, VOCAB = 512, 8, 64, 2048, 32128  # T5-small, whose heads together are as wide as the model


def rank(cached: int, weights: Weights = GROWING, batch: int = 3, prompt: int = 100, tensor: int = 1,
         precision: str = "pure-bf16", attention: str = "flash", software: Any = None, preset: str = "t5-small",
         **model: Any) -> Rank:
    scenario = resolve({
        "name": "t", "cluster": {"topology": "dgx-a100-80g", "gpus_per_node": tensor}, "parallel": {"tensor": tensor},
        "model": {"preset": preset} | model,
        "training": {"precision": precision, "attention": attention,
                     "mode": {"inference": {"prompt": prompt, "generate": 20, "batch": batch}}},
        "software": {"year": 2026, "modules": "transformers"} | (software or {})})
    style = replace(style_of(scenario, stack_of(scenario.software), batch), sequence=prompt)
    return rank_of(style, batch, 1, cached, weights)


def kernels(of: Rank, position: int) -> list[Kernel]:
    return [k for k in of.forward(of.architecture().stack[position]) if isinstance(k, Kernel)]


def products(of: Rank, position: int) -> list[tuple[int, ...]]:
    return [k.shape for k in kernels(of, position) if k.op == "gemm"]


def cores(of: Rank, position: int) -> list[Kernel]:
    return [k for k in kernels(of, position) if k.op == "attention"]


def test_the_encoder_runs_once() -> None:
    """Of t5-small's stack: embedding 0, encoder 1 to 6, bridge 7, decoder 8 to 13, head 14."""
    first, token = rank(0), rank(5)
    assert all(first.forward(layer) for layer in first.architecture().stack)
    assert [bool(token.forward(layer)) for layer in token.architecture().stack] == [False] * 7 + [True] * 8
    assert products(first, 2) == [(1, 300, H, H)] * 4 + [(1, 300, FFN, H), (1, 300, H, FFN)]
    names = [k.op for k in kernels(token, 7)]
    assert names == ["embedding"]  # the encoder's norm is behind


def test_keys_and_values_of_the_prompt_are_made_with_the_first_token() -> None:
    own, down = [(1, 3, H, H)] * 4, [(1, 3, FFN, H), (1, 3, H, FFN)]
    assert products(rank(0), 9) == [*own, (1, 3, H, H), *[(1, 300, H, H)] * 2, (1, 3, H, H), *down]
    assert products(rank(5), 9) == [*own, (1, 3, H, H), (1, 3, H, H), *down]


def test_a_token_attends_to_its_own_cache_and_to_the_prompt() -> None:
    own, crossing = cores(rank(5), 9)
    assert own.shape == (3, HEADS, HEADS, 1, 6, DIM) and crossing.shape == (3, HEADS, HEADS, 1, 100, DIM)
    assert crossing.flops == 4 * 3 * 100 * H
    read = 2 * 3 * 100 * H * 2  # keys and values
    assert read < crossing.bytes < read + 3 * HEADS * 100 * 2 + 2 * 3 * H * 2 + 1000  # with the bias, which is zeros


def test_only_the_own_cache_grows() -> None:
    def updates(of: Rank) -> list[float]:
        return [k.bytes for k in kernels(of, 9) if k.variant == "cache_update"]

    row = 2 * H * 3 * 2 * 2  # of one token of three sequences, read and written
    assert updates(rank(0)) == [row, 100 * row]
    assert updates(rank(5)) == [6 * row]
    assert updates(rank(5, Weights("", True, False))) == [row]


@pytest.mark.parametrize(("versions", "queries"), [("4.45.2", 6), ("4.46.3", 1), ("5.23.0", 1)])
def test_releases_before_446_look_up_all_pairs_for_every_token(versions: str, queries: int) -> None:
    of = rank(5, software={"versions": {"transformers": versions}})
    (table,) = [k for k in kernels(of, 8) if k.op == "embedding"]
    assert table.shape == (queries * 6, HEADS)
    assert not [k for k in kernels(of, 9) if k.op == "embedding"]  # the first block's serves all


def test_both_caches_counted_by_hand() -> None:
    of = rank(0)
    assert isinstance(of, PairRank)
    layers = of.architecture().stack
    own, crossing = 6 * 2 * H * 3 * 20 * 2, 6 * 2 * H * 3 * 100 * 2
    assert (of.crossing_bytes(layers), of.cache_bytes(20, layers)) == (crossing, own + crossing)
    assert sum(of.cache_tensors(20, layers)) == own + crossing and len(of.cache_tensors(20, layers)) == 24
    assert of.kept_bytes() == 3 * 100 * H * 2


#: Peaks of live bytes beside the parameters on fake tensors: PyTorch 2.13.0, transformers 5.23.0, four blocks a stack;
#: batch, prompt, generated, attention, precision; encoder, first token, last token, whole cache.
ORACLE = [
    ("t5-large", 8, 512, 16, "flash", "pure-bf16", 109084672, 92537856, 79170560, 2097152 + 67108864),
    ("t5-large", 8, 512, 16, "eager", "pure-bf16", 192970752, 92538880, 79170560, 2097152 + 67108864),
    ("t5-3b", 4, 1000, 33, "flash", "pure-bf16", 358944256, 336296960, 280257536, 8650752 + 262144000),
    ("t5-3b", 1, 128, 64, "flash", "pure-bf16", 10486784, 10840064, 13405696, 4194304 + 8388608),
    ("t5-large", 64, 64, 128, "flash", "pure-bf16", 100827136, 94014464, 227187200, 134217728 + 67108864),
    ("t5-large", 8, 512, 16, "flash", "fp32", 218136576, 185041920, 157279232, 4194304 + 134217728),
]


@pytest.mark.parametrize(("preset", "batch", "prompt", "generate", "attention", "precision", "encoder", "first", "last",
                          "cache"), ORACLE)
def test_memory_is_that_of_pytorch(preset: str, batch: int, prompt: int, generate: int, attention: str, precision: str,
                                   encoder: int, first: int, last: int, cache: int) -> None:
    asked: dict[str, Any] = {"batch": batch, "prompt": prompt, "precision": precision, "attention": attention,
                             "preset": preset, "layers": 4, "decoder_layers": 4}
    begins, ends = rank(0, **asked), rank(generate - 1, **asked)
    assert isinstance(begins, PairRank)
    layers = begins.architecture().stack
    assert begins.cache_bytes(generate, layers) == cache
    tokens = 8 * batch * prompt
    kept = tokens + begins.kept_bytes()
    assert begins.transient_bytes(layers[:6]) + tokens == pytest.approx(encoder, rel=2e-5)
    assert begins.transient_bytes(layers[6:]) + kept + begins.crossing_bytes(layers) == pytest.approx(first, rel=0.013)
    assert ends.transient_bytes(layers[6:]) + kept + cache == pytest.approx(last, rel=1e-3)


def test_what_bitsandbytes_leaves_wide() -> None:
    """transformers keeps T5's `wo` in fp32 beside fp16 and quantised weights; tables stay as they are."""
    def held(of: Rank, position: int) -> float:
        return of.weight_bytes(of.architecture().stack[position])

    square, norms = 4 * H * H, 2 * H * 2
    assert held(rank(0), 2) == 2 * (square + 2 * H * FFN) + norms
    small = rank(0, Weights("int8", False, True))
    assert held(small, 2) == square + 4 * 4 * H + H * FFN + 4 * FFN + 4 * H * FFN + norms
    assert held(small, 1) - held(small, 2) == 32 * HEADS * 2  # the first block's table of relative positions
    assert [k.dtype for k in kernels(small, 2) if k.op == "gemm"] == ["int8"] * 5 + ["fp32"]
    fused = rank(0, Weights("int8", True, False))
    assert held(fused, 2) < 1.01 * (square + 2 * H * FFN + norms)
    assert {k.dtype for k in kernels(rank(0, precision="pure-fp16"), 2) if k.op == "gemm"} == {"fp16", "fp32"}


def test_slices_sum_up_in_every_part_of_a_block() -> None:
    def sums(of: Rank, position: int) -> list[Sum]:
        return [k for k in of.forward(of.architecture().stack[position]) if isinstance(k, Sum)]

    first, token = rank(0, tensor=4), rank(5, tensor=4)
    assert sums(first, 0) == [Sum("all_reduce", 300 * H, "bf16")]
    assert sums(first, 2) == [Sum("all_reduce", 300 * H, "bf16")] * 2
    assert sums(first, 7) == sums(token, 7) == [Sum("all_reduce", 3 * H, "bf16")]
    assert sums(token, 9) == [Sum("all_reduce", 3 * H, "bf16")] * 3
    assert sums(token, 14) == [Sum("all_gather", 3 * VOCAB, "bf16")]
    whole = rank(5)
    assert token.cache_bytes(20, token.architecture().stack) * 4 == whole.cache_bytes(20, whole.architecture().stack)


def test_a_decoder_alone_may_have_relative_positions() -> None:
    of = rank(9, kind="decoder", preset="gpt2", positions="relative", software={"modules": "plain"})
    (table,) = [k for k in kernels(of, 1) if k.op == "embedding"]
    assert table.shape == (10, 12) and not [k for k in kernels(of, 2) if k.op == "embedding"]
    assert [k.variant for k in kernels(of, 2)].count("bias_copy") == 1


def test_an_encoder_has_a_pooler_and_no_cache() -> None:
    scenario = resolve({
        "name": "t", "cluster": {"topology": "single-a100-80g-sxm"}, "model": {"preset": "bert-base"},
        "training": {"precision": "pure-bf16", "mode": {"inference": {"prompt": 128, "batch": 4}}}})
    of = rank_of(style_of(scenario, stack_of(scenario.software), 4), 4, 128, 0, GROWING)
    layers = of.architecture().stack
    assert of.cache_bytes(128, layers) == 0
    assert [k.shape for k in kernels(of, 13) if k.op == "gemm"] == [(1, 4, 768, 768)]
    assert not [k for layer in layers for k in of.forward(layer) if isinstance(k, Kernel) and "cache" in k.variant]
    # BertModel with its pooler: 109,482,240 parameters
    assert sum(of.weight_bytes(layer) for layer in layers) == 2 * 109_482_240


@pytest.mark.parametrize(("batch", "prompt", "attention", "peak"), [
    (8, 512, "flash", 92307456), (32, 128, "flash", 92307456), (8, 512, "eager", 176193536)])
def test_memory_of_a_pass_is_that_of_pytorch(batch: int, prompt: int, attention: str, peak: int) -> None:
    """Six blocks of BERT-large (transformers 5.23.0's BertModel) on fake tensors."""
    scenario = resolve({
        "name": "t", "cluster": {"topology": "single-a100-80g-sxm"}, "model": {"preset": "bert-large", "layers": 6},
        "training": {"precision": "pure-bf16", "attention": attention,
                     "mode": {"inference": {"prompt": prompt, "batch": batch}}},
        "software": {"year": 2026, "modules": "transformers"}})
    of = rank_of(style_of(scenario, stack_of(scenario.software), batch), batch, prompt, 0, GROWING)
    assert of.transient_bytes(of.architecture().stack) + 8 * batch * prompt == pytest.approx(peak, rel=1e-3)
