"""A scenario changed as its user would change it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from sim.errors import UserError
from sim.scenario import Scenario, load_scenario, resolve
from sim.scenario.change import Changing, said
from sim.scenario.dump import dump

GIVEN: dict[str, Any] = {
    "name": "job", "cluster": {"topology": "dgx-a100-80g", "nodes": 2},
    "model": {"kind": "decoder", "layers": 8, "hidden": 1024, "heads": 16, "vocab": 32000, "positions": "rotary"},
    "training": {"micro_batch": 2, "global_batch": 128, "sequence": 1024}, "parallel": {"strategy": "ddp"}}


def test_defaults_follow_what_is_changed() -> None:
    change = Changing(resolve(GIVEN))
    sharded = change({"parallel.strategy": "fsdp"}).scenario.parallel
    assert (sharded.reduce_every_micro_step, sharded.sharding_factor) == (True, 16)
    assert change({"parallel.strategy": "zero1"}).scenario.parallel.reduce_every_micro_step is False
    older = change({"cluster.topology": "dgx-1v-32g"}).scenario  # whose GPUs have no bf16
    assert older.training.precision.compute == "fp16"


def test_what_was_written_stays() -> None:
    said = {**GIVEN, "parallel": {"strategy": "ddp", "reduce_every_micro_step": False}}
    change = Changing(resolve(said))
    assert change({"parallel.strategy": "fsdp"}).scenario.parallel.reduce_every_micro_step is False
    assert change.wrote("parallel.reduce_every_micro_step") and not change.wrote("parallel.overlap")


def test_shards_over_all_ranks_are_over_all_of_more() -> None:
    job = resolve({**GIVEN, "parallel": {"strategy": "fsdp"}})
    assert Changing(job)({"cluster.nodes": 4}).scenario.parallel.sharding_factor == 32


def test_the_global_batch_stays_where_micro_steps_were_written() -> None:
    training = {"micro_batch": 2, "micro_steps": 4, "sequence": 1024}
    job = resolve({**GIVEN, "training": training})
    scenario, sets = Changing(job)({"training.micro_batch": 1})
    assert scenario.training.global_batch == job.training.global_batch == 128
    assert resolve({**GIVEN, "training": training}, "", sets) == scenario
    twice = Changing(job)({"training.micro_batch": 4, "training.global_batch": 256})
    assert twice.scenario.training.global_batch == 256


def test_a_scenario_changed_without_its_words_is_taken_as_it_is() -> None:
    job = resolve(GIVEN)
    other = job.model_copy(update={"training": job.training.model_copy(update={"micro_batch": 8})})
    change = Changing(other)
    assert change.data == dump(other)
    assert change({}).scenario == other


def test_paths_stay_relative_to_the_file_that_says_them(tmp_path: Path) -> None:
    own = "name: own\ngpu: a100-80g-sxm\ngpus_per_node: 4\nintra: {kind: nvswitch, link: nvlink3}\n"
    (tmp_path / "own.yaml").write_text(own)
    text = ("name: job\ncluster: {topology: ./own.yaml, nodes: 1}\nmodel: {preset: gpt2}\n"
            "training: {micro_batch: 1, global_batch: 8, sequence: 1024}\n")
    (tmp_path / "job.yaml").write_text(text)
    job = load_scenario(tmp_path / "job.yaml").scenario
    assert Changing(job)({"training.micro_batch": 2}).scenario.cluster.gpus_per_node == 4


def test_points_of_a_sweep_know_their_own_words() -> None:
    loaded = load_scenario(Path(__file__).parents[2] / "scenarios" / "llama2-7b-fsdp-scaling.yaml")
    for sets, point in loaded.points():
        assert isinstance(point, Scenario)
        assert Changing(point)({}).scenario == point
        assert Changing(point).data["parallel"] == {"strategy": "fsdp"} or sets


def test_what_was_written_takes_no_part_in_comparisons() -> None:
    job = resolve(GIVEN)
    assert job == resolve(dump(job)) == pickle.loads(pickle.dumps(job))


def test_an_impossible_change_is_refused() -> None:
    with pytest.raises(UserError, match="tensor"):
        Changing(resolve(GIVEN))({"parallel.tensor": 3})


def test_the_fewest_fields_say_a_change() -> None:
    change = Changing(resolve(GIVEN))
    whole = {"parallel.strategy": "fsdp", "parallel.sharding_factor": "full", "parallel.reshard_after_forward": True,
             "parallel.pipeline": 2, "training.micro_batch": 2}
    assert change.fewest(change(whole)) == {
        "parallel.strategy": "fsdp", "parallel.reshard_after_forward": True, "parallel.pipeline": 2}


def test_a_batch_is_said_only_where_micro_steps_would_make_another() -> None:
    change = Changing(resolve({**GIVEN, "training": {"micro_batch": 2, "micro_steps": 4, "sequence": 1024}}))
    assert change.fewest(change({"parallel.strategy": "fsdp"})) == {"parallel.strategy": "fsdp"}
    assert change.fewest(change({"training.micro_batch": 1})) == {
        "training.micro_batch": 1, "training.micro_steps": None, "training.global_batch": 128}


def test_changes_are_written_as_on_the_command_line() -> None:
    sets = {"training.recompute": {"layers": 3}, "training.micro_steps": None, "parallel.overlap": False}
    assert said(sets) == ["training.recompute={layers: 3}", "training.micro_steps=null", "parallel.overlap=false"]
