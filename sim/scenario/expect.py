"""Regression bounds: result field -> bound. Parsed here, judged where results are."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.errors import Fault, nearest
from sim.scenario.fields.units import figure
from sim.scenario.sweep import check_path
from sim.scenario.text.document import Document, beside, describe

#: Fields of a result that hold one figure (result.md); below the second group any dotted path may follow.
SCALARS = (
    "step_time_s",
    "tokens_per_second",
    "tokens_per_second_per_gpu",
    "samples_per_second",
    "model_flops",
    "hardware_flops",
    "model_tflops_per_gpu",
    "hardware_tflops_per_gpu",
    "mfu",
    "hfu",
    "slowdown",
    "bound",
)
GROUPS: dict[str, tuple[str, ...]] = {
    "breakdown_s": (),
    "communication_s": (),
    "sensitivity": (),
    "memory": (
        "peak_allocated_bytes",
        "peak_reserved_bytes",
        "device_used_bytes",
        "capacity_bytes",
        "fits",
        "headroom_bytes",
        "at_peak",
        "phases",
        "stages",
    ),
    "budget": ("tokens", "steps", "days", "gpu_hours", "cost", "energy_kwh", "goodput"),
    "inference": ("prompt_time_s", "time_per_token_s", "tokens_per_second", "kv_cache_bytes",
                  "crossing_cache_bytes"),
    "data_loading": ("needed_bytes_per_second", "storage_bytes_per_second", "waiting_s"),
    "simulation": ("events", "tasks", "ranks_simulated", "ranks_represented", "wall_s"),
    "validated": ("count", "mean_error", "spread"),
}
_PERCENT = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*%\s*\Z")
_KEYS = ("value", "within", "min", "max", "relative_to", "ratio", "at")


@dataclass(frozen=True)
class Bound:
    """One bound on one field of the result.

    Attributes:
        field: dotted field of the result.
        value: what it must equal (within `within`), None for other kinds.
        within: allowed relative deviation from `value` or `ratio`, as a fraction; 0 = equality.
        low, high: allowed range.
        ratio: the field divided by the same field of `relative_to`.
        relative_to: path of another scenario, or dotted path -> value naming another point of the sweep.
        at: dotted path -> value, the point of the sweep that is meant; empty = every point.
        file, line: where it was written.
    """

    field: str
    value: Any = None
    within: float = 0.0
    low: float | None = None
    high: float | None = None
    ratio: float | None = None
    relative_to: Path | Mapping[str, Any] | None = None
    at: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    file: str = ""
    line: int = 0


def read_bounds(document: Document, faults: list[Fault]) -> list[Bound]:
    """The bounds of a document's `expect`; faults are added to `faults`."""
    written = document.data.get("expect")
    if written is None:
        return []
    if not isinstance(written, dict):
        faults.append(
            document.fault(
                "expect",
                f"expected result fields with bounds, not {describe(written)}",
                "such as step_time_s: {value: 1.2, within: 5%}",
            )
        )
        return []
    bounds: list[Bound] = []
    for name, bound in written.items():
        message, hint = check_result_field(name)
        if message:
            faults.append(document.fault(f"expect.{name}", message, hint))
            continue
        several = bound if isinstance(bound, list) else [bound]
        for index, one in enumerate(several):
            path = f"expect.{name}.{index}" if isinstance(bound, list) else f"expect.{name}"
            reader = _Reader(document, path, name)
            found = reader.read(one)
            faults += reader.faults
            if found is not None and not reader.faults:
                bounds.append(found)
    return bounds


def check_result_field(name: str) -> tuple[str, str]:
    """("", "") where the result has such a field with one figure, else what is wrong and a hint."""
    head, _, rest = name.partition(".")
    known = [*SCALARS, *GROUPS, *(f"{g}.{f}" for g, fields in GROUPS.items() for f in fields)]
    if head in GROUPS:
        allowed = GROUPS[head]
        if not rest:
            return (
                f"'{head}' of the result is a mapping",
                f"name one of its fields, such as {head}.{(allowed or ('…',))[0]}",
            )
        if not allowed or rest.partition(".")[0] in allowed:
            return "", ""
    elif head in SCALARS and not rest:
        return "", ""
    last = nearest(name, known) or nearest(name, [f for fields in GROUPS.values() for f in fields])
    return (
        f"the result has no field '{name[:80]}'",
        last or f"such as {', '.join(SCALARS[:4])}, memory.peak_allocated_bytes",
    )


class _Reader:
    """Reads one bound and collects its faults."""

    def __init__(self, document: Document, path: str, name: str) -> None:
        self.document, self.path, self.name = document, path, name
        self.faults: list[Fault] = []

    def read(self, written: Any) -> Bound | None:
        """The bound, or None with `faults`."""
        file, line = self.document.place(self.path)
        if not isinstance(written, dict):
            if written is None or isinstance(written, list):
                self._fault(
                    "", f"expected a value or a bound, not {describe(written)}", "such as {value: 1.2, within: 5%}"
                )
                return None
            return Bound(self.name, value=self._value(written, ""), file=file, line=line)
        for key in written:
            if key not in _KEYS:
                self._fault(key, f"a bound has no '{key[:60]}'", nearest(key, _KEYS) or f"known: {', '.join(_KEYS)}")
        if self.faults:
            return None
        kinds = [
            k
            for k, keys in (("value", {"value"}), ("range", {"min", "max"}), ("ratio", {"ratio"}))
            if keys & set(written)
        ]
        if len(kinds) != 1:
            what = (
                "no bound: give value, min or max, or ratio"
                if not kinds
                else f"{' and '.join(kinds)} at once: give one"
            )
            self._fault("", f"this is {what}", "such as {value: 1.2, within: 5%} or {min: 0.4}")
            return None
        self._consistent(written, kinds[0])
        return Bound(
            self.name,
            value=self._value(written.get("value")),
            within=self._within(written.get("within")),
            low=self._number("min", written),
            high=self._number("max", written),
            ratio=self._number("ratio", written),
            relative_to=self._relative(written.get("relative_to")),
            at=self._point("at", written.get("at")),
            file=file,
            line=line,
        )

    def _consistent(self, written: dict[str, Any], kind: str) -> None:
        if "within" in written and kind == "range":
            self._fault(
                "within", "'within' goes with value or ratio, not with min and max", "widen min and max instead"
            )
        if ("relative_to" in written) != (kind == "ratio"):
            self._fault(
                "relative_to" if kind != "ratio" else "ratio",
                "'ratio' and 'relative_to' go together",
                "such as {relative_to: other.yaml, ratio: 1.07, within: 2%}",
            )
        low, high = (figure(self.name, written.get(key))[0] for key in ("min", "max"))
        if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
            self._fault("min", f"min {written['min']} is more than max {written['max']}", "swap them")

    def _value(self, value: Any, key: str = "value") -> Any:
        if isinstance(value, list | dict):
            self._fault(key, f"expected one value, not {describe(value)}")
        return self._figure(key, value)

    def _figure(self, key: str, value: Any) -> Any:
        """Sizes and times with units, in bytes and seconds."""
        read, wrong = figure(self.name, value)
        if wrong:
            self._fault(key, wrong)
        return read

    def _number(self, key: str, written: dict[str, Any]) -> float | None:
        value = written.get(key)
        if value is None:
            return None
        faults = len(self.faults)
        value = value if key == "ratio" else self._figure(key, value)
        if len(self.faults) > faults:
            return None
        if not _is_number(value):
            self._fault(key, f"expected a number, not {describe(value)}")
            return None
        return float(value)

    def _within(self, value: Any) -> float:
        if value is None:
            return 0.0
        if isinstance(value, str) and (match := _PERCENT.match(value)):
            return float(match[1]) / 100
        if _is_number(value) and 0 <= value < 1:
            return float(value)
        self._fault("within", f"expected a percentage, not {describe(value)}", "such as 5%")
        return 0.0

    def _relative(self, value: Any) -> Path | Mapping[str, Any] | None:
        if value is None:
            return None
        if isinstance(value, dict):
            return self._point("relative_to", value)
        if not isinstance(value, str):
            self._fault("relative_to", f"expected a scenario file or a point of the sweep, not {describe(value)}")
            return None
        path = beside(self.document.folder, value)
        if not path.is_file():
            self._fault(
                "relative_to",
                f"there is no file '{value[:80]}' beside this scenario",
                nearest(path.name, (p.name for p in path.parent.glob("*.yaml"))) if path.parent.is_dir() else "",
            )
        return path

    def _point(self, key: str, value: Any) -> Mapping[str, Any]:
        if value is None:
            return {}
        if not isinstance(value, dict):
            self._fault(
                key, f"expected dotted fields with values, not {describe(value)}", "such as {cluster.nodes: 64}"
            )
            return {}
        axes = self.document.data.get("sweep")
        for path in value:
            message, hint = check_path(path)
            if message:
                self._fault(f"{key}.{path}", message, hint)
            elif key == "at" and not (isinstance(axes, dict) and path in axes):
                self._fault(
                    f"{key}.{path}",
                    f"'{path}' is not an axis of this sweep",
                    nearest(path, axes) if isinstance(axes, dict) else "add a sweep",
                )
        return value

    def _fault(self, key: str, message: str, hint: str = "") -> None:
        self.faults.append(self.document.fault(f"{self.path}.{key}" if key else self.path, message, hint))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
