"""Layers cut where a module with split parameters begins: the uses that a parameter coordinator sees."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sim.model.architecture import Layer, Operator, Parameter
from sim.work import Kernel


@dataclass(frozen=True, slots=True)
class Submodule:
    """A run of a layer's operators whose first one (but for the layer's first run) owns split parameters.

    Attributes:
        parameters: those that are split. An operator with several modules (queries, keys and values apart, experts)
            has all of theirs at once.
        forward, again, backward: kernels of forward, of recomputation (empty where it is not run again) and of
            backward.
        gradients: elements of every parameter whose gradient backward makes, in the order in which they are ready.
    """

    parameters: tuple[Parameter, ...]
    forward: tuple[Kernel, ...]
    again: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    gradients: tuple[int, ...]


def submodules(layer: Layer, threshold: int) -> tuple[Submodule, ...]:
    """The layer's sub-modules in forward order; shared parameters belong to the first.

    Args:
        threshold: parameters of fewer elements are never split.
    """
    runs: list[list[Operator]] = []
    owned = False  # whether the last run has split parameters yet
    for operator in layer.operators:
        owns = any(p.numel >= threshold for p in operator.parameters)
        if not runs or (owns and owned):
            runs.append([])
            owned = False
        runs[-1].append(operator)
        owned = owned or owns
    return tuple(_submodule(run, layer.shared if number == 0 else (), threshold) for number, run in enumerate(runs))


def _submodule(run: list[Operator], shared: Iterable[Parameter], threshold: int) -> Submodule:
    split = [p for p in (*shared, *(p for op in run for p in op.parameters)) if p.numel >= threshold]
    return Submodule(
        tuple(split), tuple(k for op in run for k in op.forward),
        tuple(k for op in run if op.recomputed for k in op.forward),
        tuple(k for op in reversed(run) for k in op.backward),
        tuple(p.numel for op in reversed(run) for p in op.parameters))
