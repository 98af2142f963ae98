"""The record of errors as validation writes it, reasons for misses, and the pictures' stamps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from sim.catalog import folder
from sim.validation import record
from sim.validation.cases.files import read
from sim.validation.runner import validate
from sim.validation.statistics import Record
from sim.validation.words import misses, pictures, table

FEATURES = {"model": "decoder", "mode": "train", "strategy": "fsdp", "splits": "", "offload": False,
            "generation": "ga100", "compute": "half", "framework": "composer", "gpus": 8, "parameters": 7e9}


def made(name: str, error: float, quality: str | None = None, file: str = "a.yaml") -> Record:
    return {"file": file, "id": name, "kind": "training", "status": "ok", "quality": quality, "features": FEATURES,
            "measured": {"step_time_s": 2.0}, "predicted": {"step_time_s": 2.0 * (1 + error)},
            "error": {"step_time_s": error}, "reason": ""}


def test_rows_are_sorted_rounded_and_without_marked_ones() -> None:
    found = record.rows([made("1", 0.12345), made("2", -0.5, "outlier"), made("3", -0.02, "plot"),
                         {**made("4", 0.0), "error": {}}])
    assert [one[-1] for one in found] == [-0.02, 0.123]
    assert yaml.safe_load(record.text(found)) == {"rows": found}


def test_a_reason_is_the_first_that_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[dict[str, Any]] = [
        {"source": "a", "id": "x-*", "kind": "noise", "predicted": "slow", "reason": "one"},
        {"source": "a", "kind": "bad run", "reason": "two"}]
    monkeypatch.setattr(misses, "table", lambda _: {"groups": groups})
    found = misses.misses([made("x-1", 0.2), made("x-2", -0.2), made("x-3", 0.3), made("x-4", 0.05),
                           made("y", 0.4, file="b.yaml")])
    assert [(m.kind, m.reason, m.sources, m.count, m.lowest, m.highest) for m in found] == [
        ("noise", "one", ("a",), 2, 0.2, 0.3), ("bad run", "two", ("a",), 1, -0.2, -0.2),
        ("unknown", misses.UNKNOWN, ("b",), 1, 0.4, 0.4)]
    assert table.missed(found)[0] == ("noise", "one", "a", "2", "+20.0% to +30.0%")


def test_every_shipped_reason_is_of_a_known_kind_and_fits_a_case() -> None:
    cases = [(path.stem, c.id) for path in (folder("scenarios") / "published").glob("*.yaml") for c in read(path).cases]
    for group in misses.table("validation/misses.yaml")["groups"]:
        assert group["kind"] in misses.KINDS
        assert set(group) <= {"source", "id", "kind", "predicted", "reason"}
        assert any(misses.fnmatch.fnmatchcase(source, group["source"])
                   and misses.fnmatch.fnmatchcase(name, group.get("id", "*")) for source, name in cases), group


def test_pictures_know_whether_they_are_current(tmp_path: Path) -> None:
    records = [made(str(i), 0.01 * i) for i in range(-20, 20)]
    assert not pictures.current(tmp_path, records)
    assert [p.name for p in pictures.draw(tmp_path, records)] == list(pictures.PICTURES)
    assert pictures.current(tmp_path, records)
    assert not pictures.current(tmp_path, [*records, made("more", 0.3)])


def test_a_validated_case_says_what_it_is_like() -> None:
    found = validate(["resnet50"], select="*v100-16g-1gpu-fp16*", workers=1).records
    assert found[0]["features"]["generation"] == "volta"
    assert record.rows(found)[0][0] == "resnet50"
