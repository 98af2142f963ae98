"""A Hugging Face `config.json` read into fields of `model`.

Keys and class defaults: transformers, src/transformers/models/<family>/configuration_<family>.py. Biases that only some
matrices have (Qwen2: query, key, value) and norms of queries, keys and outputs (Qwen 3, OLMo 2, Gemma 2 and 3) are left
out: a few thousand parameters per block, as are attention sinks (gpt-oss).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sim.errors import Fault, UserError
from sim.scenario.document import beside, describe, read_text
from sim.scenario.hf.config import Config
from sim.scenario.hf.unknown import instead_of
from sim.scenario.hf.windows import MOST_BLOCKS, patterned, window_of


def _sizes(c: Config) -> dict[str, Any]:
    fields = {
        "layers": c.whole("num_hidden_layers"),
        "hidden": c.whole("hidden_size"),
        "heads": c.whole("num_attention_heads"),
        "vocab": c.whole("vocab_size"),
        "max_positions": c.whole("max_position_embeddings", default=2048),
        "ffn": c.whole("intermediate_size"),
    }
    for ours, theirs in (("kv_heads", "num_key_value_heads"), ("head_dim", "head_dim")):
        value = c.optional(theirs)
        if value:
            fields[ours] = value
    return fields


def _llama(c: Config, *, tied: bool = False, activation: str = "silu") -> dict[str, Any]:
    return {
        **_sizes(c),
        "gated_mlp": True,
        "activation": c.activation("hidden_activation", "hidden_act", default=activation),
        "positions": "rotary",
        "norm": "rmsnorm",
        "bias": c.flag("mlp_bias", False),
        "tied_embeddings": c.flag("tie_word_embeddings", tied),
    }


def _windowed(c: Config, *, always: bool, first: bool = False) -> dict[str, Any]:
    """Llama's with a window in every block, in those behind `max_window_layers` only, or as `layer_types` has it."""
    fields, window = _llama(c), c.optional("sliding_window")
    if not (always or c.flag("use_sliding_window", False)):
        return fields
    return patterned(c, fields, window, first=c.whole("max_window_layers", default=28) if first else 0)


def _gemma(c: Config) -> dict[str, Any]:
    return {**_llama(c, tied=True, activation="gelu"), "norm": "rmsnorm-fp32"}


def _gemma_2(c: Config) -> dict[str, Any]:
    """Four norms a block; what is bounded is bounded by a number, and null takes the bound away."""
    fields = {**_gemma(c), "block_norms": "both",
              "score_softcap": c.values.get("attn_logit_softcapping", 50.0) is not None,
              "logit_softcap": c.values.get("final_logit_softcapping", 30.0) is not None}
    return patterned(c, fields, window_of(c, "sliding_window", 4096), every=2)


#: What configs saved with a part that sees leave out, since it is the class's (Gemma3TextConfig).
_GEMMA_3 = {"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072}


def _gemma_3(c: Config) -> dict[str, Any]:
    c.values = {**_GEMMA_3, **c.values}
    every = c.whole("sliding_window_pattern", "_sliding_window_pattern", default=6)
    fields = {**_gemma(c), "block_norms": "both", "qk_norm": "head"}
    return patterned(c, fields, window_of(c, "sliding_window", 4096), every=every)


def _gpt_oss(c: Config) -> dict[str, Any]:
    fields = {**_llama(c), "norm": "rmsnorm-fp32", "bias": c.flag("attention_bias", True), "moe": {
        "experts": c.whole("num_local_experts", default=128),
        "top_k": c.whole("num_experts_per_tok", "experts_per_token", default=4)}}
    return patterned(c, fields, window_of(c, "sliding_window", 128), every=2)


def _llama_4(c: Config) -> dict[str, Any]:
    """A shared expert as wide as a routed one; blocks without experts are wider."""
    step = c.whole("interleave_moe_layer_step", default=1)
    given, layers = c.values.get("moe_layers"), min(c.whole("num_hidden_layers"), MOST_BLOCKS)
    c.must(given is None or given == list(range(step - 1, layers, max(1, step))), "moe_layers",
           "this order of blocks with and without experts")
    fields = {**_llama(c), "ffn": c.whole("intermediate_size_mlp", default=16384), "moe": {
        "experts": c.whole("num_local_experts", default=16), "top_k": c.whole("num_experts_per_tok", default=1),
        "expert_ffn": c.whole("intermediate_size", default=8192), "shared_experts": 1, "every": max(1, step)}}
    rotary = c.values.get("no_rope_layers")  # 1 = rotary positions and a chunk, 0 = all tokens
    kinds = [("full_attention", "chunked_attention")[bool(one)] for one in rotary] if isinstance(rotary, list) else []
    return patterned(c, fields, window_of(c, "attention_chunk_size", 8192), chunked=True, kinds=kinds,
                     every=c.whole("no_rope_layer_interval", default=4))


def _mixtral(c: Config) -> dict[str, Any]:
    return {
        **_windowed(c, always=True),
        "moe": {"experts": c.whole("num_local_experts", default=8), "top_k": c.whole("num_experts_per_tok", default=2)},
    }


def _deepseek(c: Config) -> dict[str, Any]:
    fields = _llama(c)
    fields.pop("head_dim", None)
    mla = {
        "q_rank": c.whole("q_lora_rank", default=0),
        "kv_rank": c.whole("kv_lora_rank"),
        "nope_dim": c.whole("qk_nope_head_dim"),
        "rope_dim": c.whole("qk_rope_head_dim"),
        "value_dim": c.whole("v_head_dim"),
    }
    return {**fields, "moe": _routed(c), "mla": mla}


def _glm_4_moe(c: Config) -> dict[str, Any]:
    """DeepSeek's experts beside grouped heads (transformers 5.24.0 modeling_glm4_moe.py)."""
    return {**_llama(c), "qkv_bias": c.flag("attention_bias", False), "moe": _routed(c),
            **({"qk_norm": "head"} if c.flag("use_qk_norm", False) else {})}


def _routed(c: Config) -> dict[str, Any]:
    """Experts as DeepSeek's configs have them."""
    return {
        "experts": c.whole("n_routed_experts"),
        "top_k": c.whole("num_experts_per_tok"),
        "expert_ffn": c.whole("moe_intermediate_size"),
        "shared_experts": c.whole("n_shared_experts", default=0),
        "groups": c.whole("n_group", default=1),
        "top_groups": c.whole("topk_group", default=1),
        "first_dense": c.whole("first_k_dense_replace", default=0),
        "every": c.whole("moe_layer_freq", default=1),
    }


def _qwen_2_moe(c: Config) -> dict[str, Any]:
    """Windows, where asked for, alternate with full attention up to a block."""
    window = c.optional("sliding_window") if c.flag("use_sliding_window", False) else None
    most, layers = c.whole("max_window_layers", default=28), c.whole("num_hidden_layers")
    kinds = [("full_attention", "sliding_attention")[i % 2 == 0 and i < most] for i in range(min(layers, MOST_BLOCKS))]
    fields = {**_llama(c), **({"qkv_bias": True} if c.flag("qkv_bias", True) else {})}
    return _qwen_moe(c, patterned(c, fields, window, kinds=kinds))


def _qwen_moe(c: Config, attention: dict[str, Any]) -> dict[str, Any]:
    """Experts of Qwen 2 and 3; a shared expert is as wide as several routed ones."""
    width, shared = c.whole("moe_intermediate_size"), c.whole("shared_expert_intermediate_size", default=0)
    c.must(not c.values.get("mlp_only_layers"), "mlp_only_layers", "blocks without experts among blocks with them")
    c.must(width > 0, "moe_intermediate_size", "experts of no width")
    c.must(shared % max(1, width) == 0, "shared_expert_intermediate_size",
           f"a shared expert of {shared} beside experts of {width}")
    return {**attention, "moe": {
        "experts": c.whole("num_experts", "num_local_experts"), "top_k": c.whole("num_experts_per_tok"),
        "expert_ffn": width,
        "shared_experts": shared // max(1, width), "every": c.whole("decoder_sparse_step", default=1)}}


def _olmo(c: Config) -> dict[str, Any]:
    """Its layer norms have no weights; here they have, a few thousand."""
    return {**_llama(c), "norm": "layernorm"}


def _olmo_2(c: Config) -> dict[str, Any]:
    return {**_llama(c), "norm": "rmsnorm-fp32", "block_norms": "output", "qk_norm": "whole"}


def _stablelm(c: Config) -> dict[str, Any]:
    return {**_llama(c), "norm": "layernorm", "parallel_block": c.flag("use_parallel_residual", False),
            "rotary_share": c.rotary_share(default=0.25),
            **({"qk_norm": "head"} if c.flag("qk_layernorm", False) else {})}


def _cohere(c: Config) -> dict[str, Any]:
    return {**_llama(c, tied=True), "norm": "layernorm", "parallel_block": True,
            **({"qk_norm": "head"} if c.flag("use_qk_norm", False) else {})}


def _cohere_2(c: Config) -> dict[str, Any]:
    every = c.whole("sliding_window_pattern", default=4)
    return patterned(c, _cohere(c), window_of(c, "sliding_window", 4096), every=every)


def _starcoder2(c: Config) -> dict[str, Any]:
    c.must(c.values.get("mlp_type", "default") == "default", "mlp_type", "a gated MLP in this family")
    fields = {**_windowed(c, always=True), "gated_mlp": False, "norm": "layernorm", "bias": c.flag("use_bias", True)}
    return {**fields, "activation": c.activation("hidden_act", default="gelu"),
            "tied_embeddings": c.flag("tie_word_embeddings", True)}


def _bigcode(c: Config) -> dict[str, Any]:
    return {**_gpt2(c), **({"kv_heads": 1} if c.flag("multi_query", True) else {})}


def _gptj(c: Config) -> dict[str, Any]:
    fields = {**_gpt2(c), "positions": "rotary", "parallel_block": True,
              "activation": c.activation("activation_function", default="gelu-new")}
    return {**fields, "tied_embeddings": c.flag("tie_word_embeddings", False)}


def _opt(c: Config) -> dict[str, Any]:
    hidden = c.whole("hidden_size")
    same = c.whole("word_embed_proj_dim", default=hidden) == hidden
    c.must(same, "word_embed_proj_dim", "embeddings of another width")
    return {
        "layers": c.whole("num_hidden_layers"),
        "hidden": hidden,
        "heads": c.whole("num_attention_heads"),
        "vocab": c.whole("vocab_size"),
        "max_positions": c.whole("max_position_embeddings", default=2048) + 2,
        "ffn": c.whole("ffn_dim"),
        "activation": c.activation("activation_function", default="relu"),
        "tied_embeddings": c.flag("tie_word_embeddings", True),
    }


def _bloom(c: Config) -> dict[str, Any]:
    return {
        "layers": c.whole("n_layer", "num_hidden_layers"),
        "hidden": c.whole("hidden_size", "n_embed"),
        "heads": c.whole("n_head", "num_attention_heads"),
        "vocab": c.whole("vocab_size"),
        "positions": "alibi",
        "fused_qkv": "heads",
        "tied_embeddings": True,
    }


def _falcon(c: Config) -> dict[str, Any]:
    """7B has one head of keys and values, what is newer a few; attention and MLP stand side by side in both."""
    newer, heads = c.flag("new_decoder_architecture", False), c.whole("num_attention_heads", "n_head")
    several = c.whole("num_kv_heads", "n_head_kv", default=heads) if newer else (
        1 if c.flag("multi_query", True) else heads)
    hidden = c.whole("hidden_size")
    return {
        "layers": c.whole("num_hidden_layers", "n_layer"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": several,
        "vocab": c.whole("vocab_size"),
        "max_positions": c.whole("max_position_embeddings", default=2048),
        "ffn": c.whole("ffn_hidden_size", default=4 * hidden),
        "positions": "alibi" if c.flag("alibi", False) else "rotary",
        "fused_qkv": "groups" if newer or several == 1 else "heads",
        "bias": c.flag("bias", False),
        "parallel_block": newer or c.flag("parallel_attn", True),
        **({"parallel_norms": 2} if newer and c.whole("num_ln_in_parallel_attn", default=2) == 2 else {}),
        "tied_embeddings": c.flag("tie_word_embeddings", True),
    }


def _mpt(c: Config) -> dict[str, Any]:
    attention = c.values.get("attn_config")
    alibi = isinstance(attention, dict) and attention.get("alibi", True) is True
    hidden = c.whole("d_model")
    return {
        "layers": c.whole("n_layers"),
        "hidden": hidden,
        "heads": c.whole("n_heads"),
        "vocab": c.whole("vocab_size"),
        "max_positions": c.whole("max_seq_len", default=2048),
        "ffn": c.whole("expansion_ratio", default=4) * hidden,
        "positions": "alibi" if alibi else "learned",
        "fused_qkv": "parts",
        "bias": not c.flag("no_bias", True),
        "tied_embeddings": True,
    }


def _phi(c: Config) -> dict[str, Any]:
    return {
        **_sizes(c),
        "activation": c.activation("hidden_act", default="gelu-new"),
        "positions": "rotary",
        "rotary_share": c.rotary_share(default=0.5),
        "parallel_block": True,
        "tied_embeddings": c.flag("tie_word_embeddings", False),
    }


def _phi3(c: Config) -> dict[str, Any]:
    return {**_windowed(c, always=True), "fused_qkv": "parts", "fused_gate": True,
            "rotary_share": c.rotary_share(default=1.0)}


def _gpt2(c: Config) -> dict[str, Any]:
    fields = {
        "layers": c.whole("n_layer"),
        "hidden": c.whole("n_embd"),
        "heads": c.whole("n_head"),
        "vocab": c.whole("vocab_size"),
        "max_positions": c.whole("n_positions", default=1024),
        "activation": c.activation("activation_function", default="gelu").removesuffix("-new"),  # GPT-2's code is known
        "tied_embeddings": c.flag("tie_word_embeddings", True),
    }
    inner = c.optional("n_inner")
    return {**fields, **({"ffn": inner} if inner else {})}


def _gpt_neox(c: Config) -> dict[str, Any]:
    return {
        **_sizes(c),
        "activation": c.activation("hidden_act", default="gelu"),
        "positions": "rotary",
        "fused_qkv": "heads",
        "rotary_share": c.rotary_share("rotary_pct", default=0.25),
        "parallel_block": c.flag("use_parallel_residual", True),
        **({"parallel_norms": 2} if c.flag("use_parallel_residual", True) else {}),
        "tied_embeddings": c.flag("tie_word_embeddings", False),
    }


def _bert(c: Config) -> dict[str, Any]:
    return {**_sizes(c), "kind": "encoder", "activation": c.activation("hidden_act", default="gelu")}


def _t5(c: Config) -> dict[str, Any]:
    projection = str(c.values.get("feed_forward_proj", "relu"))
    layers = c.whole("num_layers")
    return {
        "kind": "encoder-decoder",
        "layers": layers,
        "decoder_layers": c.whole("num_decoder_layers", default=layers),
        "hidden": c.whole("d_model"),
        "heads": c.whole("num_heads"),
        "head_dim": c.whole("d_kv"),
        "ffn": c.whole("d_ff"),
        "vocab": c.whole("vocab_size"),
        "max_positions": c.whole("n_positions", default=512),
        "gated_mlp": projection.startswith("gated"),
        "activation": "gelu" if "gelu" in projection else "relu",
        "positions": "relative",
        "norm": "rmsnorm",
        "bias": False,
        "tied_embeddings": c.flag("tie_word_embeddings", True),
    }


_FAMILIES: dict[str, Callable[[Config], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": lambda c: _windowed(c, always=True),
    "qwen2": lambda c: {**_windowed(c, always=False, first=True), "qkv_bias": True},
    "qwen3": lambda c: {**_windowed(c, always=False, first=True), "qk_norm": "head"},
    "gemma": _gemma,
    "gemma2": _gemma_2,
    "gemma3_text": _gemma_3,
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama_4,
    "phi": _phi,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "bert": _bert,
    "t5": _t5,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen_2_moe,
    "qwen3_moe": lambda c: {**_qwen_moe(c, _windowed(c, always=False)), "qk_norm": "head"},
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,  # whose class its config names (recalled)
    "glm4_moe": _glm_4_moe,
    "granite": lambda c: _llama(c, tied=True),
    "olmo": _olmo,
    "olmo2": _olmo_2,
    "olmo3": lambda c: patterned(c, _olmo_2(c), window_of(c, "sliding_window", 4096), every=4),
    "stablelm": _stablelm,
    "cohere": _cohere,
    "cohere2": _cohere_2,
    "starcoder2": _starcoder2,
    "gpt_bigcode": _bigcode,
    "gptj": _gptj,
    "opt": _opt,
    "bloom": _bloom,
    "falcon": _falcon,
    "mpt": _mpt,
    "roberta": _bert,
    "xlm-roberta": _bert,
    "camembert": _bert,
}


def read_config(folder: Path, written: str) -> dict[str, Any]:
    """Fields of `model` from a `config.json`, or from the folder that holds one.

    Raises:
        UserError: unreadable, not JSON, of an unknown family, or lacking a size.
    """
    path = beside(folder, written)
    shown = written
    if path.is_dir():
        path, shown = path / "config.json", f"{written.rstrip('/')}/config.json"
    text = read_text(path, shown)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 0)
        raise UserError(
            Fault(f"is not JSON: {getattr(error, 'msg', 'nested too deeply')}", file=shown, line=line)
        ) from None
    if not isinstance(values, dict):
        raise UserError(Fault(f"holds {describe(values)} where a config was expected", file=shown, line=1))
    family = values.get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        hint = instead_of(values) or (
            f"known: {', '.join(_FAMILIES)}; for another give kind, layers, hidden, heads … in place of hf")
        inner = values.get("text_config")
        if isinstance(inner, dict) and inner.get("model_type") in _FAMILIES:
            hint = (f"its language model is: write 'text_config' ({inner['model_type']}) into a file of its own; what "
                    "reads pictures or sound is not simulated")
        message = "the config has no 'model_type'" if family is None else (
            f"models of the type {describe(family).removeprefix('the text ')} are not known")
        raise UserError(Fault(message, field="model_type", file=shown, hint=hint))
    config = Config(values, shown, text)
    fields = _FAMILIES[family](config)
    if config.faults:
        raise UserError(config.faults)
    return fields
