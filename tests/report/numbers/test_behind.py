"""Where the host sets the pace, hand-counted on a few tasks."""

from __future__ import annotations

import numpy as np
import pytest

from sim.report.numbers.behind import Tasks, common, gaps, paced


def tasks(*rows: tuple[str, float, float, float, float]) -> Tasks:
    """Tasks (kind, issue, host time, start, end): "c" kernels of the compute stream, "g" a gather, "h" the host's."""
    kinds = [row[0] for row in rows]
    issue, took, start, end = (np.array([row[i] for row in rows], dtype=float) for i in range(1, 5))
    none = np.zeros(len(rows))
    return Tasks(np.array([k == "h" for k in kinds]), np.array([k == "c" for k in kinds]),
                 np.array([k == "o" for k in kinds]), issue, start, end, none, took, np.minimum(took, 1.0))


def hosts_gaps(of: Tasks, step_s: float) -> list[tuple[float, float]]:
    """Gaps of the compute stream that are the host's."""
    spans = common(gaps(of), paced(of, step_s))
    return list(zip(spans.start_s.tolist(), spans.end_s.tolist(), strict=True))


def test_a_gather_that_compute_waits_for_is_the_hosts_where_the_host_is_late_further_on() -> None:
    """Compute waits from 4 to 6 for a gather, and from 8 to 10 for the host: without the gather it would from 6 on."""
    busy = tasks(("c", 0, 1, 1, 4), ("g", 1, 1, 2, 6), ("c", 2, 1, 6, 8), ("h", 3, 6, 3, 9), ("c", 9, 1, 10, 12))
    assert hosts_gaps(busy, 12.0) == [(0.0, 1.0), (4.0, 6.0), (8.0, 10.0)]
    assert paced(busy, 12.0).end_s.max() == 12.0  # nothing holds the host: it paces the whole step


def test_a_host_that_was_held_answers_for_what_follows_alone() -> None:
    """It waits until 7 for kernels that wait for the gather: that wait is the gather's."""
    held = tasks(("c", 0, 1, 1, 4), ("g", 1, 1, 2, 6), ("c", 2, 1, 6, 7), ("h", 3, 1, 7, 8), ("c", 8, 1, 9, 12))
    assert hosts_gaps(held, 12.0) == [(0.0, 1.0), (7.0, 9.0)]
    stood = tasks(("c", 0, 1, 1, 4), ("g", 1, 1, 2, 6), ("c", 2, 1, 6, 8), ("c", 9, 1, 10, 12))  # a full queue, say
    assert hosts_gaps(stood, 12.0) == [(0.0, 1.0), (9.0, 10.0)]


def test_a_host_that_is_ahead_paces_nothing() -> None:
    ahead = tasks(("c", -3, 1, 0, 4), ("g", -2, 1, 2, 6), ("c", -1, 1, 6, 12))
    assert hosts_gaps(ahead, 12.0) == [] and not len(paced(ahead, 12.0).start_s)
    assert float(np.sum(gaps(ahead).end_s - gaps(ahead).start_s)) == pytest.approx(2.0)
