"""Layers cut where a module with split parameters begins: the uses that a parameter coordinator sees."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sim.model.architecture import Layer, Operator, Parameter
from sim.model.tuning import Frozen


@dataclass(frozen=True, slots=True)
class Submodule:
    """A run of a layer's operators whose first one (but for the layer's first run) owns split parameters.

    Attributes:
        parameters: those that are split, trained or not. An operator with several modules (queries, keys and values
            apart, experts) has all of theirs at once.
        operators: in forward order.
        gradients: every parameter whose gradient backward makes, in the order in which they are ready.
    """

    parameters: tuple[Parameter | Frozen, ...]
    operators: tuple[Operator, ...]
    gradients: tuple[Parameter, ...]

    @property
    def again(self) -> tuple[Operator, ...]:
        """Operators that full recomputation runs again."""
        return tuple(op.rerun for op in self.operators if op.recomputed)


def submodules(layer: Layer, threshold: int) -> tuple[Submodule, ...]:
    """The layer's sub-modules in forward order; shared parameters belong to the first.

    Args:
        threshold: parameters of fewer elements are never split.
    """
    runs: list[list[Operator]] = []
    owned = False  # whether the last run has split parameters yet
    for operator in layer.operators:
        owns = any(p.numel >= threshold for p in operator.weights)
        if not runs or (owns and owned):
            runs.append([])
            owned = False
        runs[-1].append(operator)
        owned = owned or owns
    return tuple(_submodule(run, layer.shared if number == 0 else (), threshold) for number, run in enumerate(runs))


def _submodule(run: list[Operator], shared: Iterable[Parameter], threshold: int) -> Submodule:
    split = [p for p in (*shared, *(p for op in run for p in op.weights)) if p.numel >= threshold]
    gradients = tuple(p for op in reversed(run) for p in op.parameters)
    return Submodule(tuple(split), tuple(run), gradients)
