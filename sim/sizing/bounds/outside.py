"""What offloading takes from a step and leaves in memory at least.

An optimizer outside blocks the host: it begins when the last gradient has arrived, and nothing of the next step is
issued before it is through. So its seconds, and the copies it waits for, stand behind the micro-steps. Saved tensors go
out and come back once a micro-step, in line with the kernels or on streams of their own, which compute waits for. What
lives outside takes no room; what stays takes as much as ever.
"""

from __future__ import annotations

import numpy as np

from sim.model.eager import KINDS, layer_profile
from sim.parallel.offload import Offload
from sim.program import ProgramBuilder
from sim.sizing.bounds.held import Places, summed
from sim.sizing.bounds.tables import Floats, Ints, Table, before
from sim.sizing.space.policies import POLICIES
from sim.work import DTYPE_BYTES

_SAVED = KINDS.index("activations")


def of(table: Table) -> Offload:
    """What the rows of a slice keep outside, of which only times are asked."""
    return Offload(table.scenario, table.stack, ProgramBuilder((), ()))


def update_s(table: Table, local: int, strategy: str) -> float:
    """The optimizer outside on `local` parameters: clipping and update through host memory, states swapped in and out
    one after the other, and what it updated copied back where parameters live on the device (`Offload.update`,
    `update_part`)."""
    outside, device = of(table), table.device
    widths, narrow = outside.state_widths(), DTYPE_BYTES[table.scenario.training.precision.parameters]
    if outside.hybrid:
        part = outside.outside(local)
        return (device.copy_s("d2h", part * widths["gradients"]) + outside.update_s(part, 1, clip=False)
                + device.copy_s("h2d", part * narrow))
    seconds = outside.update_s(local, 1)
    if outside.optimizer == "nvme":
        read = sum(widths.values())
        seconds += device.copy_s("nvme_read", local * read)
        seconds += device.copy_s("nvme_write", local * (read - widths["gradients"]))
    if not outside.moves_parameters:
        seconds += device.copy_s("h2d", local * (narrow if strategy == "zero3" else widths["gradients"]))
    return seconds


def saved_s(table: Table, places: Places, policies: Ints) -> tuple[Floats, Floats]:
    """Saved tensors of a micro-step on their way: seconds in line with the kernels, and seconds of the busier stream
    beside them, by policy."""
    zero = np.zeros(len(policies))
    outside = of(table)
    if not outside.moves_activations:
        return zero, zero
    known: dict[int, list[tuple[float, float]]] = {}
    for layer in table.layers.distinct:
        if layer.kind == "block":
            known[id(layer)] = [_copied_s(table, outside, size) for size in (
                min(layer_profile(layer, policy, keep, casts).forward.net[_SAVED]
                    for keep in (False, True) for casts in (False, True)) for policy in table.layers.policies)]
    blocks = [known[id(layer)] for layer in table.layers.architecture.stack if layer.kind == "block"]
    out, back = (summed(np.array([before([block[i][way] for block in blocks]) for i in range(len(POLICIES))]), places,
                        policies)[0, 0] for way in (0, 1))
    return (zero, np.maximum(out, back)) if table.stack.offload_streams else (out + back, zero)


def _copied_s(table: Table, outside: Offload, size: float) -> tuple[float, float]:
    """A block's saved tensors out and back: seconds in each direction over PCIe."""
    if size <= 0:
        return 0.0, 0.0
    way = [table.device.copy_s(direction, round(size)) for direction in ("d2h", "h2d")]
    if outside.activations == "nvme":  # a fetch is read first; a store frees the device before it is written
        way[1] += 0.0 if table.stack.offload_streams else table.device.copy_s("nvme_read", round(size))
    return way[0], way[1]


def kept_widths(table: Table) -> dict[str, float]:
    """Bytes per parameter by category of what stays on the device, at least."""
    outside, widths = of(table), dict(table.layers.widths)
    if outside.moves_parameters:
        widths["parameters"] = 0.0
    if outside.moves_optimizer:  # gradients leave as they come
        widths.update(master_parameters=0.0, optimizer_states=0.0, gradients=0.0)
    return widths
