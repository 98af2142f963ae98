"""Gradient buckets: which gradients travel together and after which operator of backward a bucket is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sim.model.architecture import Architecture, Layer, Parameter
from sim.scenario.fields.schema import Parallel

_MIB = 2**20
#: DDP's `bucket_cap_mb` and the field's default: it asks nothing of stacks that count their buckets otherwise.
_DDP_MIB = float(Parallel.model_fields["bucket_mb"].default)


def bucket_elements(parallel: Parallel, width: float, own: float) -> float:
    """Elements of `width` bytes in a full bucket of a stack whose own buckets have `own` elements (DeepSpeed's
    reduce_bucket_size, Megatron's --ddp-bucket-size): these, unless `bucket_mb` asks for another size than DDP's."""
    return own if parallel.bucket_mb == _DDP_MIB else parallel.bucket_mb * _MIB / width


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are reduced by one call.

    Attributes:
        numel: elements.
        position: layer of the stack whose backward completes it.
        operator: index of the completing operator, counted in backward order (0 = the layer's last operator).
        group: communicator it is reduced over: of all replicas, or of the ranks that hold the same experts.
        parts: elements of each gradient, of every buffer whose buckets travel in one call, where that is told.
        wide: elements whose parameters are gathered in a wider dtype than the others'.
        chunk: the pipeline chunk whose parameters they are.
    """

    numel: int
    position: int
    operator: int
    group: str = "data"
    parts: tuple[tuple[int, ...], ...] = ()
    wide: int = 0
    chunk: int = 0


#: Which gradients a row of buckets takes: those of routed experts, the others, or all (None).
Routed = bool | None


def apart(make: Callable[[Routed, str], list[Bucket]], experts: bool) -> list[Bucket]:
    """Buckets of dense and of routed parameters, which never share one, in the order in which they are launched.

    Args:
        make: buckets of one kind of gradients on a communicator.
        experts: whether routed experts are spread over ranks, so that theirs go over another group.

    Source: Megatron-LM `distributed_data_parallel.py` (buffers, expert_parallel_buffers).
    """
    if not experts:
        return make(None, "data")
    return sorted([*make(False, "data"), *make(True, "expert_data")], key=lambda b: (-b.position, b.operator))


#: Whether a bucket takes a parameter of a layer.
Chosen = Callable[[Layer, Parameter], bool]


def ready_order(architecture: Architecture, routed: Routed = None, within: range | None = None,
                chosen: Chosen | None = None) -> list[tuple[int, int, int]]:
    """(position, operator in backward order, elements) of every gradient, in the order in which they become ready.

    Args:
        within: positions of the layers, default all.
        chosen: which parameters of those count, default all.
    """
    order: list[tuple[int, int, int]] = []
    of_layer: dict[int, list[tuple[int, int]]] = {}
    for position in reversed(range(len(architecture.stack)) if within is None else within):
        layer = architecture.stack[position]
        if id(layer) not in of_layer:
            of_layer[id(layer)] = [(i, p.numel) for i, op in enumerate(reversed(layer.operators))
                                   for p in op.parameters if (routed is None or p.routed == routed)
                                   and (chosen is None or chosen(layer, p))]
        order.extend((position, i, numel) for i, numel in of_layer[id(layer)])
    return order


def fill(architecture: Architecture, first_limit: float, limit: float, routed: Routed = None,
         group: str = "data", within: range | None = None, chosen: Chosen | None = None) -> list[Bucket]:
    """Buckets by PyTorch's rule: add the gradient, *then* close when the bucket has reached its limit.

    Args:
        first_limit, limit: elements; the first bucket closes earlier (1 MiB), so that communication starts early.
        within, chosen: as in `ready_order`.

    Source: PyTorch `reducer.cpp`, `compute_bucket_assignment_by_size`.
    """
    buckets: list[Bucket] = []
    part: list[int] = []
    filled, place = 0, (0, 0)
    for position, operator, numel in ready_order(architecture, routed, within, chosen):
        filled, place = filled + numel, (position, operator)
        part.append(numel)
        if filled >= (limit if buckets else first_limit):
            buckets.append(Bucket(filled, *place, group, (tuple(part),)))
            filled, part = 0, []
    if filled:
        buckets.append(Bucket(filled, *place, group, (tuple(part),)))
    return buckets


def joined(buckets: Sequence[Bucket]) -> Bucket:
    """Buckets whose calls are one: complete when the last of them is."""
    last = max(buckets, key=lambda bucket: (-bucket.position, bucket.operator))
    return replace(last, numel=sum(bucket.numel for bucket in buckets), wide=sum(bucket.wide for bucket in buckets),
                   parts=tuple(part for bucket in buckets for part in bucket.parts))


def fragments(buckets: Sequence[Bucket], ranks: int) -> list[int]:
    """Elements of each piece of a parameter that the first rank keeps, where every bucket is cut into `ranks` equal
    parts whatever parameters they run through.

    Source: Megatron-LM `distrib_optimizer.py`, _build_model_gbuf_range_map.
    """
    found: list[int] = []
    for part in (part for bucket in buckets for part in bucket.parts):
        left = -(-sum(part) // ranks)
        for numel in part:
            if left <= 0:
                break
            found.append(min(numel, left))
            left -= numel
    return found


def fill_before(architecture: Architecture, limit: float, routed: Routed = None,
                group: str = "data") -> list[Bucket]:
    """Buckets by DeepSpeed's rule: flush *before* the gradient that does not fit; a larger one travels alone.

    Source: DeepSpeed `stage_1_and_2.py`, `reduce_independent_p_g_buckets_and_remove_grads`.
    """
    buckets: list[Bucket] = []
    filled, place = 0, (0, 0)
    for position, operator, numel in ready_order(architecture, routed):
        if filled and filled + numel > limit:
            # Flushed when the next gradient arrives, so the bucket waits for that gradient's operator.
            buckets.append(Bucket(filled, position, operator, group))
            filled = 0
        filled, place = filled + numel, (position, operator)
    if filled:
        buckets.append(Bucket(filled, *place, group))
    return buckets
