"""Error statistics over records: fractions (predicted / measured − 1), never percent. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

#: Measurements in bytes, pooled under `memory`.
MEMORY_KEYS = ("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes", "peak_unknown_bytes")

Record = dict[str, Any]


def spread(errors: Sequence[float], measured: int) -> dict[str, float | int | None]:
    """Count, coverage, mean, median, 90th percentile and worst of |error|, and bias = mean of the signed error.

    `measured` is the number of cases that had the measurement, predicted or not: coverage = len(errors) / measured.
    Percentiles interpolate linearly (numpy's default).
    """
    size = np.abs(np.asarray(errors, dtype=float))
    if not len(size):
        return {"count": 0, "measured": measured, "coverage": 0.0 if measured else None, "mean": None, "median": None,
                "p90": None, "worst": None, "bias": None}
    return {"count": len(size), "measured": measured, "coverage": len(size) / measured, "mean": float(size.mean()),
            "median": float(np.median(size)), "p90": float(np.percentile(size, 90)), "worst": float(size.max()),
            "bias": float(np.mean(np.asarray(errors, dtype=float)))}


def summarize(records: Sequence[Record]) -> dict[str, Any]:
    """The summary of one group of records (a file, or all): counts, step time, memory, ratios, verdicts, exactness.

    Rows with a `quality` mark are not in the group's figures: each mark has figures of its own under `quality`.
    """
    plain = [r for r in records if r["quality"] is None]
    summary = _figures(plain)
    marks = dict.fromkeys(r["quality"] for r in records if r["quality"] is not None)
    summary["quality"] = {mark: _figures([r for r in records if r["quality"] == mark]) for mark in sorted(marks)}
    return summary


def overall(records: Sequence[Record]) -> dict[str, Any]:
    """The JSON's `summary`: all records together, each file alone, and the ten worst step times of unmarked rows."""
    files = dict.fromkeys(r["file"] for r in records)
    return {"unit": "errors are fractions: predicted / measured - 1", "overall": summarize(records),
            "files": {name: summarize([r for r in records if r["file"] == name]) for name in files},
            "worst": [{"file": r["file"], "id": r["id"], "error": r["error"]["step_time_s"]} for r in worst(records)]}


def worst(records: Iterable[Record], count: int = 10, key: str = "step_time_s") -> list[Record]:
    """The `count` unmarked records with the largest |error| of `key`, worst first; ties in the records' order."""
    rated = [r for r in records if r["quality"] is None and _error(r, key) is not None]
    return sorted(rated, key=lambda r: -abs(r["error"][key]))[:count]


def _error(record: Record, key: str) -> float | None:
    errors = record.get("error")
    value = errors.get(key) if isinstance(errors, Mapping) else None
    return None if value is None else float(value)


def _figures(records: Sequence[Record]) -> dict[str, Any]:
    status = {s: sum(r["status"] == s for r in records) for s in ("ok", "unsupported", "failed")}
    figures: dict[str, Any] = {"cases": len(records), **status,
                               "coverage": status["ok"] / len(records) if records else None,
                               "step_time": _key_spread(records, ("step_time_s",)),
                               "memory": _key_spread(records, MEMORY_KEYS), "ratio": _key_spread(records, ("ratio",)),
                               "oom": _verdicts(records)}
    rows = [row for r in records for row in r.get("rows", ())]
    if rows:
        figures["rows"] = spread([row["error"] for row in rows if row["error"] is not None], len(rows))
    allocated = [r for r in records if r["kind"] == "oracle-memory"]
    if allocated:
        names = dict.fromkeys(name for r in allocated for name in r.get("error") or {})
        figures["allocated"] = {name: spread([e for r in allocated if (e := _error(r, name)) is not None],
                                             len(allocated)) for name in names}
    equal = [value for r in records for value in r.get("equal", {}).values()]
    if any("equal" in r for r in records):
        figures["exact"] = {"compared": len(equal), "equal": sum(equal), "unequal": len(equal) - sum(equal)}
    return figures


def _key_spread(records: Sequence[Record], keys: Sequence[str]) -> dict[str, float | int | None]:
    pairs = [(r, k) for r in records if r["kind"] == "training" for k in keys if k in r["measured"]]
    errors = [e for e in (_error(r, k) for r, k in pairs) if e is not None]
    return spread(errors, len(pairs))


def _verdicts(records: Sequence[Record]) -> dict[str, int]:
    asked = [r for r in records if isinstance(r.get("measured"), Mapping) and "oom" in r["measured"]]
    answers = [r["predicted"].get("oom") == r["measured"]["oom"] for r in asked
               if (r.get("predicted") or {}).get("oom") is not None]
    return {"right": sum(answers), "wrong": len(answers) - sum(answers), "not_compared": len(asked) - len(answers)}
