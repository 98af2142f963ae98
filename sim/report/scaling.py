"""What a sweep says of scaling: efficiency along it, and where communication starts to bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sim.report.numbers.bounding import felt
from sim.report.pictures.sweep import sweeps
from sim.report.result import Result
from sim.report.words import written


@dataclass(frozen=True, slots=True)
class Scaling:
    """One line of a sweep: points that differ in one axis only.

    Attributes:
        axis: the dotted field; values: along it, one per point.
        held: other axes and the values they are held at.
        efficiency: throughput per GPU of each point over the first's.
        exposed: share of each step that is exposed communication.
        bound: what bounds each point ("offload": waiting for the host's copies and its optimizer).
        communication_from: the value from which on every point is bound by communication; None where the last is not.
    """

    axis: str
    values: tuple[Any, ...]
    held: dict[str, Any]
    efficiency: tuple[float, ...]
    exposed: tuple[float, ...]
    bound: tuple[str, ...]
    communication_from: Any

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"axis": self.axis, "values": list(self.values), "held": self.held, "efficiency": list(self.efficiency),
                "exposed": list(self.exposed), "bound": list(self.bound),
                "communication_from": self.communication_from}

    def __str__(self) -> str:
        start = self.communication_from
        where = "".join(f"{_last(path)} = {written(value)}: " for path, value in self.held.items())
        name = _last(self.axis)
        if start is None and "communication" in self.bound:
            return f"{where}{self._begins(name)}"
        if start is None:
            return f"{where}not bound by communication up to {name} = {self.values[-1]} ({_percent(self.exposed[-1])})"
        at = self.exposed[self.values.index(start)]
        return f"{where}bound by communication from {name} = {start} on ({_percent(at)} there)"

    def _begins(self, name: str) -> str:
        """In words, where some points before the last are bound by communication."""
        bound = [one == "communication" for one in self.bound]
        last = max(i for i, one in enumerate(bound) if one)
        if all(bound[:last + 1]):
            there = _percent(self.exposed[last])
            return (f"bound by communication up to {name} = {self.values[last]} ({there} there), not from "
                    f"{self.values[last + 1]} on")
        at = ", ".join(written(value) for value, one in zip(self.values, bound, strict=True) if one)
        return f"bound by communication at {name} = {at}, not at {self.values[-1]} ({_percent(self.exposed[-1])})"


def scaling(points: Sequence[Result], axes: Mapping[str, Sequence[Any]]) -> list[Scaling]:
    """Every line of a sweep that has a quantity along it (the number of nodes, if it varies).

    Args:
        points: predicted; they may have been released.
        axes: dotted field to its values.
    """
    found = []
    for picture in sweeps(points, axes):
        if not picture.numeric:
            continue
        for line in picture.lines:
            along = sorted(line.points, key=lambda p: float(p.set[picture.axis]))
            if len(along) < 2 or not along[0].tokens_per_second_per_gpu:
                continue
            if all(p.gpus == 1 for p in along):  # nobody to communicate with
                continue
            held = dict(picture.fixed)
            if picture.other:
                held[picture.other] = along[0].set[picture.other]
            first = along[0].tokens_per_second_per_gpu
            bound = tuple(felt(p.bound, p.breakdown, p.waits) for p in along)
            begin = len(bound)
            while begin and bound[begin - 1] == "communication":
                begin -= 1
            found.append(Scaling(
                picture.axis, tuple(p.set[picture.axis] for p in along), held,
                tuple(p.tokens_per_second_per_gpu / first for p in along),
                tuple(p.breakdown.exposed_s / p.step_time_s for p in along), bound,
                along[begin].set[picture.axis] if begin < len(bound) else None))
    return found


def _percent(share: float) -> str:
    return f"{100 * share:.1f}% exposed"


def _last(path: str) -> str:
    return path.rpartition(".")[2].replace("_", " ")
