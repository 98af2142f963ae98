"""Where the weights of a request are: whole on the GPU, in host memory, or shared out over ranks.

What is sharded goes through the forward of the techniques of training, FSDP 2's and ZeRO-3's, with the kernels of
inference in place of training's (`sharded.py`). ZeRO-3 whose shards live in host memory or on disks is
ZeRO-Inference (Aminabadi et al. 2022, arXiv 2207.00032, section 6; DeepSpeed 0.16.9 runtime/zero/
partition_parameters.py, NoGatherHandle: on one GPU the prefetched partition is copied and nothing gathered).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sim.hardware import pageable_bps
from sim.model.architecture import Architecture, Layer
from sim.model.inference.rank import Rank
from sim.parallel.layout import REPLICAS, Layout, Ranks
from sim.parallel.offload import Offload
from sim.parallel.serving.sharded import Segments, ServedFsdp2, ServedZero3, Shards
from sim.parallel.sharded import fsdp, zero3
from sim.parallel.sharded.submodules import submodules
from sim.parallel.step import COMPUTE, MicroStep, Plan
from sim.program import ON_CPU, Label, ProgramBuilder, SectionBuilder
from sim.scenario.fields.schema import Scenario
from sim.software import Stack

#: Streams of a stage that holds its weights: kernels; what arrives from the stage before; what goes to the next.
STREAMS = ("compute", "receive", "send")
RECEIVE, SEND = 1, 2
_SHARDED = ("fsdp", "zero3")


class Held(Protocol):
    """A way to hold weights."""

    builder: ProgramBuilder

    def hold(self, rank: Rank, layers: Sequence[Layer]) -> None:
        """Declare what the weights of these layers take throughout."""

    def forward(self, section: SectionBuilder, rank: Rank, own: range, waits: tuple[int, ...]) -> int:
        """The layers at positions `own` of the rank's stack, behind `waits`; returns the last task."""


def serving_groups(scenario: Scenario, layout: Layout) -> dict[str, Ranks]:
    """Communicators of a request by name: of ranks that share weights out, and of slices."""
    parallel = scenario.parallel
    groups = {"shard": layout.group(REPLICAS, parallel.sharding_factor)} if parallel.strategy in _SHARDED else {}
    return groups | ({"tensor": layout.group("tensor")} if parallel.tensor > 1 else {})


def held_of(scenario: Scenario, stack: Stack, architecture: Architecture, layout: Layout, groups: dict[str, Ranks],
            segments: Segments) -> Held:
    """How this scenario's stack holds the weights of a stage.

    Args:
        architecture: of the rank that reads the prompt.
    """
    parallel = scenario.parallel
    if parallel.strategy in _SHARDED:
        coordinated = parallel.strategy == "zero3" and stack.gradient_path == "ipg"
        streams = zero3.STREAMS if coordinated else fsdp.STREAMS
        once = [MicroStep(architecture.batch, True, False)]
        plan = Plan(scenario, stack, architecture, layout, groups, streams, once)
        technique = ServedZero3(plan, segments) if coordinated else ServedFsdp2(plan, segments)
        return Shards(plan, technique)
    depth = parallel.pipeline
    names = (*groups, *["pipeline"] * (depth if depth > 1 else 0))
    builder = ProgramBuilder(STREAMS, names, stack.launch_queue)
    if parallel.offload.parameters == "cpu":
        return Hooked(scenario, stack, builder, segments)
    return Whole(builder, segments)


class Whole:
    """Weights on the GPU."""

    def __init__(self, builder: ProgramBuilder, segments: Segments) -> None:
        self.builder, self.segments = builder, segments

    def hold(self, rank: Rank, layers: Sequence[Layer]) -> None:
        """All of them, for good."""
        self.builder.resident.append(("weights", round(sum(map(rank.weight_bytes, layers))), "parameters"))

    def forward(self, section: SectionBuilder, rank: Rank, own: range, waits: tuple[int, ...]) -> int:
        """Layer after layer."""
        architecture, task = rank.architecture(), -1
        for position in own:
            layer = architecture.stack[position]
            segment = self.segments(rank, layer)
            if segment is None:  # an encoder's, whose output is there
                continue
            task = section.kernels(COMPUTE, segment, Label(architecture.names[position], "forward", layer.kind), waits)
            waits = ()
        return task


class Hooked:
    """Weights in host memory, copied module by module by accelerate's hooks (`cpu_offload`, `device_map`: cpu).

    In front of a module's forward each of its tensors is copied from pageable memory and waited for; behind it they are
    dropped. So nothing overlaps: the GPU computes, then copies. A tied matrix is copied by each of its two modules.
    Bytes copied are those of the real hooks (tests: Llama, T5 under transformers 4.56.2).

    Source: accelerate 1.10.1 hooks.py (AlignDevicesHook.pre_forward, post_forward), utils/modeling.py
    (set_module_tensor_to_device: value.to(device), non_blocking False). CUDA Runtime API, synchronisation behaviour: a
    copy from pageable memory begins behind the stream's work and goes through a pinned buffer (recalled).
    """

    def __init__(self, scenario: Scenario, stack: Stack, builder: ProgramBuilder, segments: Segments) -> None:
        self.builder, self.segments, self.stack = builder, segments, stack
        self.offload = Offload(scenario, stack, builder)

    def hold(self, rank: Rank, layers: Sequence[Layer]) -> None:
        """All of them in the host's memory, where every process has its own."""
        self.offload.hold("weights", sum(map(rank.weight_bytes, layers)), "parameters")

    def forward(self, section: SectionBuilder, rank: Rank, own: range, waits: tuple[int, ...]) -> int:
        """Module after module: copy, wait, compute."""
        architecture, task = rank.architecture(), -1
        for position in own:
            layer = architecture.stack[position]
            for part in submodules(layer, 1):
                segment = self.segments(rank, layer, part.operators)
                if segment is None:
                    continue
                label = Label(architecture.names[position], "forward", layer.kind)
                sizes = [round(rank.parameter_bytes(layer, p)) for p in part.parameters
                         for _ in range(rank.hooks(layer, p))]
                largest = max(sizes, default=0)  # modules of one operator come and go one after another
                if sizes:
                    section.allocate("copied weights", largest, "parameters")
                    self._copied(section, sum(sizes), len(sizes), label._replace(name="weights"))
                task = section.kernels(COMPUTE, segment, label)
                if sizes:
                    section.free("copied weights", largest, "parameters")
        return task

    def _copied(self, section: SectionBuilder, size: int, tensors: int, label: Label) -> None:
        """The host fills pinned buffers, from which the copy engine takes them, and waits for every tensor."""
        section.host(0.0, label, joins=(COMPUTE,))
        copy = self.offload.fetch(section, size, label, stream=COMPUTE, place="cpu")
        section.host(size / pageable_bps(), label._replace(name=f"weights staged {ON_CPU}"))
        section.host(tensors * self.stack.host_read_s, label, waits=(copy,))
