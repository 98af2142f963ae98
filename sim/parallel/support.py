"""What can be asked but is not simulated yet: one clear error, never a silent approximation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sim.errors import Fault, UserError
from sim.hardware import gpu
from sim.model.inference import NARROW
from sim.model.tuning import QUANTISED, cut_both
from sim.parallel.model.expert import misfit
from sim.parallel.support_context import context_faults
from sim.parallel.support_outside import outside, paged
from sim.scenario.schema import RecomputeModules, Scenario, Training
from sim.software import Stack

#: Compute dtypes below 16 bits.
_NARROW = ("fp8", "mxfp8", "nvfp4", "int8", "int4")
#: Schedules under which both ends of a pipeline hold a stage.
_BOTH_ENDS = ("dualpipe",)


def recomputes_ops(training: Training) -> bool:
    """Whether recomputation of every second product is simulated: not beside weights that are frozen."""
    return training.finetune is None or training.finetune.method == "full"


def _tuned(scenario: Scenario, stack: Stack) -> str:
    """What of fine-tuning is not simulated."""
    finetune, model, precision = scenario.training.finetune, scenario.model, scenario.training.precision
    if finetune is None or finetune.method == "full":
        return ""
    if model.kind == "layers":
        return f"{finetune.method} of a table of layers, which says nothing of queries, values or their like"
    if finetune.method == "adapter" and model.kind == "encoder-decoder":
        return "an adapter behind cross attention"
    if finetune.method == "adapter" and (model.moe or model.mla):
        return "an adapter behind a sub-layer that is latent or a mixture"
    training, by_op = scenario.training, not recomputes_ops(scenario.training)
    narrow = precision.compute in _NARROW
    for also, asked in (("chunked_loss and the head among its targets",
                         training.chunked_loss and "head" in finetune.targets),
                        ("optimizer_in_backward", training.optimizer_in_backward),
                        ("recompute selective-op", by_op and training.recompute == "selective-op"),
                        (f"compute in {precision.compute} and {finetune.base} weights",
                         narrow and finetune.base in QUANTISED),
                        (f"compute in {precision.compute} by torchao, which makes gradients of frozen weights all the "
                         "same", narrow and stack.narrow_keeps_inputs)):
        if asked:
            return f"{finetune.method} with {also}"
    return ""


def _base(scenario: Scenario) -> Iterator[Fault]:
    """Frozen weights of another dtype than the adapters', which only autocast brings together."""
    finetune, precision = scenario.training.finetune, scenario.training.precision
    if finetune is None or finetune.method == "full":
        return
    autocast = precision.compute in ("fp16", "bf16") and precision.parameters == precision.gather == "fp32"
    if finetune.base in ("fp32", "bf16", "fp16") and finetune.base != precision.parameters and not autocast:
        yield Fault(f"{finetune.method} of {finetune.base} weights beside {precision.parameters} adapters is "
                    "understood but simulated under autocast only", "training.finetune.base",
                    hint=f"use base: {precision.parameters}" + (
                        f", precision: amp-{finetune.base}, or pure-{finetune.base} for adapters of that dtype too"
                        if finetune.base != "fp32" else ""))


def check(scenario: Scenario, stack: Stack) -> None:
    """Raise `UserError` naming every field of the scenario that this version cannot simulate."""
    training, ipg = scenario.training, stack.gradient_path == "ipg"  # gradients go through DeepSpeed's buckets
    asked: dict[str, object] = {"parallel.offload": paged(scenario, ipg)}
    if training.mode != "train":
        asked |= _inference(scenario)
    sharded = like_fsdp(scenario.parallel.strategy, ipg)
    faults = [*on_any_ranks(scenario, stack), *_unknown(asked), *_in_backward(scenario),
              *outside(scenario, ipg, stack.hybrid_offload, sharded), *_expert(scenario, ipg), *_stages(scenario, ipg),
              *_whole_slices(scenario), *_some(scenario, stack),
              *(context_faults(scenario, stack) if scenario.parallel.context > 1 else ())]
    if faults:
        raise UserError(faults)


def on_any_ranks(scenario: Scenario, stack: Stack) -> list[Fault]:
    """What of a model and its training this version cannot simulate, however they are laid out."""
    training, uncut = scenario.training, scenario.parallel.tensor == 1
    asked: dict[str, object] = {
        "training.chunked_loss": training.chunked_loss and not (scenario.model.kind == "decoder" and uncut)
        and "chunked loss of other than an uncut decoder",
        "training.finetune": _tuned(scenario, stack),
        "training.precision.parameters": training.mode == "train" and training.precision.parameters in NARROW
        and f"training with {training.precision.parameters} weights",
        "training.precision": training.precision.compute in ("int8", "int4") and training.precision.compute,
    }
    return [*_unknown(asked), *_base(scenario), *_narrow(scenario), *_modules(scenario, stack)]


def _modules(scenario: Scenario, stack: Stack) -> Iterator[Fault]:
    """Recomputation of named modules, which Megatron's code has and nobody else's."""
    if not isinstance(scenario.training.recompute, RecomputeModules):
        return
    field = "training.recompute.modules"
    if stack.modules != "megatron":
        yield Fault("recomputation of named modules is Megatron's", field,
                    hint="use framework megatron, or recompute selective, selective-op or full")
    elif not recomputes_ops(scenario.training):
        yield Fault("recomputation of named modules beside frozen weights is understood but not simulated yet in this "
                    "version", field, hint="write recompute: full or selective")


def _unknown(asked: Mapping[str, object]) -> list[Fault]:
    return [Fault(f"{what} is understood but not simulated yet in this version", field, hint="remove it, or see "
                  "the README's validity limits") for field, what in asked.items() if what]


def like_fsdp(strategy: str, ipg: bool) -> bool:
    """Whether parameters are sharded as FSDP does it; so is ZeRO-2 and 3 of a stack without DeepSpeed's buckets."""
    return strategy == "fsdp" or (strategy in ("zero2", "zero3") and not ipg)


def spread_over_some(scenario: Scenario) -> bool:
    """Whether each set of states is kept by some of the ranks that hold the same parameters, not by all of them."""
    parallel = scenario.parallel
    return (parallel.strategy not in ("none", "ddp") and parallel.sharding_factor < scenario.replica_ranks
            and scenario.training.mode == "train")


def _some(scenario: Scenario, stack: Stack) -> Iterator[Fault]:
    """ZeRO over some ranks that a stack has no groups for; FSDP has them all.

    Source: deepspeed 0.14.4 runtime/zero/mics.py (allreduce_mics_shard_grads: no offload) and mics_utils.py (neighbours
    among all ranks); runtime/zero/stage_1_and_2.py and nanotron 0.4 optim/zero.py: all data-parallel ranks.
    """
    parallel, field = scenario.parallel, "parallel.sharding_factor"
    strategy, factor, ipg = parallel.strategy, parallel.sharding_factor, stack.gradient_path == "ipg"
    if not spread_over_some(scenario) or like_fsdp(strategy, ipg):
        return
    whole = "write sharding_factor: full"
    if factor == 1:
        yield Fault(f"{strategy} over one rank splits nothing", field, hint="use strategy ddp, or a larger factor")
    elif ipg and strategy != "zero3":
        yield Fault(f"DeepSpeed's {strategy} splits states over all ranks that hold the same parameters, not over "
                    f"{factor} of them", field, hint=f"{whole}; zero3 (MiCS) and framework megatron can")
    elif stack.gradient_path == "accumulator":
        yield Fault(f"nanotron's {strategy} splits states over all ranks that hold the same parameters, not over "
                    f"{factor} of them", field, hint=whole)
    elif strategy == "zero3" and stack.parameter_coordinator == "blocking":
        yield Fault("DeepSpeed before 0.6 has no MiCS: ZeRO-3 is over all ranks", field, hint=whole)
    elif strategy == "zero3" and parallel.tensor > 1:
        yield Fault("MiCS takes neighbours among all ranks for a shard group and knows no tensor ranks", field,
                    hint=f"set tensor: 1, or {whole}")
    elif strategy == "zero3" and any(place in ("cpu", "nvme") for place in (parallel.offload.parameters,
                                                                             parallel.offload.optimizer)):
        yield Fault("MiCS has no support for offload", "parallel.offload", hint=f"remove it, or {whole}")
    elif parallel.schedule in _BOTH_ENDS and parallel.pipeline > 1:
        yield Fault(f"states over {factor} ranks beside schedule {parallel.schedule}, whose pipeline ranks hold two "
                    "stages that others hold too, is not simulated", field, hint=whole)
    elif parallel.expert > 1 and scenario.model.moe is not None and _experts_over(scenario) % (
            scenario.replica_ranks // factor):
        yield Fault(f"{scenario.replica_ranks // factor} sets of states do not divide the {_experts_over(scenario)} "
                    "ranks that hold the same experts", field, hint="use a larger sharding_factor")


def _experts_over(scenario: Scenario) -> int:
    """Ranks that hold the same routed experts."""
    parallel = scenario.parallel
    return scenario.replica_ranks * parallel.tensor // (parallel.expert * scenario.expert_tensor)


def _narrow(scenario: Scenario) -> Iterator[Fault]:
    """A narrow dtype that the GPU's tensor cores do not have."""
    precision = scenario.training.precision
    compute, parameters = precision.compute, precision.parameters
    card = gpu(scenario.cluster.topology.gpu)
    if compute in ("fp8", "mxfp8", "nvfp4") and not card.supports(compute):
        able = ", ".join(dtype for dtype in card.tflops if not dtype.startswith("int"))
        yield Fault(f"{card.name} has no tensor cores for {compute}", "training.precision", hint=f"it has {able}")
    elif scenario.training.mode != "train" and compute in ("fp8", "mxfp8", "nvfp4") and compute != parameters:
        yield Fault(f"inference multiplies in {compute} what is stored in {compute}, not in {parameters}",
                    "training.precision.parameters", hint=f"use parameters: {compute}")


def _whole_slices(scenario: Scenario) -> Iterator[Fault]:
    """Sizes that the slices of a cut model cannot share evenly."""
    parallel, model, tuned = scenario.parallel, scenario.model, scenario.training.finetune
    if tuned is not None and tuned.method in ("lora", "qlora") and tuned.rank % parallel.tensor and cut_both(
            parallel.tensor, parallel.sequence_parallel, str(scenario.software.modules)):
        yield Fault(f"tensor {parallel.tensor} does not divide the rank {tuned.rank}, whose columns the tensor ranks "
                    "share (Megatron-Bridge's ParallelLinearAdapter)", "training.finetune.rank",
                    hint=f"use a multiple of {parallel.tensor}")
    if tuned is not None and tuned.method == "adapter" and parallel.tensor > 1:
        yield from _cut_adapter(scenario, tuned.rank)
    if model.qk_norm == "whole" and parallel.tensor > 1:
        yield Fault("a norm of all heads together needs them on one rank, and tensor ranks hold some each",
                    "parallel.tensor", hint="set tensor: 1")
    if model.moe is not None:
        width, cut = model.moe.expert_ffn or model.ffn, scenario.expert_tensor
        if width % cut:
            yield Fault(f"tensor {cut} does not divide expert_ffn {width}", "model.moe.expert_ffn",
                        hint="use a tensor degree that divides it, or experts over tensor ranks too")
        if model.moe.shared_experts * width % parallel.tensor:
            yield Fault(f"tensor {parallel.tensor} does not divide the width {model.moe.shared_experts * width} of the "
                        "shared experts", "model.moe.expert_ffn", hint="use a tensor degree that divides it")


def _cut_adapter(scenario: Scenario, rank: int) -> Iterator[Fault]:
    """Adapters behind sub-layers that tensor parallelism cuts: NeMo's ParallelLinearAdapter."""
    parallel, modules = scenario.parallel, scenario.software.modules
    if modules != "megatron":
        yield Fault(f"no framework cuts adapters of {modules} modules (NeMo's ParallelLinearAdapter is Megatron's)",
                    "training.finetune.method", hint="set software.modules: megatron, or tensor: 1")
    elif parallel.sequence_parallel:
        yield Fault("adapters do not know activations that are scattered along the sequence (NeMo's "
                    "ParallelLinearAdapter would join columns of different tokens)", "parallel.sequence_parallel",
                    hint="set it to false")
    if rank % parallel.tensor:
        yield Fault(f"tensor {parallel.tensor} does not divide the width {rank} of the adapters, whose columns the "
                    "tensor ranks share", "training.finetune.rank", hint=f"use a multiple of {parallel.tensor}")


def _stages(scenario: Scenario, ipg: bool) -> Iterator[Fault]:
    """Sharded parameters or gradients that a pipeline's stages exclude."""
    parallel = scenario.parallel
    if parallel.pipeline == 1 or parallel.strategy not in ("fsdp", "zero2", "zero3"):
        return
    if ipg and parallel.strategy != "fsdp":
        yield Fault("DeepSpeed refuses ZeRO-2 and ZeRO-3 with pipeline parallelism (runtime/pipe/engine.py)",
                    "parallel.strategy", hint="use zero1, or fsdp with framework pytorch or torchtitan")
        return
    if parallel.schedule == "dualpipe":
        yield Fault("DualPipe is not sharded: the two ranks that hold a stage come to their two stages in opposite "
                    "orders, so gathers over both would wait for each other for ever; DeepSeek-V3 (arXiv 2412.19437, "
                    "section 3.2) keeps parameters whole, with ZeRO-1", "parallel.schedule",
                    hint="use strategy zero1, or a schedule that holds every stage once (interleaved, zb-v)")
    if scenario.model.tied_embeddings:
        yield Fault("FSDP shards no table that first and last stage share (torchtitan refuses tied embeddings with a "
                    "pipeline)", "model.tied_embeddings", hint="set it to false, or use zero1")
    if parallel.reshard_after_forward not in (True, False):
        yield Fault("stages of a pipeline are not resharded to fewer GPUs", "parallel.reshard_after_forward",
                    hint="use true or false")


def spreads_experts(strategy: str, factor: int, expert: int, ipg: bool) -> bool:
    """Whether experts are spread over so many of the ranks that share states `factor` ways."""
    if ipg and strategy == "zero3":
        return False
    return not like_fsdp(strategy, ipg) or factor % expert == 0


def _expert(scenario: Scenario, ipg: bool) -> Iterator[Fault]:
    """Ways to spread experts that a technique has no groups for."""
    parallel, field = scenario.parallel, "parallel.expert"
    if parallel.expert == 1 or scenario.model.moe is None:
        return
    if scenario.training.mode != "train":
        return  # tokens of tensor ranks are the same, and each computes its own experts' (`_inference`)
    if scenario.expert_tensor < parallel.tensor and not parallel.sequence_parallel:
        yield Fault(f"expert {parallel.expert} spreads experts over tensor ranks too, which all hold the same tokens",
                    field, hint="set sequence_parallel: true, so that every tensor rank sends its own tokens")
    if parallel.overlap_experts is not None and (why := misfit(scenario, parallel.overlap_experts)):
        yield Fault(why[0], "parallel.overlap_experts", hint=why[1])
    if ipg and parallel.strategy == "zero3":
        yield Fault("DeepSpeed has no expert parallelism in ZeRO-3 (runtime/engine.py: MoE not supported with Stage 3)",
                    field, hint="use zero1, zero2 or fsdp")
    elif like_fsdp(parallel.strategy, ipg):
        if not spreads_experts(parallel.strategy, parallel.sharding_factor, parallel.expert, ipg):
            yield Fault(f"expert {parallel.expert} does not divide the sharding factor {parallel.sharding_factor}: a "
                        "shard group holds every expert once or more", field, hint="use a larger sharding_factor")
        elif parallel.reshard_after_forward not in (True, False):
            yield Fault("experts that are spread are not resharded to fewer GPUs", "parallel.reshard_after_forward",
                        hint="use true or false")


def _in_backward(scenario: Scenario) -> Iterator[Fault]:
    """What excludes an optimizer that runs in backward."""
    field, parallel = "training.optimizer_in_backward", scenario.parallel
    if not scenario.training.optimizer_in_backward:
        return
    if not (parallel.strategy == "none" or (parallel.strategy == "fsdp" and scenario.software.fsdp == 2)):
        yield Fault(f"strategy {parallel.strategy} applies gradients only after backward", field,
                    hint="use strategy none, or fsdp with software.fsdp 2")
    if scenario.micro_steps > 1:
        yield Fault(f"gradients of {scenario.micro_steps} micro-steps have to be kept until the last", field,
                    hint="make global_batch one micro-step's, or remove it")
    if parallel.offload.optimizer != "none":
        yield Fault("the optimizer is offloaded and runs after backward", field, hint="remove one of the two")
    if parallel.pipeline > 1:
        yield Fault("a pipeline's stages apply gradients only after the last micro-batch", field, hint="remove it")


def _inference(scenario: Scenario) -> dict[str, object]:
    """What inference cannot be asked: weights are whole on every tensor and pipeline rank."""
    model, parallel, training = scenario.model, scenario.parallel, scenario.training
    tuned, compute = training.finetune, training.precision.compute
    return {
        "training.finetune": tuned is not None and tuned.method != "full" and f"inference beside {tuned.method}",
        "training.chunked_loss": training.chunked_loss and "inference with a loss",
        "training.optimizer_in_backward": training.optimizer_in_backward and "inference with an optimizer",
        "training.precision": compute in ("int8", "int4") and f"inference in {compute}",
        "parallel.offload": any(v in ("cpu", "nvme", "paged") for _, v in parallel.offload)
        and "inference with offload",
        "model.kind": model.kind != "decoder" and f"inference of kind {model.kind}",
        "model.positions": model.positions == "relative" and "inference with relative positions",
        "parallel.strategy": parallel.strategy not in ("none", "ddp") and f"inference with {parallel.strategy}",
        "parallel.context": parallel.context > 1 and "inference with context parallelism",
        "parallel.expert": parallel.expert not in (1, parallel.tensor)
        and f"inference with experts over other than the {parallel.tensor} tensor ranks",
        "parallel.sequence_parallel": parallel.sequence_parallel and "inference with sequence parallelism",
        "parallel.virtual_stages": parallel.virtual_stages > 1 and "inference with several chunks per rank",
    }
