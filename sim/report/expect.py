"""Regression bounds judged: the `expect` of a scenario held against what was predicted.

Works on the JSON form of results (result.md), so whatever `--json` writes can be bounded by its dotted name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.errors import Fault, UserError, nearest
from sim.scenario import Bound

#: A predicted point: the dotted fields its sweep set, and the JSON form of its result.
Point = tuple[Mapping[str, Any], Mapping[str, Any]]
#: Predicts another scenario file and returns the JSON form of its result.
Predict = Callable[[Path], Mapping[str, Any]]

#: Relative rounding of a number on its way through YAML and arithmetic: what still counts as equal.
EQUAL_WITHIN = 1e-9


@dataclass(frozen=True, slots=True)
class Broken:
    """A bound that the prediction does not meet.

    Attributes:
        field: of the result, with what it is relative to.
        allowed: what would have been right, in words.
        at: the point of the sweep, "" for a plain run.
    """

    field: str
    predicted: Any
    allowed: str
    at: str = ""

    def __str__(self) -> str:
        place = f" at {self.at}" if self.at else ""
        return f"{self.field}{place}: predicted {show(self.predicted)}, allowed {self.allowed}"


def judge(bounds: Sequence[Bound], points: Sequence[Point], predict: Predict) -> list[Broken]:
    """The bounds that `points` break.

    Args:
        points: one entry for a plain scenario, one per predicted point for a sweep.
        predict: how to get at the result of another file.

    Raises:
        UserError: a bound names a field the result does not have, or a point the sweep did not predict.
    """
    broken: list[Broken] = []
    faults: list[Fault] = []
    known: dict[Path, Mapping[str, Any]] = {}

    def once(path: Path) -> Mapping[str, Any]:
        if path not in known:
            known[path] = predict(path)
        return known[path]

    for bound in bounds:
        try:
            broken += _judge_one(bound, points, once)
        except UserError as error:
            faults += error.faults
    if faults:
        raise UserError(faults)
    return broken


def show(value: Any) -> str:
    """A value as a person reads it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def where(sets: Mapping[str, Any]) -> str:
    """A point of a sweep in words."""
    return ", ".join(f"{path}={show(value)}" for path, value in sets.items())


def look_up(result: Mapping[str, Any], bound: Bound) -> Any:
    """The value of a bound's dotted field.

    Raises:
        UserError: the result has no such field; names the nearest one.
    """
    value: Any = result
    for part in bound.field.split("."):
        known = [str(key) for key in value] if isinstance(value, Mapping) else []
        if part not in known:
            hint = nearest(part, known) or ("fields here: " + ", ".join(known) if known else "")
            raise _wrong(bound, f"the result has no '{part}' there", hint)
        value = value[part]
    if isinstance(value, Mapping):
        raise _wrong(bound, "this is a mapping, not a single figure", "fields here: " + ", ".join(map(str, value)))
    return value


def _judge_one(bound: Bound, points: Sequence[Point], predict: Predict) -> list[Broken]:
    broken = []
    for sets, result in _at(bound, points, bound.at) if bound.at else points:
        predicted, name = look_up(result, bound), bound.field
        if bound.relative_to is not None:
            predicted = _ratio(bound, predicted, points, predict)
            other = bound.relative_to
            name += f" relative to {where(other) if isinstance(other, Mapping) else other.name}"
        allowed = _violated(predicted, bound)
        if allowed:
            broken.append(Broken(name, predicted, allowed, where(sets)))
    return broken


def _at(bound: Bound, points: Sequence[Point], at: Mapping[str, Any]) -> list[Point]:
    """The points of a sweep whose axes have the values of `at`."""
    found = [p for p in points if all(path in p[0] and _equal(p[0][path], value) for path, value in at.items())]
    if not found:
        raise _wrong(bound, f"no predicted point of the sweep has {where(at)}",
                     "it is not on the axes, or was skipped as impossible")
    return found


def _ratio(bound: Bound, predicted: Any, points: Sequence[Point], predict: Predict) -> float:
    other = bound.relative_to
    if isinstance(other, Mapping):
        chosen = _at(bound, points, other)
        if len(chosen) > 1:
            raise _wrong(bound, f"{len(chosen)} points of the sweep have {where(other)}", "name a value of every axis")
        result = chosen[0][1]
    else:
        assert other is not None
        result = predict(other)
    base = look_up(result, bound)
    if not (_is_number(base) and _is_number(predicted)):
        raise _wrong(bound, "relative_to needs a number")
    return float(predicted) / float(base) if base else math.inf


def _violated(predicted: Any, bound: Bound) -> str:
    """What is allowed, if `predicted` is not; "" if it is."""
    value = bound.value if bound.ratio is None else bound.ratio
    if value is not None and not _equal(predicted, value, bound.within):
        return show(value) + (f" within {100 * bound.within:g}%" if bound.within else "")
    number = float(predicted) if _is_number(predicted) else math.nan
    if bound.low is not None and not number >= bound.low:
        return f"at least {show(bound.low)}"
    if bound.high is not None and not number <= bound.high:
        return f"at most {show(bound.high)}"
    return ""


def _equal(left: Any, right: Any, within: float = 0.0) -> bool:
    if _is_number(left) and _is_number(right):
        return abs(float(left) - float(right)) <= (within + EQUAL_WITHIN) * abs(float(right))
    return bool(left == right) if isinstance(left, bool | int | float) else str(left) == str(right)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _wrong(bound: Bound, message: str, hint: str = "") -> UserError:
    return UserError(Fault(message, f"expect.{bound.field}", bound.file, bound.line, hint))
