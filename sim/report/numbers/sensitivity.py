"""What 10% more of each resource does to a step: the same Program on machines that differ in one resource.

Each resource costs one more simulation, so this is worked out only when asked for (`drystep run --sensitivity`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sim.engine import Machine, simulate
from sim.hardware.whatif import scaled
from sim.program import Job, Program
from sim.report.numbers.bounding import MORE

#: Keys of `sensitivity`, in order. Latency grows too: its change is positive.
RESOURCES = ("tensor_cores", "memory_bandwidth", "intra_node", "network", "latency", "host")


def sensitivity(job: Job, machine: Machine, step_s: float, at_least_s: float = 0.0) -> dict[str, float]:
    """Change of the step for 10% more of each resource, as a fraction of `step_s`.

    tensor_cores: their peak, at the same power. intra_node, network: bandwidth of the links inside and between nodes.
    latency: of every collective. host: speed of everything the host does.

    Args:
        job: what ran.
        machine: what it ran on.
        step_s: its step.
        at_least_s: what a step takes at least, whatever the machine (reading the data).
    """
    network = machine.network
    def step(other: Machine) -> float:
        return max(simulate(other.job, other).step_time_s, at_least_s)

    def links(intra: float, inter: float, latency: float) -> Machine:
        return Machine(machine.devices, None if network is None else network.scaled(intra, inter, latency), job)
    found = {
        "tensor_cores": Machine([scaled(d, arithmetic=MORE) for d in machine.devices], network, job),
        "memory_bandwidth": Machine([scaled(d, memory_bandwidth=MORE) for d in machine.devices], network, job),
        "intra_node": links(MORE, 1.0, 1.0), "network": links(1.0, MORE, 1.0), "latency": links(1.0, 1.0, MORE),
        "host": Machine(machine.devices, network, with_faster_host(job, MORE))}
    return {name: step(found[name]) / step_s - 1.0 for name in RESOURCES}


def bound_by(changes: Mapping[str, float], bubble_share: float) -> str:
    """Where the next 10% would help most (`bound` of result.md).

    Args:
        changes: of `sensitivity`.
        bubble_share: the pipeline's bubble as a share of the step; a tenth of it is what a tenth less would save.
    """
    saved = {"compute": -changes["tensor_cores"],
             "communication": -changes["intra_node"] - changes["network"] + changes["latency"],
             "memory_bandwidth": -changes["memory_bandwidth"], "host": -changes["host"],
             "pipeline": (1.0 - 1.0 / MORE) * bubble_share}
    return max(saved, key=lambda name: saved[name])


def with_faster_host(job: Job, factor: float) -> Job:
    """The job with every host time divided by `factor`."""
    def shorter(times_s: Sequence[float]) -> list[float]:
        return [t / factor for t in times_s]

    def program(one: Program) -> Program:
        return replace(one, segments=[replace(s, host_s=tuple(shorter(s.host_s))) for s in one.segments],
                       sections=[replace(s, host_s=shorter(s.host_s)) for s in one.sections])
    return replace(job, programs=[program(p) for p in job.programs])
