"""What DeepSpeed's ZeRO-3 adds to the kernels at least where its collectives take turns with them.

Every micro-step gathers each parameter that does not stay whole, and once more for backward what forward has let go:
all but what is used again within `Limits.reuse` elements, and what the coordinator had in sight just then. Every
reducing micro-step scatters their gradients.

Of ZeRO++ what its fewer bytes take is counted: gathers in int8; with second shards only the first micro-step's forward
over all ranks, and nothing of the gathers among neighbours; nothing of quantised reductions.
"""

from __future__ import annotations

from sim.parallel.sharded.coordinator import Limits
from sim.parallel.sharded.quantised import GRADIENTS, leaves_as
from sim.parallel.sharded.secondary import neighbours
from sim.parallel.sharded.uses import PERSISTENCE_THRESHOLD
from sim.parallel.sharded.zero3 import takes_turns
from sim.sizing.bounds.tables import Table
from sim.work import DTYPE_BYTES

#: Largest parameters that forward may keep beyond the reuse distance: the one that ends it, one fetched ahead, and one
#: that both directions use at once.
_IN_SIGHT = 3


def in_turn_s(table: Table, name: str, batches: int) -> float:
    """Seconds of a step's gathers and reductions at least; 0 where some may run beside kernels."""
    scenario, stack = table.scenario, table.stack
    parallel, finetune = scenario.parallel, scenario.training.finetune
    if name != "zero3" or stack.parameter_coordinator != "streamed" or not takes_turns(scenario, stack):
        return 0.0
    replicas = table.layout.sizes["data"] * table.layout.sizes["context"]
    if replicas < 2 or parallel.expert > 1 or (finetune is not None and finetune.method != "full"):
        return 0.0
    split = [p.numel for layer in table.layers.architecture.stack for p in layer.parameters
             if p.numel >= PERSISTENCE_THRESHOLD]
    if not split:
        return 0.0
    limits = Limits()
    again = max(0, sum(split) - limits.reuse - limits.prefetch - _IN_SIGHT * max(split))
    precision, gathers = table.precision, batches
    if neighbours(parallel.reshard_after_forward):
        again, gathers = 0, 1

    def moved(kind: str, size_bytes: float) -> float:
        return table.alone.moved_s(table.layout, scenario, "data", kind, size_bytes)

    gathered = moved("all_gather", (sum(split) + again) * DTYPE_BYTES[precision.gather])
    quantised = precision.reduce == GRADIENTS and scenario.cluster.nodes > 1
    reduced = 0.0 if quantised else moved("reduce_scatter", sum(split) * DTYPE_BYTES[leaves_as(precision)])
    return gathers * gathered + (batches if parallel.reduce_every_micro_step else 1) * reduced
