"""Activations on their way between slices of the width: gathered, or reduced and scattered, along the sequence.

Source of the copies: torch 2.6.0 distributed/_functional_collectives.py, all_gather_tensor and reduce_scatter_tensor.
"""

from __future__ import annotations

from sim.model.eager.tensors.autograd import Gradients, Node, Run, Tensor
from sim.model.eager.tensors.storage import Storage


def scattered(run: Run, x: Tensor, parts: int, copies: str = "none") -> Tensor:
    """A reduce-scatter along the sequence; backward gathers.

    Args:
        copies: what is copied on its way (`Stack.copied_along`).
    """
    elements, dtype = x.elements, x.dtype
    node = run.node(lambda run, _: [_arrived(run, elements, dtype, copies)], (x.sink,))
    part = elements // parts
    leaving = run.new(elements, dtype) if copies != "none" else None
    made = Tensor(run.output(part, dtype), part, dtype, node.output())
    del leaving
    return made


def gathered(run: Run, x: Tensor, parts: int, copies: str = "none") -> Tensor:
    """An all-gather along the sequence as a node of its own; backward reduces and scatters. See `scattered`."""
    elements, dtype = x.elements, x.dtype

    def rule(run: Run, _: Gradients) -> Gradients:
        leaving = run.new(elements * parts, dtype) if copies != "none" else None
        part = run.arrived(elements, dtype)
        del leaving
        return [part]

    node = run.node(rule, (x.sink,))
    buffer = run.arrived(elements * parts, dtype) if copies == "both" else None
    made = _whole(run, node, elements * parts, dtype)
    del buffer
    return made


def _arrived(run: Run, elements: int, dtype: str, copies: str) -> Storage:
    buffer = run.arrived(elements, dtype) if copies == "both" else None
    made = run.new(elements, dtype)
    del buffer
    return made


def widened(run: Run, x: Tensor, parts: int) -> Tensor:
    """Columns of all slices gathered (`gather_from_tensor_model_parallel_region`); backward takes its own."""
    if parts == 1:
        return x
    elements, dtype = x.elements, x.dtype
    node = run.node(lambda run, _: [run.new(elements, dtype)], (x.sink,))
    return _whole(run, node, elements * parts, dtype)


def _whole(run: Run, node: Node, elements: int, dtype: str) -> Tensor:
    return Tensor(run.new(elements, dtype), elements, dtype, node.output())
