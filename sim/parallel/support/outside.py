"""What no stack keeps outside its GPUs: places and optimizers that a technique has no code for."""

from __future__ import annotations

from collections.abc import Iterator

from sim.errors import Fault
from sim.scenario.fields.schema import Scenario

#: Optimizers that bitsandbytes keeps in unified memory where asked (optim/adamw.py, adam.py).
_PAGED = ("adamw", "adam", "adamw-8bit")
#: Those that DeepSpeed has on the CPU (deepspeed/ops/adam/cpu_adam.py; Adagrad and Lion are not in the schema).
_DEEPSPEED_CPU = ("adamw", "adam", "none")


def paged(scenario: Scenario, ipg: bool) -> str:
    """What of unified memory is not simulated: it is bitsandbytes' way to keep optimizer states, nothing else's."""
    offload, training, parallel = scenario.parallel.offload, scenario.training, scenario.parallel
    if "paged" in (offload.parameters, offload.activations):
        return "paged memory of anything but the optimizer's states"
    if offload.optimizer != "paged":
        return ""
    if training.optimizer not in _PAGED:
        return f"paged {training.optimizer} (bitsandbytes pages {', '.join(_PAGED)})"
    if ipg or parallel.strategy.startswith("zero"):
        return f"a paged optimizer in {parallel.strategy}"
    if training.optimizer_in_backward:
        return "a paged optimizer in backward"
    return ""


def outside(scenario: Scenario, ipg: bool, hybrid: bool, sharded: bool) -> Iterator[Fault]:
    """Places that the technique of this stack has no code for.

    Args:
        ipg: gradients go through DeepSpeed's buckets.
        hybrid: the stack has Megatron's HybridDeviceOptimizer.
        sharded: parameters are sharded as FSDP does it.
    """
    parallel = scenario.parallel
    offload, strategy = parallel.offload, parallel.strategy
    parameters, optimizer = (place in ("cpu", "nvme") for place in (offload.parameters, offload.optimizer))
    if parallel.pipeline > 1 and offload.activations in ("cpu", "nvme"):
        yield Fault("saved tensors of pipeline stages stay on the GPU (megatron-core transformer_config.py refuses "
                    "cpu_offloading with a pipeline)", "parallel.offload.activations",
                    hint="set pipeline: 1, or remove it")
    if parallel.pipeline > 1 and sharded and (parameters or optimizer) and scenario.software.fsdp != 2:
        yield Fault("FSDP 1 offloads no gradients that add up outside no_sync (torch 2.13 distributed/fsdp/"
                    "fully_sharded_data_parallel.py), as those of stages do", "parallel.offload",
                    hint="set software.fsdp: 2 or pipeline: 1, or remove it")
    if offload.optimizer_fraction < 1 and not (hybrid and optimizer):
        yield Fault("only Megatron's HybridDeviceOptimizer (from 2025 on) leaves part of the optimizer on the GPU",
                    "parallel.offload.optimizer_fraction", hint="remove it, or use optimizer: cpu with megatron")
    if hybrid and optimizer and not parameters:
        yield from _hybrid(scenario)
    elif sharded:
        if parameters != optimizer:
            yield Fault("FSDP keeps parameters, gradients and optimizer states in one place", "parallel.offload",
                        hint="give parameters and optimizer the same place")
        if "nvme" in (offload.parameters, offload.optimizer):
            yield Fault("FSDP keeps nothing on disks; it offloads to cpu", "parallel.offload",
                        hint="use strategy zero3 with framework deepspeed for nvme")
        if parameters and parallel.sharding_factor == 1:
            yield Fault("FSDP offloads shards, and sharding_factor is 1", "parallel.offload",
                        hint="shard over more GPUs, or use zero3 with framework deepspeed")
    elif parameters and strategy != "zero3":
        yield Fault(f"parameters of strategy {strategy} stay on the GPU", "parallel.offload.parameters",
                    hint="use strategy zero3 or fsdp")
    elif optimizer and not (ipg and strategy in ("zero1", "zero2", "zero3")):
        yield Fault(f"the optimizer of strategy {strategy} in this framework stays on the GPU",
                    "parallel.offload.optimizer", hint="use fsdp, or zero1 to zero3 with framework deepspeed")
    elif parameters and not optimizer:
        yield Fault("DeepSpeed offloads parameters only together with the optimizer", "parallel.offload.optimizer",
                    hint="set optimizer: cpu too")
    elif offload.optimizer == "nvme" and strategy != "zero3":
        yield Fault(f"DeepSpeed keeps optimizer states on disks in ZeRO-3 only, not in {strategy} (runtime/zero/"
                    "stage_1_and_2.py knows the CPU alone)", "parallel.offload.optimizer",
                    hint="use strategy zero3, or optimizer: cpu")
    if optimizer and not (hybrid and not parameters):
        yield from on_cpu(scenario, ipg)


def on_cpu(scenario: Scenario, ipg: bool) -> Iterator[Fault]:
    """Optimizers that no library runs on the CPU, where a technique keeps its states."""
    name, field = scenario.training.optimizer, "training.optimizer"
    if name == "adamw-8bit":
        yield Fault("bitsandbytes' 8-bit AdamW runs on GPUs, and the optimizer is offloaded", field,
                    hint="use adamw, or offload: {optimizer: paged} without ZeRO and FSDP's offload")
    elif ipg and name not in _DEEPSPEED_CPU:
        yield Fault(f"DeepSpeed refuses to offload {name}: its optimizer on the CPU is Adam (runtime/engine.py, "
                    "zero_force_ds_cpu_optimizer)", field, hint="use adamw")


def _hybrid(scenario: Scenario) -> Iterator[Fault]:
    """What Megatron's HybridDeviceOptimizer does not do.

    Source: megatron-core 0.12.1 optimizer/__init__.py, optimizer_config.py (read); Megatron-LM training/arguments.py
    (recalled): --optimizer-cpu-offload asks for --use-precision-aware-optimizer, which needs the distributed optimizer.
    """
    parallel, training = scenario.parallel, scenario.training
    if parallel.offload.optimizer == "nvme":
        yield Fault("Megatron keeps no optimizer states on disks", "parallel.offload.optimizer", hint="use cpu")
    if parallel.strategy != "zero1":
        yield Fault(f"Megatron offloads the distributed optimizer only, not that of {parallel.strategy}",
                    "parallel.strategy", hint="use zero1")
    if training.optimizer not in ("adamw", "adam", "sgd", "sgd-momentum"):
        yield Fault(f"Megatron has no {training.optimizer} on the CPU", "training.optimizer", hint="use adamw")
