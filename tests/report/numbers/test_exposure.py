"""The split of a time axis, against hand-counted seconds and against a fine grid."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.report.numbers.columns import Window
from sim.report.numbers.exposure import Spans, axis, split, waits_between


def spans(*rows: tuple[float, float, int], keys: int = 2) -> Spans:
    return Spans(np.array([r[0] for r in rows], dtype=float), np.array([r[1] for r in rows], dtype=float),
                 np.array([r[2] for r in rows], dtype=np.int64), keys)


def test_earlier_layers_win_and_equals_share() -> None:
    compute = spans((0, 2, 0), (5, 6, 1))
    moving = spans((1, 4, 0), (3, 5.5, 1))
    (busy, exposed), rest = split(axis([compute, moving], 10.0), [compute, moving])
    assert busy == pytest.approx([2, 1])
    assert exposed == pytest.approx([1 + 0.5, 0.5 + 1])  # alone 2..3 and 4..5, both 3..4
    assert rest == pytest.approx(4)


def test_spans_outside_the_step_are_cut() -> None:
    early = spans((-3, 1, 0), (9, 12, 1))
    ((seconds,), rest) = split(axis([early], 10.0), [early])
    assert seconds == pytest.approx([1, 1])
    assert rest == pytest.approx(8)


def test_no_spans_at_all() -> None:
    nothing = spans(keys=0)
    ((seconds,), rest) = split(axis([nothing], 4.0), [nothing])
    assert seconds.shape == (0,)
    assert rest == pytest.approx(4)


def test_a_window_stands_for_the_hidden_stretch_behind_it() -> None:
    """Ten runs of 1 s, each computing for 0.6 s: two written out at each end, the second counted for the six hidden."""
    rows = [(t, t + 0.6, 0) for t in (0, 1, 8, 9)]
    layer = spans(*rows)
    on = axis([layer], 10.0, [Window(0.0, 1.0, 7)])
    assert on.weight_s.sum() == pytest.approx(10)
    ((seconds,), rest) = split(on, [layer])
    assert seconds[0] == pytest.approx(6)
    assert rest == pytest.approx(4)


SPAN = st.tuples(st.integers(-2, 22), st.integers(0, 8), st.integers(0, 2)).map(
    lambda r: (float(r[0]), float(r[0] + r[1]), r[2]))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(SPAN, max_size=5), min_size=1, max_size=3))
def test_equals_a_walk_over_unit_pieces(plan: list[list[tuple[float, float, int]]]) -> None:
    layers = [spans(*rows, keys=3) for rows in plan]
    found, rest = split(axis(layers, 20.0), layers)
    expected = [np.zeros(3) for _ in plan]
    idle = 0.0
    for second in range(20):
        for number, rows in enumerate(plan):
            active = [key for a, b, key in rows if a <= second and second + 1 <= b]
            if active:
                for key in active:
                    expected[number][key] += 1 / len(active)
                break
        else:
            idle += 1
    for got, want in zip(found, expected, strict=True):
        assert got == pytest.approx(want)
    assert rest == pytest.approx(idle)
    assert sum(float(f.sum()) for f in found) + rest == pytest.approx(20)


def test_the_end_of_a_step_waits_for_what_the_next_one_receives() -> None:
    """A stage computes from 2 to 7 of 10 s; the host issued its receive a step ahead, so it is waited for at both ends.
    One that the host issues 3 s into the step is no wait of the step before."""
    compute = spans((2, 7, 0), keys=1)
    for issued, waited in ((-10.0, 5.0), (-1.0, 3.0), (0.0, 2.0), (1.0, 1.0)):
        waits = waits_between(np.array([issued]), np.array([2.0]), np.zeros(1, dtype=np.int64), 1, 10.0)
        (busy, waiting), rest = split(axis([compute, waits], 10.0), [compute, waits])
        assert (busy[0], waiting[0], rest) == pytest.approx((5, waited, 5 - waited))
