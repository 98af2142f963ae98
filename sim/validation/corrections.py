"""Published cases predicted with another value than their file gives, and what their errors are with both.

A value may be corrected (`corrections.yaml`) where the source did not state it and evidence other than the measurements
speaks against the guess. The shipped files stay as they were published; a corrected field counts as assumed. The report
shows the errors with both values, so that a correction cannot hide anything.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from sim.catalog import folder, table
from sim.validation.cases.files import Case, CaseFile
from sim.validation.cases.predict import predict
from sim.validation.statistics import MEMORY_KEYS, Record

_KEYS = ("step_time_s", *MEMORY_KEYS)


@dataclass(frozen=True, slots=True)
class Correction:
    """A corrected field: case ids (glob) of a source, dotted path, value in the file and used instead, and why."""

    source: str
    rows: str
    field: str
    given: Any
    used: Any
    evidence: str

    def concerns(self, case: Case) -> bool:
        """Whether the case, as its file gives it, is one of those that are corrected."""
        return self._names(case) and _value(case, self.field) in (self.given, None)

    def holds(self, case: Case) -> bool:
        """Whether the case's value was corrected so."""
        return self._names(case) and _value(case, self.field) == self.used

    def _names(self, case: Case) -> bool:
        return case.file.removesuffix(".yaml") == self.source and fnmatch.fnmatch(case.id, self.rows)


def corrected(file: CaseFile) -> CaseFile:
    """A shipped file with its corrections; any other as it is, whatever its name."""
    if Path(file.path).resolve().parent != (folder("scenarios") / "published").resolve():
        return file
    known = [one for one in corrections() if file.name.removesuffix(".yaml") == one.source]
    return replace(file, cases=tuple(_corrected(case, known) for case in file.cases)) if known else file


def _corrected(case: Case, known: Sequence[Correction]) -> Case:
    for one in known:
        if one.concerns(case):
            assumed = case.assumed if one.field in case.assumed else (*case.assumed, one.field)
            case = replace(case, sets={**case.sets, one.field: one.used}, assumed=assumed)
    return case


@cache
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
