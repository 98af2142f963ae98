"""Memory and collectives of LoRA and QLoRA against peft's, bitsandbytes' and FSDP 1's own code.

`data/fine_tuning.yaml` is what tests/driver/fine_tuning.py said of each of its jobs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from sim import api
from sim.parallel import lower
from sim.scenario import resolve

_LINEARS = ["query", "key", "value", "projection", "mlp"]


@cache
def _jobs() -> list[dict[str, Any]]:
    return yaml.safe_load((Path(__file__).parents[1] / "data" / "fine_tuning.yaml").read_text())


def _name(job: dict[str, Any]) -> str:
    return "-".join(str(job[key]) for key in ("base", "targets", "autocast", "recompute", "strategy")) + (
        f"-{job['config']['vocab_size']}{'-offload' * job.get('offload', False)}")


def _scenario(job: dict[str, Any]) -> Any:
    config, world, sharded = job["config"], job.get("world", 1), job["strategy"] == "fsdp"
    places = {"offload": {"parameters": "cpu", "optimizer": "cpu"}} if job.get("offload") else {}
    method = "lora" if job["base"] == "bf16" else "qlora"
    return resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": 1, "gpus_per_node": world},
        "model": {"kind": "decoder", "layers": config["num_hidden_layers"], "hidden": config["hidden_size"],
                  "heads": config["num_attention_heads"], "kv_heads": config["num_key_value_heads"],
                  "ffn": config["intermediate_size"], "vocab": config["vocab_size"], "norm": "rmsnorm", "bias": False,
                  "positions": "rotary", "activation": "silu", "gated_mlp": True, "tied_embeddings": False,
                  "max_positions": config["max_position_embeddings"], "dropout": False},
        "training": {"micro_batch": job["batch"], "global_batch": job["batch"] * world, "sequence": job["sequence"],
                     "precision": "amp-bf16" if job["autocast"] else "pure-bf16", "recompute": job["recompute"],
                     "attention": "sdpa", "optimizer": "adamw",
                     "finetune": {"method": method, "rank": job["rank"], "base": job["base"],
                                  "dropout": job["dropout"],
                                  "targets": ["query", "value"] if job["targets"] == "qv" else _LINEARS}},
        "parallel": {"strategy": "fsdp", "sharding_factor": "full", "wrap": "block", **places} if sharded else {
            "strategy": "none"},
        "software": {"framework": "pytorch", "year": 2024, "modules": "transformers", "optimizer_kernel": "foreach",
                     "versions": {"torch": "2.3", "transformers": "4.40", "bitsandbytes": "0.43.1"},
                     **({"fsdp": 1} if sharded else {})}})


@pytest.mark.parametrize("job", _jobs(), ids=_name)
def test_as_much_is_allocated_and_reserved_as_pytorch_does(job: dict[str, Any]) -> None:
    """Worst where small blocks decide: what peft clones of 4-bit layers' outputs is not counted; of what FSDP
    offloads, a small unit's own tensors."""
    memory = api.run(_scenario(job)).to_json(traffic=False)["memory"]
    assert memory["peak_allocated_bytes"] == pytest.approx(job["allocated"], rel=0.03)
    assert memory["peak_reserved_bytes"] == pytest.approx(job["reserved"], rel=0.055)


@pytest.mark.parametrize("job", [j for j in _jobs() if j["strategy"] == "fsdp"], ids=_name)
def test_frozen_blocks_are_gathered_as_fsdp_does(job: dict[str, Any]) -> None:
    """The root once, packed weights and norms of every block for forward and for backward, without constants. Adapters
    are gathered with their block here, and there apart, a matrix at a time (not told apart: sim/model/README.md)."""
    program = lower(_scenario(job)).job.programs[0]
    real = {(kind, size): times for kind, size, times in job["collectives"]}
    root, block = sorted((size for (kind, size) in real if kind == "all_gather_into_tensor"), reverse=True)[:2]
    assert real["all_gather_into_tensor", block] == 2 * job["config"]["num_hidden_layers"]
    adapters = sum(size * times for (kind, size), times in real.items() if kind == "reduce_scatter_tensor")
    gathers = {call.size_bytes for call in program.collectives if call.kind == "all_gather"}
    assert gathers == {root, block + adapters // job["config"]["num_hidden_layers"]}
