"""Mixtures of experts in a forward: routers pick the best of their outputs, experts multiply what they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from sim.imports.chakra.nodes import Node
from sim.imports.chakra.operators import Pass, Product
from sim.imports.chakra.told import Told


def read_experts(told: Told, one: Pass, behind: Sequence[Sequence[Product]], stream: int) -> bool:
    """Fields of `model.moe`, and the MLP's beside it; whether the model has experts."""
    routers = _routers(one, behind)
    if not routers:
        return False
    pick, product, block = routers[0]
    experts, best = product.out, pick.shape_out()[-1]
    told.take("model.moe.experts", experts, product.node, "what the router makes")
    told.take("model.moe.top_k", best, pick)
    _limits(told, one, experts)
    layers = len(one.attention)
    mixed = [index for _, _, index in routers]
    if len(mixed) < layers and mixed == list(range(layers - len(mixed), layers)):
        told.take("model.moe.first_dense", layers - len(mixed), pick, f"{len(mixed)} of {layers} blocks have a router")
    elif len(mixed) < layers:
        told.take("model.moe.every", max(1, layers // len(mixed)), pick, f"{len(mixed)} of {layers} blocks have one")
    width, origin = _width(one, behind[block], product, stream)
    if not width or origin is None:
        told.leave("experts", experts, "their width does not follow: --set model.moe.expert_ffn=N")
    else:
        told.take("model.moe.expert_ffn", width, origin)
        told.take("model.gated_mlp", _gated(one, behind[block], product, width), origin)
        _shared(told, behind[block], product, width)
    dense = [products for index, products in enumerate(behind) if index not in mixed]
    if dense and len(dense[0]) > 2:
        told.take("model.ffn", dense[0][-1].in_ * told.tensor, dense[0][-1].node, "of the blocks without experts")
    elif width:
        told.assume("model.ffn", width, "no block is without experts")
    return True


def _routers(one: Pass, behind: Sequence[Sequence[Product]]) -> list[tuple[Node, Product, int]]:
    """Each choice of the best outputs of a product behind attention: the choice, the product, the block."""
    found: list[tuple[Node, Product, int]] = []
    for node in one.others:
        if node.name != "aten::topk" or not node.shape(0) or not node.shape_out():
            continue
        for index, products in enumerate(behind):
            made = [product for product in products if product.node.id < node.id and product.out == node.shape(0)[-1]]
            later = index + 1 < len(behind) and behind[index + 1] and behind[index + 1][0].node.id < node.id
            if made and not later and not any(index == other for _, _, other in found):
                found.append((node, made[-1], index))
                break
    return found


def _limits(told: Told, one: Pass, experts: int) -> None:
    """Groups of experts that are chosen first (DeepSeek-V3): the best of each group, then the best groups."""
    picks = [node for node in one.others if node.name == "aten::topk" and node.shape_out()]
    for inner, outer in pairwise(picks):
        sizes = inner.shape(0)
        if len(sizes) == 3 and sizes[1] * sizes[2] == experts and outer.shape(0)[-1:] == sizes[1:2] and sizes[1] > 1:
            told.take("model.moe.groups", sizes[1], inner)
            told.take("model.moe.top_groups", outer.shape_out()[-1], outer)
            return


def _grouped(one: Pass) -> list[Node]:
    return [node for node in one.others if node.name == "aten::_grouped_mm" and len(node.shape(1)) == 3]


def _width(one: Pass, products: Sequence[Product], router: Product, stream: int) -> tuple[int, Node | None]:
    """Inner width of an expert: what its last product reads."""
    for node in _grouped(one):
        if node.shape(1)[2] == stream:
            return node.shape(1)[1], node
    rows = [one for one in products if one.node.id > router.node.id and one.rows != router.rows and one.out == stream]
    return (rows[0].in_, rows[0].node) if rows else (0, None)


def _gated(one: Pass, products: Sequence[Product], router: Product, width: int) -> bool:
    """Whether experts make twice what their last product reads, by one product or by two."""
    grouped = _grouped(one)
    if grouped:
        last = sum(node.shape(1)[1] == width for node in grouped)
        return any(node.shape(1)[2] == 2 * width for node in grouped) or len(grouped) >= 3 * last
    rows = [product for product in products if product.node.id > router.node.id and product.rows != router.rows]
    ends = sum(product.in_ == width for product in rows)
    return any(product.out == 2 * width for product in rows) or len(rows) >= 3 * ends


def _shared(told: Told, products: Sequence[Product], router: Product, width: int) -> None:
    """Experts that see every token: products of all rows beside the router."""
    rows = [one for one in products[1:] if one is not router and one.rows == router.rows and one.in_ % width == 0
            and one.in_ != one.out and one.out == router.in_]
    if rows:
        told.take("model.moe.shared_experts", rows[0].in_ * told.tensor // width, rows[0].node)
