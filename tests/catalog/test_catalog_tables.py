"""Catalogues are read once, kept parsed, and read again when the file changes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from sim import catalog


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(catalog, "_PACKAGE", tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    catalog.table.cache_clear()
    yield tmp_path
    catalog.table.cache_clear()


def test_the_parsed_copy_is_used_and_follows_the_file(package: Path) -> None:
    path = package / "some.yaml"
    path.write_text("a: 1\n")
    assert catalog.table("some.yaml") == {"a": 1}
    copies = list((package / "__pycache__").iterdir())
    assert len(copies) == 1
    catalog.table.cache_clear()
    assert catalog.table("some.yaml") == {"a": 1}
    path.write_text("a: 2\n")
    os.utime(path, ns=(1, 1))
    catalog.table.cache_clear()
    assert catalog.table("some.yaml") == {"a": 2}


def test_a_broken_copy_is_read_over(package: Path) -> None:
    (package / "some.yaml").write_text("a: 1\n")
    catalog.table("some.yaml")
    next((package / "__pycache__").iterdir()).write_bytes(b"nonsense")
    catalog.table.cache_clear()
    assert catalog.table("some.yaml") == {"a": 1}


def test_a_list_is_no_table(package: Path) -> None:
    (package / "list.yaml").write_text("[1]\n")
    with pytest.raises(TypeError, match=r"list\.yaml"):
        catalog.table("list.yaml")
