"""LLM Foundry's training YAML as a scenario: scripts/train/yamls, or MosaicML's run files that hold one.

Names, defaults and what they do: llm-foundry 0.22.0 utils/config_utils.py (TrainConfig, calculate_batch_size_info),
command_utils/train.py, optim/__init__.py, models/hf/hf_base.py; composer 0.32.1 utils/parallelism.py (FSDPConfig),
distributed/mosaic_parallelism.py (get_mixed_precision), distributed/dist_strategy.py (ddp_sync_context).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sim.errors import Fault, UserError
from sim.imports.allocator import EXPANDABLE, SPLIT
from sim.imports.draft import Draft, Ranks
from sim.imports.foundry.model import read_model
from sim.imports.hugging.facts import inner
from sim.imports.settings import Said, Settings, mapping_at, one_of, peek, resolved, switch, take_whole
from sim.scenario.fields.precisions import PRECISIONS

#: Any of these makes a file LLM Foundry's.
_MARKS = ("global_train_batch_size", "device_train_microbatch_size", "train_loader", "max_seq_len", "fsdp_config")
_HALVES = {"amp_bf16": "bf16", "amp_fp16": "fp16", "amp_fp8": "bf16"}
#: Strategy of FSDP 1 -> what shares a set of shards, and whether forward frees what it gathered.
_STRATEGIES = {"full_shard": ("full", True), "shard_grad_op": ("full", False), "no_shard": (1, True),
               "hybrid_shard": ("node", True), "_hybrid_shard_zero2": ("node", False)}
_BACKWARD = {"backward_pre": "pre", "backward_post": "post", "no_prefetch": "none"}
_REDUCED = {"default": "fp32", "pure": "half", "full": "fp32"}
#: Optimizers by name -> ours, and what it is not.
_OPTIMIZERS = {
    "decoupled_adamw": ("adamw", ""), "adamw": ("adamw", ""), "adam": ("adam", ""), "no_op": ("none", ""),
    "decoupled_sgdw": ("sgd-momentum", ""), **dict.fromkeys(
        ("decoupled_lionw", "clip_lion", "adalr_lion"), ("sgd-momentum", "one state per parameter, as here")),
    "decoupled_lionw_8b": ("adamw-8bit", "it keeps one state of 8 bits per parameter, not two"),  # 0.5.0 builders.py
}
_LEFT = {
    "activation_checkpointing_target": "parts of blocks that run again are not read: whole blocks are counted",
    "te_checkpoint_wrapper": "TransformerEngine's checkpoints are counted as torch's",
    "te_shard_fp8_weight": "weights are counted as sharded in their own dtype",
    "keep_low_precision_grads": "gradients are counted in fp32", "ignored_modules": "all blocks are counted as sharded",
    "process_group": "--set parallel.sharding_factor=N says which GPUs share shards",
}
#: Setting, its default that is counted, and what else is not.
_OTHER_THAN = (
    ("auto_wrap", True, "every block is counted as a unit of its own"),
    ("forward_prefetch_limit", 1, "one unit is gathered ahead"),
    ("backward_prefetch_limit", 1, "one unit is gathered ahead"),
    ("use_orig_params", True, "kernels of the optimizer are counted parameter by parameter"),
)
_IDLE = (
    "data_local", "data_remote", "tokenizer*", "tokenizer_name", "global_seed", "seed", "run_name", "scheduler.*",
    "max_duration", "eval_*", "train_loader.*", "train_loaders*", "device_eval_*", "icl_*", "loggers.*", "progress_bar",
    "log_*", "python_log_level", "console_log_interval", "callbacks.*", "save_*", "load_*", "only_*", "autoresume",
    "spin_dataloaders", "train_subset_*", "dist_timeout", "metadata.*", "flatten_metadata", "code_paths", "profiler.*",
    "variables.*", "cuda_load_lazy", "accumulate_train_batch_on_tokens",
    "optimizer.*", "algorithms.gradient_clipping.*", "algorithms.low_precision_layernorm*", "n_gpus", "fsdp_config.*",
    "device_train_grad_accum", "device_train_batch_size", "models.*", "model_name*", "local_rank", "version",
    "name", "image", "integrations*", "command", "scheduling.*", "compute.*", "env_variables*", "cluster",
    "gpu_type", "parameters", "eval_first",
)


def read(files: Sequence[str], draft: Draft) -> None:
    """Takes what one of LLM Foundry's files says, and a model's config.json beside it.

    Raises:
        UserError: a file that cannot be read, or a value that cannot be.
    """
    for settings in draft.opened(files):
        if isinstance(settings.data.get("parameters"), Mapping):  # a run file of MosaicML's platform
            gpus = settings.get("compute.gpus", "gpu_num")
            if gpus is not None:
                gpus.whole()
                draft.gpus = gpus
            part = inner(settings, "parameters")
            settings.idle(*_IDLE)
            draft.close(settings)
            settings = part or settings
        if not any(settings.has(mark) for mark in _MARKS):
            raise UserError(Fault(f"holds none of LLM Foundry's settings ({', '.join(_MARKS[:3])}, …)", "",
                                  settings.file, 1))
        _job(resolved(settings), draft)


def _job(settings: Settings, draft: Draft) -> None:
    mapping_at(settings, "algorithms", "model", "model.attn_config", "model.ffn_config", "optimizer", "fsdp_config",
               "train_loader")
    transformers = read_model(settings, draft)
    draft.assume("software.framework", "composer", "LLM Foundry runs on Composer")
    if transformers:
        draft.assume("software.modules", "transformers", "Hugging Face's model")
    sharded = peek(settings, "fsdp_config") is not None
    wire = _sharding(settings, draft) if sharded else "fp32"
    _precision(settings, draft, sharded, wire)
    _batch(settings, draft)
    _optimizer(settings, draft)
    compiled = settings.get("compile_config")
    if settings.has("compile_config"):
        take_whole(settings, "compile_config")
        draft.take("software.compile", True, compiled or Said(settings.file, "compile_config", {}))
    parts = settings.get("tp_config")
    if parts is not None:
        raise parts.wrong("nothing: tensor parallelism of LLM Foundry is not simulated")
    for name, value in (settings.data.get("algorithms") or {}).items():
        if name not in ("gradient_clipping", "low_precision_layernorm"):
            draft.leave(Said(settings.file, f"algorithms.{name}", value, settings.line(f"algorithms.{name}")),
                        "what this algorithm does is not simulated")
            take_whole(settings, f"algorithms.{name}")
    if (grows := settings.get("expandable_segments")) is not None:
        draft.take(EXPANDABLE, grows.flag(), grows)
    elif not draft.has("software.versions") and not draft.before(2024):  # earlier releases had none
        draft.assume(EXPANDABLE, True, "LLM Foundry's default of expandable_segments (TrainConfig, 0.22)")
    if (split := settings.get("max_split_size_mb")) is not None:
        draft.take(SPLIT, split.whole(21), split)
    _documents(settings, draft)
    settings.idle(*_IDLE)
    draft.close(settings)


def _documents(settings: Settings, draft: Draft) -> None:
    """Documents that attention keeps to, as many a sequence as are packed (llm-foundry 0.18.0 data/packing.py: a
    batch of packing_ratio times as many examples fills as many sequences as it should hold)."""
    apart = switch(settings, "model.attn_config.attn_uses_sequence_id")
    ratio = settings.get("train_loader.dataset.packing_ratio", "train_loader.packing_ratio")
    length = peek(settings, "max_seq_len")
    if apart is None:
        if ratio is not None:
            draft.leave(ratio, "attention crosses the documents that are packed, without attn_uses_sequence_id, and is "
                               "counted over the whole sequence")
    elif ratio is None or ratio.value == "auto" or length is None:
        draft.packs(apart)
        if ratio is not None:
            draft.leave(ratio, "how many documents a sequence holds is found out from the data")
    else:
        of_each = max(1, round(length.whole() / max(1.0, ratio.number())))
        draft.take("training.document", of_each, ratio, "max_seq_len over packing_ratio, as if nothing were padded; "
                                                        "their spread no setting says")


def _sharding(settings: Settings, draft: Draft) -> str:
    """FSDP's fields; the dtype gradients are reduced in, "half" for the one that computes."""
    said = settings.get("fsdp_config") or Said(settings.file, "fsdp_config", {})
    draft.take("parallel.strategy", "fsdp", Said(said.file, said.name, "fsdp", said.line))
    draft.assume("software.fsdp", 1, "FSDP_VERSION=2 of the environment asks for the other")
    draft.assume("parallel.reduce_every_micro_step", True, "Composer's no_sync is DDP's alone (ddp_sync_context)")
    above = "fsdp_config."
    way = settings.get(f"{above}sharding_strategy")
    factor, frees = one_of(way, _STRATEGIES) if way is not None else ("full", True)
    if way is not None:
        draft.take("parallel.reshard_after_forward", frees, way)
    after = settings.get(f"{above}reshard_after_forward")
    if after is not None:
        draft.take("parallel.reshard_after_forward", after.flag(), after)
    _degrees(settings, draft, way, factor)
    if (one := settings.get(f"{above}backward_prefetch")) is not None:
        draft.take("parallel.prefetch.backward", one_of(one, _BACKWARD), one)
    draft.assume("parallel.prefetch.backward", "post", "Composer's default of backward_prefetch: BACKWARD_POST")
    if (one := switch(settings, f"{above}forward_prefetch")) is not None:
        draft.take("parallel.prefetch.forward", True, one)
    limit = settings.get(f"{above}limit_all_gathers")
    if limit is not None and not limit.flag():
        draft.take("parallel.prefetch.limit", "none", limit)
    if (one := switch(settings, f"{above}cpu_offload")) is not None:
        raise one.wrong("false: Composer refuses it")
    if (one := settings.get(f"{above}activation_checkpointing")) is not None:
        draft.take("training.recompute", "full" if one.flag() else "none", one)
        again = settings.get(f"{above}activation_checkpointing_reentrant")
        if one.flag() and (again is None or again.flag()):
            draft.leave(again or Said(settings.file, f"{above}activation_checkpointing_reentrant (default)", True),
                        "recomputation is counted as not reentrant, which stops early")
    if (one := switch(settings, f"{above}activation_cpu_offload")) is not None:
        draft.take("parallel.offload.activations", "cpu", one)
    for name, usual, why in _OTHER_THAN:
        one = settings.get(f"{above}{name}")
        if one is not None and one.value != usual:
            draft.leave(one, why)
    for name, why in _LEFT.items():
        one = peek(settings, f"{above}{name}")
        if one is not None and one.value not in (False, [], {}):
            draft.leave(settings.get(f"{above}{name}") or one, why)
            take_whole(settings, f"{above}{name}")
    return _reduced(settings, draft)


def _degrees(settings: Settings, draft: Draft, way: Said | None, factor: Any) -> None:
    shard = settings.get("fsdp_config.data_parallel_shard_degree")
    copies = settings.get("fsdp_config.data_parallel_replicate_degree")
    if shard is not None and shard.whole(-1) > 0:
        draft.take("parallel.sharding_factor", shard.whole(), shard)
    elif copies is not None and copies.whole() > 1:
        draft.take_later("parallel.sharding_factor", lambda ranks: ranks.shared_by(copies), copies,
                         f"what {copies.whole()} replicas leave of the GPUs shares the shards")
    elif way is not None and factor == "node":
        draft.take_later("parallel.sharding_factor", lambda ranks: ranks.of_node, way, "shards stay inside a node")
    elif way is not None:
        draft.take("parallel.sharding_factor", factor, way)


def _reduced(settings: Settings, draft: Draft) -> str:
    """get_mixed_precision: DEFAULT reduces in fp32, PURE in the half type, FULL casts nothing."""
    said = peek(settings, "fsdp_config.mixed_precision")
    if said is None:
        return "fp32"
    if isinstance(said.value, Mapping):
        wire = settings.get("fsdp_config.mixed_precision.reduce_dtype")
        one = settings.get("fsdp_config.mixed_precision.param_dtype")
        settings.idle("fsdp_config.mixed_precision.*")
        for other in (one, wire):
            if other is not None:
                draft.share("training.precision", other.value, other)
        if one is None or one.word() in ("fp32", "float32", "torch.float32"):
            return "whole"
        return "fp32" if wire is None or wire.word() in ("fp32", "float32", "torch.float32") else "half"
    said = settings.get("fsdp_config.mixed_precision") or said
    wire_of: str = one_of(said, _REDUCED)
    if said.word() != "default":
        draft.share("training.precision", said.value, said)
    return "whole" if said.word() == "full" else wire_of


def _precision(settings: Settings, draft: Draft, sharded: bool, wire: str) -> None:
    """Autocast over fp32 weights; FSDP gathers in the half type unless mixed_precision is FULL."""
    said = settings.get("precision")
    word = said.word() if said is not None else "amp_bf16"
    asked: Any = "fp32"
    if said is not None and word not in (*_HALVES, "fp32"):
        raise said.wrong(f"one of {', '.join(_HALVES)}, fp32")
    if word in _HALVES:
        half = _HALVES[word]
        asked = f"amp-{half}"
        if sharded and wire != "whole":
            asked = f"fsdp-{half}" if wire == "half" else {"name": f"fsdp-{half}", "reduce": "fp32"}
    if word == "amp_fp8":
        row = {**PRECISIONS[asked if isinstance(asked, str) else asked["name"]]}
        asked = {**row, **(asked if isinstance(asked, dict) else {}), "compute": "fp8"}
        asked.pop("name", None)
    if said is not None:
        draft.take("training.precision", asked, said)
    else:
        draft.assume("training.precision", asked, "LLM Foundry's default of precision: amp_bf16")


def _batch(settings: Settings, draft: Draft) -> None:
    whole, micro = settings.get("global_train_batch_size"), settings.get("device_train_microbatch_size")
    length = settings.get("max_seq_len")
    if length is not None:
        draft.take("training.sequence", length.whole(), length)
    trimmed = switch(settings, "train_loader.dataset.allow_pad_trimming")
    if trimmed is not None:
        draft.leave(trimmed, "batches end with their longest sequence; they are counted as max_seq_len long")
    if whole is not None:
        draft.take("training.global_batch", whole.whole(), whole)
    if micro is None or micro.value == "auto":
        draft.leave(micro or Said(settings.file, "device_train_microbatch_size (default)", "auto"),
                    "Composer halves the batch of a GPU until it fits: --set training.micro_batch=N")
        return
    if isinstance(micro.value, float) and micro.value < 1:
        raise micro.wrong("a whole number: parts of a sequence are not simulated")
    size = micro.whole()
    if whole is None:
        draft.take("training.micro_batch", size, micro)
        return
    total = whole.whole()

    def of_gpu(ranks: Ranks) -> int:
        return min(size, max(1, total // ranks.gpus))

    draft.take_later("training.micro_batch", of_gpu, micro, "")


def _optimizer(settings: Settings, draft: Draft) -> None:
    said = settings.get("optimizer.name")
    if said is None:
        return
    ours, why = one_of(said, _OPTIMIZERS)
    draft.take("training.optimizer", ours, said)
    if why:
        draft.leave(said, f"simulated as {ours}: {why}")
