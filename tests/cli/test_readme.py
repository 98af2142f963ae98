"""What the README and the guide show is what the product takes: its scenarios load, its commands and links exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from sim.cli import cli
from sim.scenario import resolve

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ["README.md", "scenarios/README.md"]
README = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in TEXTS)
BASE: dict[str, Any] = {"name": "base", "cluster": {"topology": "dgx-a100-80g"}, "model": {"preset": "gpt2"},
                        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128}}
BLOCKS = [block for block in re.findall(r"```yaml\n(.*?)```", README, re.DOTALL) if "cases:" not in block]
COMMANDS = re.findall(r"drystep (\w+)((?: [^`\n|]*)?)", "\n".join(re.findall(r"`[^`\n]*drystep [^`\n]*`|```sh\n.*?```",
                                                                              README, re.DOTALL)))


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0])
def test_scenarios_and_parts_of_scenarios_load(block: str) -> None:
    part = yaml.safe_load(block)
    assert resolve({**BASE, **part}).gpus >= 1


def test_commands_and_options_exist() -> None:
    assert len(COMMANDS) > 20
    for name, rest in COMMANDS:
        assert name in cli.commands, name
        options = re.findall(r"(?<=\s)--?[a-z][a-z-]*", rest)
        known = {option for of in cli.commands[name].params for option in (*of.opts, *of.secondary_opts)}
        assert set(options) <= known, (name, rest)


@pytest.mark.parametrize("name", [*TEXTS, "reports/provenance.md", "reports/limits.md"])
def test_links_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if not link.startswith("http")]
    assert links and [link for link in links if not (ROOT / name).parent.joinpath(link).exists()] == []


@pytest.mark.parametrize("name", TEXTS)
def test_links_to_sections_lead_to_one(name: str) -> None:
    """GitHub's anchors: words of a heading in lower case, joined by hyphens."""
    text = (ROOT / name).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]*)#([^)]+)\)", text)
    assert links
    for file, section in links:
        target = (ROOT / name).parent / file if file else ROOT / name
        headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
        assert section in {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}, (file, section)


def test_the_place_of_every_judged_figure_exists() -> None:
    """reports/provenance.md names a file of `sim/` for each, and most a name inside it."""
    text = (ROOT / "reports" / "provenance.md").read_text(encoding="utf-8")
    places = [line.rsplit("|", 2)[1] for line in text.splitlines() if line.startswith("| ") and "`" in line]
    assert len(places) > 25
    for place in places:
        file, *names = re.findall(r"`([^`]+)`", place)
        path = ROOT / file if file.startswith("sim/") else ROOT / "sim" / file
        assert path.exists(), place
        found = path.read_text(encoding="utf-8") if path.is_file() else ""
        assert not found or all(name in found for name in names), place
