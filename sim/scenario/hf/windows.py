"""Which blocks of a Hugging Face config attend to a window of tokens, and which to all.

A config lists its blocks (`layer_types`, transformers 4.53 on), or its class has a pattern: one block of every so many
with full attention (Gemma 2 and 3, Cohere 2, gpt-oss, OLMo 3; Llama 4's windows are chunks), or full attention at the
start (`max_window_layers` of Qwen 2 and 3). Read in transformers 5.23, configuration_<family>.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sim.scenario.hf.config import Config

#: Blocks that are looked at; a config of more is refused as absurd, wherever it comes from.
MOST_BLOCKS = 100_000
_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def window_of(c: Config, key: str, default: int) -> int | None:
    """A window; the class has one where the config is silent, and null is none."""
    return c.optional(key) if key in c.values else default


def patterned(c: Config, fields: dict[str, Any], window: int | None, *, first: int = 0, every: int = 0,
              chunked: bool = False, kinds: Sequence[str] = ()) -> dict[str, Any]:
    """Fields of a model with a window: blocks as the config lists them, else as its class does.

    Args:
        first, every: blocks at the start with full attention, and one of every so many behind them; 0 = none.
        kinds: of the blocks, where the class has another order.
    """
    if not window:
        return fields
    layers, other = fields["layers"], _CHUNKED if chunked else _SLIDING
    usual = [_FULL if i < first or (every and (i + 1 - first) % every == 0) else other
             for i in range(min(layers, MOST_BLOCKS))]
    told = c.values.get("layer_types") or kinds or usual
    found = _pattern(told, window) if isinstance(told, Sequence) and len(told) == layers else None
    c.must(found is not None, "layer_types", "this order of blocks with and without a window")
    return {**fields, **(found or {})}


def _pattern(kinds: Sequence[str], window: int) -> dict[str, Any] | None:
    """Fields that say a row of kinds; None where none do."""
    windows = {kind for kind in kinds if kind != _FULL}
    if not windows <= {_SLIDING, _CHUNKED} or len(windows) > 1:
        return None
    full = [kind == _FULL for kind in kinds]
    if all(full):
        return {}
    first = full.index(False)
    behind = full[first:]
    every = behind.index(True) + 1 if True in behind else 0
    if every and behind != [(i + 1) % every == 0 for i in range(len(behind))]:
        return None
    return {"window": window, **({"first_full": first} if first else {}), **({"full_every": every} if every else {}),
            **({"chunked_window": True} if _CHUNKED in windows else {})}
