"""reports/fit.md: accuracy with the profiles' figures, with fitted ones, and left out, side by side."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sim.validation.fit import Array, Fit
from sim.validation.table import percent

_HEAD = """# Free figures of software profiles, estimated from published step times

Written by `python -m sim.validation.fit`; do not edit. {rows} published runs, at most {most} of a source, marked rows
left out; every source counts like the square root of its rows, errors beyond 3% count less and less. Columns of errors:
mean and 90th percentile of |predicted / measured − 1|. *fitted* is simulated with the estimated figures. *left out* are
errors of runs by figures that were estimated without their source, cluster or model size, on the errors' slopes. The
profiles keep their own figures unless the left-out errors improve too. A figure at the end of its range is not found by
the data: it takes up errors of other origin.
"""


def markdown(fit: Fit, most: int) -> str:
    """The report."""
    names = list(fit.left_out)
    head = ("source", "runs", "unfitted", "fitted", *(f"left out: {name}" for name in names))
    sources = list(dict.fromkeys(r.source for r in fit.rows))
    where = np.array([r.source for r in fit.rows])
    lines = [_HEAD.format(rows=len(fit.rows), most=most), *_table(
        ("profile", "figure", "value", "range", "fitted"),
        [(profile, fact, _short(fit.start[i]), f"{_short(fit.low[i])} to {_short(fit.high[i])}",
          _short(fit.found[i]) + (", the range's end" if at_end(fit, i) else ""))
         for i, (profile, fact) in enumerate(fit.figures)]), ""]
    rows = [_accuracy(fit, source, where == source) for source in sources]
    lines += _table(head, [*rows, _accuracy(fit, "all", np.ones(len(where), dtype=bool))])
    return "\n".join(lines) + f"\n\n{verdict(fit)}\n"


def verdict(fit: Fit) -> str:
    """Whether the estimate should be taken: the left-out errors must be smaller than the unfitted ones, no source may
    get worse for it, and the data must have found the figures, not their ranges' ends."""
    before = float(np.abs(fit.before).mean())
    worse = {name: float(np.abs(e).mean()) for name, e in fit.left_out.items() if np.abs(e).mean() >= before}
    if worse:
        return ("Not taken: with what is left out unseen, the mean error is "
                + ", ".join(f"{percent(e, digits=2)} ({name})" for name, e in worse.items())
                + f" where the profiles' own figures give {percent(before, digits=2)}.")
    said = (f"The left-out mean errors ({', '.join(percent(float(np.abs(e).mean()), digits=2) for e in _each(fit))}) "
            f"are below the unfitted one ({percent(before, digits=2)})")
    ends = sum(at_end(fit, i) for i in range(len(fit.figures)))
    harmed = worse_sources(fit)
    if not ends and not harmed:
        return f"{said}: the estimate holds beyond what it saw."
    doubts = ([f"{ends} of {len(fit.figures)} figures stand at an end of their range"] if ends else []) + (
        [f"sources get worse ({', '.join(harmed)})"] if harmed else [])
    return f"{said}. Not taken all the same: {' and '.join(doubts)}, so the figures make up for something else."


def worse_sources(fit: Fit) -> list[str]:
    """Sources whose mean error the estimate raises by more than a tenth of a point."""
    where = np.array([r.source for r in fit.rows])
    return [s for s in dict.fromkeys(r.source for r in fit.rows)
            if np.abs(fit.after[where == s]).mean() > np.abs(fit.before[where == s]).mean() + 0.001]


def at_end(fit: Fit, i: int) -> bool:
    """Whether figure `i` stands within a fiftieth of its range from one of its ends."""
    place = (fit.found[i] - fit.low[i]) / (fit.high[i] - fit.low[i])
    return not 0.02 < float(place) < 0.98


def _each(fit: Fit) -> list[Array]:
    return list(fit.left_out.values())


def _accuracy(fit: Fit, name: str, chosen: Array) -> tuple[str, ...]:
    def cell(errors: Array) -> str:
        size = np.abs(errors[chosen])
        return f"{percent(float(size.mean()))} / {percent(float(np.percentile(size, 90)))}"
    return (name, str(int(chosen.sum())), cell(fit.before), cell(fit.after), *(cell(e) for e in _each(fit)))


def _short(value: float) -> str:
    return f"{1e6 * value:.3g} µs" if value < 1e-3 else f"{1e3 * value:.3g} ms"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(header) + " |", "|---" * len(header) + "|",
            *("| " + " | ".join(row) + " |" for row in rows)]
