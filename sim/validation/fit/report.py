"""reports/fit.md: figures with what they gain, and errors unfitted, fitted and left out, side by side."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import numpy as np

from sim.catalog import table
from sim.validation.fit.fit import WORTH, Estimate, Fit
from sim.validation.fit.solver import SURE
from sim.validation.fit.trials import MOST_EVENTS, Array
from sim.validation.words.table import percent

_HEAD = """# Free figures of software profiles, estimated from published step times

Written by `drystep fit`; do not edit. {runs} published runs with an unmarked step time. Slopes are simulated on a
sample of {drawn}: of each source one run for every model size, number of GPUs and sequence length first (the others
differ in batch or layout), none with more than {events:,} events. A source of n runs counts like √n, errors beyond 3%
count less and less, and a figure's own value counts as one more run (its range as four standard deviations), so that
runs which say nothing of a figure leave it alone. Nothing is written into a profile by itself.

## Figures

*fitted*: all figures together, ± the standard error from leaving out one source after the other. *gain*: by how much
the mean error of the runs that a figure changes falls when it alone is fitted and every source gets the value that the
other sources ask for; ± its standard error over sources. A figure is recommended when that gain is above zero with
{sure:.0%} confidence (t tests over sources, corrected for the number of figures) and at least a tenth of a point, and
the value stands inside its range: at an end, it takes up errors of other origin.
"""
_ERRORS = """
## Errors

Mean / 90th percentile of |predicted / measured − 1|, all simulated. *left out*: each run of the sample with figures
that were estimated without its source, cluster or model size. *limit*: 1.5 times the accuracy asked of the source, for
what was left out.{taken} The slopes' largest mistake about a left-out error is {nonlinear}.
"""
_TAKEN = """ *recommended*: with only the recommended figures
fitted, all runs; and the sample with each source left out."""
#: Left-out errors may be this much larger than what is asked of a source.
_LEFT_OUT = 1.5


def markdown(fit: Fit) -> str:
    """The report."""
    lines = [_HEAD.format(runs=len(fit.rows), drawn=len(fit.drawn), events=MOST_EVENTS, sure=SURE),
             *_markdown(FIGURES, figure_rows(fit)),
             _ERRORS.format(taken=_TAKEN if fit.taken else "", nonlinear=percent(fit.nonlinear, digits=2)),
             *_markdown(*error_table(fit)), "", verdict(fit), *beyond(fit)]
    return "\n".join(lines) + "\n"


#: Headers of `figure_rows`.
FIGURES = ("figure", "value", "range", "fitted", "runs / sources", "gain", "verdict")


def figure_rows(fit: Fit) -> list[tuple[str, ...]]:
    """One row per figure."""
    return [(".".join(e.figure), short(e.own, e.unit), _range(e),
             f"{short(e.found, e.unit)} ± {short(e.error, e.unit, digits=2)}", f"{e.runs} / {e.sources}", _gain(e),
             judged(e))
            for e in fit.estimates]


def judged(estimate: Estimate) -> str:
    """What becomes of a figure, in a few words."""
    if not estimate.runs:
        return "no run"
    if not np.isfinite(estimate.gain_error):
        return "one source only"
    if estimate.gain <= 0:
        return "no better"
    if not estimate.sure:
        return "within noise"
    if estimate.gain < WORTH:
        return "too little to matter"
    return "at its range's end" if estimate.at_end else "recommended"


def error_table(fit: Fit, brief: bool = False) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows of the errors by source; brief for a terminal: means alone."""
    shown = (lambda errors: percent(_mean(errors)) if len(errors) else "–") if brief else _spread
    where = np.array([row.source for row in fit.rows])
    drawn = list(fit.drawn)
    columns = [("unfitted", fit.before, False), ("fitted", fit.after, False)]
    columns += [("recommended", fit.taken_after, False)] if fit.taken else []
    columns += [("sample", fit.before[drawn], True), ("sample unfitted", fit.before[drawn], True),
                ("sample fitted", fit.after[drawn], True)]
    columns += [(f"left out: {by}", errors, True) for by, errors in fit.left_out.items()]
    columns += [("recommended, source left out", fit.taken_left_out, True)] if fit.taken else []
    rows = []
    for source in [*dict.fromkeys(where.tolist()), "all"]:
        all_of = np.ones(len(where), dtype=bool) if source == "all" else where == source
        masks = {False: all_of, True: all_of[drawn]}
        cells = [str(int(masks[True].sum())) if name == "sample" else shown(errors[masks[of_sample]])
                 for name, errors, of_sample in columns]
        rows.append((source, str(int(all_of.sum())), *cells, _cell(limit_of(source), brief)))
    return ("source", "runs", *(name for name, _, _ in columns), "limit"), rows


def limit_of(source: str) -> tuple[float, float | None] | None:
    """Mean and 90th percentile that a source's left-out errors may have; None where nothing is asked of it."""
    for line in table("validation/asked.yaml")["sources"]:
        if fnmatch.fnmatchcase(source, line["source"]):
            return _LEFT_OUT * line["mean"], _LEFT_OUT * line["p90"] if "p90" in line else None
    return None


def beyond(fit: Fit) -> list[str]:
    """A paragraph on the sources whose left-out errors are larger than they may be; nothing where none is."""
    where = np.array([fit.rows[i].source for i in fit.drawn])
    found = []
    for source in dict.fromkeys(where.tolist()):
        limit = limit_of(source)
        worst = max((_mean(errors[where == source]) for errors in fit.left_out.values()), default=0.0)
        if limit is not None and worst > limit[0]:
            found.append(f"{source} ({percent(worst)}, limit {percent(limit[0])})")
    return ["", "Beyond the limit of left-out mean errors, whatever the figures (why: "
            f"[validation.md](validation.md)): {', '.join(found)}."] if found else []


def verdict(fit: Fit) -> str:
    """What to take from it, in words."""
    drawn = list(fit.drawn)
    said = ", ".join(f"{percent(_mean(errors), digits=2)} ({by})" for by, errors in fit.left_out.items())
    text = [f"With all figures fitted the sample's mean error is {percent(_mean(fit.after[drawn]), digits=2)}, left "
            f"out {said}; with the profiles' own values {percent(_mean(fit.before[drawn]), digits=2)}."]
    ends = [".".join(e.figure) for e in fit.estimates if e.at_end and e.runs]
    if ends:
        text.append(f"At an end of their range: {', '.join(ends)}.")
    if not fit.taken:
        text.append("No figure improves what was left out by more than noise from inside its range: the profiles keep "
                    "their values.")
        return " ".join(text)
    values = ", ".join(f"{'.'.join(e.figure)} = {short(fit.taken[e.figure], e.unit)}" for e in fit.estimates
                       if e.figure in fit.taken)
    harmed = worse_sources(fit)
    text.append(f"Recommended, fitted by themselves: {values}; with each source left out the sample's mean error is "
                f"{percent(_mean(fit.taken_left_out), digits=2)}"
                + (f", but {', '.join(harmed)} get worse by more than half a point." if harmed else
                   ", and no source gets worse by more than half a point."))
    return " ".join(text)


def worse_sources(fit: Fit) -> list[str]:
    """Sources of the sample whose left-out mean error with the recommended figures is higher by half a point."""
    where = np.array([fit.rows[i].source for i in fit.drawn])
    before = fit.before[list(fit.drawn)]
    return [s for s in dict.fromkeys(where.tolist())
            if _mean(fit.taken_left_out[where == s]) > _mean(before[where == s]) + 0.005]


def short(value: float, unit: str, digits: int = 3) -> str:
    """A value with its unit: seconds as µs or ms, whatever they are per; factors as they are."""
    if abs(value) < 1e-12:
        return "0"
    value = float(f"{value:.{digits}g}")
    if unit.split(" ")[0] != "s":
        return f"{value:g}"
    return f"{1e6 * value:g} µs" if abs(value) < 1e-3 else f"{1e3 * value:g} ms"


def _range(estimate: Estimate) -> str:
    low, high = (short(end, estimate.unit) for end in (estimate.low, estimate.high))
    same = low.split(" ")[1:] == high.split(" ")[1:]
    return f"{low.split(' ')[0] if same else low} to {high}"


def _gain(estimate: Estimate) -> str:
    noise = percent(estimate.gain_error, digits=2) if np.isfinite(estimate.gain_error) else "?"
    return f"{percent(estimate.gain, signed=True, digits=2)} ± {noise}"


def _cell(limit: tuple[float, float | None] | None, brief: bool) -> str:
    if limit is None:
        return "–"
    mean, p90 = limit
    return percent(mean) if brief or p90 is None else f"{100 * mean:.1f} / {percent(p90)}"


def _mean(errors: Array) -> float:
    return float(np.abs(errors).mean())


def _spread(errors: Array) -> str:
    if not len(errors):
        return "–"
    return f"{100 * _mean(errors):.1f} / {percent(float(np.percentile(np.abs(errors), 90)))}"


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(header) + " |", "|---" * len(header) + "|",
            *("| " + " | ".join(row) + " |" for row in rows)]
