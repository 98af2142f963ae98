"""Whole sites left out in turn: the error of each sweep when the figures are fitted to every other cluster's sweeps."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from sim.calibration.nccl.figures import Parameters
from sim.calibration.nccl.solver import solve
from sim.calibration.nccl.sweeps import Sweep, load
from sim.network.figures import catalogue

#: Sites fitted at a time, each by a process of one thread.
_PROCESSES = 2


def without(site: str, sweeps: Sequence[Sweep]) -> dict[str, float]:
    """Errors of `site`'s sweeps by a fit to those of all others, begun at the priors: a fit that had seen the site
    would lead to the same valley. The catalogue of figures is left as it was."""
    before, parameters = dict(catalogue()), Parameters()
    solve([s for s in sweeps if s.site != site], parameters, np.zeros(len(parameters.names)), rounds=20)
    errors = {}
    for sweep in sweeps:
        if sweep.site == site:
            sweep.refresh()
            errors[sweep.id] = sweep.error()
    catalogue().update(before)
    for sweep in sweeps:
        sweep.refresh()
    return errors


def left_out(sites: Sequence[str], processes: int = _PROCESSES) -> dict[str, float]:
    """Errors of all sweeps of the project's own at `sites`, by id."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read by the processes below; two threads each would spin
    errors: dict[str, float] = {}
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for site, found in zip(sites, pool.map(_own_without, sites), strict=True):
            errors.update(found)
            print(f"{site}: {' '.join(f'{100 * error:.1f}' for error in found.values())}", file=sys.stderr, flush=True)
    return errors


def _own_without(site: str) -> dict[str, float]:
    return without(site, load())
