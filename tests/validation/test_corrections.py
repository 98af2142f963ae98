"""Corrected values of published cases: each stands in its case file, is marked as assumed, and changes a prediction."""

from __future__ import annotations

import pytest

from sim.catalog import folder
from sim.validation.cases import CaseFile, read
from sim.validation.corrections import Correction, corrections, effects
from sim.validation.predict import predict


def _file(correction: Correction) -> CaseFile:
    return read(folder("scenarios") / "published" / f"{correction.source}.yaml")


@pytest.mark.parametrize("correction", corrections(), ids=lambda c: f"{c.source}-{c.field}")
def test_a_correction_stands_in_its_case_file_as_an_assumption(correction: Correction) -> None:
    cases = [case for case in _file(correction).cases if correction.holds(case)]
    assert cases
    assert all(correction.field in case.assumed for case in cases)
    assert correction.given != correction.used
    assert len(correction.evidence) > 40


def test_the_report_shows_the_error_with_the_value_given() -> None:
    correction = next(c for c in corrections() if c.source == "zero_bubble")
    file = _file(correction)
    few = CaseFile(file.name, file.path, file.kind, file.title, file.cases[24:25])
    record = predict(few.cases[0])
    row = effects([few], [record])[0]
    assert row[:6] == ("zero_bubble", "model.vocab", "50257", "32000", "step_time_s", "1")
    before, now = (float(cell.split("%")[0]) for cell in row[6:8])
    assert now == pytest.approx(100 * abs(record["error"]["step_time_s"]), abs=0.06)
    assert before > now + 5  # the larger head makes the last stage the slowest
