"""Hugging Face's own modules: what they allocate, and what their memory-bound kernels move.

`data/hugging_face.yaml` is what tests/driver/hugging_face.py said of each of its jobs: torch 2.3.1 with transformers
4.40.2, torch 2.6.0 with 4.46.3 and 4.50.3.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from sim import api
from sim.memory.ledger import peak
from sim.model import build
from sim.model.architecture import Architecture
from sim.parallel import lower
from sim.scenario import resolve
from sim.software import stack_of

_NORMS = {"Llama": ("rmsnorm", "rotary", False), "GPT2": ("layernorm", "learned", True),
          "Bert": ("layernorm", "learned", True)}


@cache
def _jobs() -> list[dict[str, Any]]:
    return yaml.safe_load((Path(__file__).parent / "data" / "hugging_face.yaml").read_text())


def _name(job: dict[str, Any]) -> str:
    return "-".join(str(job[key]) for key in ("transformers", "family", "attention", "precision", "recompute", "batch"))


def _scenario(job: dict[str, Any], layers: int | None = None) -> Any:
    config, (norm, positions, bias) = job["config"], _NORMS[job["family"]]
    llama, hidden = job["family"] == "Llama", config.get("hidden_size") or config["n_embd"]
    model = {"kind": "encoder" if job["family"] == "Bert" else "decoder", "layers": layers or job["blocks"],
             "hidden": hidden, "heads": config.get("num_attention_heads") or config["n_head"],
             "vocab": config["vocab_size"], "norm": norm, "positions": positions, "bias": bias,
             "max_positions": config.get("max_position_embeddings") or config["n_positions"],
             "tied_embeddings": not llama}
    if llama:
        model |= {"ffn": config["intermediate_size"], "kv_heads": config["num_key_value_heads"], "activation": "silu",
                  "gated_mlp": True}
    return resolve({
        "name": "x", "cluster": {"topology": "single-a100-80g-sxm"}, "model": model, "parallel": {"strategy": "none"},
        "training": {"micro_batch": job["batch"], "global_batch": job["batch"], "sequence": job["sequence"],
                     "precision": job["precision"], "recompute": job["recompute"], "attention": job["attention"],
                     "optimizer": "adamw"},
        "software": {"framework": "pytorch", "year": 2024, "modules": "transformers", "optimizer_kernel": "foreach",
                     "versions": {"torch": job["torch"], "transformers": job["transformers"]}}})


def _architecture(job: dict[str, Any]) -> Architecture:
    scenario = _scenario(job, 3)
    return build(scenario, stack_of(scenario.software), job["batch"])


def _moved(job: dict[str, Any], way: str, block: bool) -> float:
    layers = [layer for layer in _architecture(job).stack if (layer.kind == "block") == block]
    found = layers[1:2] if block else layers
    return sum(kernel.bytes for layer in found for operator in layer.operators for kernel in getattr(operator, way)
               if kernel.op not in ("gemm", "attention"))


@pytest.mark.parametrize("job", _jobs(), ids=_name)
def test_as_much_is_allocated_as_pytorch_does(job: dict[str, Any]) -> None:
    memory = api.run(_scenario(job)).to_json(traffic=False)["memory"]
    assert memory["peak_allocated_bytes"] == pytest.approx(job["allocated"], rel=0.02)


def _shown() -> list[dict[str, Any]]:
    """Jobs whose operators are all counted: under autocast some casts are not, nor are the copies that transformers
    4.48 to 4.53 make of queries and outputs around scaled_dot_product_attention."""
    return [job for job in _jobs() if job["recompute"] == "none" and not job["precision"].startswith("amp")
            and (job["transformers"], job["attention"]) != ("4.50", "sdpa")]


@pytest.mark.parametrize("job", _shown(), ids=_name)
def test_a_block_moves_what_pytorchs_operators_do(job: dict[str, Any]) -> None:
    assert _moved(job, "forward", True) == pytest.approx(job["block"]["forward"], rel=0.03)
    assert _moved(job, "backward", True) == pytest.approx(job["block"]["backward"], rel=0.03)


@pytest.mark.parametrize("job", [job for job in _shown() if job["config"]["vocab_size"] > 1000], ids=_name)
def test_embedding_and_loss_move_what_pytorchs_operators_do(job: dict[str, Any]) -> None:
    """But for the gradient that log-softmax's backward reads twice, which operators do not tell."""
    both = sum(_moved(job, way, False) for way in ("forward", "backward"))
    assert both == pytest.approx(sum(job["rest"].values()), rel=0.15)


def test_logits_are_shifted_until_labels_are() -> None:
    job = next(job for job in _jobs() if job["family"] == "GPT2" and job["batch"] == 2)
    moved = {release: sum(_moved(job | {"transformers": release, "torch": "2.6"}, way, False)
                          for way in ("forward", "backward")) for release in ("4.46", "4.48", "4.49")}
    logits = job["batch"] * job["sequence"] * job["config"]["vocab_size"]
    assert moved["4.48"] - moved["4.49"] == logits * (2 + 6) * 4  # the copy; zeros and a copy for each of two slices
    assert moved["4.49"] - moved["4.46"] == logits * (6 + (2 + 5) * 4 + 6 - (2 + 5 + 2 + 6) * 2)


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Bert"])
def test_softmax_holds_a_product_of_scores_in_backward(family: str) -> None:
    job = next(job for job in _jobs() if job["family"] == family and job["recompute"] == "full" and job["batch"] == 8)
    with_it, without = (peak(lower(_scenario(job), cuda_kernels=given).job.programs[0]).peak_allocated_bytes
                        for given in (True, False))
    scores = job["batch"] * 16 * job["sequence"] ** 2 * (4 if family == "Llama" else 2)
    assert with_it - without == scores
