"""Mixtures of experts in inference: which experts a few tokens ask for, and experts spread over the tensor ranks."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest

from sim.errors import UserError
from sim.model.inference.kinds import rank_of
from sim.model.inference.rank import Rank, Sum
from sim.model.inference.weights import Weights, stored_bytes
from sim.model.layers.experts import asked, expert_rows
from sim.model.mixture import Experts
from sim.model.scenario_style import style_of
from sim.network import expected_maximum
from sim.parallel import lower
from sim.scenario import resolve
from sim.scenario.fields.schema import Scenario
from sim.software import stack_for
from sim.work import Kernel

EIGHT = Experts(8, 2, 96, 0, 1, 0, 8, 0)


def scenario(batch: int = 8, tensor: int = 4, expert: int = 4, **model: Any) -> Scenario:
    return resolve({
        "name": "t", "cluster": {"topology": "dgx-h100"}, "parallel": {"tensor": tensor, "expert": expert},
        "model": {"kind": "decoder", "layers": 2, "hidden": 64, "heads": 8, "kv_heads": 4, "ffn": 96, "vocab": 1000,
                  "positions": "rotary", "norm": "rmsnorm", "bias": False, "gated_mlp": True,
                  "moe": {"experts": 8, "top_k": 2}} | model,
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 64, "precision": "pure-bf16",
                     "mode": {"inference": {"prompt": 16, "generate": 4, "batch": batch}}},
        "software": {"framework": "pytorch", "compile": True}})


def rank(batch: int, new: int = 1, **given: Any) -> Rank:
    style = style_of(scenario(batch, **given), stack_for("pytorch", compile_=True), batch)
    return rank_of(style, batch, new, 0 if new > 1 else 16, Weights("", True, False))


@pytest.mark.parametrize(("tokens", "experts"), [(1, 2.0), (2, 3.5), (4, 8 * (1 - 0.75**4)), (1000, 8.0)])
def test_few_tokens_ask_for_few_experts(tokens: int, experts: float) -> None:
    """Two of eight each: the second token finds one of the first's with half the chance."""
    assert asked(EIGHT, 2 * tokens) == pytest.approx(experts)


def test_a_token_reads_the_weights_of_its_own_experts() -> None:
    """One token: two experts' three matrices of 64 x 96; eight tokens: 7.2 of the eight."""
    one, eight = rank(1, tensor=1, expert=1), rank(8, tensor=1, expert=1)
    read = [sum(k.bytes for k in products(of)) for of in (one, eight)]
    matrices = 3 * 64 * 96 * 2
    assert read[0] == pytest.approx(2 * matrices, rel=0.05)
    assert read[1] == pytest.approx(8 * (1 - 0.75**8) * matrices, rel=0.2)  # and eight tokens' rows


def products(of: Rank) -> list[Kernel]:
    """Of experts: those whose weights are 64 x 96 or 96 x 64."""
    return [k for k in of.forward(of.architecture().stack[1])
            if isinstance(k, Kernel) and k.op == "gemm" and {64, 96} == set(k.shape[2:])]


def test_experts_over_tensor_ranks_are_whole_and_have_their_share_of_the_rows() -> None:
    """Four ranks of two experts each; 8 sequences of 16 tokens: 256 rows, 64 a rank, and the busiest rank's more."""
    of = rank(8, 16)
    made = of.style.experts
    assert made is not None
    assert (made.held, made.ffn, made.alike, of.tensor) == (2, 96, 4, 4)
    sigma = sqrt(128 * 2 / 4 * (3 / 4) * (6 / 7)) / 64
    assert made.load == pytest.approx(1 + sigma * expected_maximum(4))
    assert expert_rows(of.style, made) == round(64 * made.load)
    sums = [i for i in of.forward(of.architecture().stack[1]) if isinstance(i, Sum)]
    assert [s.kind for s in sums] == ["all_reduce"] * 2  # attention's and the experts', as of cut matrices


def test_flops_are_those_of_the_mean_rank() -> None:
    """Every rank's mean is a quarter: two experts a token, three products of 64 x 96; rows are whole numbers."""
    of = rank(8, 16)
    assert sum(k.flops for k in products(of)) == pytest.approx(2 * 128 * 2 * 3 * 64 * 96 / 4, rel=0.01)


def test_weights_are_the_same_however_experts_are_cut() -> None:
    whole, cut = rank(8), rank(8, expert=1)
    held = [sum(of.weight_bytes(layer) for layer in of.architecture().stack) for of in (whole, cut)]
    assert held[0] == held[1]


def test_other_spreads_are_refused() -> None:
    lower(scenario())
    with pytest.raises(UserError, match="experts over other than the 4 tensor ranks"):
        lower(scenario(expert=2))


def test_a_graph_s_sums_wait_for_no_host() -> None:
    assert stack_for("pytorch", cuda_graphs=True).rank_jitter_s == 0
    assert stack_for("pytorch").rank_jitter_s > 0


def test_narrow_weights_of_experts_asked_now_and_then_are_fewer_bytes_and_more_than_none() -> None:
    """Of eight slices with an expert each a token asks two: a slice reads part of its expert on average, in nf4 as in
    16 bits, though its product's shape is that of a whole one."""
    style = style_of(scenario(1, 8, 8, kv_heads=8), stack_for("pytorch", modules="transformers"), 1)
    found = {}
    for dtype in ("", "nf4"):
        one = rank_of(style, 1, 1, 16, Weights(dtype, False, False))
        block = next(layer for layer in one.architecture().stack if layer.kind == "block")
        found[dtype] = [item for item in one.forward(block) if isinstance(item, Kernel) and item.op == "gemm"]
    shares = []
    for wide, narrow in zip(found[""], found["nf4"], strict=True):
        experts, m, n, k = wide.shape
        shares.append(wide.bytes / (2 * experts * (m * k + k * n + m * n)))  # two bytes of every row and weight
        less = experts * (2 * n * k - stored_bytes((n, k), "nf4"))
        assert 0 < narrow.bytes < wide.bytes and narrow.bytes == pytest.approx(wide.bytes - shares[-1] * less)
    assert sum(share == 1 for share in shares) > 2 and any(0.1 < share < 0.9 for share in shares)
