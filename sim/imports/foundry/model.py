"""Models of LLM Foundry's files: MPT by its sizes, Hugging Face's by name.

Source: llm-foundry 0.22.0 models/mpt/configuration_mpt.py (MPTConfig: names and defaults), models/utils/
config_defaults.py, models/layers/ffn.py and attention.py, models/hf/hf_causal_lm.py and hf_base.py (weights in fp32).
"""

from __future__ import annotations

from sim.imports.draft import Draft
from sim.imports.hugging.adapters import read_adapter
from sim.imports.hugging.facts import Job, inner
from sim.imports.settings import Said, Settings, one_of, peek, switch, take_whole
from sim.scenario.named.hub import preset_of

#: Setting -> field, and MPTConfig's default.
_SIZES = {"d_model": ("hidden", 2048), "n_heads": ("heads", 16), "n_layers": ("layers", 24),
          "vocab_size": ("vocab", 50368)}
_KERNELS = {"flash": "flash", "triton": "flash", "flex": "flash", "torch": "eager"}
_WAYS = {"eager": "eager", "sdpa": "sdpa"}
_HEADS = ("multihead_attention", "multiquery_attention", "grouped_query_attention")
_EXPERTS = ("mb_dmoe", "torch_dmoe", "mb_moe")
#: Kinds of MLP -> gated.
_FFNS = {"mptmlp": False, "mptglu": True, "mptgeglu": True, "te_ln_mlp": False}
_ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "silu": "silu", "quick_gelu": "gelu"}
_LEFT = {
    "attn_config.clip_qkv": "clipped queries, keys and values are one small kernel a block that is not counted",
    "block_overrides": "blocks are counted as all alike: --set model.window, full_every and the like",
    "logit_scale": "is not simulated", "config_overrides": "the model is counted as its config.json has it",
    "embedding_fraction": "is not simulated", "final_logit_softcapping": "--set model.logit_softcap=true",
    "allow_embedding_resizing": "the vocabulary is counted as the model has it",
}
_IDLE = ("init_config*", "init_device", "name", "norm_eps", "use_cache", "max_seq_len", "attn_config.softmax_scale",
         "attn_config.alibi_bias_max", "attn_config.rope_*", "attn_config.fused_qkv", "attn_config.attn_temperature*",
         "attn_config.prefix_lm", "attn_config.nope", "attn_config.kv_dim", "use_pad_tok_in_ffn", "pretrained*",
         "use_auth_token", "trust_remote_code", "additional_*", "should_save_*", "ffn_config.fc_type*", "verbose",
         "attention_bias", "tokenizer_name", "attn_config.attn_type", "config_overrides")


def read_model(settings: Settings, draft: Draft) -> bool:
    """Fields of `model`, and of LoRA where one is said; whether Hugging Face's modules run."""
    name = settings.get("model.name")
    word = name.word() if name is not None else "mpt_causal_lm"
    settings.idle(*(f"model.{one}" for one in _IDLE))
    metrics = settings.get("model.use_train_metrics")
    if metrics is not None and not metrics.flag():
        draft.leave(metrics, "losses of metrics, which every micro-batch computes beside its own, are counted")
    for setting, why in _LEFT.items():
        said = peek(settings, f"model.{setting}")
        if said is not None and said.value not in (False, {}, 1.0, []):
            draft.leave(settings.get(f"model.{setting}") or said, why)
            take_whole(settings, f"model.{setting}")
    if word in ("mpt_causal_lm", "mpt"):
        _mpt(settings, draft)
        return False
    if name is not None and word not in ("hf_causal_lm", "hf_t5"):
        raise name.wrong("one of mpt_causal_lm, hf_causal_lm, hf_t5")
    _named(settings, draft)
    settings.idle("model.loss_fn")  # its model computes its own
    return True


def _named(settings: Settings, draft: Draft) -> None:
    said = settings.get("model.pretrained_model_name_or_path")
    known = preset_of(str(said.value)) if said is not None else None
    if said is not None and not draft.has("model"):
        if known is not None:
            draft.take("model.preset", known, said, "by its name; its config.json says more")
        else:
            draft.leave(said, "its config.json is not here: give that file too")
    way = settings.get("model.attn_implementation")
    old = switch(settings, "model.use_flash_attention_2")
    if old is not None:  # which goes over the other
        draft.take("training.attention", "flash", old)
    elif way is not None:
        draft.take("training.attention", _WAYS.get(way.word(), "flash"), way)
    else:
        draft.assume("training.attention", "eager", "hf_base.py, where attn_implementation is not said")
    if (eight := switch(settings, "model.load_in_8bit")) is not None:
        draft.leave(eight, "weights are counted in training.precision")
    if settings.has("model.peft_config"):
        part = inner(settings, "model.peft_config")
        if part is not None:
            job = Job(draft)
            read_adapter(part, job)
            kind = job.said("lora") or Said(settings.file, "model.peft_config", "LORA")
            draft.take("training.finetune.method", "lora", kind)
            draft.assume("training.finetune.base", "fp32", "hf_base.py loads weights in fp32")
            draft.close(part)


def _mpt(settings: Settings, draft: Draft) -> None:
    width = 0
    for setting, (field, usual) in _SIZES.items():
        said = settings.get(f"model.{setting}")
        if said is not None:
            draft.take(f"model.{field}", said.whole(), said)
        else:
            draft.assume(f"model.{field}", usual, f"MPTConfig's default of {setting}")
        width = (said.whole() if said is not None else usual) if setting == "d_model" else width
    draft.assume("model.norm", "layernorm", "MPTConfig's default of norm_type")
    _attention(settings, draft)
    _positions(settings, draft)
    _mlp(settings, draft, width)
    norm, tied = settings.get("model.norm_type"), settings.get("model.tie_word_embeddings")
    if norm is not None:
        draft.take("model.norm", "rmsnorm" if "rmsnorm" in norm.word() else "layernorm", norm)
    if tied is not None:
        draft.take("model.tied_embeddings", tied.flag(), tied)
    if (bare := switch(settings, "model.no_bias")) is not None:
        draft.take("model.bias", False, bare)
    drops = [said for one in ("resid_pdrop", "emb_pdrop", "attn_config.attn_pdrop")
             if (said := settings.get(f"model.{one}")) is not None and said.number() > 0]
    if drops:
        draft.take("model.dropout", max(said.number() for said in drops), drops[0])
    loss = settings.get("model.loss_fn")
    if loss is not None and one_of(loss, {"fused_crossentropy": False, "torch_crossentropy": True}):
        draft.take("software.fused", False, loss)
    engine = settings.get("model.fc_type.name", "model.fc_type")
    if engine is not None and engine.word() != "torch":
        draft.leave(engine, "TransformerEngine's linear layers are counted as torch's")


def _attention(settings: Settings, draft: Draft) -> None:
    above = "model.attn_config."
    kernel = settings.get(f"{above}attn_impl")
    if kernel is not None:
        draft.take("training.attention", one_of(kernel, _KERNELS), kernel)
    else:
        draft.assume("training.attention", "flash", "MPTConfig's default of attn_impl")
    if kernel is not None and kernel.word() == "triton":
        draft.assume("software.versions", {"flash_attn": "triton"}, "attn_impl: triton, which later releases left out")
    kind, heads = settings.get(f"{above}attn_type"), settings.get(f"{above}kv_n_heads")
    if kind is not None and kind.word() not in _HEADS:
        raise kind.wrong(f"one of {', '.join(_HEADS)}")
    if kind is not None and kind.word() == "multiquery_attention":
        draft.take("model.kv_heads", 1, kind)
    elif heads is not None:
        draft.take("model.kv_heads", heads.whole(), heads)
    window, width = settings.get(f"{above}sliding_window_size"), settings.get("model.head_dim")
    if window is not None and window.whole(-1) > 0:
        draft.take("model.window", window.whole(), window)
    if width is not None:
        draft.take("model.head_dim", width.whole(), width)
    for setting, ours in (("qk_ln", "whole"), ("qk_gn", "head")):
        if (said := switch(settings, f"{above}{setting}")) is not None:
            draft.take("model.qk_norm", ours, said)
    if (cap := settings.get(f"{above}attn_logit_softcapping")) is not None:
        draft.take("model.score_softcap", True, cap)


def _positions(settings: Settings, draft: Draft) -> None:
    """Learned ones unless ALiBi or rotary ones are on (MPTConfig sets learned_pos_emb false beside them)."""
    for setting, ours in (("alibi", "alibi"), ("rope", "rotary")):
        if (said := switch(settings, f"model.attn_config.{setting}")) is not None:
            draft.take("model.positions", ours, said)
    learned = settings.get("model.learned_pos_emb")
    if draft.has("model.positions"):
        return
    if learned is not None and not learned.flag():
        draft.take("model.positions", "none", learned)
        return
    longest = settings.get("model.max_seq_len") or settings.get("max_seq_len")
    draft.assume("model.positions", "learned", "MPTConfig's default of learned_pos_emb")
    if longest is not None:
        draft.take("model.max_positions", longest.whole(), longest)


def _mlp(settings: Settings, draft: Draft, width: int) -> None:
    above = "model.ffn_config."
    kind = settings.get(f"{above}ffn_type")
    word = kind.word() if kind is not None else "mptmlp"
    if kind is not None and word not in (*_FFNS, *_EXPERTS):
        raise kind.wrong(f"one of {', '.join((*_FFNS, *_EXPERTS))}")
    if kind is not None and word in _FFNS:
        draft.take("model.gated_mlp", _FFNS[word], kind)
    if kind is not None and word.startswith("te_"):
        draft.leave(kind, "TransformerEngine's fused MLP is counted as torch's")
    act = settings.get(f"{above}ffn_act_fn.name")
    if act is not None:
        draft.take("model.activation", one_of(act, _ACTIVATIONS), act)
    given, ratio = settings.get(f"{above}ffn_hidden_size"), settings.get("model.expansion_ratio")
    if given is not None:
        said, inner_width = given, given.whole()
    elif ratio is not None:
        said, inner_width = ratio, int(width * ratio.number())
    else:
        said, inner_width = None, 4 * width
    if said is not None:
        draft.take("model.ffn", inner_width, said)
    else:
        draft.assume("model.ffn", inner_width, "MPTConfig's default of expansion_ratio: 4")
    if kind is not None and word in _EXPERTS:
        _experts(settings, draft, kind, inner_width)


def _experts(settings: Settings, draft: Draft, kind: Said, width: int) -> None:
    """Experts as wide as an MLP, by the names of MegaBlocks' Arguments (megablocks 0.5: one expert, the first of one,
    without gates; mb_moe drops what is over moe_capacity_factor 1)."""
    above = "model.ffn_config."
    many = {}
    for name, field in (("moe_num_experts", "experts"), ("moe_top_k", "top_k")):
        said = settings.get(f"{above}{name}")
        many[field] = said.whole() if said is not None else 1
    room = settings.get(f"{above}moe_capacity_factor")
    drops = {"capacity": room.number() if room is not None else 1.0} if kind.word() == "mb_moe" else {}
    draft.take("model.moe", {**many, "expert_ffn": width, **drops}, kind)
    gated = settings.get(f"{above}mlp_type")
    if gated is not None:
        draft.take("model.gated_mlp", one_of(gated, {"mlp": False, "glu": True}), gated)
    spread = settings.get(f"{above}moe_world_size")
    if spread is not None and spread.whole() > 1:
        draft.take("parallel.expert", spread.whole(), spread)
    if (cut := switch(settings, f"{above}moe_weight_parallelism")) is not None:
        draft.leave(cut, "experts whose weights are shared out and gathered are not simulated")
    if (share := switch(settings, f"{above}shared_expert")) is not None:
        draft.leave(share, "an expert that sees every token is counted where --set model.moe.shared_experts says so")
    settings.idle(f"{above}moe_*", f"{above}mlp_impl", f"{above}shared_expert*", f"{above}uniform_expert_assignment",
                  f"{above}parallelism_degree", f"{above}fp16", f"{above}bf16")
