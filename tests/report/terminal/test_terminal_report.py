"""The terminal report says what matters, at any width, and is plain when it is not on a terminal."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from report_scenarios import small

import sim
from sim.report.advice.trials import Change
from sim.report.result import Result
from sim.report.terminal.render import as_text, bar, console, render, sweep_as_text
from sim.report.units import figure, rate, seconds, size
from sim.sizing.words.compare import seconds_of

Make = Callable[..., Result]


def test_the_report_says_what_matters(result_of: Make) -> None:
    text = as_text(result_of(1))
    for words in ("by hand", "21 ms per step", "MFU", "exposed all-gather (shard, 8 ranks)", "exposed reduce-scatter",
                  "matrix products", "waiting for the host", "bound by communication", "1.615× the step",
                  "3.25 GiB", "optimizer states 2 GiB", "estimated from what", "simulated 1 of 8 ranks"):
        assert words in text, words


def test_exposed_communication_that_a_fast_network_would_not_save_is_explained(result_of: Make) -> None:
    result = result_of(1)
    assert "which saves" not in as_text(result, 200)
    result.slowdown = 1.05
    assert "1.050× the step on an infinitely fast network, which saves 1 ms of the 8 ms exposed" in as_text(result, 200)


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal(result_of: Make, width: int) -> None:
    assert max(len(line) for line in as_text(result_of(2), width).splitlines()) <= width


def test_no_colour_when_not_on_a_terminal(result_of: Make) -> None:
    buffer = io.StringIO()
    render(result_of(1), console(buffer))
    assert "\x1b" not in buffer.getvalue()


def test_the_verdict_is_read_while_advice_is_simulated(result_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, read = io.StringIO(), []

    def advice(result: Result) -> list[Change]:
        read.append(buffer.getvalue())
        return []

    monkeypatch.setattr(Result, "changes", property(advice))
    render(result_of(1), console(buffer))
    assert read[0].index("21 ms per step") < read[0].index("bound by") < read[0].index("75.9 GiB free")


def test_out_of_memory_says_by_how_much(result_of: Make) -> None:
    result = result_of(1)
    use = result.memory.use
    result.memory = type(result.memory)(use, (use,), 2**30, True, result.memory.program)
    text = as_text(result)
    assert "does not fit: 2.25 GiB too much" in text
    assert "optimizer states" in text


def test_a_sweep_has_a_row_per_point_and_its_scaling_efficiency(result_of: Make) -> None:
    points = []
    for nodes in (1, 2):
        result = result_of(nodes)
        result.set = {"cluster.nodes": nodes}
        result.tokens_per_second, result.gpus = 800.0 if nodes == 1 else 1200.0, 8 * nodes
        points.append(result)
    points[1].warnings = ["memory: nearly full"]
    skipped = [{"set": {"cluster.nodes": 3}, "reason": "8 sequences do not divide over 24 ranks"}]
    lines = sweep_as_text(points, skipped, {"cluster.nodes": [1, 2, 3]}).splitlines()
    rows = [line.split() for line in lines if line.startswith(("1 ", "2 "))]
    assert rows[0][-1] == "100.0%"
    assert rows[1][-1] == "75.0%"
    assert any("skipped cluster.nodes=3" in line for line in lines)
    assert "! memory: nearly full (nodes 2)" in lines


def test_a_sweep_tells_what_more_of_each_resource_does_at_every_point(result_of: Make) -> None:
    """And scaling goes by the nodes there are, where an axis leaves one point its topology's own number (null)."""
    points = []
    for nodes in (2, None):
        result = result_of(1)
        result.set = {"cluster.nodes": nodes}
        result.sensitivity = {"tensor_cores": -0.05, "network": -0.0001}
        points.append(result)
    lines = sweep_as_text(points, [], {"cluster.nodes": [2, None]}).splitlines()
    assert "10% more at nodes 2: tensor cores -5.0%, network +0.0%" in lines
    assert "10% more at nodes none: tensor cores -5.0%, network +0.0%" in lines
    assert next(line for line in lines if line.startswith("none ")).split()[-1] == "100.0%"


@pytest.mark.parametrize(("value", "text"), [(1.23456, "1.235 s"), (0.0123, "12.3 ms"), (4.2e-5, "42 µs"), (0.0, "0"),
                                             (0.9998, "0.9998 s"), (0.9994, "999 ms"), (9.998e-4, "1 ms")])
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (80 * 2**30, "80 GiB"), (-2**30, "-1 GiB"),
                                             (999.7 * 2**20, "1,000 MiB"), (999.2 * 2**20, "999 MiB")])
def test_sizes(value: float, text: str) -> None:
    assert size(value) == text


def test_rates_and_changes_of_about_a_thousand_have_no_exponent() -> None:
    assert [rate(value) for value in (999.7, 999.2, 12.34)] == ["1,000", "999", "12.3"]
    assert [figure(value, "+") for value in (1250.0, -3.14159)] == ["+1,250", "-3.14"]
    assert [seconds_of(value) for value in (-0.9998, -0.9994)] == ["-1.000 s", "-999 ms"]


def test_bars() -> None:
    assert bar(0.5, 10) == "█" * 5
    assert bar(2.0, 4) == "████"
    assert bar(0.0, 4) == ""


def test_no_cell_of_a_sweep_is_cut_at_any_width(result_of: Make) -> None:
    """At exactly the width that its words need, rich's own columns came out one too wide and the last lost a letter."""
    points = [replace(result_of(nodes), set={"cluster.nodes": nodes, "training.micro_batch": 1}) for nodes in (1, 2)]
    for width in (*range(60, 100), 160):
        text = sweep_as_text(points, [], {"cluster.nodes": [1, 2], "training.micro_batch": [1]}, width)
        assert "scaling" in text and "100.0%" in text and "fits" in text, width


def test_clocks_that_are_spread_are_held_against_what_chips_usually_differ_by() -> None:
    """H100 under their power limit wait for the hungriest of them: clocks that are given stand in place of that."""
    spread = small(1024, 1, "amp-bf16", "ddp", **{"cluster.clock_spread": {"sigma": 0.001, "seed": 1}})
    assert "without it, with what chips of a kind usually differ by" in " ".join(as_text(sim.run(spread)).split())
