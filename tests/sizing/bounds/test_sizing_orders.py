"""What is taken from order lists is what the lists say, for long schedules and for searched ones too."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.parallel.pipeline.actions import Costs
from sim.parallel.pipeline.evaluate import in_flight
from sim.parallel.pipeline.orders import order
from sim.sizing.bounds.orders import Facts, _listed, facts


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe"])
@pytest.mark.parametrize("pipeline", [2, 3, 4, 6])
def test_long_schedules_only_repeat_themselves(schedule: str, pipeline: int) -> None:
    if schedule == "dualpipe" and pipeline % 2:
        return
    for virtual in {"interleaved": (2, 3), "zb-v": (2,), "dualpipe": (2,)}.get(schedule, (1,)):
        for micro_batches in range(4 * pipeline, 7 * pipeline):
            if (schedule == "interleaved" and micro_batches % pipeline) or (schedule == "dualpipe" and
                                                                           micro_batches % 2):
                continue
            short, whole = facts(schedule, pipeline, virtual, micro_batches), _listed(
                schedule, pipeline, virtual, micro_batches, True)
            for name in Facts.__dataclass_fields__:
                assert np.array_equal(getattr(short, name), getattr(whole, name)), (virtual, micro_batches, name)


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 3), ("zb-h1", 1),
                                                   ("zb-h2", 1), ("zb-v", 2), ("dualpipe", 2)])
def test_what_is_held_is_the_most_in_flight(schedule: str, virtual: int) -> None:
    """Before a split backward frees anything a rank holds most: what the order list's own count says."""
    said = facts(schedule, 4, virtual, 12)
    for rank, actions in enumerate(order(schedule, 4, virtual, 12)):
        assert said.held[rank].sum(axis=1).max() == in_flight(actions)


@settings(max_examples=30, deadline=None)
@given(schedule=st.sampled_from(["zb-1p", "zb-2p"]), pipeline=st.integers(2, 6), micro_batches=st.integers(1, 20),
       backward=st.floats(0.3, 3.0), weight=st.floats(0.2, 2.0), kept=st.floats(0.1, 1.0))
def test_searched_orders_hold_and_wait_as_said(schedule: str, pipeline: int, micro_batches: int, backward: float,
                                               weight: float, kept: float) -> None:
    said = facts(schedule, pipeline, 1, micro_batches, backward)
    orders = order(schedule, pipeline, 1, micro_batches, Costs(1.0, backward, weight), kept)
    for rank, actions in enumerate(orders):
        ahead = [a.kind for a in actions].index("B")
        assert said.held[rank, 0, 0] <= ahead <= said.ahead[rank, 0]


def test_one_f_one_b_by_hand() -> None:
    """Rank r of 4 runs 4 - r forwards before its first backward and holds as many; ZB-H1 puts r weights off."""
    said = facts("1f1b", 4, 1, 8)
    assert said.ahead[:, 0].tolist() == [4, 3, 2, 1] and said.held[:, 0, 0].tolist() == [4, 3, 2, 1]
    assert said.sends.tolist() == [8, 16, 16, 8] and said.ends[:, 1, 0].tolist() == [1, 1, 1, 1]
    assert facts("zb-h1", 4, 1, 8).late[:, 0].tolist() == [1, 2, 3, 4]
    assert facts("gpipe", 4, 1, 8).held[0, 0, 0] == 8
