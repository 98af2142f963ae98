"""`build`: a scenario's model as layers of operators."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from sim.model.adapters.lora import finetuned
from sim.model.architecture import Architecture
from sim.model.decoder import decoder
from sim.model.encoder import encoder
from sim.model.encoder_decoder import encoder_decoder
from sim.model.filled import filled
from sim.model.scenario_style import style_of
from sim.model.style import Style
from sim.model.table import layer_table
from sim.software import Stack

_SHAPES = {"decoder": decoder, "encoder": encoder, "encoder-decoder": encoder_decoder}


def build(scenario: Any, stack: Stack, batch: int) -> Architecture:
    """One replica's architecture for a micro-batch of `batch` sequences; memoised on everything that matters.

    Args:
        scenario: a resolved scenario (reads `.model` and `.training`).
        stack: its software.
        batch: sequences (of a table of layers: samples) of the micro-batch.

    Raises:
        UserError: a table of layers cannot be read.
    """
    style = style_of(scenario, stack, batch)
    return layer_table(scenario.model.table, style) if style.kind == "layers" else _architecture(style)


@lru_cache(maxsize=256)
def _architecture(style: Style) -> Architecture:
    whole = _SHAPES[style.kind](style)
    return filled(whole if style.tuned is None else finetuned(whole, style), style)
