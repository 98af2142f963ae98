"""The same table whoever simulates it, and whatever is lost on the way."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sim.cli import main
from sim.errors import UserError
from sim.scenario import resolve
from sim.sizing import Choice, Sizing, size
from sim.sizing.search.runner import simulated
from sim.sizing.search.store import Outcome, Store
from sim.sizing.search.workers import workers

ROOT = Path(__file__).resolve().parents[2]
PLAIN: dict[str, Any] = {"name": "small", "cluster": {"topology": "dgx-a100-80g", "gpus_per_node": 4},
                         "model": {"preset": "gpt2", "layers": 4},
                         "training": {"micro_batch": 1, "global_batch": 8, "sequence": 128}}
SMALL = resolve(PLAIN, "small")
#: 120 layouts, of which the search tries 89 for the best 20.
CHOICE = Choice([4], micro_batch=[1, 2], context=[1], recompute=["none"], partial_recompute=False)


def table(path: Path) -> list[Any]:
    with sqlite3.connect(path) as file:
        return file.execute("select * from runs order by key").fetchall()


@pytest.mark.whole
def test_one_two_or_eight_workers_give_one_table(tmp_path: Path) -> None:
    found: list[Sizing] = []
    for count in (1, 2, 8):
        found.append(size(SMALL, CHOICE, top=20, workers=count, out=tmp_path / f"{count}.db"))
    assert len(table(tmp_path / "1.db")) >= 20
    for count, one in zip((2, 8), found[1:], strict=True):
        assert table(tmp_path / f"{count}.db") == table(tmp_path / "1.db")
        assert one.best == found[0].best and one.front == found[0].front


def _outcome(number: int) -> Outcome:
    return Outcome(f"key {number}", 8, "ok", 1.0, True, 10, "x" * 400)


def test_a_full_disk_is_told_and_what_was_kept_is_resumed(tmp_path: Path) -> None:
    store = Store(tmp_path / "runs.db", {"a": 1})
    assert store._file is not None
    store._file.execute("pragma max_page_count = 8")  # SQLite then says what it says of a full disk
    kept = 0
    with pytest.raises(UserError, match=r"is full.*--resume"):
        for kept in range(1000):
            store.add([_outcome(kept)])
    assert 0 < kept == len(store.known) == len(table(tmp_path / "runs.db"))
    store.close()
    again = Store(tmp_path / "runs.db", {"a": 1}, resume=True)
    assert again.known == {f"key {i}": _outcome(i) for i in range(kept)}
    again.add([_outcome(kept)])
    again.close()
    assert len(table(tmp_path / "runs.db")) == kept + 1


def test_a_file_of_another_version_is_not_resumed(tmp_path: Path) -> None:
    Store(tmp_path / "runs.db", {"a": 1}).close()
    with sqlite3.connect(tmp_path / "runs.db") as file:
        file.execute("delete from meta where key = 'drystep'")  # as files of older searches are
    with pytest.raises(UserError, match="another version of drystep"):
        Store(tmp_path / "runs.db", {"a": 1}, resume=True)
    Store(tmp_path / "again.db", {"a": 1}).close()
    with pytest.raises(UserError, match="another scenario"):
        Store(tmp_path / "again.db", {"a": 2}, resume=True)


def _die(number: int) -> int:
    if number:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_a_dead_process_is_told() -> None:
    with workers(2) as started, pytest.raises(UserError, match=r"workers were lost.*--resume"):
        list(started.each(_die, [0, 1]))


def test_no_scheduler_is_a_fault_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UserError, match=r"drystep\[dask\]"), workers(dask="tcp://127.0.0.1:9"):
        pass


def test_a_scheduler_that_does_not_answer_ends_with_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr("sim.sizing.search.workers.CONNECT_S", 0.5)
    file = tmp_path / "small.yaml"
    file.write_text(json.dumps(PLAIN))
    for address in ("tcp://127.0.0.1:9", "nonsense://x", "127.0.0.1"):
        with pytest.raises(SystemExit) as ended:
            main(["size", str(file), "--gpus", "4", "--dask", address])
        assert ended.value.code == 2 and "no Dask scheduler answers" in capsys.readouterr().err
        with pytest.raises(UserError, match="no Dask scheduler answers"), workers(dask=address):
            pass


def logged(log: str, job: Any) -> Outcome:
    """A simulation that writes down who does it."""
    with open(log, "a", encoding="utf-8") as file:
        file.write(f"{os.getpid()}\t{job[0]}\n")
    return simulated(job)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A scheduler and two workers, each a process of its own."""
    pytest.importorskip("distributed")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"}
    quiet = {"env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": tmp_path}
    file = tmp_path / "scheduler.json"

    def start(*words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", "distributed.cli.dask_" + words[0], *words[1:],
                                 "--scheduler-file", str(file), "--no-dashboard"], **quiet)  # type: ignore[call-overload]

    started = [start("scheduler", "--host", "127.0.0.1", "--port", "0")]
    started += [start("worker", "--host", "127.0.0.1", "--nthreads", "1", "--no-nanny") for _ in range(2)]
    try:
        from distributed import Client
        until = time.monotonic() + 60
        while not file.exists() and time.monotonic() < until:
            time.sleep(0.05)
        with Client(scheduler_file=str(file), set_as_default=False) as client:
            client.wait_for_workers(2, timeout=60)
            address = client.scheduler.address
        yield address, started
    finally:
        for one in started:
            one.kill()
            one.wait()


@pytest.mark.whole
def test_a_killed_worker_changes_nothing(cluster: tuple[str, list[subprocess.Popen[bytes]]], tmp_path: Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    address, started = cluster
    local = size(SMALL, CHOICE, top=40, out=tmp_path / "local.db")
    added: list[str] = []
    victims: list[subprocess.Popen[bytes]] = []
    keep, log = Store.add, tmp_path / "log"

    def logbook() -> list[tuple[int, str]]:
        lines = [line.split("\t") for line in log.read_text(encoding="utf-8").splitlines()]
        return [(int(pid), key) for pid, key in lines]

    def add(self: Store, outcomes: list[Outcome]) -> None:
        keep(self, outcomes)
        added.extend(one.key for one in outcomes)
        if len(added) >= 12 and not victims:  # midway: the worker that has just taken a job
            victims.extend(one for one in started[1:] if one.pid == logbook()[-1][0])
            threading.Thread(target=victims[0].kill).start()

    monkeypatch.setattr(Store, "add", add)
    monkeypatch.setattr(sys.modules["sim.sizing.search.runner"], "simulated", partial(logged, str(log)))
    far = size(SMALL, CHOICE, top=40, dask=address, out=tmp_path / "far.db")
    (victim,), (survivor,) = victims, [one for one in started[1:] if one not in victims]
    assert victim.wait(10) == -signal.SIGKILL and survivor.poll() is None
    assert len(added) > 24 and len(added) == len(set(added))
    assert table(tmp_path / "far.db") == table(tmp_path / "local.db")
    assert far.best == local.best and far.front == local.front and far.simulated == local.simulated
    done = logbook()
    assert {pid for pid, _ in done} == {victim.pid, survivor.pid}
    lost = {key for pid, key in done if pid == victim.pid}
    twice = {key for key, times in Counter(key for _, key in done).items() if times > 1}
    assert {key for _, key in done} == set(added)
    assert twice <= lost  # nothing of the other worker's: how soon Dask lets go of what arrived is its own affair


def _pids(parent: int) -> set[int]:
    """Processes of a parent (Linux)."""
    return {int(pid) for task in Path(f"/proc/{parent}/task").iterdir()
            for pid in (task / "children").read_text(encoding="ascii").split()}


def _runs(pid: int) -> bool:
    """Whether there is such a process that has not ended (Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not end children with their parent")
def test_processes_of_a_killed_search_end() -> None:
    code = "from sim.sizing.search.workers import workers\nimport time\n" \
           "with workers(2) as w: list(w.each(time.sleep, [60, 60]))"
    child = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)})
    started: set[int] = set()
    for _ in range(400):
        started |= _pids(child.pid)
        if len(started) >= 2:
            break
        time.sleep(0.02)
    child.kill()
    child.wait()
    assert len(started) >= 2
    for _ in range(200):
        alive = [pid for pid in started if _runs(pid)]
        if not alive:
            break
        time.sleep(0.02)
    assert not alive
