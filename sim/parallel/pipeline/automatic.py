"""ZB-1p and ZB-2p: schedules found by search for given costs and a memory limit.

Qi et al. 2023 (arXiv 2401.10241), section 3.1:
* warm-up: as many F as memory allows before the first B; whether one that would delay it is still run is tried both
  ways;
* then F and B in turn. A W fills a gap at least T_W long, or a shorter one where the rank's bubbles would become the
  longest of all ranks; and makes room when the limit of memory is hit;
* when F and B are used up, all W that are left.
Here the ranks are simulated together, each deciding when it is idle by what it knows then. Their second binary choice,
to skip an F that runs ahead, is here whether a B that has come goes before an F whose turn it is. Of all ways tried,
and the hand-made schedule that fits the same memory, the one with the least bubble wins.
"""

from __future__ import annotations

import heapq
from itertools import product
from typing import NamedTuple

from sim.parallel.pipeline.actions import Action, Costs, places
from sim.parallel.pipeline.evaluate import span
from sim.parallel.pipeline.zero_bubble import handcrafted

#: Times this close, relative to the work of a micro-batch, are the same.
_SLACK = 1e-9
#: Micro-batches, in pipelines, on which the ways are compared where there are more.
_TRIED = 3


class Way(NamedTuple):
    """One combination of the choices that are tried.

    Attributes:
        squeeze: the warm-up takes another F even if it delays the first B.
        gap: a W goes where it "fits", or where this rank's bubbles would be the "longest", or in "any" gap.
        in_turn: F and B alternate, rather than B going first.
    """

    squeeze: bool
    gap: str
    in_turn: bool


_WAYS = [Way(squeeze, gap, in_turn)
         for in_turn, gap, squeeze in product((True, False), ("longest", "fits", "any"), (True, False))]


def searched(pipeline: int, micro_batches: int, costs: Costs, limit: float,
             kept_for_weights: float) -> list[list[Action]]:
    """The best order found: shape (pipeline, 3 · micro-batches).

    Args:
        limit: activations a rank may hold, in micro-batches; at least 1.
        kept_for_weights: share of a micro-batch's activations that stays between "B" and "W".
    """
    few = min(micro_batches, _TRIED * pipeline)
    generous = limit >= 2 * pipeline - 1
    work = few * (costs.forward + costs.backward + costs.weight)
    least = span(handcrafted(pipeline, few, generous), places("zb-h1", pipeline, 1), costs) - work
    best: Way | None = None
    for way in _WAYS:
        if least <= _SLACK * work:
            break
        bubble = Search(pipeline, few, costs, limit, kept_for_weights, way).run(least)
        if bubble < least - _SLACK * work:
            best, least = way, bubble
    if best is None:
        return handcrafted(pipeline, micro_batches, generous)
    final = Search(pipeline, micro_batches, costs, limit, kept_for_weights, best)
    final.run(float("inf"))
    kinds = {kind: [Action(kind, 0, micro) for micro in range(micro_batches)] for kind in "FBW"}
    orders = []
    for ran in final.ran:
        actions = {kind: iter(kinds[kind]) for kind in "FBW"}
        orders.append([next(actions[kind]) for kind in ran])
    return orders


class Search:
    """All ranks of a pipeline, simulated together in one way.

    Attributes:
        ran: kinds of action of each rank, in order.
        bubble: time each rank has been idle since its first action.
    """

    def __init__(self, pipeline: int, micro_batches: int, costs: Costs, limit: float, kept_for_weights: float,
                 way: Way) -> None:
        self.way, self.costs, self.micro_batches = way, costs, micro_batches
        self.slack = _SLACK * (costs.forward + costs.backward + costs.weight)
        self.room = limit - 1 + _SLACK
        self.change = {"F": 1.0, "B": kept_for_weights - 1.0, "W": -kept_for_weights}
        self.takes = {"F": costs.forward, "B": costs.backward, "W": costs.weight}
        self.ran: list[list[str]] = [[] for _ in range(pipeline)]
        self.bubble = [0.0] * pipeline
        self.free = [0.0] * pipeline
        self.held = [0.0] * pipeline
        self.turn = ["B"] * pipeline
        #: When each rank's inputs come; those of forwards at the first rank are there from the start.
        self.forwards: list[list[float]] = [[] for _ in range(pipeline)]
        self.backwards: list[list[float]] = [[] for _ in range(pipeline)]
        self.forwards[0] = [0.0] * micro_batches
        self.done = {kind: [0] * pipeline for kind in "FBW"}

    def run(self, worst: float) -> float:
        """Simulate; the largest bubble of any rank, or more than `worst` as soon as that is certain."""
        events = [(0.0, 0)]
        last, left = len(self.ran) - 1, 3 * self.micro_batches * len(self.ran)
        while left:
            now, rank = heapq.heappop(events)
            if self.free[rank] > now:
                continue
            kind = self._chosen(rank, now)
            if not kind:
                continue
            left -= 1
            if self.ran[rank]:
                self.bubble[rank] += now - self.free[rank]
                if self.bubble[rank] > worst:
                    return self.bubble[rank]
            end = now + self.takes[kind]
            self.free[rank] = end
            self.held[rank] += self.change[kind]
            self.done[kind][rank] += 1
            self.ran[rank].append(kind)
            heapq.heappush(events, (end, rank))
            if kind == "W":
                continue
            self.turn[rank] = "B" if kind == "F" else "F"
            if kind == "F":
                to, comes = (rank + 1, self.forwards) if rank < last else (rank, self.backwards)
            elif rank:
                to, comes = rank - 1, self.backwards
            else:
                continue
            arrival = end + self.costs.transfer if to != rank else end
            comes[to].append(arrival)
            if to != rank:
                heapq.heappush(events, (arrival, to))
        return max(self.bubble)

    def _chosen(self, rank: int, now: float) -> str:
        """What an idle rank does now, "" to wait for an input."""
        now += self.slack
        ran_f, ran_b, ran_w = self.done["F"][rank], self.done["B"][rank], self.done["W"][rank]
        f_left, b_left = self.micro_batches - ran_f, self.micro_batches - ran_b
        if not b_left:
            return "W" if ran_w < self.micro_batches else ""
        comes = self.backwards[rank]
        b_at = comes[ran_b] if ran_b < len(comes) else None
        b_come = b_at is not None and b_at <= now
        come = self.forwards[rank]
        f_at = come[ran_f] if f_left and ran_f < len(come) else None
        f_come = f_at is not None and f_at <= now
        fits = self.held[rank] <= self.room
        if not ran_b:
            if b_come:
                return "B"
            delays = b_at is not None and b_at + self.slack < now + self.costs.forward
            return "F" if f_come and fits and (self.way.squeeze or not delays) else ""
        late = ran_b - ran_w
        if b_come and not (self.way.in_turn and self.turn[rank] == "F" and f_come and (fits or late)):
            return "B"
        if f_come and fits and (self.turn[rank] == "F" or not late):
            return "F"
        if not late:
            return ""
        if f_come and not fits:
            return "W"
        return "W" if self._filled(rank, now, f_at if fits else None, b_at, bool(f_left and fits)) else ""

    def _filled(self, rank: int, now: float, f_at: float | None, b_at: float | None, f_may_come: bool) -> bool:
        """Whether a W goes into the gap before the next input; what has not started elsewhere takes its time yet."""
        if self.way.gap == "any":
            return True
        costs = self.costs
        ends = b_at if b_at is not None else now + costs.backward + costs.transfer
        if f_may_come:
            ends = min(ends, f_at if f_at is not None else now + costs.forward + costs.transfer)
        gap = ends - now
        if gap + 2 * self.slack >= costs.weight:
            return True
        return self.way.gap == "longest" and self.bubble[rank] + gap > max(self.bubble)
