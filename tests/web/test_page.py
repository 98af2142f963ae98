"""The local page: what it is asked for, what it answers, and whom it refuses."""

from __future__ import annotations

import errno
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from sim.api import run_sweep
from sim.commands import ui as cli_ui
from sim.errors import Fault, UserError
from sim.web import desk as desk_module
from sim.web.app import make_app
from sim.web.desk import Desk, Dropped, Watch, example, examples
from sim.web.door import Door
from sim.web.faults import faults_of
from sim.web.jobs import Jobs

SMALL = """\
name: small
cluster: {topology: dgx-a100-80g}
model: {preset: gpt2}
training: {micro_batch: 1, micro_steps: 1, sequence: 1024}
"""


SWEPT = SMALL + "sweep: {cluster.nodes: [1, 2, 4], training.micro_batch: [1, 2]}\n"
#: Seconds that any of these may take before something hangs.
PATIENCE = 60


@pytest.fixture
def door() -> Door:
    return Door()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    made = Jobs(Desk(tmp_path / "reports", tmp_path))
    yield made
    for job in list(made._jobs.values()):
        job.watch.stop()
        assert job.ended.wait(PATIENCE)


@pytest.fixture
def stranger(jobs: Jobs, door: Door) -> FlaskClient:
    return make_app(jobs, SMALL, door).test_client()


@pytest.fixture
def client(stranger: FlaskClient, door: Door) -> FlaskClient:
    assert stranger.get(f"/?token={door.token}").status_code == 200
    return stranger


def own(client: FlaskClient, path: str, **asked: Any) -> Any:
    """What the server answers below the path of its own start."""
    start = client.get("/start").json
    assert start is not None
    return client.open(f"/{start['instance']}/{path}", **asked)


def ask(client: FlaskClient, text: str = SMALL, sets: list[str] | None = None) -> Any:
    return own(client, "predict", method="POST", json={"text": text, "sets": sets or []})


def ended(client: FlaskClient, number: int) -> Any:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        answer = own(client, f"job/{number}")
        if "state" not in answer.json:
            return answer
    raise AssertionError(f"prediction {number} does not end")


def predict(client: FlaskClient, text: str = SMALL, sets: list[str] | None = None) -> Any:
    return ended(client, ask(client, text, sets).json["job"])


def test_the_page_and_what_it_starts_with(client: FlaskClient) -> None:
    assert b"<title>drystep</title>" in client.get("/").data
    for name in ("page.js", "page.css"):
        assert client.get(f"/static/{name}").status_code == 200
    start = client.get("/start").json
    assert start is not None and start["text"] == SMALL and start["examples"] == examples()
    shown = client.get("/example/llama2-7b-fsdp").json
    assert shown is not None and shown["text"] == example("llama2-7b-fsdp")
    assert client.get("/example/none").status_code == 404


def test_a_prediction_has_text_pictures_and_files(client: FlaskClient) -> None:
    made = predict(client).json["entry"]
    assert made["number"] == 1 and made["title"] == "small" and made["comparable"]
    assert "per step" in made["text"] and "a step" in made["line"] and "fits" in made["line"]
    assert {"timeline.png", "memory.png"} <= set(made["pictures"])
    for name in (*made["pictures"], *made["files"]):
        assert own(client, f"report/1/{name}").status_code == 200
    assert own(client, "report/1/../../secret").status_code == 404
    start = client.get("/start").json
    assert start is not None and start["entries"] == [made]


def test_advice_can_be_told_from_the_rest_of_a_report(client: FlaskClient) -> None:
    """The page's own patterns find every change that makes a job fit, in the form that the box of changes takes."""
    script = client.get("/static/page.js").text
    advised, setting = (re.search(rf"^const {name} = /(.*)/[mg];", script, re.MULTILINE)[1]  # type: ignore[index]
                        for name in ("ADVISED", "SETTING"))
    sets = ["training.micro_batch=256"]
    answer = predict(client, sets=sets).json["entry"]
    lines = re.findall(advised, answer["text"], re.MULTILINE)
    assert len(lines) > 1 and "".join(lines).count("--set ") == answer["text"].count("--set ") > len(lines)
    for found in lines:
        changes = [quoted or plain for quoted, plain in re.findall(setting, found)]
        assert "does not fit" not in predict(client, sets=[*sets, *changes]).json["entry"]["line"]


def test_a_sweep_is_run_whole(client: FlaskClient) -> None:
    made = predict(client, SWEPT, ["training.micro_batch=2"]).json["entry"]
    assert made["line"] == "3 points" and not made["comparable"] and "sweep.png" in made["pictures"]
    assert made["text"].startswith("training.micro_batch is given by the changes: it is not swept\n\n")
    refused = own(client, "compare/1/1")
    assert refused.status_code == 404 and "is a sweep" in refused.json["error"]


def test_too_many_collectives_are_left_out_of_the_file_and_counted(client: FlaskClient,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipelines of many micro-batches have millions: the page did not answer for minutes, and could not be stopped."""
    text = SMALL + "sweep: {training.micro_steps: [1, 2]}\nparallel: {strategy: fsdp}\n"
    whole = predict(client, text).json["entry"]
    few, many = own(client, "report/1/result.json").get_json(force=True)["points"]
    assert "lacks" not in whole["text"] and len(many["traffic"]) > len(few["traffic"]) > 0
    monkeypatch.setattr(desk_module, "_COLLECTIVES", len(few["traffic"]))
    cut = predict(client, text).json["entry"]
    points = own(client, "report/2/result.json").get_json(force=True)["points"]
    assert points[0]["traffic"] == few["traffic"] and "traffic" not in points[1]
    assert f"\nresult.json lacks {len(many['traffic'])} collectives, " in cut["text"]
    single = predict(client, text, ["sweep={}", "training.micro_steps=2"]).json["entry"]
    assert f"\nresult.json lacks {len(many['traffic'])} collectives, " in single["text"]


def test_two_predictions_side_by_side(client: FlaskClient, jobs: Jobs) -> None:
    long = f"a scenario whose {'very ' * 12}long name is told whole"
    predict(client, SMALL.replace("small", long))
    predict(client, SMALL.replace("small", long), ["", " training.recompute=full "])
    found = own(client, "compare/1/2").json
    assert found["title"] == f"2: {long} (recompute full) against 1: {long} (recompute none)"
    assert f"{found['title']}: " in found["text"]
    assert own(client, f"report/{found['picture']}").status_code == 200
    assert own(client, "compare/1/7").json == {"error": "there is no prediction 7"}
    del jobs.desk._results[1]
    refused = own(client, "compare/1/2")
    assert refused.status_code == 404 and "prediction 1 is no longer kept" in refused.json["error"]


def test_faults_come_with_their_line_in_the_editor_and_in_the_changes(client: FlaskClient) -> None:
    changes = ["", "cluster.nods=2", "foo", "training.micro_batch=[", "=1"]
    answer = predict(client, SMALL.replace("gpt2", "gpt9"), changes)
    assert answer.status_code == 422
    faults = {(fault["box"], fault["line"]): fault["text"] for fault in answer.json["faults"]}
    assert faults["scenario", 3].startswith("line 3: model.preset: ")
    assert faults["changes", 2].startswith("changes, line 2: cluster.nods: ")
    assert faults["changes", 3] == "changes, line 3: 'foo' has no '=' (write path=value)"
    assert faults["changes", 4].startswith("changes, line 4: training.micro_batch: the value '[' ")
    assert faults["changes", 5].startswith("changes, line 5: '' is not a dotted path")
    assert not any("--set" in text for text in faults.values())
    elsewhere = faults_of(UserError(Fault("odd", "gpu", "card.yaml", 4)))
    assert elsewhere == [{"text": "card.yaml:4: gpu: odd", "line": 0, "box": ""}]
    empty = predict(client, "").json["faults"]
    assert [(fault["line"], fault["text"][:21]) for fault in empty] == [(0, "the scenario is empty")]


@pytest.mark.parametrize("body", ["[]", "{}", '{"text": 7}', '{"text": "x", "sets": "x"}', '{"text": "x", "sets": [1]}',
                                  '{"text": "\\ud800"}', '{"text": "x", "sets": ["\\udfff=1"]}', "[" * 200_000, "{",
                                  json.dumps({"text": SMALL, "sets": ["a=1"] * 1001})])
def test_what_is_no_question_is_refused(client: FlaskClient, body: str) -> None:
    answer = own(client, "predict", method="POST", data=body, content_type="application/json")
    assert answer.status_code == 400 and answer.json["error"]


@pytest.mark.parametrize("mib", [1, 3])
def test_too_large_a_text_is_refused(client: FlaskClient, mib: int) -> None:
    answer = ask(client, "x" * ((mib << 20) + 1))
    assert answer.status_code == 413 and answer.json == {"error": "the text is larger than 1 MiB"}


def test_what_nobody_expected_is_told_in_a_line(client: FlaskClient, monkeypatch: pytest.MonkeyPatch,
                                                capfd: pytest.CaptureFixture[str]) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("by nought\nand more")

    monkeypatch.setattr(desk_module, "run", broken)
    answer = predict(client)
    assert answer.status_code == 500 and answer.json == {"error": "ZeroDivisionError: by nought"}
    monkeypatch.setattr(Desk, "compare", broken)
    answer = own(client, "compare/1/2")
    assert answer.status_code == 500 and answer.json == {"error": "ZeroDivisionError: by nought"}
    assert capfd.readouterr().err == "drystep ui: ZeroDivisionError: by nought\n" * 2


# --------------------------------------------------------------------------------------------------- progress and stop
@contextmanager
def held(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[None]:
    """While this lasts, predictions wait after their first point (`run_sweep`) or their only one (`run`)."""
    go = threading.Event()
    real = getattr(desk_module, name)

    def held_up(progress: Any, done: int, total: int) -> None:
        progress(done, total)
        assert go.wait(PATIENCE)

    def slow(loaded: Any, progress: Any = None, each: Any = None) -> Any:
        if name == "run":
            assert go.wait(PATIENCE)
            return real(loaded)
        return run_sweep(loaded, progress=lambda done, total: held_up(progress, done, total), each=each)

    monkeypatch.setattr(desk_module, name, slow)
    try:
        yield
    finally:
        go.set()


def state(client: FlaskClient, number: int, **wanted: Any) -> Any:
    """The state of a prediction as soon as it is as wanted."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        found = own(client, f"job/{number}").json
        if all(found.get(name) == value for name, value in wanted.items()):
            return found
    raise AssertionError(f"prediction {number} is never {wanted}")


def test_a_sweep_says_how_far_it_is_and_can_be_stopped(client: FlaskClient, monkeypatch: pytest.MonkeyPatch) -> None:
    with held(monkeypatch, "run_sweep"):
        number = ask(client, SWEPT).json["job"]
        found = state(client, number, state="running", done=1)
        assert found["total"] == 6 and not found["stopping"] and found["seconds"] >= 0
        after = ask(client).json["job"]
        other = state(client, after, state="waiting")["other"]
        assert other["job"] == number and (other["done"], other["total"]) == (1, 6)
        assert own(client, f"stop/{number}", method="POST").json["stopping"]
    made = ended(client, number).json["entry"]
    assert made["line"] == "2 points, stopped after 2 of 6" and made["text"].startswith(made["line"])
    assert "sweep.png" in made["pictures"]
    assert ended(client, after).json["entry"]["number"] == 2


def test_the_result_of_a_single_run_is_dropped(client: FlaskClient, monkeypatch: pytest.MonkeyPatch) -> None:
    with held(monkeypatch, "run"):
        first = ask(client).json["job"]
        state(client, first, state="running")
        second = ask(client).json["job"]
        assert state(client, second, state="waiting")["other"]["total"] == 0
        for number in (first, second):
            own(client, f"stop/{number}", method="POST")
    assert ended(client, first).json == ended(client, second).json == {"dropped": True}
    start = client.get("/start").json
    assert start is not None and start["entries"] == []
    assert own(client, "job/9").status_code == own(client, "stop/9", method="POST").status_code == 404


def test_what_was_stopped_before_it_began_is_not_predicted(tmp_path: Path) -> None:
    watch = Watch()
    watch.stop()
    with pytest.raises(Dropped):
        Desk(tmp_path / "reports", tmp_path).predict(SWEPT, watch=watch)
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------- who may ask
@pytest.mark.parametrize(("host", "code"), [("localhost:8321", 200), ("127.0.0.1:8321", 200), ("[::1]:8321", 200),
                                            ("localhost", 200), ("evil.example:8321", 403), ("evil.example", 403)])
def test_pages_elsewhere_cannot_ask(stranger: FlaskClient, door: Door, host: str, code: int) -> None:
    assert stranger.get(f"/?token={door.token}", headers={"Host": host}).status_code == code


def test_who_has_not_the_printed_address_is_refused(stranger: FlaskClient, door: Door) -> None:
    for path in ("/", "/?token=x", "/?token=ü", "/start", f"/start?token={door.token}", "/static/page.js",
                 f"/{door.instance}/report/1/report.txt", "/elsewhere/job/1"):
        refused = stranger.get(path)
        assert refused.status_code == 403 and refused.text.startswith("open the address that drystep ui printed")
    stranger.set_cookie("drystep-80", "wrong")
    assert stranger.get("/start").status_code == 403
    cookie = stranger.get(f"/?token={door.token}").headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and cookie.startswith("drystep-80=")
    assert stranger.get("/start").status_code == 200
    assert stranger.get("/start", headers={"Host": "localhost:9000"}).status_code == 403  # of another port


def test_the_address_that_a_browser_is_started_with_opens_once(jobs: Jobs, door: Door) -> None:
    ticket = door.ticket()
    app = make_app(jobs, SMALL, door)
    first, second = app.test_client(), app.test_client()
    assert first.get(f"/?token={ticket}").status_code == first.get("/start").status_code == 200
    assert second.get(f"/?token={ticket}").status_code == 403


def test_a_page_of_an_earlier_start_is_told(client: FlaskClient) -> None:
    assert client.get("/0000/report/1/report.txt").status_code == 409
    answer = client.post("/0000/predict", json={"text": SMALL})
    assert answer.json == {"error": "the server was restarted: reload the page"}


# ------------------------------------------------------------------------------------------------------- the command


def test_paths_are_those_of_the_scenario_s_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("gpu: a100-80g-sxm\ngpus_per_node: 2\nnodes: 1\n"
                                        "intra: {kind: nvswitch, link: nvlink3, links_per_gpu: 12}\n")
    made = Desk(tmp_path / "reports", tmp_path).predict(SMALL.replace("dgx-a100-80g", "mine.yaml"))
    assert "2 × a100-80g-sxm" in made.text


def line_of(stream: Any) -> str:
    """A line that a process writes; fails where none comes."""
    assert select.select([stream], [], [], PATIENCE)[0], "the server says nothing"
    return str(stream.readline())


def test_the_command_serves_until_it_is_stopped(tmp_path: Path) -> None:
    """By SIGTERM, here during a sweep: a process started in the background of a script has SIGINT ignored."""
    command = [sys.executable, "-m", "sim", "ui", "--no-browser", "--port", "0"]
    places = {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "TMPDIR": str(tmp_path),
              "MPLCONFIGDIR": os.environ.get("MPLCONFIGDIR", str(Path.home() / ".config" / "matplotlib"))}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=places) as server:
        try:
            address, _, token = line_of(server.stderr).split()[0].partition("?token=")
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(f"{address}start", timeout=20)
            with urllib.request.urlopen(f"{address}?token={token}", timeout=20) as answer:
                cookie = {"Cookie": answer.headers["Set-Cookie"].partition(";")[0]}
            asked = urllib.request.Request(f"{address}start", headers=cookie)
            with urllib.request.urlopen(asked, timeout=20) as answer:
                start = json.load(answer)
            assert "Llama-2-7B" in start["text"]
            many = SMALL + f"sweep: {{training.sequence: {list(range(128, 1128))}}}\n"
            asked = urllib.request.Request(f"{address}{start['instance']}/predict", json.dumps({"text": many}).encode(),
                                           cookie | {"Content-Type": "application/json"})
            with urllib.request.urlopen(asked, timeout=20) as answer:
                assert json.load(answer) == {"job": 1}
            server.send_signal(signal.SIGTERM)
            assert server.wait(PATIENCE) == 0
            assert server.stderr is not None and server.stderr.read() == "\n"
            assert not list(tmp_path.iterdir())
        finally:
            server.kill()


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ran = subprocess.run([sys.executable, "-m", "sim", "ui", "--no-browser", "--port", str(taken.getsockname()[1])],
                             capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert ran.returncode == 2 and "is taken" in ran.stderr
    assert "Traceback" not in ran.stderr and "in use" not in ran.stderr


@pytest.mark.parametrize(("code", "said"), [
    (errno.EADDRINUSE, "port 80 is taken"), (errno.EACCES, "port 80 is not open to you: those below 1024"),
    (errno.ENOBUFS, f"port 80 cannot be used: {os.strerror(errno.ENOBUFS)}")])
def test_why_a_port_cannot_be_had(monkeypatch: pytest.MonkeyPatch, code: int, said: str) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(UserError, match=said):
        cli_ui._listen(80)
