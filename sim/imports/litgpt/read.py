"""LitGPT's YAML files (its config_hub, `litgpt finetune --config`, `litgpt pretrain --config`) as scenarios.

Names, defaults and what they do: litgpt 0.5.13 finetune/full.py, finetune/lora.py, pretrain.py (setup), args.py,
utils.py (get_default_supported_precision, instantiate_bnb_optimizer); lightning 2.6.6 fabric/plugins/precision/fsdp.py
(mixed_precision_config). Which command a file is for follows from its settings: LoRA's, or a model by name to pretrain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sim.errors import Fault, UserError
from sim.imports.draft import Draft, Ranks
from sim.imports.settings import Said, Settings, one_of, switch
from sim.scenario.named.hub import preset_of

#: LoRA's switches -> matrices, and whether each is on where a file says nothing.
_MATRICES = {"lora_query": ("query", True), "lora_key": ("key", False), "lora_value": ("value", True),
             "lora_projection": ("projection", False), "lora_mlp": ("mlp", False), "lora_head": ("head", False)}
_BASES = {"bnb.nf4": "nf4", "bnb.nf4_dq": "nf4-dq", "bnb.fp4": "nf4", "bnb.fp4_dq": "nf4-dq",
          "bnb.int8_training": "int8"}
#: precision -> dtypes on one GPU or copies of FSDP 2, under FSDP 1, and of frozen weights.
_PRECISIONS = {
    "bf16_true": ("pure-bf16", "pure-bf16", "bf16"), "bf16_mixed": ("amp-bf16", "fsdp-bf16", "fp32"),
    "16_true": ("pure-fp16", "pure-fp16", "fp16"), "16_mixed": ("amp-fp16", "fsdp-fp16", "fp32"),
    "32_true": ("fp32", "fp32", "fp32"),
}
_SIZES = {"n_layer": "layers", "n_head": "heads", "n_query_groups": "kv_heads", "n_embd": "hidden",
          "intermediate_size": "ffn", "head_size": "head_dim", "padded_vocab_size": "vocab"}
_OPTIMIZERS = {"adamw": "adamw", "torch.optim.adamw": "adamw", "adam": "adam", "torch.optim.adam": "adam",
               "sgd": "sgd", "torch.optim.sgd": "sgd", "bitsandbytes.optim.adamw8bit": "adamw-8bit",
               "bitsandbytes.optim.pagedadamw8bit": "adamw-8bit"}
_IDLE = ("out_dir", "data*", "train.*", "eval.*", "log.*", "logger_name", "seed", "access_token", "resume",
         "tokenizer_dir", "initial_checkpoint_dir", "lora_alpha", "optimizer.init_args.*", "model_config.name",
         "model_config.hf_config*", "model_config.block_size", "model_config.vocab_size", "model_config.rope_*",
         "model_config.rotary_percentage", "model_config.norm_eps", "model_config.padding_multiple", "ops")


@dataclass(frozen=True, slots=True)
class _Command:
    """What one of LitGPT's commands does where a file says nothing: sequences of a step and of a micro-batch."""

    name: str
    whole: int
    micro: int

    @property
    def pretrains(self) -> bool:
        return self.name == "pretrain"

    @property
    def tunes(self) -> bool:
        return self.name == "finetune_lora"


def read(files: Sequence[str], draft: Draft) -> None:
    """Takes what one of LitGPT's files says, and a model's config.json beside it.

    Raises:
        UserError: a file that cannot be read, or a value that cannot be.
    """
    for settings in draft.opened(files):
        _job(settings, draft)
        draft.close(settings)


def _job(settings: Settings, draft: Draft) -> None:
    names = ("checkpoint_dir", "model_name", "lora_r", "train.micro_batch_size", "train.global_batch_size", "precision")
    if not any(settings.has(name) for name in names):
        raise UserError(Fault(f"holds none of LitGPT's settings ({', '.join(names[:3])}, …)", "", settings.file, 1))
    command = (_Command("pretrain", 512, 4) if settings.has("model_name") or settings.has("model_config") else
               _Command("finetune_lora", 16, 1) if any(str(name).startswith("lora_") for name in settings.data) else
               _Command("finetune_full", 16, 1))
    why = f"litgpt {command.name}, by the file's settings"
    quantised = settings.get("quantize")
    if quantised is not None and not command.tunes:
        raise quantised.wrong("lora_r beside it: LLaMA adapters (litgpt finetune_adapter) are not simulated")
    _model(settings, draft)
    many = _devices(settings, draft, command)
    _sharding(draft, command, many, why)
    _precision(settings, draft, command, many, quantised)
    _batch(settings, draft, command, many)
    _optimizer(settings, draft, command, quantised)
    draft.assume("software.framework", "pytorch", "Lightning Fabric")
    draft.assume("software.modules", "plain", "LitGPT's own modules")
    draft.assume("training.attention", "flash", "LitGPT calls scaled_dot_product_attention")
    if command.pretrains:
        draft.assume("software.compile", True, f"{why}: torch.compile(model)")
    settings.idle(*_IDLE)


def _model(settings: Settings, draft: Draft) -> None:
    said = settings.get("model_config.name") if settings.has("model_config") else None
    said = said or settings.get("checkpoint_dir", "model_name")
    sizes = {ours: one for theirs, ours in _SIZES.items()
             if (one := settings.get(f"model_config.{theirs}")) is not None}
    for field, one in sizes.items():
        draft.take(f"model.{field}", one.whole(), one)
    _form(settings, draft, bool(sizes))
    tied = switch(settings, "train.tie_embeddings")
    if tied is not None:
        draft.take("model.tied_embeddings", True, tied)
    if said is None or draft.has("model.hf") or "layers" in sizes:
        return
    known = preset_of(str(said.value))
    if known is not None:
        draft.take("model.preset", known, said, "by its name; its config.json says more")
    else:
        draft.leave(said, "its sizes are not known here: give its config.json too, or --set model.preset=NAME")


def _form(settings: Settings, draft: Draft, sized: bool) -> None:
    """model_config: Config's fields, whose defaults are GPT-NeoX's (config.py)."""
    kind, norm = settings.get("model_config.mlp_class_name"), settings.get("model_config.norm_class_name")
    bias, beside = settings.get("model_config.bias"), settings.get("model_config.parallel_residual")
    if kind is not None:
        draft.take("model.gated_mlp", kind.word() in ("llamamlp", "gemmamlp"), kind)
        draft.assume("model.activation", "silu" if kind.word() == "llamamlp" else "gelu", kind.name)
    if norm is not None:
        draft.take("model.norm", "rmsnorm" if norm.word() == "rmsnorm" else "layernorm", norm)
    if bias is not None:
        draft.take("model.bias", bias.flag(), bias)
    if beside is not None:
        draft.take("model.parallel_block", beside.flag(), beside)
    elif sized:
        draft.assume("model.parallel_block", True, "Config's default of parallel_residual")
    if sized:
        draft.assume("model.positions", "rotary", "LitGPT's models have rotary positions")
        draft.assume("model.tied_embeddings", False, "Config has a head of its own")


def _devices(settings: Settings, draft: Draft, command: _Command) -> bool:
    """GPUs; whether there are several."""
    each, nodes = settings.get("devices"), settings.get("num_nodes")
    auto = each is not None and str(each.value).lower() in ("auto", "-1")
    if each is not None and not auto:
        each.whole()
        draft.per_node = each
    elif each is None and not command.pretrains:
        draft.assume("cluster.gpus_per_node", 1, "LitGPT's default of devices")
    if nodes is not None:
        nodes.whole()
        draft.nodes = nodes
    elif not auto:
        draft.assume("cluster.nodes", 1, "LitGPT's default of num_nodes")
    one = (each is None and not command.pretrains) or (each is not None and not auto and each.whole() == 1)
    return not one or (nodes is not None and nodes.whole() > 1)


def _sharding(draft: Draft, command: _Command, many: bool, why: str) -> None:
    draft.assume("parallel.strategy", "fsdp" if many else "none", why)
    if not many:
        draft.assume("training.recompute", "none", f"{why}: one GPU")
        return
    draft.assume("software.fsdp", 2 if command.tunes else 1,
                 "ModelParallelStrategy with fully_shard" if command.tunes else "FSDPStrategy")
    draft.assume("parallel.reduce_every_micro_step", False, "no_backward_sync while it accumulates")
    draft.assume("training.recompute", "none" if command.pretrains else "full",
                 "no activation_checkpointing_policy" if command.pretrains else "checkpoints of every Block")
    if command.pretrains:
        draft.take_later("parallel.sharding_factor", _of_node, Said("", "litgpt pretrain", "HYBRID_SHARD"),
                         "shards stay inside a node")


def _of_node(ranks: Ranks) -> int:
    return ranks.of_node


def _precision(settings: Settings, draft: Draft, command: _Command, many: bool, quantised: Said | None) -> None:
    said = settings.get("precision")
    alone, sharded, stored = one_of(said, _PRECISIONS) if said is not None else _PRECISIONS["bf16_mixed"]
    wide = quantised is not None and alone.startswith("pure")
    name = sharded if many and not command.tunes else alone
    asked: Any = {"name": name, "optimizer": "fp32"} if wide else name
    text = "PagedAdamW keeps 32-bit states beside quantised weights" if wide else ""
    if said is not None:
        draft.take("training.precision", asked, said, text)
    else:
        draft.assume("training.precision", asked, "LitGPT's default of precision where a GPU has bf16: bf16-mixed")
    if not command.tunes:
        return
    if quantised is not None and (many or alone.startswith("amp")):
        raise quantised.wrong("one GPU and a precision that is not mixed: LitGPT refuses others")
    source = quantised or settings.get("lora_r")
    rank, drop = settings.get("lora_r"), settings.get("lora_dropout")
    if quantised is not None:
        draft.take("training.finetune.method", "qlora", quantised)
        draft.take("training.finetune.base", one_of(quantised, _BASES), quantised)
        if "fp4" in quantised.word().replace("nf4", ""):
            draft.leave(quantised, "simulated as nf4: as many bits, another table")
    else:
        draft.assume("training.finetune.method", "lora", "the file's lora_ settings")
        draft.assume("training.finetune.base", stored, "frozen weights have the dtype of precision")
    targets = []
    for setting, (matrix, usual) in _MATRICES.items():
        one = settings.get(setting)
        if one.flag() if one is not None else usual:
            targets.append(matrix)
            source = source or one
    if rank is not None:
        draft.take("training.finetune.rank", rank.whole(), rank)
    if drop is not None:
        draft.take("training.finetune.dropout", drop.number(), drop)
    draft.assume("training.finetune.rank", 8, "LitGPT's default of lora_r")
    draft.assume("training.finetune.dropout", 0.05, "LitGPT's default of lora_dropout")
    draft.take("training.finetune.targets", targets, source or Said(settings.file, "lora_query", True))


def _batch(settings: Settings, draft: Draft, command: _Command, many: bool) -> None:
    del many
    whole, micro = settings.get("train.global_batch_size"), settings.get("train.micro_batch_size")
    length = settings.get("train.max_seq_length")
    for said, path, usual, name in ((whole, "training.global_batch", command.whole, "global_batch_size"),
                                    (micro, "training.micro_batch", command.micro, "micro_batch_size")):
        if said is not None:
            draft.take(path, said.whole(), said)
        else:
            draft.assume(path, usual, f"default of {name} of litgpt {command.name}")
    if length is not None:
        draft.take("training.sequence", length.whole(), length, "" if command.pretrains else
                   "an upper bound: a batch is as long as its longest sequence")


def _optimizer(settings: Settings, draft: Draft, command: _Command, quantised: Said | None) -> None:
    said = settings.get("optimizer.class_path", "optimizer")
    if quantised is not None:
        draft.take("training.optimizer", "adamw", said or quantised, "PagedAdamW beside quantised weights")
        draft.take("parallel.offload.optimizer", "paged", said or quantised)
        return
    if said is not None and isinstance(said.value, Mapping):
        raise said.wrong("a name, or class_path and init_args")
    name = one_of(said, _OPTIMIZERS) if said is not None else "adamw"
    momentum = settings.get("optimizer.init_args.momentum")
    if said is not None:
        moving = name == "sgd" and momentum is not None and momentum.number() > 0
        draft.take("training.optimizer", "sgd-momentum" if moving else name, said)
        if "paged" in said.word():
            draft.take("parallel.offload.optimizer", "paged", said)
    else:
        draft.assume("training.optimizer", name, "LitGPT's default of optimizer")
    if name != "adamw-8bit":
        draft.assume("software.optimizer_kernel", "fused" if command.pretrains else "foreach",
                     "pretrain.py asks for fused" if command.pretrains else "torch's own default")
