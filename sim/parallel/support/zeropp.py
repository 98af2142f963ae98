"""What of ZeRO++ and MiCS's hierarchical gathers DeepSpeed has no code for: second shards (hpZ), quantised gathers
(qwZ) and quantised reductions (qgZ), which fields that other techniques have too ask for.

Source: deepspeed 0.10.0, 0.14.4, 0.19.8 runtime/engine.py (ZeRO-3 alone gets them), runtime/zero/stage3.py,
partition_parameters.py, utils/groups.py, runtime/comm/coalesced_collectives.py, csrc/quantization/pt_binding.cpp;
0.14.4 runtime/zero/mics.py, mics_utils.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from sim.errors import Fault
from sim.model.tuning import QUANTISED
from sim.parallel.sharded.quantised import GRADIENTS, WEIGHTS
from sim.parallel.sharded.secondary import neighbours
from sim.scenario.fields.schema import Scenario
from sim.software import Stack
from sim.work import DTYPE_BYTES

_GATHER, _REDUCE, _RESHARD = "training.precision.gather", "training.precision.reduce", "parallel.reshard_after_forward"


def zero_plus_plus(scenario: Scenario, stack: Stack, some: bool) -> Iterator[Fault]:
    """Faults of a scenario of DeepSpeed's ZeRO.

    Args:
        some: states are kept by some of the ranks that hold the same parameters (MiCS).
    """
    parallel, training = scenario.parallel, scenario.training
    yield from _hierarchical(scenario, stack, some)
    if stack.gradient_path != "ipg" or parallel.strategy == "none" or training.mode != "train":
        return
    wanted = _narrow(scenario)
    if parallel.strategy == "zero3" and neighbours(parallel.reshard_after_forward):
        wanted.append((_RESHARD, "second shards"))
    for field, what in wanted:
        if parallel.strategy != "zero3":
            yield Fault(f"DeepSpeed has {what} in ZeRO-3 alone, not in {parallel.strategy}", field,
                        hint="use strategy zero3, or 16 bits")
        elif not stack.zero_plus_plus:
            yield Fault(f"DeepSpeed has {what} from 0.10 on (ZeRO++)", field,
                        hint='set software.year: 2024, or software.versions: {deepspeed: "0.10.0"}')
        elif some:
            yield Fault(f"MiCS has no {what}: it gathers and reduces by code of its own (runtime/zero/mics.py)", field,
                        hint="write sharding_factor: full, or remove it")
        elif parallel.tensor > 1 and field != _GATHER:
            yield Fault(f"DeepSpeed takes neighbours among all ranks for {what} and knows no tensor ranks "
                        "(utils/groups.py)", field, hint="set tensor: 1, or remove it")
    if parallel.strategy == "zero3":
        yield from _second(scenario)
        yield from _dtypes(scenario, stack)


def able(scenario: Scenario, stack: Stack, strategy: str, tensor: int) -> bool:
    """Whether what a scenario asks of ZeRO++ leaves a search this strategy on so many tensor ranks."""
    if stack.gradient_path != "ipg" or strategy == "none":
        return True
    narrow = {field for field, _ in _narrow(scenario)}
    if strategy != "zero3":
        return not narrow
    return tensor == 1 or not (_REDUCE in narrow or neighbours(scenario.parallel.reshard_after_forward))


def _narrow(scenario: Scenario) -> list[tuple[str, str]]:
    """Fields of precision that ask for fewer than 16 bits on the wire, and what that is."""
    precision = scenario.training.precision
    return [(field, what) for field, dtype, what in (
        (_GATHER, precision.gather, "quantised gathers"), (_REDUCE, precision.reduce, "quantised reductions"))
        if DTYPE_BYTES[dtype] < DTYPE_BYTES["bf16"]]


def _second(scenario: Scenario) -> Iterator[Fault]:
    """A second copy that nobody shares, or that belongs outside the GPU."""
    parallel = scenario.parallel
    if parallel.reshard_after_forward is not True and parallel.reshard_after_forward == 1:
        yield Fault("a second copy of ZeRO-3's parameters is split over two ranks or more", _RESHARD,
                    hint="write true for none (zero_hpz_partition_size: 1)")
    if neighbours(parallel.reshard_after_forward) and parallel.offload.parameters not in ("none", None):
        yield Fault("second shards go where parameters are (runtime/zero/partition_parameters.py: remote_device); "
                    "outside the GPU they are understood but not simulated", _RESHARD,
                    hint="write true, or keep parameters on the GPU")


def _dtypes(scenario: Scenario, stack: Stack) -> Iterator[Fault]:
    """Widths that DeepSpeed's kernels do not have."""
    precision, tuned = scenario.training.precision, scenario.training.finetune
    narrow = {field for field, _ in _narrow(scenario)}
    if _GATHER in narrow and precision.gather != WEIGHTS:
        yield Fault(f"DeepSpeed quantises gathers to {WEIGHTS}, not to {precision.gather}", _GATHER,
                    hint=f"use gather: {WEIGHTS}")
    if _REDUCE in narrow and precision.reduce != GRADIENTS:
        yield Fault(f"DeepSpeed quantises gradients to {GRADIENTS}, not to {precision.reduce}", _REDUCE,
                    hint=f"use reduce: {GRADIENTS}")
    if not narrow:
        return
    if precision.parameters not in ("fp16", "bf16"):
        yield Fault(f"DeepSpeed's quantising kernels read 16 bits, and parameters are {precision.parameters}",
                    "training.precision.parameters", hint="start from precision mixed-fp16")
    elif precision.gather == WEIGHTS and precision.parameters == "bf16" and not stack.quantises_bf16:
        yield Fault("DeepSpeed's quantised gathers read and write fp16 alone before 0.19, and parameters are bf16",
                    _GATHER, hint='use fp16, or software.versions: {deepspeed: "0.19.8"}')
    if precision.gather == WEIGHTS and tuned is not None and tuned.method != "full" and tuned.base in QUANTISED:
        yield Fault(f"frozen {tuned.base} weights are packed, and DeepSpeed would quantise them again", _GATHER,
                    hint=f"use gather: {precision.parameters}")


def _hierarchical(scenario: Scenario, stack: Stack, some: bool) -> Iterator[Fault]:
    """Gathers in two steps, which MiCS alone has, and which need shards of several whole nodes."""
    parallel, per_node = scenario.parallel, scenario.cluster.gpus_per_node
    if not parallel.hierarchical_gather:
        return
    field, factor = "parallel.hierarchical_gather", parallel.sharding_factor
    if not (some and parallel.strategy == "zero3" and stack.gradient_path == "ipg"):
        yield Fault("gathers in two steps are MiCS's: DeepSpeed's ZeRO-3 over some of the ranks", field,
                    hint="use strategy zero3 with framework deepspeed and a sharding_factor, or remove it")
    elif factor < 2 * per_node:
        yield Fault(f"shards over {factor} GPUs span a single node of {per_node}, which needs no gathers in two steps "
                    "(mics_utils.py refuses them)", field, hint="use a larger sharding_factor, or remove it")
    elif factor % per_node:
        yield Fault(f"shards over {factor} GPUs fill no whole nodes of {per_node}", field,
                    hint=f"use a sharding_factor that is a multiple of {per_node}")
