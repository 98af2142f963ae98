"""Why rows are missed by more than 10%, as far as it is believed to be known: `misses.yaml`, for reading only.

No prediction knows these reasons. A row belongs to the first group whose patterns it matches.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

from sim.catalog import table
from sim.validation.statistics import Record

#: From this error on a row needs a reason.
LIMIT = 0.10
#: What a reason can be.
KINDS = ("bad run", "lacking mechanism", "memory pressure", "noise", "reading", "unknown")
UNKNOWN = "no reason is known"


@dataclass(frozen=True, slots=True)
class Miss:
    """Rows with one reason: what kind it is, their sources, how many, and the range of their errors."""

    kind: str
    reason: str
    sources: tuple[str, ...]
    count: int
    lowest: float
    highest: float


def misses(records: Sequence[Record]) -> list[Miss]:
    """Every row missed by more than the limit, by reason; the largest groups first, those without a reason last."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record["kind"] == "training" and abs(record["error"].get("step_time_s", 0.0)) > LIMIT:
            groups.setdefault(reason_of(record), []).append(record)
    found = [Miss(kind, reason, tuple(sorted({r["file"].removesuffix(".yaml") for r in rows})), len(rows),
                  min(_error(r) for r in rows), max(_error(r) for r in rows))
             for (kind, reason), rows in groups.items()]
    return sorted(found, key=lambda m: (m.reason == UNKNOWN, -m.count, m.reason))


def reason_of(record: Record) -> tuple[str, str]:
    """(kind, reason) of a row."""
    source = record["file"].removesuffix(".yaml")
    for group in table("validation/misses.yaml")["groups"]:
        slower = group.get("predicted")
        if (fnmatch.fnmatchcase(source, group["source"]) and fnmatch.fnmatchcase(record["id"], group.get("id", "*"))
                and (slower is None or (slower == "fast") == (_error(record) < 0))):
            return group["kind"], group["reason"]
    return "unknown", UNKNOWN


def _error(record: Record) -> float:
    return float(record["error"]["step_time_s"])
