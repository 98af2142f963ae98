"""Corrected values of published cases: the file stays as given, the field counts as assumed, the prediction changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.catalog import folder
from sim.validation.cases.files import CaseFile, read
from sim.validation.cases.predict import predict
from sim.validation.corrections import Correction, corrected, corrections, effects


def _file(correction: Correction) -> CaseFile:
    return corrected(read(folder("scenarios") / "published" / f"{correction.source}.yaml"))


@pytest.mark.parametrize("correction", corrections(), ids=lambda c: f"{c.source}-{c.field}")
def test_a_correction_is_an_assumption_about_rows_that_are_as_given(correction: Correction) -> None:
    given = read(folder("scenarios") / "published" / f"{correction.source}.yaml")
    assert not any(correction.holds(case) for case in given.cases)
    cases = [case for case in _file(correction).cases if correction.holds(case)]
    assert cases
    assert all(correction.field in case.assumed for case in cases)
    assert correction.given != correction.used
    assert len(correction.evidence) > 40


def test_a_file_of_that_name_elsewhere_is_taken_as_it_is(tmp_path: Path) -> None:
    copied = tmp_path / "zero_bubble.yaml"
    copied.write_bytes((folder("scenarios") / "published" / "zero_bubble.yaml").read_bytes())
    assert corrected(read(copied)) == read(copied)


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
