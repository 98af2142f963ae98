"""ECMP: what is lost when a fabric hashes flows onto uplinks instead of spreading them.

A hash puts each flow on one of the equal uplinks at random, and a collective is as slow as its slowest flow, so the
uplink with most flows decides. Balls in bins: Raab & Steger, "Balls into Bins" (RANDOM 1998); for collectives on
Ethernet: Gangidi et al., "RDMA over Ethernet for Distributed AI Training at Meta Scale" (SIGCOMM 2024), section 4.
"""

from __future__ import annotations

from functools import lru_cache
from math import exp, sqrt

from sim.network.jitter import expected_maximum

#: Flows per uplink from which their number is taken as normally distributed.
_MANY = 300.0


@lru_cache(maxsize=4096)
def expected_most(flows: int, uplinks: int) -> float:
    """Expected number of flows on the fullest of `uplinks`, each of `flows` put on one at random.

    Occupancies are taken as independent Poisson counts (exact in the limit, within a few percent from ten flows on);
    one flow is one, and never less than the mean or more than all.
    """
    if flows <= 1 or uplinks <= 1:
        return float(flows)
    mean = flows / uplinks
    if mean > _MANY:
        return mean + sqrt(mean) * expected_maximum(uplinks)
    term = below = exp(-mean)
    most, count = 0.0, 0
    while count < flows:
        most += 1.0 - below ** uplinks
        if below ** uplinks > 1.0 - 1e-9 and count > mean:
            break
        count += 1
        term *= mean / count
        below = min(1.0, below + term)
    return min(float(flows), max(1.0, mean, most))


def collision_loss(flows: int, uplinks: int) -> float:
    """How many times more an uplink's share of the traffic is under hashing than spread evenly; 1 = nothing lost."""
    if flows < 1:
        return 1.0
    return expected_most(flows, uplinks) * uplinks / flows
