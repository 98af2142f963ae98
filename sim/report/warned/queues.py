"""What a result says of a number of hardware work queues that no prediction goes by."""

from __future__ import annotations

from sim.scenario.defaults import usual_connections
from sim.scenario.fields.schema import Scenario


def unusual_queues(scenario: Scenario) -> list[str]:
    """A warning where CUDA_DEVICE_MAX_CONNECTIONS is not what the framework's jobs run with.

    With one queue kernels begin in the order in which they are called, and so they do in every prediction. That a
    collective called before a product begins before it is what Megatron's overlap rests on: "necessary for a speedup"
    (megatron-core 0.12.1 tensor_parallel/layers.py, read), "for there to be a guaranteed overlap" (TransformerEngine
    2.3.0 pytorch/module/base.py, read). How often products go first with more queues no source says.
    """
    software = scenario.software
    usual, asked = usual_connections(software.framework), software.max_connections
    if asked == usual:
        return []
    text = (f"software: max_connections {asked} changes nothing (usual with {software.framework}: {usual}): kernels "
            "and collectives begin in the order in which they are called")
    if scenario.parallel.tensor > 1 and asked > 1:
        text += "; with more than one queue, tensor-parallel collectives may begin behind the products that hide them"
    return [text]
