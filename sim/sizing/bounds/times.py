"""How long a step takes at least, from tables of layers and what order lists say for certain.

A rank of a pipeline cannot begin its first backward before the micro-batch has passed all stages and come back; from
then on it has the rest of its own work; and what it passes back last goes through all stages before it. Reductions
that nothing hides, the optimizer and the gather of its results follow. Nothing is ever faster than alone, so all of
this is a lower bound (a part of the longest path of Baccelli et al. 1992, chapter 2).

Ranks wait for each other at the end of a step where the norm of all gradients is summed (clipping) and schedules
synchronise; elsewhere steps slide into each other, and a rank is held to the span of its own actions alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sim.model import optimizer_kernels
from sim.parallel.compute import traffic_kernel
from sim.parallel.pipeline.actions import passing, split
from sim.parallel.places import aligned
from sim.sizing.bounds.held import Places, Ways, summed
from sim.sizing.bounds.orders import SEARCHED, Facts
from sim.sizing.bounds.outside import of as outside_of
from sim.sizing.bounds.outside import saved_s, update_s
from sim.sizing.bounds.sharded import sharded_s
from sim.sizing.bounds.tables import Floats, Ints, Seconds, Table
from sim.sizing.bounds.turns import in_turn_s
from sim.sizing.space.layouts import STRATEGIES
from sim.work import DTYPE_BYTES

Bools = npt.NDArray[np.bool_]


class Own(NamedTuple):
    """Seconds of a rank's actions alone, of shape (ranks, chunks, policies); weights' gradients are 0 where they are
    part of backward. `hops`: a transfer from each rank to the next."""

    forward: Floats
    backward: Floats
    weights: Floats
    hops: Floats


class Times:
    """Lower bounds of steps; remembers the optimizer's seconds."""

    def __init__(self) -> None:
        self._update_s: dict[Any, float] = {}
        self._outside_s: dict[Any, float] = {}
        self._traffic_s: dict[Any, float] = {}

    def steps_s(self, table: Table, places: Places, policies: Ints, facts: Facts, schedule: str,
                ways: Ways) -> Floats:
        """Seconds of a step at least: shape (ways, policies)."""
        together = _together(table, schedule)
        inline, beside = saved_s(table, places, policies)  # of a pipeline nothing is kept outside
        issued = _issued(table, places, policies, facts, schedule)
        runs: dict[bytes, _Run] = {}
        found = []
        for index, part in zip(ways.strategy.tolist(), ways.spread.tolist(), strict=True):
            name = STRATEGIES[index]
            update = np.array([self._update(table, numel, part, name) for numel in places.numel.tolist()])
            if table.shards(name) and not schedule:
                steps = sharded_s(table, places, policies, name, part, facts.batches, inline)
                found.append(np.maximum(issued, update[0] + np.maximum(steps, facts.batches * beside)))
                continue
            paired = table.paired(name, schedule, policies)
            if paired.tobytes() not in runs:
                runs[paired.tobytes()] = _run(table, places, policies, facts, schedule, paired)
            way, hidden, width, travel = runs[paired.tobytes()]
            reduced, gathered, added = self._tail(table, places, name, schedule)
            shown = reduced[:, None]
            if table.scenario.parallel.overlap:
                shown = np.maximum(0.0, shown - hidden - inline)
            after = (update + gathered)[:, None]  # with which the next step begins
            begun = after + way.begun
            if together:
                begun = np.maximum(begun, after[facts.along[:, 0] // width].min() + way.filled)
            late = way.late[:, None] * added[:, None]
            through = begun + way.work + (facts.batches - 1) * added[:, None] - late
            total = (through + np.maximum(way.behind + late + shown, way.back)).max(axis=0)
            if not schedule:
                total = total + in_turn_s(table, name, facts.batches)
            outside = np.maximum(facts.batches * beside, travel)
            found.append(np.maximum(np.maximum(total + facts.batches * inline, update.min() + outside), issued))
        return np.array(found)

    def _tail(self, table: Table, places: Places, name: str, schedule: str) -> tuple[Floats, Floats, Floats]:
        """Of every rank: its gradients' reduction, the gather of parameters behind the optimizer (beside the next
        forward nothing of it is certain to show), and the traffic that adds one micro-batch's gradients to those
        before; shape (ranks,)."""
        zero = np.zeros(len(places.numel))
        path, scenario = table.stack.gradient_path, table.scenario
        precision, replicas = scenario.training.precision, table.layout.sizes["data"] * table.layout.sizes["context"]
        here = scenario.parallel.offload.optimizer in ("none", None) or outside_of(table).hybrid
        whole = name in ("none", "ddp", "zero1") and here
        if not whole or scenario.training.optimizer_in_backward:
            return zero, zero, zero
        wide = DTYPE_BYTES[precision.gradients]
        resident = path == "grad_buffer" and table.stack.adds_halves
        fused = resident or (path in ("grad_buffer", "accumulator") and wide > DTYPE_BYTES[precision.parameters])
        per = 0.0 if fused else 3 * wide
        added = np.array([self._traffic(table, numel, per) for numel in places.numel.tolist()])
        joined = schedule == "dualpipe" and not aligned(scenario, table.layout)  # both copies of a stage may lie better
        if replicas < 2 or joined:
            return zero, zero, added
        scattered = path == "ipg" or (path == "grad_buffer" and name == "zero1")
        kind = "reduce_scatter" if scattered and name != "ddp" else "all_reduce"

        def moved(kind: str, width: float) -> Floats:
            if scenario.parallel.expert == 1:
                return places.numel * table.alone.moved_s(table.layout, scenario, "data", kind, width)
            dense, routed = (table.alone.moved_s(table.layout, scenario, group, kind, width)
                             for group in ("data", "expert_data"))
            both: Floats = np.maximum((places.numel - places.routed) * dense, places.routed * routed)
            return both  # two groups, beside each other

        hidden = path == "grad_buffer" and scenario.parallel.overlap and table.stack.gathers_ahead
        exposed = name == "zero1" and not hidden
        gathered = moved("all_gather", DTYPE_BYTES[table.precision.gather]) if exposed else zero
        return moved(kind, DTYPE_BYTES[precision.reduce]), gathered, added

    def _traffic(self, table: Table, numel: float, width: float) -> float:
        if not width or numel < 1:
            return 0.0
        key = (table.device, numel, width)
        if key not in self._traffic_s:
            kernel = traffic_kernel("gradient", table.scenario.training.precision.gradients, int(numel), numel * width)
            self._traffic_s[key] = float(table.device.times((kernel,))[0])
        return self._traffic_s[key]

    def _update(self, table: Table, numel: float, shards: int, strategy: str) -> float:
        """The optimizer's own kernels on one rank's share, or what it takes outside. Of Muon nothing is counted: what
        a rank orthogonalises depends on which matrices it holds."""
        local = int(numel) // max(1, shards)
        device, training = table.device, table.scenario.training
        if table.scenario.parallel.offload.optimizer in ("cpu", "nvme"):
            outer = (device, local, strategy, table.scenario.parallel.offload.parameters)
            if outer not in self._outside_s:
                self._outside_s[outer] = update_s(table, local, strategy)
            return self._outside_s[outer]
        key = (device, local)
        if key not in self._update_s:
            self._update_s[key] = 0.0 if training.optimizer_in_backward or training.optimizer == "muon" else float(
                device.times(optimizer_kernels(local, 1, training.precision, training.optimizer,
                                               table.scenario.software.optimizer_kernel, clip=False)).sum())
        return self._update_s[key]


def _issued(table: Table, places: Places, policies: Ints, facts: Facts, schedule: str) -> Floats:
    """Seconds in which the host of the busiest rank launches a step's layers, by policy: it does one thing at a time,
    and no step is shorter in the long run."""
    host = _own(table, table.layers.host, places, policies, schedule)
    found: Floats = facts.batches * (host.forward + host.backward + host.weights).sum(axis=1).max(axis=0)
    return found


class _Run(NamedTuple):
    """What all ways of data parallelism have in common under a schedule.

    Attributes:
        way: see there.
        hidden: seconds of actions that a reduction may hide behind, shape (ranks, policies).
        chunks: of every rank.
        travel: seconds of a step that tokens are on their way beside kernels, of the rank with most: (policies,).
    """

    way: _Way
    hidden: Floats
    chunks: int
    travel: Floats


def _run(table: Table, places: Places, policies: Ints, facts: Facts, schedule: str, paired: Bools) -> _Run:
    """Where tokens of the policies that are `paired` travel beside another micro-batch's kernels."""
    own = _own(table, table.seconds, places, policies, schedule)
    travel = np.zeros(len(policies))
    if paired.any():
        whole, stays = own, _own(table, table.staying, places, policies, schedule)
        forward, backward, weights = (np.where(paired, b, a) for a, b in zip(whole[:3], stays[:3], strict=True))
        own = Own(forward, backward, weights, whole.hops)
        less = (whole.forward - forward + whole.backward - backward + whole.weights - weights).sum(axis=1)
        travel = facts.batches * less.max(axis=0)
    way = _path(own, facts, schedule, _together(table, schedule), _waited(table, schedule))
    hidden = np.zeros_like(way.work) if schedule and split(schedule) else (
        facts.ends[:, 0, :, None] * own.forward + facts.ends[:, 1, :, None] * own.backward).sum(axis=1)
    return _Run(way, hidden, own.forward.shape[1], travel)


def _own(table: Table, seconds: Seconds, places: Places, policies: Ints, schedule: str) -> Own:
    """Seconds of every rank's actions, from those of layers."""
    def of(column: Floats) -> Floats:
        found: Floats = (column[places.stop] - column[places.start])[..., None]
        return found

    again = summed(seconds.again, places, policies)
    forward = of(seconds.forward)
    if schedule and split(schedule):
        backward, weights = of(seconds.inputs) + again, of(seconds.weights)
    else:
        backward, weights = of(seconds.backward) + again, np.zeros_like(forward)
    hops = np.zeros(1)
    if schedule:
        scenario, block = table.scenario, table.layers.block
        elements, share = block.input.elements, 1
        if scenario.parallel.pipeline_scatter and scenario.parallel.tensor > 1 and not (
                scenario.parallel.sequence_parallel):
            share = scenario.parallel.tensor
        hops = table.alone.hops_s(table.layout, scenario, round(elements // share * DTYPE_BYTES[block.input.dtype]))
    return Own(forward, backward, weights, hops)


def _together(table: Table, schedule: str) -> bool:
    """Whether no rank begins the next step before all have finished their backward."""
    clips = table.stack.clip_gradients and table.scenario.training.optimizer != "none"
    return bool(schedule) and schedule not in SEARCHED and clips


def _waited(table: Table, schedule: str) -> bool:
    """Whether a rank goes on only when what it sent has arrived."""
    return bool(schedule) and not split(schedule) and passing(table.scenario, table.stack, schedule) != "overlapped"


class _Way(NamedTuple):
    """Of every rank and policy, shape (ranks, policies), seconds.

    Attributes:
        begun: from a rank's first action to its first backward; `filled`: to it from the first action of all.
        work: from then to the end of its last backward; `behind`: of its own work behind that, `back`: of what it
            passed back on the way to the first stage.
        late: weights' gradients behind the last backward, of every rank, in micro-batches.
    """

    begun: Floats
    filled: Floats
    work: Floats
    behind: Floats
    back: Floats
    late: Floats


def _path(own: Own, facts: Facts, schedule: str, together: bool, waited: bool) -> _Way:
    f, b, w, _ = own
    ranks, chunks, _ = f.shape
    work = facts.batches * (f + b + w).sum(axis=1)
    ahead = (facts.ahead[..., None] * f).sum(axis=1)
    behind = (facts.late[..., None] * w).sum(axis=1)
    late = facts.late.max(axis=1).astype(np.float64)
    rest = work - ahead - behind
    if not schedule:
        zero = np.zeros_like(work)
        return _Way(np.broadcast_to(ahead, work.shape), zero, rest, zero, zero, late)
    before_f, after_f = _passed(f, facts, own.hops)
    before_b, after_b = _passed(b, facts, own.hops)
    rows, first, back = np.arange(ranks), facts.first, facts.back
    around = after_f[rows, back] + after_b[rows, back]
    # of an order that is not known the most forwards that may come before are counted: what is less comes behind
    begun = np.maximum((facts.through[..., None] * f).sum(axis=1) + around, ahead)
    if schedule != "dualpipe":  # the first forward and the first backward are of one micro-batch
        begun = np.maximum(begun, f[rows, first] + after_f[rows, first] + after_b[rows, back])
    filled = np.maximum(before_f[rows, first] + begun, before_f[rows, back] + f[rows, back] + around)
    if waited:
        nearest = np.minimum(own.hops, np.roll(own.hops, 1))
        turns = np.maximum(0, facts.sends - facts.ahead.sum(axis=1) - 1) // (1 if chunks == 1 else 2)
        rest = rest + (turns * nearest)[:, None]
    passes = before_b[rows, facts.last] if together else np.zeros_like(behind)
    return _Way(begun, filled, rest, behind, passes, late)


def _passed(each: Floats, facts: Facts, hops: Floats) -> tuple[Floats, Floats]:
    """Seconds of the chunks before and after each chunk along the model, transfers between ranks included; shape of
    `each`."""
    ranks, chunks, policies = each.shape
    flat = each.reshape(ranks * chunks, policies)
    before, after = np.empty_like(flat), np.empty_like(flat)
    for along in facts.along:
        place = along // chunks
        here, there = place[:-1], place[1:]
        lower = np.where((there - here) % ranks == 1, here, there)
        hop = np.where(here == there, 0.0, hops[lower])[:, None]
        row = flat[along]
        moved = np.concatenate((np.zeros((1, 1)), np.cumsum(hop, axis=0)))
        total = np.cumsum(row, axis=0)
        before[along] = total - row + moved
        after[along] = total[-1] - total + moved[-1] - moved
    return before.reshape(each.shape), after.reshape(each.shape)
