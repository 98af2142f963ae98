"""`drystep fit` on a few runs: what is simulated again, and the command as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sim.api import run
from sim.cli import main
from sim.scenario import resolve
from sim.software import trial
from sim.validation.cases.files import Case
from sim.validation.fit.fit import chosen, fit
from sim.validation.fit.trials import First, Trials, again, first

pytest.importorskip("scipy")
AGAIN = "sim.validation.fit.trials._again_of"
FORWARD, MEGATRON = ("pytorch", "host_forward_s"), ("megatron", "host_step_s")

#: A run near the limit of its memory, whose step holds retries of the allocator.
PRESSED = "llmf-v1-a100-40gb-7b-s4096-g8-mb4-ga32-bf16"


def cases() -> list[Case]:
    """Two runs of each of two sources, of which only one can be changed by Megatron's figures."""
    return [*chosen(["resnet50"])[:2], *chosen(["megatron_2020"])[:2]]


def test_a_repeated_run_is_the_whole_prediction() -> None:
    pressed = next(c for c in chosen(["llm_foundry_v1_a100_40g"]) if c.id == PRESSED)
    assert first_held(pressed) > 0.01
    for case in (*cases(), pressed):
        known, values = first(case), {FORWARD: 9.5e-6, ("pytorch", "rank_jitter_s"): 2e-5}
        assert known is not None
        with trial(values):
            whole = run(resolve(case.given, case.path, case.sets)).step_time_s
        assert again(known, values) == pytest.approx(whole, rel=1e-12)
        assert again(known, {}) == pytest.approx(known.step_s, rel=1e-12)


def first_held(case: Case) -> float:
    known = first(case)
    return 0.0 if known is None else known.held_s


def test_only_what_a_figure_changes_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(AGAIN, lambda job: seen.append(job[0].row.source) or job[0].step_s * 2)
    with Trials(cases(), 1) as trials:
        trials.start()
        asked = [(place, {MEGATRON: 9e-3}) for place in range(4)]
        errors = trials.errors("x", asked)
        assert seen == ["megatron_2020"] * 2
        assert errors[:2] == pytest.approx(trials.own[:2])
        assert errors[2:] == pytest.approx(2 * trials.own[2:] + 1)
        trials.errors("x", asked)
        assert len(seen) == 2
        assert trials.touched(range(4), {MEGATRON: 9e-3}) == [2, 3]


def test_one_trial_tells_which_hosts_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the second run of each source feels the host: the others are not asked about each of its costs."""
    seen: list[tuple[str, int]] = []

    def slower(job: tuple[First, dict[tuple[str, str], float]]) -> float:
        known, values = job
        seen.append((known.row.name, len(values)))
        return known.step_s * (1.01 if known.row.name in late else 1.0)

    late = {cases()[1].id, cases()[3].id}
    monkeypatch.setattr(AGAIN, slower)
    found = fit(cases(), workers=1, only=["pytorch.host_forward_s", "pytorch.host_backward_s"])
    alone = [name for name, count in seen if count == 1]
    assert set(alone) == late and len(alone) == 4
    assert [one.runs for one in found.estimates] == [2, 2]


def test_a_run_that_is_not_predicted_is_counted() -> None:
    good = cases()[0]
    bad = Case(good.path, good.path, 1, "training", "bad", good.given, good.measured, {"cluster.nodes": -1}, None, ())
    with Trials([bad, good], 1) as trials:
        trials.start()
    assert trials.unpredicted == 1
    assert [row.name for row in trials.rows] == [good.id]


def test_workers_change_nothing_and_progress_ends_at_the_total() -> None:
    steps: list[tuple[int, int]] = []
    one = fit(cases(), workers=1, only=["megatron.host_step_s"], progress=lambda *now: steps.append(now))
    two = fit(cases(), workers=2, only=["megatron.host_step_s"])
    assert json.dumps(one.to_json()) == json.dumps(two.to_json())
    assert steps == sorted(steps, key=lambda now: now[0])
    assert steps[-1][0] == steps[-1][1] == one.simulations
    assert np.array_equal(one.before[:2], one.after[:2])
    (estimate,) = one.estimates
    assert (estimate.runs, estimate.sources, estimate.recommended) == (2, 1, False)


def command(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        main(["fit", *arguments])
    return left.value.code


def test_the_command_writes_tables_json_and_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ("megatron_2020", "--sample", "2", "--workers", "1", "--figure", "megatron.host_step_s")
    report = tmp_path / "fit.md"
    assert command(*small, "--out", str(report)) == 0
    shown = capsys.readouterr().out
    assert "host_step_s" in shown and "left out" in shown
    assert report.read_text(encoding="utf-8").startswith("# Free figures")
    assert command(*small, "--json", "-") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["figures"][0]["figure"] == "host_step_s"
    assert data["runs"][0].keys() >= {"source", "id", "unfitted", "fitted"}
    assert sum("left_out" in one for one in data["runs"]) == 2


@pytest.mark.parametrize(("arguments", "said"), [
    (("no_such_file",), "no_such_file"),
    (("litgpt",), "no unmarked step time"),
    (("resnet50", "--figure", "pytorch.host_forward"), "did you mean"),
    (("resnet50", "--out", "/no/such/folder/fit.md"), "no directory"),
    (("resnet50", "--sample", "0"), "--sample"),
    (("resnet50", "--workers", "none"), "--workers"),
])
def test_bad_input_is_two(arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*arguments) == 2
    heard = capsys.readouterr().err
    assert said in heard and "Traceback" not in heard


def test_help_names_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--help") == 0
    shown = capsys.readouterr().out
    assert all(part in shown for part in ("--figure", "--json", "--out", "--sample", "Profiles are not changed"))


def test_ctrl_c_ends_with_its_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(job: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(AGAIN, stop)
    assert command("megatron_2020", "--workers", "1", "--figure", "megatron.host_step_s") == 130
    assert "interrupted" in capsys.readouterr().err
