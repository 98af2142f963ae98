"""Tensors of one layer, one by one: what the caching allocator is replayed on."""

from __future__ import annotations

from typing import NamedTuple


class Trace(NamedTuple):
    """The tensors of one layer, one by one: events are (number, bytes) where one is born and (number, 0) where it dies.

    Numbers are the layer's own; a negative one is somebody else's: `INPUT`, `OUTPUT_GRADIENT` or `TIED`. What is born
    in forward and not dead then dies in backward, or with `held` or `cached`.

    Attributes:
        held: numbers that the model's forward lets go before the head; cached: at the end of forward.
        output: number of the tensor the next layer reads, -1 for none.
        input_gradient: number of the gradient that backward leaves for the layer before (`OUTPUT_GRADIENT` where it is
            added to in place), -1 for none.
        kept: numbers of parameter gradients that stay.
        tied: number of a shared parameter's gradient that waits for the other layer's, -1 for none.
        made: by number, the operator that makes a tensor and its memory category; empty where that is not known.
    """

    forward: tuple[tuple[int, int], ...]
    held: tuple[int, ...]
    cached: tuple[int, ...]
    backward: tuple[tuple[int, int], ...]
    output: int
    input_gradient: int
    kept: tuple[int, ...]
    tied: int
    made: tuple[tuple[str, str], ...] = ()


#: Tensors of a `Trace` that another layer made: its input, its output's gradient, a shared parameter's gradient.
INPUT, OUTPUT_GRADIENT, TIED = -2, -3, -4


class LayerMemory(NamedTuple):
    """Which operations of a section's `memory` sum up what one direction of a layer does, and its tensors one by one.

    Attributes:
        start, stop: of `Section.memory`.
        verb: "forward", "backward", what goes at the end of forward ("held", "cached"), or a tensor that another stage
            gave or is given ("passed", one operation).
        position: of the layer in the model.
        trace: of a forward or backward; "held" and "cached" end what every layer of the micro-step has there.
    """

    start: int
    stop: int
    verb: str
    position: int
    trace: Trace | None
