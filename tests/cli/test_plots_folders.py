"""`--report DIR`: one folder per scenario, an index, and exit code 2 where nothing can be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SMALL = """\
name: small
cluster: {topology: dgx-a100-80g, nodes: 1}
model: {preset: gpt2}
training: {micro_batch: 1, global_batch: 16, sequence: 1024, precision: fsdp-bf16}
parallel: {strategy: fsdp}
"""


def test_several_scenarios_get_a_folder_each_and_an_index(tmp_path: Path, drystep: Any) -> None:
    for place, text in (("a", SMALL), ("b", SMALL + "sweep: {cluster.nodes: [1, 2]}\n")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "same.yaml").write_text(text)
    assert drystep("run", "a/same.yaml", "b/same.yaml", "--report", "out").code == 0
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"same", "same-2", "index.html"}
    assert (tmp_path / "out/same/timeline.png").is_file()
    assert (tmp_path / "out/same-2/scaling.png").is_file()
    page = (tmp_path / "out/index.html").read_text()
    assert 'href="same/index.html"' in page
    assert 'href="same-2/index.html"' in page


@pytest.mark.parametrize("target", ["file/below", "/proc/nowhere", "taken"])
def test_a_folder_that_cannot_be_written_is_wrong_input(tmp_path: Path, drystep: Any, target: str) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    (tmp_path / "file").write_text("")
    (tmp_path / "taken" / "timeline.png").mkdir(parents=True)
    code, _, err = drystep("run", "small.yaml", "--report", target)
    assert code == 2
    assert err.startswith("--report: ")
