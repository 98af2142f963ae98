"""torchtitan's TOML files as a scenario.

Names, defaults and what they do: torchtitan 0.1.0 config_manager.py, 0.2.0 and 0.2.2 config/job_config.py, train.py,
models/llama3/infra/parallelize.py; of 2024 config_manager.py (recalled). A dump of a job's configuration
(job.save_config_file, JSON) has the same names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sim.catalog import table
from sim.errors import Fault, UserError
from sim.imports.draft import Draft
from sim.imports.hugging.files import kind_of
from sim.imports.settings import Said, Settings, one_of
from sim.imports.torchtitan.layout import read_layout
from sim.scenario.named.presets import preset

_DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
_OPTIMIZERS = {"adamw": "adamw", "adam": "adam"}
_KERNELS = {"for_loop": "loop", "foreach": "foreach", "fused": "fused"}
_NORMS = {"layernorm": "layernorm", "rmsnorm": "rmsnorm", "fused_rmsnorm": "rmsnorm", "compiled_rmsnorm": "rmsnorm"}
#: Converters of linear layers (model.converters) -> compute.
_LINEAR = {"float8": "fp8", "quantize.linear.float8": "fp8", "mx": "mxfp8", "quantize.linear.mx": "mxfp8"}
_GROUPED = ("quantize.grouped_mm.float8", "quantize.grouped_mm.mx")
_MX = ("quantize.linear.mx", "mx")
#: Tables of float8, newest first.
_FLOAT8 = ("quantize.linear.float8", "quantize.dense.float8", "float8")
#: Release whose names are those of 2024.
_OLD = "0.0.2"
#: What a file says that only an era knows -> its year and release.
_ERAS = (
    (2026, "0.2.2", ("debug", "training.dataloader", "parallelism.expert_parallel_comm_backend", "job.save_config_file",
                     "parallelism.context_parallel_load_balancer", "lr_scheduler.total_steps",
                     "activation_checkpoint.preserve_rng_state")),
    (2025, "0.2.0", ("compile", "quantize", "validation", "checkpoint.enable", "parallelism.expert_parallel_degree",
                     "model.hf_assets_path", "lr_scheduler.min_lr_factor")),
    (2025, "0.1.0", ("parallelism",)),
    (2024, _OLD, ("training.tensor_parallel_degree", "training.data_parallel_degree", "training.batch_size",
                     "training.data_parallel_shard_degree", "experimental.pipeline_parallel_degree",
                     "experimental.context_parallel_degree", "training.enable_float8_linear", "training.fp8_linear",
                     "float8.enable_float8_linear")),
)
#: Matters where it is on, and no field says it.
_LEFT = {
    "parallelism.disable_loss_parallel": "the loss is counted on tensor ranks' shares of the vocabulary",
    "training.disable_loss_parallel": "the loss is counted on tensor ranks' shares of the vocabulary",
    "parallelism.enable_compiled_autograd": "a compiled autograd engine is not simulated",
    "experimental.enable_compiled_autograd": "a compiled autograd engine is not simulated",
    "fault_tolerance.enable": "replicas that come and go (TorchFT) are not simulated",
    "experimental.custom_import": "code of its own is not read",
    "experimental.custom_args_module": "code of its own is not read",
    "experimental.custom_model_path": "code of its own is not read",
    "job.custom_config_module": "code of its own is not read",
    "float8.emulate": "emulated 8-bit products are not simulated",
    "quantize.linear.float8.emulate": "emulated 8-bit products are not simulated",
    "parallelism.pipeline_parallel_schedule_csv": "a schedule of the user's own is not simulated",
    "activation_checkpoint.early_stop": "where recomputation stops follows software.year",
    "comm.mode": "jobs without real communication are not simulated",
}
#: Tables of its files; those behind are others' names too.
_TABLES = ("model", "training", "job", "parallelism", "activation_checkpoint", "metrics", "profiling", "lr_scheduler",
           "experimental", "float8", "quantize", "comm", "debug", "validation", "fault_tolerance", "memory_estimation",
           "mx", "optimizer", "checkpoint", "compile")
_IDLE = (
    "job.*", "profiling.*", "metrics.*", "checkpoint.*", "lr_scheduler.*", "comm.*", "memory_estimation.*",
    "fault_tolerance.*", "validation.*", "debug.*", "optimizer.lr", "optimizer.beta?", "optimizer.eps",
    "optimizer.weight_decay", "training.dataset*", "training.steps", "training.max_norm", "training.warmup_steps",
    "training.gc_*", "training.seed", "training.dataloader.*", "model.*path",
    "model.print_after_conversion", "activation_checkpoint.*", "experimental.*", "compile.fullgraph",
    "mx.*", "quantize.*.mx.*", "quantize.grouped_mm.*", "parallelism.pipeline_parallel_schedule_csv",
    "parallelism.pipeline_parallel_expert_parallel_overlap", "parallelism.context_parallel_load_balancer",
)


def read(files: Sequence[str], draft: Draft) -> None:
    """Takes what torchtitan's TOML files say, and a model's config.json beside them.

    Raises:
        UserError: a file that cannot be read, or a value that cannot be.
    """
    for settings in draft.opened(files):
        _recognise(settings)
        layers = _model(settings, draft)
        sharded = read_layout(settings, draft, layers)
        _training(settings, draft)
        _precision(settings, draft, sharded)
        _recompute(settings, draft, layers)
        _optimizer(settings, draft)
        _software(settings, draft)
        _leave(settings, draft)
        settings.idle(*_IDLE)
        draft.close(settings)


def _recognise(settings: Settings) -> None:
    """Raises UserError where a file has none of torchtitan's tables, or looks like another tool's."""
    tables = [name for name in _TABLES if isinstance(settings.data.get(name), Mapping)]
    other = kind_of(settings)
    if not tables or (other and not any(name in _TABLES[:4] for name in tables)):
        raise UserError(Fault(f"holds none of torchtitan's tables ([{'], ['.join(_TABLES[:5])}], …)"
                              + (f"; it looks like {other}" if other else ""), "", settings.file, 1,
                              "'drystep import hf' reads that" if other else ""))


def on(settings: Settings, *names: str) -> Said | None:
    """The first of these switches that has a value, where that is true."""
    said = settings.get(*names)
    return said if said is not None and said.value != "" and said.flag() else None


def _model(settings: Settings, draft: Draft) -> int | None:
    """Fields of `model`; its blocks, if known."""
    flavors: Mapping[str, Mapping[str, Mapping[str, Any]]] = table("imports/torchtitan/flavors.yaml")["flavors"]
    name, flavor = settings.get("model.name"), settings.get("model.flavor")
    family = name.word() if name is not None else "llama3"
    said = flavor or name
    mask, _ = settings.get("model.attn_mask_type"), settings.get("model.use_flex_attn")  # which is counted as flash
    if mask is not None and mask.word() == "block_causal":
        draft.packs(mask)
    if norm := settings.get("model.norm_type"):
        if norm.word() in _NORMS:
            draft.take("model.norm", _NORMS[norm.word()], norm)
        else:
            draft.leave(norm, f"not simulated; known are {', '.join(_NORMS)}")
    if said is None or draft.has("model.hf"):
        return None
    wanted = str(flavor.value) if flavor is not None else "debugmodel"
    known = {key.lower(): fields for key, fields in flavors.get(family, {}).items()}
    fields = known.get(wanted.lower())
    if fields is None:
        of_family = f"of {family} known are {', '.join(flavors[family])}" if known else (
            f"known are {', '.join(flavors)}")
        draft.leave(said, f"the sizes of {family} {wanted} are not known here, {of_family}: --set model.preset=NAME")
        return None
    if fields.get("mask") == "block_causal":
        draft.packs(said)
    for field, value in fields.items():
        if field != "mask":
            draft.take(f"model.{field}", value, said)
    whole = {**(preset(fields["preset"]) or {}), **fields} if "preset" in fields else fields
    return int(whole["layers"])


def _training(settings: Settings, draft: Draft) -> None:
    if said := settings.get("training.seq_len"):
        draft.take("training.sequence", said.whole(), said)
    else:
        draft.assume("training.sequence", 2048, "training.seq_len of job_config.py")
    if said := on(settings, "training.enable_cpu_offload"):
        draft.take("parallel.offload.parameters", "cpu", said)
        draft.take("parallel.offload.optimizer", "cpu", said)


def _precision(settings: Settings, draft: Draft, sharded: str) -> None:
    """Dtypes of everything.

    Parameters, gradients and optimizer states stay in training.dtype (fp32). FSDP's MixedPrecisionPolicy gathers
    parameters in mixed_precision_param and reduces gradients in mixed_precision_reduce, which is fp32 alone; without
    FSDP autocast does it for DDP and one GPU, and nobody beside tensor or pipeline ranks (distributed/utils.py,
    maybe_enable_amp).
    """
    param, reduce = settings.get("training.mixed_precision_param"), settings.get("training.mixed_precision_reduce")
    kept = settings.get("training.dtype")
    compute = one_of(param, _DTYPES) if param is not None else "bf16"
    wire = one_of(reduce, _DTYPES) if reduce is not None else "fp32"
    rest = one_of(kept, _DTYPES) if kept is not None else "fp32"
    if sharded == "none beside other ranks" and rest == "fp32":
        compute = "fp32"
    gather = compute if sharded == "fsdp" else rest
    narrow, narrow_gather = _narrow(settings, draft)
    if narrow is not None:
        compute = _LINEAR.get(str(narrow.value), "fp8") if isinstance(narrow.value, str) else "fp8"
        gather = "fp8" if narrow_gather is not None and sharded == "fsdp" else gather
    dtypes: dict[str, str] | str = {
        "compute": compute, "parameters": rest, "master": "none", "gradients": rest, "optimizer": rest,
        "gather": gather, "reduce": wire if sharded == "fsdp" else rest}
    if narrow is None and rest == "fp32" and compute != "fp32":
        dtypes = f"amp-{compute}" if sharded != "fsdp" else (
            f"fsdp-{compute}" if wire == compute else {"name": f"fsdp-{compute}", "reduce": wire})
    elif narrow is None and rest == compute == "fp32":
        dtypes = "fp32"
    said = narrow or kept or param or reduce
    if said is not None:
        draft.take("training.precision", dtypes, said)
    else:
        draft.assume("training.precision", dtypes, "mixed_precision_param bfloat16 and mixed_precision_reduce float32 "
                                                   "of job_config.py")


def _narrow(settings: Settings, draft: Draft) -> tuple[Said | None, Said | None]:
    """What asks for 8-bit products of linear layers, and for 8-bit gathers; notes the rest of it."""
    converters = settings.get("model.converters")
    names = converters.value if converters is not None else []
    if converters is not None and isinstance(names, str):
        names = [one.strip() for one in names.split(",") if one.strip()]
    if converters is not None and not (isinstance(names, list) and all(isinstance(one, str) for one in names)):
        raise converters.wrong("a list of names")
    found = on(settings, "float8.enable_float8_linear", "training.enable_float8_linear")
    old = settings.get("training.fp8_linear")
    if old is not None and str(old.value) not in ("", "False"):
        found = old
    for one in names:
        assert converters is not None
        if one in _LINEAR:
            found = Said(converters.file, converters.name, one, converters.line)
        elif one not in _GROUPED:
            draft.leave(converters, f"what the converter {str(one)[:40]} does is not known here")
    gather = on(settings, *(f"{where}.enable_fsdp_float8_all_gather" for where in _FLOAT8))
    recipe = settings.get(*(f"{where}.recipe_name" for where in _FLOAT8))
    mx = settings.get(*(f"{where}.recipe_name" for where in _MX))
    if found is not None and mx is not None and "fp4" in mx.word():
        draft.leave(mx, "products of 4 bits are counted as mxfp8's")
    scaled = found is not None and _LINEAR.get(str(found.value)) == "mxfp8"
    skipped = settings.get(*(f"{where}.filter_fqns" for where in (_MX if scaled else _FLOAT8)))
    settings.get(*(f"{where}.precompute_float8_dynamic_scale_for_fsdp" for where in _FLOAT8))
    again = on(settings, *(f"{where}.force_recompute_fp8_weight_in_bwd" for where in _FLOAT8))
    if found is None:
        return None, None
    if recipe is not None and recipe.word() != "tensorwise":
        draft.leave(recipe, "scales of rows are counted as one of a whole tensor")
    if skipped is not None and skipped.value not in ([], ["output"], "output", ""):
        draft.leave(skipped, "all linear layers but the head are counted in 8 bits")
    elif (skipped is None and not scaled) or (skipped is not None and not skipped.value):  # mx skips it by default
        draft.leave(found, "the head is counted in 16 bits")
    if again is not None:
        draft.leave(again, "weights in 8 bits are counted as kept until backward")
    if draft.has("model.moe") and not any(one in _GROUPED for one in names):
        draft.leave(found, "experts stay in 16 bits there, and are counted in 8")
    return found, gather


def _recompute(settings: Settings, draft: Draft, layers: int | None) -> None:
    """Activation checkpointing.

    distributed/activation_checkpoint.py (0.1.0: infra/parallelize.py): "full" wraps every block, "selective" with a
    number k every k-th block of a rank, with "op" every block, keeping outputs of attention and of every
    second product.
    """
    path, mode = "training.recompute", settings.get("activation_checkpoint.mode")
    option = settings.get("activation_checkpoint.selective_ac_option", "activation_checkpoint.selective_ac_type")
    kinds = {one: one for one in ("selective", "full", "none", "memory_budget")}
    kind = one_of(mode, kinds) if mode is not None else "selective"
    if kind == "memory_budget" and mode is not None:
        draft.leave(mode, "the compiler's choice of what to keep is not simulated: everything is kept")
        draft.assume(path, "none", "nothing is known of the compiler's choice")
    elif kind != "selective" and mode is not None:
        draft.take(path, kind, mode)
    if kind != "selective":
        return
    said = option or mode
    which = option.word() if option is not None else "2"
    if which != "op" and not (which.isdecimal() and 0 < len(which) < 6 and int(which)):
        assert option is not None
        raise option.wrong("'op', or a whole number: one block of so many")
    value: Any = "selective-op"
    if which != "op":
        every = int(which)
        if every > 1 and layers is None:
            draft.leave(said or Said(settings.file, "activation_checkpoint.mode", "selective"),
                        f"one block of {every} runs again, and how many the model has is not known here: "
                        "--set training.recompute.layers=N")
            return
        of_rank = -(-(layers or 0) // (draft.value("parallel.pipeline") or 1))
        value = "full" if every < 2 else {"layers": of_rank // every}
    if said is not None:
        draft.take(path, value, said, f"one block of every {which} of a rank" if isinstance(value, dict) else "")
    else:
        draft.assume(path, value, "activation_checkpoint.mode selective of job_config.py, every second block")


def _optimizer(settings: Settings, draft: Draft) -> None:
    if said := settings.get("optimizer.name"):
        draft.take("training.optimizer", one_of(said, _OPTIMIZERS), said)
    if said := settings.get("optimizer.implementation"):
        draft.take("software.optimizer_kernel", one_of(said, _KERNELS), said)
    elif said := settings.get("optimizer.fused"):
        draft.take("software.optimizer_kernel", "fused" if said.flag() else "foreach", said)
    if said := on(settings, "optimizer.early_step_in_backward"):
        draft.take("training.optimizer_in_backward", True, said)


def _software(settings: Settings, draft: Draft) -> None:
    draft.assume("software.framework", "torchtitan", "its file")
    if said := on(settings, "training.deterministic", "debug.deterministic"):
        draft.take("software.deterministic", True, said)
    draft.assume("software.fsdp", 2, "torchtitan shards with fully_shard alone")
    for year, release, names in _ERAS:
        hit = next((name for name in names if settings.has(name)), "")
        if hit and release == _OLD:
            draft.assume("software.optimizer_kernel", "foreach", "optimizer.fused of 2024's config_manager.py is false")
        if hit:
            draft.assume("software.year", year, f"the name {hit} is of torchtitan {release}")
            draft.assume("software.versions", {"torchtitan": release}, f"the name {hit}")
            break
    parts, backend = settings.get("compile.components"), settings.get("compile.backend")
    said = on(settings, "compile.enable", "training.compile")
    if said is None:
        return
    components = parts.value if parts is not None and isinstance(parts.value, list) else ["model", "loss"]
    if parts is not None and "model" not in components:
        draft.leave(parts, "a compiled loss beside blocks that are not is not simulated")
        return
    draft.take("software.compile", True, said)
    if parts is not None and "loss" not in components:
        draft.leave(parts, "the loss is counted as compiled too")
    if backend is not None and backend.value != "inductor":
        draft.leave(backend, "inductor is simulated")


def _leave(settings: Settings, draft: Draft) -> None:
    for name, why in _LEFT.items():
        said = settings.get(name) if settings.has(name) else None
        if said is not None and said.value not in (False, "", "default"):
            draft.leave(said, why)
