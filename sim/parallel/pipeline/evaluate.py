"""When the actions of a schedule end if all stages are alike: for choosing orders and closed forms, not for results.

A rank runs its list in order. A forward waits for the forward of the stage before it, a backward for that of the stage
behind it, each a transfer later; transfers take no time of the ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from sim.parallel.pipeline.actions import Action, Costs, Places

#: Pipeline rank, kind, chunk, micro-batch.
_Result = tuple[int, str, int, int]


def durations(costs: Costs, splits: bool) -> dict[str, float]:
    """Time of each kind of action; a backward that is not split has the weights' part in it."""
    return {"F": costs.forward, "B": costs.backward + (0.0 if splits else costs.weight), "W": costs.weight}


def evaluate(orders: Sequence[Sequence[Action]], where: Places, costs: Costs,
             together: Sequence[Sequence[int]] = ()) -> list[list[float]]:
    """Time at which each action of each rank ends, from 0: shape of `orders`.

    Args:
        costs: of one chunk; "B" holds the weights' part if `orders` has no "W".
        together: for each rank the positions of forwards that run as one with the "B" and "W" behind them: they begin
            when all inputs are there, and pass results on when all is done.

    Raises:
        ValueError: the orders block each other for ever, or weights' gradients come before their backward.
    """
    takes = durations(costs, any(action.kind == "W" for actions in orders for action in actions))
    tied = [frozenset(own) for own in together] or [frozenset[int]()] * len(orders)
    ended: dict[_Result, float] = {}
    waiting: dict[_Result, int] = {}
    finish: list[list[float]] = [[] for _ in orders]
    runnable = deque(range(len(orders)))
    while runnable:
        rank = runnable.popleft()
        actions, ends = orders[rank], finish[rank]
        at = ends[-1] if ends else 0.0
        while len(ends) < len(actions):
            i = len(ends)
            group = actions[i:i + (3 if i in tied[rank] else 1)]
            for kind, chunk, micro in group[:2]:
                need = _need(where, rank, kind, chunk, micro)
                came = 0.0 if need is None else ended.get(need)
                if need is not None and came is None:
                    waiting[need] = rank
                if came is None or (kind == "B" and (rank, "F", chunk, micro) not in ended):
                    break
                if need is not None and need[0] != rank:
                    came += costs.transfer
                at = max(at, came)
            else:
                at += sum(takes[action.kind] for action in group)
                for kind, chunk, micro in group:
                    own = (rank, kind, chunk, micro)
                    ended[own] = at
                    ends.append(at)
                    if own in waiting:
                        runnable.append(waiting.pop(own))
                continue
            break
    for rank, (actions, ends) in enumerate(zip(orders, finish, strict=True)):
        if len(ends) < len(actions):
            raise ValueError(f"pipeline rank {rank} waits for ever at {actions[len(ends)]}")
    return finish


def _need(where: Places, rank: int, kind: str, chunk: int, micro: int) -> _Result | None:
    """Whose result an action takes, besides that of its own chunk's forward; None for a micro-batch's first forward and
    its first backward."""
    if kind == "W":
        return rank, "B", chunk, micro
    source = (where.before if kind == "F" else where.after)[rank][chunk]
    return None if source is None else (source.rank, kind, source.chunk, micro)


def step_time(orders: Sequence[Sequence[Action]], where: Places, costs: Costs) -> float:
    """Time from the first action of any rank to the last of any: all ranks agree before the next step begins."""
    return max(ends[-1] for ends in evaluate(orders, where, costs) if ends)


def span(orders: Sequence[Sequence[Action]], where: Places, costs: Costs) -> float:
    """Longest time between a rank's own first and last action.

    It is the step where no rank waits for all others at its end, and steps slide into each other (Qi et al. 2023, arXiv
    2401.10241, section 4: optimizer synchronisation replaced by validation after the update).
    """
    takes = durations(costs, any(action.kind == "W" for actions in orders for action in actions))
    return max(ends[-1] - ends[0] + takes[actions[0].kind]
               for actions, ends in zip(orders, evaluate(orders, where, costs), strict=True) if actions)


def in_flight(actions: Sequence[Action], kept_for_weights: float = 1.0) -> float:
    """Largest number of chunks' activations that a rank holds at once.

    Args:
        kept_for_weights: share of a micro-batch's activations that stays between "B" and "W".
    """
    keeps = kept_for_weights if any(action.kind == "W" for action in actions) else 0.0
    change = {"F": 1.0, "B": keeps - 1.0, "W": -keeps}
    held = most = 0.0
    for action in actions:
        held += change[action.kind]
        most = max(most, held)
    return most
