"""What bounds a step: the resource of which 10% more would help most (`bound` of result.md)."""

from __future__ import annotations

from collections.abc import Mapping

from sim.engine import Machine, simulate
from sim.hardware.whatif import scaled
from sim.program import Job
from sim.report.numbers.breakdown import Breakdown

#: More of a resource, as result.md asks.
MORE = 1.1


def bound(parts: Breakdown) -> str:
    """What limits the step by its breakdown: making a thing 10% faster saves 10% of the seconds spent on it, so the
    largest wins. Seconds by which collectives slow kernels down are the collectives'. Wrong only where one thing runs
    hidden behind another, which `bound_of` looks into."""
    seconds = _seconds(parts)
    return max(seconds, key=lambda name: seconds[name])


def bound_of(parts: Breakdown, job: Job, machine: Machine, step_s: float) -> str:
    """What limits a step that was simulated.

    Collectives as long as the kernels they run beside leave little exposed and may set the pace all the same, with the
    kernels waiting in their shadow. Seconds do not tell who waits for whom there: 10% more of either is simulated.

    Args:
        parts: the breakdown of its critical rank.
        job, machine: what ran, and on what.
        step_s: what its tasks took.
    """
    found, seconds = bound(parts), _seconds(parts)
    wire_s = sum(total for groups in parts.communication_total.values() for total in groups.values())
    if found not in ("compute", "memory_bandwidth") or wire_s < seconds[found]:
        return found
    kernels = {"arithmetic" if found == "compute" else "memory_bandwidth": MORE}
    faster = Machine([scaled(device, **kernels) for device in machine.devices], machine.network, job)
    network = None if machine.network is None else machine.network.scaled(MORE, MORE, 1 / MORE)
    sooner = Machine(machine.devices, network, job)
    saved_s = {name: step_s - simulate(job, other).step_time_s
               for name, other in ((found, faster), ("communication", sooner))}
    return max(saved_s, key=lambda name: saved_s[name])


def felt(found: str, parts: Breakdown, waits: Mapping[str, float]) -> str:
    """A bound as a person reads it, where result.md has one word for several: "offload" for communication that is
    mostly waiting for the host's copies and its optimizer; "data" and "allocator" for two kinds of waits of the host.

    Args:
        waits: seconds of the breakdown's `host` by what is waited for.
    """
    if found == "host":
        return max(waits, key=lambda name: waits[name])
    return "offload" if found == "communication" and parts.offload > parts.exposed_s + parts.contention else found


def _seconds(parts: Breakdown) -> Mapping[str, float]:
    """Seconds of the step spent on what each bound stands for."""
    products = parts.compute["gemm"] + parts.compute["attention"] + parts.optimizer_products
    memory = parts.compute["memory_bound"] + parts.compute["optimizer"] - parts.optimizer_products
    alone = 1.0 - parts.contention / (products + memory) if parts.contention else 1.0
    return {"compute": products * alone, "communication": parts.exposed_s + parts.offload + parts.contention,
            "memory_bandwidth": memory * alone, "host": parts.host, "pipeline": parts.pipeline_bubble}
