"""The tables of a validation as plain text cells: what the terminal and reports/validation.md both show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sim.validation.statistics import MEMORY_KEYS, Record
from sim.validation.words.misses import Miss

#: So many cases are named of those that are not compared for a reason.
_NAMED = 3
HEADLINE = ("source", "cases", "coverage", "compared", "mean", "median", "p90", "worst", "bias")


def percent(fraction: float | None, signed: bool = False, digits: int = 1) -> str:
    """`0.123` as `12.3%`, None as a dash."""
    if fraction is None:
        return "–"
    return f"{100 * fraction:+.{digits}f}%" if signed else f"{100 * fraction:.{digits}f}%"


def headline(summary: Mapping[str, Any], key: str = "step_time") -> list[tuple[str, ...]]:
    """One row per file that has the measurement and one for all: the unmarked rows' figures of `key`."""
    groups = [(name.removesuffix(".yaml"), figures) for name, figures in summary["files"].items()]
    rows = [_row(name, g[key]) for name, g in groups if g[key]["measured"]]
    total = summary["overall"]
    return [*rows, _row("all", total[key])] if rows else []


def marked(summary: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Step-time figures of the rows reported apart, one per file and mark."""
    rows = []
    for name, figures in summary["files"].items():
        for mark, group in figures["quality"].items():
            if group["step_time"]["measured"]:
                rows.append(_row(f"{name.removesuffix('.yaml')} ({mark})", group["step_time"]))
    return rows


def micro(summary: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Figures over rows of collectives and kernel files."""
    return [_row(name, g["rows"]) for name, g in summary["files"].items() if "rows" in g]


def allocated(summary: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Oracle memory files: errors of the peak, of each phase and of what a block keeps."""
    return [(name.removesuffix(".yaml"), key.removeprefix("phase_peaks."), *row[2:])
            for name, figures in summary["files"].items() for key, spread in figures.get("allocated", {}).items()
            for row in [_row(name, spread, 3)]]


def exact(summary: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Oracle files: source, cases, coverage, values compared, equal, unequal."""
    return [(name.removesuffix(".yaml"), str(g["cases"]), percent(g["coverage"]), str(g["exact"]["compared"]),
             str(g["exact"]["equal"]), str(g["exact"]["unequal"]))
            for name, g in summary["files"].items() if "exact" in g]


def such_as(records: Sequence[Record], status: str, reason: str) -> str:
    """The first few cases that are not compared for a reason."""
    names = [r["id"] for r in records if (r["status"], r.get("reason")) == (status, reason)]
    return ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")


def reasons(records: Sequence[Record]) -> list[tuple[str, str, str]]:
    """Why cases are not compared: (status, reason, count), most frequent first; numbers in reasons kept as they are."""
    counts: dict[tuple[str, str], int] = {}
    for record in records:
        if record["status"] != "ok":
            key = (record["status"], record["reason"])
            counts[key] = counts.get(key, 0) + 1
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return [(status, reason, str(count)) for (status, reason), count in ordered]


def reasons_by_file(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """`reasons` of each file with cases that are not compared, in the files' order."""
    files = dict.fromkeys(r["file"] for r in records)
    return [(name.removesuffix(".yaml"), *row) for name in files
            for row in reasons([r for r in records if r["file"] == name])]


def missed(groups: Sequence[Miss]) -> list[tuple[str, ...]]:
    """Rows of the table of misses: kind, reason, sources, count, range of errors."""
    return [(m.kind, m.reason, ", ".join(m.sources), str(m.count),
             percent(m.lowest, True) if m.count == 1 else f"{percent(m.lowest, True)} to {percent(m.highest, True)}")
            for m in groups]


def detail(record: Record, key: str = "step_time_s") -> tuple[str, ...]:
    """file, id, measured, predicted, error of one record."""
    digits = ".3g" if key in MEMORY_KEYS else ".4g"
    return (record["file"].removesuffix(".yaml"), record["id"], format(record["measured"][key], digits),
            format(record["predicted"][key], digits), percent(record["error"][key], signed=True))


#: Columns of `wrong_verdicts`.
VERDICTS = ("source", "case", "really", "allocated", "GPU holds")


def wrong_verdicts(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Cases that ran and are predicted not to fit, or the other way round; GiB that PyTorch is predicted to allocate
    and that the GPU has, for these and for the context and NCCL's buffers."""
    found = []
    for r in records:
        measured, predicted = r.get("measured"), r.get("predicted") or {}
        if not isinstance(measured, Mapping) or "oom" not in measured or predicted.get("oom") is None:
            continue
        if predicted["oom"] != measured["oom"]:
            memory = predicted.get("memory") or {}
            sizes = [f"{memory[key] / 2**30:.1f} GiB" if key in memory else "-"
                     for key in ("peak_allocated_bytes", "capacity_bytes")]
            found.append((r["file"].removesuffix(".yaml"), r["id"], "ran out" if measured["oom"] else "ran", *sizes))
    return sorted(found)


def _row(name: str, figures: Mapping[str, Any], digits: int = 1) -> tuple[str, ...]:
    errors = (percent(figures[k], digits=digits) for k in ("mean", "median", "p90", "worst"))
    return (name, str(figures["measured"]), percent(figures["coverage"]), str(figures["count"]), *errors,
            percent(figures["bias"], True, digits))
