"""Stretches of time as arrays: their union, and how much of others they cover."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def union(spans: Floats) -> Floats:
    """Disjoint stretches in order that cover the same; both of shape (n, 2), begin and end."""
    if not len(spans):
        return spans
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reached = np.maximum.accumulate(spans[:, 1])
    first = np.flatnonzero(np.concatenate(([True], spans[1:, 0] > reached[:-1])))
    last = np.append(first[1:], len(spans)) - 1
    return np.stack((spans[first, 0], reached[last]), axis=1)


def within(covered: Floats, begin: Floats, end: Floats) -> Floats:
    """Length of disjoint stretches in order, shape (n, 2), between each begin and end, shape (m,)."""
    if not len(covered):
        return np.zeros(len(begin))
    lengths = np.concatenate(([0.0], np.cumsum(covered[:, 1] - covered[:, 0])))

    def until(at: Floats) -> Floats:
        place = np.searchsorted(covered[:, 0], at, side="right") - 1
        known = np.maximum(place, 0)
        inside = np.clip(at - covered[known, 0], 0.0, covered[known, 1] - covered[known, 0])
        found: Floats = np.where(place < 0, 0.0, lengths[known] + inside)
        return found

    return until(end) - until(begin)
