"""When the actions of a schedule end if every stage is alike: for choosing orders and for closed forms, not for results.

A rank runs its list in order. A forward waits for the forward of the stage before it, a backward for that of the stage
behind it, each a transfer later; transfers take no time of the ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from sim.parallel.pipeline.actions import Action, Chunk, Costs, Places


def durations(costs: Costs, splits: bool) -> dict[str, float]:
    """Time of each kind of action; a backward that is not split has the weights' part in it."""
    return {"F": costs.forward, "B": costs.backward + (0.0 if splits else costs.weight), "W": costs.weight}


def evaluate(orders: Sequence[Sequence[Action]], where: Places, costs: Costs) -> list[list[float]]:
    """Time at which each action of each rank ends, from 0: shape of `orders`.

    Args:
        costs: of one chunk; "B" holds the weights' part if `orders` has no "W".

    Raises:
        ValueError: the orders block each other for ever, or weights' gradients come before their backward.
    """
    takes = durations(costs, any(action.kind == "W" for actions in orders for action in actions))
    ended: dict[tuple[int, str, int, int], float] = {}
    waiting: dict[tuple[int, str, int, int], int] = {}
    finish: list[list[float]] = [[] for _ in orders]
    runnable = deque(range(len(orders)))
    while runnable:
        rank = runnable.popleft()
        actions, ends = orders[rank], finish[rank]
        at = ends[-1] if ends else 0.0
        for i in range(len(ends), len(actions)):
            kind, chunk, micro = actions[i]
            source = _source(where, rank, kind, chunk)
            if source is not None:
                need = (source.rank, kind if kind != "W" else "B", source.chunk, micro)
                came = ended.get(need)
                if came is None:
                    waiting[need] = rank
                    break
                at = max(at, came + (costs.transfer if source.rank != rank else 0.0))
            if kind == "B" and (rank, "F", chunk, micro) not in ended:
                break
            at += takes[kind]
            own = (rank, kind, chunk, micro)
            ended[own] = at
            ends.append(at)
            if own in waiting and waiting[own] != rank:
                runnable.append(waiting.pop(own))
    for rank, (actions, ends) in enumerate(zip(orders, finish, strict=True)):
        if len(ends) < len(actions):
            raise ValueError(f"pipeline rank {rank} waits for ever at {actions[len(ends)]}")
    return finish


def _source(where: Places, rank: int, kind: str, chunk: int) -> Chunk | None:
    """Whose result an action takes, besides that of its own chunk's forward."""
    if kind == "F":
        return where.before[rank][chunk]
    return where.after[rank][chunk] if kind == "B" else Chunk(rank, chunk)


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
