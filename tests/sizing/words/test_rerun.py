"""The command that a search prints runs what the search found."""

import random
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

import sim
from sim import sizing
from sim.api import load
from sim.scenario import resolve
from sim.sizing.space.base import alone, following
from sim.sizing.space.layouts import build_space
from sim.sizing.words.rerun import command
from sim.sizing.words.size import layout_of, lines

_SCENARIO = """\
name: rerun
cluster: {topology: dgx-a100-80g, nodes: 1}
model: {layers: 8, hidden: 2048, heads: 16, vocab: 32000}
training: {micro_batch: 1, global_batch: 64, sequence: 2048, precision: fsdp-bf16}
parallel: {strategy: fsdp, pipeline: 2, split: [5, 3]}
software: {framework: pytorch, year: 2024}
"""


@pytest.mark.parametrize(("changed", "topology"), [
    ("", None), ("sweep: {cluster.nodes: [1, 2]}\n", None), ("", "dgx-h100")])
def test_the_command_runs_what_was_found(tmp_path: Path, changed: str, topology: str | None) -> None:
    path = tmp_path / "my run.yaml"
    path.write_text(_SCENARIO + changed, encoding="utf-8")
    given = ["training.global_batch=32"]
    choice = sizing.Choice((8,), tensor=(1, 2), context=(1,), micro_batch=(1, 2), schedules=("1f1b", "zb-h1"),
                           partial_recompute=False)
    found = sizing.size(load(path, given), choice, clusters=[topology] if topology else [])
    assert found.winner is not None
    best = found.best[0]
    text = command(str(path), given, found.winner, best["set"], topology)
    assert text is not None
    words = shlex.split(text)
    assert words[:3] == ["drystep", "run", str(path)] and "training.global_batch=32" in words
    sets = words[4::2]
    assert set(words[3::2]) == {"--set"} and ("sweep={}" in sets) == bool(changed)
    again = sim.run(load(path, sets).scenario)
    assert again.step_time_s == pytest.approx(best["step_time_s"], rel=1e-12) and again.gpus == best["gpus"]
    assert f"run the best:\n  {text}" in "\n".join(lines(found, text))


def test_what_set_cannot_say_has_no_command(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(_SCENARIO, encoding="utf-8")
    scenario = load(path).scenario
    other = scenario.model_copy(update={"model": scenario.model.model_copy(update={"hidden": 4096})})
    assert command(str(path), [], other, {"cluster.nodes": 1}, None) is None
    assert command(str(path), [], scenario, {"cluster.nodes": 1}, None) == f"drystep run {path}"


def test_a_layout_names_what_is_on() -> None:
    sets = {"cluster.nodes": 4, "training.micro_batch": 1, "training.recompute": "none", "parallel.strategy": "fsdp",
            "parallel.tensor": 2, "parallel.sequence_parallel": True, "parallel.pipeline": 1,
            "parallel.schedule": "1f1b", "parallel.reshard_after_forward": False}
    assert layout_of(sets) == "recompute=none strategy=fsdp tensor=2 sequence_parallel"
    assert layout_of(sets | {"parallel.sequence_parallel": False}) == "recompute=none strategy=fsdp tensor=2"


def test_a_best_on_the_edge_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(_SCENARIO, encoding="utf-8")
    choice = sizing.Choice((8,), tensor=(1,), context=(1,), pipeline=(1,), micro_batch=(1,), partial_recompute=False)
    found = sizing.size(load(path), choice)
    assert found.free_bytes is not None and found.free_bytes > 40 * 2**30
    told = "--memory-margin"
    assert told not in "\n".join(lines(found))
    assert told in "\n".join(lines(replace(found, free_bytes=0.1 * 2**30)))


def test_every_layout_of_a_space_can_be_said(tmp_path: Path) -> None:
    """Defaults follow from other fields (what is whole behind forward in a pipeline), and the file has a split."""
    path = tmp_path / "a.yaml"
    path.write_text(_SCENARIO, encoding="utf-8")
    base = alone(load(path).scenario, None)
    space, plain = build_space([base], sizing.Choice((8,), context=(1,))), following(base)
    for row in random.Random(3).sample(range(len(space)), 30):
        sets = space.sets(row)
        assert command(str(path), [], resolve(plain, "", sets), sets, None) is not None, sets
