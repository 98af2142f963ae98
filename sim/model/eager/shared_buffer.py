"""The buffer that Megatron's own modules share: it is as large as the largest tensor they ask it for, and stays.

Column-cut products gather the sequence into it, forward and backward, and the product of queries and keys that is not
one kernel names it as what the (nought times) sum begins with.

Source: megatron-core 0.3.0 to 0.15.0 utils.py, GlobalMemoryBuffer; tensor_parallel/layers.py,
LinearWithGradAccumulationAndAsyncCommunication, and transformer/dot_product_attention.py: get_tensor(..., "mpu"), one
buffer by name and dtype.
"""

from __future__ import annotations

from collections.abc import Iterable

from sim.model.eager.attention.modules import spelled_out
from sim.model.eager.tensors.storage import rounded
from sim.model.style import Program


def shared_buffer(layers: Iterable[Program]) -> int:
    """Its bytes, of a rank with these layers."""
    return max((rounded(elements, layer.style.act) for layer in layers if (elements := _asked(layer))), default=0)


def _asked(layer: Program) -> int:
    """Elements of the largest tensor that a layer asks for."""
    style = layer.style
    uses = style.stack.shared_buffer
    if uses == "none" or style.modules != "megatron" or layer.layer in ("embedding", "bridge"):
        return 0
    if layer.layer == "head":
        return style.batch * style.predicted * style.hidden if style.scattered and style.tuned is None else 0
    gathered = style.tokens * style.hidden if uses == "layers" and style.scattered and style.tuned is None else 0
    scores = style.batch * style.heads * style.sequence * style.keys if spelled_out(style) else 0
    return max(gathered, scores)
