"""Ring attention's tensors: what each stack's loop over slices holds, saves and makes in backward.

Local variables are those of the sources, because they decide how long a buffer lives. A rank's own part in a causal
sequence decides how many of its steps see half a slice; as for kernels it is the last rank's
(`sim.model.attention.ring`), which keeps the largest outputs.

Sources (read): TransformerEngine 2.3.0 and 2.8.0 pytorch/attention/dot_product_attention/context_parallel.py,
AttnFuncWithCPAndKVP2P (sbhd, 16 bits); torch 2.6.0 distributed/tensor/experimental/_attention.py
(_templated_ring_attention, _SDPAMerger, _templated_ring_attention_backward); Liu et al. 2023 (arXiv 2310.01889),
section 3, for what any ring needs.
"""

from __future__ import annotations

from collections.abc import Callable

from sim.model.attention.ring import below
from sim.model.eager.tensors.autograd import Gradients, Node, Run, Tensor
from sim.model.eager.tensors.storage import Storage
from sim.model.style import Style


def ring(run: Run, style: Style, query: Tensor, key: Tensor, value: Tensor, rows: int, sums: int) -> Tensor:
    """Attention of a slice's queries on the keys and values of all slices.

    Args:
        rows: log-sum-exps of a slice.
        sums: tensors in which backward adds the queries' gradient up in fp32, beside row sums (`operations.attention`).
    """
    if style.stack.ring_gathers:
        return _rotated(run, style, query, key, value, rows, sums)
    if style.stack.ring_merges:
        return _merged(run, style, query, key, value, rows, sums)
    return _passed(run, query, key, value, rows, sums)


def _outputs(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Elements of the output: as wide as values, which latent attention's are not as keys."""
    return query.elements * value.elements // key.elements


def halves(style: Style) -> bool:
    """Whether steps on another's slice see half of its keys (`sim.model.attention.ring.below`)."""
    return below(style) is not None


def _finished(run: Run, node: Node, elements: int, dtype: str, kept: list[Storage], rows: int, states: int) -> Tensor:
    """The output, with all that is kept beside it."""
    out = Tensor(run.output(elements, dtype), elements, dtype, node.output())
    run.save(node, *kept, out.storage, run.output(rows, "fp32"), *(run.output(1, "fp64") for _ in range(states)))
    return out


def scratch(run: Run, query: int, rows: int, sums: int) -> list[Storage]:
    """What a backward kernel needs for itself."""
    return [run.new(sums * query, "fp32"), run.new(rows, "fp32")] if sums else []


def _passed(run: Run, query: Tensor, key: Tensor, value: Tensor, rows: int, sums: int) -> Tensor:
    """The least a ring needs: keys and values of a neighbour come in beside those at hand, in backward their gradients
    too; nothing is merged by kernels of its own."""
    sizes, dtype = (query.elements, key.elements, value.elements), query.dtype
    pair = key.elements + value.elements

    def rule(run: Run, _: Gradients) -> Gradients:
        spare = [run.new(pair, dtype), run.new(pair, dtype), *scratch(run, sizes[0], rows, sums)]
        made: Gradients = [run.new(n, dtype) for n in sizes]
        spare.clear()
        return made

    node = run.node(rule, (query.sink, key.sink, value.sink))
    coming = [run.new(pair, dtype)]
    out = _finished(run, node, _outputs(query, key, value), dtype, [query.storage, key.storage, value.storage], rows, 2)
    coming.clear()
    return out


def _merged(run: Run, style: Style, query: Tensor, key: Tensor, value: Tensor, rows: int, sums: int) -> Tensor:
    """TransformerEngine's: a buffer of keys and values for every slice, of which the last is kept, and every step's
    output until all are merged; in backward two buffers of keys, values and their gradients, and gradients leave as
    views of one of them."""
    steps, whole, dtype = style.context, query.elements, query.dtype
    pair, half, outputs = key.elements + value.elements, halves(style), _outputs(query, key, value)

    def rule(run: Run, _: Gradients) -> Gradients:
        return merged_back(run, steps, whole, pair, dtype, rows, sums=sums, half=half)

    node = run.node(rule, (query.sink, key.sink, value.sink))
    buffers, parts = merged_steps(run, steps, pair, outputs, dtype, rows)
    out = _finished(run, node, outputs, dtype, [query.storage, buffers[-1]], rows, steps)
    buffers.clear()
    parts.clear()
    return out


def merged_steps(run: Run, steps: int, pair: int, outputs: int, dtype: str, rows: int,
                 ) -> tuple[list[Storage], list[Storage]]:
    """Forward's buffers of keys and values, the last of which is kept, and what its steps made."""
    buffers, parts = [run.new(pair, dtype)], list[Storage]()
    for step in range(steps):
        if step < steps - 1:
            buffers.append(run.new(pair, dtype))
        parts += [run.new(outputs, dtype), run.new(rows, "fp32")]
    return buffers, parts


def merged_back(run: Run, steps: int, whole: int, pair: int, dtype: str, rows: int, *, sums: int, half: bool,
                behind: Callable[[], Gradients] | None = None) -> Gradients:
    """Backward's steps; gradients of keys and values are views of a buffer that holds keys and values too.

    Args:
        behind: makes gradients of these, while what the steps have used still stands.
    """
    total = run.new(whole, dtype)
    buffers = [run.new(2 * pair, dtype) for _ in range(2)]
    for step in range(steps):
        made = [run.new(whole, dtype), run.new(pair // 2 if half and step < steps - 1 else pair, dtype)]
        spare = scratch(run, whole, rows, sums)
        spare.clear()
        if behind is not None and step == steps - 1:
            return behind()
        made.clear()
    last = buffers[steps % 2]
    return [total, last, last]


def _rotated(run: Run, style: Style, query: Tensor, key: Tensor, value: Tensor, rows: int, sums: int) -> Tensor:
    """PyTorch's: contiguous copies of keys and values, the slices of all ranks in one tensor, sums in fp32."""
    steps, whole, dtype, fused = style.context, query.elements, query.dtype, style.stack.compile
    pair = key.elements + value.elements
    sizes, outputs = (key.elements, value.elements), _outputs(query, key, value)
    half = halves(style)

    def rule(run: Run, _: Gradients) -> Gradients:
        return _rotated_back(run, whole, sizes, dtype, rows, steps, sums=sums, half=half, fused=fused)

    node = run.node(rule, (query.sink, key.sink, value.sink))
    copied, packed = [run.new(n, dtype) for n in sizes], [run.new(pair, dtype)]
    slices = [run.new(steps * pair, dtype)]
    packed.clear()
    block = run.new(outputs, dtype)
    total = run.new(outputs, "fp32")
    for step in range(1, steps):
        copied.clear()
        if step < steps - 1:  # packed as in the first step, though nothing is sent any more
            packed.append(run.new(pair, dtype))
            packed.clear()
        block = run.new(outputs, dtype)
        if not fused:
            wide, difference = run.new(outputs, "fp32"), run.new(outputs, "fp32")
            product = run.new(outputs, "fp32")
            del difference
        merged = run.new(outputs, "fp32")
        if not fused:
            del wide, product
        total = merged
        del merged
    out = _finished(run, node, outputs, dtype, [query.storage, key.storage, value.storage], rows, 2)
    slices.clear()
    del block, total
    return out


def _rotated_back(run: Run, whole: int, sizes: tuple[int, int], dtype: str, rows: int, steps: int, *, sums: int,
                  half: bool, fused: bool) -> Gradients:
    """Gradients of keys and values go round in fp32: what has come, what is added to it, what is packed to be sent and
    what comes next stand beside one another."""
    pair = sum(sizes)
    total = run.new(whole, "fp32")
    own = [run.new(n, "fp32") for n in sizes]  # gradients of keys and of values so far
    copied = [run.new(n, dtype) for n in sizes]
    packed = run.new(pair, dtype)
    slices = [run.new(steps * pair, dtype)]
    passed: list[Storage] = []  # what was sent, and what comes
    made: list[Storage] = []
    for step in range(steps):
        if step == 1:
            copied.clear()
        if 0 < step < steps - 1:
            packed = run.new(pair, dtype)
        part = 2 if half and step else 1
        made = [run.new(whole, dtype), *(run.new(n // part, dtype) for n in sizes), *scratch(run, whole, rows, sums)]
        del made[3:]
        if step:  # gradients that have come take the place of those sent, as views
            own.clear()
            del passed[0]
            own = [run.new(n, "fp32") for n in sizes] if half and not fused else []
        passed = [run.new(pair, "fp32"), run.new(pair, "fp32")]
    del packed, passed[0]
    made.clear()
    out = run.new(whole, dtype)
    result = run.new(pair, dtype)
    del total
    for held in (passed, slices, own, copied):
        held.clear()
    return [out, result, result]
