"""What the calls of a trace are: products with weights, attention, norms, and the passes of the model over them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from sim.imports.chakra.nodes import Node, Shape

_PRODUCTS = ("aten::linear", "aten::addmm", "aten::mm", "aten::matmul", "aten::bmm", "aten::baddbmm",
             "aten::_scaled_mm")
#: Where the two factors stand among the inputs.
_FACTORS = {"aten::addmm": (1, 2), "aten::baddbmm": (1, 2)}
_NORMS = {"aten::layer_norm": "layernorm", "aten::native_layer_norm": "layernorm", "aten::rms_norm": "rmsnorm",
          "aten::_fused_rms_norm": "rmsnorm", "aten::rsqrt": "rmsnorm"}
_ATTENTION = re.compile(r"scaled_dot_product|flash_?attn|flash_attention|efficient_attention|flex_attention", re.I)
#: Libraries' kernels take tokens before heads, PyTorch's operator heads before tokens.
_TOKENS_FIRST = re.compile(r"flash_?attn|aten::_flash_attention|aten::_efficient_attention", re.I)
_GROUPED = "aten::_grouped_mm"
#: What stands between a call and the kernel where a dispatch mode looks at it.
MODE = "PythonDispatchMode"
_SOFTMAX = re.compile(r"softmax", re.I)


@dataclass(slots=True)
class Product:
    """A product with a matrix of weights.

    Attributes:
        node: the outermost call of it; in_, out: sizes of the weights, on this rank; rows: of what they multiply.
        bias: whether it adds one; stored, computes: dtypes of the weights as they are kept, and of the result.
        place: memory of the weights; narrow: whether its factors are of 8 bits.
        ran: whether a dispatch mode (selective checkpointing's cache) let it through to the kernel.
    """

    node: Node
    in_: int
    out: int
    rows: int
    bias: bool
    stored: str
    computes: str
    place: tuple[object, ...] | None
    narrow: bool = False
    ran: bool = False


@dataclass(slots=True)
class Attention:
    """A call of attention on this rank.

    Attributes:
        heads, kv_heads: of queries and keys; width, value_width: of a head; batch: 0 if unknown.
        tokens, keys: of queries and keys; kernel: the call's name, or eager.
        causal: None if unknown; ran: as `Product.ran`.
    """

    node: Node
    heads: int
    kv_heads: int
    width: int
    value_width: int
    batch: int
    tokens: int
    keys: int
    kernel: str
    causal: bool | None = None
    dropout: float = 0.0
    ran: bool = False

    def part(self, batch: int) -> None:
        """Tells batch and heads apart where the call has them as one."""
        if not self.batch and batch and self.heads % batch == 0:
            self.batch, self.heads, self.kv_heads = batch, self.heads // batch, self.kv_heads // batch


@dataclass(slots=True)
class Norm:
    """A norm: its kind, the sizes it runs over, and the memory of what it reads."""

    node: Node
    kind: str
    sizes: Shape
    reads: tuple[object, ...] | None


@dataclass
class Pass:
    """Calls of one kind of work: a forward, what of it runs again in backward, or all of a trace."""

    products: list[Product] = field(default_factory=list)
    attention: list[Attention] = field(default_factory=list)
    norms: list[Norm] = field(default_factory=list)
    others: list[Node] = field(default_factory=list)

    def between(self, first: int, last: int) -> Pass:
        """Those with numbers from `first` up to but not with `last`."""
        return Pass([one for one in self.products if first <= one.node.id < last],
                    [one for one in self.attention if first <= one.node.id < last],
                    [one for one in self.norms if first <= one.node.id < last],
                    [one for one in self.others if first <= one.id < last])


def sort_calls(nodes: Sequence[Node]) -> tuple[Pass, Pass]:
    """Calls of forward, and those of backward that are forward's, run again."""
    forward, again = Pass(), Pass()
    factors: list[Node] = []  # products of activations, which eager attention has two of
    for node in nodes:
        if node.updating:
            continue
        kind = again if node.backward else forward
        if _ATTENTION.search(node.name) and "ackward" not in node.name:
            if not _same_call(kind, node) and (found := _attention(node)) is not None:
                kind.attention.append(found)
        elif _GROUPED in node.above or any(_ATTENTION.search(one) for one in node.above):
            continue  # the CPU multiplies expert by expert inside
        elif node.name in _PRODUCTS:
            _product(kind, factors, node)
        elif _SOFTMAX.search(node.name) and "ackward" not in node.name:
            eager = _eager(node, factors)
            if eager is not None:
                kind.attention.append(eager)
                factors.clear()
        elif node.name in _NORMS:
            _norm(kind, node)
        else:
            kind.others.append(node)
    again.products = [one for one in again.products if _of_forward(one)]
    for kind in (forward, again):
        _tell_apart(kind.products)
    return forward, again


def _tell_apart(products: Sequence[Product]) -> None:
    """Weights by their tensor where many of them seem to lie at one place, as DTensors do, which hold no memory."""
    sizes: dict[tuple[object, ...], set[object]] = {}
    for product in products:
        if product.place is not None:
            sizes.setdefault(product.place[:2], set()).add(product.place[2])
    for product in products:
        if product.place is not None and len(sizes[product.place[:2]]) > 1:
            product.place = ("tensor", *product.node.value(_FACTORS.get(product.node.name, (0, 1))[1])[:1])


def token_embedding(forward: Pass) -> list[Node]:
    """Calls of the embedding that tokens are looked up in, in order: that of the head's size, else of a batch."""
    calls = [node for node in forward.others if node.name == "aten::embedding" and "aten::embedding" not in node.above
             and len(node.shape(0)) == 2 and node.shape(1)]
    heads = [node for node in calls if forward.products and node.shape(0)[0] == forward.products[-1].out]
    batched = [node for node in calls if len(node.shape(1)) > 1 and node.shape(1)[0] > 1]
    calls = heads or batched or calls
    rows = max((node.shape(0)[0] for node in calls), default=0)
    return [node for node in calls if node.shape(0)[0] == rows]


def _same_call(kind: Pass, node: Node) -> bool:
    """Whether a call of attention that is known already encloses this one; notes where a mode let it through."""
    if not kind.attention or kind.attention[-1].node.name not in node.above:
        return False
    kind.attention[-1].ran |= MODE in node.above
    return True


def _product(kind: Pass, factors: list[Node], node: Node) -> None:
    """Notes a product; one inside another tells what that one's sizes are on this rank."""
    first, second = _FACTORS.get(node.name, (0, 1))
    left, right = node.shape(first), node.shape(second)
    if any(one in _PRODUCTS for one in node.above):
        if kind.products and kind.products[-1].node.name in node.above and node.name in ("aten::mm", "aten::addmm"):
            last = kind.products[-1]
            last.ran |= MODE in node.above
            if len(left) == 2 and len(right) == 2 and left[1] == right[0]:
                last.in_, last.out = right
        return
    if len(right) != 2 or len(left) < 2 or node.name in ("aten::bmm", "aten::baddbmm"):
        if len(left) > 2 and len(right) > 2:
            factors.append(node)
        return
    turned = node.name == "aten::linear"
    if left[-1] != (right[1] if turned else right[0]):
        return
    kind.products.append(Product(
        node, right[1] if turned else right[0], right[0] if turned else right[1], prod(left[:-1]),
        node.name == "aten::addmm" or (turned and bool(node.shape(2))), node.dtype(second), node.dtype_out(),
        node.place(second), node.name == "aten::_scaled_mm" or node.dtype(first) == "fp8"))


def _of_forward(product: Product) -> bool:
    """Whether a product in backward is one of forward that runs again: gradients never call the composite ones."""
    return product.node.name == "aten::linear" or (product.node.name == "aten::addmm")


def _attention(node: Node) -> Attention | None:
    query, keys, values = (node.shape(index) for index in range(3))
    if len(query) not in (3, 4) or len(keys) != len(query) or len(values) != len(query) or 0 in query:
        return None
    if len(query) == 3:  # packed: tokens, heads, width
        query, keys, values = (1, *query), (1, *keys), (1, *values)
    heads, tokens = (2, 1) if _TOKENS_FIRST.search(node.name) else (1, 2)
    found = Attention(node, query[heads], keys[heads], query[3], values[3], query[0], query[tokens], keys[tokens],
                      node.name)
    if node.name == "aten::scaled_dot_product_attention":
        causal, masked = node.value(5), bool(node.shape(3))
        found.causal = causal if isinstance(causal, bool) and (causal or not masked) else None
        found.dropout = _probability(node.value(4))
    return found


def _eager(node: Node, factors: list[Node]) -> Attention | None:
    """Attention of plain products: a softmax over scores that a product of activations made."""
    sizes = node.shape(0)
    if not factors or len(sizes) not in (3, 4):
        return None
    last = factors[-1]
    at = _FACTORS.get(last.name, (0, 1))
    query, keys = last.shape(at[0]), last.shape(at[1])
    if query[-2] != sizes[-2] or keys[-1] != sizes[-1]:
        return None
    batch, heads = (sizes[0], sizes[1]) if len(sizes) == 4 else (0, sizes[0])
    return Attention(node, heads, heads, query[-1], query[-1], batch, sizes[-2], sizes[-1], "eager")


def _norm(kind: Pass, node: Node) -> None:
    if any(one in _NORMS for one in node.above):
        return
    sizes = node.shape(0)
    if len(sizes) < 2 or (node.name == "aten::rsqrt" and sizes[-1] != 1):
        return
    kind.norms.append(Norm(node, _NORMS[node.name], sizes, node.place(0)))


def _probability(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1 else 0.0


def most_common(values: Sequence[str]) -> str:
    """The value most calls have, "" of none."""
    known = Counter(value for value in values if value)
    return known.most_common(1)[0][0] if known else ""
