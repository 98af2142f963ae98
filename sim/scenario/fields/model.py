"""The model's section of a scenario: an architecture as a user writes it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from sim.scenario.fields.tables import (
    Experts,
    Heads,
    Layers,
    LayersOrNone,
    Table,
    Text,
    Tokens,
    Vocab,
    Width,
    has,
    late,
    needs,
)


def _probability(value: Any) -> Any:
    return 0.1 if value is True else 0.0 if value is False else value


#: true = 0.1, false = 0.
Probability = Annotated[
    float,
    BeforeValidator(_probability),
    Field(ge=0, lt=1),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "number", "minimum": 0}]}),
]


class Moe(Table):
    """Mixture of experts."""

    experts: Experts = needs("routed experts of a block")
    top_k: Experts = needs("experts a token is sent to")
    expert_ffn: Width = late("inner width of one expert; none given = ffn")
    shared_experts: Annotated[int, Field(ge=0, le=100_000)] = has(0, "experts that see every token")
    groups: Experts = has(1, "groups of neighbouring experts; a token's experts come from the best top_groups of them")
    top_groups: Experts = has(1, "groups a token's experts come from; with 1 group there is no limit")
    every: Layers = has(1, "one block of so many is a mixture")
    first_dense: LayersOrNone = has(0, "blocks at the start that are not")
    capacity: Annotated[float, Field(ge=0, le=1000)] = has(
        0.0, "rows an expert computes over its mean share, the rest is dropped; 0 = dropless")
    padded: bool = has(True, "with a capacity every expert computes so many rows, empty or not (Megatron's "
                       "moe_pad_expert_input_to_capacity); false = at most so many")
    imbalance: Annotated[float, Field(ge=0, le=100)] = has(
        0.0, "standard deviation of the experts' loads over their mean; 0 = balanced")


class Mla(Table):
    """Multi-head latent attention (DeepSeek-V2, section 2.1)."""

    q_rank: Annotated[int, Field(ge=0, le=10_000_000)] = has(0, "rank of the query compression, 0 = none")
    kv_rank: Width = needs("rank of the key and value compression")
    nope_dim: Width = needs("head dimension without rotary positions")
    rope_dim: Width = needs("head dimension with rotary positions")
    value_dim: Width = needs("head dimension of the values")


class Model(Table):
    """The architecture."""

    preset: Text | None = has(None, "a known architecture; fields beside it override it")
    hf: Text | None = has(None, "path of a Hugging Face config.json")
    kind: Literal["decoder", "encoder", "encoder-decoder", "layers"] = has("decoder", "shape of the transformer")
    layers: Layers = late("blocks; encoder blocks of an encoder-decoder")
    decoder_layers: LayersOrNone = late("decoder blocks of an encoder-decoder; none given = layers")
    hidden: Width = late("width of the residual stream")
    heads: Heads = late("attention heads")
    kv_heads: Heads = late("heads of keys and values; none given = heads")
    head_dim: Width = late("width of one head; none given = hidden / heads")
    ffn: Width = late("inner width of the MLP; none given = 4 · hidden")
    gated_mlp: bool = has(False, "three matrices: SwiGLU, GEGLU")
    activation: Literal["gelu", "gelu-new", "relu", "silu"] = late(
        "activation of the MLP; gelu-new = the tanh form that Hugging Face's modules spell out; none given = gelu, "
        "of a gated MLP silu, of an encoder-decoder relu")
    vocab: Vocab = late("rows of the embedding")
    max_positions: Tokens = late(
        "rows of a learned position embedding, longest sequence; none given = the longest that the job has")
    positions: Literal["learned", "rotary", "alibi", "relative", "none"] = late(
        "position encoding; none given = learned, of an encoder-decoder relative")
    norm: Literal["layernorm", "rmsnorm", "rmsnorm-fp32"] = has(
        "layernorm", "normalisation; rmsnorm-fp32 = weights multiply before the result is half again (Gemma, OLMo-2)")
    qk_norm: Literal["head", "whole"] | None = has(
        None, "norms of queries and keys: head = of every head by itself (Qwen3), whole = of all of them (OLMo-2)")
    block_norms: Literal["input", "output", "both"] = has(
        "input", "where attention and MLP have their norm: what they read, what they add (OLMo-2), both (Gemma-2)")
    score_softcap: bool = has(
        False, "a tanh bounds the scores of attention (Gemma-2); no time is counted for it in a fused kernel")
    logit_softcap: bool = has(False, "a tanh bounds the logits (Gemma-2)")
    bias: bool = has(True, "biases in linear layers and norms")
    fused_qkv: Literal["parts", "heads", "groups"] | None = has(
        None, "Hugging Face's module makes queries, keys and values by one product: parts = one behind another "
        "(Phi-3), heads = head by head (GPT-NeoX), groups = group by group (Falcon); none = by three, but GPT-2's")
    fused_gate: bool = has(False, "Hugging Face's module makes gate and up by one product (Phi-3)")
    rotary_share: Annotated[float, Field(gt=0, le=1)] | None = has(
        None, "Hugging Face's module cuts this share of every head out, turns it and joins it to the rest (GPT-NeoX, "
        "Phi); none = it turns whole heads where they are")
    qkv_bias: bool = has(False, "biases of queries, keys and values, whatever `bias` says (Qwen2)")
    tied_embeddings: bool = has(True, "the head multiplies by the embedding's matrix")
    dropout: Probability = has(0.0, "probability; true = 0.1")
    moe: Moe | None = has(None, "mixture of experts")
    mla: Mla | None = has(None, "latent attention")
    window: Tokens | None = has(None, "sliding-window attention, tokens")
    full_every: Annotated[int, Field(ge=2, le=10_000_000)] | None = has(
        None, "of a model with a window, one block of every so many attends to all tokens; none = no block does")
    first_full: LayersOrNone = has(0, "blocks at the start that attend to all tokens, whatever the window")
    chunked_window: bool = has(False, "the window is a chunk: tokens attend to those of their own chunk alone")
    parallel_block: bool = has(False, "attention and MLP side by side")
    parallel_norms: Annotated[int, Field(ge=1, le=2)] = has(
        1, "norms in front of attention and MLP side by side: one for both, or one each (GPT-NeoX, Falcon-40B)")
    mtp_layers: Annotated[int, Field(ge=0, le=16)] = has(
        0, "blocks behind the model that each predict one token further on (DeepSeek-V3's multi-token prediction)")
    table: Text | None = has(None, "path of a CSV of layers, for kind layers")
