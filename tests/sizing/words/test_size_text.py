"""What `size` and `compare` print: tables with heads, names that tell runs apart, and what Ctrl-C leaves."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sim
from sim.cli import main
from sim.scenario import resolve
from sim.sizing import Choice, Wish, compare, size
from sim.sizing.bounds.steps import Bounds
from sim.sizing.search.best_first import ROUND
from sim.sizing.space.layouts import build_space
from sim.sizing.words.size import lines

ROOT = Path(__file__).resolve().parents[2]
SMALL = """\
name: small
cluster: {topology: dgx-a100-80g, nodes: 1}
model: {preset: gpt2}
training: {micro_batch: 1, global_batch: 64, sequence: 1024}
parallel: {strategy: ddp}
"""
PLAIN: dict[str, Any] = {"name": "small", "cluster": {"topology": "dgx-a100-80g", "gpus_per_node": 4},
                         "model": {"preset": "gpt2", "layers": 4},
                         "training": {"micro_batch": 1, "global_batch": 8, "sequence": 128}}
CHOICE = Choice([4], micro_batch=[1, 2], context=[1], partial_recompute=False)


def test_the_best_stand_under_heads() -> None:
    found = size(resolve(PLAIN), CHOICE, top=3)
    said = list(lines(found))
    at = next(i for i, line in enumerate(said) if line.startswith("\nbest by time"))
    assert "of one step" in said[at]
    assert said[at + 1].split() == [
        "step", "tokens/s", "GPUs", "GPU-hours", "kWh", "memory", "cluster", "layout"]
    assert {line.index("dgx-a100-80g") for line in said[at + 2:at + 5]} == {said[at + 1].index("cluster")}
    whole_found = size(resolve(PLAIN), CHOICE, Wish(steps=1000.0, priced=True, price_per_gpu_hour=2.0), top=3)
    whole = list(lines(whole_found))
    at = next(i for i, line in enumerate(whole) if line.startswith("\nbest by time"))
    assert "of the whole run of 1,000 steps" in whole[at]
    assert whole[at + 1].split() == [
        "step", "tokens/s", "GPUs", "days", "GPU-hours", "kWh", "USD", "memory", "cluster", "layout"]
    row = whole_found.best[0]
    assert row["tokens_per_second"] == pytest.approx(8 * 128 / row["step_time_s"])


def test_a_search_that_nothing_passes_says_so_once() -> None:
    found = size(resolve(PLAIN), CHOICE, Wish(deadline_s=1e-9), top=3)
    said = list(lines(found))
    assert not found.best and "that no layout does what is asked is proven" in said and "the best is proven" not in said
    assert "miss the deadline" in said[1] and " 0 " not in said[1].replace("0 were simulated", "")


def test_an_interrupted_search_tells_the_best_so_far() -> None:
    told = [0]
    found = size(resolve(PLAIN), CHOICE, top=10**6, progress=lambda done, *_: told.append(done),
                 interrupted=lambda: told[-1] > 0)
    assert found.best and not found.front_proven and 0 < found.simulated < found.covered
    said = list(lines(found))
    assert any(line.startswith("\nbest by time") for line in said) and any("of those simulated" in s for s in said)
    found.best *= 3
    for proven, gap, told_of in ((0, 0.1, "not proven"), (1, 0.0, "proven; below it"), (2, 0.0, "so are the first 2")):
        found.best_proven, found.gap = proven, gap
        assert any(told_of in line for line in lines(found))
    found.best_proven = len(found.best)
    assert "the best is proven" in list(lines(found))


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 1), (99.0, 1), (101.5, 2)])
def test_seconds_count_from_the_start_and_one_round_is_always_simulated(
    seconds: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of the test's own: bounds take 100 s, a round of simulations one."""
    clock, module = [0.0], import_module("sim.sizing.size")

    class Slow(Bounds):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given[:3])  # by no clock
            clock[0] += 100.0

    def tick(done: int, *_: float) -> None:
        clock[0] += done / ROUND - (clock[0] - 100.0)

    monkeypatch.setattr(import_module("sim.sizing.modes"), "Bounds", Slow)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    found = size(resolve(PLAIN), CHOICE, top=10**6, seconds=seconds, progress=tick)
    # the scenario's own layout before all; in a round without time those of each family that leave room alone
    assert 1 + (rounds - 1) * ROUND < found.simulated <= 1 + rounds * ROUND and not found.proven
    assert found.best and found.own is not None
    assert found.seconds["bounds"] == 100.0


@pytest.mark.parametrize(("late", "bounded"), [(0, 1), (10, 11)])
def test_what_there_is_no_time_to_bound_is_told_of_and_not_looked_at(
    late: int, bounded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that says `late` times that it is early: as many slices and one more are bounded, spread over all."""
    asked = [0]

    def clock() -> float:
        asked[0] += 1
        return 0.0 if asked[0] <= late + 1 else 9.0

    monkeypatch.setattr(import_module("sim.sizing.size"), "time", SimpleNamespace(monotonic=lambda: 0.0))
    module = import_module("sim.sizing.bounds.steps")
    seen: list[Any] = []
    coarse = module._coarse
    monkeypatch.setattr(module, "_coarse", lambda job: seen.append(coarse(job)) or seen[-1])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    found = size(resolve(PLAIN), CHOICE, top=3, seconds=5.0, interrupted=lambda: bool(seen) and asked[0] > late + 3)
    assert sum(one is not None for one in seen[0]) == bounded < len(seen[0])
    assert 0 < found.unbounded < found.covered and not found.proven and found.gap == 1.0
    said = "\n".join(lines(found))
    assert f"{found.unbounded:,} were not looked at" in said and "not looked at is not known" in said


def test_bounds_that_are_cut_short_go_on_to_what_they_would_have_been() -> None:
    space = build_space([resolve(PLAIN)], CHOICE)
    whole, cut = Bounds(space), Bounds(space, until=0.0)
    assert cut.unbounded.any() and not (cut.time_s[cut.unbounded] > 0).any()
    while cut.unbounded.any():
        cut.go_on()
    cut.until = math.inf
    for one in (whole, cut):
        one.refine()
    assert not whole.unbounded.any()
    for name in ("time_s", "memory_bytes", "work_j", "coarse"):
        assert (getattr(whole, name) == getattr(cut, name)).all()


@pytest.mark.whole
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="process groups are needed")
def test_control_c_on_a_terminal_reaches_every_process_and_none_shows_a_traceback(tmp_path: Path) -> None:
    """A terminal sends SIGINT to the whole group: workers leave it to the search, which tells what it has."""
    file = tmp_path / "small.yaml"
    file.write_text(SMALL, encoding="utf-8")
    out = tmp_path / "runs.db"
    ran = subprocess.Popen([sys.executable, "-m", "sim", "size", str(file), "--gpus", "8", "--top", "1000",
                            "--workers", "2", "--out", str(out)], cwd=ROOT, stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (out.exists() and out.stat().st_size > 12288) and ran.poll() is None:
        time.sleep(0.1)
    assert ran.poll() is None, "it ended before it could be interrupted"
    os.killpg(ran.pid, signal.SIGINT)
    said, err = ran.communicate(timeout=60)
    assert "Traceback" not in err and "interrupted" in err
    assert ran.returncode == 130 and "best by time" in said


def test_runs_of_one_name_are_told_apart_by_what_differs() -> None:
    more = {**PLAIN, "training": {**PLAIN["training"], "micro_batch": 2}}
    runs = [sim.run(resolve(one)) for one in (PLAIN, more, PLAIN)]
    assert compare(runs[:2]).names == ["small (micro batch 1)", "small (micro batch 2)"]
    assert compare([runs[0], runs[2]]).names == ["small (1)", "small (2)"]


def test_compare_holds_a_scenario_against_itself_with_other_values(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(SMALL, encoding="utf-8")

    def leave(*arguments: str) -> int:
        with pytest.raises(SystemExit) as left:
            main(["compare", str(file), *arguments])
        assert isinstance(left.value.code, int)
        return left.value.code

    assert leave("--set", "cluster.nodes=2") == 0
    out = capsys.readouterr().out
    assert "cluster.nodes: 1 | 2" in out and "matrix products" in out and "gemm" not in out
    assert leave() == 2 and leave(str(file), "--set", "cluster.nodes=2") == 2
    capsys.readouterr()
    one_of_each = ("--set", "training.micro_batch=1", "--set", "cluster.nodes=2", "--set", "cluster.nodes=1")
    assert leave(*one_of_each) == 0
    assert "cluster.nodes: 1 | 2 | 1" in capsys.readouterr().out


def test_elsewhere_two_values_of_a_field_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(SMALL, encoding="utf-8")
    for second, code in (("cluster.nodes=2", 2), ("cluster.nodes = 1", 0)):
        with pytest.raises(SystemExit) as left:
            main(["memory", str(file), "--set", "cluster.nodes=1", "--set", second])
        assert left.value.code == code
    assert "cluster.nodes is given two values, 1 and 2" in capsys.readouterr().err


def test_size_takes_values_on_top(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(SMALL, encoding="utf-8")
    with pytest.raises(SystemExit) as left:
        main(["size", str(file), "--gpus", "7", "--set", "training.global_batch=7", "--seconds", "0"])
    assert left.value.code in (0, 2)
    with pytest.raises(SystemExit) as left:
        main(["size", str(file), "--gpus", "8", "--set", "training.global_bath=7"])
    assert left.value.code == 2 and "global_batch" in capsys.readouterr().err
