"""When ZeRO-3's coordinators let a parameter go: by the plain definition of reuse, use by use."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from sim.parallel.sharded.coordinator import Limits, Wanted, streamed

SIZES = {"a": 3, "b": 5, "c": 8, "d": 13}
TRACES = st.lists(st.lists(st.sampled_from(sorted(SIZES.items())), unique=True, max_size=4), max_size=12)


def reused(trace: Sequence[Sequence[Wanted]], step: int, wanted: Wanted, distance: int) -> bool:
    """DeepSpeed's `__params_to_release` as it is written: later uses one after another, elements counted."""
    passed = 0
    for use in trace[step + 1:]:
        if passed >= distance:
            return False
        for name, numel in use:
            if name == wanted[0]:
                return True
            passed += numel
    return False


@given(TRACES, st.integers(0, 60))
def test_what_is_used_again_within_the_distance_stays(trace: list[list[Wanted]], distance: int) -> None:
    decisions = streamed(trace, Limits(prefetch=0, live=10**6, reuse=distance))
    for step, (use, decision) in enumerate(zip(trace, decisions, strict=True)):
        assert decision.release == tuple(w for w in use if not reused(trace, step, w, distance))


def test_by_hand() -> None:
    """`a` comes back behind five elements: it stays where six may pass, and goes where five may not."""
    trace: list[list[Wanted]] = [[("a", 3)], [("b", 5)], [("a", 3)]]
    stays, goes = (streamed(trace, Limits(prefetch=0, live=100, reuse=reuse))[0].release for reuse in (6, 5))
    assert (stays, goes) == ((), (("a", 3),))
