"""What can be asked but is not simulated yet: one clear error, never a silent approximation."""

from __future__ import annotations

from collections.abc import Iterator

from sim.errors import Fault, UserError
from sim.hardware import gpu
from sim.model.inference.weights import MULTIPLIED, NARROW
from sim.model.tuning import QUANTISED, cut_both
from sim.parallel.model.expert import misfit
from sim.parallel.support.attention import attention_faults
from sim.parallel.support.context import context_faults
from sim.parallel.support.documents import document_faults
from sim.parallel.support.further import further
from sim.parallel.support.muon import muon
from sim.parallel.support.outside import outside, paged
from sim.parallel.support.served import served
from sim.parallel.support.unknown import unknown
from sim.parallel.support.zeropp import zero_plus_plus
from sim.scenario.fields.schema import RecomputeModules, Scenario
from sim.software import Stack

#: Compute dtypes below 16 bits.
_NARROW = ("fp8", "mxfp8", "nvfp4", "int8", "int4")
#: Schedules under which both ends of a pipeline hold a stage.
_BOTH_ENDS = ("dualpipe",)


def _tuned(scenario: Scenario, stack: Stack) -> str:
    """What of fine-tuning is not simulated."""
    finetune, model, precision = scenario.training.finetune, scenario.model, scenario.training.precision
    if finetune is None or finetune.method == "full":
        return ""
    if model.kind == "layers":
        return f"{finetune.method} of a table of layers, which says nothing of queries, values or their like"
    narrow = precision.compute in _NARROW
    for also, asked in ((f"compute in {precision.compute} and {finetune.base} weights",
                         narrow and finetune.base in QUANTISED),
                        (f"compute in {precision.compute} by torchao, which makes gradients of frozen weights all the "
                         "same", narrow and stack.narrow_keeps_inputs)):
        if asked:
            return f"{finetune.method} with {also}"
    return ""


def _chunked_head(scenario: Scenario, stack: Stack) -> Iterator[Fault]:
    """LoRA at a head whose loss is taken in chunks: torchtune's modules alone pass its branch.

    Source: liger_kernel transformers/model/llama.py (lce_maybe_trainable_lm_head hands `lm_head.weight` to the kernel:
    the base's, of a module of peft's too).
    """
    training, precision = scenario.training, scenario.training.precision
    tuned, field = training.finetune, "training.finetune.targets"
    if not training.chunked_loss or tuned.method not in ("lora", "qlora") or "head" not in tuned.targets:
        return
    if stack.modules == "transformers" or not stack.chunked_logits_kept:
        yield Fault("Liger Kernel's loss in chunks reads the head's own weight, so matrices beside it would never be "
                    "trained", field, hint="leave out head, or set training.chunked_loss: false")
    elif precision.compute in ("fp16", "bf16") and precision.parameters == "fp32" == precision.gather:
        yield Fault("the loss in chunks beside a head with LoRA is torchtune's, which has no autocast", field,
                    hint="use a precision without autocast, or leave out head")


def _cut_chunks(scenario: Scenario, stack: Stack) -> Iterator[Fault]:
    """A loss in chunks of a vocabulary that tensor ranks share, which torchtune's and torchtitan's decoders have."""
    training, field, parallel = scenario.training, "training.chunked_loss", scenario.parallel
    if not training.chunked_loss or parallel.tensor == 1 or scenario.model.kind not in ("decoder", "encoder-decoder"):
        return
    if stack.modules != "plain" or scenario.model.kind != "decoder":
        yield Fault("a loss in chunks of a vocabulary that tensor ranks share is that of torchtune's and torchtitan's "
                    "decoders (Liger Kernel reads one rank's part of the head only, Megatron has none)", field,
                    hint="use framework torchtitan or pytorch with modules: plain, tensor: 1, or chunked_loss: false")
    elif stack.chunks_cut == "whole" and parallel.sequence_parallel:
        yield Fault("torchtune's loss in chunks over tensor ranks knows no activations that are scattered along the "
                    "sequence", "parallel.sequence_parallel", hint="set it to false, or use framework torchtitan")
    elif training.finetune.method in ("lora", "qlora") and "head" in training.finetune.targets:
        yield Fault("the loss in chunks of a cut head with LoRA is not simulated", "training.finetune.targets",
                    hint="leave out head, or set training.chunked_loss: false")


def _base(scenario: Scenario, stack: Stack) -> Iterator[Fault]:
    """Frozen weights of another dtype than the adapters': autocast brings them together, FSDP's mixed precision does
    when it gathers, and peft's LoRA casts around its matrices."""
    training, precision = scenario.training, scenario.training.precision
    tuned, parameters = training.finetune, precision.parameters
    if tuned is None or tuned.method == "full":
        return
    field, base = "training.finetune.base", str(tuned.base)
    if base in QUANTISED:
        field, base = "training.finetune.unquantised", tuned.unquantised or parameters
    autocast = precision.compute in ("fp16", "bf16") and parameters == precision.gather == "fp32"
    if base == parameters or autocast:
        return
    if parameters == "fp32" and precision.gather == base == precision.compute and like_fsdp(
            scenario.parallel.strategy, stack.gradient_path == "ipg"):
        return
    wider = f", precision: amp-{base}, or pure-{base} for adapters of that dtype too" if base != "fp32" else ""
    hint = f"use {field.rpartition('.')[2]}: {parameters}{wider}"
    if tuned.base in QUANTISED or parameters != "fp32" or precision.gather != "fp32":
        yield Fault(f"no code is known that runs {base} weights beside {parameters} adapters gathered in "
                    f"{precision.gather}", field, hint=hint)
    elif tuned.method == "adapter" or stack.modules != "transformers":
        what = "adapters" if tuned.method == "adapter" else f"LoRA of {stack.modules} modules"
        yield Fault(f"{what} of {parameters} read {base} activations, which PyTorch refuses without autocast (peft's "
                    "LoRA beside Hugging Face's modules alone casts them)", field, hint=hint)


def check(scenario: Scenario, stack: Stack) -> None:
    """Raise `UserError` naming every field of the scenario that this version cannot simulate."""
    training, ipg = scenario.training, stack.gradient_path == "ipg"  # gradients go through DeepSpeed's buckets
    sharded = like_fsdp(scenario.parallel.strategy, ipg)
    if training.mode == "train":
        places = [*unknown({"parallel.offload": paged(scenario, ipg)}),
                  *outside(scenario, ipg, stack.hybrid_offload, sharded), *_stages(scenario, ipg),
                  *muon(scenario, stack, sharded)]
    else:
        places = [*served(scenario, stack, sharded)]
    faults = [*on_any_ranks(scenario, stack), *_in_backward(scenario), *places, *_expert(scenario, ipg),
              *_whole_slices(scenario), *_some(scenario, stack),
              *zero_plus_plus(scenario, stack, spread_over_some(scenario)),
              *(context_faults(scenario, stack) if scenario.parallel.context > 1 else ())]
    if faults:
        raise UserError(faults)


def on_any_ranks(scenario: Scenario, stack: Stack) -> list[Fault]:
    """What of a model and its training this version cannot simulate, however they are laid out."""
    training = scenario.training
    asked: dict[str, object] = {
        "training.chunked_loss": training.chunked_loss and scenario.model.kind not in ("decoder", "encoder-decoder")
        and f"chunked loss of kind {scenario.model.kind}",
        "training.finetune": _tuned(scenario, stack),
        "training.precision.parameters": training.mode == "train" and training.precision.parameters in NARROW
        and f"training with {training.precision.parameters} weights",
        "training.precision": (training.precision.compute == "fp64" and "compute in fp64") or (
            training.precision.compute in ("int8", "int4") and training.mode == "train" and training.precision.compute),
    }
    return [*unknown(asked), *_chunked_head(scenario, stack), *_cut_chunks(scenario, stack), *_base(scenario, stack),
            *_narrow(scenario), *_modules(scenario, stack), *further(scenario, stack),
            *attention_faults(scenario, stack), *document_faults(scenario, stack)]


def _modules(scenario: Scenario, stack: Stack) -> Iterator[Fault]:
    """Recomputation of named modules, which Megatron's code has and nobody else's."""
    if not isinstance(scenario.training.recompute, RecomputeModules):
        return
    field = "training.recompute.modules"
    if stack.modules != "megatron":
        yield Fault("recomputation of named modules is Megatron's", field,
                    hint="use framework megatron, or recompute selective, selective-op or full")


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
    if compute in MULTIPLIED and not card.supports(compute):
        trains = scenario.training.mode == "train"
        able = ", ".join(dtype for dtype in card.tflops if not (trains and dtype.startswith("int")))
        yield Fault(f"{card.name} has no tensor cores for {compute}", "training.precision", hint=f"it has {able}")
    elif scenario.training.mode != "train" and compute in MULTIPLIED and compute != parameters:
        yield Fault(f"inference multiplies in {compute} what is stored in {compute}, not in {parameters}",
                    "training.precision.parameters",
                    hint=f"write 'parameters: {compute}' too, or --set training.precision.parameters={compute}")


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
