"""What Inductor's plan of buffers keeps, by hand."""

from __future__ import annotations

from sim.model.eager.tensors.planned import highest, planned


def test_a_buffer_stays_until_one_of_its_size_takes_it() -> None:
    """0 is read for the last time before 1 is born and taken by 2: 8 + 4 stand where 4 stood."""
    events = ((0, 8), (0, 0), (1, 4), (1, 0), (2, 8))
    assert planned(events, (), ()) == ((2, 8), (1, 4), (1, 0))
    assert (highest(events), highest(planned(events, (), ()))) == (8, 12)


def test_the_youngest_is_taken_first_and_what_nobody_takes_goes() -> None:
    events = ((0, 8), (1, 8), (0, 0), (1, 0), (2, 8), (2, 0))
    assert planned(events, (), ()) == ((0, 8), (2, 8), (0, 0), (2, 0))


def test_what_others_allocate_takes_nothing_and_what_has_no_name_leaves_nothing() -> None:
    events = ((0, 8), (0, 0), (1, 8), (1, 0), (2, 8))
    assert planned(events, (1,), ()) == ((0, 8), (0, 0), (2, 8))
    assert planned(events, (), (0,)) == ((0, 8), (0, 0), (2, 8))


def test_what_forward_kept_is_no_buffer_of_backward_s() -> None:
    events = ((5, 0), (1, 8), (1, 0))
    assert planned(events, (), ()) == events
