"""The local page: what it is asked for, what it answers, and whom it refuses."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from sim.errors import Fault, UserError
from sim.web.app import make_app
from sim.web.desk import Desk, example, examples, faults_of

SMALL = """\
name: small
cluster: {topology: dgx-a100-80g}
model: {preset: gpt2}
training: {micro_batch: 1, micro_steps: 1, sequence: 1024}
"""


@pytest.fixture
def client(tmp_path: Path) -> FlaskClient:
    return make_app(Desk(tmp_path / "reports", tmp_path), SMALL).test_client()


def predict(client: FlaskClient, text: str = SMALL, sets: list[str] | None = None) -> Any:
    return client.post("/predict", json={"text": text, "sets": sets or []})


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
    made = predict(client).json
    assert made["number"] == 1 and made["title"] == "small" and made["comparable"]
    assert "per step" in made["text"] and "a step" in made["line"] and "fits" in made["line"]
    assert {"timeline.png", "memory.png"} <= set(made["pictures"])
    for name in (*made["pictures"], *made["files"]):
        assert client.get(f"/report/1/{name}").status_code == 200
    assert client.get("/report/1/../../secret").status_code == 404


def test_a_sweep_is_run_whole(client: FlaskClient) -> None:
    made = predict(client, SMALL + "sweep: {cluster.nodes: [1, 2, 4]}\n").json
    assert made["line"] == "3 points" and not made["comparable"] and "sweep.png" in made["pictures"]
    assert client.get("/compare/1/1").status_code == 404


def test_two_predictions_side_by_side(client: FlaskClient) -> None:
    predict(client)
    predict(client, sets=["training.recompute=full"])
    found = client.get("/compare/1/2").json
    assert found is not None and "training.recompute" in found["text"]
    assert client.get(f"/report/{found['number']}/{found['picture']}").status_code == 200
    assert client.get("/compare/1/7").status_code == 404


def test_faults_come_with_their_line_in_the_editor(client: FlaskClient) -> None:
    answer = predict(client, SMALL.replace("gpt2", "gpt9"), ["cluster.nods=2"])
    assert answer.status_code == 422
    by_line = {fault["line"]: fault["text"] for fault in answer.json["faults"]}
    assert by_line[3].startswith("line 3: model.preset: ") and "cluster.nods" in by_line[0]
    elsewhere = faults_of(UserError(Fault("odd", "gpu", "card.yaml", 4)))
    assert elsewhere == [{"text": "card.yaml:4: gpu: odd", "line": 0}]


@pytest.mark.parametrize("body", [[], {}, {"text": 7}, {"text": SMALL, "sets": "x"}, {"text": SMALL, "sets": [1]}])
def test_what_is_no_question_is_refused(client: FlaskClient, body: Any) -> None:
    assert client.post("/predict", json=body).status_code == 400


def test_too_large_a_text_is_refused(client: FlaskClient) -> None:
    assert predict(client, "x" * (3 << 20)).status_code == 413


@pytest.mark.parametrize(("host", "code"), [("localhost:8321", 200), ("127.0.0.1:8321", 200), ("[::1]:8321", 200),
                                            ("localhost", 200), ("evil.example:8321", 403), ("evil.example", 403)])
def test_pages_elsewhere_cannot_ask(client: FlaskClient, host: str, code: int) -> None:
    assert client.get("/start", headers={"Host": host}).status_code == code


def test_paths_are_those_of_the_scenario_s_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("gpu: a100-80g-sxm\ngpus_per_node: 2\nnodes: 1\n"
                                        "intra: {kind: nvswitch, link: nvlink3, links_per_gpu: 12}\n")
    made = Desk(tmp_path / "reports", tmp_path).predict(SMALL.replace("dgx-a100-80g", "mine.yaml"))
    assert "2 × a100-80g-sxm" in made.text


def test_the_command_serves_until_it_is_stopped(tmp_path: Path) -> None:
    """By SIGTERM here: a process started in the background of a script has SIGINT ignored."""
    command = [sys.executable, "-m", "sim", "ui", "--no-browser", "--port", "0"]
    places = {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=places) as server:
        try:
            assert server.stderr is not None
            address = server.stderr.readline().split()[0]
            with urllib.request.urlopen(f"{address}start", timeout=20) as answer:
                assert b"Llama-2-7B" in answer.read()
            server.terminate()
            assert server.wait(20) == 0
            assert not list(tmp_path.iterdir())
        finally:
            server.kill()


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ran = subprocess.run([sys.executable, "-m", "sim", "ui", "--no-browser", "--port", str(taken.getsockname()[1])],
                             capture_output=True, text=True, check=False)
    assert ran.returncode == 2 and "is taken" in ran.stderr and "Traceback" not in ran.stderr
