"""What no stack does with Muon, or what of it is not simulated: each names what can be used."""

from __future__ import annotations

from collections.abc import Iterator

from sim.errors import Fault
from sim.scenario.fields.schema import Scenario
from sim.software import Stack
from sim.work import DTYPE_BYTES

_WHO = ("use pytorch with torch 2.9 or later (year 2026), megatron from 2026 on, or torchtitan with versions: "
        "{torchtitan: '0.3'}; or optimizer adamw")
_OPTIMIZER = "training.optimizer"
#: Strategies of a stack that Muon's code runs with (`Stack.muon`).
_STRATEGIES = {"torch": ("none", "ddp"), "emerging": ("none", "ddp", "zero1"), "owned": ("fsdp", "zero2", "zero3")}


def strategies(scenario: Scenario, stack: Stack, known: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `known` that the optimizer leaves."""
    if scenario.training.optimizer != "muon":
        return known
    return tuple(name for name in known if name in _STRATEGIES.get(stack.muon, ()))


def cuts(scenario: Scenario, stack: Stack) -> tuple[bool, bool]:
    """Whether the optimizer leaves tensor ranks, and pipeline stages."""
    if scenario.training.optimizer != "muon":
        return True, True
    return stack.muon == "emerging", stack.muon != "owned"


def muon(scenario: Scenario, stack: Stack, sharded: bool) -> Iterator[Fault]:
    """Faults of a scenario whose optimizer is Muon.

    Args:
        sharded: parameters are sharded as FSDP does it.
    """
    training, parallel = scenario.training, scenario.parallel
    if training.optimizer != "muon" or training.mode != "train":
        return
    if stack.muon == "none":
        yield Fault(f"{stack.framework} of {scenario.software.year} has no Muon, or none that is simulated", _OPTIMIZER,
                    hint=_WHO)
        return
    if training.finetune.method != "full":
        yield Fault(f"no recipe says which matrices of {training.finetune.method} Muon takes", _OPTIMIZER,
                    hint="use adamw, or finetune.method full")
    if scenario.model.kind == "layers":
        yield Fault("Muon takes hidden matrices, and a table of layers does not say what its weights are", _OPTIMIZER,
                    hint="use adamw or sgd-momentum")
    if training.optimizer_in_backward:
        yield Fault("no library orthogonalises matrices in backward", "training.optimizer_in_backward",
                    hint="remove it, or use adamw")
    for place in ("parameters", "optimizer"):
        if getattr(parallel.offload, place) in ("cpu", "nvme"):
            yield Fault("Muon's update is simulated on the GPU alone", f"parallel.offload.{place}",
                        hint="remove it, or use adamw")
    yield from _modes(scenario, stack)
    yield from {"torch": _torch, "emerging": _emerging, "owned": _owned}[stack.muon](scenario, stack, sharded)


def _modes(scenario: Scenario, stack: Stack) -> Iterator[Fault]:
    """Settings of `training.muon` that only Megatron has."""
    asked, ours = scenario.training.muon, stack.muon == "emerging"
    if asked is None or ours:
        return
    if asked.tensor is not None:
        yield Fault("ways to orthogonalise over tensor ranks are Megatron's (--muon-tp-mode)", "training.muon.tensor",
                    hint="remove it, or use framework megatron")
    if asked.split_qkv:
        yield Fault("queries, keys and values of one matrix are taken apart by Megatron alone (--muon-split-qkv)",
                    "training.muon.split_qkv", hint="remove it, or use framework megatron")


def _torch(scenario: Scenario, stack: Stack, sharded: bool) -> Iterator[Fault]:
    """torch.optim.Muon, which wants every parameter whole and of two dimensions (torch 2.13.0 optim/_muon.py)."""
    parallel, model = scenario.parallel, scenario.model
    whole = "use strategy ddp, or framework torchtitan (0.3) with fsdp, or megatron with zero1"
    if sharded:
        yield Fault(f"{parallel.strategy} gives torch.optim.Muon DTensors, whose products DTensor would redistribute "
                    "one by one: understood but not simulated", "parallel.strategy", hint=whole)
    elif parallel.strategy == "zero1":
        yield Fault("ZeroRedundancyOptimizer wraps one class of optimizer, and Muon needs AdamW beside it",
                    "parallel.strategy", hint=whole)
    if parallel.tensor > 1:
        yield Fault("torch.optim.Muon on matrices that tensor ranks share as DTensors is not simulated",
                    "parallel.tensor", hint="set tensor: 1, or use framework megatron")
    if model.moe is not None and scenario.software.modules == "transformers" and not stack.experts_in_turns:
        yield Fault("torch.optim.Muon refuses tensors of three dimensions, in which transformers 5 keeps all experts",
                    _OPTIMIZER, hint="use software.modules plain, or framework megatron or torchtitan (0.3)")


def _emerging(scenario: Scenario, stack: Stack, sharded: bool) -> Iterator[Fault]:
    """Megatron's (megatron-core 0.16.1 optimizer/muon.py and layer_wise_optimizer.py; emerging-optimizers 0.3.0
    muon_utils.py: newton_schulz takes fp32)."""
    parallel, precision = scenario.parallel, scenario.training.precision
    if parallel.strategy not in ("none", "ddp", "zero1"):
        yield Fault(f"Megatron has no Muon beside {parallel.strategy}: its layer-wise optimizer deals whole parameters "
                    "out to data ranks", "parallel.strategy", hint="use zero1 (layer-wise), or ddp")
    elif parallel.strategy == "zero1" and parallel.sharding_factor < scenario.replica_ranks:
        yield Fault(f"Megatron's layer-wise optimizer is over all {scenario.replica_ranks} ranks that hold the same "
                    "parameters", "parallel.sharding_factor", hint="write sharding_factor: full")
    wide = precision.master if precision.master != "none" else precision.parameters
    if wide != "fp32" or precision.optimizer != "fp32":
        yield Fault("Megatron's Muon works on fp32 masters and momentum", "training.precision",
                    hint="use mixed-bf16 or bf16 with fp32 master and optimizer")
    if "fp16" in (precision.compute, precision.parameters):
        yield Fault("Megatron refuses Muon in fp16, whose loss is scaled", "training.precision", hint="use bf16")
    if stack.narrow_parameters and DTYPE_BYTES[precision.compute] < DTYPE_BYTES["bf16"]:
        yield Fault(f"parameters in {precision.compute} beside Muon are not simulated", "training.precision",
                    hint="use bf16")


def _owned(scenario: Scenario, stack: Stack, sharded: bool) -> Iterator[Fault]:
    """torchtitan's DistMuon, over the ranks that share parameters (torchtitan 0.3.0
    models/kimi_k2_7/config_registry.py: no tensor or pipeline parallelism; dist_muon.py: DTensors alone)."""
    parallel = scenario.parallel
    if not (sharded and scenario.software.fsdp == 2):
        yield Fault("torchtitan's DistMuon takes parameters that FSDP 2 shards", "parallel.strategy",
                    hint="use strategy fsdp with software.fsdp 2, or framework pytorch with ddp")
    moe = scenario.model.moe
    if moe is not None and parallel.sharding_factor > moe.experts:
        yield Fault(f"{parallel.sharding_factor} ranks share {moe.experts} experts: torchtitan then cuts their "
                    "matrices, which DistMuon refuses", "parallel.sharding_factor",
                    hint=f"use at most {moe.experts}, beside replicas of such groups")
    for name in ("tensor", "pipeline"):
        if getattr(parallel, name) > 1:
            yield Fault(f"torchtitan refuses DistMuon beside {name} parallelism", f"parallel.{name}",
                        hint=f"set {name}: 1, or use framework megatron")
