"""What inference cannot be asked yet, and where its weights cannot be."""

from __future__ import annotations

from collections.abc import Iterator

from sim.errors import Fault
from sim.model.inference.weights import NARROW
from sim.parallel.support.unknown import unknown
from sim.scenario.fields.schema import Inference, Scenario
from sim.software import Stack

#: Strategies whose ranks share weights out in a forward.
_SHARDED = ("fsdp", "zero3")


def served(scenario: Scenario, stack: Stack, like_fsdp: bool) -> Iterator[Fault]:
    """Everything of a request that is not simulated.

    Args:
        like_fsdp: what is sharded is so as FSDP does it.
    """
    yield from unknown(_inference(scenario, stack))
    parallel = scenario.parallel
    if parallel.strategy in _SHARDED:
        yield from _sharded(scenario, stack, like_fsdp)
    if parallel.offload.parameters in ("cpu", "nvme"):
        yield from _outside(scenario, stack, like_fsdp)


def _inference(scenario: Scenario, stack: Stack) -> dict[str, object]:
    """What inference has no part for. A cache that is expanded in front of attention is transformers', whose
    QuantizedCache refuses encoder-decoders (4.56.2 generation/utils.py)."""
    model, parallel, training = scenario.model, scenario.parallel, scenario.training
    pair, mode = model.kind == "encoder-decoder", training.mode
    cache = mode.inference.kv_cache if isinstance(mode, Inference) else "same"
    tuned, compute, offload = training.finetune, training.precision.compute, parallel.offload
    elsewhere = parallel.strategy in _SHARDED or offload.parameters != "none"
    return {
        "training.mode.inference.batching": isinstance(mode, Inference) and mode.inference.batching == "continuous"
        and _in_flight(scenario, stack, elsewhere),
        "training.finetune": tuned is not None and tuned.method != "full" and f"inference beside {tuned.method}",
        "training.chunked_loss": training.chunked_loss and "inference with a loss",
        "training.optimizer_in_backward": training.optimizer_in_backward and "inference with an optimizer",
        "training.precision": compute == "int4" and "inference in int4",
        "parallel.offload": (offload.parameters == "paged" or {offload.optimizer, offload.activations} != {"none"})
        and "inference with offload of anything but its parameters to cpu or nvme",
        "model.kind": model.kind == "layers" and "inference of a table of layers",
        "training.mode.inference.kv_cache": pair and cache != "same" and stack.quantised_products != "fused"
        and f"a cache in {cache} of an encoder-decoder by transformers, which refuses it",
        "parallel.pipeline": parallel.pipeline > 1 and (model.kind != "decoder" or elsewhere)
        and f"inference of {'weights that are not whole on a GPU' if elsewhere else f'kind {model.kind}'} over pipeline"
        " stages",
        "parallel.strategy": parallel.strategy not in ("none", "ddp", *_SHARDED)
        and f"inference with {parallel.strategy}, which keeps whole weights as ddp does",
        "parallel.context": parallel.context > 1 and "inference with context parallelism",
        "parallel.expert": parallel.expert not in (1, parallel.tensor)
        and f"inference with experts over other than the {parallel.tensor} tensor ranks",
        "parallel.sequence_parallel": parallel.sequence_parallel and "inference with sequence parallelism",
        "parallel.virtual_stages": parallel.virtual_stages > 1 and "inference with several chunks per rank",
    }


def _in_flight(scenario: Scenario, stack: Stack, elsewhere: bool) -> str:
    """What continuous batching has no part for; "" where there is nothing."""
    kind, what = scenario.model.kind, "continuous batching"
    if kind != "decoder":
        return f"{what} of kind {kind}"
    if scenario.parallel.pipeline > 1:
        return f"{what} over pipeline stages"
    if elsewhere:
        return f"{what} with weights that are not whole on a GPU"
    return f"{what} by code that is neither compiled nor an engine's (software.compile, cuda_graphs: true)" if (
        stack.kv_cache == "concatenated") else ""


def _sharded(scenario: Scenario, stack: Stack, like_fsdp: bool) -> Iterator[Fault]:
    """Weights that ranks share out."""
    parallel, precision, software = scenario.parallel, scenario.training.precision, scenario.software
    what = f"inference with {parallel.strategy}"
    yield from unknown({
        "model.kind": scenario.model.kind == "encoder-decoder"
        and f"{what} of an encoder-decoder, half of whose modules run once",
        "training.precision.parameters": precision.parameters in NARROW and f"{what} of {precision.parameters} weights",
        "parallel.expert": parallel.expert > 1 and f"{what} and experts spread over ranks",
        "parallel.wrap": parallel.wrap != "block" and f"{what} in units of other than blocks",
        "software.cuda_graphs": software.cuda_graphs and f"{what}, whose weights come and go, in CUDA graphs",
    })
    if like_fsdp and software.fsdp == 1:
        yield Fault(f"{what} by FSDP 1 is understood but not simulated", "software.fsdp", hint="write fsdp: 2")
    if like_fsdp and parallel.reshard_after_forward is not True:
        yield Fault("a forward without a backward that keeps what it gathered holds whole weights",
                    "parallel.reshard_after_forward", hint="set it to true, or use strategy none or ddp")
    if not like_fsdp and parallel.reshard_after_forward is not True:
        yield Fault(f"second shards of {what} are understood but not simulated yet in this version",
                    "parallel.reshard_after_forward", hint="remove it")
    if not like_fsdp and parallel.sharding_factor < scenario.replica_ranks:
        yield Fault("MiCS is for training (deepspeed runtime/zero/mics.py)", "parallel.sharding_factor",
                    hint="write sharding_factor: full")


def _outside(scenario: Scenario, stack: Stack, like_fsdp: bool) -> Iterator[Fault]:
    """Weights in host memory or on disks."""
    parallel, software, field = scenario.parallel, scenario.software, "parallel.offload.parameters"
    place, narrow = parallel.offload.parameters, scenario.training.precision.parameters in NARROW
    if parallel.strategy in _SHARDED:
        if like_fsdp and place == "nvme":
            yield Fault("FSDP keeps nothing on disks; it offloads to cpu", field,
                        hint="use strategy zero3 with framework deepspeed for nvme")
        if like_fsdp and parallel.sharding_factor == 1:
            yield Fault("FSDP offloads shards, and sharding_factor is 1", field,
                        hint="shard over more GPUs, or use zero3 with framework deepspeed, or strategy none")
        return
    if not stack.weight_hooks:
        yield Fault(f"{software.framework} copies no weights of strategy {parallel.strategy} to the GPU as they are "
                    "needed", field, hint="use strategy zero3 with framework deepspeed (ZeRO-Inference), or framework "
                    "pytorch (accelerate's hooks)")
        return
    if place == "nvme":
        yield Fault("what accelerate's disk_offload reads comes from disks or from the system's page cache, whichever "
                    "has it", field, hint="use cpu, or strategy zero3 with framework deepspeed")
    if narrow:
        yield Fault("bitsandbytes leaves what is in the host's memory unquantised (transformers "
                    "quantizers/quantizer_bnb_8bit.py, llm_int8_enable_fp32_cpu_offload)", field,
                    hint=f"use parameters: {'bf16' if scenario.training.precision.compute == 'bf16' else 'fp16'}")
    if software.compile or software.cuda_graphs:
        yield Fault("accelerate's hooks run in Python around every module, which neither compiled code nor graphs do",
                    field, hint="set software.compile and software.cuda_graphs to false")
    if scenario.model.moe is not None:
        yield Fault("which experts' weights accelerate's hooks copy depends on the tokens, which is not simulated",
                    field, hint="use strategy zero3 with framework deepspeed")
    if parallel.tensor > 1:
        yield Fault("accelerate's hooks know no tensor ranks", field, hint="set tensor: 1")
