"""Settings out of files, the draft they go into, and what is written of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sim.errors import UserError
from sim.imports.draft import Draft
from sim.imports.hugging.facts import Job
from sim.imports.settings import Said, Settings, read_settings
from sim.imports.write import to_json, to_text, to_yaml
from sim.scenario import load_scenario

ON = ("cluster.topology=dgx-a100-80g", "model.preset=llama-2-7b")


def said(name: str, value: object, file: str = "a.json", line: int = 3) -> Said:
    return Said(file, name, value, line)


def draft() -> Draft:
    made = Draft(name="mine")
    made.take("training.micro_batch", 2, said("batch", 2))
    made.take("training.micro_steps", 4, said("accumulation", 4, line=4))
    made.take("training.sequence", 2048, said("length", 2048, line=5))
    return made


# ----------------------------------------------------------------------------------------------------------- settings
@pytest.mark.parametrize(("name", "text"), [
    ("a.json", '{\n "one": {\n  "two": 2,\n  "gone": null},\n "list": [1, 2]\n}\n'),
    ("a.yaml", "\none:\n  two: 2\n  gone:\nlist: [1, 2]\n"),
    ("a.toml", "list = [1, 2]\n[one]\ntwo = 2\n"),
])
def test_a_setting_is_read_with_its_line_and_the_rest_is_listed(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    settings = read_settings(str(tmp_path / name))
    found = settings.get("three", "one.two")
    assert found is not None and (found.whole(), found.line) == (2, 3)
    assert settings.get("one.gone") is None and settings.has("list") and not settings.has("one.gone.deep")
    assert [(one.name, idle) for one, idle in settings.rest()] == [("list", False)]
    settings.idle("li*")
    assert [idle for _, idle in settings.rest()] == [True]


@pytest.mark.parametrize(("name", "text", "words", "line"), [
    ("a.json", '{\n "a": }', "is not JSON", 2), ("a.json", "[1]", "no mapping", 1),
    ("a.toml", "b = 1\na = ", "is not TOML", 2),
    ("a.yaml", "a: b: c", "second ':'", 1), ("a.yaml", "a: 1\na: 2\n", "a", 2), ("a.json", "[" * 100_000, "", 0),
    ("a.toml", "a = " + "[" * 100_000, "", 0),
])
def test_files_that_are_none_are_told_where(name: str, text: str, words: str, line: int, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as caught:
        read_settings(str(tmp_path / name))
    fault = caught.value.faults[0]
    assert words in str(fault) and fault.file == str(tmp_path / name)
    if line:
        assert fault.line == line


@pytest.mark.parametrize("value", ["x", -1, 0, 1.5, True, None, [1], {"a": 1}, "1.5", "--3"])
def test_what_is_no_whole_number_is_refused(value: object) -> None:
    with pytest.raises(UserError, match=r"a\.json:3: n: expected a whole number of at least 1"):
        said("n", value).whole()


@pytest.mark.parametrize(("value", "flag"), [(True, True), ("true", True), ("No", False), (0, False), ("on", True)])
def test_flags_are_read_however_they_are_written(value: object, flag: bool) -> None:
    assert said("f", value).flag() is flag


@pytest.mark.parametrize("value", ["maybe", 2, None, [True], 1.0])
def test_what_is_no_flag_is_refused(value: object) -> None:
    with pytest.raises(UserError, match="true or false"):
        said("f", value).flag()


def test_numbers_and_words() -> None:
    assert (said("n", "5e8").number(), said("n", 3).number()) == (5e8, 3.0)
    assert said("w", "Full-Shard").word() == "full_shard"
    for value in (True, [], "x"):
        with pytest.raises(UserError, match="expected a number"):
            said("n", value).number()
    with pytest.raises(UserError, match="expected a word"):
        said("w", {"a": 1}).word()


# -------------------------------------------------------------------------------------------------------------- draft
def test_two_settings_may_agree_but_not_differ() -> None:
    made = draft()
    made.take("training.micro_batch", 2, said("again", 2, "b.json"))
    with pytest.raises(UserError, match=r"b\.json:3: other: says 3, but a\.json: batch \(line 3\) says 2"):
        made.take("training.micro_batch", 3, said("other", 3, "b.json"))


def test_settings_may_differ_where_the_command_line_decides() -> None:
    made = Draft("mine", ("training.micro_batch=4",))
    made.take("training.micro_batch", 2, said("batch", 2))
    made.take("training.micro_batch", 3, said("other", 3, "b.json"))
    job = Job(made)
    job.keep("micro", 1, said("batch", 1))
    job.keep("micro", 2, said("other", 2))
    job.keep("lora", 1, said("a", 1))
    with pytest.raises(UserError, match="other: says 2"):
        job.keep("lora", 2, said("other", 2))


def test_what_is_assumed_gives_way_to_what_is_said() -> None:
    made = draft()
    made.assume("training.precision", "amp-bf16", "why")
    made.assume("training.micro_batch", 8, "never")
    made.take("training.precision", "fp32", said("precision", 32))
    found = made.finish(ON)
    assert found.scenario.training.micro_batch == 2
    assert [note.value for note in found.notes if note.field == "training.precision"] == ["fp32"]


def test_what_is_said_nowhere_is_asked_for() -> None:
    with pytest.raises(UserError) as caught:
        Draft().finish()
    assert [fault.field for fault in caught.value.faults] == ["cluster.topology", "model", "training.micro_batch",
                                                              "training.sequence"]
    assert all(fault.hint for fault in caught.value.faults)


def test_what_is_impossible_is_told_at_the_line_that_said_it() -> None:
    made = draft()
    made.take("parallel.tensor", 3, said("tp", 3, "run.sh", 17))
    with pytest.raises(UserError, match=r"run\.sh:17: parallel\.tensor"):
        made.finish(ON)


@pytest.mark.parametrize(("gpus", "nodes", "per_node", "expected"), [
    (None, None, None, (1, 8)), (8, None, None, (1, 8)), (32, None, None, (4, 8)), (2, None, None, (1, 2)),
    (8, 2, None, (2, 4)), (None, 3, None, (3, 8)), (None, None, 4, (1, 4)), (16, None, 4, (4, 4)), (16, 2, 8, (2, 8)),
])
def test_gpus_become_nodes(gpus: int | None, nodes: int | None, per_node: int | None,
                           expected: tuple[int, int]) -> None:
    made = draft()
    made.gpus = said("world", gpus) if gpus else None
    made.nodes = said("nnodes", nodes) if nodes else None
    made.per_node = said("nproc", per_node) if per_node else None
    cluster = made.finish(ON).scenario.cluster
    assert (cluster.nodes, cluster.gpus_per_node) == expected


def test_gpus_that_are_no_whole_nodes_are_refused() -> None:
    made = draft()
    made.gpus = said("world", 12)
    with pytest.raises(UserError, match=r"a\.json:3: world: 12 GPUs do not go over 1 node of 8"):
        made.finish(ON)


def test_nodes_of_the_command_line_win() -> None:
    made = draft()
    made.gpus = said("world", 32)
    cluster = made.finish((*ON, "cluster.nodes=8")).scenario.cluster
    assert (cluster.nodes, cluster.gpus_per_node) == (8, 4)


@pytest.mark.parametrize(("sets", "batch"), [
    ((), 64), (("training.global_batch=48",), 48), (("training.micro_steps=1",), 16),
])
def test_the_batch_of_the_command_line_replaces_the_files(sets: tuple[str, ...], batch: int) -> None:
    found = draft().finish((*ON, *sets))
    assert found.scenario.training.global_batch == batch
    assert sum(note.field in ("training.global_batch", "training.micro_steps") for note in found.notes) == 1


@pytest.mark.parametrize(("sets", "factor"), [
    (ON, 8), (("cluster.topology=dgx-2", *ON[1:]), 16), ((*ON, "cluster.nodes=2", "cluster.gpus_per_node=4"), 4),
    ((*ON, "parallel.sharding_factor=2"), 2),
])
def test_what_is_as_large_as_a_node_follows_the_cluster(sets: tuple[str, ...], factor: int) -> None:
    made = draft()
    made.take("parallel.strategy", "fsdp", said("fsdp", "hybrid"))
    made.take_later("parallel.sharding_factor", lambda ranks: ranks.of_node, said("fsdp", "hybrid"), "in a node")
    assert made.finish(sets).scenario.parallel.sharding_factor == factor


def test_a_field_of_the_command_line_is_known_to_readers() -> None:
    made = Draft("mine", ("parallel.tensor=4", "training.precision=fp32"))
    assert made.overridden("parallel.tensor") and made.overridden("training.precision.reduce")
    assert not made.overridden("parallel.pipeline") and not made.overridden("training")


def test_what_follows_from_the_cluster_is_not_missed() -> None:
    made = Draft()
    made.take("training.sequence", 128, said("length", 128))
    made.take("training.global_batch", 64, said("batch", 64))
    made.take_later("training.micro_batch", lambda ranks: 64 // ranks.gpus, said("batch", 64), "over all GPUs")
    assert made.finish((*ON, "cluster.nodes=2")).scenario.training.micro_batch == 4
    with pytest.raises(UserError) as caught:
        made.finish((*ON, "parallel.tensor=x"))
    assert [fault.field for fault in caught.value.faults] == ["parallel.tensor"]


@pytest.mark.parametrize("value", [10**400, "9" * 5000])
def test_numbers_beyond_reason_are_refused(value: object, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        said("n", value).number() if not isinstance(value, str) else said("n", value).whole()
    (tmp_path / "a.json").write_text('{"a": ' + "9" * 5000 + "}")
    with pytest.raises(UserError, match="not JSON that can be read"):
        read_settings(str(tmp_path / "a.json"))


# -------------------------------------------------------------------------------------------------------------- write
def test_the_file_reads_back_and_says_where_each_line_comes_from(tmp_path: Path) -> None:
    made = draft()
    made.assume("training.precision", "amp-bf16", "bf16 over fp32 weights")
    made.take("parallel.offload.optimizer", "cpu", said("offload", "cpu"))
    made.take("parallel.strategy", "zero2", said("stage", 2))
    made.leave(said("odd", 7), "it is not simulated")
    settings = Settings("a.json", {"lr": 1, "mystery": {"deep": 2}})
    settings.idle("lr")
    made.close(settings)
    found = made.finish(ON)
    out = tmp_path / "s.yaml"
    out.write_text(to_yaml(found, "hf", ["a.json"]))
    assert load_scenario(out).scenario == found.scenario
    text = out.read_text()
    assert "micro_batch: 2" in text and "# a.json: batch" in text and "# assumed: bf16 over fp32 weights" in text
    assert "# No field says: a.json: odd = 7: it is not simulated" in text
    told = to_text(found)
    assert "1 without effect on time or memory\n  a.json: lr" in told
    assert "1 not known here, so not read\n  a.json: mystery.deep" in told
    kinds = {note["kind"] for note in to_json(found)["notes"]}
    assert kinds == {"taken", "assumed", "left", "idle", "unknown"}


def test_a_slip_of_a_setting_is_told_with_the_setting_that_is_meant(tmp_path: Path) -> None:
    """In the list of what is not known, and where something a scenario needs is lacking."""
    made = draft()
    settings = Settings("a.json", {"per_device_batchsize": 4, "strange": 1, "lerning_rate": 2})
    settings.get("per_device_batch_size")
    settings.idle("learning_rate", "warmup*")
    made.close(settings)
    told = to_text(made.finish(ON))
    assert "per_device_batchsize (did you mean 'per_device_batch_size'?), strange" in " ".join(told.split())
    assert "lerning_rate (did you mean 'learning_rate'?)" in " ".join(told.split())
    bare = Draft(name="bare")
    bare.close(settings)
    with pytest.raises(UserError, match=r"per_device_batchsize: is not known here \(did you mean 'per_device_batch"):
        bare.finish(ON)


def test_a_model_of_sizes_without_a_vocabulary_is_told_as_that() -> None:
    made = draft()
    made.take("model.layers", 2, said("layers", 2))
    with pytest.raises(UserError, match=r"model.vocab: is said in none of the files .--set model.vocab=N"):
        made.finish(ON[:1])


def test_paths_are_written_as_the_new_file_has_to_have_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "out").mkdir()
    config = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
              "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 4096}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    made = draft()
    made.take("model.hf", "model/config.json", said("config", "model/config.json"))
    found = made.finish(ON[:1])
    out = tmp_path / "out" / "s.yaml"
    out.write_text(to_yaml(found.beside(out), "hf", ["x"]))
    assert "hf: ../model/config.json" in out.read_text()
    assert load_scenario(out).scenario.model.hidden == 256
    assert found.beside(None) is found


def test_packing_is_left_unless_the_command_line_says_how_long_documents_are() -> None:
    """No setting says it; said beside them, packing is taken."""
    for sets, kind in (((), "left"), (("training.document=100",), "taken"), (("training.document.mean=9",), "taken"),
                       (("training.sequence=9",), "left")):
        made = draft()
        made.sets = sets
        made.packs(said("sample_packing", True))
        (note,) = [one for one in made.finish(ON).notes if "sample_packing" in one.said]
        assert note.kind == kind and ("--set training.document=N" in note.text) == (kind == "left")


@pytest.mark.parametrize(("sets", "value", "before"), [
    ((), None, False), (("software.year=2022",), 2022, True),
    (("software.year=2022", "software.year=2025"), 2025, False),
    (("software.year=now",), "now", False)])
def test_what_the_command_line_says_of_a_field(sets: tuple[str, ...], value: object, before: bool) -> None:
    made = Draft("mine", sets)
    assert (made.given("software.year"), made.before(2024)) == (value, before)
