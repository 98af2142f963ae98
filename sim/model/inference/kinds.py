"""One slice of a model in inference, of whichever kind the model is."""

from __future__ import annotations

import math
from dataclasses import replace

from sim.model.inference.pair import PairRank
from sim.model.inference.rank import Rank
from sim.model.inference.weights import Weights
from sim.model.mixture import Experts, most
from sim.model.style import Style
from sim.network import expected_maximum


def rank_of(style: Style, batch: int, new: int, cached: int, weights: Weights) -> Rank:
    """One slice of a model for `new` tokens of each of `batch` sequences, `cached` of them known already.

    Args:
        style: of the slice (`style_of`), its `window` that of the model whatever the length of the sequence. Of an
            encoder-decoder its `sequence` is the encoder's, and `new` and `cached` count the decoder's tokens.
    """
    half = replace(style, autocast=False, weight=style.act, residual=style.act) if weights.dtype else style
    if weights.multiplied:
        half = replace(half, gemm=style.act)
    if style.experts is not None and style.expert > 1:
        half = replace(half, expert=1, experts=_shared_out(style.experts, style.expert, batch * new))
    half = replace(half, batch=batch, predicted=1, dropout=False)
    if style.kind == "encoder-decoder":
        return PairRank(replace(half, decoder_sequence=new), cached, weights)
    return Rank(replace(half, sequence=new), cached, weights)


def _shared_out(experts: Experts, slices: int, tokens: int) -> Experts:
    """Experts over slices that all have the same tokens: each computes its experts' rows, and the sum over slices
    is the tensor ranks' own. Few tokens ask unevenly by chance: rows of a slice are hypergeometric, and all wait for
    the largest of them. Source: vLLM 0.6.3 model_executor/models/mixtral_quant.py, MixtralMoE (expert_indicies of a
    rank, then tensor_model_parallel_all_reduce); TensorRT-LLM's over tensor ranks alike (recalled).
    """
    ones = tokens * experts.top_k / slices
    rest = (1 - 1 / slices) * (experts.count - experts.top_k) / max(1, experts.count - 1)
    chance = math.sqrt(rest / ones) * expected_maximum(slices)
    load = 1 + math.hypot(experts.load - 1, chance)
    return replace(experts, alike=slices, load=min(most(experts.top_k, slices, experts.held), load))
