"""Configs of dense decoders with Llama's blocks, or with blocks that differ from them in norms, windows or biases.

Keys and class defaults: transformers, src/transformers/models/<family>/configuration_<family>.py; of ChatGLM, InternLM
2 and Baichuan, whose code lies beside their checkpoints, recalled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sim.scenario.hf.config import Config
from sim.scenario.hf.windows import patterned, window_of


def sizes(c: Config) -> dict[str, Any]:
    """Sizes under the keys that most families have."""
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


def llama(c: Config, *, tied: bool = False, activation: str = "silu", head: int = 0) -> dict[str, Any]:
    """Llama's fields; `head` is a head's width where a config has none, 0 for an equal share of the hidden size."""
    return {
        **({"head_dim": head} if head else {}),
        **sizes(c),
        "gated_mlp": True,
        "activation": c.activation("hidden_activation", "hidden_act", default=activation),
        "positions": "rotary",
        "norm": "rmsnorm",
        "bias": c.flag("mlp_bias", False),
        "tied_embeddings": c.flag("tie_word_embeddings", tied),
    }


def windowed(c: Config, *, always: bool, first: bool = False) -> dict[str, Any]:
    """Llama's with a window in every block, in those behind `max_window_layers` only, or as `layer_types` has it."""
    fields, window = llama(c), c.optional("sliding_window")
    if not (always or c.flag("use_sliding_window", False)):
        return fields
    return patterned(c, fields, window, first=c.whole("max_window_layers", default=28) if first else 0)


def _gemma(c: Config) -> dict[str, Any]:
    return {**llama(c, tied=True, activation="gelu"), "norm": "rmsnorm-fp32"}


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


def _olmo(c: Config) -> dict[str, Any]:
    """Its layer norms have no weights; here they have, a few thousand."""
    return {**llama(c), "norm": "layernorm"}


def _olmo_2(c: Config) -> dict[str, Any]:
    return {**llama(c), "norm": "rmsnorm-fp32", "block_norms": "output", "qk_norm": "whole"}


def _stablelm(c: Config) -> dict[str, Any]:
    return {**llama(c), "norm": "layernorm", "parallel_block": c.flag("use_parallel_residual", False),
            "rotary_share": c.rotary_share(default=0.25),
            **({"qk_norm": "head"} if c.flag("qk_layernorm", False) else {})}


def _cohere(c: Config) -> dict[str, Any]:
    return {**llama(c, tied=True), "norm": "layernorm", "parallel_block": True,
            **({"qk_norm": "head"} if c.flag("use_qk_norm", False) else {})}


def _cohere_2(c: Config) -> dict[str, Any]:
    every = c.whole("sliding_window_pattern", default=4)
    return patterned(c, _cohere(c), window_of(c, "sliding_window", 4096), every=every)


def _starcoder2(c: Config) -> dict[str, Any]:
    c.must(c.values.get("mlp_type", "default") == "default", "mlp_type", "a gated MLP in this family")
    fields = {**windowed(c, always=True), "gated_mlp": False, "norm": "layernorm", "bias": c.flag("use_bias", True)}
    return {**fields, "activation": c.activation("hidden_act", default="gelu"),
            "tied_embeddings": c.flag("tie_word_embeddings", True)}


def _phi3(c: Config) -> dict[str, Any]:
    return {**windowed(c, always=True), "fused_qkv": "parts", "fused_gate": True,
            "rotary_share": c.rotary_share(default=1.0)}


def _exaone_4(c: Config) -> dict[str, Any]:
    """Norms behind the blocks, and of every head; windows where the config has one, in all blocks but each last of a
    pattern, which is a number or a word such as LLLG."""
    pattern = c.values.get("sliding_window_pattern")
    every = len(pattern) if isinstance(pattern, str) else c.whole("sliding_window_pattern", default=4)
    fields = {**llama(c), "block_norms": "output", "qk_norm": "head"}
    return patterned(c, fields, c.optional("sliding_window"), every=every)


def _glm(c: Config) -> dict[str, Any]:
    """Half of a head is turned; gate and up are one product."""
    return {**llama(c, head=128), "qkv_bias": c.flag("attention_bias", True), "fused_gate": True,
            "rotary_share": c.rotary_share(default=0.5)}


def _chatglm(c: Config) -> dict[str, Any]:
    heads = c.whole("num_attention_heads")
    return {
        "layers": c.whole("num_layers"),
        "hidden": c.whole("hidden_size"),
        "heads": heads,
        "kv_heads": c.whole("multi_query_group_num") if c.flag("multi_query_attention", False) else heads,
        "head_dim": c.whole("kv_channels", default=128),
        "ffn": c.whole("ffn_hidden_size"),
        "vocab": c.whole("padded_vocab_size", "vocab_size"),
        "max_positions": c.whole("seq_length", default=2048),
        "gated_mlp": True,
        "activation": "silu",
        "positions": "rotary",
        "rotary_share": 0.5,
        "norm": "rmsnorm" if c.flag("rmsnorm", True) else "layernorm",
        "bias": c.flag("add_bias_linear", False),
        "qkv_bias": c.flag("add_qkv_bias", False),
        "fused_qkv": "parts",
        "fused_gate": True,
        "tied_embeddings": c.flag("tie_word_embeddings", False),
    }


def _baichuan(c: Config) -> dict[str, Any]:
    """One matrix of queries, keys and values; the larger ones have ALiBi, and a `model_max_length`."""
    longest = c.optional("model_max_length")
    return {**llama(c), "fused_qkv": "parts", **({"positions": "alibi", "max_positions": longest} if longest else {})}


def _seed_oss(c: Config) -> dict[str, Any]:
    c.must(not c.flag("attention_out_bias", False), "attention_out_bias", "a bias of the output alone")
    return {**llama(c, head=128), "qkv_bias": c.flag("attention_bias", True)}


#: By `model_type`.
LLAMAS: dict[str, Callable[[Config], dict[str, Any]]] = {
    "llama": llama,
    "mistral": lambda c: windowed(c, always=True),
    "qwen2": lambda c: {**windowed(c, always=False, first=True), "qkv_bias": True},
    "qwen3": lambda c: {**windowed(c, always=False, first=True), "qk_norm": "head"},
    "gemma": _gemma,
    "gemma2": _gemma_2,
    "gemma3_text": _gemma_3,
    "phi3": _phi3,
    "granite": llama,
    "olmo": _olmo,
    "olmo2": _olmo_2,
    "olmo3": lambda c: patterned(c, _olmo_2(c), window_of(c, "sliding_window", 4096), every=4),
    "stablelm": _stablelm,
    "cohere": _cohere,
    "cohere2": _cohere_2,
    "starcoder2": _starcoder2,
    "smollm3": lambda c: llama(c, tied=True),  # every fourth block has no positions: they cost next to nothing
    "ernie4_5": lambda c: {**llama(c, tied=True, head=128), "bias": c.flag("use_bias", False)},
    "exaone4": _exaone_4,
    "seed_oss": _seed_oss,
    "glm": _glm,
    "glm4": lambda c: {**_glm(c), "block_norms": "both"},
    "chatglm": _chatglm,
    "internlm2": lambda c: {**llama(c), "bias": c.flag("bias", False), "fused_qkv": "groups"},
    "baichuan": _baichuan,
}
