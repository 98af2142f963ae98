"""Small matrices beside frozen weights: LoRA's two products behind the product they add to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sim.imports.chakra.model import Blocks
from sim.imports.chakra.nodes import Node
from sim.imports.chakra.operators import Pass, Product
from sim.imports.chakra.told import Told

_NAMES = {1: (("query", "key", "value"),), 3: (("query",), ("key",), ("value",))}


@dataclass(frozen=True, slots=True)
class Pair:
    """LoRA's matrices of one product: the frozen one, those that are trained, and dropout in front of them if any."""

    base: Product
    down: Product
    up: Product
    dropout: Node | None


def take_pairs(one: Pass) -> list[Pair]:
    """LoRA's pairs, taken out of a pass's products (peft tuners/lora/layer.py: result + B(A(dropout(x))))."""
    found, kept = [], []
    products = iter(range(len(one.products)))
    rates = {node.id: node for node in one.others if node.name == "aten::dropout" and node.value(2) is True}
    for at in products:
        kept.append(one.products[at])
        three = one.products[at:at + 3]
        if len(three) == 3 and _pair(*three):
            inside = [number for number in rates if three[0].node.id < number < three[1].node.id]
            base, down, up = three
            found.append(Pair(base, down, up, rates.pop(inside[0]) if inside else None))
            next(products)
            next(products)
    mine = {pair.dropout.id for pair in found if pair.dropout is not None}
    one.products[:] = kept
    one.others[:] = [node for node in one.others if node.id not in mine]
    return found


def read_pairs(told: Told, pairs: Sequence[Pair], blocks: Blocks) -> None:
    """Fields of `training.finetune`; nothing without pairs."""
    targets = _targets({id(pair.base) for pair in pairs}, blocks)
    if not targets:
        return
    path = "training.finetune"
    rank = Counter(pair.down.out for pair in pairs).most_common(1)[0][0]
    told.take(f"{path}.method", "lora", pairs[0].down.node, "small products behind that of a larger matrix")
    told.take(f"{path}.rank", rank, pairs[0].down.node)
    told.take(f"{path}.targets", targets, pairs[0].up.node)
    dropout = pairs[0].dropout
    rate = dropout.value(1) if dropout is not None else 0.0
    if isinstance(rate, float) and 0 <= rate < 1:
        told.take(f"{path}.dropout", round(rate, 6), dropout or pairs[0].down.node)
    if pairs[0].base.stored in ("fp32", "bf16", "fp16"):
        told.take(f"{path}.base", pairs[0].base.stored, pairs[0].base.node)


def _pair(base: Product, down: Product, up: Product) -> bool:
    return (down.in_ == base.in_ and up.in_ == down.out and up.out == base.out
            and 2 * down.out <= min(base.in_, base.out))


def _targets(bases: set[int], blocks: Blocks) -> list[str]:
    """Which of the first block's matrices, and whether the head, have a pair."""
    found: list[str] = []
    names = _NAMES.get(len(blocks.qkv), ())
    for product, mine in zip(blocks.qkv, names, strict=False):
        found += mine if id(product) in bases else ()
    behind = blocks.behind[0]
    found += ["projection"] if behind and id(behind[0]) in bases else []
    found += ["mlp"] if any(id(product) in bases for product in behind[1:]) else []
    found += ["head"] if blocks.head is not None and id(blocks.head) in bases else []
    return found
