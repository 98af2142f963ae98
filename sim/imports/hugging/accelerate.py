"""accelerate's YAML, as `accelerate config` writes it and `accelerate launch --config_file` reads it.

Source: accelerate 1.15 commands/config/config_args.py (ClusterConfig) and cluster.py, commands/launch.py,
utils/launch.py, utils/dataclasses.py (DeepSpeedPlugin, MegatronLMPlugin).
"""

from __future__ import annotations

from collections.abc import Callable

from sim.imports.hugging.deepspeed import read_deepspeed_json
from sim.imports.hugging.facts import AUTO, Job, inner
from sim.imports.hugging.fsdp import read_fsdp, read_mesh
from sim.imports.hugging.trainer import read_compiler
from sim.imports.settings import Said, Settings, mapping_at, one_of, peek, switch, word_of

_PRECISIONS = {"no": None, "none": None, "fp32": None, "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}
_PLACES = {"none": "none", "cpu": "cpu", "nvme": "nvme"}
_GRANULARITIES = {"full": "full", "selective": "selective"}
#: `accelerate launch --fsdp_min_num_params`, which a size_based_wrap without a size goes by.
_SMALLEST = 10**8
_ZERO, _CORE = "deepspeed_config", "megatron_lm_config"
_IDLE = ("compute_environment", "debug", "downcast_bf16", "machine_rank", "main_process_ip", "main_process_port",
         "main_training_function", "gpu_ids", "rdzv_*", "same_network", "tpu_*", "use_cpu", "enable_cpu_affinity",
         "command*", "commands*", "mpirun_config*", "fsdp_config", "deepspeed_config", "megatron_lm_config",
         "parallelism_config", "dynamo_config", "dynamo_config.*", "dynamo_backend", "fp8_config", "image_uri",
         "iam_role_name", "profile", "region", "py_version", "pytorch_version", "transformers_version", "base_job_name",
         "sagemaker_*", "additional_args*", "num_cpu_threads_per_process", "mixed_precision", "fp16", "*_rdzv_backend",
         "deepspeed_config.deepspeed_multinode_launcher", "deepspeed_config.deepspeed_hostfile",
         "deepspeed_config.deepspeed_*_filter", "deepspeed_config.gradient_clipping", "deepspeed_config.zero3_*",
         "deepspeed_config.*_nvme_path", "deepspeed_config.deepspeed_moe_layer_cls_names", "deepspeed_config.zero_*",
         "deepspeed_config.offload_*", "megatron_lm_config.megatron_lm_gradient_clipping",
         "megatron_lm_config.megatron_lm_no_*", "megatron_lm_config.megatron_lm_eod_*", "gpu_*", "num_machines")


def read_accelerate_yaml(settings: Settings, job: Job) -> None:
    """All of one of accelerate's configurations."""
    mapping_at(settings, "fsdp_config", _ZERO, _CORE, "parallelism_config", "dynamo_config", "fp8_config")
    job.hugging = True
    if (said := switch(settings, "use_cpu")) is not None:
        raise said.wrong("false: training on CPUs is not simulated")
    said = word_of(settings, "mixed_precision")
    if said is not None:
        job.facts.setdefault("launched", (one_of(said, _PRECISIONS), said))
    elif (old := switch(settings, "fp16")) is not None:  # config_args.py, process_config
        job.facts.setdefault("launched", ("fp16", old))
    read = {"no": _alone, "multi_gpu": _replicas, "fsdp": _sharded, "deepspeed": _zero, "megatron_lm": _core}
    kind = settings.get("distributed_type")
    if kind is None or kind.value is False:
        _alone(settings, job, kind or Said(settings.file, "distributed_type", "NO"))
    else:
        one: Callable[[Settings, Job, Said], None] = one_of(kind, read)
        one(settings, job, kind)
    steps = settings.get("gradient_accumulation_steps")
    if steps is not None and steps.value != AUTO:
        job.keep("steps", steps.whole(), steps)
    _compiler(settings, job)
    if settings.has("parallelism_config"):
        read_mesh(settings, "parallelism_config", job)
    if (said := settings.get("ec2_instance_type")) is not None:
        job.draft.leave(said, "--cluster the topology of this instance, such as p4d or p5")
    if (said := settings.get("fp8_config.backend", "fp8_config.fp8_backend")) is not None:
        job.draft.leave(said, "whichever library runs fp8, its products alone are simulated as such")
    settings.idle("fp8_config.*", *_IDLE)


def _alone(settings: Settings, job: Job, said: Said) -> None:
    """One process whatever num_processes says (commands/launch.py, simple_launcher)."""
    job.draft.gpus = Said(said.file, said.name, 1, said.line)
    settings.idle("num_processes", "num_machines")


def _gpus(settings: Settings, job: Job) -> None:
    said = settings.get("num_processes")
    if said is not None and said.value not in (-1, "-1"):
        said.whole()
        job.draft.gpus = said
    said = peek(settings, "num_machines")
    if said is not None:
        said.whole()
        job.draft.nodes = settings.get("num_machines")


def _replicas(settings: Settings, job: Job, said: Said) -> None:
    _gpus(settings, job)
    job.facts.setdefault("replicas", (True, said))


def _sharded(settings: Settings, job: Job, said: Said) -> None:
    _gpus(settings, job)
    job.keep("engine", "fsdp", said)
    read_fsdp(settings, "fsdp_config.", job, version=1, wrap="no_wrap", smallest=_SMALLEST)


def _zero(settings: Settings, job: Job, said: Said) -> None:
    """Keys of `deepspeed_config`, or the JSON that `deepspeed_config_file` names."""
    _gpus(settings, job)
    configured = job.said("engine") is not None  # by a DeepSpeed JSON of its own
    job.keep("engine", "zero", said)
    found = inner(settings, f"{_ZERO}.deepspeed_config_file", job.zeros)
    if found is not None:
        job.files.append(found)
        read_deepspeed_json(found, job, said)
    stage = settings.get(f"{_ZERO}.zero_stage")
    if stage is not None:
        if stage.whole(0) > 3:
            raise stage.wrong("0, 1, 2 or 3")
        job.keep("stage", stage.whole(0), stage)
    elif found is None and not configured:
        job.keep("stage", 2, Said(said.file, f"{_ZERO}.zero_stage", 2, said.line))  # DeepSpeedPlugin.__post_init__
    steps = settings.get(f"{_ZERO}.gradient_accumulation_steps")
    if steps is not None and steps.value != AUTO:
        job.keep("steps", steps.whole(), steps)
    for name, path in (("offload_optimizer_device", "parallel.offload.optimizer"),
                       ("offload_param_device", "parallel.offload.parameters")):
        if (place := word_of(settings, f"{_ZERO}.{name}")) is not None:
            job.draft.take(path, one_of(place, _PLACES), place)


def _core(settings: Settings, job: Job, said: Said) -> None:
    """Keys of `megatron_lm_config`, which start with `megatron_lm_`."""
    _gpus(settings, job)
    job.keep("engine", "core", said)
    draft = job.draft

    def names(name: str) -> tuple[str, str]:
        return f"{_CORE}.megatron_lm_{name}", f"{_CORE}.{name}"

    for name, path in (("tp_degree", "parallel.tensor"), ("pp_degree", "parallel.pipeline"),
                       ("context_parallel_size", "parallel.context"),
                       ("expert_model_parallel_size", "parallel.expert")):
        if (one := settings.get(*names(name))) is not None:
            draft.take(path, one.whole(), one)
    if (one := settings.get(*names("num_micro_batches"))) is not None:
        job.keep("steps", one.whole(), one)
    if (one := switch(settings, *names("sequence_parallelism"))) is not None:
        draft.take("parallel.sequence_parallel", True, one)
    if (one := switch(settings, *names("use_distributed_optimizer"))) is not None:
        draft.take("parallel.strategy", "zero1", one)
    draft.assume("parallel.overlap", False, "overlap_grad_reduce is off: accelerate leaves Megatron's default")
    if (one := switch(settings, *names("optimizer_cpu_offload"))) is not None:
        draft.take("parallel.offload.optimizer", "cpu", one)
    granularity = word_of(settings, *names("recompute_granularity"))
    if granularity is not None:
        draft.take("training.recompute", one_of(granularity, _GRANULARITIES), granularity)
    elif (one := switch(settings, *names("recompute_activations"))) is not None:
        draft.take("training.recompute", "selective", one)
    for name in ("use_custom_fsdp", "use_precision_aware_optimizer", "overlap_cpu_optimizer_d2h_h2d"):
        if (one := switch(settings, *names(name))) is not None:
            draft.leave(one, "is not simulated")


def _compiler(settings: Settings, job: Job) -> None:
    backend = word_of(settings, "dynamo_config.dynamo_backend", "dynamo_config.backend", "dynamo_backend")
    if backend is not None:
        read_compiler(job, backend, backend, word_of(settings, "dynamo_config.dynamo_mode", "dynamo_config.mode"))


def settle_launched(job: Job) -> None:
    """Precision that `accelerate launch` sets: the Trainer's bf16 and fp16 go over it (training_args.py, step 5)."""
    launched, own = job.facts.get("launched"), job.said("amp")
    if launched is None:
        return
    half, said = launched
    if own is None and job.trl_half:
        if half != "bf16":
            job.draft.leave(said, "TRL's default of bf16, true, goes over it")
    elif own is None:
        if half is not None:
            job.facts["amp"] = (half, said)
    elif half != job.of("amp"):
        job.draft.leave(said, f"{own} goes over it")
