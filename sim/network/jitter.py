"""Many ranks wait for the slowest: the expected maximum of n small delays (rule 7 of the machine)."""

from __future__ import annotations

from functools import lru_cache
from math import erf, exp, log, pi, sqrt

#: Standard deviation of one rank's arrival at a rendezvous, seconds. Petrini, Kerbyson & Pakin, "The Case of the
#: Missing Supercomputer Performance" (SC 2003): operating-system noise on 4-way nodes delays a 1 ms computation by some
#: tens of us per node before tuning; Hoefler, Schneider & Lumsdaine, "Characterizing the Influence of System Noise on
#: Large-Scale Applications by Simulation" (SC 2010): single detours of 1-30 us on Linux nodes. (From memory, not opened
#: again: unverified.)
#: Confidence low: no measurement of our own; sweeps report means over many calls, which hide it.
SIGMA_S = 3e-6

#: Above this many ranks the asymptote is used, below it the quantile; they agree to a percent there.
_MANY = 10**7
#: Up to this many terms a harmonic number is summed.
_EXACT = 1000


@lru_cache(maxsize=1024)
def expected_maximum(n: int) -> float:
    """Expected maximum of n independent standard normal deviates.

    Blom's approximation, the quantile at (n - 0.375) / (n + 0.25) (Blom 1958, Statistical Estimates and Transformed
    Beta-Variables), exact for n = 2 (1 / sqrt(pi)); within 3% at n = 3, 1.5% up to 8 and 0.5% beyond.

    Args:
        n: ranks that meet; 0 or 1 wait for nobody.
    """
    if n < 2:
        return 0.0
    if n == 2:
        return 1.0 / sqrt(pi)
    if n > _MANY:
        root = sqrt(2 * log(n))
        return root - (log(log(n)) + log(4 * pi)) / (2 * root) + 0.5772156649 / root
    return _quantile((n - 0.375) / (n + 0.25))


@lru_cache(maxsize=1024)
def latest(n: int) -> float:
    """Expected maximum of n independent exponential delays of mean 1: the harmonic number 1 + 1/2 + ... + 1/n.

    Source: Renyi's representation of exponential order statistics (David & Nagaraja, Order Statistics, section 2.5);
    above a thousand Euler's asymptote.
    """
    if n > _EXACT:
        return log(n) + 0.5772156649 + 0.5 / n
    return sum(1 / k for k in range(1, n + 1))


def _quantile(p: float) -> float:
    """Standard normal quantile of p >= 1/2 by Newton's method: from 0 it climbs to the root, the CDF being concave.

    `statistics.NormalDist` does the same and costs a run 10 ms of start-up.
    """
    x = 0.0
    for _ in range(100):
        step = (p - 0.5 * (1 + erf(x / sqrt(2)))) * sqrt(2 * pi) * exp(x * x / 2)
        x += step
        if step < 1e-12:
            break
    return x


def rendezvous_s(ranks: int, sigma_s: float = SIGMA_S) -> float:
    """What a rendezvous of `ranks` costs beyond its own time: the wait for the latest, against the average rank, s."""
    return expected_maximum(ranks) * sigma_s
