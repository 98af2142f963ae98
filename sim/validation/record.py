"""The record of errors that ships with the package: one row per published run that was compared (`sim.report`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import sim
from sim.report.numbers.neighbours import RECORD, Features, row
from sim.validation.statistics import Record

#: Where the record is.
PATH = Path(sim.__file__).resolve().parent / RECORD
#: Marks of rows whose figures are not measurements of a run as it was meant; plot readings are.
_LEFT_OUT = frozenset({"outlier", "derived", "bound", "average"})
_HEAD = """# Errors of published runs, predicted / measured - 1: what `validated` of a result rests on.
# Written by `python -m sim.validation.report`; do not edit. Columns: source, model, mode, strategy, splits, offload,
# generation, compute, framework, GPUs, parameters, error.
"""


def rows(records: Iterable[Record], mark: str = "") -> list[list[Any]]:
    """Rows of the record, sorted, equal ones kept: they are runs of their own. `mark` follows their sources' names."""
    found = [row(r["file"].removesuffix(".yaml") + mark, Features(**r["features"]), r["error"]["step_time_s"])
             for r in records if "step_time_s" in r["error"] and "features" in r and r["quality"] not in _LEFT_OUT]
    return sorted(found, key=lambda one: json.dumps(one))


def text(found: Sequence[Sequence[Any]]) -> str:
    """The file's text."""
    return _HEAD + "rows:\n" + "".join(f"- {json.dumps(one)}\n" for one in found)
