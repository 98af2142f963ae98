"""The names, types and units of what `--json` writes: other programs read it. Names may be added, none may go."""

from __future__ import annotations

import json
from collections.abc import Iterator
from numbers import Real
from pathlib import Path
from typing import Any

import pytest

NUMBERS = (
    "step_time_s", "tokens_per_second", "tokens_per_second_per_gpu", "samples_per_second", "model_flops",
    "hardware_flops", "model_tflops_per_gpu", "hardware_tflops_per_gpu", "mfu", "hfu", "slowdown",
)
MAPPINGS = ("scenario", "breakdown_s", "communication_s", "memory", "validated", "simulation")
COMPUTE = ("gemm", "attention", "memory_bound", "optimizer")
BREAKDOWN = ("pipeline_bubble", "host", "offload")
BOUNDS = ("compute", "communication", "memory_bandwidth", "host", "pipeline")
SENSITIVITY = ("tensor_cores", "memory_bandwidth", "intra_node", "network", "latency", "host")
PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes", "capacity_bytes", "headroom_bytes")
CATEGORIES = (
    "parameters", "gradients", "optimizer_states", "master_parameters", "gathered_parameters", "activations", "logits",
    "buffers", "workspace", "fragmentation", "context",
)
PHASES = ("after_init", "end_of_forward", "peak_in_backward", "optimizer_step")
TRAFFIC = ("kind", "group", "ranks", "bytes", "dtype", "layer", "phase", "start_s", "end_s")
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "recv", "broadcast", "reduce")
SIMULATION = ("events", "tasks", "ranks_simulated", "ranks_represented", "wall_s")
BUDGET = ("tokens", "steps", "days", "gpu_hours", "cost", "energy_kwh", "goodput")
INFERENCE = ("prompt_time_s", "time_per_token_s", "tokens_per_second", "kv_cache_bytes")

SHARDED = """name: sharded
cluster: {topology: dgx-a100-80g}
model: {layers: 4, hidden: 1024, heads: 16, vocab: 8192, tied_embeddings: false}
training: {micro_batch: 1, global_batch: 64, sequence: 512}
parallel: {strategy: fsdp}
budget: {tokens: 1.4e9, price_per_gpu_hour: 2, mtbf_per_gpu: 50000 h, checkpoint_every: 1 h, deadline: 30 days}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    (tmp_path / "s.yaml").write_text(SHARDED)
    return "s.yaml"


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def check_result(result: dict[str, Any]) -> None:
    """All that result.md names of a run, wherever it stands."""
    assert all(is_number(result[name]) for name in NUMBERS)
    assert all(isinstance(result[name], dict) for name in MAPPINGS)
    breakdown, memory = result["breakdown_s"], result["memory"]
    assert all(is_number(breakdown["compute"][name]) for name in COMPUTE)
    assert all(is_number(breakdown[name]) for name in BREAKDOWN)
    assert set(breakdown["exposed_communication"]) <= set(KINDS)
    for kind, groups in result["communication_s"].items():
        assert kind in KINDS
        assert all({"total", "exposed"} <= set(times) and times["exposed"] <= times["total"] + 1e-12
                   for times in groups.values())
    assert result["bound"] in BOUNDS
    assert all(isinstance(memory[name], int) for name in PEAKS)
    assert isinstance(memory["fits"], bool)
    assert {*CATEGORIES} <= set(memory["at_peak"])
    assert all({*CATEGORIES} <= set(levels) for levels in memory["phases"].values())
    assert all({*TRAFFIC} <= set(entry) and entry["kind"] in KINDS for entry in result["traffic"])
    assert [e["start_s"] for e in result["traffic"]] and all(e["start_s"] <= e["end_s"] for e in result["traffic"])
    assert {"count", "mean_error", "spread"} <= set(result["validated"])
    assert {*SIMULATION} <= set(result["simulation"])
    assert all(isinstance(text, str) for text in result["warnings"])


def test_a_run(drystep: Any, scenario: str) -> None:
    result = drystep("run", scenario, "--sensitivity", "--json", "-").json
    check_result(result)
    assert set(result["memory"]["phases"]) == set(PHASES)
    assert set(result["sensitivity"]) == set(SENSITIVITY)
    assert all(is_number(result["budget"][name]) for name in BUDGET)


def test_a_checked_run_and_a_pipeline(drystep: Any, scenario: str) -> None:
    layout = ("--set", "parallel.strategy=zero1", "--set", "parallel.pipeline=2", "--set", "parallel.tensor=2")
    ran = drystep("run", scenario, *layout, "--check", "--json")
    check_result(ran.json)
    assert ran.code == 0
    assert len(ran.json["memory"]["stages"]) == 2
    assert {"send", "recv"} <= {entry["kind"] for entry in ran.json["traffic"]}


def test_a_sweep(drystep: Any, scenario: str) -> None:
    sweep = drystep("run", scenario, "--set", "sweep={parallel.sharding_factor: [3, 4, 8]}", "--json", "-").json
    assert {"points", "skipped", "axes"} <= set(sweep)
    assert sweep["axes"] == {"parallel.sharding_factor": [3, 4, 8]}
    assert [point["set"]["parallel.sharding_factor"] for point in sweep["points"]] == [4, 8]
    assert all({"set", "reason"} == set(point) for point in sweep["skipped"]) and len(sweep["skipped"]) == 1
    for point in sweep["points"]:
        check_result(point)


def test_inference(drystep: Any, scenario: str) -> None:
    asked = ("training.mode={inference: {prompt: 32, generate: 4, batch: 2}}", "parallel={strategy: ddp}",
             "budget=null")
    result = drystep("run", scenario, *(part for text in asked for part in ("--set", text)), "--json", "-").json
    assert all(is_number(result["inference"][name]) for name in INFERENCE)


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from leaves(item)
    else:
        yield value


COMMANDS = {
    "run s.yaml": ("step_time_s",),
    "memory s.yaml": ("memory", "stages", "rules_of_thumb", "largest", "warnings"),
    "compare s.yaml s.yaml": ("names", "step_time_s", "bound", "differs"),
    "size s.yaml --gpus 8 --top 1 --seconds 1": ("best", "front", "objective", "simulated", "proven"),
    "validate cases.yaml": ("cases", "summary"),
    "collective all_reduce --topology dgx-h100 -b 1M -e 2M": ("op", "nodes", "ranks", "dtype", "rows"),
    "kernel a100-80g-sxm gemm 512,512,512": ("gpu", "op", "shape", "time_us", "share_of_peak"),
    "calibrate --gemm timings.csv --gpu a100-80g-sxm --out gpu.yaml": ("out", "gemm"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_json_on_standard_output_and_in_a_file(drystep: Any, scenario: str, tmp_path: Path,
                                                                 command: str) -> None:
    (tmp_path / "cases.yaml").write_text(f"""title: mine
defaults: {json.dumps({"cluster": {"topology": "dgx-h100"}, "model": {"preset": "gpt2"}, "training": {
        "micro_batch": 1, "global_batch": 8, "sequence": 128}})}
cases: [{{id: a, measured: {{step_time_s: 1}}}}]
""")
    (tmp_path / "timings.csv").write_text("gpu,dtype,m,n,k,batch,time_us,source\n" + "".join(
        f"a100,bf16,{m},{n},1024,1,{5 + m * n * 2048 / 2.4e8},x\n" for m in (1024, 2048, 4096) for n in
        (512, 1024, 2048, 4096)))
    piped = drystep(*command.split(), "--json")
    assert piped.code == 0
    assert set(COMMANDS[command]) <= set(piped.json)
    assert all(isinstance(leaf, str | int | float | bool | None) for leaf in leaves(piped.json))
    filed = drystep(*command.split(), "--json", "out.json")
    assert filed.code == 0
    assert set(COMMANDS[command]) <= set(json.loads((tmp_path / "out.json").read_text()))
    assert filed.out.strip()


def test_catalogues_and_one_kernel_take_json_before_their_arguments(drystep: Any) -> None:
    assert drystep("list", "--json", "gpus").json[0]["name"]
    assert drystep("kernel", "--json", "a100-80g-sxm", "gemm", "64,64,64").json["op"] == "gemm"
