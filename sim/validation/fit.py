"""Estimates free figures of software profiles from published step times, and tests the estimate on what it left out.

`python -m sim.validation.fit [--cases N] [--out reports/fit.md]`. The figures are those that profiles mark as
estimated and give a range (`sim.software.free_figures`), at most eight a profile, shared by all profiles and eras that
inherit them. Nothing is written into a profile: a person does that, where the left-out errors improve too.

Errors depend on these figures almost linearly within their ranges. So the errors' slopes are simulated once, robust
least squares (soft L1: Triggs et al., Bundle Adjustment, 2000, as in scipy's `least_squares`) are solved on them, and
the same slopes serve for every group that is left out. What the fitted figures really give is then simulated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sim.catalog import folder
from sim.errors import Fault, UserError
from sim.software import free_figures, profile_names, trial
from sim.validation.cases import Case, expand, read
from sim.validation.predict import predict
from sim.validation.statistics import Record

Array = NDArray[np.float64]
#: A figure: the profile that states it, and the fact.
Figure = tuple[str, str]
#: Errors from which a residual counts less and less (soft L1's scale): memory pressure and bad runs are no host's time.
_SCALE = 0.03
#: Step of a slope, as a share of the figure's range.
_STEP = 0.25
#: Rounds of slopes: the second is taken at the first one's solution.
_ROUNDS = 2
_CHUNK = 4
_COMMAND = "python -m sim.validation.fit"


@dataclass(frozen=True, slots=True)
class Row:
    """A published run and what it can be left out with."""

    source: str
    name: str
    cluster: str
    parameters: float
    framework: str

    def group(self, by: str) -> str:
        """Its group when a source, a cluster or a model size is left out."""
        return {"source": self.source, "cluster": self.cluster, "model size": f"{self.parameters:.2g}"}[by]


@dataclass(frozen=True)
class Fit:
    """An estimate.

    Attributes:
        figures: what was free; start, low, high, found: their values and ranges, in that order.
        rows: the runs; before, after: their errors with the profiles' values and with `found`, both simulated.
        left_out: by what was left out, each run's error (on the slopes) with figures that never saw its group.
    """

    figures: tuple[Figure, ...]
    start: Array
    low: Array
    high: Array
    found: Array
    rows: tuple[Row, ...]
    before: Array
    after: Array
    left_out: Mapping[str, Array]


def free() -> dict[Figure, tuple[float, float, float]]:
    """(value, low, high) of every free figure of every profile."""
    found = {}
    for profile in profile_names():
        for figure, fact in free_figures(profile).items():
            assert fact.range is not None
            found[figure] = (float(fact.value), *fact.range)
    return found


def chosen(most: int) -> list[Case]:
    """Unmarked step times of the shipped cases, at most `most` of each source, evenly over its file."""
    found = []
    for path in expand([folder("scenarios") / "published"]):
        file = read(path)
        if file.kind == "training":
            good = [c for c in file.cases if c.quality is None and "step_time_s" in c.measured]
            places = {round(i * (len(good) - 1) / max(1, most - 1)) for i in range(min(most, len(good)))}
            found += [good[i] for i in sorted(places)]
    return found


def records_of(cases: Sequence[Case], values: Mapping[Figure, float], workers: int) -> list[Record]:
    """Records of the cases with other values of free figures."""
    chunks = [(list(cases[i:i + _CHUNK]), dict(values)) for i in range(0, len(cases), _CHUNK)]
    if workers == 1:
        return [r for chunk in chunks for r in _work(chunk)]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return [r for found in pool.map(_work, chunks) for r in found]


def _work(chunk: tuple[list[Case], dict[Figure, float]]) -> list[Record]:
    cases, values = chunk
    with trial(values):
        return [predict(case) for case in cases]


def solve(errors: Array, slopes: Array, weights: Array, at: Array, low: Array, high: Array) -> Array:
    """The figures within [low, high] whose errors `errors + slopes (x - at)` have the least robust sum of squares.

    Args:
        errors: shape (rows,). slopes: (rows, figures). weights: of the rows. at: figures the errors are of.
    """
    from scipy.optimize import least_squares

    width = high - low
    def residuals(u: Array) -> Array:
        return np.asarray(np.sqrt(weights) * (errors + slopes @ (low + u * width - at)))
    start = np.clip((at - low) / width, 0.01, 0.99)
    found = least_squares(residuals, start, bounds=(0.0, 1.0), loss="soft_l1", f_scale=_SCALE, ftol=1e-12,
                          xtol=1e-12, gtol=1e-12)
    return np.asarray(low + found.x * width)


def balanced(rows: Sequence[Row]) -> Array:
    """Weights by which every source counts like the square root of its rows, mean 1."""
    count = {source: sum(r.source == source for r in rows) for source in {r.source for r in rows}}
    weights = np.array([1.0 / np.sqrt(count[r.source]) for r in rows])
    return np.asarray(weights / weights.mean())


def fit(cases: Sequence[Case], workers: int) -> Fit:
    """Estimate all free figures on the cases.

    Raises:
        UserError: scipy is not there, or none of the cases is predicted.
    """
    table = free()
    figures = tuple(table)
    start, low, high = (np.array(column) for column in zip(*table.values(), strict=True))
    first = records_of(cases, {}, workers)
    kept = [i for i, r in enumerate(first) if "step_time_s" in r["error"]]
    if not kept:
        raise UserError(Fault("no case has a step time that is predicted"))
    cases = [cases[i] for i in kept]
    rows = tuple(_row(first[i]) for i in kept)

    def errors_at(x: Array) -> Array:
        found = records_of(cases, dict(zip(figures, x.tolist(), strict=True)), workers)
        return np.array([r["error"]["step_time_s"] for r in found])
    weights, at = balanced(rows), start
    before = errors = np.array([first[i]["error"]["step_time_s"] for i in kept])
    for _ in range(_ROUNDS):
        slopes = _slopes(errors_at, errors, at, low, high)
        here, base = at, errors
        at = solve(errors, slopes, weights, here, low, high)
        errors = errors_at(at)
    left_out = {by: _left_out(base, slopes, weights, here, low, high, [r.group(by) for r in rows])
                for by in ("source", "cluster", "model size")}
    return Fit(figures, start, low, high, at, rows, before, errors, left_out)


def _row(record: Record) -> Row:
    features = record["features"]
    return Row(record["file"].removesuffix(".yaml"), record["id"], str(record["cluster"]),
               float(features["parameters"]), str(features["framework"]))


def _slopes(errors_at: object, errors: Array, at: Array, low: Array, high: Array) -> Array:
    """Change of every error per unit of every figure, towards the wider side of its range."""
    assert callable(errors_at)
    columns = []
    for i in range(len(at)):
        step = _STEP * (high[i] - low[i])
        moved = at.copy()
        moved[i] += step if high[i] - at[i] > at[i] - low[i] else -step
        columns.append((errors_at(moved) - errors) / (moved[i] - at[i]))
    return np.column_stack(columns)


def _left_out(errors: Array, slopes: Array, weights: Array, at: Array, low: Array, high: Array,
              groups: Sequence[str]) -> Array:
    """Each row's error with figures estimated without its group."""
    names, found = np.array(groups), np.empty(len(errors))
    for name in dict.fromkeys(groups):
        out = names == name
        if out.all():
            found[out] = errors[out]
            continue
        x = solve(errors[~out], slopes[~out], weights[~out], at, low, high)
        found[out] = errors[out] + slopes[out] @ (x - at)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    from sim.validation.fit_report import markdown

    parser = argparse.ArgumentParser(prog=_COMMAND, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=16, help="most cases of a source")
    parser.add_argument("--out", type=Path, default=Path("reports/fit.md"), help="the report")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args(arguments)
    try:
        import scipy  # noqa: F401
    except ImportError:
        print("the fit needs scipy: pip install 'drystep[fit]'", file=sys.stderr)
        return 2
    if given.cases < 1 or given.workers < 1:
        print("--cases and --workers must be at least 1", file=sys.stderr)
        return 2
    found = fit(chosen(given.cases), given.workers)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(markdown(found, given.cases), encoding="utf-8")
    print(f"{len(found.rows)} cases; {given.out} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
