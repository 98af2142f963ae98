"""What rows' errors would be with the values that their case files had before they were corrected: `corrections.yaml`.

A value may be corrected where the source did not state it and evidence other than the measurements speaks against the
guess. The report shows the errors with both values, so that a correction cannot hide anything.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from sim.catalog import table
from sim.validation.cases import Case, CaseFile
from sim.validation.predict import predict
from sim.validation.statistics import MEMORY_KEYS, Record

_KEYS = ("step_time_s", *MEMORY_KEYS)


@dataclass(frozen=True, slots=True)
class Correction:
    """A corrected field: case ids (glob) of a source, dotted path, value before and now, and why."""

    source: str
    rows: str
    field: str
    given: Any
    used: Any
    evidence: str

    def holds(self, case: Case) -> bool:
        """Whether the case's value was corrected so."""
        return (case.file.removesuffix(".yaml") == self.source and fnmatch.fnmatch(case.id, self.rows)
                and _value(case, self.field) == self.used)


def corrections() -> tuple[Correction, ...]:
    """All corrections, in the file's order."""
    return tuple(Correction(**line) for line in table("validation/corrections.yaml")["corrections"])


def effects(files: Sequence[CaseFile], records: Sequence[Record]) -> list[tuple[str, ...]]:
    """A row per correction and figure: source, field, before, now, rows, mean error and bias before, now, evidence."""
    known = {(r["file"], r["id"]): r for r in records}
    rows = []
    for correction in corrections():
        cases = [case for file in files for case in file.cases if correction.holds(case)]
        before = [predict(replace(case, sets={**case.sets, correction.field: correction.given})) for case in cases]
        now = [known[case.file, case.id] for case in cases]
        for key in _KEYS:
            pairs = [(b["error"][key], n["error"][key]) for b, n in zip(before, now, strict=True)
                     if key in b["error"] and key in n["error"]]
            if pairs:
                spreads = [f"{fmean(map(abs, e)):.1%} ({fmean(e):+.1%})" for e in zip(*pairs, strict=True)]
                rows.append((correction.source, correction.field, str(correction.given).lower(),
                             str(correction.used).lower(), key, str(len(pairs)), *spreads, correction.evidence))
    return rows


def _value(case: Case, path: str) -> Any:
    """A field of a case as written: set by the case, or by its file's defaults; None where neither says it."""
    if path in case.sets:
        return case.sets[path]
    found: Any = case.given
    for part in path.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found
