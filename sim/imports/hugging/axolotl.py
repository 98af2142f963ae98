"""axolotl's YAML: the Trainer's arguments under names of its own, with other defaults, and what it adds to them.

Source: axolotl 0.19 utils/schemas (config.py, training.py, peft.py, fsdp.py, validation.py, enums.py: names and
defaults), utils/config/__init__.py (normalize_config, resolve_dtype), core/builders/base.py (the Trainer's arguments),
utils/trainer.py (setup_fsdp_envs), utils/distributed.py (_get_parallel_config_kwargs), loaders/model.py.
"""

from __future__ import annotations

from sim.imports.allocator import EXPANDABLE
from sim.imports.hugging.adapters import LINEAR
from sim.imports.hugging.axolotl_names import IDLE, LEFT
from sim.imports.hugging.facts import FP8_GATHER, Job, inner, renamed, set_apart
from sim.imports.hugging.flash import take_flash
from sim.imports.hugging.fsdp import read_fsdp, read_mesh
from sim.imports.hugging.liger import read_axolotls
from sim.imports.hugging.trainer import read_arguments
from sim.imports.settings import Said, Settings, mapping_at, one_of, peek, switch, take_whole, word_of

#: Any of these makes a file axolotl's.
MARKS = ("base_model",)
_MESH = "parallelism_config"
_VERSIONS = ("fsdp_version", "fsdp_config.fsdp_version", "fsdp_config.version")
#: axolotl's name -> the Trainer's, accelerate's or peft's.
_NAMES = {
    "base_model": "model_name_or_path", "optimizer": "optim", "optim": "optim of another",
    "peft_layers_to_transform": "lora_layers_to_transform", "peft_layer_replication": "lora_layer_replication",
    "peft_trainable_token_indices": "lora_trainable_token_indices", "peft_use_dora": "use_dora",
    "peft_use_rslora": "use_rslora",
    **{name: f"{_MESH}.{name}" for name in ("dp_shard_size", "dp_replicate_size")},
    "tensor_parallel_size": f"{_MESH}.tp_size", "context_parallel_size": f"{_MESH}.cp_size",
    "sequence_parallel_degree": f"{_MESH}.cp_size of old",
}
_ATTENTION = {**dict.fromkeys(("flash_attention_2", "flash_attention_3", "flash_attention_4",
                               "flash_attention_torch", "flex_attention", "xformers"), "flash"),
              "eager": "eager", "sdpa": "sdpa"}
#: Switches of attention of before attn_implementation (LEGACY_ATTN_FLAG_TO_IMPL), in their order.
_OLD_ATTENTION = {"xformers_attention": "flash", "sage_attention": "flash", "flex_attention": "flash",
                  "flash_attention": "flash", "sdp_attention": "sdpa", "eager_attention": "eager"}
_EXCHANGES = {"varlen_llama3": "all-gather", "batch_ring": "ring"}
#: Losses of which one may be on (check_cross_entropy_conflicts); all compute logits in chunks.
_LOSSES = ("cut_cross_entropy", "chunked_cross_entropy", "liger_fused_linear_cross_entropy")
_CUT = "cut_cross_entropy"
#: Optimizers of its own (core/builders/base.py) -> the nearest of ours, and what it is not.
_OPTIMIZERS = {
    **dict.fromkeys(("optimi_adamw", "adopt_adamw", "adamc", "flash_adamw"), ("adamw", "states are taken for AdamW's")),
    "flash_adam": ("adam", "states are taken for Adam's"), "ao_adamw_8bit": ("adamw-8bit", ""),
    "ao_adamw_fp8": ("adamw-8bit", "states are as large, scaled otherwise"),
    "ao_adamw_4bit": ("adamw-8bit", "its states are half as large"),
    "q_galore_adamw8bit": ("adamw-8bit", "its low-rank states are not simulated"),
    "came_pytorch": ("adafactor", "its confidence matrix is not counted"), "flash_sgd": ("sgd", ""),
    "flash_sgdw": ("sgd", ""), "flash_lion": ("sgd-momentum", "one state per parameter, as here"),
    "muon": ("muon", "PyTorch's Muon is counted"),
    **dict.fromkeys(("dion", "sinkgd", "polora"), ("muon", "its own orthogonalisation is not simulated")),
}
_LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
#: What the Trainer's reader would read otherwise.
_OWN = ("bf16", "bfloat16", "fp16", "float16", "tf32", "load_in_4bit", "load_in_8bit", "gradient_checkpointing",
        "attn_implementation", "activation_offloading", "fsdp", "fsdp_config", "flash_attention")


def view(settings: Settings) -> Settings:
    """A file under the names that the Trainer's reader asks for."""
    return renamed(settings, _NAMES)


def read_axolotl_yaml(settings: Settings, job: Job) -> None:
    """All of a file (a `view` of it); what it leaves out is assumed as axolotl has it."""
    mapping_at(settings, "gradient_checkpointing_kwargs", "bnb_config_kwargs", "overrides_of_model_config", _MESH)
    job.tool = "axolotl"
    draft = job.draft
    _dtypes(settings, job)
    _batch(settings, job)
    adapted = _adapter(settings, job)
    _sharding(settings, job)
    _mesh(settings, job)
    _recompute(settings, job, adapted)
    _attention(settings, job, adapted)
    _loss(settings, job)
    if switch(settings, "model_quantization_config_kwargs.dequantize") is not None:  # weights are those of `bf16` then
        settings.get("model_quantization_config")
        left = {name: why for name, why in LEFT.items() if name != "model_quantization_config"}
    else:
        left = LEFT
    for name, why in left.items():
        said = settings.get(name) if settings.has(name) else None
        if said is not None and said.value not in (False, "", 0, [], {}):
            draft.leave(said, why)
            take_whole(settings, name)
    apart = [*_OWN, "optim"] if _optimizer(settings, job) else list(_OWN)
    if adapted and switch(settings, "lora_target_linear") is not None:
        apart.append("lora_target_modules")
    compiled = peek(settings, "torch_compile")
    if compiled is not None and compiled.value == "auto":
        draft.take("software.compile", True, settings.get("torch_compile") or compiled, "on with torch 2.5.1 and later")
        apart.append("torch_compile")
    for name in ("gpu_count", "node_count"):  # of cloud files
        if (said := settings.get(name)) is not None:
            draft.leave(said, "--nodes N and --set cluster.gpus_per_node=N say it")
    if (workers := settings.get("ray_num_workers")) is not None and switch(settings, "use_ray") is not None:
        workers.whole()
        draft.gpus = workers
    settings.idle(*IDLE)
    read_arguments(set_apart(settings, job, apart), job)
    draft.assume("training.micro_batch", 1, "axolotl's default of micro_batch_size")
    draft.assume("training.micro_steps", 1, "axolotl's default of gradient_accumulation_steps")
    draft.assume("training.recompute", "none", "axolotl's default of gradient_checkpointing")
    if not draft.before(2024):  # which needs torch 2.2
        draft.assume(EXPANDABLE, True, "axolotl sets PYTORCH_CUDA_ALLOC_CONF itself (0.19.0 utils/__init__.py; before "
                     "torch 2.9 with roundup_power2_divisions too, which is not simulated)")


def _dtypes(settings: Settings, job: Job) -> None:
    """Autocast, and the dtype weights are loaded in (resolve_dtype): bf16 "auto", the default, is on where a GPU has
    it; "full" loads weights in it and casts nothing."""
    said = settings.get("bf16", "bfloat16") or job.default(settings, "bf16", "auto")
    fp16 = switch(settings, "fp16", "float16")
    full, auto = (str(said.value).lower() == word for word in ("full", "auto"))
    on = full or auto or said.flag()
    if fp16 is not None and on and not auto:
        job.draft.leave(fp16, "bf16 goes over it")
        fp16 = None
    if fp16 is not None:
        job.keep("amp", "fp16", fp16)
        job.keep("dtype", "fp16", fp16)
    elif on:
        job.keep("dtype", "bf16", said)
        job.facts["amp off" if full else "amp"] = ("bf16", said)
    else:
        job.facts["amp off"] = ("no", said)
        eight = switch(settings, "load_in_8bit")
        job.keep("dtype", "fp32" if eight is None else "fp16", eight or said)
    if (narrow := switch(settings, "fp8")) is not None:
        job.facts["amp"] = ("fp8", narrow)
        recipe = settings.get("fp8_config.recipe")
        if recipe is not None and recipe.word() != "tensorwise":
            job.draft.leave(recipe, "scales of rows are counted as one of a whole tensor")
        if (gather := switch(settings, FP8_GATHER)) is not None:
            job.keep("fp8 gather", True, gather)
    wide = settings.get("tf32") or job.default(settings, "tf32", "auto")
    if wide.value == "auto" or wide.flag():
        job.keep("tf32", True, wide)


def _batch(settings: Settings, job: Job) -> None:
    """Tokens of a sequence, and the batch size that nothing reads (its steps have a default of 1)."""
    draft, whole = job.draft, settings.get("batch_size")
    if whole is not None and settings.has("gradient_accumulation_steps"):
        raise whole.wrong("nothing beside gradient_accumulation_steps: axolotl refuses both")
    if whole is not None:
        draft.leave(whole, "gradient_accumulation_steps goes before it, whose default is 1")
    draft.assume("training.sequence", 512, "axolotl's default of sequence_len")
    if (padded := switch(settings, "pad_to_sequence_len")) is not None:
        job.keep("padded", True, padded)


def _adapter(settings: Settings, job: Job) -> bool:
    """LoRA's matrices and quantised weights; whether anything but all weights is trained."""
    draft, kind = job.draft, word_of(settings, "adapter")
    four, eight = switch(settings, "load_in_4bit"), switch(settings, "load_in_8bit")
    for said in (four, eight):
        if said is not None and kind is None:
            raise said.wrong("false without an adapter: axolotl refuses it")
    if four is not None and eight is not None:  # transformers' BitsAndBytesConfig, and axolotl of qlora
        raise eight.wrong("false beside load_in_4bit")
    quantised = kind is not None and kind.word() == "qlora"
    if quantised and kind is not None and four is None:
        raise kind.wrong("load_in_4bit beside qlora: axolotl refuses it without")
    if four is not None and quantised:  # bnb_config of loaders/model.py
        options = settings.get("bnb_config_kwargs.bnb_4bit_use_double_quant")
        job.keep("base", "nf4" if options is not None and not options.flag() else "nf4-dq", four)
    elif four is not None:
        draft.leave(four, "axolotl quantises to 4 bits with adapter: qlora alone")
    elif eight is not None:
        job.keep("base", "int8", eight)
    if kind is not None and "dtype" in job.facts:
        # _configure_embedding_dtypes: back from fp32 beside LoRA; sharded 4-bit models were never cast
        job.facts["unquantised"] = job.facts["dtype"]
    if kind is None:
        settings.idle("lora_*")
        return False
    wide = settings.get("peft_autocast_adapter_dtype")
    if wide is not None and not wide.flag():
        draft.leave(wide, "adapters are counted in fp32, as peft makes them by default")
    if (linear := switch(settings, "lora_target_linear")) is not None:
        draft.take("training.finetune.targets", list(LINEAR), linear)
        settings.idle("lora_target_modules")
    draft.assume("training.finetune.dropout", 0.0, "axolotl's default of lora_dropout")
    asked = [said for name in _LORA_KERNELS if (said := switch(settings, name)) is not None]
    said_of = asked[0] if asked else kind
    # check_auto_enable_lora_kernels, on several GPUs
    without = eight is not None or any(settings.has(one) for one in ("rl", *_LORA_KERNELS)) or any(
        switch(settings, one) is not None for one in ("trust_remote_code", "nvfp4_merge_aware"))
    old = bool(peek(settings, "fsdp_config")) and _version(settings) != 2
    if asked or not (without or old):
        draft.leave(said_of, "fused kernels of LoRA"
                    f"{'' if asked else ', which axolotl 0.19 turns on by itself,'} are not simulated")
    for extra in asked[1:]:
        draft.leave(extra, "as above")
    settings.idle(*_LORA_KERNELS)
    return True


def _version(settings: Settings) -> int:
    """FSDP's version. Raises UserError where there is no such."""
    number = peek(settings, *_VERSIONS)
    if number is not None and number.whole() > 2:
        raise number.wrong("1 or 2")
    return number.whole() if number is not None else 1


def _sharding(settings: Settings, job: Job) -> None:
    """FSDP: version 1 unless said (check_fsdp_version_in_fsdp_config), with the words of `fsdp` or without."""
    words, config = peek(settings, "fsdp"), peek(settings, "fsdp_config")
    said = words if words is not None and words.value not in (False, [], "") else config
    if said is None or said.value in (False, [], "", {}):
        return
    if settings.has("deepspeed"):
        raise said.wrong("nothing beside deepspeed: axolotl refuses both")
    said = settings.get("fsdp") if said is words else said
    settings.get("fsdp_version")
    number, version = peek(settings, *_VERSIONS), _version(settings)
    assert said is not None
    job.keep("engine", "fsdp", said)
    if number is not None:
        job.draft.take("software.fsdp", version, number)
    else:
        job.draft.assume("software.fsdp", 1, "axolotl's default of fsdp_version")
    part = inner(settings, "fsdp_config") if config is not None else None
    if part is not None:
        job.files.append(part)
    plain = said.value is True or said is config or version > 1
    read_fsdp(part or Settings(settings.file, {}), "", job, version=version, wrap="transformer_based_wrap",
              legacy=None if plain else said)


def _mesh(settings: Settings, job: Job) -> None:
    """Degrees of the device mesh: what shards leave of the GPUs replicates, what replicas leave shards."""
    draft = job.draft
    old = settings.get(f"{_MESH}.cp_size of old")
    if old is not None and old.whole() > 1:
        draft.take("parallel.context", old.whole(), old)
    context = peek(settings, f"{_MESH}.cp_size") or old
    if context is not None and context.whole() > 1:
        way = settings.get("ring_attn_func")
        packed = peek(settings, "sample_packing")
        if way is not None:
            draft.take("parallel.context_exchange", one_of(way, _EXCHANGES), way)
        elif packed is not None and packed.value is True:
            draft.assume("parallel.context_exchange", "all-gather", "varlen_llama3, axolotl's default of "
                                                                    "ring_attn_func with sample_packing")
        else:
            draft.assume("parallel.context_exchange", "ring", "batch_ring, axolotl's default of ring_attn_func")
    experts = settings.get("expert_parallel_size")
    if experts is not None and experts.whole() > 1:
        draft.take("parallel.expert", experts.whole(), experts)
        draft.assume("software.dispatcher", "flex", "deep_ep, the one expert_parallel_backend there is")
    spread = experts.whole() if experts is not None else 1
    read_mesh(settings, _MESH, job, spread)
    shard, copies = peek(settings, f"{_MESH}.dp_shard_size"), peek(settings, f"{_MESH}.dp_replicate_size")
    if shard is not None and shard.whole() > 1 and job.engine != "fsdp":
        raise shard.wrong("nothing without fsdp_config: axolotl refuses it")
    many = copies.whole() if copies is not None else 1
    degrees = (peek(settings, f"{_MESH}.{name}") for name in ("tp_size", "cp_size", "cp_size of old"))
    sizes = [said.whole() for said in degrees if said is not None]
    if shard is not None and shard.whole() > 1:
        # monkeypatch/accelerate/parallelism_config.py: shards lie over ep, dp_shard and cp
        over = shard.whole() * spread * (context.whole() if context is not None else 1)
        draft.take("parallel.sharding_factor", over, shard, "what is left of the GPUs replicates")
        if many > 1:
            product = shard.whole() * many
            for size in [*sizes, spread]:
                product *= size
            draft.gpus = Said(shard.file, shard.name, product, shard.line)
    elif copies is not None and many > 1 and job.engine == "fsdp":
        job.facts.pop("sharding_factor", None)
        draft.take_later("parallel.sharding_factor", lambda ranks: ranks.shared_by(copies), copies,
                         f"what {many} replicas leave of the GPUs shares the shards")


def _recompute(settings: Settings, job: Job, adapted: bool) -> None:
    """gradient_checkpointing and where activations live: beside an adapter the offloader of TRL stands in the place of
    recomputation (loaders/model.py, _apply_activation_checkpointing)."""
    draft, said = job.draft, peek(settings, "gradient_checkpointing")
    offload = _place(settings)
    word = str(said.value).lower() if said is not None else ""
    if said is not None and word in ("offload", "offload_disk", "unsloth"):
        said = settings.get("gradient_checkpointing") or said
        offload = offload or said
        on = True
    else:
        on = said is not None and said.flag()
    if offload is not None and not on:
        raise offload.wrong("false without gradient_checkpointing: axolotl refuses it")
    entering = settings.get("gradient_checkpointing_kwargs.use_reentrant")
    if on and said is not None:
        # reentrant unless told otherwise (normalize_config), and offloads wrap blocks by a checkpoint that is not
        alone = offload is None and not any(settings.has(name) for name in ("rl", "unfrozen_parameters"))
        job.keep("reentrant", entering.flag() if entering is not None else alone, entering or said)
    sharded = draft.value("training.recompute") == "full"
    if offload is not None and said is not None:
        place = "nvme" if offload.word() in ("disk", "offload_disk") else "cpu"
        draft.take("parallel.offload.activations", place, offload)
        kept = adapted and offload.word() != "hidden_states"
        draft.take("training.recompute", "none" if kept else "full", settings.get("gradient_checkpointing") or said,
                   "activations are offloaded in its place" if kept else "")
    elif said is not None and sharded and not on:
        settings.get("gradient_checkpointing")  # FSDP's activation_checkpointing is another one
    elif said is not None:
        draft.take("training.recompute", "full" if on else "none", settings.get("gradient_checkpointing") or said)
    settings.idle("gradient_checkpointing_kwargs*")


def _place(settings: Settings) -> Said | None:
    """activation_offloading, where it is on; true stands for what is on by that word."""
    said = peek(settings, "activation_offloading")
    if said is None or said.value is False:
        return None
    said = settings.get("activation_offloading") or said
    word = "true" if said.value is True else said.word()
    if word not in ("true", "legacy", "disk", "hidden_states"):
        raise said.wrong("true, false, legacy, disk or hidden_states")
    return Said(said.file, said.name, word, said.line)


def _attention(settings: Settings, job: Job, adapted: bool) -> None:
    draft, said = job.draft, settings.get("attn_implementation")
    kernel = "flash"
    name = str(said.value).partition("@")[0].partition(":")[0].lower() if said is not None else ""
    if said is not None and name not in ("sage", "fp8") and "/" not in name:
        kernel = one_of(Said(said.file, said.name, name, said.line), _ATTENTION)
    elif said is not None and "/" not in name:
        draft.leave(said, "8-bit attention is counted in 16 bits")
    if said is None:
        for old, ours in _OLD_ATTENTION.items():
            found = switch(settings, old)
            if found is not None and said is None:
                said, kernel = found, ours
                name = ours
            if found is not None and old == "sage_attention":
                draft.leave(found, "8-bit attention is counted in 16 bits")
    if said is not None:
        draft.take("training.attention", kernel, said)
        take_flash(draft, said)
    model = peek(settings, "model_name_or_path")
    half = job.of("dtype") in ("bf16", "fp16")
    if half and not adapted and job.engine != "fsdp" and name in ("", "sdpa", "eager") and model is not None:
        # _configure_embedding_dtypes: flash-attn alone has them cast back.
        draft.leave(said or job.default(settings, "attn_implementation", "sdpa"),
                    "embeddings and norms stay in fp32 beside it; they are counted in the dtype of the other weights")


def _loss(settings: Settings, job: Job) -> None:
    draft, plugins = job.draft, peek(settings, "plugins")
    names = plugins.value if plugins is not None and isinstance(plugins.value, list) else []
    found = [said for name in _LOSSES if (said := switch(settings, name)) is not None]
    if len(found) > 1:
        raise found[1].wrong(f"false beside {found[0].name}")
    by_plugin = plugins is not None and not settings.has(_CUT) and any(_CUT in str(one) for one in names)
    said = found[0] if found else plugins if by_plugin else None
    if said is not None:
        settings.get(said.name)
    ranks = peek(settings, f"{_MESH}.tp_size")
    if said is not None and ranks is not None and ranks.whole() > 1:
        draft.leave(said, "a loss in chunks over tensor ranks is not simulated: whole logits are counted")
    elif said is not None:
        draft.take("training.chunked_loss", True, said, "" if found else "the plugin's default of cut_cross_entropy")
    read_axolotls(settings, draft)


def _optimizer(settings: Settings, job: Job) -> bool:
    """Whether it is one of axolotl's own, which is taken then."""
    said = peek(settings, "optim")
    if said is None or said.word() not in _OPTIMIZERS:
        return False
    said = settings.get("optim") or said
    ours, why = _OPTIMIZERS[said.word()]
    job.draft.take("training.optimizer", ours, said)
    if why:
        job.draft.leave(said, f"simulated as {ours}: {why}")
    return True
