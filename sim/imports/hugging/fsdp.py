"""PyTorch's FSDP as accelerate and the Trainer set it up.

Source: accelerate 1.15 utils/dataclasses.py, FullyShardedDataParallelPlugin; transformers 5.24 training_args.py,
_process_fsdp_args and _apply_legacy_fsdp_to_config.
"""

from __future__ import annotations

from sim.imports.hugging.facts import Job
from sim.imports.hugging.optimizers import place_optimizer
from sim.imports.settings import Said, Settings, mapping_at, one_of, peek, switch
from sim.software import stack_for

#: Strategy of FSDP 1, or its number -> what shares a set of shards, and whether forward frees what it gathered.
_STRATEGIES = {
    "full_shard": ("full", True), "shard_grad_op": ("full", False), "no_shard": (1, True),
    "hybrid_shard": ("node", True), "hybrid_shard_zero2": ("node", False), "_hybrid_shard_zero2": ("node", False),
    "1": ("full", True), "2": ("full", False), "3": (1, True), "4": ("node", True), "5": ("node", False),
}
_ONLY_1 = ("no_shard", "hybrid_shard", "hybrid_shard_zero2")
#: What FSDP 1 alone has (transformers 5 reads them with `version: 1` alone).
_NAMES_OF_1 = ("backward_prefetch", "forward_prefetch", "use_orig_params", "limit_all_gathers", "sync_module_states",
               "sharding_strategy")
_BACKWARD = {"backward_pre": "pre", "backward_post": "post", "no_prefetch": "none", "none": "none",
             "1": "pre", "2": "post", "3": "none"}
_WRAPS = {"transformer_based_wrap": "block", "size_based_wrap": "size", "no_wrap": "none"}
#: More parameters than any model has: FSDP's root alone holds everything.
WHOLE = 10**13


def read_fsdp(settings: Settings, above: str, job: Job, *, version: int, wrap: str, smallest: int = 0,
              legacy: Said | None = None) -> None:
    """FSDP's settings.

    Args:
        settings: the file.
        above: name of the mapping they stand in with a dot, "" for the root; names may start with `fsdp_`.
        job: what is known so far.
        version: FSDP's version where no setting says it.
        wrap: the tool's default of `auto_wrap_policy`; smallest: and of `min_num_params`.
        legacy: the Trainer's `fsdp`, where it is words: strategies, `offload`, `auto_wrap`.
    """
    draft = job.draft
    words = _legacy(legacy)
    version = _version(settings, above, job, version, words, legacy)
    _strategy(settings, above, job, version, words, legacy)
    _prefetch(settings, above, job, version)
    said = switch(settings, *_names(above, "offload_params", "cpu_offload"))
    if said is None and "offload" in words:
        said = legacy
    if said is not None:
        # The optimizer steps where the shards are (torch: CPUOffload, CPUOffloadPolicy).
        draft.take("parallel.offload.parameters", "cpu", said)
        place_optimizer(job, "cpu", said, "the optimizer steps where the shards are")
    _wrap(settings, above, job, wrap, smallest)
    if (said := switch(settings, *_names(above, "activation_checkpointing"))) is not None:
        draft.take("training.recompute", "full", said)
    if (said := switch(settings, *_names(above, "activation_checkpointing_offload"))) is not None:
        draft.take("parallel.offload.activations", "cpu", said)
    for name in ("ignored_modules", "mixed_precision_policy"):
        if (said := settings.get(*_names(above, name))) is not None:
            draft.leave(said, "no field says it: all blocks are sharded alike, with the dtypes of mixed_precision")
    said = peek(settings, *_names(above, "use_orig_params"))
    counted = stack_for("pytorch", modules="transformers").original_parameters
    if version == 1 and said is not None and said.flag() is not counted:
        settings.get(*_names(above, "use_orig_params"))
        draft.leave(said, f"kernels of the optimizer are counted {'parameter by parameter' if counted else 'by unit'}")
    if (said := switch(settings, *_names(above, "xla"))) is not None:
        raise said.wrong("false: XLA's FSDP is not simulated")
    settings.idle(*(pattern for name in ("state_dict_type", "cpu_ram_efficient_loading", "sync_module_states",
                                         "transformer_layer_cls_to_wrap", "use_orig_params", "min_num_params", "xla_*")
                    for pattern in _names(above, name)))


def _names(above: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{above}{start}{name}" for name in names for start in ("fsdp_", ""))


def _legacy(said: Said | None) -> list[str]:
    """The words of the Trainer's `fsdp`: text or a list."""
    if said is None:
        return []
    words = said.value.split() if isinstance(said.value, str) else said.value
    known = [*(one for one in _STRATEGIES if not one.isdigit()), "offload", "auto_wrap"]
    if not isinstance(words, list) or not all(isinstance(one, str) and one.lower() in known for one in words):
        raise said.wrong(f"true, false, or words of {', '.join(known)}")
    return [one.lower() for one in words]


def _version(settings: Settings, above: str, job: Job, version: int, words: list[str], legacy: Said | None) -> int:
    said = settings.get(*_names(above, "version"))
    if said is None:
        # transformers 5 refuses hybrid_shard and no_shard with its default, FSDP 2: such a file is an earlier one's, as
        # is one with names of FSDP 1 alone, unless it has transformers 5's own `fsdp: true` or a flag for resharding.
        after = peek(settings, *_names(above, "reshard_after_forward"))
        new = legacy is None or (after is not None and isinstance(after.value, bool))
        old = [one for one in words if one in _ONLY_1] + [
            one for name in _NAMES_OF_1 for one in _names(above, name) if not new and settings.has(one)]
        if version > 1 and not old:
            why = "the default of transformers 5; earlier releases have FSDP 1"
        else:
            why = f"{old[0]} is of FSDP 1" if old else "the default of accelerate"
            version = 1
        job.draft.assume("software.fsdp", version, why)
        return version
    version = said.whole()
    if version > 2:
        raise said.wrong("1 or 2")
    job.draft.take("software.fsdp", version, said)
    return version


def _strategy(settings: Settings, above: str, job: Job, version: int, words: list[str], legacy: Said | None) -> None:
    reshard = settings.get(*_names(above, "reshard_after_forward"))
    old = settings.get(*_names(above, "sharding_strategy"))
    named = [one for one in words if one in _STRATEGIES]
    said: Said | None
    if version == 1:  # accelerate prefers sharding_strategy, its older name
        said = old if old is not None else reshard
        if said is None and named and legacy is not None:
            said = Said(legacy.file, legacy.name, named[0], legacy.line)
        factor, frees = one_of(said, _STRATEGIES) if said is not None else ("full", True)
    else:
        said = reshard if reshard is not None else old
        if said is not None and str(said.value).lower() in ("full_shard", "shard_grad_op"):
            frees = str(said.value).lower() == "full_shard"
        elif said is not None:
            frees = said.flag()
        else:
            said = legacy if named else None
            frees = "shard_grad_op" not in named
        factor = "full"
    if said is not None:
        job.draft.take("parallel.reshard_after_forward", frees, said)
        job.keep("sharding_factor", factor, said)


def _prefetch(settings: Settings, above: str, job: Job, version: int) -> None:
    draft, backward, forward = job.draft, _names(above, "backward_prefetch"), _names(above, "forward_prefetch")
    if version > 1:  # FSDP 2 prefetches by itself; forward_prefetch raises
        settings.idle(*backward, *_names(above, "limit_all_gathers"))
        if (said := switch(settings, *forward)) is not None:
            raise said.wrong("false: accelerate refuses it with FSDP 2")
        return
    said = settings.get(*backward)
    if said is not None:
        draft.take("parallel.prefetch.backward", one_of(said, _BACKWARD), said)
    else:
        draft.assume("parallel.prefetch.backward", "none", "accelerate's default with FSDP 1: NO_PREFETCH")
    if (said := switch(settings, *forward)) is not None:
        draft.take("parallel.prefetch.forward", True, said)
    limit = _names(above, "limit_all_gathers")
    said = peek(settings, *limit)
    if said is not None and not said.flag():
        settings.get(*limit)
        draft.take("parallel.prefetch.limit", "none", said)
    settings.idle(*limit)


def _wrap(settings: Settings, above: str, job: Job, default: str, smallest: int) -> None:
    policy = settings.get(*_names(above, "auto_wrap_policy"))
    kind = one_of(policy, _WRAPS) if policy is not None else _WRAPS[default]
    names = _names(above, "min_num_params")
    size = peek(settings, *names)
    if kind == "size" and size is not None and size.whole(0) > 0:
        settings.get(*names)
        job.draft.take("parallel.wrap", size.whole(0), size)
        return
    if policy is not None and kind == "size" and size is None and smallest:
        job.draft.take("parallel.wrap", smallest, policy, "the tool's default of min_num_params")
        return
    unit = "block" if kind == "block" else WHOLE
    text = "" if kind == "block" else "one unit: the whole model is gathered at once"
    if policy is not None:
        job.draft.take("parallel.wrap", unit, policy, text)
    elif kind != "block":
        job.draft.assume("parallel.wrap", unit, f"no auto_wrap_policy, accelerate's default is NO_WRAP: {text}")


def settle_fsdp(job: Job) -> None:
    """Strategy, shards and accumulation of a job under FSDP."""
    draft, said = job.draft, job.said("engine")
    if said is not None:
        draft.take("parallel.strategy", "fsdp", said)
    draft.assume("parallel.reduce_every_micro_step", False,
                 "the Trainer and accelerate accumulate under no_sync (accelerator.py; FSDP 2: "
                 "set_requires_gradient_sync)")
    factor, by = job.of("sharding_factor"), job.said("sharding_factor")
    if factor is None or by is None or draft.has("parallel.sharding_factor"):
        return
    if factor != "node":
        draft.take("parallel.sharding_factor", factor, by)
        return
    draft.take_later("parallel.sharding_factor", lambda ranks: ranks.of_node, by, "shards stay inside a node")


def read_mesh(settings: Settings, above: str, job: Job, spread: int = 1) -> None:
    """accelerate's ParallelismConfig (parallelism_config.py): sizes of its mesh.

    Args:
        spread: ranks over which experts are spread, which share the shards too (axolotl's patch of that file).
    """
    mapping_at(settings, above)
    start = (f"{above}.{above}_", f"{above}.")
    sizes: dict[str, Said] = {}
    for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size"):
        said = settings.get(*(f"{one}{name}" for one in start))
        if said is not None and said.whole() > 1:
            sizes[name] = said
    for name, path in (("tp_size", "parallel.tensor"), ("cp_size", "parallel.context"),
                       ("sp_size", "parallel.context")):
        if name in sizes:
            job.draft.take(path, sizes[name].whole(), sizes[name])
    if "sp_size" in sizes:
        job.draft.take("parallel.context_exchange", "all-to-all", sizes["sp_size"], "DeepSpeed's Ulysses")
    if "dp_shard_size" in sizes and "dp_replicate_size" in sizes:
        # The shards' mesh is dp_shard and cp flattened (ParallelismConfig.dp_shard_cp_dim_names).
        context = sizes["cp_size"].whole() if "cp_size" in sizes else 1
        said = sizes["dp_shard_size"]
        over = said.whole() * context * spread
        job.draft.take("parallel.sharding_factor", over, said, "a replica's GPUs share the shards")
    way = settings.get(*(f"{one}cp_comm_strategy" for one in start))
    if "cp_size" in sizes and way is not None:
        job.draft.take("parallel.context_exchange", one_of(way, {"allgather": "all-gather", "alltoall": "ring"}), way)
    elif "cp_size" in sizes:
        job.draft.assume("parallel.context_exchange", "all-gather", "accelerate's default of cp_comm_strategy")
    settings.idle(*(f"{one}{name}" for one in start for name in ("cp_backend", "sp_backend", "sp_seq_length*",
                                                                 "sp_attn_implementation", "*_handler*")))
