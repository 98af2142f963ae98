"""LLaMA-Factory's YAML or JSON: the Trainer's arguments among its own.

Source: llamafactory 0.9.5 hparams (model_args.py, finetuning_args.py, data_args.py: names and defaults; parser.py),
model/adapter.py (trained weights are cast to fp32 unless pure_bf16), model/model_utils (checkpointing.py,
quantization.py, attention.py, liger_kernel.py), train/trainer_utils.py (create_custom_optimizer), launcher.py.
"""

from __future__ import annotations

from dataclasses import replace

from sim.errors import Fault, UserError, nearest
from sim.imports.hugging.adapters import LINEAR, read_lora
from sim.imports.hugging.facts import FP8_GATHER, Job, dtype_of, renamed, set_apart
from sim.imports.hugging.flash import take_flash
from sim.imports.hugging.liger import take_kernels
from sim.imports.hugging.trainer import read_arguments
from sim.imports.settings import Settings, one_of, peek, switch, take_whole, word_of

#: Any of these makes a file LLaMA-Factory's.
MARKS = ("finetuning_type", "stage")
_NAMES = {"enable_liger_kernel": "use_liger_kernel", "additional_target": "lora_modules_to_save"}
#: `off` and `true` are of releases before 0.8.3 (recalled); YAML reads a bare off as false.
_ATTENTION = {"auto": "", "sdpa": "sdpa", "fa2": "flash", "fa3": "flash", "disabled": "eager", "off": "eager",
              "true": "flash", "false": "eager"}
_STAGES = {"sft": "", "pt": "", "rm": "batches are of pairs, of which a head of one score is trained",
           "dpo": "batches are of pairs, and a reference model runs them too",
           "kto": "a reference model runs the batches too", "ppo": "sequences are generated and scored between steps"}
#: Switch of another optimizer -> ours, and what it is not (create_custom_optimizer, in its order).
_OPTIMIZERS = {
    "use_galore": ("adamw", "its low-rank states are not simulated"),
    "use_apollo": ("adamw", "its low-rank states are not simulated"),
    "use_badam": ("adamw", "blocks that are trained in turn are not simulated: all weights are"),
    "use_adam_mini": ("adamw", "its second states are one of a block of weights, not of each"),
    "use_muon": ("muon", ""),
}
_LEFT = {
    "use_unsloth": "Unsloth's kernels are not simulated",
    "upcast_layernorm": "norms are counted in the dtype of the other weights",
    "upcast_lmhead_output": "logits are counted in the dtype the model computes in",
    "shift_attn": "attention of shifted groups is not simulated: whole attention is counted",
    "mixture_of_depths": "tokens that skip blocks are not simulated",
    "use_llama_pro": "blocks that are added are not counted: --set model.layers=N",
    "use_kt": "experts on CPUs (KTransformers) are not simulated",
    "use_v1_kernels": "kernels of its own have no field", "resize_vocab": "the vocabulary is counted as the model has "
    "it: --set model.vocab=N", "use_asft_loss": "a reference model runs the batches too; simulated as plain training",
    "use_eaft_loss": "the loss's entropies are not simulated", "use_dft_loss": "the loss's weights are not simulated",
    "use_hyper_parallel": "HyperParallel is not simulated", "pissa_convert": "is not simulated",
    "new_special_tokens_config": "the vocabulary is counted as the model has it: --set model.vocab=N",
    "freeze_language_model": "weights that are frozen there are counted as trained",
    "compute_accuracy": "what evaluation keeps is not simulated",
}
#: Arguments of mcore_adapter (USE_MCA=1).
_CORE = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
         "context_parallel_size", "virtual_pipeline_model_parallel_size", "sequence_parallel",
         "use_distributed_optimizer", "recompute_granularity")
#: What the Trainer's reader would read otherwise.
_OWN = ("bf16", "fp16", "pure_bf16", "gradient_checkpointing", "finetuning_type", "quantization_bit", "packing",
        "sft_packing")
_IDLE = (
    "template", "max_samples", "overwrite_cache", "media_dir", "train_on_prompt", "mask_history", "mix_strategy",
    "interleave_probs", "buffer_size", "val_size", "eval_on_each_dataset", "tool_format", "default_system",
    "enable_thinking", "preserve_thinking", "tokenized_path", "data_shared_file_system", "plot_loss", "freeze_*",
    "disable_shuffling", "early_stopping_steps", "adapter_name_or_path", "adapter_folder", "use_fast_tokenizer",
    "split_special_tokens", "add_tokens", "add_special_tokens", "init_special_tokens", "rope_scaling", "moe_aux_*",
    "train_from_scratch", "infer_*", "offload_folder", "use_kv_cache", "hf_hub_token", "ms_hub_token", "om_hub_token",
    "print_param_status", "image_*", "video_*", "crop_to_patches", "use_audio_in_video", "audio_*", "export_*",
    "vllm_*", "sglang_*", "kt_*", "loraplus_*", "pissa_*", "create_new_adapter", "pref_*", "dpo_*", "simpo_*", "ppo_*",
    "ref_model*", "galore_*", "apollo_*", "badam_*", "use_swanlab", "swanlab_*", "asft_*", "eaft_*", "include_*",
    "ray_*", "master_*", "enable_torch_profiler", "profiler_*", "profile_modules", "hyper_parallel_args", "use_mca",
    "double_quantization", "quantization_*", "fp8_*", "use_reentrant_gc", "disable_gradient_checkpointing", "do_*",
    "use_unsloth_gc", "oft_*", "module_dropout", "kto_*", "device_map", "gradient_checkpointing", "resume_*",
    "ignore_pad_token_for_loss", "preprocessing_*", "top_*", "max_new_tokens", "num_beams", "neat_packing",
    "reserved_label_len", "efficient_eos", "visual_inputs",
)


def view(settings: Settings) -> Settings:
    """A file under the names that the Trainer's reader asks for."""
    return renamed(settings, _NAMES)


def read_llamafactory(settings: Settings, job: Job) -> None:
    """All of a file (a `view` of it); what it leaves out is assumed as LLaMA-Factory has it."""
    if not settings.has("model_name_or_path") and (settings.has("dist_config") or settings.has("model_class")):
        raise UserError(Fault("is a file of LLaMA-Factory's v1, which is not read", "", settings.file, 1))
    for name in _CORE:
        if (said := settings.get(name)) is not None and said.value not in (1, False):
            raise said.wrong("nothing: jobs of mcore_adapter (USE_MCA=1) are not read; --set says what they need")
    job.tool = "LLaMA-Factory"
    draft = job.draft
    tuned = _tuned(settings, job)
    _dtypes(settings, job, tuned)
    _recompute(settings, job)
    _data(settings, job)
    said = settings.get("flash_attn")
    if said is not None and said.value != "auto":  # which leaves it to transformers
        draft.take("training.attention", one_of(replace(said, value=str(said.value).lower()), _ATTENTION), said)
        take_flash(draft, said)
    _optimizer(settings, job)
    own = [*_OWN, *_logits(settings, job)]
    _untrained(settings, job)
    for name, why in _LEFT.items():
        found = peek(settings, name)
        if found is not None and found.value not in (False, "", "auto"):
            draft.leave(settings.get(name) or found, why)
            take_whole(settings, name)
    workers = settings.get("ray_num_workers")
    if workers is not None and workers.whole() > 1:
        draft.gpus = workers
    settings.idle(*_IDLE)
    read_arguments(set_apart(settings, job, own), job)


def _tuned(settings: Settings, job: Job) -> bool:
    """LoRA, which is the default, and quantised weights; whether LoRA is what is trained."""
    draft, kind = job.draft, settings.get("finetuning_type")
    word = kind.word() if kind is not None else "lora"
    if kind is not None and word not in ("lora", "full", "freeze", "oft"):
        raise kind.wrong("one of lora, full, freeze, oft", nearest(word, ("lora", "full", "freeze", "oft")))
    if kind is not None and word in ("freeze", "oft"):
        draft.leave(kind, "is simulated as training of all weights")
    bits = settings.get("quantization_bit")
    if bits is not None and word not in ("lora", "oft"):
        raise bits.wrong("nothing beside full and freeze: LLaMA-Factory refuses it")
    if word != "lora":
        return False
    draft.assume("training.finetune.rank", 8, "LLaMA-Factory's default of lora_rank")
    draft.assume("training.finetune.dropout", 0.0, "LLaMA-Factory's default of lora_dropout")
    draft.assume("training.finetune.targets", list(LINEAR), "LLaMA-Factory's default of lora_target: all")
    read_lora(settings, job, kind or job.default(settings, "finetuning_type", "lora"), "lora_")
    method = word_of(settings, "quantization_method")
    if bits is not None and method is not None and method.word() not in ("bnb", "bitsandbytes"):
        draft.leave(method, "weights of as many bits are counted as bitsandbytes' are")
    if bits is not None:
        if bits.whole() not in (4, 8):
            raise bits.wrong("4 or 8")
        twice, table = settings.get("double_quantization"), settings.get("quantization_type")
        job.keep("base", "int8" if bits.whole() == 8 else "nf4-dq" if twice is None or twice.flag() else "nf4", bits)
        if table is not None and table.word() == "fp4":
            draft.leave(table, "simulated as nf4: as many bits, another table")
    return True


def _dtypes(settings: Settings, job: Job, tuned: bool) -> None:
    """Frozen weights are loaded in the half type, trained ones cast to fp32 (init_adapter) unless pure_bf16."""
    halves = [said for name in ("bf16", "fp16") if (said := switch(settings, name)) is not None]
    pure, narrow = switch(settings, "pure_bf16"), switch(settings, "fp8")
    if pure is None and not tuned:
        pure = switch(settings, "use_badam")  # init_adapter leaves its weights in the half type too
    if len(halves) > 1:
        raise halves[1].clash("bf16 and fp16 are both on")
    half = halves[0] if halves else None
    if half is not None:
        job.keep("amp", half.name, half)
    if narrow is not None:
        job.facts["amp"] = ("fp8", narrow)
        if (gather := switch(settings, FP8_GATHER)) is not None:
            job.keep("fp8 gather", True, gather)
    if pure is not None:
        job.facts["dtype"] = (half.name if half is not None else "bf16", pure)
        if half is None:
            job.facts["amp off"] = ("no", pure)
    elif tuned and half is not None:
        job.facts["dtype"] = (half.name, half)
        job.facts["unquantised"] = (half.name, half)  # its prepare_model_for_training, not peft's for k bits
    elif tuned:
        # infer_optim_dtype: bf16 for a checkpoint in bf16 or in no dtype that it names, fp16 for others
        stored = word_of(job.config, "dtype", "torch_dtype") if job.config is not None else None
        loaded = "bf16" if stored is None or dtype_of(stored) in ("bf16", None) else "fp16"
        job.facts["dtype"] = (loaded, job.default(settings, "bf16", False))
        job.facts["unquantised"] = job.facts["dtype"]
    else:
        job.facts["dtype"] = ("fp32", half or job.default(settings, "pure_bf16", False))


def _recompute(settings: Settings, job: Job) -> None:
    """Checkpoints of every block unless told otherwise, and reentrant ones (prepare_model_for_training)."""
    off, unsloth = switch(settings, "disable_gradient_checkpointing"), switch(settings, "use_unsloth_gc")
    if off is not None:
        job.draft.take("training.recompute", "none", off)
        return
    job.draft.assume("training.recompute", "full", "LLaMA-Factory's default of disable_gradient_checkpointing")
    entering = settings.get("use_reentrant_gc")
    job.keep("reentrant", entering is None or entering.flag(),
             entering or job.default(settings, "use_reentrant_gc", True))
    if unsloth is not None:
        job.draft.take("parallel.offload.activations", "cpu", unsloth, "inputs of blocks wait in host memory")


def _data(settings: Settings, job: Job) -> None:
    draft, stage = job.draft, settings.get("stage")
    why = one_of(stage, _STAGES) if stage is not None else ""
    if stage is not None and why:
        draft.leave(stage, f"{why}; simulated as plain training")
    draft.assume("training.sequence", 2048, "LLaMA-Factory's default of cutoff_len since 0.9 (before: 1024)")
    packed = settings.get("packing", "sft_packing")  # of releases before 0.7.1 (recalled)
    apart = switch(settings, "neat_packing")
    first = stage is not None and stage.word() == "pt"
    if apart is not None or (packed.flag() if packed is not None else first):
        job.keep("padded", True, apart or packed or stage or job.default(settings, "packing", True))


def _logits(settings: Settings, job: Job) -> list[str]:
    """Liger without its chunked loss, where a stage needs logits (apply_liger_kernel); names that are settled so."""
    stage, liger = peek(settings, "stage"), switch(settings, "use_liger_kernel")
    if liger is None or stage is None or stage.word() in ("pt", "sft"):
        return []
    take_kernels(job.draft, liger, f"without its loss in chunks, which stage {stage.word()} turns off")
    return ["use_liger_kernel"]


def _untrained(settings: Settings, job: Job) -> None:
    """Tells where a file exports, predicts or chats, for what is simulated is a training step."""
    training = peek(settings, "do_train")
    other = next((said for name in ("export_dir", "do_predict", "do_eval", "infer_backend")
                  if (said := peek(settings, name)) is not None and said.value is not False), None)
    if other is not None and (training is None or not training.flag()):
        job.draft.leave(other, "nothing says do_train: true, so that nothing is trained here; a training step is "
                               "simulated all the same")


def _optimizer(settings: Settings, job: Job) -> None:
    for name, (ours, why) in _OPTIMIZERS.items():
        said = switch(settings, name)
        if said is None:
            continue
        job.draft.take("training.optimizer", ours, said)
        if why:
            job.draft.leave(said, f"simulated as {ours}: {why}")
        return
