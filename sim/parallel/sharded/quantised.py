"""Quantised communication of ZeRO++: gathers in int8 (qwZ) and reductions in int4 (qgZ), by the bytes they move.

qwZ (`zero_quantized_weights`): a rank quantises its shards of what is gathered at once, each group of fewer than 8,000
elements with an fp32 scale of its own, and two all-gathers bring int8 and scales to all. Whoever waits for the first of
those parameters dequantises all of them: in place of one that came alone, else into a flat tensor out of which each is
copied (`torch.cat`). Int8 and flat tensor live as long as the handle, until the last of its parameters is waited for.
The kernels read and write fp16, so bf16 is cast on both sides of them (0.19; earlier releases did not).

qgZ (`zero_quantized_gradients`, `all_to_all_quant_reduce`): each gradient by itself. It is quantised to int4 with its
pieces in the order of their owners (swizzle), exchanged all to all within the node, where each rank adds up what came
and quantises the sum, exchanged all to all with the same rank of every other node, dequantised and added up. Vectors,
and matrices whose elements twice the ranks do not divide, are reduced and scattered in 16 bits, each by itself; and
so is everything on a single node, where DeepSpeed quantises no gradients.

Source: deepspeed 0.14.4 and 0.19.8 runtime/zero/partition_parameters.py (`_all_gather_sequential`,
`_all_gather_coalesced`, `CUDAQuantizer`, `AllGatherCoalescedHandle`), runtime/comm/coalesced_collectives.py,
csrc/quantization/*.cu, pt_binding.cpp; Wang et al. 2023, arXiv 2306.10209, sections 4.1 and 4.3.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from sim.errors import Fault, UserError
from sim.model.architecture import Parameter
from sim.parallel.compute import traffic_kernel
from sim.parallel.sharded.arrivals import tensor_of
from sim.parallel.sharded.coordinator import Wanted
from sim.parallel.step import COMPUTE, Plan, blocks, collective
from sim.program import Label, SectionBuilder
from sim.scenario.fields.schema import Precision
from sim.work import DTYPE_BYTES, Kernel

#: Streams of gathers and reductions (`sim.parallel.sharded.zero3.STREAMS`).
GATHER, REDUCE = 1, 2
#: partition_parameters.py, CUDAQuantizer.target_group_size; elements one thread loads, which divide every group.
TARGET_GROUP, LOADED = 8000, 8
#: Bytes of a scale.
SCALE = 4
#: Bytes of an element the kernels read and write: fp16.
HALF = 2
#: What DeepSpeed quantises to.
WEIGHTS, GRADIENTS = "int8", "int4"
#: Communicators of qgZ: GPUs of a node, and GPUs of one number in all nodes.
INSIDE, ACROSS = "intra_node", "inter_node"


def arrives_as(precision: Precision) -> str:
    """The dtype of gathered parameters: quantised ones are made wide again."""
    return str(precision.parameters if precision.gather == WEIGHTS else precision.gather)


def leaves_as(precision: Precision) -> str:
    """The dtype in which gradients come to their reduction."""
    return str(precision.parameters if precision.reduce == GRADIENTS else precision.reduce)


@lru_cache(maxsize=4096)
def scales(numel: int) -> int:
    """Groups into which `numel` elements are quantised: the fewest that split them evenly, in multiples of `LOADED`, at
    most `TARGET_GROUP` elements each.

    Raises:
        UserError: nothing does, and DeepSpeed stops.
    """
    least, units = -(-numel // TARGET_GROUP), numel // LOADED
    if numel % LOADED == 0:
        small = [n for n in range(1, int(units**0.5) + 1) if units % n == 0]
        for groups in (*small, *(units // n for n in reversed(small))):
            if least <= groups:
                return groups
    raise UserError(Fault(f"DeepSpeed's quantised gathers stop at a rank's {numel:,} elements of a parameter, which "
                          f"{LOADED} does not divide", "training.precision.gather",
                          hint="use another number of GPUs or another vocabulary, or gather: fp16"))


@dataclass
class _Handle:
    """One quantised gather: what it brings, what of it nobody waited for yet, its int8 and flat tensors."""

    wanted: tuple[Wanted, ...]
    kernels: tuple[Kernel, ...]
    narrow: tuple[str, int]
    flat: tuple[str, int]
    left: set[Hashable] = field(default_factory=set)
    opened: bool = False


class QuantisedGathers:
    """Gathers of one job in int8.

    Args:
        ranks: over which parameters are padded.
    """

    def __init__(self, plan: Plan, ranks: int) -> None:
        self.plan, self.ranks = plan, ranks
        self.dtype = plan.scenario.training.precision.parameters
        self.casts = self.dtype != "fp16"
        self.handles: dict[Hashable, _Handle] = {}
        self.number = 0

    def begin(self) -> None:
        """A micro-step begins, and nothing is on its way."""
        self.handles, self.number = {}, 0

    def gather(self, section: SectionBuilder, label: Label, wanted: Sequence[Wanted], group: str,
               waits: Sequence[int], joins: Sequence[int]) -> int:
        """Quantise this rank's shards, gather them and their scales; returns the last task."""
        members = self.plan.groups[group].shape[1]
        whole = sum(-(-numel // self.ranks) * self.ranks for _, numel in wanted)
        shard, host_s = whole // members, self.plan.stack.host_collective_s
        groups = scales(shard)
        name = f"narrow:{self.number}"
        narrow = (name, blocks(whole) + blocks(SCALE * groups * members))
        section.allocate(*narrow, "buffers", GATHER)
        quantise = traffic_kernel("quantise parameters", WEIGHTS, shard, (HALF + 1) * shard + SCALE * groups)
        ready = section.kernels(GATHER, self.plan.compute.own((
            *self._moved("shards side by side", shard, len(wanted) > 1), *self._moved("to fp16", shard, self.casts),
            quantise)), label._replace(name="quantise"), waits, joins)
        call = collective(self.plan, "all_gather", whole, WEIGHTS, group)
        section.collective(GATHER, call, host_s, label, (ready,))
        call = collective(self.plan, "all_gather", SCALE * groups * members, "fp32", group)
        task = section.collective(GATHER, call, host_s, label._replace(name="all_gather scales"))
        self._expect(wanted, whole, groups * members, narrow)
        return task

    def _moved(self, name: str, numel: int, happens: bool) -> tuple[Kernel, ...]:
        return (traffic_kernel(name, self.dtype, numel, 2 * HALF * numel),) if happens else ()

    def _expect(self, wanted: Sequence[Wanted], whole: int, groups: int, narrow: tuple[str, int]) -> None:
        several = len(wanted) > 1
        numel = sum(n for _, n in wanted)
        kernels = [traffic_kernel("dequantise parameters", WEIGHTS, whole, (1 + HALF) * whole + SCALE * groups)]
        if several:
            copies = traffic_kernel("gathered parameter into place", self.dtype, numel, 2 * HALF * numel)
            kernels.append(replace(copies, launches=len(wanted)))
        kernels += self._moved("from fp16", numel, self.casts)
        handle = _Handle(tuple(wanted), tuple(kernels), narrow,
                         (f"{narrow[0]}:flat", blocks(HALF * whole) if several else 0), {name for name, _ in wanted})
        self.handles.update((name, handle) for name, _ in wanted)
        self.number += 1

    def arrived(self, section: SectionBuilder, names: Sequence[Hashable],
                held: dict[Hashable, tuple[str, int]], lasting: Container[Hashable] = ()) -> tuple[Kernel, ...]:
        """Parameters are waited for: kernels that make them wide, with all that came with them; `held` gets them, by
        names of their own if they last from one micro-step to the next."""
        kernels: list[Kernel] = []
        for name in names:
            handle = self.handles.pop(name, None)
            if handle is None:
                continue
            if not handle.opened:
                handle.opened = True
                kernels += handle.kernels
                if handle.flat[1]:
                    section.allocate(*handle.flat, "buffers", GATHER)
                for wide, numel in handle.wanted:
                    named = tensor_of(wide) if wide in lasting else f"fetched:{wide}:{handle.narrow[0]}"
                    held[wide] = (named, blocks(HALF * numel))
                    section.allocate(*held[wide], "gathered_parameters", GATHER)
            handle.left.discard(name)
            if not handle.left:
                for buffer in (handle.narrow, handle.flat):
                    if buffer[1]:
                        section.free(*buffer, "buffers", GATHER, (COMPUTE,))
        return tuple(kernels)


class QuantisedReductions:
    """Reductions of one job in int4, gradient by gradient, on the stream of reductions."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.inside, self.nodes = (int(plan.groups[name].shape[1]) for name in (INSIDE, ACROSS))
        self.ranks = self.inside * self.nodes
        self.dtype = plan.scenario.training.precision.parameters
        self.held: dict[str, tuple[str, int]] = {}
        self.number = 0

    def takes(self, gradient: Parameter) -> bool:
        """Whether a gradient is quantised."""
        return len(gradient.shape) > 1 and gradient.numel % (2 * self.ranks) == 0

    def reduce(self, section: SectionBuilder, label: Label, bucket: Sequence[Parameter], waits: Sequence[int],
               joins: Sequence[int]) -> int:
        """Every gradient of a bucket, one after another; returns the last task."""
        task = -1
        for gradient in bucket:
            one = self._quantised if self.takes(gradient) else self._plain
            task = one(section, label, gradient, waits, joins)
            waits, joins = (task,), ()
        for name in list(self.held):
            self._held(section, name, 0)
        return task

    def _plain(self, section: SectionBuilder, label: Label, gradient: Parameter, waits: Sequence[int],
               joins: Sequence[int]) -> int:
        """`reduce_scatter_coalesced` of one tensor: divided, and padded where the ranks do not divide it."""
        numel, stack = gradient.numel, self.plan.stack
        divide = traffic_kernel("gradients averaged", self.dtype, numel, 2 * HALF * numel)
        pad = (traffic_kernel("gradients by rank", self.dtype, numel, 2 * HALF * numel),) if numel % self.ranks else ()
        ready = section.kernels(REDUCE, self.plan.compute.own((*pad, divide)), label, waits, joins)
        call = collective(self.plan, "reduce_scatter", HALF * numel, self.dtype, "shard")
        return section.collective(REDUCE, call, stack.host_collective_s + self.ranks * stack.host_view_s, label,
                                  (ready,))

    def _quantised(self, section: SectionBuilder, label: Label, gradient: Parameter, waits: Sequence[int],
                   joins: Sequence[int]) -> int:
        """The two exchanges with the three kernels around them."""
        numel, narrow = gradient.numel, DTYPE_BYTES[GRADIENTS] * gradient.numel
        groups = max(*gradient.shape[:2], self.ranks)
        summed, left = narrow / self.inside, groups // self.inside
        self._held(section, "swizzled", blocks(narrow))
        task = self._kernel(section, label, "quantise gradients", numel, HALF * numel + narrow + SCALE * groups, waits,
                            joins)
        self._held(section, "exchanged inside", blocks(narrow))
        task = self._exchange(section, label, narrow, groups, INSIDE, task)
        self._held(section, "summed", blocks(summed))
        task = self._kernel(section, label, "add up quantised gradients", numel,
                            narrow + summed + SCALE * (groups + left), (task,))
        self._held(section, "exchanged across", blocks(summed))
        task = self._exchange(section, label, summed, left, ACROSS, task)
        own = numel // self.inside
        self._held(section, "wide", blocks(HALF * own))
        wide = traffic_kernel("dequantise gradients", GRADIENTS, own, summed + SCALE * left + HALF * own)
        # Python's sum() begins with 0, so there is an addition for every node's part; then they are averaged
        part = own // self.nodes
        add = traffic_kernel("add up gradients", self.dtype, part, (3 - 1 / self.nodes) * HALF * part)
        average = traffic_kernel("gradients averaged", self.dtype, part, 2 * HALF * part)
        return section.kernels(REDUCE, self.plan.compute.own((
            wide, *[add] * self.nodes, average)), label._replace(name="dequantise gradients"), (task,))

    def _kernel(self, section: SectionBuilder, label: Label, name: str, numel: int, moved: float,
                waits: Sequence[int], joins: Sequence[int] = ()) -> int:
        kernel = traffic_kernel(name, GRADIENTS, numel, moved)
        return section.kernels(REDUCE, self.plan.compute.own((kernel,)), label._replace(name=name), waits, joins)

    def _exchange(self, section: SectionBuilder, label: Label, size: float, groups: int, group: str, task: int) -> int:
        """Int4 and its scales, all to all."""
        host_s, label = self.plan.stack.host_collective_s, label._replace(name="all_to_all")
        for moved, dtype in ((size, GRADIENTS), (SCALE * groups, "fp32")):
            task = section.collective(REDUCE, collective(self.plan, "all_to_all", moved, dtype, group), host_s, label,
                                      (task,))
        return task

    def _held(self, section: SectionBuilder, name: str, size: int) -> None:
        """A tensor takes the place of the last gradient's of that name, which goes once the new one is there."""
        before = self.held.pop(name, None)
        if size:
            self.number += 1
            self.held[name] = (f"{name}:{self.number}", size)
            section.allocate(*self.held[name], "buffers", REDUCE)
        if before is not None:
            section.free(*before, "buffers", REDUCE)
