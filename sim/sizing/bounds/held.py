"""What the fullest rank holds at least: states with gradients, or with the activations its order list has in flight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sim.sizing.bounds.orders import Facts
from sim.sizing.bounds.tables import Floats, Kept, Layers, Table
from sim.sizing.space.layouts import STRATEGIES
from sim.sizing.space.policies import POLICIES
from sim.work import DTYPE_BYTES

Ints = npt.NDArray[np.int64]

#: Schedules that compute the gradients of weights with those of inputs.
_WHOLE_BACKWARD = ("1f1b", "gpipe", "interleaved")


class Places(NamedTuple):
    """Chunks of pipeline ranks as positions and as blocks, each of shape (ranks, chunks); `before`: blocks of the rank
    that come before the chunk; `numel`: elements of every rank, `routed` those of routed experts; `frozen`: bytes of
    what is not trained, `whole`: of all parameters as they are gathered."""

    start: Ints
    stop: Ints
    first: Ints
    end: Ints
    before: Ints
    numel: Floats
    routed: Floats
    frozen: Floats
    whole: Floats


class Ways(NamedTuple):
    """Ways of data parallelism: strategy, ranks that parameters are split over, and optimizer states; of shape
    (ways,)."""

    strategy: Ints
    shards: Ints
    spread: Ints


def ways_of(strategy: Ints, factor: Ints, ranks: int) -> Ways:
    """Ways on `ranks` equal ranks, by strategy and sharding factor."""
    names = [STRATEGIES[i] for i in strategy.tolist()]
    shards = [f if name == "fsdp" else ranks if name == "zero3" else 1
              for name, f in zip(names, factor.tolist(), strict=True)]
    spread = [f if name == "fsdp" else ranks if name in ("zero1", "zero2", "zero3") else 1
              for name, f in zip(names, factor.tolist(), strict=True)]
    return Ways(strategy, np.array(shards, dtype=np.int64), np.array(spread, dtype=np.int64))


def summed(of: Floats, places: Places, policies: Ints) -> Floats:
    """Sums of a table over the blocks of each chunk, by policy: shape (ranks, chunks, policies)."""
    first, end = places.first[..., None], places.end[..., None]
    named, none, full = np.minimum(policies, len(POLICIES) - 1), of[POLICIES.index("none")], of[POLICIES.index("full")]
    found: Floats = of[named, end] - of[named, first]
    partial = policies >= len(POLICIES)
    if partial.any():
        turn = first + np.minimum(np.maximum(policies - len(POLICIES) + 1 - places.before[..., None], 0), end - first)
        partly = full[turn] - full[first] + none[end] - none[turn]
        found = np.where(partial, partly, found)
    return found


def flight(layers: Layers, places: Places, policies: Ints, facts: Facts) -> tuple[Floats, Floats]:
    """Bytes of activations of every rank at its highest point at least, and at any moment when as many chunks are in
    flight as ever, whichever they are; shape (ranks, policies) each.

    The highest point is when a backward begins: what is in flight then, what is kept for weights' gradients, and what
    the backward of a block needs; or, on the rank of the head, when the head's forward runs. Of a chunk of a pipeline
    the output is left out: it is on its way.
    """
    of = layers.kept
    kept = np.maximum(0.0, summed(of.kept, places, policies) - layers.output_bytes)
    found = _highest(facts.held, kept, of, places)
    steady = _lightest(facts.held[:, :, :kept.shape[1]], kept)
    last = np.maximum(places.end - 1, 0)[..., None]
    count = (places.end - places.first)[..., None]
    # of blocks recomputed in part, the chunk's last is among them or not
    partly = policies - len(POLICIES) + 1 - places.before[..., None] >= count
    policy = np.where(policies < len(POLICIES), policies, np.where(
        partly, POLICIES.index("full"), POLICIES.index("none")))
    if of.rises.size:
        rises = np.where(count > 0, of.rises[policy, last], 0.0).min(axis=1)
        found, steady = found + rises, steady + rises
    if of.head_rises:
        at_head = _highest(facts.at_head, kept, of, places) + of.head_rises - layers.output_bytes
        found = np.where(facts.at_head.max(axis=(1, 2))[:, None] > 0, np.maximum(found, at_head), found)
    return found, steady


def _highest(held: Floats, kept: Floats, of: Kept, places: Places) -> Floats:
    """Most bytes at any of a rank's moments: shape (ranks, policies)."""
    chunks = kept.shape[1]
    found: Floats = np.matmul(held[:, :, :chunks], kept)
    if held[:, :, chunks:].any():
        waiting = of.for_weights[places.stop] - of.for_weights[places.start]
        found = found + np.matmul(held[:, :, chunks:], waiting[..., None])
    highest: Floats = found.max(axis=1)
    return highest


def _lightest(held: Floats, kept: Floats) -> Floats:
    """Least bytes of as many chunks as a rank ever holds at once, none of them more often than it ever is held: shape
    (ranks, policies)."""
    order = np.argsort(kept, axis=1, kind="stable")
    most = np.take_along_axis(np.broadcast_to(held.max(axis=1)[..., None], kept.shape), order, axis=1)
    left = held.sum(axis=2).max(axis=1)[:, None, None] - (np.cumsum(most, axis=1) - most)
    found: Floats = (np.clip(left, 0.0, most) * np.take_along_axis(kept, order, axis=1)).sum(axis=1)
    return found


def fullest(table: Table, places: Places, flying: tuple[Floats, Floats], steps: int, ways: Ways,
            w: Mapping[str, float], schedule: str) -> Floats:
    """Bytes of the fullest rank: states with gradients, or with the activations in flight; shape (ways, policies).

    Args:
        flying: see `flight`.
        w: bytes per parameter of every category on the device.
        schedule: of the pipeline; "" = none.
    """
    staged = table.scenario.parallel.pipeline > 1
    numel, (highest, steady) = places.numel, flying
    resident = table.stack.gradient_path in ("grad_buffer", "accumulator")
    found = np.empty((len(ways.strategy), highest.shape[1]))
    for i, (index, shard, part) in enumerate(zip(*(x.tolist() for x in ways), strict=True)):
        name = STRATEGIES[index]
        shard = part if name == "zero2" and table.shards(name) else shard
        dense, routed = numel - places.routed, places.routed
        states = dense * _of_states(w, shard, part) + routed * _of_states(w, table.apart(shard), table.apart(part))
        states = states + places.frozen / shard * (w["parameters"] > 0.0)  # they are where parameters are
        gradients = w["gradients"] * (numel if name in ("none", "ddp", "zero1") else
                                      dense / part + routed / table.apart(part))
        lasting = np.zeros(len(numel))
        if table.shards(name):  # whole gradients stay from micro-step to micro-step (no_sync); a stage holds most
            whole = bool(w["gradients"]) or table.scenario.training.optimizer_in_backward  # or they leave as they come
            lasting = whole * numel * table.accumulated * (steps > 1 and not staged)  # when its first backward begins
            if shard > 1:
                lasting = lasting + (_in_stages(table, places, schedule) if staged else
                                     _at_once(table, name == "zero2"))
        elif resident:
            lasting = gradients
        most = np.maximum((states + gradients)[:, None], (states + lasting)[:, None] + highest)
        if staged and table.shards(name) and shard > 1:
            most = np.maximum(most, (states + lasting + _added(table, places, steps, schedule))[:, None] + steady)
        found[i] = most.max(axis=0)
    return found


def _at_once(table: Table, keeps: bool) -> float:
    """Bytes of gathered parameters that FSDP without a pipeline holds for certain beside shards and the most
    activations: all where it `keeps` them behind forward, or the root's (embedding and head), which it always does."""
    layers, parallel = table.layers, table.scenario.parallel
    if parallel.wrap != "block":
        return 0.0
    if keeps or parallel.reshard_after_forward is False:
        return float(layers.whole[-1])
    if layers.frozen[-1]:  # what a frozen model keeps is known to half a percent, which the root's would use up
        return 0.0
    return float(np.diff(layers.whole)[~layers.blocks].sum())


def _of_states(w: Mapping[str, float], shard: float, part: float) -> float:
    """Bytes per element of parameters that are split over `shard` ranks and optimizer states over `part`."""
    return w["parameters"] / shard + (w["master_parameters"] + w["optimizer_states"]) / part


def _in_stages(table: Table, places: Places, schedule: str) -> Floats:
    """Bytes that FSDP's stages hold for certain beside shards and the most activations: shape (ranks,).

    What is gathered stays from a chunk's first forward to its last backward (`Space.sets`). All forwards of a rank are
    over before that, and then its activations only fall, unless the weights' gradients are computed apart.
    """
    if schedule not in _WHOLE_BACKWARD or table.scenario.parallel.wrap != "block":
        return np.zeros(len(places.numel))
    return places.whole


def _added(table: Table, places: Places, steps: int, schedule: str) -> Floats:
    """Bytes of gradients that FSDP's stages add up unsharded: shape (ranks,).

    Backward passes but the last do so (`parallel/pipeline/sharded.py`); where forward and backward take turns long
    enough, all chunks have had one while as many are in flight as ever.
    """
    if schedule not in _WHOLE_BACKWARD or schedule == "gpipe" or table.scenario.parallel.wrap != "block" or (
            steps < 2 * table.scenario.parallel.pipeline):
        return np.zeros(len(places.numel))
    return min(DTYPE_BYTES[table.precision.gather], DTYPE_BYTES[table.precision.reduce]) * places.numel


def least(table: Table, ranks: int, strategies: frozenset[str]) -> float:
    """Bytes of the fullest rank of any layout of the slice at least, whatever its schedule and recomputation: as much
    as the mean rank holds of one micro-batch.

    It never falls when micro-batches grow, so where it is too much, it is for every larger one.
    """
    layers, w, of = table.layers, table.layers.widths, table.layers.kept
    depth, blocks = table.scenario.parallel.pipeline, int(layers.through[-1])
    part = ranks if strategies & {"zero1", "zero2", "zero3", "fsdp"} else 1
    shard = ranks if any(name == "zero3" or table.shards(name) for name in strategies) else 1
    resident = table.stack.gradient_path in ("grad_buffer", "accumulator") and strategies <= {"none", "ddp", "zero1"}
    dense, routed = float(layers.numel[-1] - layers.routed[-1]), float(layers.routed[-1])
    states = dense * _of_states(w, shard, part) + routed * _of_states(w, table.apart(shard), table.apart(part))
    states += (dense + routed) * w["gradients"] * resident
    kept = float(of.kept[:, -1].min()) - (layers.output_bytes * blocks if depth > 1 else 0.0)
    rises = float(of.rises.min()) if of.rises.size and depth <= blocks else 0.0
    frozen = float(layers.frozen[-1]) / shard * (w["parameters"] > 0.0)
    return (states + frozen + max(0.0, kept)) / depth + rises
