"""The command line as a user meets it: outputs, exit codes, and no traceback whatever is done to it."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from sim.cli import ORDER, cli, main

ROOT = Path(__file__).resolve().parent.parent.parent

SCENARIO = """\
name: small
cluster: {topology: dgx-a100-80g, nodes: 2}
model: {preset: gpt2}
training: {micro_batch: 1, global_batch: 16, sequence: 1024, precision: fsdp-bf16}
parallel: {strategy: fsdp}
"""
SWEEP = SCENARIO + "sweep: {cluster.nodes: [1, 2, 3]}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "small.yaml").write_text(SCENARIO)
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_run_prints_a_report(folder: Path, drystep: Any) -> None:
    ran = drystep("run", "small.yaml")
    assert ran.code == 0
    assert "per step" in ran.out
    assert ran.err == ""


def test_json_to_standard_output_is_nothing_but_json(folder: Path, drystep: Any) -> None:
    result = drystep("run", "small.yaml", "--json", "-").json
    assert result["scenario"]["name"] == "small"
    assert {"step_time_s", "breakdown_s", "communication_s", "slowdown", "memory", "traffic"} <= result.keys()


def test_json_of_a_sweep_and_of_several_scenarios(folder: Path, drystep: Any) -> None:
    sweep = drystep("run", "sweep.yaml", "--json", "-").json
    assert [p["set"] for p in sweep["points"]] == [{"cluster.nodes": 1}, {"cluster.nodes": 2}]
    assert sweep["axes"] == {"cluster.nodes": [1, 2, 3]}
    (skipped,) = sweep["skipped"]
    assert skipped["set"] == {"cluster.nodes": 3}
    assert "24" in skipped["reason"]
    both = drystep("run", "small.yaml", "sweep.yaml", "--json", "-").json
    assert both[0]["step_time_s"] == sweep["points"][1]["step_time_s"]
    assert len(both[1]["points"]) == 2


def test_every_rank_on_its_own_says_the_same(folder: Path, drystep: Any) -> None:
    (folder / "stages.yaml").write_text(json.dumps({
        "name": "stages", "cluster": {"topology": "dgx-a100-80g"},
        "model": {"kind": "decoder", "layers": 4, "hidden": 256, "heads": 8, "ffn": 1024, "vocab": 1024},
        "training": {"micro_batch": 1, "global_batch": 16, "sequence": 256},
        "parallel": {"strategy": "zero1", "pipeline": 4}, "software": {"framework": "megatron", "year": 2023}}))
    name = str(folder / "stages.yaml")
    folded, every = (drystep("run", name, "--json", "-", *more).json for more in ((), ("--unfolded",)))
    assert every["step_time_s"] == pytest.approx(folded["step_time_s"], rel=1e-9)
    assert (folded["simulation"]["ranks_simulated"], every["simulation"]["ranks_simulated"]) == (4, 8)
    many = drystep("run", name, "--unfolded", "--set", "cluster.nodes=1024", "--set", "training.global_batch=16384")
    assert many.code == 2 and "more than are simulated one by one" in many.err


def test_set_goes_on_top(folder: Path, drystep: Any) -> None:
    result = drystep("run", "small.yaml", "--set", "cluster.nodes=1", "--set", "model.layers=6", "--json", "-").json
    assert result["scenario"]["cluster"]["nodes"] == 1
    assert result["scenario"]["model"]["layers"] == 6


def test_files_are_written(folder: Path, drystep: Any) -> None:
    ran = drystep("run", "small.yaml", "--json", "r.json", "--trace", "t.json.gz", "--report", "deep/folder")
    assert ran.code == 0
    assert "per step" in ran.out
    assert json.loads((folder / "r.json").read_text())["step_time_s"] > 0
    assert json.loads(gzip.decompress((folder / "t.json.gz").read_bytes()))["traceEvents"]
    assert "per step" in (folder / "deep/folder/report.txt").read_text()
    assert json.loads((folder / "deep/folder/result.json").read_text())["mfu"] > 0


@pytest.mark.parametrize("arguments", [
    ["run", "missing.yaml"],
    ["run", "small.yaml", "--json", "no/such/folder/r.json"],
    ["run", "small.yaml", "--json", "."],
    ["run", "small.yaml", "--trace", "/proc/no/t.json"],
    ["run", "small.yaml", "--trace", "-"],
    ["run", "small.yaml", "--report", "small.yaml"],
    ["run", "sweep.yaml", "--trace", "t.json"],
    ["run", "small.yaml", "--set", "cluster.nodes"],
    ["run", "small.yaml", "--set", "cluster.nods=3"],
    ["run", "small.yaml", "--set", "cluster.nodes=0"],
    ["run", "small.yaml", "--no-such-option"],
    ["run"],
    ["rnu", "small.yaml"],
    ["list", "gpu"],
])
def test_wrong_input_is_exit_code_2_with_a_message(folder: Path, drystep: Any, arguments: list[str]) -> None:
    ran = drystep(*arguments)
    assert ran.code == 2
    assert ran.err.strip()
    assert ran.out == ""


def test_faults_of_several_files_come_together(folder: Path, drystep: Any) -> None:
    (folder / "a.yaml").write_text(SCENARIO.replace("gpt2", "gpt9"))
    (folder / "b.yaml").write_text(SCENARIO.replace("nodes: 2", "nodes: two"))
    ran = drystep("run", "a.yaml", "b.yaml")
    assert ran.code == 2
    lines = ran.err.splitlines()
    assert any(line.startswith("a.yaml:3: model.preset:") for line in lines)
    assert any(line.startswith("b.yaml:2: cluster.nodes:") for line in lines)


def test_an_unknown_command_names_the_nearest(drystep: Any) -> None:
    assert "did you mean 'validate'" in drystep("valdiate").err


def test_help_names_only_what_exists(drystep: Any) -> None:
    ran = drystep("--help")
    assert ran.code == 0
    listed = ran.out.partition("Commands:")[2].partition("Examples:")[0].splitlines()
    assert [line.split()[0] for line in listed if line.strip()] == list(ORDER) and set(ORDER) == set(cli.commands)
    assert not any(line.rstrip().endswith("...") for line in listed)  # said whole


@pytest.mark.parametrize("name", ["", *ORDER])
def test_help_has_examples_of_commands_and_options_that_exist(drystep: Any, name: str) -> None:
    ran = drystep(*name.split(), "--help")
    lines = [line.split() for line in ran.out.partition("Examples:")[2].splitlines() if line.strip()]
    assert ran.code == 0 and lines and all(words[0] == "drystep" for words in lines)
    for words in lines:
        command = cli.commands.get(words[1])
        assert words[1] == "COMMAND" or (command is not None and name in ("", words[1]))
        known = {option for of in (command.params if command else []) for option in of.opts} | {"--help"}
        assert {word for word in words if word.startswith("-")} <= known


def test_list_fields_has_every_field_that_shipped_scenarios_use(drystep: Any) -> None:
    rows = {row["field"]: row for row in drystep("list", "fields", "--json").json}
    found: set[str] = set()

    def walk(value: Any, head: str) -> None:
        for key, inner in value.items():
            path = f"{head}{key}"
            found.add(path)
            if isinstance(inner, dict) and rows.get(path, {}).get("takes", "").find("mapping") >= 0 and key not in (
                    "sweep", "expect", "figures", "tflops", "versions", "links"):
                walk(inner, f"{path}.")

    for file in sorted((Path(__file__).parents[2] / "scenarios").glob("*.yaml")):
        walk(yaml.safe_load(file.read_text(encoding="utf-8")), "")
    assert len(found) > 50 and found <= set(rows)
    assert rows["training.sequence"]["takes"] == "a whole number" and rows["parallel.tensor"]["default"] == "1"
    assert rows["training.micro_batch"]["default"] == "required" and "GB" in rows["cluster.gpu.memory"]["takes"]
    assert all(row["takes"] or row["field"].rpartition(".")[2] in ("calibration", "source", "notes")
               for row in rows.values())


def test_version(drystep: Any) -> None:
    ran = drystep("--version")
    assert (ran.code, ran.out.split()[0]) == (0, "drystep,")


@pytest.mark.parametrize("what", ["gpus", "topologies", "models", "software", "precisions"])
def test_catalogues(what: str, drystep: Any) -> None:
    rows = drystep("list", what, "--json").json
    names = [row["name"] for row in rows]
    text = drystep("list", what).out
    assert len(set(names)) == len(names) > 5
    assert all(name in text for name in names)


def test_a_catalogue_is_searched(drystep: Any) -> None:
    every = {row["name"]: row for row in drystep("list", "topologies", "--json").json}
    found = [row["name"] for row in drystep("list", "topologies", "H100", "infini-band", "--json").json]
    assert found == [name for name, row in every.items() if "h100" in name + row["gpu"]
                     and "infiniband" in row["between_nodes"]] and 1 < len(found) < len(every)
    done = drystep("list", "models", "qwen3-8c")
    assert done.code == 2 and "no row of models has 'qwen3-8c' (did you mean 'qwen3-8b'?)" in done.err


def test_check(folder: Path, drystep: Any) -> None:
    good = "expect: {mfu: {min: 0.001, max: 1}, step_time_s: {relative_to: sweep1.yaml, ratio: 1, within: 90%}}\n"
    (folder / "sweep1.yaml").write_text(SCENARIO)
    (folder / "good.yaml").write_text(SCENARIO + good)
    (folder / "bad.yaml").write_text(SCENARIO + "expect: {mfu: {min: 0.99}, bound: pipeline}\n")
    ran = drystep("run", "good.yaml", "--check")
    assert (ran.code, ran.err.strip()) == (0, "good.yaml: all 2 bounds hold")
    ran = drystep("run", "bad.yaml", "--check", "--json", "-")
    assert ran.code == 3
    assert ran.json["mfu"] < 0.99
    assert len(ran.err.splitlines()) == 2
    assert "mfu: predicted" in ran.err
    assert "at least 0.99" in ran.err


def test_check_fails_when_memory_runs_out_unless_that_is_expected(folder: Path, drystep: Any) -> None:
    tight = ["run", "small.yaml", "--set", "model.layers=1", "--set", "cluster.gpu.memory=300 MB"]
    assert drystep(*tight).code == 0
    ran = drystep(*tight, "--check")
    assert ran.code == 3
    assert "memory.fits" in ran.err
    assert drystep(*tight, "--set", "expect.memory.fits=false", "--check").code == 0


def test_check_of_a_sweep_names_the_point(folder: Path, drystep: Any) -> None:
    (folder / "checked.yaml").write_text(SWEEP + "expect: {step_time_s: {at: {cluster.nodes: 2}, max: 1e-9}}\n")
    ran = drystep("run", "checked.yaml", "--check")
    assert ran.code == 3
    assert "step_time_s at cluster.nodes=2: predicted" in ran.err


def test_a_fault_of_ours_is_one_line(folder: Path, drystep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.api.run", lambda *_: 1 / 0)
    ran = drystep("run", "small.yaml")
    assert ran.code == 1
    assert len(ran.err.splitlines()) == 1
    assert "internal fault" in ran.err
    monkeypatch.setenv("DRYSTEP_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["run", "small.yaml"])


def test_control_c(folder: Path, drystep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sim.api.run", stop)
    assert drystep("run", "small.yaml").code == 130


def test_control_c_in_a_sweep_keeps_what_was_finished(
        folder: Path, drystep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sim import api

    real, calls = api._predict, []

    def second_is_interrupted(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(api, "_predict", second_is_interrupted)
    ran = drystep("run", "sweep.yaml", "--json", "-")
    assert ran.code == 130
    assert len(ran.json["points"]) == 1
    assert ran.json["interrupted"] is True
    assert ran.err.strip().splitlines()[-1] == "interrupted: 1 of 3 points"


@pytest.mark.parametrize("arguments", [
    ("list", "topologies", "--json"), ("list", "topologies"), ("run", "scenarios/gpt2-large-ddp.yaml")])
def test_a_reader_that_goes_away_is_no_fault(arguments: tuple[str, ...]) -> None:
    """The process writes into a pipe whose reading end is closed already."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", "sim", *arguments], stdout=writing,
                          stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_closed_standard_output_is_no_fault() -> None:
    """As of a service, or after `>&-`: Python has no stream there at all."""
    done = subprocess.run([sys.executable, "-m", "sim", "list", "topologies"], stderr=subprocess.PIPE, text=True,
                          cwd=ROOT, check=False, preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_of_ascii_is_no_fault() -> None:
    """Characters that it lacks are question marks, and JSON spells them out."""
    arguments = ("run", "scenarios/gpt2-large-ddp.yaml", "--set", "name=\u6a21", "--set", "expect={}")
    told, spelled = (subprocess.run(
        [sys.executable, "-m", "sim", *arguments, *more], capture_output=True, text=True, cwd=ROOT, check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"}) for more in ((), ("--json", "-")))
    assert (told.returncode, told.stderr, told.stdout.splitlines()[0]) == (0, "", "?")
    assert json.loads(spelled.stdout)["scenario"]["name"] == "\u6a21"


def test_an_unknown_catalogue_is_answered_with_the_nearest(drystep: Any) -> None:
    ran = drystep("list", "fild")
    assert (ran.code, "did you mean 'fields'?" in ran.err) == (2, True)


def test_control_c_while_the_command_loads_leaves_no_traceback() -> None:
    stops = ("import os, signal, sys\n"
             "class Stop:\n"
             "    def find_spec(self, name, path=None, target=None):\n"
             "        if name == 'sim.cli': os.kill(os.getpid(), signal.SIGINT)\n"
             "sys.meta_path.insert(0, Stop())\n"
             "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a script's background has it ignored
             "from sim.__main__ import main\n"
             "main()\n")
    done = subprocess.run([sys.executable, "-c", stops], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.whole
def test_the_examples_run_and_hold_their_bounds(drystep: Any) -> None:
    examples = sorted(str(p) for p in (ROOT / "scenarios").glob("*.yaml"))
    assert len(examples) >= 6
    ran = drystep("run", *examples, "--check", "--json", os.devnull)
    assert ran.code == 0, ran.err


def test_a_set_field_is_not_swept(folder: Path, drystep: Any) -> None:
    ran = drystep("run", "sweep.yaml", "--set", "cluster.nodes=1", "--json", "-")
    assert ran.err == "sweep.yaml: cluster.nodes is given by --set: it is not swept\n"
    assert ran.json["scenario"]["cluster"]["nodes"] == 1
    assert ran.json["step_time_s"] == drystep("run", "small.yaml", "--set", "cluster.nodes=1", "--json",
                                              "-").json["step_time_s"]
    other = drystep("run", "sweep.yaml", "--set", "training.sequence=512", "--json", "-")
    assert (other.err, len(other.json["points"])) == ("", 2)


def test_bounds_of_an_axis_that_is_set_go_with_it(folder: Path, drystep: Any) -> None:
    (folder / "bounds.yaml").write_text(SWEEP + """expect:
  tokens_per_second: {at: {cluster.nodes: 2}, relative_to: {cluster.nodes: 1}, min: 0, ratio: 9}
  mfu: [{at: {cluster.nodes: 1}, min: 0.99}, {max: 0.9}]
""".replace("min: 0, ", ""))
    assert drystep("run", "bounds.yaml", "--check").code == 3
    ran = drystep("run", "bounds.yaml", "--check", "--set", "cluster.nodes=1")
    assert ran.code == 0
    assert "its bound holds" in ran.err


def test_a_field_inside_an_axis_of_mappings_cannot_be_set(folder: Path, drystep: Any) -> None:
    (folder / "whole.yaml").write_text(SCENARIO + "sweep: {parallel: [{strategy: fsdp}, {strategy: ddp}]}\n")
    ran = drystep("run", "whole.yaml", "--set", "parallel.sharding_factor=8")
    assert ran.code == 2
    assert "parallel.sharding_factor" in ran.err and "sweep.parallel" in ran.err


@pytest.mark.parametrize("arguments", [
    ["run", "small.yaml", "--json", "small.yaml"],
    ["run", "small.yaml", "--trace", "./small.yaml"],
    ["run", "small.yaml", "--json", "out", "--trace", "out"],
    ["memory", "small.yaml", "--snapshot", "small.yaml"],
    ["compare", "small.yaml", "sweep.yaml", "--json", "sweep.yaml"],
    ["size", "small.yaml", "--gpus", "8", "--csv", "small.yaml"],
    ["calibrate", "--gemm", "small.yaml", "--gpu", "a100-80g-sxm", "--out", "small.yaml"],
    ["validate", "small.yaml", "--json", "small.yaml"],
], ids=lambda arguments: " ".join(arguments))
def test_nothing_that_is_read_is_overwritten(folder: Path, drystep: Any, arguments: list[str]) -> None:
    ran = drystep(*arguments)
    assert ran.code == 2
    assert f"{arguments[-2]}: {arguments[-1]} cannot be written: " in ran.err
    assert (folder / "small.yaml").read_text() == SCENARIO
    assert not (folder / "out").exists()


def test_check_of_a_sweep_of_which_nothing_can_run_fails(folder: Path, drystep: Any) -> None:
    ran = drystep("run", "small.yaml", "--check", "--set", "sweep={cluster.nodes: [3]}")
    assert ran.code == 3
    assert "no point of the sweep can be run" in ran.err


@pytest.mark.parametrize(("option", "value", "message"), [
    ("--seconds", "nan", "not a number that can be used"), ("--budget", "inf", "not a number that can be used"),
    ("--cluster", " , ", "--cluster: names no topology"),
    ("--cluster", "dgx-a100", "--cluster: there is no topology named 'dgx-a100' (did you mean 'dgx-a100-40g' or "
                              "'dgx-a100-80g'?)"),
    ("--deadline", "soon", "--deadline: 'soon' is not a time"), ("--json", "", "--json: an empty name"),
])
def test_an_option_of_size_that_says_nothing_is_wrong_input(folder: Path, drystep: Any, option: str, value: str,
                                                            message: str) -> None:
    ran = drystep("size", "small.yaml", "--gpus", "8", option, value)
    assert ran.code == 2
    assert message in ran.err


def test_the_module_is_a_command_too() -> None:
    done = subprocess.run([sys.executable, "-m", "sim.cli", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("drystep")
