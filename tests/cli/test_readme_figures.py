"""What README and guide say of figures and names that change elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner

from sim.cli import cli
from sim.imports.read import KINDS
from sim.scenario.named.gpus import gpu_names
from sim.scenario.named.presets import preset_names
from sim.scenario.named.topologies import topology_names

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "scenarios" / "README.md").read_text(encoding="utf-8")
REPORT = (ROOT / "reports" / "validation.md").read_text(encoding="utf-8")


def test_verdicts_are_those_of_the_report() -> None:
    said = re.search(r"of ([\d,]+) unmarked runs .* (\d+) verdicts are wrong", README)
    counted = re.search(r"Out-of-memory verdicts: (\d+) right, (\d+) wrong", REPORT)
    assert said is not None and counted is not None
    right, wrong = map(int, counted.groups())
    assert (int(said[1].replace(",", "")), int(said[2])) == (right + wrong, wrong)


def _row(source: str) -> list[float]:
    """Percents of a source's row of the report: mean, median, p90, worst (coverage before them)."""
    line = next(line for line in REPORT.splitlines() if line.startswith(f"| {source} |"))
    return [float(figure) for figure in re.findall(r"(-?[\d.]+)%", line)][1:]


def test_errors_in_words_are_those_of_the_report() -> None:
    for words, source in (("few micro-batches on hundreds of GPUs", "nanotron"),
                          ("V100 over Omni-Path |", "bigscience_v100"),
                          ("DeepSpeed ZeRO-3 over many nodes of A100", "deepspeed_azure (plot)")):
        line = next(line for line in README.splitlines() if line.startswith(f"| {words}"))
        mean, worst = (int(figure) for figure in re.findall(r"(\d+)%", line))
        assert (mean, worst) == (round(_row(source)[0]), round(_row(source)[3])), source
    cases = re.search(r"within 0\.1% in all (\d+) cases", README)
    assert cases is not None and f"| memory | peak_allocated_bytes | 100.0% | {cases[1]} |" in REPORT


def test_the_catalogue_holds_what_is_said_of_it() -> None:
    said = next(line for line in README.splitlines() if line.startswith("The catalogue holds"))
    assert len(topology_names()) > 100 and len(gpu_names()) > 50 and len(preset_names()) >= 160
    assert "over a hundred clusters" in said and "over fifty GPUs" in said and "160 models" in said
    for name in ("p5en", "a3-ultra", "alps", "jupiter", "leonardo"):
        assert name in said and name in topology_names()
    for name in ("rtx2080ti", "rtx5090", "v100-16g-sxm", "gb300", "mi300x"):
        assert name in gpu_names()


def test_every_kind_that_can_be_imported_is_named() -> None:
    told = CliRunner().invoke(cli, ["import", "--help"]).output.replace("\n", " ")
    for kind in KINDS:
        assert re.search(rf"\b{kind}\b", told) and f"`{kind}`" in GUIDE, kind
