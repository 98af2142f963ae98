"""`python -m sim.validation.regression`: fails when the predictions got worse than reports/bounds.yaml allows.

    python -m sim.validation.regression [FILE ...] [--bounds reports/bounds.yaml] [--tighten] [--workers N]

Without files: all shipped published cases. A source's bounds are the coverage, mean and 90th percentile of its
step-time error, the mean error of its ratios and of its micro-measurements' rows, and the number of exact comparisons
that hold; a case that fails (a fault of ours, not one that cannot be expressed) is always worse.
`--tighten` writes better figures into the bounds and adds new sources; it never loosens one. Where more coverage brings
harder cases in, a person loosens the bound by hand, in view of who reads the change.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from sim.errors import Fault, UserError
from sim.validation.runner import WRONG_INPUT, Validation, published

#: Figures of one source, and whether more is better.
_FIGURES = {"coverage": True, "mean": False, "p90": False, "ratio_mean": False, "rows_mean": False, "equal": True}
#: Bounds are written with four decimals; other processors' last bits must not break one.
ROUNDING = 1e-4

Bounds = dict[str, dict[str, float]]


def figures(summary: Mapping[str, Any]) -> Bounds:
    """The bounded figures of every source of a validation's summary, rounded to four decimals."""
    found: Bounds = {}
    for name, group in summary["files"].items():
        steps, ratios, rows, exact = group["step_time"], group["ratio"], group.get("rows"), group.get("exact")
        row: dict[str, float] = {}
        if steps["measured"]:
            row["coverage"] = steps["coverage"]
        if steps["count"]:
            row.update(mean=steps["mean"], p90=steps["p90"])
        if ratios["count"]:
            row["ratio_mean"] = ratios["mean"]
        if rows and rows["count"]:
            row["rows_mean"] = rows["mean"]
        if exact:
            row["equal"] = exact["equal"]
        if row:
            found[name] = {key: round(value, 4) for key, value in row.items()}
    return found


def broken(bounds: Mapping[str, Mapping[str, float]], now: Mapping[str, Mapping[str, float]]) -> list[str]:
    """One sentence per figure of `now` that is worse than its bound; a source or figure that vanished is worse."""
    lines = []
    for name, row in bounds.items():
        for key, bound in row.items():
            value = now.get(name, {}).get(key)
            if value is None:
                lines.append(f"{name}: {key} is not there any more (bound {bound})")
            elif (bound - value if _FIGURES[key] else value - bound) > ROUNDING:
                lines.append(f"{name}: {key} is {value}, the bound is {bound}")
    return lines


def tightened(bounds: Mapping[str, Mapping[str, float]], now: Mapping[str, Mapping[str, float]]) -> Bounds:
    """`bounds` with every better figure of `now`, and `now`'s new sources; never a looser figure."""
    result: Bounds = {name: dict(row) for name, row in bounds.items()}
    for name, row in now.items():
        old = result.setdefault(name, {})
        for key, value in row.items():
            best = max if _FIGURES[key] else min
            old[key] = best(old.get(key, value), value)
    return result


def load(path: Path) -> Bounds:
    """The bounds file, {} where there is none.

    Raises:
        UserError: it is not a mapping of sources to figures.
    """
    if not path.is_file():
        return {}
    data = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    good = isinstance(data, dict) and all(
        isinstance(row, dict) and set(row) <= set(_FIGURES) and all(isinstance(v, int | float) for v in row.values())
        for row in data.values())
    if not good:
        raise UserError(Fault(f"is not a mapping of sources to {', '.join(_FIGURES)}", file=str(path)))
    return data


def save(path: Path, bounds: Mapping[str, Mapping[str, float]]) -> None:
    """Write the bounds, one line per source, sources sorted."""
    lines = ["# Worst accepted error per source (fractions); better figures: python -m sim.validation.regression "
             "--tighten"]
    for name in sorted(bounds):
        row = ", ".join(f"{key}: {bounds[name][key]}" for key in _FIGURES if key in bounds[name])
        lines.append(f"{name}: {{{row}}}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def say(validation: Validation, bounds: Bounds, *, whole: bool) -> bool:
    """Print what is worse than its bound, or that nothing is; whether anything is.

    Args:
        whole: all sources were validated, so that one without figures is worse.
    """
    now = figures(validation.summary)
    checked = {name: row for name, row in bounds.items() if whole or name in now}
    worse = broken(checked, now)
    worse += [f"{r['file']}: {r['id']} failed: {r['reason']}" for r in validation.records if r["status"] == "failed"]
    print("\n".join(worse) if worse else f"{len(checked)} sources within their bounds")
    return bool(worse)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exit code 0 when no figure is worse than its bound, 3 when one is, 2 on bad input."""
    parser = argparse.ArgumentParser(prog="python -m sim.validation.regression",
                                     description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", help="case files; default: all shipped published cases")
    parser.add_argument("--bounds", type=Path, default=Path("reports/bounds.yaml"))
    parser.add_argument("--tighten", action="store_true", help="write better figures into the bounds")
    parser.add_argument("--workers", type=int)
    given = parser.parse_args(arguments)
    try:
        bounds = load(given.bounds)
    except UserError as error:
        print(error, file=sys.stderr)
        return WRONG_INPUT
    validation = published(given.files, given.workers)
    if isinstance(validation, int):
        return validation
    worse = say(validation, bounds, whole=not given.files)
    if given.tighten:
        save(given.bounds, tightened(bounds, figures(validation.summary)))
        print(f"{given.bounds}: tightened")
    return 3 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
