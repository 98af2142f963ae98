"""What only blocks of decoders have, and what cannot be of windows among blocks that attend to all tokens."""

from __future__ import annotations

from collections.abc import Iterator

from sim.scenario.findings import Finding
from sim.scenario.schema import Scenario

#: What the blocks of encoders, encoder-decoders and tables of layers are not simulated with.
_OF_DECODERS = {"moe": "a mixture of experts", "mla": "latent attention", "window": "sliding-window attention",
                "parallel_block": "attention and MLP side by side"}


def of_decoders(written: Scenario, s: Scenario) -> Iterator[Finding]:
    """Parts that the model's kind would pass over in silence."""
    del written
    if s.model.kind == "decoder":
        return
    for name, what in _OF_DECODERS.items():
        if getattr(s.model, name):
            yield f"model.{name}", f"{what} is for kind decoder, and the model is of kind {s.model.kind}", "remove it"


def windows(written: Scenario, s: Scenario) -> Iterator[Finding]:
    """Fields about a window without one, and more blocks at the start than there are."""
    m, said = s.model, written.model
    for name in ("full_every", "first_full", "chunked_window"):
        if not getattr(said, name):
            continue
        if m.window is None:
            yield (f"model.{name}", f"{name} is about blocks with a window, and the model has none",
                   "give model.window, or remove it")
        elif m.kind != "decoder":
            yield f"model.{name}", f"{name} is for kind decoder, and the model is of kind {m.kind}", "remove it"
    if m.first_full > (m.layers or 0):
        yield "model.first_full", f"first_full {m.first_full} is more than layers {m.layers}", f"at most {m.layers}"
