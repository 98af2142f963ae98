"""Work in processes side by side: forked in a process of our own, since a test's may have threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from sim import beside

ROOT = Path(__file__).parents[1]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")


def script(code: str) -> list[str]:
    head = "import os, signal, sys, threading, time\nfrom sim import beside\nbeside.processors = lambda: 3\n"
    return [sys.executable, "-c", head + textwrap.dedent(code)]


def said(code: str) -> list[str]:
    done = subprocess.run(script(code), capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split()


@LINUX
def test_what_is_made_comes_in_order_from_other_processes_that_have_what_the_parent_has() -> None:
    assert said("""
    big = {"lock": threading.Lock(), "value": 7}  # which cannot be handed over
    def work(item):
        time.sleep(0.03 * (2 - item))
        return item * big["value"], os.getpid()
    found = beside.each(work, [0, 1, 2])
    print(*(value for value, _ in found), len({pid for _, pid in found} - {os.getpid()}))
    print(*(pid == os.getpid() for _, pid in beside.each(work, [1, 2], worth=False)))
    print(*beside.each(lambda item: [value for value, _ in beside.each(work, [item, 1])], [0, 2]))
    """) == [*["0", "7", "14", "3"], "True", "True", "[0,", "7]", "[14,", "7]"]


@LINUX
def test_what_goes_wrong_is_raised_and_with_threads_nothing_is_forked() -> None:
    assert said("""
    from sim.errors import Fault, UserError
    def work(item):
        if item == 1:
            raise UserError(Fault("no", "field"))
        return os.getpid()
    try:
        beside.each(work, [0, 1, 2])
    except UserError as error:
        print(error.faults[0].message)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    print(set(beside.each(work, [0, 2])) == {os.getpid()})
    stop.set()
    thread.join()
    """) == ["no", "True"]


@LINUX
def test_an_interrupt_ends_all_processes_at_once() -> None:
    code = """
    def work(item):
        os.write(1, f"{os.getpid()}\\n".encode())
        time.sleep(60)
    try:
        beside.each(work, [0, 1, 2])
    except KeyboardInterrupt:
        sys.exit(130)
    """
    with subprocess.Popen(script(code), stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True) as running:
        assert running.stdout is not None
        workers = [int(running.stdout.readline()) for _ in range(3)]
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does
        assert running.wait(20) == 130
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


@LINUX
def test_where_a_process_is_killed_the_work_is_done_here() -> None:
    assert said("""
    here = os.getpid()
    def work(item):
        if item == 1 and os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return item, os.getpid() == here
    print(*beside.each(work, [0, 1]))
    """) == ["(0,", "True)", "(1,", "True)"]


def test_here_the_work_is_done_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "_may_fork", lambda: False)
    found = beside.each(lambda item: (item, threading.get_ident()), [3, 1, 2])
    assert found == [(item, threading.get_ident()) for item in (3, 1, 2)] and beside.each(str, []) == []
