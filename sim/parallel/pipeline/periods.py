"""Action lists written short: what repeats with its micro-batches moved on is one pattern and a count.

A steady pipeline rank does the same few actions again and again: one forward and one backward in 1F1B, 2·p·v actions
where chunks are interleaved. Lists of thousands of actions become a handful of patterns, and expanding them gives the
list back exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sim.parallel.pipeline.actions import Action

#: More than any micro-batch number: actions become integers, kind and chunk above, micro-batch below.
_MICROS = 1 << 32


class Run(NamedTuple):
    """Actions that are repeated.

    Attributes:
        pattern: the actions of the first repeat.
        step: by how much each repeat's micro-batches are above those of the one before.
        repeats: 1 or more.
    """

    pattern: tuple[Action, ...]
    step: int
    repeats: int


def periods(actions: Sequence[Action]) -> list[Run]:
    """The list as runs, found from the left: each takes the period that saves most."""
    if not actions:
        return []
    numbers: dict[tuple[str, int], int] = {}
    codes = np.array([numbers.setdefault((kind, chunk), len(numbers)) * _MICROS + micro
                      for kind, chunk, micro in actions], dtype=np.int64)
    places = {key: np.flatnonzero(codes // _MICROS == number) for key, number in numbers.items()}
    runs: list[Run] = []
    alone: list[Action] = []
    at = 0
    while at < len(actions):
        same = places[actions[at].kind, actions[at].chunk]
        period, repeats = _longest(codes, at, same[np.searchsorted(same, at) + 1:] - at)
        if repeats == 1:
            alone.append(actions[at])
            at += 1
            continue
        if alone:
            runs.append(Run(tuple(alone), 0, 1))
            alone = []
        runs.append(Run(tuple(actions[at:at + period]), actions[at + period].micro - actions[at].micro, repeats))
        at += period * repeats
    return [*runs, Run(tuple(alone), 0, 1)] if alone else runs


def expand(runs: Sequence[Run]) -> Iterator[Action]:
    """The actions of runs, in order."""
    for pattern, step, repeats in runs:
        for repeat in range(repeats):
            for kind, chunk, micro in pattern:
                yield Action(kind, chunk, micro + repeat * step)


def _longest(codes: np.ndarray, at: int, candidates: np.ndarray) -> tuple[int, int]:
    """Period and number of repeats from `at` that leave out most actions, (1, 1) if none leaves out two."""
    rest = len(codes) - at
    best, chosen = 1, (1, 1)
    for period in candidates[candidates * 2 <= rest].tolist():
        if rest - period <= best:  # longer periods leave out less
            break
        step = codes[at + period] - codes[at]
        if codes[at + 2 * period - 1] - codes[at + period - 1] != step:
            continue
        if codes[at + period + period // 2] - codes[at + period // 2] != step:
            continue
        moved = codes[at + period:] - codes[at:-period] != step
        alike = int(moved.argmax()) if moved.any() else rest - period
        left_out = alike // period * period
        if left_out > best:
            best, chosen = left_out, (period, 1 + alike // period)
    return chosen
