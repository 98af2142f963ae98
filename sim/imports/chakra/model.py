"""The model behind a trace: sizes of one forward's products with weights, attention, embeddings and norms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from sim.imports.chakra.experts import read_experts
from sim.imports.chakra.nodes import Node
from sim.imports.chakra.operators import Norm, Pass, Product
from sim.imports.chakra.told import Told

_ACTIVATIONS = {"aten::silu": "silu", "aten::relu": "relu", "aten::gelu": "gelu"}
#: A position's angles: transformers and others take cosines of them, Meta's code complex numbers.
_ROTARY = ("aten::cos", "aten::polar", "aten::view_as_complex")


@dataclass(frozen=True)
class Blocks:
    """A forward's products: queries, keys and values of a block, what each block has behind attention, the head's."""

    qkv: Sequence[Product]
    behind: Sequence[Sequence[Product]]
    head: Product | None


def split_blocks(one: Pass) -> Blocks:
    """Products sorted by the block they are in: attention of each is between its first ones and the rest."""
    places = [call.node.id for call in one.attention]
    before = [product for product in one.products if product.node.id < places[0]]
    between = [[product for product in one.products if first < product.node.id < last]
               for first, last in pairwise(places)]
    after = [product for product in one.products if product.node.id > places[-1]]
    mine = len(before)
    if between:
        mine = 0
        while mine < min(len(before), len(between[0])) and _alike(before[-mine - 1], between[0][-mine - 1]):
            mine += 1
    mine = max(mine, 1)
    behind = [products[:-mine] for products in between]
    last = behind[-1] if behind else after[:-1]
    # A head is wider than what a block ends with, or is one product more than the block before has.
    rest = after if len(after) <= len(last) and between else after[:len(last)]
    head = after[-1] if len(after) > len(rest) else None
    return Blocks(before[-mine:], [*behind, rest], head)


def read_model(told: Told, one: Pass, embedding: Node | None) -> None:
    """Fields of `model` from one forward of this rank; blocks are counted by the caller."""
    blocks, attention = split_blocks(one), one.attention[0]
    tensor = told.tensor
    stream = embedding.shape(0)[1] if embedding is not None else (blocks.qkv[0].in_ if blocks.qkv else 0)
    if embedding is not None:
        told.take("model.hidden", stream, embedding, "width of the embedding")
    elif stream:
        told.take("model.hidden", stream, blocks.qkv[0].node, "what a block's first product reads")
    told.take("model.heads", attention.heads * tensor, attention.node,
              f"{attention.heads} of each of {tensor} tensor ranks" if tensor > 1 else "")
    if read_latent(told, blocks, attention.width, attention.value_width, tensor):
        pass
    else:
        told.take("model.head_dim", attention.width, attention.node)
        _keys(told, blocks, one)
    if not read_experts(told, one, blocks.behind, stream):
        _mlp(told, blocks)
    _vocabulary(told, one, blocks, embedding)
    _biases(told, blocks)
    _norms(told, one, len(one.attention), stream)
    _positions(told, one, embedding, attention.width)
    _kind(told, one)
    _dropout(told, one)


def read_latent(told: Told, blocks: Blocks, width: int, value_width: int, tensor: int) -> bool:
    """Latent attention (DeepSeek-V2): products with compressed queries and keys in front of attention."""
    first = [one for one in blocks.qkv if one.in_ == blocks.qkv[0].in_]
    rest = [one for one in blocks.qkv if one.in_ != blocks.qkv[0].in_]
    if not rest or len(first) > 2 or len(rest) > 2:
        return False
    heads = blocks.behind[0][0].in_ // value_width if blocks.behind[0] and value_width else 0
    keys = rest[-1]
    nope = keys.out // heads - value_width if heads else 0
    rope = width - nope
    if nope <= 0 or rope <= 0 or keys.out % heads:
        return False
    path = "model.mla."
    told.take(f"{path}kv_rank", keys.in_, keys.node)
    told.take(f"{path}nope_dim", nope, keys.node, f"beside values of {value_width}")
    told.take(f"{path}rope_dim", rope, keys.node, f"of {width} of a head")
    told.take(f"{path}value_dim", value_width, keys.node)
    told.take(f"{path}q_rank", rest[0].in_ if len(rest) > 1 else 0, rest[0].node)
    return True


def read_joined(told: Told, one: Pass) -> None:
    """Products that transformers' modules make of several, which its own fields say; others do not matter."""
    blocks = split_blocks(one)
    if told.overall or told.draft.value("software.modules") != "transformers":
        return
    if len(blocks.qkv) == 1 and blocks.qkv[0].node.name == "aten::linear":  # GPT-2's own calls addmm
        told.leave(blocks.qkv[0].node.name, f"{blocks.qkv[0].in_} x {blocks.qkv[0].out}",
                   "queries, keys and values by one product, parted in a way that no call tells: --set "
                   "model.fused_qkv=parts, heads or groups")
    if told.draft.value("model.gated_mlp") and not told.draft.has("model.moe") and len(blocks.behind[0]) == 3:
        told.take("model.fused_gate", True, blocks.behind[0][1].node)


def _alike(one: Product, other: Product) -> bool:
    return (one.in_, one.out) == (other.in_, other.out)


def _keys(told: Told, blocks: Blocks, one: Pass) -> None:
    """Heads of keys: what the products in front of attention make beside queries; called ones may be repeated."""
    attention = one.attention[0]
    rest = sum(product.out for product in blocks.qkv) - attention.heads * attention.width
    heads, over = divmod(rest, 2 * attention.width)
    if over or not 0 < heads <= attention.heads:
        heads = attention.kv_heads
        told.assume("model.kv_heads", heads * told.tensor, f"{attention.node.name} has so many heads of keys; what is "
                    "in front of it does not add up")
        return
    told.take("model.kv_heads", heads * told.tensor, blocks.qkv[-1].node)


def _mlp(told: Told, blocks: Blocks) -> None:
    products = list(blocks.behind[0][1:])
    if len(products) < 2:
        told.leave("products behind attention", len(products), "the MLP's sizes do not follow: --set model.ffn=N")
        return
    down, ups = products[-1], products[:-1]
    wide = sum(one.out for one in ups)
    if wide not in (down.in_, 2 * down.in_):
        told.leave("products behind attention", [f"{one.in_} x {one.out}" for one in products],
                   "the MLP's sizes do not follow: --set model.ffn=N")
        return
    told.take("model.ffn", down.in_ * told.tensor, down.node)
    told.take("model.gated_mlp", wide == 2 * down.in_, ups[0].node, f"{len(ups)} products make {wide}")


def _vocabulary(told: Told, one: Pass, blocks: Blocks, embedding: Node | None) -> None:
    head = blocks.head
    if embedding is not None:
        rows = embedding.shape(0)[0]
        masks = [node for node in one.others if node.name in ("aten::lt", "aten::ge") and node.id < embedding.id + 1
                 and node.shape(0) == embedding.shape(1)]
        cut = told.tensor > 1 and bool(masks)
        told.take("model.vocab", rows * (told.tensor if cut else 1), embedding,
                  f"tokens of other ranks are masked: {rows} rows on each" if cut else "rows of the embedding")
    elif head is not None:
        told.take("model.vocab", head.out * told.tensor, head.node, "what the last product makes")
    if head is None or embedding is None:
        told.assume("model.tied_embeddings", False, "the trace has not both embedding and head on this rank")
        return
    mine, other = head.place, embedding.place(0)
    if mine is not None and mine[0] == "tensor" and other is not None:
        other = ("tensor", *embedding.value(0)[:1])
    if mine is None or other is None:
        told.assume("model.tied_embeddings", False, "the trace does not tell tensors apart")
    else:
        told.take("model.tied_embeddings", mine == other, head.node,
                  "reads the embedding's memory" if mine == other else "reads other memory than the embedding's")


def _biases(told: Told, blocks: Blocks) -> None:
    inner = [product for behind in blocks.behind[:1] for product in behind]
    if not inner or not blocks.qkv:
        return
    most = sum(one.bias for one in inner) * 2 > len(inner)
    told.take("model.bias", most, inner[0].node)
    if blocks.qkv[0].bias and not most:
        told.take("model.qkv_bias", True, blocks.qkv[0].node)


def _norms(told: Told, one: Pass, layers: int, stream: int) -> None:
    def wide(norm: Norm) -> bool:
        return norm.sizes[-1] == stream or (norm.node.name == "aten::rsqrt" and len(norm.sizes) == 3)

    of_stream = [norm for norm in one.norms if wide(norm)]
    of_heads = [norm for norm in one.norms if len(norm.sizes) == 4]
    if not of_stream:
        told.assume("model.norm", "rmsnorm" if told.draft.value("model.gated_mlp") else "layernorm",
                    "no norm is told apart in the trace: the kind that goes with such an MLP")
        return
    kind = Counter(norm.kind for norm in of_stream).most_common(1)[0][0]
    told.take("model.norm", kind, of_stream[0].node, f"{len(of_stream)} of the stream in a forward")
    if of_heads:
        told.take("model.qk_norm", "head", of_heads[0].node)
    first = one.attention[0].node.id
    each = len(of_stream) // layers
    if layers > 1:
        each = sum(first < norm.node.id < one.attention[1].node.id for norm in of_stream)
    if told.draft.has("model.mla") and kind == "rmsnorm" and of_stream[0].node.name == "aten::rsqrt":
        each -= 1 + bool(told.draft.value("model.mla.q_rank"))  # norms of what is compressed, whose width it hides
    if each >= 4 and not of_heads:
        told.take("model.block_norms", "both", of_stream[0].node, f"{each} norms of each block")
    elif each == 1 and layers > 1:
        told.take("model.parallel_block", True, of_stream[0].node, "one norm of each block")
    elif each == 2 and sum(norm.node.id < first for norm in of_stream) == 0:
        told.take("model.block_norms", "output", of_stream[0].node, "none in front of the first attention")
    elif each == 2 and len(of_stream) >= 2 and of_stream[0].reads is not None \
            and of_stream[0].reads == of_stream[1].reads:
        told.take("model.parallel_block", True, of_stream[1].node, "both norms of a block read the same")
        told.take("model.parallel_norms", 2, of_stream[1].node)
    elif each not in (2, 1):
        told.leave("norms of the stream", len(of_stream), f"of {layers} blocks; two of each are counted")


def _positions(told: Told, one: Pass, embedding: Node | None, width: int) -> None:
    others = [node for node in one.others if node.name == "aten::embedding" and "aten::embedding" not in node.above
              and embedding is not None and node.shape(0) != embedding.shape(0)
              and node.shape(0)[1:] == embedding.shape(0)[1:] and node.shape(0)[0] > 2]
    turns = [node for node in one.others if node.name in _ROTARY]
    if others:
        told.take("model.positions", "learned", others[0])
        told.take("model.max_positions", others[0].shape(0)[0], others[0])
    elif turns:
        told.take("model.positions", "rotary", turns[0])
    else:
        told.assume("model.positions", "rotary", "nothing in the trace tells positions (angles may be made before)")
    activation = next((node for node in one.others if node.name in _ACTIVATIONS), None)
    if activation is not None:
        told.take("model.activation", _ACTIVATIONS[activation.name], activation)
    elif any(node.name == "aten::tanh" for node in one.others):
        told.take("model.activation", "gelu-new", "aten::tanh", "the tanh form of GELU, operator by operator")
    else:
        told.assume("model.activation", "silu" if told.draft.value("model.gated_mlp") else "gelu",
                    "no activation is told apart in the trace")


def _kind(told: Told, one: Pass) -> None:
    """An encoder sees all tokens: no attention is causal and none has a mask."""
    known = [call.causal for call in one.attention if call.causal is not None]
    crossed = [call for call in one.attention if call.keys != call.tokens]
    if known and len(known) == len(one.attention) and not any(known):
        told.take("model.kind", "encoder", one.attention[0].node, "attention without mask, not causal")
    elif known and any(known):
        told.take("model.kind", "decoder", one.attention[0].node, "causal attention")
    else:
        told.assume("model.kind", "decoder", "whether its mask is causal is not in the trace")
    if crossed and not told.draft.value("parallel.context"):
        told.leave(crossed[0].node.name, f"{crossed[0].tokens} and {crossed[0].keys} tokens",
                   "attention over others' tokens: an encoder-decoder's is not told apart here: give its config.json")


def _dropout(told: Told, one: Pass) -> None:
    calls: list[tuple[Node, float]] = [(call.node, call.dropout) for call in one.attention if call.dropout]
    for node in one.others:
        rate = node.value(1) if node.name in ("aten::dropout", "aten::native_dropout") else None
        if isinstance(rate, float) and 0 < rate < 1 and node.value(2) is True:
            calls.append((node, rate))
    if calls:
        node, rate = calls[-1]
        told.take("model.dropout", round(rate, 6), node)
