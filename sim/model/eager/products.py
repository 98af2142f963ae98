"""Linear layers as PyTorch modules run them: fine-tuned, quantised, or cut over tensor ranks.

Sources: Megatron-LM core/tensor_parallel/layers.py, transformers pytorch_utils.py (Conv1D).
"""

from __future__ import annotations

from sim.model.eager import tuned
from sim.model.eager.tensors import between
from sim.model.eager.tensors import operations as op
from sim.model.eager.tensors.autograd import Run, Tensor
from sim.model.eager.tensors.narrow import narrow
from sim.model.style import Style


def linear(run: Run, style: Style, x: Tensor, features_in: int, parts: tuned.Parts, gathered: int = 1,
           matrices: int = 1) -> Tensor:
    """A linear layer; `parts` names its outputs as fine-tuning does.

    Args:
        matrices: of experts, each for its share of the rows.
    """
    if style.tuned is not None:
        return tuned.linear(run, style, x, features_in, parts, gathered, matrices)
    features_out = sum(width for _, width in parts)
    return op.linear(run, x, features_in, features_out, style.bias, dtype=style.weight, bias_last=style.conv1d,
                     gathered=gathered, narrow=narrow(style), placeholder=style.weight_placeholder, matrices=matrices,
                     lasting=style.stack.shared_buffer == "layers")


def router(run: Run, style: Style, x: Tensor, experts: int) -> Tensor:
    """Scores of all experts, which no fine-tuning beside frozen weights trains."""
    if style.tuned is None:
        return op.linear(run, x, style.hidden, experts, False, dtype=style.weight)
    return tuned.router(run, style, x, experts)


def column(run: Run, style: Style, x: Tensor, parts: tuned.Parts) -> Tensor:
    """A product of the stream, which is gathered where it is scattered, unless `_entered` has done so."""
    again = style.scattered and not style.stack.gathered_inputs_kept
    return linear(run, style, x, style.hidden, parts, style.tensor if again else 1)


def entered(run: Run, style: Style, x: Tensor) -> Tensor:
    """The stream as column-cut products read it where they keep it so (`Stack.gathered_inputs_kept`)."""
    if not style.scattered or not style.stack.gathered_inputs_kept:
        return x
    return between.gathered(run, x, style.tensor, style.copies)


def row(run: Run, style: Style, x: Tensor, features_in: int, parts: tuned.Parts, matrices: int = 1) -> Tensor:
    """A product whose outputs are sums over the slices of the width; a branch beside it comes back by itself."""
    if style.tuned is None or not style.cuts_branches:
        return row_cut(run, style, linear(run, style, x, features_in, parts, matrices=matrices))
    return tuned.row(run, style, x, features_in, parts, matrices)


def row_cut(run: Run, style: Style, x: Tensor) -> Tensor:
    """A sum over the slices of the width, on its way back into the stream."""
    return between.scattered(run, x, style.tensor, style.copies) if style.scattered else x


def summed_apart(style: Style) -> bool:
    """Whether a tied table's two gradients meet in a third tensor (`Weight.apart`): the head's is a transposed view
    unless a cast's backward has copied it, Megatron's function made it, or chunks were added up before."""
    cast = bool(style.autocast) and style.act != style.weight
    return not cast and style.modules != "megatron" and not style.chunked_loss
