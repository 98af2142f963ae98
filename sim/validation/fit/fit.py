"""`drystep fit`: estimates free figures of software profiles from published step times and tests them on others.

The figures are those that profiles give a range (`sim.software.free_figures`), at most eight a profile, shared by all
profiles and eras that inherit them. Nothing is written into a profile: a person does that, where the left-out errors
improve too.

The errors' slopes are simulated once, on a sample of the runs; robust least squares are solved on them, corrected once
by what the solution really gives, and the same slopes serve for every group that is left out. What the report shows is
simulated: every run with the fitted figures, and every run of the sample with figures that never saw its group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sim.catalog import folder
from sim.errors import Fault, UserError, nearest
from sim.software import free_figures, profile_names
from sim.validation.cases.files import Case, expand, read
from sim.validation.corrections import corrected
from sim.validation.fit import solver
from sim.validation.fit.solver import Problem
from sim.validation.fit.trials import Array, Figure, Progress, Row, Trials, sample
from sim.validation.runner import worker_count

#: Step of a slope, as a share of the figure's range.
_STEP = 0.25
#: A gain smaller than a tenth of a point is left alone: published steps are stated to no more than that.
WORTH = 1e-3
#: Units of what the host does again and again, beside the GPU: it shows in a step only where the GPU waits for it.
_BESIDE = ("s per operator", "s per call")
#: What is left out.
GROUPS = ("source", "cluster", "model size")


@dataclass(frozen=True)
class Estimate:
    """One figure.

    Attributes:
        figure: profile and name; unit: of its values.
        own: the profile's value; low, high: its range.
        found: fitted together with all others; error: its standard error, sources left out in turn.
        runs, sources: of the sample, that the figure changes.
        gain: fall of the mean |error| when this figure alone is fitted, each source by the others' value; gain_error:
            standard error of that (infinite where fewer than two sources know the figure).
        tests: figures that are judged at once.
    """

    figure: Figure
    unit: str
    own: float
    low: float
    high: float
    found: float
    error: float
    runs: int
    sources: int
    gain: float
    gain_error: float
    tests: int = 1

    @property
    def at_end(self) -> bool:
        """Whether the range found it, not the data."""
        return solver.at_end(self.found, self.low, self.high)

    @property
    def recommended(self) -> bool:
        """Whether left-out errors fall by more than noise and by enough to matter, from inside the range."""
        return self.sure and self.gain >= WORTH and not self.at_end

    @property
    def sure(self) -> bool:
        """Whether the gain is more than noise."""
        return solver.sure(self.gain, self.gain_error, self.sources, self.tests)


@dataclass(frozen=True)
class Fit:
    """An estimate of all figures.

    Attributes:
        estimates: one per figure.
        rows: all runs; before, after: their errors with the profiles' values and with the fitted ones.
        drawn: places of the sample among them; left_out: by what was left out, the sample's errors with figures that
            never saw their group.
        nonlinear: largest difference between a left-out error and what the slopes said.
        taken: values of the recommended figures, fitted with all others at the profiles' values; taken_after: errors of
            all runs with them; taken_left_out: of the sample, each source by the others' values.
        unpredicted: runs that are not predicted. simulations: how many were run.
    """

    estimates: tuple[Estimate, ...]
    rows: tuple[Row, ...]
    before: Array
    after: Array
    drawn: tuple[int, ...]
    left_out: Mapping[str, Array]
    nonlinear: float
    taken: Mapping[Figure, float]
    taken_after: Array
    taken_left_out: Array
    unpredicted: int = 0
    simulations: int = 0

    def to_json(self) -> dict[str, Any]:
        """What `drystep fit --json` writes: figures, and every run with its errors."""
        place = {row: number for number, row in enumerate(self.drawn)}
        return {
            "figures": [{"profile": e.figure[0], "figure": e.figure[1], "unit": e.unit, "value": e.own,
                         "range": [e.low, e.high], "fitted": e.found, "standard_error": e.error, "runs": e.runs,
                         "sources": e.sources, "at_end": e.at_end, "gain": e.gain,
                         "gain_error": e.gain_error if np.isfinite(e.gain_error) else None,
                         "recommended": e.recommended, "taken": self.taken.get(e.figure)} for e in self.estimates],
            "runs": [{"source": row.source, "id": row.name, "unfitted": float(self.before[i]),
                      "fitted": float(self.after[i]),
                      **({"recommended": float(self.taken_after[i])} if self.taken else {}),
                      **({"left_out": {by: float(errors[place[i]]) for by, errors in self.left_out.items()}}
                         if i in place else {})} for i, row in enumerate(self.rows)],
            "unpredicted": self.unpredicted, "simulations": self.simulations,
            "unit": "errors are fractions: predicted / measured - 1"}


def free(only: Sequence[str] = ()) -> dict[Figure, tuple[float, float, float, str]]:
    """(value, low, high, unit) of every free figure of every profile, or of those named `profile.figure`.

    Raises:
        UserError: no figure of such a name.
    """
    found: dict[Figure, tuple[float, float, float, str]] = {}
    for profile in profile_names():
        for figure, fact in free_figures(profile).items():
            assert fact.range is not None
            found[figure] = (float(fact.value), *fact.range, fact.unit)
    names = {f"{profile}.{fact}": (profile, fact) for profile, fact in found}
    faults = [Fault(f"no free figure {name!r}; there are: {', '.join(names)}", "--figure", hint=nearest(name, names))
              for name in only if name not in names]
    if faults:
        raise UserError(faults)
    return {figure: found[figure] for figure in found if not only or ".".join(figure) in only}


def chosen(paths: Sequence[str] = ()) -> list[Case]:
    """Step times without a quality mark of case files; default the shipped ones.

    Raises:
        UserError: a file that is not there or no case file, or none of them holds such a step time.
    """
    files = [corrected(read(path)) for path in expand(list(paths) or [folder("scenarios") / "published"])]
    found = [case for file in files if file.kind == "training" for case in file.cases
             if case.quality is None and "step_time_s" in case.measured]
    if not found:
        raise UserError(Fault("no unmarked step time in these files", "CASES"))
    return found


def fit(cases: Sequence[Case], *, most: int = 10, workers: int | None = None, only: Sequence[str] = (),
        progress: Progress | None = None) -> Fit:
    """Estimate the free figures on the cases.

    Args:
        most: runs of a source that slopes are simulated of.
        workers: processes, default one per core; the result does not depend on it.
        only: figures to fit, as `profile.figure`; default all.

    Raises:
        UserError: scipy is not there, no case is predicted, no such figure.
    """
    try:
        import scipy  # noqa: F401
    except ImportError as error:
        raise UserError(Fault("the fit needs scipy", hint="pip install 'drystep[fit]'")) from error
    table = free(only)
    with Trials(cases, worker_count(workers, len(cases)), progress) as trials:
        trials.start()
        drawn = sample(trials.rows, trials.events, most)
        if not drawn:
            raise UserError(Fault("every run is too large to be simulated with every figure"))
        for what in ("check", *(f"left out: {by}" for by in GROUPS)):
            trials.plan(what, len(drawn))
        trials.plan("fitted", len(trials.rows))
        return _Fitting(trials, table, drawn).result()


class _Fitting:
    """One fit on the runs that `trials` knows."""

    def __init__(self, trials: Trials, table: Mapping[Figure, tuple[float, float, float, str]],
                 drawn: Sequence[int]) -> None:
        self.trials, self.drawn = trials, list(drawn)
        self.figures, self.units = tuple(table), [line[3] for line in table.values()]
        start, low, high = (np.array([line[i] for line in table.values()]) for i in range(3))
        rows = tuple(trials.rows[i] for i in drawn)
        errors = trials.own[self.drawn]
        self.problem = Problem(errors, self._slopes(start, low, high), start, start, low, high, rows)

    def result(self) -> Fit:
        found = self._found()
        left_out, nonlinear, errors = self._left_out()
        made = [self._estimate(i, found[i], errors[i]) for i in range(len(self.figures))]
        tests = max(1, sum(bool(np.isfinite(one.gain_error)) for one in made))
        estimates = tuple(replace(one, tests=tests) for one in made)
        after = self._everywhere(self._values(found))
        taken, taken_after, taken_left_out = self._taken([i for i, e in enumerate(estimates) if e.recommended])
        return Fit(estimates, self.trials.rows, self.trials.own, after, tuple(self.drawn), left_out, nonlinear, taken,
                   taken_after, taken_left_out, self.trials.unpredicted, self.trials.simulations)

    def _slopes(self, start: Array, low: Array, high: Array) -> Array:
        """Change of every error per unit of every figure, towards the wider side of its range; (rows, figures)."""
        moved = start + _STEP * (high - low) * np.where(high - start >= start - low, 1, -1)
        late = self._waiting({figure: float(moved[i]) for i, figure in enumerate(self.figures)
                              if self.units[i] in _BESIDE and moved[i] > start[i]})
        asked, spots = [], []
        for i, figure in enumerate(self.figures):
            values = {figure: float(moved[i])}
            beside = self.units[i] in _BESIDE and moved[i] > start[i]
            for place in self.trials.touched(self.drawn, values):
                if not beside or place in late:
                    asked.append((place, values))
                    spots.append((self.drawn.index(place), i, moved[i] - start[i]))
        slopes = np.zeros((len(self.drawn), len(self.figures)))
        for (row, column, step), (place, _), error in zip(spots, asked, self.trials.errors("slopes", asked),
                                                          strict=True):
            slopes[row, column] = (error - self.trials.own[place]) / step
        return slopes

    def _waiting(self, values: Mapping[Figure, float]) -> set[int]:
        """The runs of the sample that change when all of the host's repeated work takes longer at once: the others
        need not be simulated with each figure of it."""
        places = self.trials.touched(self.drawn, values)
        errors = self.trials.errors("host", [(place, values) for place in places])
        own = self.trials.own[places]
        return {place for place, error, before in zip(places, errors, own, strict=True) if abs(error - before) > 1e-9}

    def _found(self) -> Array:
        """The figures: the slopes' solution, and that after the errors which it gives; the better of both."""
        best, at = self.problem, self.problem
        least = solver.cost(best.errors, best.rows)
        for _ in range(2):
            x = solver.solve(at)
            at = replace(at, errors=self._drawn_errors("check", x), at=x)
            now = solver.cost(at.errors, at.rows)
            if now < least:
                best, least = at, now
        self.problem = best
        return best.at

    def _left_out(self) -> tuple[dict[str, Array], float, Array]:
        """Errors of the sample by what was left out, the slopes' largest mistake, standard errors of the figures."""
        found, mistake = {}, 0.0
        spread = np.zeros(len(self.figures))
        for by in GROUPS:
            groups = solver.folds(self.problem, by)
            asked, places = [], []
            for out, x in groups.values():
                values = self._values(x)
                asked += [(self.drawn[i], values) for i in np.flatnonzero(out)]
                places += np.flatnonzero(out).tolist()
            errors = np.empty(len(self.drawn))
            errors[places] = self.trials.errors(f"left out: {by}", asked)
            said = np.empty(len(self.drawn))
            for out, x in groups.values():
                said[out] = self.problem.errors_at(x, out)
            mistake = max(mistake, float(np.abs(errors - said).max()))
            found[by] = errors
            if by == "source":
                spread = solver.jackknife([x for _, x in groups.values()])
        return found, mistake, spread

    def _estimate(self, i: int, found: float, error: float) -> Estimate:
        touched = self.problem.touched(i)
        sources = {row.source for row, yes in zip(self.problem.rows, touched, strict=True) if yes}
        fall, noise = solver.gain_alone(self.problem, i)
        return Estimate(self.figures[i], self.units[i], float(self.problem.start[i]), float(self.problem.low[i]),
                        float(self.problem.high[i]), float(found), float(error), int(touched.sum()), len(sources), fall,
                        noise)

    def _taken(self, which: Sequence[int]) -> tuple[dict[Figure, float], Array, Array]:
        """The recommended figures fitted by themselves; errors of all runs, and the sample's, each source left out."""
        if not which:
            return {}, self.trials.own, self.trials.own[self.drawn]
        problem = self.problem.free(which)
        names = [self.figures[i] for i in which]
        values = dict(zip(names, solver.solve(problem).tolist(), strict=True))
        asked, places = [], []
        for out, x in solver.folds(problem, "source").values():
            given = dict(zip(names, x.tolist(), strict=True))
            asked += [(self.drawn[i], given) for i in np.flatnonzero(out)]
            places += np.flatnonzero(out).tolist()
        errors = np.empty(len(self.drawn))
        errors[places] = self.trials.errors("recommended, left out", asked)
        return values, self._everywhere(values, "recommended"), errors

    def _values(self, x: Array) -> dict[Figure, float]:
        return dict(zip(self.figures, x.tolist(), strict=True))

    def _drawn_errors(self, what: str, x: Array) -> Array:
        values = self._values(x)
        return self.trials.errors(what, [(place, values) for place in self.drawn])

    def _everywhere(self, values: Mapping[Figure, float], what: str = "fitted") -> Array:
        return self.trials.errors(what, [(place, values) for place in range(len(self.trials.rows))])
