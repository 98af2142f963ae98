"""One pipeline rank as a Program: its order list written as sections of compute and transfers. How its parameters and
gradients are held is said by `whole.py` and `sharded.py`.

An action (forward, backward or weight gradients of one micro-batch in one chunk) is one segment; what it sends and what
the next action waits for follow it in one batch. Distinct actions are few, so a section is written once and the
schedule names it again and again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sim.model.architecture import Layer
from sim.parallel.activations import FLOWING_POOL, OUTPUT_POOL, Activations
from sim.parallel.pipeline.orders import Action
from sim.parallel.pipeline.transfers import Edge, Transfers
from sim.parallel.pipeline.weights import kept_for_weights
from sim.parallel.step import COMPUTE, MicroStep, Plan, blocks
from sim.program import CollectiveCall, Label, MemoryOp, SectionBuilder
from sim.tensor_trace import LayerMemory
from sim.work import DTYPE_BYTES, Kernel


@dataclass(frozen=True)
class Passing:
    """How stages pass tensors on.

    Attributes:
        whole: elements of one micro-batch's tensor between two layers of a rank.
        elements, dtype: of it as a rank sends it.
        gather: elements the receiver gathers from its tensor ranks before it goes on, 0 = it has all.
        waits: "synchronised" (host and compute wait for the whole batch), "stream" (compute does), "overlapped"
            (compute waits for what it needs).
    """

    whole: int
    elements: int
    dtype: str
    gather: int
    waits: str


class _Batch(NamedTuple):
    """Actions between two exchanges, (kind, chunk, first, final, gathers) each, and what the next batch waits for."""

    actions: tuple[tuple[str, int, bool, bool, int], ...]
    needs: tuple[Edge, ...]


@dataclass
class Stage:
    """Writes the program of one pipeline rank.

    Attributes:
        rank, depth: pipeline rank, and how many there are.
        plan: of the rank's own layers, all chunks in a row.
        chunks: positions of each chunk in the plan's architecture.
        edges: communicator of every edge that touches the rank.
        streams: stream of every edge.
        tied: first and last stage hold copies of one table.
        separate: weight gradients are actions of their own.
    """

    rank: int
    depth: int
    plan: Plan
    chunks: Sequence[range]
    transfers: Transfers
    passing: Passing
    edges: dict[Edge, int]
    streams: dict[Edge, int]
    tied: bool
    separate: bool

    def write(self, actions: Sequence[Action]) -> None:
        """All sections of a step, in order; what recurs is written once and repeated."""
        plan = self.plan
        made: dict[tuple[_Batch, ...], SectionBuilder] = {}
        self._states()
        batches = self.batched(actions)
        self._first_receive([edge for action in batches[0] if (edge := self.transfers.needed(self.rank, action))])
        described = self._described(batches)
        for begin, length, repeats in fold(described, len(self.chunks) * self.depth):
            pattern = tuple(described[begin:begin + length])
            section = made.get(pattern)
            if section is None:
                section = made[pattern] = plan.builder.section(", ".join(
                    f"{_NAMES[kind]} of chunk {chunk}" for batch in pattern for kind, chunk, *_ in batch.actions))
                for batch in pattern:
                    self._act(section, batch)
            plan.builder.run(section, repeats)
        section = plan.builder.section("optimizer step")
        self._finish(section)
        plan.builder.run(section)

    def _described(self, batches: Sequence[Sequence[Action]]) -> list[_Batch]:
        """What is written of every batch: equal batches are one."""
        kinds = {(kind, chunk): self.transfers.needed(self.rank, Action(kind, chunk, 0))
                 for kind in ("F", "B", "W") for chunk in range(len(self.chunks))}
        last = "W" if self.separate else "B"
        final = {a.chunk: a.micro for together in batches for a in together if a.kind == last}
        firsts = not self._resident()
        found: list[_Batch] = []
        needs: list[tuple[Edge, ...]] = [tuple(edge for a in together if (edge := kinds[a.kind, a.chunk]))
                                         for together in batches]
        needs.append(())
        for i, together in enumerate(batches):
            ends = [a.kind == last and final[a.chunk] == a.micro for a in together]
            own = tuple([(a.kind, a.chunk, firsts and a.micro == 0 and a.kind != "F", end, self._gathers(a, end))
                         for a, end in zip(together, ends, strict=True)])
            found.append(_Batch(own, needs[i + 1]))
        return found

    def _states(self) -> None:
        """Memory that is held for the whole step."""
        raise NotImplementedError

    def _resident(self) -> bool:
        """Whether gradients live in a buffer, so that the first micro-batch's are like the others'."""
        return False

    def _gathers(self, action: Action, final: bool) -> int:
        """What of sharded parameters an action gathers; called once for every action in order."""
        return 0

    def batched(self, actions: Sequence[Action]) -> list[tuple[Action, ...]]:
        """Actions between two exchanges: one, but a forward and the backward behind it where chunks are interleaved and
        exchanges block (Megatron-LM `schedules.py`, send_forward_backward_recv_forward_backward)."""
        turns = next((i for i, a in enumerate(actions) if a.kind == "B"), 0) < sum(a.kind == "F" for a in actions)
        pairs = len(self.chunks) > 1 and self.passing.waits != "overlapped" and turns
        batches: list[tuple[Action, ...]] = []
        i = 0
        while i < len(actions):
            paired = pairs and actions[i].kind == "F" and i + 1 < len(actions) and actions[i + 1].kind == "B"
            batches.append(tuple(actions[i:i + 2]) if paired else (actions[i],))
            i += len(batches[-1])
        return batches

    # ------------------------------------------------------------------------------------------------------ actions
    def _act(self, section: SectionBuilder, batch: _Batch) -> None:
        verbs = {"F": self._forward, "B": self._backward, "W": self._weights}
        moved: list[Edge] = []
        tasks: list[int] = []
        for kind, chunk, first, final, gathers in batch.actions:
            arrived = self.transfers.needed(self.rank, Action(kind, chunk, 0))
            if arrived is not None:
                self._passed(section, arrived, 1)
            action, micro = Action(kind, chunk, 0), MicroStep(self.plan.architecture.batch, first, final)
            task = verbs[kind](section, action, micro, self._waited(action), gathers)
            edge = self.transfers.sent(self.rank, action)
            if edge is not None:
                moved.append(edge)
                tasks.append(task)
        for edge, task in zip(moved, tasks, strict=True):
            self._transfer(section, edge, (task,) if task >= 0 else ())
            self._passed(section, edge, -1)
        for edge in batch.needs:
            self._transfer(section, edge, ())
        moved += batch.needs
        if moved and self.passing.waits == "synchronised":
            section.host(0.0, Label("pipeline", _PHASES[batch.actions[-1][0]], "synchronise"),
                         joins=tuple(self.streams[edge] for edge in moved))

    def _waited(self, action: Action) -> tuple[int, ...]:
        """Streams the action's kernels join."""
        if self.passing.waits == "stream":
            return tuple(self.streams.values())
        need = self.transfers.needed(self.rank, action)
        return () if need is None else (self.streams[need],)

    def _transfer(self, section: SectionBuilder, edge: Edge, waits: Sequence[int]) -> None:
        kind = "send" if edge.source == self.rank else "recv"
        size = round(self.passing.elements * DTYPE_BYTES[self.passing.dtype])
        call = CollectiveCall(kind, size, self.passing.dtype, self.edges[edge])
        label = Label("pipeline", "forward" if edge.forward else "backward", kind)
        joins = () if waits or kind == "recv" else (COMPUTE,)
        section.collective(self.streams[edge], call, self.plan.stack.host_collective_s, label, waits, joins)

    def _passed(self, section: SectionBuilder, edge: Edge, sign: int) -> None:
        """A stage's output or its input's gradient changes hands: layers count theirs as taken over by their neighbour.

        The sender drops an output as soon as it is on its way (Megatron-LM `schedules.py`, deallocate_output_tensor).
        """
        pool = OUTPUT_POOL if edge.forward else FLOWING_POOL
        size = sign * blocks(self.passing.whole * DTYPE_BYTES[self.passing.dtype])
        memory = section.section.memory
        memory.append(MemoryOp(len(section.section), pool.name, size, pool.category))
        section.section.layers.append(LayerMemory(len(memory) - 1, len(memory), "passed", -1, None))

    def _first_receive(self, needs: Sequence[Edge]) -> None:
        if needs:
            section = self.plan.builder.section("first receive")
            for edge in needs:
                self._transfer(section, edge, ())
            self.plan.builder.run(section)

    def _layers(self, chunk: int) -> list[Layer]:
        return [self.plan.architecture.stack[position] for position in self.chunks[chunk]]

    def _forward(self, section: SectionBuilder, action: Action, micro: MicroStep, waiting: tuple[int, ...],
                 gathers: int = 0) -> int:
        layers = self._layers(action.chunk)
        memory = Activations(self.plan, section, self.chunks[action.chunk].stop, keep_gradients=False)
        for position, layer in zip(self.chunks[action.chunk], layers, strict=True):
            memory.forward(position, layer)
        gathered = self._gathered(self.transfers.needed(self.rank, action))
        segment = self.plan.compute.run(layers, gathered)
        return self._kernels(section, segment, Label(f"chunk{action.chunk}", "forward", "forward"), waiting)

    def _backward(self, section: SectionBuilder, action: Action, micro: MicroStep, waiting: tuple[int, ...],
                  gathers: int = 0) -> int:
        """One backward pass of a chunk; returns its last task, -1 if there is none."""
        raise NotImplementedError

    def _accumulated(self, layers: Sequence[Layer], micro: MicroStep) -> tuple[Kernel, ...]:
        """Traffic behind the fresh gradients of layers."""
        raise NotImplementedError

    def _finish(self, section: SectionBuilder) -> None:
        """Gradients of all stages complete, then the optimizer."""
        raise NotImplementedError

    def _weights(self, section: SectionBuilder, action: Action, micro: MicroStep, waiting: tuple[int, ...],
                 gathers: int = 0) -> int:
        layers = self._layers(action.chunk)
        held = self._held_for_weights(action.chunk)
        if held:
            section.free("kept for weight gradients", held, "activations")
        segment = self.plan.compute.run_backward(layers, ["none"] * len(layers), "only", (),
                                                 self._accumulated(layers, micro))
        return self._kernels(section, segment, Label(f"chunk{action.chunk}", "backward", "weight gradients"), waiting)

    def _kernels(self, section: SectionBuilder, segment: int, label: Label, waiting: tuple[int, ...]) -> int:
        return -1 if segment < 0 else section.kernels(COMPUTE, segment, label, joins=waiting)

    def _gathered(self, need: Edge | None) -> tuple[CollectiveCall, ...]:
        if need is None or not self.passing.gather:
            return ()
        size = round(self.passing.gather * DTYPE_BYTES[self.passing.dtype])
        communicator = self.plan.builder.communicators.index("tensor")
        return (CollectiveCall("all_gather", size, self.passing.dtype, communicator),)

    def _held_for_weights(self, chunk: int) -> int:
        return sum(kept_for_weights(layer) for layer in self._layers(chunk))


def fold(items: Sequence[Hashable], group: int) -> list[tuple[int, int, int]]:
    """A list as (begin, length, repeats) of patterns that recur one after another.

    Args:
        group: length over which chunks take turns (chunks x stages); patterns of one to three items, and of one to
            three groups, are looked for.
    """
    lengths = sorted({n * unit for n in (1, 2, 3) for unit in (1, group)})
    found: list[tuple[int, int, int]] = []
    at = 0
    while at < len(items):
        best = (at, 1, 1)
        for length in lengths:
            end = at + length
            while end < len(items) and items[end] == items[end - length]:
                end += 1
            repeats = (end - at) // length
            if repeats > 1 and repeats * length > best[1] * best[2]:
                best = (at, length, repeats)
        found.append(best)
        at += best[1] * best[2]
    return found


_NAMES = {"F": "forward", "B": "backward", "W": "weight gradients"}
_PHASES = {"F": "forward", "B": "backward", "W": "backward"}
