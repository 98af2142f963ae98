"""The pictures of the README, made by the command they show: `python -m sim.report.readme_picture [--check]`.

Writes reports/run.svg (the command's output as a terminal shows it), reports/llama2-7b-{timeline,memory,scaling}.png
and reports/pictures.json, the data in them. With --check nothing is written: the command is run again, and the exit
code is 1 if its data differ from pictures.json, whatever the pixels of another machine's fonts may be.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
RUN, SWEEP = "llama2-7b-fsdp", "llama2-7b-fsdp-scaling"
SCENARIOS = tuple(f"scenarios/{name}.yaml" for name in (RUN, SWEEP))
#: Name in reports/: folder and name in what --report writes.
PICTURES: Mapping[str, tuple[str, str]] = {
    "llama2-7b-timeline.png": (RUN, "timeline.png"),
    "llama2-7b-memory.png": (RUN, "memory.png"),
    "llama2-7b-scaling.png": (SWEEP, "scaling.png"),
}
#: Columns of the terminal: what stays legible at a README's 900 pixels.
COLUMNS = 92
#: Two machines' arithmetic may differ by so much (relative).
TOLERANCE = 1e-6
#: Differences that --check writes out.
_SHOWN = 12
#: How long the prediction took is the one thing in the output that is of the day.
_WALL_TIME = re.compile(r"(events in) [\d.]+ \S+")
#: A README's picture may load nothing from elsewhere, so the reader's own monospaced font is asked for.
_FONT_FILE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
_FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def make(reports: Path) -> None:
    """Write all pictures and their data into `reports`.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    reports.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        output = _run(Path(folder))
        for name, (scenario, picture) in PICTURES.items():
            shutil.copyfile(Path(folder, scenario, picture), reports / name)
        data = _data(Path(folder), output)
    (reports / "run.svg").write_text(terminal(output), encoding="utf-8")
    (reports / "pictures.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def stale(reports: Path) -> list[str]:
    """What in `reports` is missing or shows other data than the command gives now.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    missing = [name for name in ("pictures.json", "run.svg", *PICTURES) if not (reports / name).is_file()]
    if missing:
        return [f"{name} is missing" for name in missing]
    stored = json.loads((reports / "pictures.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        current = json.loads(json.dumps(_data(Path(folder), _run(Path(folder)))))
    return list(differences(stored, current))


def differences(stored: Any, current: Any, where: str = "") -> list[str]:
    """Dotted places at which two trees differ by more than `TOLERANCE`."""
    if isinstance(stored, Mapping) and isinstance(current, Mapping):
        names = list(dict.fromkeys((*stored, *current)))
        return [d for name in names for d in differences(stored.get(name), current.get(name), f"{where}/{name}")]
    if isinstance(stored, list) and isinstance(current, list) and len(stored) == len(current):
        pairs = enumerate(zip(stored, current, strict=True))
        return [d for i, pair in pairs
                for d in differences(*pair, f"{where}/{i}")]
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (stored, current))
    alike = math.isclose(stored, current, rel_tol=TOLERANCE, abs_tol=1e-12) if numbers else stored == current
    return [] if alike else [f"{where}: {stored!r} is stored, {current!r} is predicted"]


def terminal(output: str) -> str:
    """Coloured output as an SVG of a terminal window, the command above it."""
    from rich.console import Console
    from rich.terminal_theme import TerminalTheme
    from rich.text import Text

    theme = TerminalTheme((24, 26, 31), (220, 223, 228), [
        (24, 26, 31), (240, 113, 103), (126, 200, 110), (229, 192, 100), (97, 155, 240), (203, 130, 225),
        (86, 190, 200), (220, 223, 228)], [
        (110, 115, 125), (245, 140, 130), (160, 222, 145), (240, 210, 130), (130, 180, 250), (220, 160, 240),
        (130, 215, 222), (255, 255, 255)])
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor",
                      highlight=False)
    console.print(Text.assemble(("$ ", "green"), (f"drystep run {' '.join(SCENARIOS)}", "bold")))
    console.print()
    console.print(Text.from_ansi(output.rstrip()))
    drawn = console.export_svg(title="drystep", theme=theme, unique_id="drystep-run")
    return re.sub(r"font-family: [^;]+;", f"font-family: {_FONTS};", _FONT_FILE.sub("", drawn))


def _run(folder: Path) -> str:
    """What the README's command prints on a terminal; its reports go into `folder`."""
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "TERM": "xterm-256color",
                   "PYTHONIOENCODING": "utf-8"}
    environment.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "sim", "run", *SCENARIOS, "--report", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, encoding="utf-8")
    return done.stdout


def _data(folder: Path, output: str) -> dict[str, Any]:
    """What the pictures show: the numbers behind each plot, and the terminal's text without its colours."""
    from rich.text import Text

    data: dict[str, Any] = {}
    for name, (scenario, picture) in PICTURES.items():
        data[name] = json.loads(Path(folder, scenario, "pictures.json").read_text(encoding="utf-8"))[picture]
    text = _WALL_TIME.sub(r"\1 (wall time)", Text.from_ansi(output).plain)
    data["run.svg"] = [line.rstrip() for line in text.rstrip().splitlines()]
    return data


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m sim.report.readme_picture", description="Pictures of the README.")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the stored pictures show old data")
    chosen = parser.parse_args(arguments)
    if not (ROOT / SCENARIOS[0]).is_file():
        print(f"this works in a checkout only: there is no {ROOT / SCENARIOS[0]}", file=sys.stderr)
        return 2
    if not chosen.check:
        make(ROOT / "reports")
        return 0
    found = stale(ROOT / "reports")
    for line in found[:_SHOWN]:
        print(f"reports/{line.lstrip('/')}", file=sys.stderr)
    if len(found) > _SHOWN:
        print(f"and {len(found) - _SHOWN} more", file=sys.stderr)
    if found:
        print("run: python -m sim.report.readme_picture", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
