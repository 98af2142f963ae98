"""The arithmetic of `drystep fit`: robust least squares on slopes, what is left out, what a figure gains.

Errors depend on free figures almost linearly within their ranges, so everything here works on the errors' slopes; what
the figures found really give is simulated by `sim.validation.fit.fit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.validation.fit.trials import Array, Row

#: Errors from which a residual counts less and less (soft L1's scale): memory pressure and bad runs are no host's time.
SCALE = 0.03
#: Widths of a range per standard deviation of what is known of a figure beforehand: the range holds 95% of it.
_DEVIATIONS = 4.0
#: Gains count where they are above zero with this confidence for all figures together, and a figure within this share
#: of its range from an end is not found.
SURE, _END = 0.95, 0.05

#: Change of an error over a figure's whole range from which the figure has a say in it.
_TOUCH = 1e-4


@dataclass(frozen=True)
class Problem:
    """Errors of rows that depend on figures as `errors + slopes (x - at)`.

    Attributes:
        errors: shape (rows,). slopes: (rows, figures). at: figures the errors are of.
        start, low, high: the figures' own values and their ranges.
        rows: what each error is of.
    """

    errors: Array
    slopes: Array
    at: Array
    start: Array
    low: Array
    high: Array
    rows: tuple[Row, ...]

    def errors_at(self, x: Array, keep: Array | None = None) -> Array:
        """Errors (of the rows kept) with other figures."""
        these = slice(None) if keep is None else keep
        return np.asarray(self.errors[these] + self.slopes[these] @ (x - self.at))

    def touched(self, figure: int) -> NDArray[np.bool_]:
        """Mask of the rows whose error the figure can change by at least `_TOUCH`."""
        return np.asarray(np.abs(self.slopes[:, figure]) * (self.high - self.low)[figure] > _TOUCH)

    def only(self, figure: int) -> Problem:
        """With one free figure, the others at their own values, on the rows that it changes."""
        base = self.errors_at(np.where(np.arange(len(self.at)) == figure, self.at, self.start))
        touched = self.touched(figure)
        one = slice(figure, figure + 1)
        return Problem(base[touched], self.slopes[touched, one], self.at[one], self.start[one], self.low[one],
                       self.high[one], tuple(r for r, kept in zip(self.rows, touched, strict=True) if kept))

    def free(self, figures: Sequence[int]) -> Problem:
        """With these figures free and the others at their own values."""
        chosen = np.isin(np.arange(len(self.at)), figures)
        base = self.errors_at(np.where(chosen, self.at, self.start))
        return Problem(base, self.slopes[:, chosen], self.at[chosen], self.start[chosen], self.low[chosen],
                       self.high[chosen], self.rows)


def weights_of(rows: Sequence[Row]) -> Array:
    """Weights by which a source of n rows counts like √n: rows of one source share most of their errors' causes."""
    count = {source: sum(r.source == source for r in rows) for source in {r.source for r in rows}}
    return np.array([1.0 / np.sqrt(count[r.source]) for r in rows])


def solve(problem: Problem, keep: Array | None = None) -> Array:
    """The figures within their ranges with the least robust sum of squares (soft L1: Triggs et al., Bundle Adjustment,
    2000, as in scipy's `least_squares`), to three digits.

    A figure's own value counts as one more row (an error of `SCALE` for each standard deviation off it, a quarter of
    its range): rows that say nothing of a figure leave it alone.

    Args:
        keep: rows to use, a mask; default all.
    """
    from scipy.optimize import least_squares

    these = np.ones(len(problem.errors), dtype=bool) if keep is None else keep
    roots = np.sqrt(weights_of([r for r, kept in zip(problem.rows, these, strict=True) if kept]))
    width = problem.high - problem.low

    def residuals(u: Array) -> Array:
        x = problem.low + u * width
        known = SCALE * _DEVIATIONS * (x - problem.start) / width
        return np.concatenate([roots * problem.errors_at(x, these), known])
    first = np.clip((problem.at - problem.low) / width, 0.01, 0.99)
    found = least_squares(residuals, first, bounds=(0.0, 1.0), loss="soft_l1", f_scale=SCALE, ftol=1e-12, xtol=1e-12,
                          gtol=1e-12)
    return np.array([float(f"{x:.3g}") for x in problem.low + found.x * width])


def cost(errors: Array, rows: Sequence[Row]) -> float:
    """The robust sum of squares that `solve` makes least, without what is known beforehand."""
    return float(SCALE**2 * np.sum(2 * (np.sqrt(1 + weights_of(rows) * (errors / SCALE) ** 2) - 1)))


def folds(problem: Problem, by: str) -> dict[str, tuple[Array, Array]]:
    """(mask of its rows, figures estimated without them) of every source, cluster or model size.

    A group that is all rows leaves the figures at their own values.
    """
    groups = np.array([row.group(by) for row in problem.rows])
    found = {}
    for name in dict.fromkeys(groups.tolist()):
        out = groups == name
        found[name] = (out, problem.start if out.all() else solve(problem, ~out))
    return found


def jackknife(estimates: Sequence[Array]) -> Array:
    """Standard errors of an estimate from those with one group left out each (Efron & Tibshirani 1993, chapter 11)."""
    table = np.array(estimates)
    count = len(table)
    return np.asarray(np.sqrt((count - 1) / count * ((table - table.mean(axis=0)) ** 2).sum(axis=0)))


def gain(before: Array, after: Array, rows: Sequence[Row]) -> tuple[float, float]:
    """By how much the mean |error| falls, and the standard error of that: sources are the independent draws.

    Sources count by the root of their rows. With fewer than two the standard error is infinite: nothing was left out.
    """
    where = np.array([row.source for row in rows])
    names = list(dict.fromkeys(where.tolist()))
    fall = np.array([(np.abs(before) - np.abs(after))[where == name].mean() for name in names])
    share = np.sqrt([float((where == name).sum()) for name in names])
    share /= share.sum()
    mean = float(share @ fall)
    if len(names) < 2:
        return mean, float("inf")
    return mean, float(np.sqrt(len(names) / (len(names) - 1) * np.sum((share * (fall - mean)) ** 2)))


def gain_alone(problem: Problem, figure: int) -> tuple[float, float]:
    """`gain` of one figure by itself on the rows that it changes, each source's errors with the value that the other
    sources ask for."""
    alone = problem.only(figure)
    if not len(alone.errors):
        return 0.0, float("inf")
    after = np.empty(len(alone.errors))
    for out, x in folds(alone, "source").values():
        after[out] = alone.errors_at(x, out)
    return gain(alone.errors_at(alone.start), after, alone.rows)


def sure(fall: float, error: float, sources: int, tests: int = 1) -> bool:
    """Whether a gain is more than noise: Student's t test (1908) with the sources as draws.

    Args:
        tests: figures that are judged at once; of twenty that do nothing one would pass a test of its own
            (Bonferroni's correction: Dunn, Multiple Comparisons among Means, 1961).
    """
    from scipy.stats import t

    return sources > 1 and bool(fall > t.ppf(1 - (1 - SURE) / 2 / tests, sources - 1) * error)


def at_end(value: float, low: float, high: float) -> bool:
    """Whether a figure stands so near an end of its range, in orders of magnitude, that the range found it, not the
    data."""
    place = np.log(value / low) / np.log(high / low) if low > 0 else (value - low) / (high - low)
    return not _END < place < 1 - _END
