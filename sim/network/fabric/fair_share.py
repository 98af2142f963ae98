"""Weighted max-min sharing of links by coflows: rule 5 of the machine.

A coflow moves at one rate and loads every link it uses in proportion, so filling up all rates in step with their
weights until a link is full or a cap is reached, freezing those, and going on with the rest is the weighted max-min
optimum (Bertsekas & Gallager, Data Networks, section 6.5.2, with link use per unit of rate).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

LinkId = tuple[str, int]

#: Relative slack within which a link counts as full.
_TOLERANCE = 1e-12


class Flow(Protocol):
    """What sharing needs to know of a coflow."""

    @property
    def links(self) -> tuple[LinkId, ...]: ...
    @property
    def loads(self) -> tuple[float, ...]: ...
    @property
    def cap_bps(self) -> float: ...
    @property
    def weight(self) -> float: ...


def fair_share(coflows: Sequence[Flow], capacity: Callable[[LinkId], float]) -> list[float]:
    """Rates (bytes/s of each coflow's own size) under weighted max-min fairness with caps.

    Args:
        coflows: active coflows; a rate r puts `r * load` bytes/s on each of its links.
        capacity: bytes/s of a link.

    Returns:
        One rate per coflow, in order. Alone: min(cap, min(capacity / load)).
    """
    if len(coflows) == 1:
        return [alone(coflows[0], capacity)]
    left: dict[LinkId, float] = {}
    users: dict[LinkId, list[tuple[int, float]]] = {}
    for i, flow in enumerate(coflows):
        for link, load in zip(flow.links, flow.loads, strict=True):
            if link not in users:
                left[link], users[link] = capacity(link), []
            users[link].append((i, load))
    rates = [0.0] * len(coflows)
    weights = [flow.weight for flow in coflows]
    active = set(range(len(coflows)))
    level = 0.0
    while active:
        level, frozen = _next_level(coflows, weights, left, users, active)
        for i in frozen:
            rates[i] = min(coflows[i].cap_bps, level * weights[i])
            active.discard(i)
            for link, load in zip(coflows[i].links, coflows[i].loads, strict=True):
                left[link] = max(0.0, left[link] - rates[i] * load)
    return rates


def alone(flow: Flow, capacity: Callable[[LinkId], float]) -> float:
    """Rate of a coflow that has the machine to itself, bytes/s."""
    rate = flow.cap_bps
    for link, load in zip(flow.links, flow.loads, strict=True):
        if load > 0:
            rate = min(rate, capacity(link) / load)
    return rate


def _next_level(coflows: Sequence[Flow], weights: Sequence[float], left: dict[LinkId, float],
                users: dict[LinkId, list[tuple[int, float]]], active: set[int]) -> tuple[float, list[int]]:
    """Rate per weight at which the next cap or link binds, and the coflows it stops."""
    full: dict[LinkId, float] = {}
    for link, who in users.items():
        demand = sum(weights[i] * load for i, load in who if i in active)
        if demand > 0:
            full[link] = left[link] / demand
    caps = {i: coflows[i].cap_bps / weights[i] for i in active}
    level = min(min(full.values(), default=float("inf")), min(caps.values()))
    if level == float("inf"):
        return level, list(active)
    edge = level * (1 + _TOLERANCE)
    stopped = {i for i in active if caps[i] <= edge}
    for link, at in full.items():
        if at <= edge:
            stopped.update(i for i, load in users[link] if i in active and load > 0)
    return level, sorted(stopped)
