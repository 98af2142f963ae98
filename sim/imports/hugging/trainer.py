"""Arguments of Hugging Face's Trainer, of its example scripts (run_clm.py) and of TRL's trainers.

Source: transformers 5.24 training_args.py, trainer.py; trl 1.16 trainer/base_config.py, sft_config.py, model_config.py.
"""

from __future__ import annotations

import math
from typing import Any

from sim.imports.hugging.adapters import read_lora_arguments, read_quantised
from sim.imports.hugging.deepspeed import read_deepspeed_json
from sim.imports.hugging.facts import Job, dtype_of, inner
from sim.imports.hugging.flash import take_flash
from sim.imports.hugging.fsdp import read_fsdp, read_mesh
from sim.imports.hugging.liger import read_liger
from sim.imports.hugging.optimizers import read_optimizer
from sim.imports.settings import Said, Settings, mapping_at, one_of, peek, switch, word_of
from sim.scenario.named.presets import preset
from sim.software import stack_for

#: Any of these makes a file one of arguments.
MARKS = ("per_device_train_batch_size", "gradient_accumulation_steps", "model_name_or_path", "output_dir", "optim",
         "learning_rate", "num_train_epochs", "max_steps", "bf16", "fp16", "tf32", "gradient_checkpointing",
         "activation_checkpointing", "fsdp", "fsdp_config", "deepspeed", "torch_compile", "use_peft", "lora_r",
         "max_length", "max_seq_length", "block_size", "model_max_length", "per_gpu_train_batch_size", "dataset_name",
         "attn_implementation", "torch_dtype", "load_in_4bit", "load_in_8bit", "use_liger_kernel", "ddp_bucket_cap_mb",
         "adafactor", "max_source_length", "cutoff_len", "sequence_len")
#: Any of these makes them TRL's.
_TRL = ("use_peft", "lora_r", "packing", "dataset_text_field", "max_length", "assistant_only_loss", "padding_free",
        "completion_only_loss", "dataset_train_split", "dataset_test_split", "use_bnb_nested_quant",
        "chat_template_path", "truncation_mode", "lora_target_modules", "dataset_kwargs", "max_prompt_length",
        "max_completion_length")
#: And any of these makes them those of scripts that name theirs as LLaMA-Factory and axolotl do.
_NOT_TRL = ("cutoff_len", "sequence_len", "sample_packing")
#: With any of these TRL's tuning by reinforcement generates and scores too, which no field says.
_GENERATES = ("num_generations", "max_completion_length", "use_vllm", "vllm_mode", "num_ppo_epochs",
              "reward_model_path")
#: And with these a batch is of pairs, and a reference model runs them too.
_PAIRS = ("beta", "max_prompt_length", "sync_ref_model", "precompute_ref_log_probs", "ref_model_init_kwargs")
#: Tokens of a sequence, in the order in which they go before one another: of the Trainer's scripts, of LLaMA-Factory
#: (cutoff_len), of axolotl (sequence_len), and what else a script may call it.
_LENGTHS = ("max_length", "max_seq_length", "block_size", "model_max_length", "max_source_length", "cutoff_len",
            "sequence_len", "max_seq_len", "max_sequence_length", "sequence_length", "seq_length", "seq_len",
            "context_length", "max_tokens")
#: Defaults of run_summarization.py and run_translation.py (transformers 4's examples/pytorch; recalled).
_SOURCE, _TARGET = 1024, 128
#: model_type of encoder-decoders.
_BOTH = ("t5", "mt5", "umt5", "longt5", "bart", "mbart", "pegasus", "marian", "m2m_100", "blenderbot", "led",
         "prophetnet")
_ATTENTION = {"eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash", "flash_attention_3": "flash",
              "flash_attention_4": "flash", "flex_attention": "flash"}
_COMPILERS = {"inductor": True, "eager": False, "aot_eager": False, "no": False, "cudagraphs": False}
_GRAPHS = ("reduce_overhead", "max_autotune")
_IDLE = (
    "output_dir", "overwrite_*", "do_*", "num_train_epochs", "max_steps", "num_epochs", "learning_rate",
    "lr_scheduler*", "warmup*", "weight_decay", "adam_*", "max_grad_norm", "optim_args", "optim_target_modules",
    "average_tokens_*", "*_full_eval", "use_cache", "neftune_*", "logging*", "log_*", "include_*", "disable_tqdm",
    "report_to", "run_name", "project", "trackio*", "wandb*", "eval_*", "evaluation_strategy", "per_device_eval_*",
    "per_gpu_eval_*", "prediction_loss_only", "batch_eval_metrics", "save_*", "enable_jit_checkpoint", "push_to_hub*",
    "hub_*", "load_best*", "metric*", "greater_*", "ignore_*", "restore_*", "seed", "data_seed", "dataloader_*",
    "dataset*", "remove_unused_columns", "label_names", "train_sampling_strategy", "group_by_length",
    "length_column_name", "ddp_timeout", "ddp_backend", "ddp_broadcast_buffers", "ddp_static_graph", "debug",
    "skip_memory_metrics", "resume_*", "local_rank", "past_index", "no_cuda", "fp16_opt_level", "fp16_backend",
    "half_precision_backend", "jit_mode_eval", "use_ipex", "use_mps_device", "tpu_*", "mp_parameters", "torchdynamo",
    "ray_scope", "sortish_*", "predict_with_generate", "generation_*", "deepspeed_plugin*", "_n_gpu",
    "distributed_state*", "config_name", "tokenizer*", "cache_dir", "use_fast_tokenizer", "token", "use_auth_token",
    "validation*", "train_file", "test_file", "preprocessing_*", "low_cpu_mem_usage", "streaming", "keep_linebreaks",
    "max_train_samples", "max_eval_samples", "max_predict_samples", "model_revision", "trust_remote_code",
    "chat_template*", "eos_token", "pad_token", "pad_to_*", "packing*", "padding_free", "eval_packing", "neat_packing",
    "completion_only_loss", "assistant_only_loss", "shuffle_dataset", "truncation_mode", "router_aux_loss_coef",
    "accelerator_config.*", "config_overrides", "activation_checkpointing_kwargs*", "gradient_checkpointing_kwargs*",
    "liger_kernel_config*", "model_init_kwargs*", "model_type", "data_path", "data_args", "image_*", "temperature",
    "top_p", "top_k", "loss_weights", "label_smoothing_factor", "include_tokens_per_second", "deepspeed", "fsdp",
    "fsdp_config", "precompute_*", "torch_empty_cache_steps", "full_determinism", "ddp_find_unused_parameters",
    "auto_find_batch_size", "fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params", "instruct_template",
    "attn_implementation_*", "bnb_*", "use_bnb_*", "lora_*", "data_collator*", "text_column", "preprocess*", "subset",
    "split", "user", "name", "vllm_*", "use_vllm", "num_generations*", "max_completion_length", "max_prompt_length",
    "num_ppo_epochs", "reward_*", "epsilon*", "sapo_*", "vespo_*", "entropy_*", "scale_rewards", "top_entropy*",
    "min_p", "repetition_penalty", "ref_model_*", "sync_ref_model", "f_divergence*", "f_alpha*", "use_transformers*",
    "delta", "num_iterations", "steps_per_generation", "test_split_size", "cache_implementation", "disable_dropout",
    "beta", "ld_alpha", "use_weighting", "discopop_tau", "label_smoothing", "ds3_gather_*", "mask_truncated*",
    "importance_*", "off_policy*", "accelerator_config")


def read_arguments(settings: Settings, job: Job) -> None:
    """All of the arguments; what they leave out is assumed when everything is read."""
    mapping_at(settings, "quantization_config", "liger_kernel_config")
    job.arguments, job.hugging = settings, True
    if not job.tool and not any(settings.has(name) for name in _NOT_TRL):
        job.trl = job.trl or any(settings.has(name) for name in _TRL)
    _batch(settings, job)
    _dtypes(settings, job)
    _recompute(settings, job)
    _engine(settings, job)
    read_optimizer(settings, job)
    _compile(settings, job)
    _rest(settings, job)
    read_lora_arguments(settings, job)
    read_quantised(settings, job)
    read_quantised(settings, job, "quantization_config.")
    if settings.has("parallelism_config"):
        read_mesh(settings, "parallelism_config", job)
    settings.idle(*_IDLE)


def _batch(settings: Settings, job: Job) -> None:
    for names, fact in ((("per_device_train_batch_size", "per_gpu_train_batch_size", "micro_batch_size"), "micro"),
                        (("gradient_accumulation_steps",), "steps")):
        if (said := settings.get(*names)) is not None:
            job.keep(fact, said.whole(), said)
    if (said := switch(settings, "auto_find_batch_size")) is not None:
        job.draft.leave(said, "a batch that does not fit is made smaller until it does; here it stays as said")
    _sequence(settings, job)


def _sequence(settings: Settings, job: Job) -> None:
    lengths = [said for name in _LENGTHS if (said := settings.get(name)) is not None]
    target = settings.get("max_target_length")
    if target is not None:
        job.keep("target", target.whole(), target)
    switches = [switch(settings, name) for name in ("neat_packing", "sample_packing", "packing", "group_texts")]
    packed, way = next((said for said in switches if said is not None), None), peek(settings, "packing_strategy")
    apart = any(said is not None for said in switches[:2])
    if packed is not None and (apart or (job.trl and (way is None or way.value != "wrapped"))):
        # trl 0.24 and 1.16 sft_trainer.py: bfd packing is without padding, and attention within documents alone;
        # LLaMA-Factory's neat_packing and axolotl's sample_packing do the same.
        job.draft.packs(packed)
    if lengths:
        said = lengths[0]
        for other in lengths[1:]:
            if other.value != said.value:
                job.draft.leave(other, f"{said.name} goes before it")
        if said.name == "max_source_length":
            job.keep("of the source", True, said)
        short = job.trl or target is not None or said.name == "max_source_length" or job.tool
        bound = packed is None and job.said("padded") is None and short
        job.draft.take("training.sequence", said.whole(), said,
                       "an upper bound: without packing a batch is as long as its longest sequence" if bound else "")
    elif target is not None:
        job.draft.assume("training.sequence", _SOURCE, "default of max_source_length in transformers' examples")
    elif job.trl and peek(settings, "max_prompt_length") is None:
        job.draft.assume("training.sequence", 1024, "TRL's default of max_length, an upper bound without packing")


def _dtypes(settings: Settings, job: Job) -> None:
    on = [(half, said) for half in ("bf16", "fp16") if (said := switch(settings, half)) is not None]
    if len(on) > 1:
        raise on[1][1].clash("bf16 and fp16 are both on")
    for half, said in on:
        job.keep("amp", half, said)
    if not on and (off := peek(settings, "bf16")) is not None:
        job.facts["amp off"] = ("no", off)
    said_dtype = word_of(settings, "dtype", "torch_dtype", "model_init_kwargs.dtype", "model_init_kwargs.torch_dtype")
    if said_dtype is not None:
        job.facts["dtype"] = (dtype_of(said_dtype), said_dtype)
    if (said_tf32 := switch(settings, "tf32")) is not None:
        job.keep("tf32", True, said_tf32)


def _recompute(settings: Settings, job: Job) -> None:
    draft, names = job.draft, ("activation_checkpointing", "gradient_checkpointing")
    said = peek(settings, *names)
    if said is None:
        if job.trl:
            draft.assume("training.recompute", "full", "TRL's default of gradient_checkpointing")
        return
    said = settings.get(*names) or said
    if not said.flag():
        draft.take("training.recompute", "none", said)
        return
    options = (f"{name}_kwargs" for name in names)
    recompute: Any = "full"
    for above in options:
        every = settings.get(f"{above}.every_n_layers")
        layers = settings_layers(job)
        if every is not None and every.whole() > 1:
            if layers:
                recompute = {"layers": math.ceil(layers / every.whole())}
            else:
                draft.leave(every, "how many blocks there are is not known: --set training.recompute={layers: N}")
        if (offload := switch(settings, f"{above}.offload")) is not None:
            draft.take("parallel.offload.activations", "cpu", offload)
        if (entering := peek(settings, f"{above}.use_reentrant")) is not None:
            job.keep("reentrant", entering.flag(), entering)
    draft.take("training.recompute", recompute, said)


def settings_layers(job: Job) -> int:
    """Blocks of the model by its config.json, 0 where unknown."""
    said = peek(job.config, "num_hidden_layers", "n_layer", "num_layers") if job.config is not None else None
    return said.value if said is not None and isinstance(said.value, int) and not isinstance(said.value, bool) else 0


def _engine(settings: Settings, job: Job) -> None:
    said = peek(settings, "deepspeed")
    if said is not None and said.value not in ("", False):
        found = inner(settings, "deepspeed", job.zeros)
        if found is not None:
            job.files.append(found)
            read_deepspeed_json(found, job, said)
        else:
            job.keep("engine", "zero", said)
    legacy = peek(settings, "fsdp")
    if legacy is None or legacy.value in ("", False, []) or (isinstance(legacy.value, str)
                                                             and legacy.value.lower() == "false"):
        settings.idle("fsdp_config.*")
        return
    legacy = settings.get("fsdp") or legacy
    job.keep("engine", "fsdp", legacy)
    plain = legacy.value is True or (isinstance(legacy.value, str) and legacy.value.lower() == "true")
    config = Settings(settings.file, {})
    if settings.has("fsdp_config"):
        config = inner(settings, "fsdp_config") or config
        job.files.append(config)
    read_fsdp(config, "", job, version=2, wrap="transformer_based_wrap", legacy=None if plain else legacy)


def _compile(settings: Settings, job: Job) -> None:
    mode, backend = word_of(settings, "torch_compile_mode"), word_of(settings, "torch_compile_backend")
    said = switch(settings, "torch_compile") or backend or mode  # either of these turns it on
    if said is not None:
        read_compiler(job, said, backend, mode)
        half = job.said("amp")
        if half is None and peek(settings, "tf32") is None:
            job.keep("tf32", True, said)  # training_args.py, step 9: compiled fp32 runs as TF32


def read_compiler(job: Job, said: Said, backend: Said | None, mode: Said | None) -> None:
    """torch.compile, as the Trainer or accelerate turn it on."""
    name = backend.word() if backend is not None else "inductor"
    compiled = _COMPILERS.get(name)
    if compiled is None and backend is not None:
        job.draft.leave(backend, "is simulated as inductor")
    job.draft.take("software.compile", compiled is not False, backend or said)
    if name == "cudagraphs" and backend is not None:
        job.draft.take("software.cuda_graphs", True, backend)
    elif mode is not None and mode.word() in _GRAPHS:
        job.draft.take("software.cuda_graphs", True, mode, "this mode records CUDA graphs")


def _rest(settings: Settings, job: Job) -> None:
    draft = job.draft
    said = settings.get("attn_implementation", "model_init_kwargs.attn_implementation", "_attn_implementation")
    if said is not None:
        word = said.word().rpartition("|")[2]
        kernel = "flash" if "/" in word else one_of(said, _ATTENTION)  # kernels-community/flash-attn2 and its like
        draft.take("training.attention", kernel, said)
        take_flash(draft, said)
    elif (old := switch(settings, "use_flash_attention_2", "use_flash_attn", "use_flash_attention")) is not None:
        draft.take("training.attention", "flash", old)
    if (said := settings.get("ddp_bucket_cap_mb")) is not None and said.number() > 0:
        draft.take("parallel.bucket_mb", said.number(), said)
    read_liger(settings, draft)
    loss = peek(settings, "loss_type")
    if loss is not None and loss.value == "chunked_nll":
        draft.take("training.chunked_loss", True, settings.get("loss_type") or loss)
    elif loss is not None:
        draft.leave(settings.get("loss_type") or loss, "trl 1.16 computes 'nll' in chunks, earlier releases do not: "
                    "--set training.chunked_loss=true where yours does" if loss.value == "nll" else
                    "kernels of this loss are not simulated, cross-entropy's are")
    if (said := switch(settings, "activation_offloading")) is not None:
        draft.take("parallel.offload.activations", "cpu", said)
    if (said := switch(settings, "accelerator_config.gradient_accumulation_kwargs.sync_each_batch")) is not None:
        draft.take("parallel.reduce_every_micro_step", True, said)
    if (said := switch(settings, "accelerator_config.split_batches", "split_batches")) is not None:
        draft.leave(said, "the batch is split over the processes: --set training.micro_batch=BATCH_OF_ONE_GPU")
    for name in ("tp_size", "tensor_parallel_size"):
        if (said := settings.get(name)) is not None and said.whole(0) > 1:
            draft.take("parallel.tensor", said.whole(), said)
    if (said := switch(settings, "use_cpu", "no_cuda")) is not None:
        raise said.wrong("false: training on CPUs is not simulated")
    if (said := switch(settings, "full_determinism")) is not None:
        draft.take("software.deterministic", True, said, "launches that wait for their kernels (CUDA_LAUNCH_BLOCKING) "
                   "are not simulated")
    for name, why in (("ddp_find_unused_parameters", "the search for unused parameters is not simulated"),
                      ("torch_empty_cache_steps", "emptied caches are not simulated"),
                      ("label_smoothing_factor", "the smoothed loss's second pass over the logits is not simulated"),
                      ("sharded_ddp", "fairscale's sharding is not simulated: --set parallel.strategy=zero2 or zero3")):
        said = peek(settings, name)
        if said is not None and str(said.value).lower() not in ("false", "0", "0.0", "", "[]"):
            draft.leave(settings.get(name) or said, why)
    for names, why in (
            (_GENERATES, "sequences are generated and scored between steps; the training step alone is simulated"),
            (_PAIRS, "batches are of pairs and a reference model runs them too; simulated as plain training")):
        for name in names:
            said = peek(settings, name)
            if said is not None and said.value not in (False, 0, "", "false", "False"):
                draft.leave(settings.get(name) or said, why)
                break


def settle_arguments(job: Job, framework: str) -> None:
    """The Trainer's defaults for what no file says, and what depends on the model or the framework."""
    if job.arguments is None:
        return
    _decoder(job)
    counted, entering = stack_for(framework, modules="transformers"), job.said("reentrant")
    whole = counted.reentrant or not counted.early_stop
    if entering is not None and job.of("reentrant") is not whole:
        job.arguments.get(entering.name)
        job.draft.leave(entering, f"recomputation is counted as {'' if whole else 'not '}reentrant, the default of the "
                                  "release")
    said = Said(job.arguments.file, "", None)
    for fact, name, value in (("micro", "per_device_train_batch_size", 8), ("steps", "gradient_accumulation_steps", 1)):
        if job.of(fact) is None and job.of("total") is None:
            job.facts[f"default {fact}"] = (value, Said(said.file, name, value))


def _decoder(job: Job) -> None:
    """Tokens of the decoder's sequences, which a model of one stack does not have."""
    said, named = job.said("target"), job.draft.value("model.preset")
    both = named is not None and (preset(named) or {}).get("kind") == "encoder-decoder"
    if job.config is not None:
        of, flag = peek(job.config, "model_type"), peek(job.config, "is_encoder_decoder")
        both = (of is not None and of.value in _BOTH) or (flag is not None and flag.value is True)
    if said is not None and both:
        job.draft.take("training.decoder_sequence", job.of("target"), said, "an upper bound")
    elif said is not None:
        job.draft.leave(said, "the model is not known to have a decoder beside an encoder: --set "
                              "training.decoder_sequence=N if it has")
    elif both and job.of("of the source"):
        job.draft.assume("training.decoder_sequence", _TARGET, "default of max_target_length in transformers' examples")
