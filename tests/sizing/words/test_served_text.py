"""What `size` and `compare` print of requests, and what their wishes come to."""

from __future__ import annotations

import csv
import json
import shlex
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

import sim
from sim.cli import main
from sim.sizing import Choice, Wish, compare, size
from sim.sizing.wish import EXCESS, Request
from sim.sizing.words.compare import lines as comparison_lines
from sim.sizing.words.requests import apart
from sim.sizing.words.size import lines

SERVING = """\
name: small
cluster: {topology: dgx-h100}
model: {preset: llama-3-8b, layers: 4}
training:
  precision: pure-bf16
  mode: {inference: {prompt: 128, generate: 8, batch: 4}}
parallel: {tensor: 8}
software: {year: 2024, compile: true, cuda_graphs: true}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "serving.yaml"
    path.write_text(SERVING)
    return str(path)


def told(*arguments: str) -> tuple[str, int]:
    out = StringIO()
    with redirect_stdout(out), redirect_stderr(out), pytest.raises(SystemExit) as ended:
        sys.exit(main(list(arguments)))
    return out.getvalue(), int(ended.value.code or 0)


# -------------------------------------------------------------------------------------------------------------- wishes
@pytest.mark.parametrize(("objective", "value"), [
    ("time", 2.0), ("latency", 0.02), ("first-token", 0.4), ("throughput", 2 / 400),
    ("cost", 8 * 2 / 400 / 3600 * 3 * 1e6), ("energy", 1000 / 400), ("gpus", 8 + 0.04 / 1.04)])
def test_a_wish_of_a_request(objective: str, value: float) -> None:
    """Eight GPUs at 3 USD an hour make 400 tokens in 2 s and 1,000 J; the first comes after 0.4 s."""
    got = Wish(objective).value(2.0, 8, 3.0, 1000.0, Request(0.4, 0.02, 400.0))
    assert float(got) == pytest.approx(value)


@pytest.mark.parametrize(("limits", "excess"), [
    ({"latency_s": 0.02}, 1.0), ({"latency_s": 0.019}, 0.02 / 0.019), ({"first_token_s": 0.2}, 2.0),
    ({"throughput": 200.0}, 1.0), ({"throughput": 600.0}, 3.0), ({"latency_s": 0.01, "throughput": 600.0}, 3.0)])
def test_a_broken_limit_rules_out_and_how_far_says_what_is_nearest(limits: dict[str, float], excess: float) -> None:
    wish, request = Wish("cost", **limits), Request(0.4, 0.02, 400.0)
    assert (float(wish.value(2.0, 8, 3.0, 1000.0, request)) < float("inf")) == (excess <= 1)
    assert wish.unlimited.objective == EXCESS
    assert float(wish.unlimited.value(2.0, 8, 3.0, 1000.0, request)) == pytest.approx(excess)


# --------------------------------------------------------------------------------------------------------------- text
def test_the_table_says_what_a_user_of_the_service_sees(file: str) -> None:
    text, code = told("size", file, "--gpus", "1..8", "--only", "batch=1,16", "--weights", "bf16,int4", "--latency",
                      "5 ms", "--workers", "1", "--price", "3")
    assert code == 0 and "the best is proven" in text
    for head in ("per token", "first token", "tokens/s", "GPU-hours/M", "J/token", "USD/M", "memory"):
        assert head in text
    assert "best by cost within the limits" in text
    assert "Pareto front within the limits (no other way looked at beats them" in text
    assert "all its sequences in step; under load" in text and "batches tried: 1, 16" not in text
    assert "the best has the largest batch that was tried; larger ones: --only batch=32,64" in text
    assert "the scenario's own layout" not in text  # its batch of four was not asked for
    for name in ("tensor + pipeline", "one GPU", "weights bf16", "weights int4"):
        assert f"\n  {name} " in text
    assert " replicas" not in text.split("layout")[0]


def test_the_command_that_is_told_runs_the_best(file: str, tmp_path: Path) -> None:
    found = size(file, Choice([1, 2, 4], batch=[3, 16], weights=["bf16", "fp8-products"], kv_cache=["fp8"]))
    text, _ = told("size", file, "--gpus", "1..4", "--only", "batch=3,16", "--weights", "bf16,fp8-products",
                   "--kv-cache", "fp8", "--workers", "1")
    command = shlex.split(next(line for line in text.splitlines() if line.startswith("  drystep run")))
    again = tmp_path / "again.json"
    assert told(*command[1:], "--json", str(again))[1] == 0
    result, best = json.loads(again.read_text()), found.best[0]
    assert result["step_time_s"] == pytest.approx(best["step_time_s"], rel=1e-12)
    assert result["inference"]["time_per_token_s"] == pytest.approx(best["time_per_token_s"], rel=1e-12)
    assert result["tokens_per_second"] == pytest.approx(best["tokens_per_second"], rel=1e-12)
    assert result["memory"]["device_used_bytes"] == best["device_used_bytes"]


def test_what_keeps_no_limit_is_told_with_what_comes_nearest(file: str) -> None:
    text, code = told("size", file, "--gpus", "8", "--only", "batch=1", "--latency", "10 us", "--workers", "1")
    assert code == 0 and "that no layout does what is asked is proven" in text
    assert "nothing keeps the limits; nearest to them (latency " in text and "limit 10 µs)" in text


def test_the_scenarios_own_layout_is_held_against_the_limits(file: str) -> None:
    text, _ = told("size", file, "--gpus", "8", "--only", "batch=1,4,64", "--throughput", "4000", "--workers", "1")
    own = next(line for line in text.splitlines() if line.startswith("the scenario's own layout"))
    tokens = sim.run(file).tokens_per_second
    assert ("it breaks the limits" in own) == (tokens < 4000) and f"{tokens:,.0f} tokens/s" in own
    assert "of the best's" in own or tokens < 4000


def test_numbers_for_other_programs(file: str, tmp_path: Path) -> None:
    out, table = tmp_path / "found.json", tmp_path / "rows.csv"
    assert told("size", file, "--gpus", "2,4", "--only", "batch=1,8", "--first-token", "1 s", "--workers", "1",
                "--json", str(out), "--csv", str(table), "--report", str(tmp_path / "report"))[1] == 0
    found = json.loads(out.read_text())
    assert found["objective"] == "cost" and found["inference"] == {"batches": [1, 8], "limits": {
        "time_per_token_s": None, "prompt_time_s": 1.0, "tokens_per_second": None}}
    best = found["best"][0]
    assert best["tokens_per_second"] == pytest.approx(best["replicas"] * 8 * best["set"][
        "training.mode.inference.batch"] / best["step_time_s"])
    assert best["gpu_hours"] == pytest.approx(best["gpus"] * 1e6 / best["tokens_per_second"] / 3600)
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == found["simulated"] and {"prompt_time_s", "time_per_token_s", "replicas"} <= set(rows[0])
    assert (tmp_path / "report" / "front.png").stat().st_size > 10_000


@pytest.mark.parametrize(("arguments", "said"), [
    (("--latency", "30"), "--latency: '30' is no time"),
    (("--latency", "0 ms"), "--latency: '0 ms' is no time above 0"),
    (("--first-token", "soon"), "--first-token: 'soon' is no time"),
    (("--budget", "5"), "--deadline / --budget: a deadline"),
    (("--deadline", "3 days"), "--deadline / --budget: a deadline"), (("--overlap-p2p",), "--overlap-p2p: transfers"),
    (("--offload", "optimizer"), "--offload: 'optimizer' is not one of none, parameters")])
def test_options_that_say_nothing_of_a_request(arguments: tuple[str, ...], said: str, file: str) -> None:
    text, code = told("size", file, "--gpus", "8", *arguments)
    assert code == 2 and said in text and "Traceback" not in text


def test_of_the_front_what_is_hardly_faster_than_something_cheaper_is_not_shown() -> None:
    rows = [{"gpus": 1, "time_per_token_s": time, "cost": cost, "step_time_s": 1.0}
            for time, cost in ((10.0, 9.0), (10.4, 5.0), (10.9, 2.0), (11.0, 1.0))]
    assert [row["cost"] for row in apart(rows)] == [5.0, 1.0]  # 11.0 is within 5% of 10.9 alone, 10.4 of 10.0
    rows[3]["gpus"] = 2
    assert [row["cost"] for row in apart(rows)] == [9.0, 2.0, 1.0]  # 11.0 takes more GPUs, and 10.9 is near 10.4 alone


# ------------------------------------------------------------------------------------------------------------- compare
def test_a_comparison_counts_a_gpus_time_for_a_token(file: str) -> None:
    """Requests of another batch have other tokens: what each costs is compared, not how long all of them take."""
    one, other = sim.run(file), sim.run(sim.load(file, ["training.mode.inference.batch=64", "parallel.tensor=2"]))
    found = compare([one, other])
    for i, result in enumerate((one, other)):
        assert sum(values[i] for values in found.terms.values()) == pytest.approx(found.whole_s[i])
        assert found.whole_s[i] == pytest.approx(result.gpus / result.tokens_per_second)
    assert found.whole_s[1] < found.whole_s[0] and other.step_time_s > one.step_time_s
    assert not [path for path in found.differs if "global_batch" in path]
    text = "\n".join(comparison_lines(found))
    assert " to the first, " in text and "of GPU time a token (-" in text and "work per token x1" in text
    assert one.inference is not None
    assert found.to_json()["inference"][0]["time_per_token_s"] == one.inference.time_per_token_s
    assert {"prompt_time_s", "time_per_token_s"} <= set(one.row)


def test_a_request_beside_a_step_is_compared_by_its_time(file: str) -> None:
    trained = sim.run(sim.load(file, ["training.mode=train", "training.sequence=128", "training.micro_batch=1",
                                   "training.global_batch=8", "parallel.tensor=1"]))
    found = compare([sim.run(file), trained])
    assert not found.served and found.whole_s == found.step_time_s


def test_the_words_of_a_search_from_python(file: str) -> None:
    found = size(file, Choice([2], batch=[1]), Wish("first-token"))
    text = "\n".join(lines(found))
    assert "best by first-token" in text and "2 GPUs" in text
    assert found.told(0.25) == "250 ms to the first token"
