"""What 10% more of each resource does to a step: the same Program on machines that differ in one resource.

Each resource costs one more simulation, so this is worked out only when asked for (`drystep run --sensitivity`).
"""

from __future__ import annotations

from collections.abc import Mapping

from sim.engine import Machine
from sim.program import Job
from sim.report.numbers.more import OFFLOAD, RESOURCES, offloads, step_with_more


def sensitivity(job: Job, machine: Machine, step_s: float, at_least_s: float = 0.0,
                added_s: float = 0.0) -> dict[str, float]:
    """Change of the step for 10% more of each resource, as a fraction of `step_s`.

    tensor_cores: their peak, at the same power. intra_node, network: bandwidth of the links inside and between nodes.
    latency: of every collective. host: speed of everything the host does to keep the GPU busy. offload: bandwidth of
    copies to host and disks, and speed of an optimizer on the CPU, for jobs that have any.

    Args:
        job: what ran.
        machine: what it ran on.
        step_s: its step.
        at_least_s: what its tasks take at least, whatever the machine (reading the data).
        added_s: what comes on top of them (the allocator's retries, pages).
    """
    def change(resource: str) -> float:
        return (max(step_with_more(job, machine, resource), at_least_s) + added_s) / step_s - 1.0
    return {resource: change(resource) for resource in (*RESOURCES, *([OFFLOAD] if offloads(job) else []))}


def bound_by(changes: Mapping[str, float], bubble: float, waits: float = 0.0, paging: float = 0.0) -> str:
    """Where the next 10% would help most (`bound` of result.md).

    Args:
        changes: of `sensitivity`.
        bubble: what 10% less of the pipeline's bubble would save, as a share of the step.
        waits: what 10% more of storage would, and 10% less of the allocator's retries; paging: of pages.
    """
    saved = {"compute": -changes["tensor_cores"],
             "communication": -changes["intra_node"] - changes["network"] + changes["latency"]
             - changes.get(OFFLOAD, 0.0) + paging,
             "memory_bandwidth": -changes["memory_bandwidth"], "host": -changes["host"] + waits, "pipeline": bubble}
    return max(saved, key=lambda name: saved[name])
