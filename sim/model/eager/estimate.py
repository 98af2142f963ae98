"""Memory of layers that no module code is written down for: from what their operators save.

Coarser than the miniature: an operator's gradients are taken to be as large as its largest saved tensor, one coming in
and one going out, and forward has no temporaries but weights that are dequantised, one at a time, and an operator's
`buffers`.
"""

from __future__ import annotations

from sim.model.architecture import Layer, Operator, Tensor
from sim.model.eager.profile import NOTHING, Levels, Pass, Profile
from sim.model.eager.tensors.storage import ACTIVATIONS, COPIES, GRADIENTS, KINDS, LOGITS, WORKSPACE, rounded
from sim.model.recompute import kept_kernels, modules_of, output_elements
from sim.tensor_trace import Trace


def estimate(layer: Layer, policy: str, keep_gradients: bool) -> Profile:
    """A layer's memory from `Operator.saved`; arguments as in `profile`."""
    kind = LOGITS if layer.kind == "head" else ACTIVATIONS
    saved = [sum(_size(t) for t in op.saved) for op in layer.operators]
    copies = sum(_size(t) for op in layer.operators for t in op.weight_copies)
    whole = policy in ("full", "selective-op")
    again = [size if whole or ("core_attn" in modules_of(policy) and op.core) else 0
             for op, size in zip(layer.operators, saved, strict=True)]
    kept = sum(saved) - sum(again) + (_size(layer.input) if whole else 0)
    kept += _outputs(layer) if policy == "selective-op" else 0
    forward = _levels({kind: kept, COPIES: copies})
    highest = _levels({kind: kept, COPIES: copies, WORKSPACE: max(
        (_dequantised(op) + op.buffers[0] for op in layer.operators), default=0)})
    cached = _levels({COPIES: copies}) if whole else NOTHING
    backward = _backward(layer, saved, kind, sum(again), keep_gradients)
    left = _levels({kind: -kept, GRADIENTS: backward.net[GRADIENTS], COPIES: cached[COPIES] - copies})
    return Profile(Pass(highest, forward, layer.kind), NOTHING, cached, Pass(backward.peak, left, backward.operator),
                   _trace(layer, policy, keep_gradients))


def _trace(layer: Layer, policy: str, keep_gradients: bool) -> Trace:
    """The same tensor by tensor: forward makes what is saved, backward walks through the operators with a gradient
    coming in and one going out, as large as the largest saved tensor each."""
    sizes: list[int] = []  # by number
    forward: list[tuple[int, int]] = []
    backward: list[tuple[int, int]] = []
    copies: list[int] = []
    kept: list[int] = []

    def born(events: list[tuple[int, int]], size: int) -> int:
        sizes.append(size)
        events.append((len(sizes) - 1, size))
        return len(sizes) - 1

    saved = []
    inputs = [born(forward, _size(layer.input))] if policy == "full" else []
    for op in layer.operators:
        copied = [born(forward, _size(t)) for t in op.weight_copies]
        if beside := _dequantised(op) + op.buffers[0]:
            forward.append((born(forward, beside), 0))
        copies += copied if policy == "full" else []
        again = policy == "full" or ("core_attn" in modules_of(policy) and op.core)
        saved.append(([born(backward if again else forward, _size(t)) for t in op.saved],
                      [] if policy == "full" else copied))
    flowing = -1
    for op, (tensors, copied) in zip(reversed(layer.operators), reversed(saved), strict=True):
        following = born(backward, max((_size(t) for t in op.saved), default=512))
        if beside := _dequantised(op) + op.buffers[1]:
            backward.append((born(backward, beside), 0))
        gradient = born(backward, _gradient_bytes(op)) if op.parameters else -1
        kept += [gradient] if keep_gradients and gradient >= 0 else []
        gone = [*tensors, *copied, flowing, -1 if keep_gradients else gradient]
        backward += [(number, 0) for number in gone if number >= 0]
        flowing = following
    backward += [(number, 0) for number in (*inputs, flowing) if number >= 0]
    return Trace(tuple(forward), (), tuple(copies), tuple(backward), -1, -1, tuple(kept), -1)


def _backward(layer: Layer, saved: list[int], kind: int, again: int, keep_gradients: bool) -> Pass:
    """The highest point while saved tensors go and gradients come, operator by operator."""
    level = _levels({kind: again})
    best, where, gradients = level, layer.kind, 0
    for op, size in zip(reversed(layer.operators), reversed(saved), strict=True):
        own = _gradient_bytes(op)
        flowing = 2 * max((_size(t) for t in op.saved), default=0) + _dequantised(op) + op.buffers[1]
        here = _levels({kind: level[kind], GRADIENTS: gradients, WORKSPACE: flowing + own})
        if sum(here) > sum(best):
            best, where = here, op.name
        level = _levels({kind: level[kind] - size})
        gradients += own if keep_gradients else 0
    return Pass(best, _levels({GRADIENTS: gradients}), where)


def _outputs(layer: Layer) -> int:
    """Outputs of attention and of every second product, which selective-op recomputation keeps."""
    return sum(rounded(output_elements(kernel), "bf16") for kernel in kept_kernels(layer))


def _dequantised(op: Operator) -> int:
    """The largest weight that is made readable: of a loop over experts, one of them."""
    return max((rounded(k.shape[0] // k.launches, "bf16") for k in op.forward if k.variant == "dequantise"), default=0)


def _gradient_bytes(op: Operator) -> int:
    dtype = op.backward[-1].dtype if op.backward else "fp32"
    return sum(rounded(p.numel, dtype) for p in op.parameters)


def _size(tensor: Tensor) -> int:
    return rounded(tensor.elements, tensor.dtype)


def _levels(sizes: dict[int, int]) -> Levels:
    return tuple(sizes.get(kind, 0) for kind in range(len(KINDS)))
