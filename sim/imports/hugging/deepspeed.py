"""DeepSpeed's JSON. Source: deepspeed 0.19.8, runtime/config.py, constants.py, precision_config.py, zero/config.py,
zero/offload_config.py, engine.py; where "auto" is filled: transformers 5.24 integrations/deepspeed.py."""

from __future__ import annotations

from typing import Any

from sim.imports.hugging.facts import AUTO, Job, dtype_of
from sim.imports.settings import Said, Settings, mapping_at, one_of, peek, switch, take_whole, word_of

_ZERO = "zero_optimization"
_BUCKET = "reduce_bucket_size"
#: Any of these makes a file one of DeepSpeed's.
MARKS = (_ZERO, "train_micro_batch_size_per_gpu", "train_batch_size", "bf16.enabled", "fp16.enabled", "steps_per_print",
         "zero_allow_untested_optimizer")
_STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
_PLACES = {"none": "none", "cpu": "cpu", "nvme": "nvme"}
#: Name -> ours. `adam` is AdamW too unless adam_w_mode is false (engine.py, _configure_basic_optimizer).
_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "lamb": "lamb", "sgd": "sgd"}
#: Name -> the nearest, and what it is not.
_NEAREST = {
    "onebitadam": ("adamw", "its compressed reductions are not simulated"),
    "zerooneadam": ("adamw", "its compressed reductions are not simulated"),
    "onebitlamb": ("lamb", "its compressed reductions are not simulated"),
    "muadam": ("adamw", ""), "muadamw": ("adamw", ""), "musgd": ("sgd", ""),
    "lion": ("sgd-momentum", "one state per parameter as here"),
    "adagrad": ("sgd-momentum", "one state per parameter as here"),
    "rmsprop": ("sgd-momentum", "one state per parameter as here"),
    "muon": ("adamw", "DeepSpeed's Muon is not simulated (PyTorch's, Megatron's and torchtitan's are)"),
    "adamax": ("adamw", ""), "nadam": ("adamw", ""), "radam": ("adamw", ""),
}
#: Settings whose default is what is simulated -> default, and why another value is not.
_USUAL: dict[str, tuple[Any, str]] = {
    "contiguous_gradients": (True, "gradients are copied into DeepSpeed's buckets here"),
    "reduce_scatter": (True, "reductions are simulated as DeepSpeed's default has them"),
    "allgather_partitions": (True, "parameters are simulated as gathered, not broadcast"),
    "use_multi_rank_bucket_allreduce": (True, "reductions are simulated as DeepSpeed's default has them"),
    "round_robin_gradients": (False, "the order of gradients is not simulated"),
    "allgather_bucket_size": (500_000_000, "buckets of gathers have no field"),
    "sub_group_size": (1_000_000_000, "pieces of the optimizer's step have no field"),
    "stage3_prefetch_bucket_size": (50_000_000, "how far ZeRO-3 looks ahead has no field"),
    "stage3_param_persistence_threshold": (100_000, "small parameters that stay gathered have no field"),
    "stage3_max_live_parameters": (1_000_000_000, "how many parameters stay gathered has no field"),
    "stage3_max_reuse_distance": (1_000_000_000, "how long parameters stay gathered has no field"),
    "stage3_module_granularity_threshold": (0, "units of gathering are blocks here"),
    "stage3_use_all_reduce_for_fetch_params": (False, "gathers are simulated as DeepSpeed's default has them"),
    "stage3_allgather_sequential": (False, "gathers are simulated as DeepSpeed's default has them"),
    "zero_quantized_nontrainable_weights": (False, "frozen weights that DeepSpeed stores in 8 bits are not simulated"),
    "offload_optimizer.super_offload": (False, "SuperOffload is not simulated"),
    "offload_param.max_in_cpu": (1_000_000_000, "parameters kept in host memory beside NVMe are not simulated"),
}
#: Switches of ZeRO-3 alone (engine.py, _configure_zero_optimizer) -> what of the job they are.
_THIRD = {"zero_quantized_weights": "gather", "zero_quantized_gradients": "reduce",
          "mics_hierarchical_params_gather": "two steps"}
_NARROW = {"gather": "int8", "reduce": "int4"}
_NOT_SIMULATED = ("zenflow", "leaf_module")
_IDLE = ("scheduler*", "gradient_clipping", "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state",
         "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "checkpoint*", "data_types.buffer_dtype",
         "data_types.keep_in_fp32_modules*", "data_types.param_dtype", "tensorboard*", "wandb*", "csv_monitor*",
         "comet*", "monitor*", "flops_profiler*", "comms_logger*", "autotuning*", "elasticity*", "optimizer.params*",
         "fp16.*", "bf16.*", "bfloat16.*", "prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op",
         "disable_allgather", "aio*", "nebula*", "seed", "dataloader_drop_last", "load_universal_checkpoint",
         "log_level", "inference*", "hybrid_engine*", "timers*", "torch_autocast.lower*", "zero_optimization.memory_*",
         "disable_python_gc", "use_data_before_expert_parallelism", "vocabulary_size", "$schema", "comment*", "_*",
         "seq_parallel_communication_data_type", "managed_gradient_accumulation", "bf16", "fp16", "data_types",
         "optimizer", "torch_autocast", "zero_optimization.save_muon_*", "zero_optimization.gather_16bit_*",
         "zero_optimization.stage3_gather_*", "zero_optimization.elastic_checkpoint", "zero_optimization.load_from_*",
         "zero_optimization.ignore_unused_parameters", "zero_optimization.legacy_stage1", "zero_optimization.log_*",
         "zero_optimization.override_module_apply", "zero_optimization.enable_sanity_checks",
         "zero_optimization.offload_*.nvme_path", "zero_optimization.offload_*.buffer_*",
         "zero_optimization.offload_*.pin_memory", "zero_optimization.offload_*.pipeline*",
         "zero_optimization.offload_*.fast_init", "zero_optimization.pipeline_loading_checkpoint",
         "zero_optimization.cpu_offload_use_pin_memory", "zero_optimization.stage3_model_persistence_threshold",
         "zero_optimization.offload_*.cpuadam_*", "zero_optimization.compute_grad_norm",
         "zero_optimization.parameter_alignment", "optimizer.legacy_fusion", "activation_checkpointing.profile",
         "activation_checkpointing.number_checkpoints")
_HALVES = (("bf16", ("bf16", "bfloat16")), ("fp16", ("fp16",)))


def read_deepspeed_json(settings: Settings, job: Job, said: Said | None = None) -> None:
    """All of a DeepSpeed configuration; `said` is the setting that names it, where another file does."""
    old = peek(settings, _ZERO)
    mapping_at(settings, *(() if old is not None and isinstance(old.value, bool) else (_ZERO,)), "bf16", "bfloat16",
               "fp16", "optimizer", "data_types", "torch_autocast", "amp", "activation_checkpointing",
               f"{_ZERO}.offload_optimizer", f"{_ZERO}.offload_param", "tensor_parallel", "optimizer.params")
    mark = next((one for one in MARKS if settings.has(one)), _ZERO)
    job.keep("engine", "zero", said or Said(settings.file, mark, "DeepSpeed", settings.line(mark)))
    _batch(settings, job)
    _stage(settings, job)
    _dtypes(settings, job)
    _optimizer(settings, job)
    _rest(settings, job)
    settings.idle(*_IDLE)


def _given(settings: Settings, job: Job, *names: str) -> Said | None:
    """A setting with a value; "auto" waits for what the Trainer's arguments or accelerate say."""
    said = settings.get(*names)
    if said is not None and said.value == AUTO:
        job.facts.setdefault(f"auto {names[-1]}", (AUTO, said))
        return None
    return said


def _batch(settings: Settings, job: Job) -> None:
    for name, fact in (("train_micro_batch_size_per_gpu", "micro"), ("gradient_accumulation_steps", "steps"),
                       ("train_batch_size", "total")):
        if (said := _given(settings, job, name)) is not None:
            job.keep(fact, said.whole(), said)


def _stage(settings: Settings, job: Job) -> None:
    draft = job.draft
    old_form = peek(settings, _ZERO)
    said = settings.get(f"{_ZERO}.stage")
    if old_form is not None and isinstance(old_form.value, bool):  # zero/config.py, read_zero_config_deprecated
        job.keep("stage", int(old_form.value), settings.get(_ZERO) or old_form)
    elif said is not None:
        if said.whole(0) > 3:
            raise said.wrong("0, 1, 2 or 3")
        job.keep("stage", said.whole(0), said)
    for name, old, path in (("offload_optimizer", ("cpu_offload",), "parallel.offload.optimizer"),
                            ("offload_param", ("cpu_offload_param", "cpu_offload_params"),
                             "parallel.offload.parameters")):
        said = word_of(settings, f"{_ZERO}.{name}.device")
        place = one_of(said, _PLACES) if said is not None else "cpu"
        said = said or switch(settings, *(f"{_ZERO}.{one}" for one in old))
        if said is not None:
            draft.take(path, place, said)
    ratio = settings.get(f"{_ZERO}.offload_optimizer.ratio")
    if ratio is not None and ratio.number() < 1:
        if ratio.number() < 0:
            raise ratio.wrong("a share between 0 and 1")
        draft.take("parallel.offload.optimizer_fraction", ratio.number(), ratio)
    if (said := _given(settings, job, f"{_ZERO}.overlap_comm")) is not None:
        draft.take("parallel.overlap", said.flag(), said)
    if (said := _given(settings, job, f"{_ZERO}.reduce_bucket_size")) is not None:
        if said.number() < 1:
            raise said.wrong("a number of elements of at least 1")
        job.keep("bucket", said.number(), said)
    if (said := settings.get(f"{_ZERO}.mics_shard_size")) is not None and said.number() > 0:
        draft.take("parallel.sharding_factor", said.whole(), said, "MiCS")
    _zero_plus_plus(settings, job)
    for name, (usual, why) in _USUAL.items():
        _leave_unusual(settings, job, f"{_ZERO}.{name}", usual, why)
    for name in _NOT_SIMULATED:
        if (said := settings.get(f"{_ZERO}.{name}")) is not None:
            draft.leave(said, "is not simulated")
            take_whole(settings, f"{_ZERO}.{name}")


def _zero_plus_plus(settings: Settings, job: Job) -> None:
    """Keeps what ZeRO++ and MiCS's gathers are asked, which means something in stage 3."""
    name = f"{_ZERO}.zero_hpz_partition_size"
    if (said := peek(settings, name)) is not None:
        if said.whole(0) > 1:
            job.keep("neighbours", said.whole(), settings.get(name) or said)
        else:
            settings.idle(name)
    for option, fact in _THIRD.items():
        if (said := switch(settings, f"{_ZERO}.{option}")) is not None:
            job.keep(fact, True, said)


def _settle_plus_plus(job: Job, stage: int) -> None:
    """Second shards, gathers in two steps, and dtypes that are put in with the others (`hugging.policy`)."""
    told = {fact: said for fact in ("neighbours", *_THIRD.values()) if (said := job.said(fact)) is not None}
    for said in told.values() if stage < 3 else ():
        job.draft.leave(said, f"changes nothing in stage {stage}: it is ZeRO-3's")
    if stage == 3 and "neighbours" in told:
        job.draft.take("parallel.reshard_after_forward", job.of("neighbours"), told["neighbours"],
                       "second shards among so many neighbours")
    if stage == 3 and "two steps" in told:
        job.draft.take("parallel.hierarchical_gather", True, told["two steps"])
    narrow = {name: dtype for name, dtype in _NARROW.items() if name in told and stage == 3}
    for name, dtype in narrow.items():
        job.draft.share(f"training.precision.{name}", dtype, told[name])
    if narrow:
        job.keep("narrow", narrow, told[next(iter(narrow))])


def _leave_unusual(settings: Settings, job: Job, name: str, usual: Any, why: str) -> None:
    """Leaves a setting that is neither DeepSpeed's default, which is simulated, nor "auto"."""
    said = peek(settings, name)
    if said is None:
        return
    same = said.value in (AUTO, "none") or (said.flag() is usual if isinstance(usual, bool) else
                                            said.number() == usual)
    if same:
        settings.idle(name)
    else:
        job.draft.leave(settings.get(name) or said, why)


def _dtypes(settings: Settings, job: Job) -> None:
    """Keeps `half` (bf16, fp16) where a mode is on, and `auto half` where the Trainer's arguments decide."""
    for half, names in _HALVES:
        enabled = tuple(f"{name}.enabled" for name in names)
        said = peek(settings, *enabled)
        if said is not None and said.value == AUTO:
            job.facts.setdefault(f"auto {half}", (AUTO, settings.get(*enabled) or said))
        elif (said := switch(settings, *enabled)) is not None:
            job.keep("half", half, said)
        for fact, option in (("half master", f"{half}_master_weights_and_grads"),
                             ("half states", f"{half}_optimizer_states")):
            if (said := switch(settings, f"{names[0]}.{option}")) is not None:
                job.keep(fact, half, said)
    for fact, name in (("accumulate", "data_types.grad_accum_dtype"), ("wire", "communication_data_type")):
        said = word_of(settings, name)
        if said is not None and said.value != AUTO:
            job.keep(fact, dtype_of(said), said)
    if switch(settings, "torch_autocast.enabled") is not None:
        said = settings.get("torch_autocast.dtype", "torch_autocast.enabled")
        if said is not None:
            job.keep("autocast", dtype_of(said) if said.name.endswith("dtype") else "bf16", said)
    settings.idle("torch_autocast.*")
    if (said := switch(settings, "amp.enabled")) is not None:
        job.draft.leave(said, "Apex's amp is simulated in no mode but 'mixed-fp16', its O2: "
                              "--set training.precision=mixed-fp16")
    settings.idle("amp.*")


def _optimizer(settings: Settings, job: Job) -> None:
    said = settings.get("optimizer.type")
    if said is None:
        return
    name = said.word().replace("_", "")
    if name in _NEAREST:
        nearest, why = _NEAREST[name]
        job.draft.leave(said, f"simulated as {nearest}{': ' + why if why else ''}")
        job.draft.assume("training.optimizer", nearest, f"the nearest to {said.value}")
    else:
        if name not in _OPTIMIZERS:
            raise said.wrong(f"one of {', '.join([*_OPTIMIZERS, *_NEAREST])}")
        momentum = peek(settings, "optimizer.params.momentum")
        moving = name == "sgd" and momentum is not None and momentum.value != AUTO and momentum.number() > 0
        job.draft.take("training.optimizer", "sgd-momentum" if moving else _OPTIMIZERS[name], said)


def _rest(settings: Settings, job: Job) -> None:
    draft = job.draft
    for name, path in (("tensor_parallel.autotp_size", "parallel.tensor"),
                       ("sequence_parallel_size", "parallel.context")):
        said = _given(settings, job, name)
        if said is not None and said.whole(0) > 1:
            draft.take(path, said.whole(), said)
            if path == "parallel.context":
                draft.take("parallel.context_exchange", "all-to-all", said, "Ulysses")
    for name, why in (("activation_checkpointing.partition_activations", "no field says it"),
                      ("activation_checkpointing.contiguous_memory_optimization", "no field says it"),
                      ("activation_checkpointing.synchronize_checkpoint_boundary", "no field says it"),
                      ("activation_checkpointing.cpu_checkpointing",
                       "--set parallel.offload.activations=cpu if the model calls DeepSpeed's checkpointing")):
        if (said := switch(settings, name)) is not None:
            draft.leave(said, f"DeepSpeed's checkpointing runs only where the model's code calls it, Hugging Face's "
                              f"does not: {why}")
    for name in ("pipeline", "sparse_attention", "sparse_gradients", "compression_training", "curriculum_learning",
                 "data_efficiency", "progressive_layer_drop", "eigenvalue", "compile", "communication_compression"):
        said = peek(settings, name)
        if said is not None and said.value not in (False, {}) and not isinstance(said.value, list | str):
            draft.leave(said, "is not simulated")
            take_whole(settings, name)


def settle_zero(job: Job) -> None:
    """Strategy and overlap of a job that DeepSpeed runs; a bucket's bytes follow from its dtype in `hugging`."""
    draft, stage = job.draft, job.of("stage") or 0
    said = job.said("stage")
    if said is not None:
        draft.take("parallel.strategy", _STRATEGIES[stage], said)
    else:
        draft.assume("parallel.strategy", _STRATEGIES[stage], "no stage of ZeRO is said: all of it on every GPU")
    _settle_plus_plus(job, stage)
    # zero/config.py, overlap_comm_valid: without a value, stage 3 alone overlaps; without ZeRO the engine reduces
    # behind the whole backward (engine.py, buffered_allreduce_fallback).
    draft.assume("parallel.overlap", stage > 2, "DeepSpeed's default of overlap_comm: stage 3 alone overlaps")
    for name, (_, auto) in job.facts.items():
        if not name.startswith("auto ") or not _unfilled(job, name.removeprefix("auto ")):
            continue
        by = "the width in the model's config.json" if name.endswith(_BUCKET) else "the Trainer's arguments or "\
            "accelerate's YAML"
        draft.leave(auto, f"'auto' is filled by {by}: give that file too, or --set the field")


def _unfilled(job: Job, name: str) -> bool:
    """Whether nobody says what an "auto" of this name stands for."""
    if name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        fact = {"train_micro_batch_size_per_gpu": "micro"}.get(name, "steps")
        return job.of(fact) is None and job.arguments is None
    if name in ("bf16", "fp16"):
        return job.of("amp") is None and job.of("half") is None and job.arguments is None
    if name.endswith(_BUCKET):
        return job.config is None and job.draft.value("model.preset") is None
    return not name.endswith(("train_batch_size", "overlap_comm"))
