"""Robust least squares on the logarithms of times, with priors: what the fit of the network figures solves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sim.calibration.nccl.figures import Parameters
from sim.calibration.nccl.sweeps import Sweep

Floats = npt.NDArray[np.float64]
#: Residuals (logarithm) below this weigh by their square, above by their size: Huber's loss.
_HUBER = 0.015
#: Strength of the priors against one sweep's mean residual in units of `_HUBER`.
_PRIOR = 0.2
_STEP = 0.02


def residuals(sweeps: Sequence[Sweep]) -> Floats:
    """log(predicted / measured) of all fitted rows, one after another."""
    parts = []
    for sweep in sweeps:
        sweep.refresh()
        parts.append(np.log(sweep.predict_us() / sweep.measured_us)[sweep.fitted])
    return np.concatenate(parts)


def weights(sweeps: Sequence[Sweep]) -> Floats:
    """Of each row: every sweep counts the same whatever its rows, a site of many sweeps as the root of their number,
    sites that one source measured alike as the root of theirs."""
    per_site = Counter(sweep.site for sweep in sweeps)
    series = {sweep.site: sweep.series or sweep.site for sweep in sweeps}
    per_series = Counter(series.values())
    alike = {site: per_site[site] * per_series[name] for site, name in series.items()}
    return np.concatenate([np.full(int(s.fitted.sum()), 1.0 / max(1, s.fitted.sum()) / alike[s.site] ** 0.5)
                           for s in sweeps])


def solve(sweeps: Sequence[Sweep], parameters: Parameters, start: Floats, rounds: int = 8) -> Floats:
    """Shifts that fit `sweeps` best, starting at `start`: Gauss-Newton, reweighted for Huber's loss each round."""
    shifts, weight = start.copy(), weights(sweeps)
    spreads = np.array(parameters.spreads)
    parameters.apply(shifts)
    found = residuals(sweeps)
    active = [parameters.moved_by(sweep.reads()) for sweep in sweeps]
    damping = 0.01
    best = _loss(found, weight, shifts, spreads)
    jacobian = _jacobian(sweeps, parameters, shifts, found, active)
    for _ in range(rounds):
        robust = weight * np.minimum(1.0, _HUBER / np.maximum(np.abs(found), 1e-9)) / _HUBER ** 2
        prior = _PRIOR / spreads ** 2
        normal = jacobian.T @ (jacobian * robust[:, None])
        gradient = jacobian.T @ (robust * found) + prior * shifts
        for _ in range(5):
            step = np.linalg.solve(normal + np.diag(prior + damping * (np.diag(normal) + 1e-9)), -gradient)
            trial = shifts + np.clip(step, -0.7, 0.7)
            parameters.apply(trial)
            after = residuals(sweeps)
            loss = _loss(after, weight, trial, spreads)
            if loss < best:
                break
            damping *= 10
        else:
            break
        done = best - loss < 1e-4 * best
        shifts, found, best, damping = trial, after, loss, damping / 5
        if done:
            break
        jacobian = _jacobian(sweeps, parameters, shifts, found, active)
    parameters.apply(shifts)
    return shifts


def influence(sweeps: Sequence[Sweep], parameters: Parameters, shifts: Floats) -> dict[str, set[str]]:
    """Sites whose predictions a figure moves noticeably (a quarter of a percent on average for ten percent of it)."""
    found: dict[str, set[str]] = {}
    parameters.apply(shifts)
    base = residuals(sweeps)
    edges = np.cumsum([0, *(int(s.fitted.sum()) for s in sweeps)])
    for name in parameters.figures():
        moved = shifts.copy()
        moved[parameters.shifts_of(name)[0]] += 0.1
        parameters.apply(moved)
        change = np.abs(residuals(sweeps) - base)
        found[name] = {s.site for s, a, b in zip(sweeps, edges[:-1], edges[1:], strict=True)
                       if b > a and change[a:b].mean() > 0.0025}
    parameters.apply(shifts)
    return found


def _loss(found: Floats, weight: Floats, shifts: Floats, spreads: Floats) -> float:
    size = np.abs(found) / _HUBER
    huber = np.where(size <= 1, 0.5 * size ** 2, size - 0.5)
    return float((weight * huber).sum() + 0.5 * _PRIOR * ((shifts / spreads) ** 2).sum())


def _jacobian(sweeps: Sequence[Sweep], parameters: Parameters, shifts: Floats, found: Floats,
              active: Sequence[frozenset[int]]) -> Floats:
    """Change of every residual with every shift; `active`: of each sweep, the shifts its figures depend on."""
    columns = np.zeros((len(found), len(shifts)))
    edges = np.cumsum([0, *(int(s.fitted.sum()) for s in sweeps)])
    for i in range(len(shifts)):
        moved = shifts.copy()
        moved[i] += _STEP
        parameters.apply(moved)
        for k, sweep in enumerate(sweeps):
            if i in active[k]:
                rows = slice(edges[k], edges[k + 1])
                columns[rows, i] = (residuals([sweep]) - found[rows]) / _STEP
    parameters.apply(shifts)
    return columns
