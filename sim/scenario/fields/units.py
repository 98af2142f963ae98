"""Quantities as a person writes them: `80 GB`, `200 Gb/s`, `5 us`, `30 days`.

Each kind of field accepts a plain number in its own unit or text with a unit of its kind. Common spellings are looked
up; anything else with an SI prefix goes to `quantiphy`, imported only then because it costs 16 ms.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

_TEXT = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(.*?)\s*\Z")

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_BYTES = {p + "B": f for p, f in (_DECIMAL | _BINARY).items()}
_BITS_PER_S = {p + u: f for p, f in _DECIMAL.items() for u in ("b/s", "bit/s", "bps")}
_SECONDS = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "μs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "second": 1.0,
    "seconds": 1.0,
    "min": 60.0,
    "minute": 60.0,
    "minutes": 60.0,
    "h": 3600.0,
    "hour": 3600.0,
    "hours": 3600.0,
    "d": 86400.0,
    "day": 86400.0,
    "days": 86400.0,
    "week": 604800.0,
    "weeks": 604800.0,
    "month": 2592000.0,
    "months": 2592000.0,
    "year": 31536000.0,
    "years": 31536000.0,
}


@dataclass(frozen=True)
class Unit:
    """A kind of quantity: its units as factors to the unit a plain number is in, and examples for messages.

    `least` is what no machine goes below: a smaller number was meant in a larger unit (`memory: 80`). With `written` a
    text that says its unit may.
    """

    kind: str
    plain: str
    examples: str
    factors: dict[str, float]
    si: str
    least: float = 0.0
    written: bool = False

    def read(self, value: Any) -> float:
        """The value in the kind's own unit. Raises PydanticCustomError, which `explain` passes on as it is."""
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise PydanticCustomError("unit", "expected {kind}", self._context())
        if not isinstance(value, str):
            return self._enough(float(value), str(value))
        match = _TEXT.match(value)
        if not match:
            raise PydanticCustomError("unit", "'{value}' is not {kind}", self._context(value))
        number, unit = float(match[1]), match[2].strip()
        if not unit:
            raise PydanticCustomError("unit", "'{value}' is text without a unit", self._context(value))
        factor = self.factors.get(unit) or self._prefixed(unit)
        if factor is None:
            raise PydanticCustomError(
                "unit", "'{value}' has the unit '{unit}', which is not {kind}", self._context(value, unit)
            )
        return number * factor if self.written else self._enough(number * factor, value)

    def _enough(self, value: float, written: str) -> float:
        if 0 < value < self.least:
            raise PydanticCustomError(
                "unit", "{value} is too little to be {kind} of a machine; a plain number is in {plain}",
                self._context(written) | {"plain": self.plain})
        return value

    def _prefixed(self, unit: str) -> float | None:
        if not self.si or not unit.endswith(self.si):
            return None
        from quantiphy import InvalidNumber, Quantity

        try:
            quantity = Quantity(f"1 {unit}", binary=True)
        except (InvalidNumber, ValueError):
            return None
        return float(quantity) if quantity.units == self.si else None

    def _context(self, value: str = "", unit: str = "") -> dict[str, str]:
        return {"kind": self.kind, "examples": self.examples, "value": value[:40], "unit": unit[:20]}


BYTES = Unit("a size", "bytes", "'80 GB' or '64 GiB'", _BYTES, "B", least=1e6)
BYTES_PER_S = Unit(
    "a bandwidth",
    "bytes per second",
    "'25 GB/s' or '200 Gb/s'",
    {u + "/s": f for u, f in _BYTES.items()} | {u: f / 8 for u, f in _BITS_PER_S.items()},
    "B/s",
    least=1e6,
)
GBPS = Unit(
    "a link speed in Gb/s",
    "gigabits per second",
    "200 (meaning Gb/s), '200 Gb/s' or '25 GB/s'",
    {u: f / 1e9 for u, f in _BITS_PER_S.items()} | {u + "/s": f * 8 / 1e9 for u, f in _BYTES.items()},
    "b/s",
)
SECONDS = Unit("a time", "seconds", "'30 days', '1 h' or '5 us'", _SECONDS, "s")
BETWEEN_FAILURES = replace(SECONDS, kind="a time between failures", examples="'50000 h' or '2000 days'",
                           least=1e5, written=True)
MIB = Unit("a size in MiB", "MiB", "25 (meaning MiB) or '25 MiB'", {u: f / 2**20 for u, f in _BYTES.items()}, "")
WATTS = Unit("a power", "W", "400 (meaning W) or '400 W'", {"W": 1.0, "kW": 1e3}, "W", least=10.0)


def _schema(unit: Unit) -> WithJsonSchema:
    bound = {"minimum": unit.least} if unit.least else {"exclusiveMinimum": 0}
    return WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", **bound, "description": unit.plain},
                {"type": "string", "pattern": r"^\s*[0-9.eE+-]+\s*\S+", "examples": [unit.examples]},
            ]
        }
    )


_SAMPLE = replace(BYTES, least=0.0)

Bytes = Annotated[float, BeforeValidator(BYTES.read), Field(gt=0, le=1e18), _schema(BYTES)]
SampleBytes = Annotated[float, BeforeValidator(_SAMPLE.read), Field(gt=0, le=1e18), _schema(_SAMPLE)]
BytesPerSecond = Annotated[float, BeforeValidator(BYTES_PER_S.read), Field(gt=0, le=1e18), _schema(BYTES_PER_S)]
Gbps = Annotated[float, BeforeValidator(GBPS.read), Field(gt=0, le=1e7), _schema(GBPS)]
Seconds = Annotated[float, BeforeValidator(SECONDS.read), Field(gt=0, le=1e12), _schema(SECONDS)]
BetweenFailures = Annotated[float, BeforeValidator(BETWEEN_FAILURES.read), Field(gt=0, le=1e12),
                            _schema(BETWEEN_FAILURES)]
Mib = Annotated[float, BeforeValidator(MIB.read), Field(gt=0, le=1e6), _schema(MIB)]
Watts = Annotated[float, BeforeValidator(WATTS.read), Field(gt=0, le=1e5), _schema(WATTS)]


def figure(field: str, value: Any) -> tuple[Any, str]:
    """A figure of a result that a person wrote, in the result's unit: text with a unit is read as the field's name says
    (`..._bytes`, `..._s`), all else is left as it is. Second what is wrong with the text, or ""."""
    parts = field.split(".")
    sizes = parts[-1].endswith("_bytes") or (parts[0] == "memory" and parts[1:2] in (["at_peak"], ["phases"]))
    seconds = parts[-1].endswith("_s") or parts[0] in ("breakdown_s", "communication_s")
    if not isinstance(value, str) or not (sizes or seconds):
        return value, ""
    try:
        return (_SAMPLE if sizes else SECONDS).read(value), ""
    except PydanticCustomError as error:
        return value, f"{error.message()} (write {'31 GB' if sizes else '1.2 s'}, or a plain number)"
