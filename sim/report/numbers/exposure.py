"""Where the step goes: a rank's time split into computing, waiting for communication, bubbles and the host.

Interval arithmetic on one time axis. Every instant of the step belongs to exactly one row of the breakdown, so the rows
sum to the step time. An instant is given to the first of these that is going on:

1. a kernel or copy kernel on the compute stream;
2. nothing there while the host sets the pace (`sim.report.numbers.behind`), whatever moves: the host is late;
3. a collective that moves data (exposed communication; equal shares when several move at once);
4. a copy between host and device, or an optimizer on the CPU (offload);
5. a kernel on another stream, e.g. the casts of a gathering stream;
6. a collective that was issued and has not started: it waits for other ranks. A send or recv then is a pipeline bubble,
   any other collective is exposed communication. At the end of a step, the sends and receives of the next one may be
   issued (`waits_between`): a stage that is through waits for the others then;
7. nothing: the host is late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sim.report.numbers.columns import Window

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Spans:
    """Intervals [start_s, end_s), shape (n,), each belonging to the row `key` (n,) of `keys` rows."""

    start_s: Floats
    end_s: Floats
    key: Ints
    keys: int

    @classmethod
    def none(cls) -> Spans:
        """No interval of a single row."""
        return cls(np.zeros(0), np.zeros(0), np.zeros(0, dtype=np.int64), 1)


@dataclass(frozen=True, slots=True)
class Axis:
    """The step cut at every boundary: `cuts` (m + 1,) seconds, `weight_s` (m,) length of each piece times how often it
    happens in the step."""

    cuts: Floats
    weight_s: Floats


def axis(layers: Sequence[Spans], step_time_s: float, windows: Sequence[Window] = ()) -> Axis:
    """Cut [0, step_time_s) wherever a span starts or ends.

    Args:
        layers: all spans that `split` will be asked about.
        windows: stretches that stand for the hidden ones right behind them.
    """
    hidden = [(w.end_s, w.end_s + w.copies * (w.end_s - w.start_s)) for w in windows]
    edges = [np.array([0.0, step_time_s])]
    edges += [e for layer in layers for e in (layer.start_s, layer.end_s)]
    edges += [np.array([w.start_s, *h]) for w, h in zip(windows, hidden, strict=True)]
    cuts = np.sort(np.clip(np.concatenate(edges), 0.0, step_time_s))
    cuts = cuts[np.concatenate(([True], np.diff(cuts) > 0))]  # np.unique would import numpy.ma, 25 ms of start-up
    weight = np.diff(cuts)
    middle = (cuts[:-1] + cuts[1:]) / 2
    times = np.ones_like(weight)
    for window, (start, end) in zip(windows, hidden, strict=True):
        times[(middle >= window.start_s) & (middle < window.end_s)] += window.copies
        times[(middle >= start) & (middle < end)] = 0.0
    return Axis(cuts, weight * times)


def split(on: Axis, layers: Sequence[Spans]) -> tuple[list[Floats], float]:
    """Seconds of the step given to every row of every layer, earlier layers first, and what is left over.

    Returns:
        per layer an array of shape (keys,), and the seconds in which no layer had a span.
    """
    left = on.weight_s.copy()
    shares = []
    for layer in layers:
        rows, active = _active(on, layer)
        total = active.sum(axis=0)
        busy = total > 0
        share = np.zeros(layer.keys)
        share[rows] = active[:, busy] @ (left[busy] / total[busy])
        shares.append(share)
        left[busy] = 0.0
    return shares, float(left.sum())


def owner(on: Axis, layers: Sequence[Spans]) -> Ints:
    """Which layer every piece of the axis is given to by the order above, shape (pieces,); `len(layers)` for none."""
    found = np.full(len(on.weight_s), len(layers), dtype=np.int64)
    for number in range(len(layers) - 1, -1, -1):
        found[_active(on, layers[number])[1].sum(axis=0) > 0] = number
    return found


def waits_between(issued_s: Floats, start_s: Floats, key: Ints, keys: int, step_time_s: float) -> Spans:
    """Sends and receives that were issued and have not begun, and those of the next step, as steady as this one, that
    the host issues before this one ends.

    Args:
        issued_s, start_s: shape (n,), counted from the beginning of the step; negative in the step before.
    """
    ahead = issued_s < 0
    return Spans(np.concatenate((issued_s, issued_s[ahead] + step_time_s)),
                 np.concatenate((start_s, start_s[ahead] + step_time_s)), np.concatenate((key, key[ahead])), keys)


def _active(on: Axis, layer: Spans) -> tuple[Ints, Floats]:
    """The rows that have a span, and how many spans of each cover each piece of the axis, shape (rows, pieces).

    Of the segments that the stages of a pipeline share, one stage runs a few.
    """
    pieces = len(on.weight_s)
    used = np.bincount(layer.key, minlength=layer.keys) > 0
    rows, row = np.flatnonzero(used), (np.cumsum(used) - 1)[layer.key]
    change = np.zeros((len(rows), pieces + 1))
    first = np.searchsorted(on.cuts, np.clip(layer.start_s, on.cuts[0], on.cuts[-1]))
    last = np.searchsorted(on.cuts, np.clip(layer.end_s, on.cuts[0], on.cuts[-1]))
    np.add.at(change, (row, first), 1.0)
    np.add.at(change, (row, last), -1.0)
    return rows, np.cumsum(change, axis=1)[:, :pieces]
