"""Kernels, weights and cache of one slice of a decoder in inference, counted by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sim.errors import UserError
from sim.model.inference.kinds import rank_of
from sim.model.inference.rank import Rank, Sum, cache_width
from sim.model.inference.weights import Weights, stored_bytes
from sim.model.scenario_style import style_of
from sim.scenario import resolve
from sim.software import stack_for
from sim.work import Kernel

PLAIN = Weights("", True, False)


def rank(weights: Weights = PLAIN, batch: int = 1, new: int = 1, cached: int = 100, tensor: int = 1,
         compiled: bool = False, **model: Any) -> Rank:
    scenario = resolve({
        "name": "t", "cluster": {"topology": "dgx-a100-80g", "gpus_per_node": tensor},
        "parallel": {"tensor": tensor},
        "model": {"kind": "decoder", "layers": 2, "hidden": 512, "heads": 8, "kv_heads": 2, "ffn": 2048, "vocab": 1000,
                  "positions": "rotary", "norm": "rmsnorm", "bias": False, "gated_mlp": True} | model,
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 64, "precision": "pure-bf16"}})
    stack = stack_for(compile_=True) if compiled else stack_for()
    style = replace(style_of(scenario, stack, 1), window=scenario.model.window or 0)
    return rank_of(style, batch, new, cached, weights)


def block(of: Rank) -> tuple[Kernel | Sum, ...]:
    return of.forward(of.architecture().stack[1])


def products(of: Rank) -> list[Kernel]:
    return [k for k in block(of) if isinstance(k, Kernel) and k.op == "gemm"]


def test_a_single_row_streams_weights_by_where_it_is_compiled() -> None:
    """Several rows are cuBLAS's, and so is one in eager code; weights in fewer bits are another kernel's."""
    def kinds(**how: Any) -> set[str]:
        of = rank(**how)
        head = [k for k in of.forward(of.architecture().stack[-1]) if isinstance(k, Kernel) and k.op == "gemm"]
        return {k.kernel for k in (*products(of), *head)}
    assert kinds(compiled=True) == {"streamed"}
    assert kinds(compiled=True, batch=2) == kinds() == {""}
    assert {k.kernel for k in products(rank(Weights("int4", True, False), compiled=True))} == {"expanding"}


def named(of: Rank, name: str) -> list[Kernel]:
    return [k for k in block(of) if isinstance(k, Kernel) and k.variant == name]


def test_one_token_multiplies_every_weight_once() -> None:
    of = rank(batch=3)
    weights = 512 * (512 + 2 * 128) + 512 * 512 + 3 * 512 * 2048
    assert sum(k.flops for k in products(of)) == 2 * 3 * weights


def test_attention_of_a_token_reads_the_cache_once() -> None:
    (core,) = [k for k in block(rank(batch=3, cached=99)) if isinstance(k, Kernel) and k.op == "attention"]
    assert core.shape == (3, 8, 2, 1, 100, 64) and not core.causal
    assert core.flops == 4 * 3 * 8 * 100 * 64
    cache = 2 * 3 * 100 * 2 * 64 * 2
    assert cache < core.bytes < cache + 3 * 8 * 64 * 2 * 2 + 1000


def test_a_window_bounds_what_is_read() -> None:
    of = rank(cached=99, window=10)
    assert of.style.window == 10 and of.keys(of.architecture().stack[1]) == 10


def test_the_cache_is_written_in_place_or_anew() -> None:
    (place,) = named(rank(batch=3), "cache_update")
    (anew,) = named(rank(Weights("", False, True), batch=3), "cache_update")
    row = 2 * 2 * 64 * 3  # elements of one token
    assert (place.bytes, anew.bytes) == (2 * 2 * row, 2 * 2 * row * 101)


def test_fused_products_read_weights_as_stored() -> None:
    plain, small = products(rank()), products(rank(Weights("int4", True, False)))
    saved = sum(a.bytes - b.bytes for a, b in zip(plain, small, strict=True))
    count = sum(k.shape[2] * k.shape[3] for k in plain)
    assert saved == pytest.approx(count * (2 - 0.5 - 2.5 / 128))
    assert [k.flops for k in plain] == [k.flops for k in small]


@pytest.mark.parametrize("rows", [1, 17])
def test_a_fused_product_expands_its_weights(rows: int) -> None:
    assert {k.kernel for k in products(rank(Weights("int4", True, False), batch=rows))} == {"expanding"}
    assert {k.kernel for k in products(rank(batch=rows))} == {""}


def test_expanded_weights_are_written_and_read_in_16_bits() -> None:
    of = rank(Weights("nf4", False, False), batch=2)
    count = sum(k.shape[2] * k.shape[3] for k in products(of))
    assert sum(k.bytes for k in named(of, "dequantise")) == pytest.approx(count * (0.5625 + 2))
    assert [k.bytes for k in products(of)] == [k.bytes for k in products(rank(batch=2))]
    alone = rank(Weights("nf4", False, False))  # a single row: gemv_4bit
    assert not named(alone, "dequantise") and {k.kernel for k in products(alone)} == {"expanding"}


def test_int8_runs_in_int8_between_quantised_activations() -> None:
    of = rank(Weights("int8", False, False))
    assert {k.dtype for k in products(of)} == {"int8"}
    assert len(named(of, "quantise")) == len(named(of, "dequantise_outputs")) == len(products(of))


@pytest.mark.parametrize(("dtype", "stored"), [("fp8", 1.0), ("mxfp8", 1 + 1 / 32), ("nvfp4", 0.5625)])
def test_narrow_products_read_what_is_stored_and_quantise_what_they_multiply(dtype: str, stored: float) -> None:
    of, half = rank(Weights(dtype, True, False, True), batch=3), products(rank(batch=3))
    narrow = {"fp8": 1, "mxfp8": 1, "nvfp4": 0.5}[dtype]
    assert {k.dtype for k in products(of)} == {dtype}
    assert sum(k.flops for k in products(of)) == sum(k.flops for k in half)
    for kernel, plain in zip(products(of), half, strict=True):
        _, m, n, k = kernel.shape
        weights = n * k * stored + (4 * n if dtype == "fp8" else 0)  # fp8 has an fp32 scale per row
        assert kernel.bytes == pytest.approx(m * k * narrow + weights + m * n * 2)
        assert plain.bytes == (m * k + n * k + m * n) * 2
    assert [q.bytes for q in named(of, "quantise")] == [3 * k.shape[3] * (2 + narrow) for k in half]


def test_weights_alone_in_fp8_are_expanded_whatever_the_rows() -> None:
    for batch in (1, 4):  # bitsandbytes' kernel for a single row knows its 4-bit formats only
        of = rank(Weights("fp8", False, False), batch=batch)
        assert len(named(of, "dequantise")) == len(products(of)) and {k.dtype for k in products(of)} == {"bf16"}


@pytest.mark.parametrize("parallel_block", [False, True])
def test_sums_of_slices(parallel_block: bool) -> None:
    sums = [k for k in block(rank(tensor=4, batch=3, parallel_block=parallel_block)) if isinstance(k, Sum)]
    assert sums == [Sum("all_reduce", 3 * 512, "bf16")] * (1 if parallel_block else 2)


def test_slices_share_the_work_and_repeat_few_key_heads() -> None:
    whole, part = rank(), rank(tensor=4)
    assert (part.style.heads, part.style.kv_heads, part.style.ffn) == (2, 1, 512)
    ratio = sum(k.flops for k in products(part)) / sum(k.flops for k in products(whole))
    assert 0.25 < ratio < 0.27  # keys and values of two heads on four ranks are computed twice
    assert part.weight_bytes(part.architecture().stack[1]) < 0.27 * whole.weight_bytes(whole.architecture().stack[1])


def test_latent_attention_caches_what_is_compressed() -> None:
    mla = {"q_rank": 96, "kv_rank": 64, "nope_dim": 32, "rope_dim": 16, "value_dim": 32}
    of = rank(mla=mla, kv_heads=8, cached=99)
    assert cache_width(of.style) == 64 + 16
    (core,) = [k for k in block(of) if isinstance(k, Kernel) and k.op == "attention"]
    cache = 100 * 80 * 2
    assert cache < core.bytes < cache + 8 * 80 * 2 * 2 + 1000


def test_scales_are_stored_too() -> None:
    assert stored_bytes((100, 1000), "int8") == 100_000 + 400
    assert stored_bytes((128, 128), "int4") == 128 * 128 / 2 + 128 * 2.5
    assert stored_bytes((64, 64), "nf4") == 64 * 64 / 2 + 64 * 4
    assert stored_bytes((100, 1000), "fp8") == 100_000 + 400
    assert stored_bytes((64, 64), "mxfp8") == 64 * 64 + 128
    assert stored_bytes((64, 64), "nvfp4") == 64 * 64 / 2 + 256


def test_a_prompt_takes_no_more_memory_than_its_widest_operator_needs() -> None:
    of = rank(new=1000, cached=0)
    size = of.transient_bytes(of.architecture().stack)
    assert size >= 1000 * 3 * 2048 * 2
    assert size < 3 * 1000 * 3 * 2048 * 2
    assert rank(new=2000, cached=0).transient_bytes(rank(new=2000, cached=0).architecture().stack) > size


def test_learned_positions_bound_the_generation() -> None:
    with pytest.raises(UserError, match="1025 tokens but the model has 1024 learned positions"):
        resolve({"name": "t", "cluster": {"topology": "single-a100-80g-sxm"}, "model": {"preset": "gpt2"},
                 "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 64,
                              "mode": {"inference": {"prompt": 1000, "generate": 25, "batch": 1}}}})


def attention(of: Rank) -> Kernel:
    (core,) = [k for k in block(of) if isinstance(k, Kernel) and k.op == "attention"]
    return core


NARROW_CACHE = Weights("", True, False, cache="fp8")


def test_a_cache_in_8_bits_is_half_as_large_and_read_as_it_is_stored() -> None:
    plain, small = rank(batch=3, cached=99), rank(NARROW_CACHE, batch=3, cached=99)
    elements = 3 * 100 * 2 * 2 * 64  # sequences, tokens, keys and values, heads, width
    assert attention(plain).bytes - attention(small).bytes == elements
    layers = plain.architecture().stack
    assert 2 * small.cache_bytes(100, layers) == plain.cache_bytes(100, layers)
    (update,) = named(small, "cache_update")
    assert update.bytes == 3 * 2 * 2 * 64 * (2 + 1)
    assert small.transient_bytes(layers) == plain.transient_bytes(layers)


def test_without_an_engine_the_cache_is_expanded_before_attention() -> None:
    plain, small = (rank(Weights("", False, True, cache=cache), batch=3, cached=99) for cache in ("", "int8"))
    elements = 3 * 100 * 2 * 2 * 64
    (expanded,), (quantised,), (update,) = (
        named(small, name) for name in ("dequantise_cache", "quantise_cache", "cache_update"))
    assert (expanded.bytes, quantised.bytes, update.bytes) == (3 * elements, 3 * 3 * 2 * 2 * 64, 2 * elements)
    assert attention(small).bytes == attention(plain).bytes
    layers = plain.architecture().stack
    assert small.transient_bytes(layers) == plain.transient_bytes(layers) + elements  # the copy, less half the cache


def test_a_prompt_attends_to_what_it_has_just_computed() -> None:
    plain, small = rank(new=64, cached=0), rank(NARROW_CACHE, new=64, cached=0)
    assert attention(small).bytes == attention(plain).bytes
    assert named(small, "cache_update")[0].bytes == 64 * 2 * 2 * 64 * 3


def test_compressed_keys_are_stored_in_8_bits_once() -> None:
    mla = {"q_rank": 96, "kv_rank": 64, "nope_dim": 32, "rope_dim": 16, "value_dim": 32}
    plain, small = (rank(of, mla=mla, kv_heads=8, cached=99) for of in (PLAIN, NARROW_CACHE))
    assert attention(plain).bytes - attention(small).bytes == 100 * (64 + 16)


def test_compiled_products_of_one_input_share_what_quantises_it() -> None:
    fp8 = Weights("fp8", True, False, multiplied=True)
    eager, compiled = ([(k.launches, k.shape[0], k.bytes) for k in named(rank(fp8, batch=2, compiled=one), "quantise")]
                       for one in (False, True))
    assert [launches for launches, _, _ in eager] == [1] * len(eager) and len(eager) == len(products(rank(fp8)))
    # behind both norms and the activation it is written there, behind attention by a kernel of its own
    written = (0, 2 * 512, 2 * 512)
    assert compiled == [written, (1, 2 * 512, 3 * 2 * 512), written, (0, 2 * 2048, 2 * 2048)]


def test_compiled_norms_loop_over_their_row_and_a_token_is_written_to_the_cache_once() -> None:
    def norms(of: Rank) -> set[str]:
        return {k.kernel for k in block(of) if isinstance(k, Kernel) and k.op == "norm"}
    assert norms(rank(compiled=True)) == {"norm_looped"}
    assert sum(k.launches for k in named(rank(compiled=True), "cache_update")) == 1
    assert sum(k.launches for k in named(rank(), "cache_update")) == 2
