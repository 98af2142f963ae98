"""Running and comparing: with a stand-in for the simulator, so that every figure is known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sim.cli import main
from sim.errors import Fault, UserError
from sim.validation import validate
from sim.validation.cases import predict as predict_module
from sim.validation.cases.files import Case
from sim.validation.cases.predict import compare, settle
from sim.validation.words import text

CASES = """defaults: {speed: 1.0}
cases:
  - {id: base, set: {}, measured: {step_time_s: 2.0, oom: false}}
  - {id: fast, set: {speed: 4.0}, measured: {step_time_s: 0.2}}
  - {id: scaled, set: {speed: 0.5}, measured: {relative_to: base, ratio: 1.6}}
  - {id: limit, set: {speed: 2.0}, measured: {step_time_s: 0.7}, quality: bound}
  - {id: strange, set: {speed: unknown}, measured: {step_time_s: 1.0}}
  - {id: broken, set: {speed: 0.0}, measured: {step_time_s: 1.0}}
"""


def fake_training(case: Case) -> dict[str, Any]:
    """A simulator whose step takes 1/speed seconds and whose memory is not complete."""
    speed = {**case.given, **case.sets}["speed"]
    if isinstance(speed, str):
        raise UserError(Fault("must be a number", "speed"))
    return compare(case.measured, {"step_time_s": 1 / speed, "memory": {"fits": True}})


@pytest.fixture
def cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(predict_module._BY_KIND, "training", fake_training)
    path = tmp_path / "cases.yaml"
    path.write_text(CASES, encoding="utf-8")
    return path


def test_every_case_has_a_record_in_the_files_order(cases: Path) -> None:
    records = {r["id"]: r for r in validate([cases], workers=1).records}
    assert list(records) == ["base", "fast", "scaled", "limit", "strange", "broken"]
    assert records["base"]["error"]["step_time_s"] == pytest.approx(-0.5)
    assert records["fast"]["error"]["step_time_s"] == pytest.approx(0.25)
    assert records["strange"]["status"] == "unsupported"
    assert records["strange"]["reason"] == "speed: must be a number"
    assert records["broken"]["status"] == "failed"
    assert "ZeroDivisionError" in records["broken"]["reason"]


def test_a_failed_case_is_a_fault_of_ours_and_an_unsupported_one_is_not(
        cases: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit codes of the command line: 0 good, 1 a fault of ours."""
    def code(select: str) -> object:
        with pytest.raises(SystemExit) as left:
            main(["validate", str(cases), "--select", select, "--workers", "1", "--json", "-"])
        return left.value.code

    assert [code("base"), code("strange"), code("limit")] == [0, 0, 0]
    assert code("broken") == 1
    out, err = capsys.readouterr()
    assert '"failed"' in out
    assert "failed, which is a fault of ours: 1 of 1 cases, first cases.yaml/broken: ZeroDivisionError" in err
    assert code("b*") == 1


def test_ratios_are_of_two_predictions(cases: Path) -> None:
    records = {r["id"]: r for r in validate([cases], workers=1).records}
    assert records["scaled"]["predicted"]["ratio"] == pytest.approx(2.0)
    assert records["scaled"]["error"]["ratio"] == pytest.approx(0.25)


def test_a_ratio_selected_alone_still_finds_its_reference(cases: Path) -> None:
    (only,) = validate([cases], select="scaled", workers=1).records
    assert only["predicted"]["ratio"] == pytest.approx(2.0)


def test_a_bound_is_right_below_it(cases: Path) -> None:
    (limit,) = validate([cases], select="limit", workers=1).records
    assert limit["error"]["step_time_s"] == 0.0


def test_incomplete_memory_is_said_not_compared(cases: Path) -> None:
    base = validate([cases], workers=1).records[0]
    assert base["predicted"]["oom"] is None
    assert "activations" in base["unsupported_keys"]["oom"]
    assert base["status"] == "ok"


def test_a_pattern_that_selects_nothing_is_bad_input(cases: Path) -> None:
    with pytest.raises(UserError, match="no case matches"):
        validate([cases], select="none-such")
    with pytest.raises(UserError, match="at least 1"):
        validate([cases], workers=0)


def test_the_json_is_plain_and_has_the_summary(cases: Path) -> None:
    data = json.loads(json.dumps(validate([cases], workers=1).to_json()))
    assert set(data) == {"cases", "summary"}
    assert data["summary"]["overall"]["cases"] == 5
    assert data["summary"]["overall"]["step_time"]["count"] == 2
    assert data["summary"]["overall"]["step_time"]["measured"] == 4


def test_progress_counts_to_the_end(cases: Path) -> None:
    seen: list[tuple[int, int]] = []
    validate([cases], workers=1, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i, 6) for i in range(1, 7)]


def test_an_interrupt_keeps_what_was_finished(cases: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    validation = validate([cases], workers=1, progress=stop)
    assert validation.interrupted
    assert [r["status"] for r in validation.records[:3]] == ["ok", "ok", "failed"]
    assert "interrupted" in validation.records[2]["reason"]


def test_the_number_of_workers_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "k.csv"
    rows = "".join(f"no-such-gpu-{i},fp32,8,8,8,1,5,x\n" for i in range(20))
    path.write_text("gpu,dtype,m,n,k,batch,time_us,source\n" + rows, encoding="utf-8")
    one, two = (json.dumps(validate([path], workers=n).to_json()) for n in (1, 2))
    assert one == two
    assert json.loads(one)["summary"]["overall"]["unsupported"] == 20


def test_complete_memory_is_compared() -> None:
    memory = {"complete": True, "fits": True, "peak_allocated_bytes": 90, "peak_reserved_bytes": 120}
    measured = {"peak_allocated_bytes": 100, "peak_unknown_bytes": 110, "oom": False}
    record = compare(measured, {"step_time_s": 1.0, "memory": memory})
    assert record["error"] == {"peak_allocated_bytes": pytest.approx(-0.1), "peak_unknown_bytes": 0.0}
    assert record["predicted"]["oom"] is False
    below = compare({"peak_unknown_bytes": 80}, {"step_time_s": 1.0, "memory": memory})
    assert below["error"]["peak_unknown_bytes"] == pytest.approx(0.125)


def test_a_case_of_memory_alone_is_unsupported_while_memory_is_incomplete() -> None:
    record = compare({"peak_allocated_bytes": 100, "oom": False}, {"step_time_s": 1.0, "memory": {}})
    assert record["status"] == "unsupported"


def test_a_ratio_without_its_reference_is_unsupported() -> None:
    record = {"kind": "training", "status": "ok", "quality": None, "measured": {"relative_to": "x", "ratio": 2.0},
              "predicted": {"step_time_s": 1.0}, "error": {}}
    settle(record, {})
    assert record["status"] == "unsupported"


def test_the_terminal_report_shows_statistics_and_reasons(cases: Path) -> None:
    console = Console(width=140, record=True, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115
    text.render(validate([cases], workers=1), console)
    shown = console.export_text()
    for part in ("cases", "37.5%", "must be a number", "ZeroDivisionError", "bound", "not compared", "such as"):
        assert part in shown
    lines = [line for line in shown.splitlines() if "ZeroDivisionError" in line]
    broken = next(r["id"] for r in validate([cases], workers=1).records if "ZeroDivision" in str(r.get("reason")))
    assert lines and broken in lines[0]


def test_the_command_prints_tables_or_json(cases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(*arguments: str) -> int | str | None:
        with pytest.raises(SystemExit) as left:
            main(["validate", str(cases), "--workers", "1", *arguments])
        return left.value.code

    assert command("--json", "-") == 1  # one case is broken, and is reported all the same
    assert len(json.loads(capsys.readouterr().out)["cases"]) == 6
    target = tmp_path / "out.json"
    assert command("--json", str(target), "--select", "fast") == 0
    assert "fast" in capsys.readouterr().out
    assert json.loads(target.read_text(encoding="utf-8"))["cases"][0]["id"] == "fast"


PARENT = """
import os, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from sim.validation.runner import as_worker
if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=as_worker)
    print(pool.submit(os.getpid).result(), flush=True)
    time.sleep(60)
"""


def test_no_worker_outlives_its_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT, encoding="utf-8")
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                          text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.kill()
    waited = 0
    while not gone(worker) and waited < 200:
        waited += 1
        time.sleep(0.05)
    assert gone(worker)


def gone(pid: int) -> bool:
    """Whether a process has ended, be it that nobody has asked for its exit code yet."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    status = Path(f"/proc/{pid}/stat")
    return status.is_file() and status.read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] == "Z"
