"""`--report DIR`: the text, the JSON and the pictures of a run or a sweep in one folder, and a page that shows them."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sim.report.result import Result

#: Pictures of one sweep beyond these are left out; the page says so.
MOST_PICTURES = 12
#: Digits of the numbers in pictures.json.
_DIGITS = 9

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title>
<style>body{{font-family:sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}}img{{max-width:100%}}
pre{{overflow-x:auto;background:#f6f6f6;padding:1em;font-size:85%}}</style></head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def write_run(folder: Path, result: Result, text: str, as_json: Mapping[str, Any]) -> list[Path]:
    """report.txt, result.json, timeline.png, memory.png (pipeline.png), memory.pickle (a snapshot for PyTorch's
    memory_viz, of the fullest rank), pictures.json and index.html of one run.

    Args:
        folder: made if it does not exist.
        text: the terminal report without colour.
        as_json: the result as `--json` writes it.

    Returns:
        what was written.

    Raises:
        OSError: the folder or a file cannot be written.
    """
    from sim.report.pictures import style as look
    from sim.report.pictures.memory import fullest, memory_digest, memory_figure
    from sim.report.pictures.pipeline import pipeline_digest, pipeline_figure
    from sim.report.pictures.pipeline_rows import boxes_of, chunk_names, merges
    from sim.report.pictures.timeline import timeline_digest, timeline_figure
    from sim.report.snapshot import write_snapshot

    written = _begin(folder, text, as_json)
    digest = {"timeline.png": timeline_digest(result), "memory.png": memory_digest(result)}
    boxes = boxes_of(result)
    with look.style():
        pictures = [("timeline.png", timeline_figure(result)), ("memory.png", memory_figure(result))]
        if boxes is not None:
            scenario = result.scenario
            how = f"{scenario.parallel.schedule}, {boxes.stages} stages, {scenario.micro_steps} micro-batches"
            how += "; what runs as one is drawn in halves" * merges(result)
            pictures.append(("pipeline.png", pipeline_figure(scenario.name, boxes, how, chunk_names(result),
                                                             result.step_time_s)))
            digest["pipeline.png"] = pipeline_digest(boxes, result.step_time_s)
        for name, made in pictures:
            look.save(made, folder / name)
            written.append(folder / name)
    written.append(folder / "memory.pickle")
    write_snapshot(written[-1], result.memory, result.detail.lowered.layers_of(fullest(result)))
    return _finish(folder, written, result.scenario.name, text, digest)


def write_sweep(folder: Path, points: Sequence[Result], axes: Mapping[str, Sequence[Any]], text: str,
                as_json: Mapping[str, Any]) -> list[Path]:
    """report.txt, result.json, sweep.png, scaling.png (if the number of nodes varies), pictures.json and index.html.

    Held-fast values of a third axis get a picture each: sweep-2.png and so on. Arguments, result and errors as in
    `write_run`; the points may have been released.
    """
    from sim.report.pictures import style as look
    from sim.report.pictures.sweep import scales, scaling_figure, sweep_digest, sweep_figure, sweeps

    written = _begin(folder, text, as_json)
    digest: dict[str, Any] = {}
    found = sweeps(points, axes)
    with look.style():
        for number, one in enumerate(found[:MOST_PICTURES], 1):
            suffix = "" if number == 1 else f"-{number}"
            for kind, draw in (("sweep", sweep_figure), *([("scaling", scaling_figure)] if scales(one) else [])):
                path = folder / f"{kind}{suffix}.png"
                look.save(draw(one), path)
                written.append(path)
                digest[path.name] = sweep_digest(one)
    left_out = len(found) - MOST_PICTURES
    note = f"Pictures of this sweep that were left out: {left_out}." if left_out > 0 else ""
    return _finish(folder, written, points[0].scenario.name if points else "sweep", text, digest, note)


def write_overview(folder: Path, names: Sequence[tuple[str, str]]) -> Path:
    """index.html of a folder of reports.

    Args:
        names: (title, name of the subfolder) of each.

    Raises:
        OSError: the file cannot be written.
    """
    rows = "\n".join(f'<li><a href="{html.escape(name)}/index.html">{html.escape(title)}</a></li>'
                     for title, name in names)
    path = folder / "index.html"
    path.write_text(_PAGE.format(title="drystep reports", body=f"<ul>\n{rows}\n</ul>"), encoding="utf-8")
    return path


def rounded(value: Any) -> Any:
    """A tree of numbers with as many digits as two machines agree on."""
    if isinstance(value, Mapping):
        return {str(k): rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(v) for v in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _begin(folder: Path, text: str, as_json: Mapping[str, Any]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    report, result = folder / "report.txt", folder / "result.json"
    report.write_text(text, encoding="utf-8")
    result.write_text(json.dumps(as_json, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    return [report, result]


def _finish(folder: Path, written: list[Path], title: str, text: str, digest: Mapping[str, Any],
            note: str = "") -> list[Path]:
    """The digest of the pictures, and the page."""
    data = folder / "pictures.json"
    data.write_text(json.dumps(rounded(digest), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    pictures = [p.name for p in written if p.suffix == ".png"]
    of = html.escape(title)
    parts = [f'<p><img src="{name}" alt="{name.removesuffix(".png")} of {of}"></p>' for name in pictures]
    if note:
        parts.append(f"<p>{html.escape(note)}</p>")
    others = [p.name for p in (*written, data) if p.suffix != ".png"]
    links = ", ".join(f'<a href="{name}">{name}</a>' for name in others)
    parts += [f"<pre>{html.escape(text)}</pre>", f"<p>Files: {links}</p>"]
    page = folder / "index.html"
    page.write_text(_PAGE.format(title=html.escape(title), body="\n".join(parts)), encoding="utf-8")
    return [*written, data, page]
