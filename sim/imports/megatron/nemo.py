"""NeMo 1's YAML of GPT models (megatron_gpt_config.yaml and those of its launcher) as Megatron-LM's arguments.

NeMo 2 and Megatron-Bridge have recipes in Python, which are not read.

Source: nemo-toolkit 1.23.0 collections/nlp/models/language_modeling/megatron_base_model.py (build_transformer_config,
setup_optimization, configure_optimizers), megatron_gpt_model.py, parts/megatron_trainer_builder.py (precision); the
file's own names and defaults are recalled, as are those of Apex's distributed_fused_adam.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sim.errors import Fault, UserError
from sim.imports.draft import Draft
from sim.imports.megatron.arguments import Args, flat, is_config
from sim.imports.megatron.read import read_args
from sim.imports.settings import Said, Settings, Told, one_of, peek, read_settings, resolved, switch
from sim.scenario.fields.precisions import PRECISIONS

_PRODUCT, _NAME = re.compile(r"\$\{multiply:(.+)\}"), re.compile(r"\$\{\.?([\w.]+)\}")
#: Numbers of more digits are none of a model's sizes.
_DIGITS = 12
_HALVES = {"16": "fp16", "16_mixed": "fp16", "16_true": "fp16", "fp16": "fp16", "bf16": "bf16", "bf16_mixed": "bf16",
           "bf16_true": "bf16", "32": "fp32", "32_true": "fp32", "fp32": "fp32"}
#: NeMo's name -> Megatron's, where the value is the same.
_SAME = {
    "model.encoder_seq_length": "seq_length", "model.ub_tp_comm_overlap": "tp_comm_overlap",
    "model.activations_checkpoint_granularity": "recompute_granularity",
    "model.activations_checkpoint_method": "recompute_method",
    "model.activations_checkpoint_num_layers": "recompute_num_layers",
    "model.override_vocab_size": "padded_vocab_size", "model.use_flash_attention": "use_flash_attn",
    "model.bias_dropout_add_fusion": "bias_dropout_fusion", "trainer.num_nodes": "nnodes",
    "model.tokenizer.model": "tokenizer_model", "model.optim.overlap_grad_sync": "overlap_grad_reduce",
    "model.optim.overlap_param_sync": "overlap_param_gather",
}
_ACTIVATIONS = {
    **dict.fromkeys(("swiglu", "fast_swiglu"), "swiglu"), **dict.fromkeys(("geglu", "fast_geglu"), "quick_geglu"),
    "squared_relu": "squared_relu", "gelu": "", "openai_gelu": "openai_gelu",
}
_NORMS = {"layernorm": "LayerNorm", "layernorm1p": "LayerNorm", "low_precision_layernorm": "LayerNorm",
          "rmsnorm": "RMSNorm"}
_OPTIMIZERS = {"distributed_fused_adam": "adam", "mcore_distributed_optim": "adam", "fused_adam": "adam",
               "megatron_fused_adam": "adam", "adam": "adam", "adamw": "adam", "sgd": "sgd"}
#: Tokenizers by Megatron-LM's own names.
_LIBRARY = "megatron"
_FUSED = "model.gradient_accumulation_fusion"
_SHARDED = ("distributed_fused_adam", "mcore_distributed_optim")
_IDLE = (
    "name", "restore_from_path", "exp_manager.*", "run.*", "trainer.*", "model.data.*", "model.optim.*", "model.*path*",
    "model.nsys_profile*", "model.resume_from_checkpoint", "model.tokenizer.*", "model.precision",
    "model.gc_interval",
    "model.native_amp_*", "model.hysteresis", "model.fp16_lm_cross_entropy",
    "model.*_log_level", "model.layernorm_epsilon", "model.init_method_std", "model.use_scaled_init_method",
    "model.seed",
    "model.do_layer_norm_weight_decay", "model.grad_div_ar_fusion", "model.*timer*", "model.persist_layer_norm",
    "model.masked_softmax_fusion", "model.get_attention_mask_from_fusion", "model.ffn_dropout", "model.fp8_*",
    "model.reduce_amax", "model.use_emha", "model.seq_len_interpolation_factor", "model.normalize_attention_scores",
    "model.apply_query_key_layer_scaling", "model.use_cpu_initialization",
    "model.pre_process", "model.post_process", "model.rotary_*", "model.grad_allreduce_chunk_size_mb",
    "model.onnx_safe",
    "model.sync_batch_comm", "model.apply_rope_fusion", "model.mcore_gpt", "model.target",
    "model.transformer_engine", "model.nccl_communicator_config_path", "model.batch_p2p_comm", "model.overlap_p2p_comm",
    "model.async_grad_allreduce", "model.gradient_as_bucket_view", "model.openai_gelu", "model.megatron_legacy",
    "model.bias_activation_fusion", "model.gradient_accumulation_fusion", "hydra*",
    "cluster*", "env_vars*", "model.tp_comm_*", "model.ub_tp_comm_overlap_cfg",
)
#: Setting, the word that is counted, and what another one would be.
_OTHER_THAN = (
    ("transformer_block_type", "pre_ln", "blocks are counted with a norm in front of attention and MLP"),
    ("attention_type", "multihead", "attention is counted with as many keys and values as num_query_groups says"),
)
#: Switches that matter and that no field says -> why.
_LEFT = {
    "model.rampup_batch_size": "the batch grows at the start of a run; the full one is simulated",
    "model.fp32_residual_connection": "the residual stream is counted in the compute dtype",
    "model.headscale": "scales of heads are not simulated",
    "model.mcore_customization_config": "settings of megatron-core itself are not read here",
    "model.fp8_params": "gathers of parameters are counted in 16 bits: --set training.precision.gather=fp8",
    "model.num_micro_batches_with_partial_activation_checkpoints":
        "recomputation that differs between micro-batches is not simulated",
    "model.activations_checkpoint_layers_per_pipeline": "recomputation that differs between ranks is not simulated",
    "model.cpu_offloading": "activations of some layers in host memory are not simulated",
    "model.sharp": "sums inside the switches are software.nccl.algorithm: collnet or nvls",
    "model.peft.peft_scheme": "adapters are not read: --set training.finetune says them",
}


def read(files: Sequence[str], draft: Draft) -> None:
    """Takes what one of NeMo's files says, and a model's config.json beside it.

    Raises:
        UserError: a file that cannot be read, or a value that cannot be.
    """
    found = []
    for file in files:
        settings = read_settings(file)
        found.append(settings if is_config(settings) else _translated(settings, draft))
    draft.assume("software.year", 2024, "NeMo 1's last containers are of 2024")
    read_args(Args(found, draft), draft)


def _translated(settings: Settings, draft: Draft) -> Settings:
    """Megatron-LM's arguments of a file, which tell NeMo's names."""
    settings = _computed(flat(resolved(settings)))
    if not any(settings.has(name) for name in ("model.num_layers", "model.micro_batch_size")):
        raise UserError(Fault("holds none of NeMo 1's settings of a GPT model, such as model.num_layers", "",
                              settings.file, 1, "recipes of NeMo 2 are Python, which is not read"))
    names: dict[str, tuple[str, Any]] = {}

    def put(said: Said | None, name: str, value: Any) -> None:
        if said is not None:
            names[name] = (said.name, value)

    for theirs, ours in _SAME.items():
        if (said := settings.get(theirs)) is not None:
            put(said, ours, said.value)
    _model(settings, draft, put)
    longest = settings.get("model.data.train_ds.max_seq_length")
    if longest is not None and not settings.has("model.encoder_seq_length"):  # of finetuning
        put(longest, "seq_length", longest.value)
    _optimizer(settings, draft, put)
    _precision(settings, draft, put)
    _machine(settings, draft, put)
    _pipeline(settings, draft, put)
    _accumulation(settings, draft)
    if (said := switch(settings, "model.fsdp")) is not None:
        raise said.wrong("false: NeMo's FSDP is not read")
    if (said := switch(settings, "model.data.train_ds.packed_sequence")) is not None:
        draft.packs(said)
    for pattern, why in _LEFT.items():
        for key in settings.data:
            said = settings.get(key) if key == pattern or key.startswith(f"{pattern}.") else None
            if said is not None and said.value not in (False, "", "null"):
                draft.leave(said, why)
    settings.idle(*_IDLE)
    moved = {theirs for theirs, _ in names.values()}
    unknown = {said.name for said, idle in settings.rest() if not idle} - moved
    draft.close(replace(settings, data={key: value for key, value in settings.data.items()
                                        if key not in moved | unknown}))
    data = {key: value for key, value in settings.data.items() if key in unknown}
    lines = {name: settings.line(theirs) for name, (theirs, _) in names.items()}
    return Told(settings.file, {**data, **{name: value for name, (_, value) in names.items()}},
                {**settings.lines, **lines}, tell=lambda name: names[name][0] if name in names else name)


def _computed(settings: Settings) -> Settings:
    """The same, the products of the launcher's resolver (`${multiply:4, ${.hidden_size}}`) worked out."""
    def factor(text: str, above: str) -> Any:
        name = _NAME.fullmatch(text.strip())
        if name is None:
            return text.strip()
        return settings.data.get(f"{above}.{name[1]}" if text.strip().startswith("${.") else name[1])

    data = dict(settings.data)
    for key, value in settings.data.items():
        product = _PRODUCT.fullmatch(value.strip()) if isinstance(value, str) else None
        parts = [factor(one, key.rpartition(".")[0]) for one in product[1].split(",")] if product is not None else []
        numbers = [int(str(one)) for one in parts if str(one).isdecimal() and len(str(one)) < _DIGITS]
        if parts and len(numbers) == len(parts):
            data[key] = math.prod(numbers)
    return replace(settings, data=data)


Put = Callable[[Said | None, str, Any], None]


def _model(settings: Settings, draft: Draft, put: Put) -> None:
    norm, form = settings.get("model.normalization"), settings.get("model.activation")
    if norm is not None:
        put(norm, "normalization", one_of(norm, _NORMS))
    if form is not None and (switched := one_of(form, _ACTIVATIONS)):
        put(form, switched, True)
    bias = settings.get("model.bias")
    if bias is not None and not bias.flag():
        put(bias, "disable_bias_linear", True)
    tied = settings.get("model.share_embeddings_and_output_weights")
    put(tied, "share_embeddings_and_output_weights", tied is not None and tied.flag())
    if (old := switch(settings, "model.openai_gelu")) is not None:
        put(old, "openai_gelu", True)
    for name, usual, why in _OTHER_THAN:
        if (said := settings.get(f"model.{name}")) is not None and said.word() != usual:
            draft.leave(said, why)
    width = settings.get("model.hidden_size")
    put(width, "hidden_size", width.value if width is not None else None)
    if width is not None and not settings.has("model.ffn_hidden_size"):
        draft.assume("model.ffn", 4 * width.whole(), "ffn_hidden_size of TransformerConfig: 4 x hidden, gated or not")
    fused = settings.get("model.bias_activation_fusion")
    if fused is not None and not fused.flag():
        put(fused, "bias_gelu_fusion", False)
    kind, library = settings.get("model.tokenizer.type"), settings.get("model.tokenizer.library")
    if kind is not None and library is not None and library.word() == _LIBRARY:
        put(kind, "tokenizer_type", kind.value)
    elif kind is not None:
        put(kind, "tokenizer_name_or_path", kind.value)
    engine, core = switch(settings, "model.transformer_engine"), switch(settings, "model.mcore_gpt")
    whose = engine or core
    put(whose or settings.get("model.transformer_engine", "model.mcore_gpt"), "transformer_impl",
        "local" if whose is None else "transformer_engine")


def _optimizer(settings: Settings, draft: Draft, put: Put) -> None:
    """distributed_fused_adam shares states out and overlaps with backward unless told otherwise; the others reduce
    behind it beside pipelines, sequence parallelism or fused accumulation (configure_optimizers)."""
    said = settings.get("model.optim.name")
    if said is None:
        return
    put(said, "optimizer", one_of(said, _OPTIMIZERS))
    if said.word() in _SHARDED:
        draft.take("parallel.strategy", "zero1", said)
        draft.assume("parallel.overlap", True, "overlap_grad_sync of distributed_fused_adam")
        gathers = peek(settings, "model.optim.overlap_param_sync")
        if not settings.has("model.optim.overlap_grad_sync") and (gathers is None or not gathers.flag()):
            draft.leave(gathers or Said(settings.file, "model.optim.overlap_param_sync (default)", False),
                        "gathers of parameters are counted as overlapped")
        if (size := settings.get("model.optim.bucket_cap_mb")) is not None and size.number() > 0:
            draft.take("parallel.bucket_mb", size.number(), size)
        draft.leave(said, "masters are counted in fp32, of which it keeps the remainders to 16-bit parameters alone")
        narrow = settings.get("model.optim.grad_sync_dtype")
        if narrow is not None and narrow.word() in ("bf16", "bfloat16"):
            put(narrow, "grad_reduce_in_bf16", True)
        return
    behind = [switch(settings, f"model.{name}") for name in ("sequence_parallel", "gradient_accumulation_fusion")]
    stages, off = settings.get("model.pipeline_model_parallel_size"), settings.get("model.async_grad_allreduce")
    whole = switch(settings, "model.megatron_amp_O2")
    alone = (stages is None or stages.whole() == 1) and not any(behind) and (off is None or off.flag()) and whole
    for name, one in zip(("sequence_parallel", "pipeline_model_parallel_size"), (behind[0], stages), strict=True):
        put(one, name, one.value if one is not None else None)
    draft.assume("parallel.overlap", bool(alone), "async_grad_allreduce"
                 + ("" if alone else ", which is off without megatron_amp_O2, and beside pipelines, sequence "
                    "parallelism and fused accumulation"))


def _pipeline(settings: Settings, draft: Draft, put: Put) -> None:
    """Transfers beside compute: ModelParallelConfig's own default is off, where Megatron-LM's arguments ask for it."""
    chunks = settings.get("model.virtual_pipeline_model_parallel_size")
    beside = peek(settings, "model.overlap_p2p_comm")
    put(chunks, "virtual_pipeline_model_parallel_size", chunks.value if chunks is not None else None)
    if chunks is None or chunks.whole() == 1:
        return
    if beside is not None:
        draft.take("parallel.overlap_p2p", beside.flag(), settings.get("model.overlap_p2p_comm") or beside)
    else:
        draft.assume("parallel.overlap_p2p", False, "overlap_p2p_comm of ModelParallelConfig")


def _accumulation(settings: Settings, draft: Draft) -> None:
    """Products that add weight gradients up: where asked for, and not everywhere (_validate_and_override_config)."""
    said, whole = peek(settings, _FUSED), switch(settings, "model.megatron_amp_O2")
    name, stages = settings.get("model.optim.name"), peek(settings, "model.pipeline_model_parallel_size")
    possible = whole is not None and ((name is not None and name.word() in _SHARDED)
                                      or (stages is not None and stages.whole() > 1))
    if said is None:
        draft.assume("software.fused_accumulation", False, "NeMo's default of gradient_accumulation_fusion")
    elif not said.flag() or not possible:
        draft.take("software.fused_accumulation", False, settings.get(_FUSED) or said, "" if not said.flag() else
                   "NeMo switches it off without megatron_amp_O2, and without pipelines beside other optimizers than "
                   "distributed_fused_adam")


def _precision(settings: Settings, draft: Draft, put: Put) -> None:
    """With megatron_amp_O2 parameters are of the half type, else autocast runs over fp32 ones."""
    said = settings.get("trainer.precision", "model.precision")
    half = one_of(said, _HALVES) if said is not None else "fp32"
    whole, narrow = switch(settings, "model.megatron_amp_O2"), switch(settings, "model.fp8")
    kinds = [switch(settings, f"model.{name}") for name in ("fp8_e4m3", "fp8_hybrid")]
    if narrow is not None and not any(kinds):
        raise narrow.wrong("fp8_e4m3 or fp8_hybrid beside it: NeMo refuses it without")
    if said is None or half == "fp32":
        return
    if whole is not None:
        put(said, half, True)
        put(narrow, "fp8_format", "hybrid")
        draft.share("training.precision.parameters", half, whole)
        return
    row: Any = f"amp-{half}"
    if narrow is not None:
        row = {**PRECISIONS[row], "compute": "fp8"}
        draft.share("training.precision.compute", "fp8", narrow)
    draft.take("training.precision", row, said, "autocast over fp32 parameters, without megatron_amp_O2")


def _machine(settings: Settings, draft: Draft, put: Put) -> None:
    del draft
    devices = settings.get("trainer.devices")
    if devices is not None and devices.value not in (-1, "auto"):
        put(devices, "nproc_per_node", devices.whole())
    steps = settings.get("trainer.accumulate_grad_batches")
    if steps is not None and steps.whole() > 1:
        raise steps.wrong("1: NeMo refuses others for Megatron's models")
