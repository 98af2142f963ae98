"""Files that appear when they are whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sim.report.whole_file import whole_file


def _fail(path: Path) -> None:
    with whole_file(path) as part:
        part.write_text("half of")
        raise OSError(28, "No space left on device", str(part))


def test_a_file_that_fails_leaves_what_was_there_before(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for before in (None, "old"):
        if before is not None:
            path.write_text(before)
        with pytest.raises(OSError, match="No space") as caught:
            _fail(path)
        assert caught.value.filename == str(path)
        assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == ([("t.json", "old")] if before else [])


def test_a_whole_file_takes_the_place_of_the_old_one_through_a_link(tmp_path: Path) -> None:
    path, link = tmp_path / "t.json", tmp_path / "link.json"
    path.write_text("old")
    link.symlink_to(path)
    with whole_file(link) as part:
        part.write_text("new")
    assert (link.is_symlink(), path.read_text(), len(list(tmp_path.iterdir()))) == (True, "new", 2)


def test_devices_are_written_themselves() -> None:
    with whole_file(os.devnull) as part:
        assert part == Path(os.devnull)
