"""Which pairs of a query and a key a block's attention meets: all, those of a window, those within chunks or documents.

Documents have unequal lengths, and the pairs within them go by their second moment: over a sequence of s tokens,
sum of length^2 = s E[length^2] / E[length]. So documents are counted as equal ones of that length (`Style.document`),
which is exact for the pairs. A window inside documents is counted so too, which is exact for equal documents and an
upper bound for others: what a token meets grows ever slower with its document (Jensen's inequality).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sim.model.attention.core_choice import masked
from sim.model.style import Style

#: Queries and keys of a block, which a kernel computes as a whole however short a document is (FlashAttention-2,
#: section 3.3: blocks of 64 or 128).
_ROWS, _COLUMNS = 128, 64


class Span(NamedTuple):
    """Attention of a micro-batch as one fused kernel computes it.

    Attributes:
        pieces: sequences or documents that are attended to one by one; queries, keys: of each, no fewer than a block.
        met: keys of a query as FLOPs count them: squares in full, of a window's band its area.
        causal: whether the kernel may skip what lies above the diagonal.
    """

    pieces: int
    queries: int
    keys: int
    met: float
    causal: bool


def span(style: Style) -> Span:
    """What a fused kernel is launched over; under a mask it computes all pairs of the sequence, whatever counts."""
    causal, apart = style.causal and not style.biased, masked(style)
    whole = style.sequence * style.context
    length: float = style.document or whole
    if 0 < style.window < min(length, whole) and causal:
        within = _chunks(length, style.window) if style.chunked else _band(length, style.window)
        keys = round(within * (whole / length) / (whole * style.slices))
        return Span(style.batch, style.sequence, style.keys if apart else keys, keys, False)
    if not style.document:
        return Span(style.batch, style.sequence, style.keys, style.keys, causal and not apart)
    share = style.keys / style.sequence
    met = style.document / style.slices * share
    if apart:
        return Span(style.batch, style.sequence, style.keys, met, False)
    queries = math.sqrt(style.tokens * style.document / style.slices / style.pieces)  # whole pieces, all of the work
    return Span(style.pieces, max(_ROWS, round(queries)), max(_COLUMNS, round(queries * share)), met, causal)


def _band(sequence: float, window: int) -> float:
    """Pairs (query, key) of a causal band: query i meets min(i + 1, window) keys."""
    return sequence * window - window * (window - 1) / 2


def _chunks(sequence: float, chunk: int) -> float:
    """Pairs (query, key) of causal attention within chunks, the last of which may be shorter."""
    whole, rest = divmod(sequence, chunk)
    return whole * chunk * (chunk + 1) / 2 + rest * (rest + 1) / 2
