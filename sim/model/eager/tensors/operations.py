"""PyTorch operators as allocations: what each makes in forward, saves for backward, and makes in backward.

Names follow torch. What an operator saves and allocates was read off PyTorch 2.13 running on fake tensors (see
tests/validation/data/README.md) and agrees with tools/autograd/derivatives.yaml. Gradients that differ in dtype from
the input they belong to are cast by the engine (validate_outputs).
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.model.eager.tensors.autograd import Gradients, Node, Rule, Run, Sink, Tensor, Weight
from sim.model.eager.tensors.narrow import Narrow
from sim.model.eager.tensors.storage import COPIES, Storage
from sim.work import DTYPE_BYTES


def promote(*dtypes: str) -> str:
    """The widest of them."""
    return max(dtypes, key=lambda d: DTYPE_BYTES[d])


def _fit(run: Run, gradient: Storage, elements: int, dtype: str, wanted: str) -> Storage:
    """The gradient in the dtype of its input."""
    return gradient if dtype == wanted else run.new(elements, wanted)


def _result(run: Run, node: Node, elements: int, dtype: str, index: int = 0) -> Tensor:
    return Tensor(run.new(elements, dtype), elements, dtype, node.output(index))


def view(x: Tensor) -> Tensor:
    """Another tensor on the same storage."""
    return Tensor(x.storage, x.elements, x.dtype, x.sink)


def unary(
    run: Run, x: Tensor, *, saves_input: bool = False, saves_output: bool = False, temporaries: int = 0,
) -> Tensor:
    """An element-wise operator with one new gradient in backward, beside `temporaries` of the same size."""
    elements, dtype = x.elements, x.dtype

    def rule(run: Run, _: Gradients) -> Gradients:
        spare = [run.new(elements, dtype) for _ in range(temporaries)]
        gradient = run.new(elements, dtype)
        spare.clear()
        return [gradient]

    node = run.node(rule, (x.sink,))
    if saves_input:
        run.save(node, x.storage)
    out = _result(run, node, elements, dtype)
    if saves_output:
        run.save(node, out.storage)
    return out


def overwritten(run: Run, x: Tensor) -> Tensor:
    """An operator that writes over its input, and backward over the output's gradient."""
    node = run.node(lambda _, g: [g[0]], (x.sink,))
    return Tensor(x.storage, x.elements, x.dtype, node.output())


def scale(run: Run, x: Tensor) -> Tensor:
    """Multiplication by a number."""
    return unary(run, x)


def shift(run: Run, x: Tensor) -> Tensor:
    """Addition of a number: the gradient passes through."""
    node = run.node(lambda _, g: [g[0]], (x.sink,))
    return _result(run, node, x.elements, x.dtype)


def power(run: Run, x: Tensor, widens: bool) -> Tensor:
    """`pow`, in fp32 under autocast that `widens` it; backward pow, a scalar product and a product."""
    return unary(run, to(run, x, "fp32") if widens else x, saves_input=True, temporaries=2)


def to(run: Run, x: Tensor, dtype: str) -> Tensor:
    """A change of dtype; none if it is there already."""
    if x.dtype == dtype:
        return x
    elements, source = x.elements, x.dtype
    node = run.node(lambda run, _: [run.new(elements, source)], (x.sink,))
    return _result(run, node, elements, dtype)


def clone(run: Run, x: Tensor, needed: bool = True) -> Tensor:
    """A contiguous copy where a view cannot be had; its gradient passes through as a view."""
    if not needed:
        return x
    node = run.node(lambda _, g: [g[0]], (x.sink,))
    return _result(run, node, x.elements, x.dtype)


def relayout(run: Run, x: Tensor) -> Tensor:
    """A view in forward whose gradient has to be copied to be contiguous."""
    elements, dtype = x.elements, x.dtype
    node = run.node(lambda run, _: [run.new(elements, dtype)], (x.sink,))
    return Tensor(x.storage, elements, dtype, node.output())


def add(run: Run, x: Tensor, y: Tensor) -> Tensor:
    """A sum: its gradient is everybody's, cast where an input is narrower, summed where an input was broadcast."""
    elements, dtype = max(x.elements, y.elements), promote(x.dtype, y.dtype)
    shapes = [(t.elements, t.dtype, t.sink is not None) for t in (x, y)]

    def rule(run: Run, gradients: Gradients) -> Gradients:
        full = gradients[0]
        return [None if not needed else full if n == elements and d == dtype else run.new(n, d)
                for n, d, needed in shapes]

    return _result(run, run.node(rule, (x.sink, y.sink)), elements, dtype)


def subtract(run: Run, x: Tensor, y: Tensor) -> Tensor:
    """A difference of two tensors of one shape and dtype: the second's gradient is a new tensor."""
    elements, dtype = x.elements, x.dtype
    node = run.node(lambda run, g: [g[0], run.new(elements, dtype)], (x.sink, y.sink))
    return _result(run, node, elements, dtype)


def mul(run: Run, x: Tensor, y: Tensor) -> Tensor:
    """A product of two tensors of one shape; each is kept for the other's gradient."""
    elements, dtype = x.elements, promote(x.dtype, y.dtype)
    wanted = [(t.dtype, t.sink is not None) for t in (x, y)]

    def rule(run: Run, _: Gradients) -> Gradients:
        raw: Gradients = [run.new(elements, dtype) if needed else None for _, needed in wanted]
        run.function_returned()
        for i, (want, _needed) in enumerate(wanted):
            gradient = raw[i]
            raw[i] = None if gradient is None else _fit(run, gradient, elements, dtype, want)
        return raw

    node = run.node(rule, (x.sink, y.sink))
    if y.sink is not None:
        run.save(node, x.storage)
    if x.sink is not None:
        run.save(node, y.storage)
    return _result(run, node, elements, dtype)


def mul_rows(run: Run, x: Tensor, rows: Tensor) -> Tensor:
    """A product with one fp32 number per row; that number's gradient is a full product, then a sum."""
    dtype = promote(x.dtype, rows.dtype)
    node = run.node(_product_rule(x, dtype, rows.elements, dtype), (x.sink, rows.sink))
    run.save(node, x.storage, rows.storage)
    return _result(run, node, x.elements, dtype)


def mul_weight(run: Run, x: Tensor, weight: Weight, wide: str = "") -> Tensor:
    """A product with one parameter per column, in dtype `wide`, default the input's."""
    dtype = wide or x.dtype
    narrow = weight.dtype if DTYPE_BYTES[weight.dtype] < DTYPE_BYTES[dtype] else dtype
    node = run.node(_product_rule(x, dtype, weight.elements, narrow), (x.sink, weight))
    run.save(node, x.storage)
    return _result(run, node, x.elements, dtype)


def _product_rule(x: Tensor, dtype: str, count: int, narrow: str) -> Rule:
    """Backward of a broadcast product in `dtype`: the input's gradient, and a full product summed to `count` numbers,
    which are `narrow` in the end."""
    elements, source = x.elements, x.dtype

    def rule(run: Run, _: Gradients) -> Gradients:
        gradient, full = run.new(elements, dtype), run.new(elements, dtype)
        run.function_returned()
        gradient = _fit(run, gradient, elements, dtype, source)
        total = run.new(count, dtype)
        del full
        return [gradient, _fit(run, total, count, dtype, narrow)]

    return rule


def mean_rows(run: Run, x: Tensor, rows: int) -> Tensor:
    """Mean of every row; the gradient is spread over the row."""
    elements, dtype = x.elements, x.dtype
    node = run.node(lambda run, _: [run.new(elements, dtype)], (x.sink,))
    return _result(run, node, rows, dtype)


def weight_copy(run: Run, weight: Weight) -> tuple[Storage | None, Sink | None]:
    """The weight as a product sees it: autocast makes a half copy once per forward and keeps it in its cache."""
    if not run.autocast or weight.dtype == run.autocast:
        return None, weight
    elements, dtype = weight.elements, weight.dtype
    node = run.node(lambda run, _: [run.new(elements, dtype)], (weight,))
    kind, run.kind = run.kind, COPIES
    storage = run.new(elements, run.autocast)
    run.kind = kind
    if run.caches_casts:
        run.cache.append(storage)
    return storage, node.output()


def linear(run: Run, x: Tensor, features_in: int, features_out: int, bias: bool, *, dtype: str, shared: bool = False,
           more: bool = False, bias_last: bool = False, gathered: int = 1, narrow: Narrow | None = None,
           placeholder: bool = False, matrices: int = 1, sink: Sink | None = None, lasting: bool = False) -> Tensor:
    """`F.linear`, or Conv1D's `addmm` (`bias_last`: the order of autocast's casts, which is the reverse).

    Args:
        dtype: of the weight.
        shared, more: the weight is another product's too, or a third one's (`Weight`).
        gathered: slices of the sequence the input is gathered from, in forward and again in backward, which holds it
            and the whole gradient, whose sum is scattered, until the weight's gradient is there (megatron-core 0.2.0 to
            0.16.0 tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication.backward: total_input,
            grad_input and sub_grad_input are its local variables).
        narrow: the product runs in a dtype of 8 bits or fewer.
        placeholder: what autograd gets for the weight's gradient is there already (`Style.weight_placeholder`).
        matrices: as many weights as that, each for its share of the rows.
        sink: where the weight's gradient goes, if other products have a share in it.
        lasting: what is gathered goes into a buffer that is there anyway (`eager.shared_buffer`).
    """
    size = matrices * features_in * features_out
    weight = Weight(size, dtype, shared, more)
    copy_bias: tuple[Storage | None, Sink | None] | None = None
    if bias and not bias_last:
        copy_bias = weight_copy(run, Weight(features_out, dtype))
    copy, weight_sink = (None, sink) if sink is not None else weight_copy(run, weight)
    x = to(run, x, run.autocast or x.dtype)
    if bias and bias_last:
        copy_bias = weight_copy(run, Weight(features_out, dtype))
    rows, needed, act = gathered * x.elements // features_in, x.sink is not None, x.dtype
    kept = not run.checkpointed
    made_anew = gathered > 1 and not lasting
    whole = run.new(rows * features_in, act) if made_anew else None

    def rule(run: Run, _: Gradients) -> Gradients:
        spare = [] if narrow is None else narrow.backward(run, rows * features_in, size, rows * features_out, kept)
        again = run.new(rows * features_in, act) if made_anew else None
        gradient = every = run.new(rows * features_in, act) if needed else None
        if gathered > 1 and gradient is not None:
            gradient = run.new(rows // gathered * features_in, act)
        made: Gradients = [gradient, None if placeholder else run.new(size, act),
                           run.new(features_out, act) if bias else None]
        del again, every
        spare.clear()
        return made

    node = run.node(rule, (x.sink, weight_sink, None if copy_bias is None else copy_bias[1]))
    spare = [] if narrow is None else narrow.forward(run, node, rows * features_in, size, gathered)
    if narrow is None or narrow.keeps_inputs:
        run.save(node, x.storage)
        if copy is not None and needed:
            run.save(node, copy)
    out = run.output(rows * features_out, act, product=True)
    del whole, spare
    return Tensor(out, rows * features_out, act, node.output())


def frozen(run: Run, x: Tensor, features_in: int, features_out: int) -> Tensor:
    """`F.linear` with a weight that needs no gradient: nothing is kept."""
    elements, dtype = x.elements, x.dtype
    node = run.node(lambda run, _: [run.new(elements, dtype)], (x.sink,))
    return _result(run, node, elements // features_in * features_out, dtype)


def layer_norm(run: Run, x: Tensor, cols: int, parameters: int, statistics: int, dtype: str,
               in_place: bool = False) -> Tensor:
    """`native_layer_norm` (2 statistics per row) or a fused RMS norm (1), with `parameters` of `cols` elements, whose
    gradient may go where its output's was (`in_place`)."""
    elements, source, rows, needed = x.elements, x.dtype, x.elements // cols, x.sink is not None

    def rule(run: Run, g: Gradients) -> Gradients:
        over = (g[0] if in_place else run.new(elements, source)) if needed else None
        return [over, *(run.new(cols, dtype) for _ in range(parameters))]

    node = run.node(rule, (x.sink, *(Weight(cols, dtype) for _ in range(parameters))))
    run.save(node, x.storage)
    out = _result(run, node, elements, source)
    for _ in range(statistics):
        run.save(node, run.new(rows, "fp32"))
    return out


def dropout(run: Run, x: Tensor) -> Tensor:
    """`native_dropout`: keeps a mask of one byte per element."""
    elements, dtype = x.elements, x.dtype
    node = run.node(lambda run, _: [run.new(elements, dtype)], (x.sink,))
    out = _result(run, node, elements, dtype)
    run.save(node, run.new(elements, "int8"))
    return out


def matmul(run: Run, x: Tensor, y: Tensor, elements: int, gathered: int = 1) -> Tensor:
    """A batched product of two activations, in autocast's dtype; keeps each for the other's gradient.

    Args:
        gathered: slices of the sequence that `y` (keys or values) is gathered from, as in `attention`: the whole lives
            as long as the product and is gathered again in backward, beside its whole gradient.
    """
    x, y = to(run, x, run.autocast or x.dtype), to(run, y, run.autocast or y.dtype)
    shapes = [(t.elements, t.dtype) for t in (x, y)]
    size, dtype = y.elements * gathered, y.dtype

    def rule(run: Run, _: Gradients) -> Gradients:
        whole = [run.new(size, dtype) for _ in range(2)] if gathered > 1 else []
        made: Gradients = []
        made += [run.new(n, d) for n, d in reversed(shapes)][::-1]
        whole.clear()
        return made

    node = run.node(rule, (x.sink, y.sink))
    run.save(node, *(t.storage for t, other in ((x, y), (y, x)) if other.sink is not None))
    whole = [run.new(size, dtype)] if gathered > 1 else []
    result = _result(run, node, elements, x.dtype)
    whole.clear()
    return result


def softmax(run: Run, x: Tensor, dtype: str, in_place: bool = False) -> Tensor:
    """Softmax (or log-softmax) in `dtype`; keeps its output; its gradient may go where its output's is (`in_place`)."""
    x = to(run, x, dtype)
    if not in_place:
        return unary(run, x, saves_output=True)
    node = run.node(lambda _, g: [g[0]], (x.sink,))
    out = _result(run, node, x.elements, dtype)
    run.save(node, out.storage)
    return out


def softmax_of_scores(run: Run, x: Tensor, dtype: str, buffer: bool) -> Tensor:
    """Softmax whose backward makes the output's product with its gradient beside the result: `buffer`, which fake
    tensors do not show (`sim.model.kernels.softmax_gradient`)."""
    return unary(run, to(run, x, dtype), saves_output=True, temporaries=int(buffer))


def expanded(run: Run, x: Tensor, copies: int) -> Tensor:
    """A view that repeats a tensor; its gradient is summed over the copies."""
    elements, dtype = x.elements, x.dtype
    node = run.node(lambda run, g: [run.new(elements, dtype) if copies > 1 else g[0]], (x.sink,))
    return Tensor(x.storage, elements, dtype, node.output())


def where(run: Run, x: Tensor, mask: Storage) -> Tensor:
    """`torch.where` with a boolean condition, which is kept."""
    elements, dtype = x.elements, x.dtype
    node = run.node(lambda run, _: [run.new(elements, dtype)], (x.sink,))
    run.save(node, mask)
    return _result(run, node, elements, dtype)


def masked_fill(run: Run, x: Tensor, mask: Storage) -> Tensor:
    """Keeps the mask."""
    elements, dtype = x.elements, x.dtype
    node = run.node(lambda run, _: [run.new(elements, dtype)], (x.sink,))
    run.save(node, mask)
    return _result(run, node, elements, dtype)


def split(run: Run, x: Tensor, parts: Sequence[int]) -> list[Tensor]:
    """Views of one storage side by side; their gradients are copied together (cat, stack)."""
    elements, dtype = x.elements, x.dtype
    node = run.node(lambda run, _: [run.new(elements, dtype)], (x.sink,), len(parts))
    return [Tensor(x.storage, part, dtype, node.output(i)) for i, part in enumerate(parts)]


def slices(run: Run, x: Tensor, parts: Sequence[int]) -> list[Tensor]:
    """Slices of the last dimension: each fills a zeroed gradient of the whole."""
    elements, dtype = x.elements, x.dtype
    nodes = [run.node(lambda run, _: [run.new(elements, dtype)], (x.sink,)) for _ in parts]
    return [Tensor(x.storage, part, dtype, node.output()) for part, node in zip(parts, nodes, strict=True)]


def cat(run: Run, parts: Sequence[Tensor]) -> Tensor:
    """Gradients are views of the whole's."""
    count = len(parts)
    node = run.node(lambda _, g: [g[0]] * count, [p.sink for p in parts])
    return _result(run, node, sum(p.elements for p in parts), parts[0].dtype)


def attention(run: Run, query: Tensor, key: Tensor, value: Tensor, rows: int, bias: Tensor | None = None,
              batch: int = 1, gathered: int = 1, sums: int = 0, spare: int = 0) -> Tensor:
    """A flash or memory-efficient kernel: keeps queries, keys, values, output, log-sum-exp and the random state.

    Args:
        rows: log-sum-exps.
        gathered: slices of the sequence that keys and values are gathered from. The whole ones live as long as the
            kernel and are gathered again in backward, where their gradients are whole until they are scattered
            (TransformerEngine `AttnFuncWithCPAndKVAllGather`).
        sums: tensors in fp32 in which backward adds the queries' gradient up over blocks of keys, beside row sums of
            output times its gradient (flash-attn 0.2 to 2.8 and its Triton file: dq_accum, delta); 0 = none.
        spare: elements that each of these is larger than the queries.
        bias: added to the scores and kept; its gradient is made for every sequence of the batch, then summed.
    """
    shapes = [(t.elements, t.dtype, t.sink is not None) for t in (query, key, value)]
    sinks, saved = [query.sink, key.sink, value.sink], [query.storage, key.storage, value.storage]
    if bias is not None:
        shapes.append((bias.elements * batch, bias.dtype, bias.sink is not None))
        sinks.append(bias.sink)
        saved.append(bias.storage)

    def rule(run: Run, _: Gradients) -> Gradients:
        whole = [run.new(n * gathered, d) for n, d, _ in shapes[1:3] * 2] if gathered > 1 else []
        whole += [run.arrived(sums * (shapes[0][0] + spare), "fp32", named=False),
                  run.arrived(rows, "fp32", named=False)] if sums else []
        made: Gradients = [run.arrived(n, d) if needed else None for n, d, needed in shapes]
        whole.clear()
        return made

    node = run.node(rule, sinks)
    run.save(node, *saved)
    whole = [run.new(n * gathered, d) for n, d, _ in shapes[1:3]] if gathered > 1 else []
    elements = query.elements * value.elements // key.elements  # as wide as values, which latent attention's are not
    out = Tensor(run.output(elements, query.dtype), elements, query.dtype, node.output())
    run.save(node, out.storage, run.output(rows, "fp32"), run.output(1, "fp64"), run.output(1, "fp64"))
    whole.clear()
    return out


def embedding(run: Run, rows: int, cols: int, weight: Weight, indices: Storage | None = None) -> Tensor:
    """A lookup; backward makes a dense gradient of the whole table. `indices` that are not the batch's are kept."""
    elements, dtype = weight.elements, weight.dtype
    node = run.node(lambda run, _: [run.new(elements, dtype)], (weight,))
    if indices is not None:
        run.save(node, indices)
    return _result(run, node, rows * cols, dtype)
