"""Machines with 10% more of one resource, for the same Program: what a step would be with it is simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sim.engine import Machine, simulate
from sim.hardware.whatif import scaled
from sim.program import ON_CPU, Job, Program, Section

#: More of a resource, as result.md asks.
MORE = 1.1
#: What 10% more of something saves of the seconds spent on it.
SAVED = 1.0 - 1.0 / MORE
#: Keys of `sensitivity`, in order, and one of jobs that keep something outside the GPU. Latency grows too: its change
#: is positive.
RESOURCES = ("tensor_cores", "memory_bandwidth", "intra_node", "network", "latency", "host")
OFFLOAD = "offload"
#: Bandwidth inside nodes, between them, and latency of each.
_LINKS = {"intra_node": (MORE, 1.0, 1.0), "network": (1.0, MORE, 1.0), "latency": (1.0, 1.0, MORE),
          "every link": (MORE, MORE, 1.0 / MORE)}


def step_with_more(job: Job, machine: Machine, *resources: str) -> float:
    """Seconds that the tasks of a step take with 10% more of resources of `RESOURCES`, `OFFLOAD`, or of "every link"
    (bandwidth everywhere, and less latency)."""
    network = machine.network
    kernels = {name: MORE for name, resource in (("arithmetic", "tensor_cores"),
                                                 ("memory_bandwidth", "memory_bandwidth")) if resource in resources}
    devices = [scaled(device, **kernels) for device in machine.devices] if kernels else machine.devices
    for resource in resources:
        if resource in _LINKS and network is not None:
            network = network.scaled(*_LINKS[resource])
    if "host" in resources:
        job = with_faster_host(job, MORE)
    if OFFLOAD in resources:
        job = with_faster_offload(job, MORE)
    return simulate(job, Machine(devices, network, job)).step_time_s


def offloads(job: Job) -> bool:
    """Whether anything is copied to or from the host, or computed there."""
    return any(program.copies or any(label.name.endswith(ON_CPU) for label in program.labels)
               for program in job.programs)


def with_faster_host(job: Job, factor: float) -> Job:
    """The job with every host time divided by `factor`; an optimizer on the CPU keeps its own."""
    def shorter(section: Section, program: Program) -> list[float]:
        return [s if program.labels[label].name.endswith(ON_CPU) else s / factor
                for s, label in zip(section.host_s, section.label, strict=True)]

    def program(one: Program) -> Program:
        return replace(one, segments=[replace(s, host_s=tuple(t / factor for t in s.host_s)) for s in one.segments],
                       sections=[replace(s, host_s=shorter(s, one)) for s in one.sections])
    return replace(job, programs=[program(p) for p in job.programs])


def with_faster_offload(job: Job, factor: float) -> Job:
    """The job with copies and an optimizer on the CPU that take so many times less."""
    def shorter(section: Section, program: Program) -> Sequence[float]:
        return [s / factor if program.labels[label].name.endswith(ON_CPU) else s
                for s, label in zip(section.host_s, section.label, strict=True)]

    def program(one: Program) -> Program:
        return replace(one, copies=[c._replace(size_bytes=round(c.size_bytes / factor)) for c in one.copies],
                       sections=[replace(s, host_s=list(shorter(s, one))) for s in one.sections])
    return replace(job, programs=[program(p) for p in job.programs])
