"""How long a step of FSDP takes at least: what its gathers and reductions add to the kernels.

All collectives of a shard group run one after another, and some run while no kernel can: the root's gather before the
first layer of every micro-step, the first block's as far as the embedding does not hide it, the reductions of the root
and of the first block behind the last layer. The others run beside kernels, which they slow (SMs and memory bandwidth
that they hold): how little they slow them together is a fractional knapsack over the kernels (Dantzig, Operations
Research 5(2), 1957): they are put beside those first that suffer least.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from sim.parallel.compute import traffic_kernel
from sim.parallel.layout import REPLICAS
from sim.parallel.sharded.units import Unit, units_of
from sim.sizing.bounds.held import Places, summed
from sim.sizing.bounds.tables import Floats, Ints, Table
from sim.sizing.space.policies import POLICIES
from sim.work import DTYPE_BYTES, Kernel

#: Memory bandwidth that collectives hold is rounded down to multiples of this, bytes/s: few states are asked for.
_STATE_BPS = 2e10


class _Wire(NamedTuple):
    """Seconds of the collectives of one micro-step.

    Attributes:
        forward, backward, reduced: of all gathers in each direction, and of all reductions.
        together: of all gathers and reductions of the group that has most, which take turns.
        root, block, root_reduced, block_reduced: of the root's and the first block's.
        replicated: of the root's reduction over replicas.
        slowed: kernels' seconds beside them against alone, from both kinds of collective the less.
    """

    forward: float
    backward: float
    reduced: float
    together: float
    root: float
    block: float
    root_reduced: float
    block_reduced: float
    replicated: float
    slowed: tuple[tuple[int, float], ...]


def sharded_s(table: Table, places: Places, policies: Ints, name: str, factor: int, batches: int,
              inline: Floats) -> Floats:
    """Seconds of the micro-steps of a step at least, without the optimizer: shape (policies,).

    Args:
        inline: seconds of saved tensors on their way out and back in line with the kernels of a micro-step, by policy;
            collectives run beside them.
    """
    scenario, seconds, layers = table.scenario, table.seconds, table.layers
    parallel = scenario.parallel
    again = summed(seconds.again, places, policies)[0, 0]
    work = seconds.forward[-1] + seconds.backward[-1] + again + inline
    finetune = scenario.training.finetune
    tuned = finetune is not None and finetune.method != "full"
    sized = parallel.wrap != "block"  # blocks may fall into several units
    if sized or factor < 2 or (parallel.expert > 1 and tuned) or parallel.offload.parameters not in ("none", None):
        return np.asarray(batches * work)
    if tuned:
        return np.asarray(batches * np.maximum(work, _gathers_s(table, name, factor)))
    spread = factor // parallel.expert if parallel.expert > 1 else 0
    units = units_of(layers.architecture, parallel.wrap, factor, scenario.software.fsdp == 2, spread)
    own = [i for i, unit in enumerate(units) if unit is not units[0]]
    if not own:
        return np.asarray(batches * work)
    wire = _wire(table, units, own, name, factor, spread)
    begin, end = seconds.forward[own[0]], seconds.backward[own[0]]
    alone_s = wire.root + max(0.0, wire.block - begin)
    behind_s = wire.root_reduced + max(0.0, wire.block_reduced - end) + wire.replicated
    gathers = wire.forward + wire.backward
    last = seconds.backward[own[0] + 1]  # of the first block and what is before it
    reduces = batches if parallel.reduce_every_micro_step else 1
    total = np.zeros(len(policies))
    for reduced, first, often in _turns(batches, reduces):
        kernels = Counter() if spread else _own_kernels(table, units, name, reduced, first)
        shown = alone_s + (behind_s if reduced else 0.0)
        beside = np.maximum(0.0, gathers + (wire.reduced + wire.replicated if reduced else 0.0) - shown - inline)
        # of spread experts two groups share the links, which may lower what a collective holds of a GPU
        added, slowed = (0.0, np.zeros(len(policies))) if spread else _slowed(table, policies, places, kernels,
                                                                              wire.slowed, beside)
        wired = gathers + last + (wire.root_reduced + wire.replicated if reduced else 0.0)
        if reduced:
            wired = max(wired, wire.reduced, wire.together)
        total += often * np.maximum(wired, shown + work + added + slowed)
    return total


def _gathers_s(table: Table, name: str, factor: int) -> float:
    """Seconds of the gathers of blocks, frozen matrices and all, in one micro-step at least: backward, which may not
    need the first, gathers them again where forward lets them go."""
    ranks = table.alone.group(table.layout, table.scenario, ("shard", factor),
                              lambda: table.layout.group(REPLICAS, factor))
    sizes = np.diff(table.layers.whole)[table.layers.blocks]
    each = {size: table.alone.seconds("all_gather", round(size), ranks) for size in set(sizes.tolist())}
    keep = name == "zero2" or table.scenario.parallel.reshard_after_forward is not True
    seconds = [each[size] for size in sizes.tolist()]
    return sum(seconds) + (0.0 if keep else sum(seconds[1:]))


def _turns(batches: int, reduces: int) -> list[tuple[bool, bool, int]]:
    """Micro-steps as (whether gradients are reduced, whether it is the first, how often)."""
    if reduces == batches:
        return [(True, True, 1), (True, False, batches - 1)]
    return [(False, True, 1), (False, False, batches - 2), (True, False, 1)] if batches > 1 else [(True, True, 1)]


def _wire(table: Table, units: list[Unit], own: list[int], name: str, factor: int, spread: int) -> _Wire:
    """
    Args:
        spread: ranks that share the experts which they hold, 0 where the whole shard group does. What is gathered of
            one unit over either group goes through one stream, and so do reductions.
    """
    parallel, precision = table.scenario.parallel, table.precision
    gather, reduce = DTYPE_BYTES[precision.gather], DTYPE_BYTES[precision.reduce]
    ranks = table.alone.group(table.layout, table.scenario, ("shard", factor),
                              lambda: table.layout.group(REPLICAS, factor))
    few = ranks if spread < 2 else table.alone.group(
        table.layout, table.scenario, ("expert shard", spread),
        lambda: table.layout.group(REPLICAS, spread, factor // spread))
    keep = name == "zero2" or parallel.reshard_after_forward is not True
    counted = Counter((unit.dense, unit.routed) for unit in (units[i] for i in own))

    def each(kind: str, dense: int, routed: int, width: float) -> tuple[float, float]:
        return (table.alone.seconds(kind, round(dense * width), ranks) if dense else 0.0,
                table.alone.seconds(kind, round(routed * width), few) if routed and spread > 1 else 0.0)

    def all_of(kind: str, width: float) -> tuple[float, float]:
        found = [(n, each(kind, *parts, width)) for parts, n in counted.items()]
        return sum(n * one[0] for n, one in found), sum(n * one[1] for n, one in found)

    gathered, scattered = all_of("all_gather", gather), all_of("reduce_scatter", reduce)
    root, block = (units[0].dense, units[0].routed), (units[own[0]].dense, units[own[0]].routed)
    replicas = table.layout.sizes["data"] * table.layout.sizes["context"] // factor
    replicated = 0.0
    if replicas > 1:
        across = table.alone.group(table.layout, table.scenario, ("replicate", factor),
                                   lambda: table.layout.group(REPLICAS, replicas, factor))
        replicated = table.alone.seconds("all_reduce", round(units[0].own * reduce), across) if sum(root) else 0.0
    lonely = replicas == 1 and len(table.layers.names) == 1  # no other flow shares the links and lowers the rate
    states = []
    for kind, width in (("all_gather", gather), ("reduce_scatter", reduce)):
        channels, bps = table.alone.taken(kind, round(sum(block) * width), ranks)
        states.append((channels, bps // _STATE_BPS * _STATE_BPS if lonely else 0.0))
    (root_s, _), (root_reduced, _) = each("all_gather", *root, gather), each("reduce_scatter", *root, reduce)
    times = 1 if keep else 2
    together = max(root_s + root_reduced + times * gathered[0] + scattered[0], times * gathered[1] + scattered[1])
    return _Wire(root_s + sum(gathered), (times - 1) * sum(gathered), root_reduced + sum(scattered), together, root_s,
                 sum(each("all_gather", *block, gather)), root_reduced, sum(each("reduce_scatter", *block, reduce)),
                 replicated, tuple(states))


def _own_kernels(table: Table, units: list[Unit], name: str, reduced: bool, first: bool) -> Counter[Kernel]:
    """FSDP's own copies and additions of one micro-step (`sim.parallel.sharded.fsdp1`, `fsdp2`)."""
    scenario = table.scenario
    precision, every = table.precision, scenario.parallel.reduce_every_micro_step
    g, r = DTYPE_BYTES[precision.gather], DTYPE_BYTES[precision.reduce]
    two, keep = scenario.software.fsdp == 2, name == "zero2" or scenario.parallel.reshard_after_forward is not True
    found: Counter[Kernel] = Counter()
    distinct = Counter((unit.numel, unit.padded, unit is units[0]) for unit in {u.name: u for u in units}.values())

    def add(label: str, numel: int, width: float, often: int) -> None:
        if numel and width:
            found[traffic_kernel(label, precision.gather, numel, numel * width)] += often

    for (numel, padded, root), often in distinct.items():
        if not two:
            add("flatten gradient", numel, 2 * g + (0 if first or every else g) + (
                2 * r + (g + r if precision.gather != precision.reduce else 0) if reduced else 0), often)
            continue
        add("copy-out", padded, 2 * round(padded * g) / max(1, padded), often * (1 if keep or root else 2))
        if reduced:
            add("copy-in", padded, g + r, often)
        elif not first or max(g, DTYPE_BYTES["bf16"]) != r:  # else what autograd made is kept
            add("accumulate", numel, g + (1 if first else 2) * r, often)
    return found


def _slowed(table: Table, policies: Ints, places: Places, extra: Counter[Kernel],
            states: tuple[tuple[int, float], ...], beside_s: Floats) -> tuple[float, Floats]:
    """Seconds of `extra` kernels, and by how much all kernels of a micro-step are slowed at least while collectives of
    `beside_s` run beside them; both by policy."""
    device, layers = table.device, table.layers
    added = float(device.times(list(extra)) @ list(extra.values())) if extra else 0.0
    counts = layers.kernel_counts
    if counts is None or not beside_s.any():
        return added, np.zeros(len(policies))
    base, again = counts
    kernels = list(dict.fromkeys([*base, *extra, *(k for of in again for k in of)]))
    alone = device.times(kernels)
    slow = np.minimum(*(device.times(kernels, *state) for state in states))
    slow = np.maximum(slow, alone)
    often = np.array([base[k] + extra[k] for k in kernels], dtype=np.float64)
    blocks = int(layers.through[-1])
    full = POLICIES.index("full")
    more = np.array([[of[k] for k in kernels] for of in again], dtype=np.float64)
    times = np.where(policies < len(POLICIES), blocks, np.minimum(policies - len(POLICIES) + 1, blocks))
    ran = often + more[np.where(policies < len(POLICIES), policies, full)] * times[:, None]
    share = 1.0 - alone / np.maximum(slow, 1e-30)
    order = np.argsort(share, kind="stable")
    room = np.cumsum(ran[:, order] * slow[order], axis=1)
    # collectives inside layers are slowed by nothing that is sure: they come first
    inline = (table.seconds.forward[-1] + table.seconds.backward[-1] + summed(
        table.seconds.again, places, policies)[0, 0]) - (often - np.array([extra[k] for k in kernels])) @ alone - (
        more[np.where(policies < len(POLICIES), policies, full)] * times[:, None]) @ alone
    left = np.maximum(0.0, beside_s - np.maximum(inline, 0.0))[:, None]
    before = np.concatenate((np.zeros((len(policies), 1)), room[:, :-1]), axis=1)
    filled = np.clip(left - before, 0.0, room - before)
    found: Floats = (filled * share[order]).sum(axis=1)
    return added, found
