"""Recomputation as a search tries it: policies by name, and the first k blocks of every pipeline rank."""

from __future__ import annotations

from typing import Any

from sim.model.recompute import modules_of
from sim.scenario import Scenario
from sim.scenario.fields.schema import RecomputeLayers
from sim.software import Stack

#: Recomputation other than "the first k blocks": index k + len - 1 of the column stands for k blocks.
POLICIES = ("none", "selective", "selective-op", "full", "mla_up_proj", "layernorm+moe_act",
            "layernorm+mla_up_proj+moe_act")


def policy(index: int) -> Any:
    """A value of the recompute column as `training.recompute`."""
    if index >= len(POLICIES):
        return {"layers": blocks_of(index)}
    modules = modules_of(POLICIES[index])
    return POLICIES[index] if POLICIES[index] == "selective" or not modules else {"modules": sorted(modules)}


def policy_index(recompute: Any, blocks: int) -> int | None:
    """The value of the recompute column that stands for `training.recompute` on stages of so many blocks; None if none
    does: other modules by name."""
    if isinstance(recompute, str):
        return POLICIES.index(recompute)
    if isinstance(recompute, RecomputeLayers):
        layers = int(recompute.layers)
        return POLICIES.index("full") if layers >= blocks else of_blocks(layers) if layers else POLICIES.index("none")
    return next((i for i, name in enumerate(POLICIES) if modules_of(name) == frozenset(recompute.modules)), None)


def possible(name: str, scenario: Scenario, stack: Stack) -> bool:
    """Whether a model has what a policy recomputes, and its stack can. The layers of a table are recomputed whole."""
    modules, model = modules_of(name), scenario.model
    if model.kind == "layers":
        return name in ("none", "full")
    if name == "selective-op":
        return not model.mtp_layers
    if name == "selective" or not modules:
        return True
    return (stack.modules == "megatron" and model.kind == "decoder"
            and not model.parallel_block and model.positions != "relative" and model.block_norms == "input"
            and ("mla_up_proj" not in modules or model.mla is not None)
            and ("moe_act" not in modules or model.moe is not None))


def blocks_of(index: int, all_of: int = 0) -> int:
    """Recomputed blocks of a pipeline rank by a value of the recompute column; -1: another policy.

    Args:
        all_of: blocks of the fullest rank.
    """
    if index >= len(POLICIES):
        return index - len(POLICIES) + 1
    return {"none": 0, "full": all_of}.get(POLICIES[index], -1)


def of_blocks(blocks: int) -> int:
    """The value of the recompute column for the first so many of a pipeline rank's blocks, fewer than all."""
    return len(POLICIES) + blocks - 1
