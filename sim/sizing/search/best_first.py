"""Best-first search with certified lower bounds: the answer of exhaustive search, from few evaluations.

Rows are evaluated in order of their bound, in rounds of a fixed size, until the next bound exceeds the worst of the
best found: no row left can then do better. A search that lasts evaluates rows out of their turn as well, a round for
every round, where its caller expects something better: they do not make it end sooner, but have a good row found long
before it ends. Rounds do not depend on how many workers evaluate them, so neither does
what is evaluated. (Branch and bound with best-first order: Lawler and Wood, Operations Research 14(4), 1966.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
#: Values of rows, in their order; inf = impossible, or does not fit.
Evaluate = Callable[[Sequence[int]], Sequence[float]]

#: Asked with the rows about to be evaluated: bounds of all rows anew, where theirs could be tightened, else None.
Tighten = Callable[[Sequence[int]], Floats | None]

#: Asked between rounds with what was found so far: rows worth an evaluation out of turn, and bounds of all rows anew
#: where it had some tightened for that, else None.
Aside = Callable[["Found"], tuple[Sequence[int], Floats | None]]

#: Rounds before rows are tried out of turn: most searches have ended by then.
PATIENCE = 6
#: Rows sorted at once.
_SORTED = 20_000
#: Rows evaluated at once. Many enough for a machine's workers, few enough that little is evaluated in vain.
ROUND = 8


@dataclass
class Found:
    """What a search found.

    Attributes:
        best: (value, row) of the best, ascending; of equal values the lower row first.
        evaluated: rows that were evaluated, in order.
        values: of those, by row.
        next_bound: lowest bound that was left, inf if none: no row left is better.
        complete: whether the search came to its end; else the best may be off by what `next_bound` allows.
    """

    best: list[tuple[float, int]] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)
    values: dict[int, float] = field(default_factory=dict)
    next_bound: float = math.inf
    complete: bool = True

    def add(self, new: Sequence[tuple[float, int]], top: int) -> None:
        """Take in values and rows that were found in another way."""
        self.evaluated += [row for _, row in new]
        self.values.update((row, value) for value, row in new)
        self.best = sorted([*self.best, *(one for one in new if math.isfinite(one[0]))])[:top]

    @property
    def gap(self) -> float:
        """How much better than the best an unevaluated row could be, as a share of the best."""
        if self.complete or not self.best:
            return 0.0 if self.complete else math.inf
        return max(0.0, 1.0 - self.next_bound / self.best[0][0])

    @property
    def proven(self) -> int:
        """Rows of `best`, from the first on, that no unevaluated row can be better than."""
        return len(self.best) if self.complete else sum(value <= self.next_bound for value, _ in self.best)


def search(bounds: Floats, evaluate: Evaluate, top: int = 1, *, known: dict[int, float] | None = None,
           stop: Callable[[], bool] = lambda: False, limit: float = math.inf, round_size: int = ROUND,
           tighten: Tighten = lambda rows: None, first: Sequence[int] = (), aside: Aside | None = None,
           patience: int = PATIENCE) -> Found:
    """The `top` best rows.

    Args:
        bounds: of each row, never above its value; inf rules a row out. Shape (rows,).
        evaluate: values of rows.
        known: values found before, used and extended.
        stop: asked between rounds; True ends the search early.
        limit: rows of higher value are of no interest.
        tighten: bounds that cost more to work out, asked for only where the search comes to.
        first: rows evaluated before all others, whatever their bounds.
        aside: rows to evaluate between rounds, from round `patience` on.
    """
    values = known if known is not None else {}
    found, at, rounds = Found(), 0, 0

    def take(rows: list[int]) -> None:
        new = [row for row in rows if row not in values]
        values.update(zip(new, evaluate(new), strict=True))
        found.evaluated += rows
        found.values.update((row, values[row]) for row in rows)
        better = [(values[row], row) for row in rows if values[row] <= limit and math.isfinite(values[row])]
        found.best = sorted([*found.best, *better])[:top]

    take(list(first))
    bounds = _without(bounds, found.evaluated)
    order, more = _ordered(bounds, limit)
    while at < len(order) or more:
        threshold = found.best[top - 1][0] if len(found.best) >= top else limit
        if at == len(order):
            bounds, at = _without(bounds, found.evaluated), 0
            order, more = _ordered(bounds, limit)
            continue
        found.next_bound = float(bounds[order[at]])
        if found.next_bound > threshold:
            break
        if stop():
            found.complete = False
            break
        batch = order[at:at + round_size]
        rows = [row for row in batch.tolist() if bounds[row] <= threshold and row not in found.values]
        if (tighter := tighten(rows)) is not None:
            bounds, at = _without(tighter, found.evaluated), 0
            order, more = _ordered(bounds, limit)
            continue
        take(rows)
        at, rounds = at + len(batch), rounds + 1
        if aside is not None and rounds >= patience:
            out_of_turn, anew = aside(found)
            take(list(out_of_turn))
            if anew is not None:
                bounds, at = _without(anew, found.evaluated), 0
                order, more = _ordered(bounds, limit)
    else:
        found.next_bound = math.inf
    return found


def _ordered(bounds: Floats, limit: float) -> tuple[npt.NDArray[np.int64], bool]:
    """Rows of interest, the lowest bound first, of equal bounds the lower row; whether there are more behind them."""
    candidates = np.flatnonzero((bounds <= limit) & np.isfinite(bounds))
    more = len(candidates) > _SORTED
    if more:
        lowest = bounds[candidates]
        candidates = candidates[lowest <= np.partition(lowest, _SORTED)[_SORTED]]
    order: npt.NDArray[np.int64] = candidates[np.argsort(bounds[candidates], kind="stable")]
    return order, more


def _without(bounds: Floats, rows: Sequence[int]) -> Floats:
    found = bounds.copy()
    found[rows] = np.inf
    return found
