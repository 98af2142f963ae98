"""The largest micro-batch and the longest sequence that fit, by bisection over memory alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from sim.errors import UserError
from sim.garbage import seldom_searched
from sim.report.advice.combined import next_above
from sim.report.numbers.memory import MemoryResult
from sim.scenario import Scenario
from sim.scenario.change import Changing
from sim.scenario.fields.schema import Inference

Measure = Callable[[Scenario], MemoryResult]

#: Where the search stops: more sequences or tokens than any published run has had.
_MOST_SEQUENCES, _MOST_TOKENS = 2**17, 2**24
#: Sequences are tried in multiples of so many tokens (a tile of the matrix products), short ones in finer steps.
_TOKENS, _SHORT, _FEW_TOKENS = 128, 1024, 16
#: What ends a search where the host's memory does not suffice whatever the size: states are offloaded, not activations.
GPU_ALONE = "the GPU's memory alone"


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest value of one field with which a job fits, everything else as it is.

    Attributes:
        what: in words; field: dotted.
        now: the scenario's value; value: the largest that fits, 0 if not even the smallest does.
        step: values tried are multiples of it.
        ends: what rules out the next one: "memory" (`GPU_ALONE` where the host's never suffices), or the fault it has.
    """

    what: str
    field: str
    now: int
    value: int
    step: int
    ends: str

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"what": self.what, "field": self.field, "now": self.now, "value": self.value, "step": self.step,
                "ends": self.ends}


class _Axis(NamedTuple):
    """A field to raise: its name, its value now, the step and the most of it, and all fields of a value."""

    what: str
    field: str
    now: int
    step: int
    most: int
    sets: Callable[[int], dict[str, Any]]


@seldom_searched()
def largest(scenario: Scenario, measure: Measure, now: MemoryResult | None = None) -> list[Largest]:
    """Largest micro-batch and longest sequence of a training step, sequences at once and longest prompt of a request.

    The number of micro-steps stays, and with the micro-batch the global batch grows: stages of a pipeline hold as many
    micro-batches as before, so that memory only rises. Held against the model's learned positions.

    Args:
        now: memory of the scenario as it is, where that is known.
    """
    change = Changing(scenario)
    found = []
    places = scenario.parallel.offload
    alone = now is not None and now.host_missing_bytes > 0 and places.activations == "none"
    for axis in _axes(scenario):
        reasons: dict[int, str] = {}

        def fits(count: int, axis: _Axis = axis, reasons: dict[int, str] = reasons) -> bool:
            value = count * axis.step
            try:
                there = now if now is not None and value == axis.now else measure(change(axis.sets(value)).scenario)
                return there.fits_device if alone else there.fits
            except UserError as error:
                reasons[count] = error.faults[0].message
                return False

        count = search(fits, max(1, axis.now // axis.step), axis.most // axis.step)
        memory = GPU_ALONE if alone else "memory"
        ends = reasons.get(count + 1, memory if count < axis.most // axis.step else "the search")
        found.append(Largest(axis.what, axis.field, axis.now, count * axis.step, axis.step, ends))
    return found


def search(fits: Callable[[int], bool], start: int, most: int) -> int:
    """The largest number up to `most` that fits, 0 if none does; what does not fit, nothing above it does."""
    low, high = 0, min(start, most)
    while fits(high):
        low = high
        if low == most:
            return most
        high = min(2 * high, most)
    return next_above(low, high, lambda count: not fits(count)) - 1


def _axes(scenario: Scenario) -> Iterator[_Axis]:
    training, parallel = scenario.training, scenario.parallel
    if isinstance(training.mode, Inference):
        run, field = training.mode.inference, "training.mode.inference"
        yield _Axis("sequences at once", f"{field}.batch", run.batch, 1, _MOST_SEQUENCES,
                    lambda size: {f"{field}.batch": size})
        yield _Axis("prompt", f"{field}.prompt", run.prompt, _unit(run.prompt), _MOST_TOKENS,
                    lambda tokens: {f"{field}.prompt": tokens})
        return
    micro, sequence = "training.micro_batch", "training.sequence"
    per_step = scenario.data_parallel * scenario.micro_steps
    yield _Axis("micro-batch", micro, training.micro_batch, 1, _MOST_SEQUENCES,
                lambda size: {} if size == training.micro_batch else
                {micro: size, "training.global_batch": size * per_step})
    if scenario.model.kind == "layers":
        return
    cut = math.lcm(2 * parallel.context if parallel.context > 1 else 1, parallel.tensor)
    alike = [name for name in ("decoder_sequence", "predicted_tokens")
             if getattr(training, name) == training.sequence]
    yield _Axis("sequence", sequence, training.sequence, math.lcm(_unit(training.sequence), cut),
                _MOST_TOKENS, lambda tokens: {sequence: tokens, **{f"training.{name}": tokens for name in alike}})


def _unit(tokens: int) -> int:
    """The step in which a sequence's length is tried."""
    return math.gcd(tokens, _FEW_TOKENS if tokens < _SHORT else _TOKENS)
