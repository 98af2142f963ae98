"""Steps of papers outside the collection: all are predicted, and the report shows the worst first."""

from __future__ import annotations

import pytest

from sim.report.terminal.run import LONGER
from sim.validation import recalled, runs
from sim.validation.recalled import markdown, requests, steps

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def found():  # type: ignore[no-untyped-def]
    return steps(workers=1)


def test_every_step_is_predicted(found) -> None:  # type: ignore[no-untyped-def]
    assert [one["id"] for one in found.records if one["status"] != "ok"] == []


def test_times_agree_with_what_else_the_papers_print(found) -> None:  # type: ignore[no-untyped-def]
    measured = {one["id"]: one["measured"]["step_time_s"] for one in found.records}
    tokens, flops = 768 * 2048, 6 * 174.6e9 + 12 * 96 * 12288 * 2048
    for gpus, printed in ((256, 0.530), (1024, 0.447)):  # the MFU in MegaScale's table 2, of 312 TFLOP/s
        rate = tokens * flops / measured[f"megascale-megatron-175b-{gpus}gpu"] / gpus
        assert rate / 312e12 == pytest.approx(printed, rel=0.01)
    per_layer = 96 * 1920 * 2048 * 105 * 20480 ** 2
    flops = per_layer * (1 + 2048 / (6 * 20480) + 51200 / (16 * 105 * 20480))
    for gpus, printed in ((2240, 126e12), (2800, 121e12), (3360, 113e12)):  # MT-NLG's TFLOP/s, recomputation counted
        assert flops / measured[f"mtnlg-530b-{gpus}gpu"] / gpus == pytest.approx(printed, rel=0.01)


def test_the_worst_step_stands_first_and_assumptions_are_said(found) -> None:  # type: ignore[no-untyped-def]
    text = markdown(found)
    rows = [line.split("|") for line in text.splitlines() if line.endswith("% |") and line.count("|") == 5]
    errors = [abs(float(cells[4].strip().rstrip("%"))) for cells in rows]
    assert len(rows) == len(found.records) and errors == sorted(errors, reverse=True)
    assert text.count("assumed") >= 4 and "arXiv 2402.15627" in text
    memory = [line.split("|") for line in text.splitlines() if line.endswith("% |") and line.count("|") == 6]
    given = sum(name.endswith("_bytes") for one in found.records for name in one["error"])
    errors = [abs(float(cells[5].strip().rstrip("%"))) for cells in memory]
    assert len(memory) == given > 20 and errors == sorted(errors, reverse=True)


def test_requests_of_inference_are_predicted_and_agree_with_what_is_printed_beside_them() -> None:
    found = requests(workers=1)
    assert {one["status"] for one in found.records} == {"ok"} and len(found.records) >= 60
    measured = {one["id"]: one["measured"]["step_time_s"] for one in found.records}
    for name, weights, printed in (("7b", 13.32e9, 1397e9), ("70b-2gpu", 139e9 / 2, 1482e9)):  # gpt-fast's bandwidths
        assert 200 * weights / measured[f"gptfast-{name}"] == pytest.approx(printed, rel=0.01)
    text = markdown(found, "head")
    copied = {one["file"] for one in found.records if recalled.copied(one)}
    assert copied == {"dynamo.yaml", "inferencemax.yaml"}
    assert "| memory |" not in text and text.index("falcon-180b-128-2048") < text.index("gptfast-7b |")


def test_runs_of_weeks_take_longer_than_their_steps_as_the_report_of_a_whole_run_says(found) -> None:  # type: ignore[no-untyped-def]
    longer = [1 / (1 + one.error) for run in runs.published() if run["id"] in ("opt-175b", "bloom-176b")
              for one in runs.predict(run) if one.figure == "days"]
    for name in ("neox", "pythia", "starcoder", "deepseek", "deepseek2", "skywork"):
        errors = [one["error"]["step_time_s"] for one in found.records if one["file"] == f"{name}.yaml"]
        longer.append(1 / (1 + sum(errors) / len(errors)))
    assert (len(longer), round(100 * (min(longer) - 1)), round(100 * (max(longer) - 1))) == LONGER
