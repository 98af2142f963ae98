"""Warnings of several runs, once each and with the runs they are of."""

from __future__ import annotations

from sim.report.warned.together import together


def test_a_warning_of_some_runs_names_them() -> None:
    lines = together([("a", ["full: 7.1 GiB", "slow"]), ("b", ["slow"]), ("c", ["slow", "old"]),
                      ("d", ["slow", "old"])])
    assert lines == ["full: 7.1 GiB (a)", "slow", "old (c; d)"]
    assert together([(name, ["old"]) for name in "abcde"] + [("f", [])]) == ["old (a; b; c and 2 more)"]
    assert together([(name, ["old"]) for name in "abcd"] + [("f", [])]) == ["old (a; b; c and one more)"]
    assert together([("a", ["old"])]) == ["old"] and together([]) == []


def test_warnings_that_differ_in_figures_alone_are_one() -> None:
    lines = together([("x 1", ["mfu: MFU is 37.8%"]), ("x 2", ["mfu: MFU is 1,040.9%"]), ("x 3", ["mfu: MFU is 41%"])])
    assert lines == ["mfu: MFU is 37.8% (x 1; like it, with figures of their own, 2 others)"]
    assert len(together([("a", ["kernels of h100"]), ("b", ["kernels of h200"])])) == 2  # digits of names are none
