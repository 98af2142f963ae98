"""torchtune's YAML files as scenarios.

Names, defaults and what they do: torchtune 0.6.1 recipes/*.py (setup, _setup_model, train), training/_distributed.py
(shard_model, FSDP 2), training/activations.py, models/*/_model_builders.py, modules/loss; torchao dtypes/nf4tensor.py.
Parameters, gradients and states have one dtype, and nothing is cast: the model is built under set_default_dtype.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.errors import Fault, UserError
from sim.imports.draft import Draft
from sim.imports.settings import Said, Settings, one_of, switch
from sim.scenario.named.hub import preset_of
from sim.scenario.named.presets import preset
from sim.scenario.text.document import read_text

#: How a file's comments say it is run.
_RUN = re.compile(r"^#.*\btune run\b(?P<flags>(?: +--\S+ +\d+)*) +(?P<recipe>[\w/]+) +--config", re.MULTILINE)
_COUNT = re.compile(r"--(nproc_per_node|nnodes) +(\d{1,6})\b")
#: Parts of a recipe's name -> what of it is not simulated.
_RECIPES = {
    "dpo": "batches are of pairs, and a reference model runs them too; simulated as plain training",
    "ppo": "sequences are generated and scored between steps; simulated as plain training",
    "knowledge_distillation": "a teacher runs the batches too; simulated as plain training",
    "qat": "fake quantisation is not simulated",
}
_DTYPES = {"bf16": "pure-bf16", "fp32": "fp32"}
_ATTENTION = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "output_proj": "projection"}
#: A builder of any size -> fields that its family has (models/*/_component_builders.py).
_FAMILIES: dict[str, dict[str, Any]] = {
    name: {"gated_mlp": True, "activation": "silu", "positions": "rotary", "norm": "rmsnorm", "bias": False,
           "tied_embeddings": False, **more}
    for name, more in {"llama2": {}, "llama3": {}, "llama3_1": {}, "mistral": {}, "qwen2": {"qkv_bias": True}}.items()}
_SIZES = {"vocab_size": "vocab", "num_layers": "layers", "num_heads": "heads", "num_kv_heads": "kv_heads",
          "embed_dim": "hidden", "intermediate_dim": "ffn"}
#: Code Llama has Llama 2's sizes and 16 more rows of vocabulary (models/code_llama2/_model_builders.py).
_CODE, _CODE_VOCAB = "code_llama2_", 32016


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """Ours, how its kernels are launched ("" = as the stack does), where states live, their dtype where it is not the
    parameters', and what it is not."""

    name: str
    kernel: str = ""
    place: str = ""
    wide: bool = False
    lacks: str = ""


_EIGHT, _WIDE = _Optimizer("adamw-8bit"), _Optimizer("adamw", wide=True)
#: Class -> ours. bitsandbytes keeps fp32 states of any parameters (optim/optimizer.py, init_state).
_OPTIMIZERS = {
    "torch.optim.adamw": _Optimizer("adamw", "foreach"), "torch.optim.adam": _Optimizer("adam", "foreach"),
    "torch.optim.sgd": _Optimizer("sgd", "foreach"), "torch.optim.adafactor": _Optimizer("adafactor"),
    "bitsandbytes.optim.adamw8bit": _EIGHT, "bitsandbytes.optim.adam8bit": _EIGHT,
    "bitsandbytes.optim.pagedadamw8bit": _Optimizer("adamw-8bit", place="paged"),
    "bitsandbytes.optim.pagedadamw": _Optimizer("adamw", place="paged", wide=True),
    "bitsandbytes.optim.pagedadamw32bit": _Optimizer("adamw", place="paged", wide=True),
    "bitsandbytes.optim.adamw": _WIDE, "bitsandbytes.optim.adamw32bit": _WIDE,
    **{f"{room}.{name}": one for room in ("torchao.prototype.low_bit_optim", "torchao.optim") for name, one in {
        "adamw8bit": _EIGHT, "adamwfp8": _Optimizer("adamw-8bit", lacks="states are as large, scaled otherwise"),
        "adamw4bit": _Optimizer("adamw-8bit", lacks="its states are half as large")}.items()},
}
_CHUNKED = ("cewithchunkedoutputloss", "linearcrossentropyloss")
_WHOLE = ("crossentropyloss",)
_IDLE = (
    "output_dir", "tokenizer.*", "checkpointer.*", "resume_from_checkpoint", "save_*", "seed", "shuffle", "epochs",
    "max_steps_per_epoch", "metric_logger.*", "log_*", "profiler.*", "lr_scheduler.*", "dataset*", "collate_fn",
    "dataloader*", "device", "optimizer.lr", "optimizer.weight_decay", "optimizer.betas", "optimizer.eps", "loss.*",
    "model.lora_alpha", "model.max_seq_len", "model.norm_eps", "model.rope_base", "model.attn_dropout", "beta",
    "label_smoothing", "enable_async_checkpointing", "low_cpu_ram", "fsdp.*", "tensor_parallel_plan*",
    "include_path", "memory_efficient_fsdp_wrap", "fake_quant_after_n_steps", "enable_kv_cache", "ac_*", "kd_*",
    "quantizer.*", "model.scale_factor", "model.*_trainable", "model.image_size",
    "policy_model.*", "*_checkpointer.*", "ppo_*", "num_steps", "temperature", "top_k", "gamma", "lmbda", "kl_coeff",
    "forward_batch_size", "max_generated_tokens", "min_response_length", "penalise_*", "reward_*", "stop_token_ids",
    "whiten_rewards",
)


def read(files: Sequence[str], draft: Draft) -> None:
    """Takes what one of torchtune's YAML files says, and a model's config.json beside it.

    Raises:
        UserError: a file that cannot be read, or a value that cannot be.
    """
    for settings in draft.opened(files):
        _recipe(settings, draft)
        draft.close(settings)


def _recipe(settings: Settings, draft: Draft) -> None:
    component = settings.get("model._component_", "policy_model._component_")
    if component is None or not isinstance(component.value, str):
        raise UserError(Fault("is no configuration of torchtune's training: it has no model._component_", "",
                              settings.file, 1))
    layers = _model(settings, draft, component)
    single = _launched(settings, draft)
    if not single:
        _sharding(settings, draft)
    wide = _optimizer(settings, draft)
    _precision(settings, draft, wide)
    _batch(settings, draft)
    _recompute(settings, draft, layers)
    _software(settings, draft)
    for name in ("teacher_model", "reward_and_value_model"):
        if (said := settings.get(f"{name}._component_")) is not None:
            draft.leave(said, "another model's memory and time are not simulated")
            settings.idle(f"{name}.*")
    settings.idle(*_IDLE)


def _model(settings: Settings, draft: Draft, component: Said) -> int | None:
    """Fields of `model`, and LoRA's, which is a part of the model here; its blocks, if known."""
    name = str(component.value).rpartition(".")[2].lower()
    tuned = re.match(r"q?lora_", name)
    if tuned:
        _lora(settings, draft, component, quantised=name.startswith("qlora_"))
        name = name[tuned.end():]
    if draft.has("model.hf"):
        return None
    sizes = {ours: said for theirs, ours in _SIZES.items() if (said := settings.get(f"model.{theirs}")) is not None}
    if name in _FAMILIES:
        for field, value in _FAMILIES[name].items():
            draft.take(f"model.{field}", value, component)
        for field, said in sizes.items():
            draft.take(f"model.{field}", said.whole(), said)
        return sizes["layers"].whole() if "layers" in sizes else None
    code = name.startswith(_CODE)
    known = preset_of((name.replace(_CODE, "llama2_") if code else name).replace("_", "-"))
    if known is None:
        draft.leave(component, "the sizes of this model are not known here: give its config.json too, or --set "
                               "model.preset=NAME")
        return None
    draft.take("model.preset", known, component)
    if code:
        draft.take("model.vocab", _CODE_VOCAB, component)
    return int((preset(known) or {})["layers"])


def _lora(settings: Settings, draft: Draft, component: Said, quantised: bool) -> None:
    base = switch(settings, "model.quantize_base")
    if quantised or base is not None:  # nf4tensor.py: scales of 64 weights, quantised themselves by 256
        draft.take("training.finetune.method", "qlora", base or component)
        draft.take("training.finetune.base", "nf4-dq", base or component)
    else:
        draft.take("training.finetune.method", "lora", component)
        dtype = settings.get("dtype")
        draft.take("training.finetune.base", one_of(dtype, {"bf16": "bf16", "fp32": "fp32"}) if dtype else "bf16",
                   dtype or component)
    modules = settings.get("model.lora_attn_modules")
    names = modules.value if modules is not None else []
    if modules is not None and not (isinstance(names, list) and all(one in _ATTENTION for one in names)):
        raise modules.wrong(f"a list of {', '.join(_ATTENTION)}")
    targets = [_ATTENTION[one] for one in _ATTENTION if one in names]
    for setting, matrix in (("apply_lora_to_mlp", "mlp"), ("apply_lora_to_output", "head")):
        if (said := switch(settings, f"model.{setting}")) is not None:
            targets.append(matrix)
            draft.share("training.finetune.targets", matrix, said)
    draft.take("training.finetune.targets", targets, modules or component)
    rank, drop = settings.get("model.lora_rank"), settings.get("model.lora_dropout")
    if rank is not None:
        draft.take("training.finetune.rank", rank.whole(), rank)
    draft.assume("training.finetune.rank", 8, "torchtune's default of lora_rank")
    if drop is not None:
        draft.take("training.finetune.dropout", drop.number(), drop)
    draft.assume("training.finetune.dropout", 0.0, "torchtune's default of lora_dropout")
    if (dora := switch(settings, "model.use_dora")) is not None:
        draft.leave(dora, "DoRA's magnitudes are not simulated; LoRA is")


def _launched(settings: Settings, draft: Draft) -> bool:
    """GPUs and recipe, which a file's comments alone tell; whether the recipe is one of a single GPU."""
    text = read_text(Path(settings.file), settings.file)
    found = _RUN.search(text)
    recipe, why = (found["recipe"], f"its comment: tune run{found['flags']} {found['recipe']}") if found else ("", "")
    if not found:
        recipe = "single_device" if "single_device" in settings.file else ""
        why = "by the file's name" if recipe else "no comment says which recipe runs it: one of several GPUs is counted"
    if found and not re.search(r"_(single_device|distributed)(_|\Z)", recipe):
        raise UserError(Fault(f"is a configuration of the recipe {recipe[:60]}, which does not train", "",
                              settings.file, text[:found.start()].count("\n") + 1))
    for part, lacks in _RECIPES.items():
        if part in recipe:
            draft.leave(Said(settings.file, "tune run", recipe, text[:found.start()].count("\n") + 1 if found else 0),
                        lacks)
    counts = dict(_COUNT.findall(found["flags"])) if found else {}
    single = "single_device" in recipe
    if single or "nproc_per_node" in counts:
        draft.assume("cluster.gpus_per_node", 1 if single else max(1, int(counts["nproc_per_node"])), why)
    if single or "nnodes" in counts:
        draft.assume("cluster.nodes", 1 if single else max(1, int(counts["nnodes"])), why)
    draft.assume("parallel.strategy", "none" if single else "fsdp", why)
    return single


def _sharding(settings: Settings, draft: Draft) -> None:
    """FSDP 2 of blocks; the rest is a unit of its own, and every micro-step reduces (nothing turns that off)."""
    draft.assume("software.fsdp", 2, "torchtune shards with fully_shard alone")
    draft.assume("parallel.reduce_every_micro_step", True, "no recipe calls set_requires_gradient_sync")
    offload = switch(settings, "fsdp_cpu_offload", "fsdp.cpu_offload")
    if offload is not None:
        draft.take("parallel.offload.parameters", "cpu", offload)
        draft.take("parallel.offload.optimizer", "cpu", offload, "the optimizer steps where the shards are")
    after = settings.get("fsdp_reshard_after_forward")
    if after is not None:
        draft.take("parallel.reshard_after_forward", after.flag(), after)
    apart = settings.get("custom_sharded_layers")
    if apart is not None and apart.value:
        draft.leave(apart, "embedding and head are counted as gathered with what is in no block")
    ranks = settings.get("tensor_parallel_dim")
    if ranks is not None and ranks.whole() > 1:
        draft.take("parallel.tensor", ranks.whole(), ranks)


def _optimizer(settings: Settings, draft: Draft) -> bool:
    """Whether its states are fp32 whatever the parameters are."""
    said = settings.get("optimizer._component_")
    early = switch(settings, "optimizer_in_bwd")
    if early is not None:
        draft.take("training.optimizer_in_backward", True, early)
    if said is None:
        raise UserError(Fault("is said in none of the file's settings", "optimizer._component_", settings.file, 1))
    one: _Optimizer = one_of(said, _OPTIMIZERS)
    momentum = settings.get("optimizer.momentum")
    moving = one.name == "sgd" and momentum is not None and momentum.number() > 0
    draft.take("training.optimizer", "sgd-momentum" if moving else one.name, said)
    if one.lacks:
        draft.leave(said, f"simulated as {one.name}: {one.lacks}")
    if one.place and early is not None:
        draft.leave(said, "paged states of an optimizer in backward are not simulated: they are counted on the GPU")
    elif one.place:
        draft.take("parallel.offload.optimizer", one.place, said)
    fused, foreach = switch(settings, "optimizer.fused"), settings.get("optimizer.foreach")
    if one.kernel and fused is not None:
        draft.take("software.optimizer_kernel", "fused", fused)
    elif one.kernel and foreach is not None:
        draft.take("software.optimizer_kernel", "foreach" if foreach.flag() else "loop", foreach)
    elif one.kernel:
        draft.take("software.optimizer_kernel", one.kernel, said, "torch's own default")
    return one.wide


def _precision(settings: Settings, draft: Draft, wide: bool) -> None:
    said = settings.get("dtype")
    name = one_of(said, _DTYPES) if said is not None else _DTYPES["bf16"]
    asked = {"name": name, "optimizer": "fp32"} if wide and name != "fp32" else name
    text = "bitsandbytes' 32-bit states are fp32 all the same" if wide and name != "fp32" else ""
    if said is not None:
        draft.take("training.precision", asked, said, text)
    else:
        draft.assume("training.precision", asked, text or "dtype bf16 of torchtune's own files")


def _batch(settings: Settings, draft: Draft) -> None:
    size, steps = settings.get("batch_size"), settings.get("gradient_accumulation_steps")
    if size is not None:
        draft.take("training.micro_batch", size.whole(), size)
    if steps is not None:
        if draft.has("training.optimizer_in_backward") and steps.whole() > 1:
            raise steps.wrong("1 beside optimizer_in_bwd: torchtune refuses it")
        draft.take("training.micro_steps", steps.whole(), steps)
    draft.assume("training.micro_steps", 1, "no accumulation is said")
    length, packed = settings.get("tokenizer.max_seq_len", "dataset.max_seq_len"), switch(settings, "dataset.packed")
    if length is not None:
        draft.take("training.sequence", length.whole(), length, "" if packed is not None else
                   "an upper bound: without packing a batch is as long as its longest sequence")
    if packed is not None:
        draft.packs(packed)


def _recompute(settings: Settings, draft: Draft, layers: int | None) -> None:
    """Checkpoints of every block, or of one of so many where ac_mode says so and nothing else (_setup_model: with both
    nothing is wrapped)."""
    path, on = "training.recompute", switch(settings, "enable_activation_checkpointing")
    mode, option = settings.get("ac_mode"), settings.get("ac_option")
    offload = switch(settings, "enable_activation_offloading")
    if offload is not None and on is None:
        raise offload.wrong("false without enable_activation_checkpointing: torchtune refuses it")
    if offload is not None:
        draft.take("parallel.offload.activations", "cpu", offload)
    kind = one_of(mode, {one: one for one in ("none", "full", "selective")}) if mode is not None else ""
    if on is not None:
        draft.take(path, "none" if mode is not None else "full", on,
                   "beside ac_mode torchtune checkpoints nothing" if mode is not None else "")
    elif kind == "selective" and mode is not None:
        every = option.whole() if option is not None else 1
        if layers is None and every > 1:
            draft.leave(mode, f"one block of {every} runs again, and how many the model has is not known here: "
                              "--set training.recompute.layers=N")
        else:
            draft.take(path, "full" if every == 1 else {"layers": (layers or 0) // every}, mode)
    elif mode is not None:
        draft.take(path, kind, mode)
    draft.assume(path, "none", "enable_activation_checkpointing is off")


def _software(settings: Settings, draft: Draft) -> None:
    draft.assume("software.framework", "pytorch", "torchtune's recipes")
    draft.assume("software.modules", "plain", "torchtune's own modules")
    draft.assume("software.versions", {"torchtune": "0.6.1"}, "its file does not say; this release was read")
    draft.assume("training.attention", "flash", "torchtune calls scaled_dot_product_attention")
    if (said := switch(settings, "compile")) is not None:
        draft.take("software.compile", True, said)
    loss = settings.get("loss._component_")
    name = str(loss.value).rpartition(".")[2].lower() if loss is not None else ""
    if loss is not None and name in _CHUNKED:
        draft.take("training.chunked_loss", True, loss)
    elif loss is not None and name not in _WHOLE:
        draft.leave(loss, "kernels of this loss are not simulated, cross-entropy's are")
    clip = settings.get("clip_grad_norm")
    if clip is not None:
        draft.leave(clip, "the pass over the gradients that clips them is not simulated")
    if (said := switch(settings, "cudnn_deterministic_mode")) is not None:
        draft.leave(said, "slower, deterministic kernels are not simulated")
