"""Memory of a run: the fullest rank against its GPU, and the hosts of an offloading job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from sim.hardware import Device, host_share
from sim.hardware.outside import Outside
from sim.memory.allocator import PLAIN, Settings
from sim.memory.ledger import MemoryUse, peak
from sim.memory.reserved import Reserved, fragmentation_bytes, held_bytes, replayed
from sim.parallel import Lowered
from sim.program import Job, Program
from sim.report.numbers.paging import Paging
from sim.report.units import size as in_units
from sim.scenario.fields.schema import Scenario

#: Below this share of free memory PyTorch's allocator starts to retry (result.md, `warnings`).
TIGHT_HEADROOM = 0.05


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory that the ranks of a node need for what they offload, against what the node has.

    Attributes:
        by_category: bytes of one node.
    """

    by_category: dict[str, int]
    capacity_bytes: int

    @property
    def needed_bytes(self) -> int:
        """All categories."""
        return sum(self.by_category.values())

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"needed_bytes": self.needed_bytes, "capacity_bytes": self.capacity_bytes,
                "fits": self.needed_bytes <= self.capacity_bytes, "by_category": dict(self.by_category)}


@dataclass(frozen=True)
class MemoryResult:
    """Memory of the fullest rank against its GPU.

    Attributes:
        use: the replayed ledger of the fullest rank.
        stages: one ledger per distinct program (pipeline stage), in order.
        capacity_bytes: what CUDA reports as total.
        complete: whether every layer's temporaries are counted from its module code, not estimated.
        program: of the fullest rank.
        outside: what the device holds beside tensors, or None where it is not counted.
        host: host memory of an offloading job, of the fullest node.
        paging: optimizer states in unified memory, None without.
        settings: of the caching allocator.
    """

    use: MemoryUse
    stages: tuple[MemoryUse, ...]
    capacity_bytes: int
    complete: bool
    program: Program
    outside: Outside | None = None
    host: HostMemory | None = None
    paging: Paging | None = None
    settings: Settings = PLAIN

    @property
    def limit_bytes(self) -> int:
        """What the caching allocator can have of the device."""
        return self.capacity_bytes - self.use.at_peak["context"]

    @cached_property
    def _unlimited_bytes(self) -> int:
        return fragmentation_bytes(self.program, self.settings)

    @property
    def fragmentation_bytes(self) -> int:
        """What the allocator's blocks waste at most. The replay it takes is one without a limit."""
        return held_bytes(self._unlimited_bytes, self.limit_bytes, self.use.peak_allocated_bytes)

    @cached_property
    def reserved(self) -> Reserved:
        """The caching allocator's replay, which is asked for when first needed: near the end of the device's memory it
        costs more than all else here."""
        return replayed(self.program, self.limit_bytes, self.use.peak_allocated_bytes, self.settings,
                        self._unlimited_bytes)

    @property
    def known(self) -> Mapping[str, Any]:
        """What was asked of the allocator so far."""
        return {name: vars(self)[name] for name in ("_unlimited_bytes", "reserved") if name in vars(self)}

    def remember(self, known: Mapping[str, Any]) -> None:
        """Takes the allocator's answers as they were made of the same job in another process."""
        vars(self).update(known)

    @property
    def short(self) -> bool:
        """Whether the allocator has to give back cached blocks in every step. No allocator holds twice what it hands
        out, so that small jobs need no replay to know."""
        return 2 * self.use.peak_allocated_bytes > self.limit_bytes and bool(self.reserved.seconds)

    @property
    def pressed(self) -> bool:
        """Whether the allocator meets the end of the device's memory."""
        return not self.fits_device or self.short

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes by category at the highest point, with what the allocator's blocks waste."""
        return {**self.use.at_peak, "fragmentation": self.fragmentation_bytes}

    @property
    def reserved_bytes(self) -> int:
        """Blocks the caching allocator holds at most."""
        return self.use.peak_allocated_bytes + self.fragmentation_bytes

    @property
    def device_used_bytes(self) -> int:
        """What nvidia-smi shows: reserved blocks, the CUDA context and NCCL's buffers, and the pages of unified memory
        that find room beside them."""
        pages = 0 if self.paging is None else self.paging.resident_bytes
        return self.reserved_bytes + self.use.at_peak["context"] + pages

    @property
    def headroom_bytes(self) -> int:
        """Capacity that is left; negative when the job does not fit."""
        return self.capacity_bytes - self.device_used_bytes

    @property
    def free_bytes(self) -> int:
        """Capacity that is left where pages of unified memory, which give way, take none of it."""
        return self.headroom_bytes + (0 if self.paging is None else self.paging.resident_bytes)

    @property
    def filled(self) -> str:
        """What leaves no memory free of a job that fits: "short" = the allocator has to give cached blocks back in
        every step, "cache" = they fill the device, "pages" = those of unified memory do, which give way; "" = none."""
        if not self.fits:
            return ""
        if self.short:
            return "short"
        return "" if self.headroom_bytes > 0 else "pages" if self.free_bytes > 0 else "cache"

    @property
    def roomy(self) -> bool:
        """Whether the job fits and leaves memory free, with an allocator that does not run short."""
        return self.fits and self.free_bytes > 0 and not self.short

    @property
    def fits(self) -> bool:
        """Whether every step gets through, if need be by giving back cached blocks, and the host's memory suffices."""
        return self.fits_device and not self.host_missing_bytes

    @property
    def fits_device(self) -> bool:
        """Whether the GPU's memory suffices: what PyTorch allocates alone decides it (see `replayed`)."""
        return self.use.peak_allocated_bytes <= self.limit_bytes

    @property
    def missing_bytes(self) -> int:
        """What the GPU lacks for the tensors alone, 0 where they fit: cached blocks can be given back, so what the
        allocator's blocks waste is no part of it."""
        return max(0, self.use.peak_allocated_bytes - self.limit_bytes)

    @property
    def shown_bytes(self) -> int:
        """The peak on the device as people are shown it: of what does not fit, tensors and context alone."""
        return self.device_used_bytes if self.fits_device else self.capacity_bytes + self.missing_bytes

    @property
    def host_missing_bytes(self) -> int:
        """What the host of a node lacks for what is offloaded."""
        return 0 if self.host is None else max(0, self.host.needed_bytes - self.host.capacity_bytes)

    @property
    def warnings(self) -> list[str]:
        """What the figures rest on where that is less than module code, and what is close to its limit."""
        found, host, gib = [], self.host, 2**30
        if not self.complete:
            found.append("model states are exact; temporaries of layers whose module code is not written down are "
                         "estimated from what they keep for backward")
        if host is not None and self.host_missing_bytes:
            found.append(f"the host of a node needs {host.needed_bytes / gib:.4g} GiB for what is offloaded and has "
                         f"{host.capacity_bytes / gib:.4g} GiB: it does not fit")
        if self.paging is not None and self.paging.moved_bytes:
            found.append(f"{self.paging.states_bytes / gib:.3g} GiB of paged optimizer states do not fit beside the "
                         f"tensors: they travel to the device and back in every step, which adds "
                         f"{self.paging.seconds:.3g} s to it")
        near = 2 * self.use.peak_allocated_bytes > self.limit_bytes
        share = self.free_bytes / self.capacity_bytes if near else 1.0
        if self.short and self.fits:
            found.append(f"the allocator runs short {self.reserved.retries:.3g} times a step, a mean over what the "
                         f"driver may take: {self.reserved.released_bytes / gib:.3g} GiB of cached blocks go back and "
                         f"are taken again, which adds {1e3 * self.reserved.seconds:.0f} ms to it"
                         + ("" if self.settings.expandable_segments else
                            " (expandable segments waste less: --set software.allocator.expandable_segments=true)"))
        elif near and self.fits_device and not self.headroom_bytes and self.fragmentation_bytes:
            cached = in_units(self.fragmentation_bytes)
            found.append(f"the allocator's cache has filled the GPU: {cached} of it hold no tensor at the peak. Blocks "
                         "that are wholly free go back when more is asked for; with little more to hold, that happens "
                         "in every step and costs time")
        elif 0 <= share < TIGHT_HEADROOM:
            found.append(f"only {100 * share:.1f}% of the GPU's memory is left; allocator retries are likely")
        return found

    def _outside(self) -> dict[str, Any] | None:
        beside = self.outside
        return None if beside is None else {
            "context_bytes": beside.context_bytes, "nccl_bytes": beside.nccl_bytes,
            "workspace_bytes": beside.workspace_bytes, "confidence": beside.confidence}

    def to_json(self) -> dict[str, Any]:
        """`memory` of result.md."""
        where = self.use.where
        return {
            "peak_allocated_bytes": self.use.peak_allocated_bytes, "peak_reserved_bytes": self.reserved_bytes,
            "device_used_bytes": self.device_used_bytes, "capacity_bytes": self.capacity_bytes, "fits": self.fits,
            "headroom_bytes": self.headroom_bytes, "missing_bytes": self.missing_bytes, "complete": self.complete,
            "at_peak": self.at_peak,
            "allocator_retries": round(self.reserved.retries or 0),
            "where": None if where is None else {"section": where.section, "layer": where.layer, "phase": where.phase,
                                                 "task": where.task, "operator": where.operator},
            "phases": {name: dict(level) for name, level in self.use.phases.items()},
            "highest": dict(self.use.highest), "outside": self._outside(),
            "host": None if self.host is None else self.host.to_json(),
            "stages": [{"peak_allocated_bytes": stage.peak_allocated_bytes, "at_peak": dict(stage.at_peak),
                        "phases": {name: dict(level) for name, level in stage.phases.items()}}
                       for stage in self.stages],
        }


def _host_memory(scenario: Scenario, job: Job) -> HostMemory | None:
    """The fullest node's: its ranks hold what the rank that holds most does."""
    needs = []
    for program in job.programs:
        by_category: dict[str, int] = {}
        for _, size, category in program.host_resident:
            by_category[category] = by_category.get(category, 0) + size * scenario.cluster.gpus_per_node
        needs.append(by_category)
    fullest = max(needs, key=lambda n: sum(n.values()))
    capacity = int(scenario.cluster.topology.host.memory)
    return HostMemory(fullest, capacity) if fullest else None


def by_class(scenario: Scenario, lowered: Lowered, devices: Sequence[Device]) -> list[MemoryResult]:
    """Memory of every simulated class of ranks; neither engine nor network is asked.

    Args:
        devices: kinds of hardware, as `RankClass.device` counts them.
    """
    job = lowered.job
    uses = tuple(peak(program) for program in job.programs)
    host, asked = _host_memory(scenario, job), scenario.software.allocator
    split = None if asked.max_split_size_mb is None else asked.max_split_size_mb * 2**20
    found = [MemoryResult(uses[c.program], uses, int(devices[c.device].gpu.usable_memory_bytes),
                          lowered.memory_complete, job.programs[c.program],
                          lowered.outside[c.program] if lowered.outside else None, host,
                          settings=Settings(asked.expandable_segments, split)) for c in job.classes]
    return [_paged(scenario, one) if one.program.managed_bytes else one for one in found]


def _paged(scenario: Scenario, memory: MemoryResult) -> MemoryResult:
    """With the pages of unified memory, those that find no room on the device in the node's host memory."""
    cluster = scenario.cluster
    share = host_share(cluster.topology.host, cluster.gpus_per_node, cluster.topology.intra.gpus_per_switch or 1)
    # without room for the tensors there is none for pages, which needs no replay to know
    room = memory.limit_bytes - memory.reserved_bytes if memory.fits_device else 0
    paging = Paging(memory.program.managed_bytes, room, share)
    held = dict(memory.host.by_category) if memory.host is not None else {}
    if paging.host_bytes:
        held["optimizer_states"] = held.get("optimizer_states", 0) + paging.host_bytes * cluster.gpus_per_node
    host = HostMemory(held, int(cluster.topology.host.memory)) if held else None
    return replace(memory, paging=paging, host=host)


def fullest(results: Sequence[MemoryResult]) -> MemoryResult:
    """The rank with the least headroom."""
    return min(results, key=lambda m: m.limit_bytes - m.use.peak_allocated_bytes)
