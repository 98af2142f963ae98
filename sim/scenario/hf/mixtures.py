"""Configs of mixtures of experts.

Keys and class defaults: transformers, src/transformers/models/<family>/configuration_<family>.py; of DeepSeek's first
mixture and Kimi-K2, whose code lies beside their checkpoints, recalled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sim.scenario.hf.config import Config
from sim.scenario.hf.llamas import llama, windowed
from sim.scenario.hf.windows import MOST_BLOCKS, patterned, window_of


def _gpt_oss(c: Config) -> dict[str, Any]:
    fields = {**llama(c), "norm": "rmsnorm-fp32", "bias": c.flag("attention_bias", True), "moe": {
        "experts": c.whole("num_local_experts", default=128),
        "top_k": c.whole("num_experts_per_tok", "experts_per_token", default=4)}}
    return patterned(c, fields, window_of(c, "sliding_window", 128), every=2)


def _llama_4(c: Config) -> dict[str, Any]:
    """A shared expert as wide as a routed one; blocks without experts are wider."""
    step = c.whole("interleave_moe_layer_step", default=1)
    given, layers = c.values.get("moe_layers"), min(c.whole("num_hidden_layers"), MOST_BLOCKS)
    c.must(given is None or given == list(range(step - 1, layers, max(1, step))), "moe_layers",
           "this order of blocks with and without experts")
    fields = {**llama(c), "ffn": c.whole("intermediate_size_mlp", default=16384), "moe": {
        "experts": c.whole("num_local_experts", default=16), "top_k": c.whole("num_experts_per_tok", default=1),
        "expert_ffn": c.whole("intermediate_size", default=8192), "shared_experts": 1, "every": max(1, step)}}
    rotary = c.values.get("no_rope_layers")  # 1 = rotary positions and a chunk, 0 = all tokens
    kinds = [("full_attention", "chunked_attention")[bool(one)] for one in rotary] if isinstance(rotary, list) else []
    return patterned(c, fields, window_of(c, "attention_chunk_size", 8192), chunked=True, kinds=kinds,
                     every=c.whole("no_rope_layer_interval", default=4))


def _mixtral(c: Config) -> dict[str, Any]:
    return {
        **windowed(c, always=True),
        "moe": {"experts": c.whole("num_local_experts", default=8), "top_k": c.whole("num_experts_per_tok", default=2)},
    }


def _deepseek(c: Config) -> dict[str, Any]:
    fields = llama(c)
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
    return {**llama(c), "qkv_bias": c.flag("attention_bias", False), "rotary_share": c.rotary_share(default=0.5),
            "moe": _routed(c), **({"qk_norm": "head"} if c.flag("use_qk_norm", False) else {})}


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
    fields = {**llama(c), **({"qkv_bias": True} if c.flag("qkv_bias", True) else {})}
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


def _local(c: Config, experts: int, top_k: int) -> dict[str, Any]:
    """Experts as wide as `intermediate_size`, under Mixtral's keys or OLMoE's."""
    return {"experts": c.whole("num_local_experts", "num_experts", default=experts),
            "top_k": c.whole("num_experts_per_tok", default=top_k)}


def _minimax_m2(c: Config) -> dict[str, Any]:
    kinds = c.values.get("attn_type_list")
    softmax = not kinds or (isinstance(kinds, list) and all(kind == 1 for kind in kinds))
    c.must(softmax, "attn_type_list", "linear attention")
    turned, head = c.whole("rotary_dim", default=64), c.whole("head_dim", default=128)
    return {**llama(c, head=128), "rotary_share": min(1.0, turned / max(1, head)), "moe": _local(c, 256, 8),
            **({"qk_norm": "whole"} if c.flag("use_qk_norm", True) else {})}


def _phi_moe(c: Config) -> dict[str, Any]:
    """Biases of its outputs and head are left out."""
    return {**windowed(c, always=True), "norm": "layernorm", "qkv_bias": c.flag("attention_bias", False),
            "moe": _local(c, 16, 2)}


def _dbrx(c: Config) -> dict[str, Any]:
    attention, experts = c.inside("attn_config"), c.inside("ffn_config")
    return {
        "layers": c.whole("n_layers"),
        "hidden": c.whole("d_model"),
        "heads": c.whole("n_heads"),
        "kv_heads": attention.whole("kv_n_heads", default=1),
        "vocab": c.whole("vocab_size"),
        "max_positions": c.whole("max_seq_len", default=2048),
        "ffn": experts.whole("ffn_hidden_size", default=3584),
        "gated_mlp": True,
        "activation": "silu",
        "positions": "rotary",
        "norm": "layernorm",
        "bias": False,
        "fused_qkv": "parts",
        "tied_embeddings": False,
        "moe": {"experts": experts.whole("moe_num_experts", default=4), "top_k": experts.whole("moe_top_k", default=1)},
    }


def _ernie_4_5_moe(c: Config) -> dict[str, Any]:
    last, layers = c.whole("moe_layer_end_index", default=0), c.whole("num_hidden_layers")
    c.must(last in (0, layers - 1), "moe_layer_end_index", "blocks without experts behind blocks with them")
    return {**llama(c, tied=True), "bias": c.flag("use_bias", False), "moe": {
        "experts": c.whole("moe_num_experts"), "top_k": c.whole("moe_k"),
        "expert_ffn": c.whole("moe_intermediate_size"),
        "shared_experts": c.whole("moe_num_shared_experts", default=0),
        "first_dense": c.whole("moe_layer_start_index", default=0), "every": c.whole("moe_layer_interval", default=1)}}


#: By `model_type`.
MIXTURES: dict[str, Callable[[Config], dict[str, Any]]] = {
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama_4,
    "qwen2_moe": _qwen_2_moe,
    "qwen3_moe": lambda c: {**_qwen_moe(c, windowed(c, always=False)), "qk_norm": "head"},
    "deepseek": lambda c: {**llama(c), "moe": _routed(c)},
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,  # whose class its config names (recalled)
    "dots1": lambda c: {**llama(c), "qk_norm": "head", "moe": _routed(c)},
    "glm4_moe": _glm_4_moe,
    "olmoe": lambda c: {**llama(c), "qk_norm": "whole", "moe": _local(c, 64, 8)},
    "minimax_m2": _minimax_m2,
    "phimoe": _phi_moe,
    "granitemoe": lambda c: {**llama(c), "moe": _local(c, 8, 2)},
    "dbrx": _dbrx,
    "ernie4_5_moe": _ernie_4_5_moe,
}
