"""Linear layers with frozen weights and what is trained beside them, as allocations.

A frozen weight has no gradient, so its layer does not keep its input; a quantised one is dequantised into a temporary
in both directions. Local variables are those of the modules. Sources: peft tuners/lora/layer.py, bnb.py; bitsandbytes
autograd/_functions.py (MatMul4Bit, MatMul8bitLt), nn/modules.py (Linear4bit); LitGPT lora.py and loralib layers.py
(one module for a fused projection: LoRAQKVLinear, MergedLinear); Houlsby et al. 2019, section 2.1.
"""

from __future__ import annotations

from sim.model.eager.tensors import between
from sim.model.eager.tensors import operations as op
from sim.model.eager.tensors.autograd import Dropped, Gradients, Run, Tensor, Weight
from sim.model.eager.tensors.narrow import narrow
from sim.model.eager.tensors.storage import COPIES, Storage
from sim.model.style import Style
from sim.model.tuning import BLOCK, QUANTISED, Tuned

#: Target of a linear layer's outputs, and how many of them there are.
Parts = tuple[tuple[str, int], ...]


def linear(run: Run, style: Style, x: Tensor, features_in: int, parts: Parts, gathered: int = 1,
           matrices: int = 1) -> Tensor:
    """A frozen linear layer and LoRA's branch where one of its parts is a target.

    Args:
        gathered: slices of the sequence the input is gathered from; a branch keeps the whole (Megatron-Bridge
            peft/utils.py: `return_layernorm_output_gathered`), and its gradient goes back with the layer's own.
        matrices: of experts, each for its share of the rows; a grouped module of Megatron's has one branch for all.
    """
    tuned = style.tuned
    assert tuned is not None
    outputs, stored = sum(width for _, width in parts), tuned.linear_dtype(parts[0][0], run.memory.operator)
    chosen = tuned.chosen(parts)
    if chosen and gathered > 1:
        x, gathered = between.gathered(run, x, gathered), 1
    result = _frozen(run, style, x, features_in, outputs, stored, gathered, matrices, blocks=parts[0][0] != "head")
    if not chosen:
        return result
    own = _branches(style, matrices)
    if style.mixes and stored not in QUANTISED:
        return _mixed(run, tuned, x, result, features_in, outputs, own)
    x = _read(run, style, x, stored)
    if len(parts) > 1 and style.modules == "plain" and not style.cuts_branches:
        update = _merged(run, tuned, x, features_in, chosen, outputs)
    else:
        share = style.tensor if style.cuts_branches else 1
        down = op.linear(run, x, features_in, tuned.rank // share, False, dtype=tuned.dtype, matrices=own)
        down = between.widened(run, down, share)
        update = op.scale(run, op.linear(run, down, tuned.rank, outputs, False, dtype=tuned.dtype, matrices=own))
        del down
    del x
    return op.add(run, result, op.to(run, update, result.dtype))


def _mixed(run: Run, tuned: Tuned, x: Tensor, result: Tensor, features_in: int, outputs: int, matrices: int) -> Tensor:
    """A branch in another dtype than its base without autocast, as peft 0.21.2 has it (tuners/lora/layer.py,
    Linear.forward): the copy of the input is a variable to the end, base and branch are added as wide as the branch,
    and the sum is cast back. (Beside quantised layers, bnb.py, the branch is cast.)"""
    narrow, x = result.dtype, op.to(run, x, tuned.dtype)
    made = [op.dropout(run, x) if tuned.drops else x]
    made = [op.linear(run, made.pop(), features_in, tuned.rank, False, dtype=tuned.dtype, matrices=matrices)]
    made = [op.linear(run, made.pop(), tuned.rank, outputs, False, dtype=tuned.dtype, matrices=matrices)]
    made = [op.scale(run, made.pop())]
    result = op.add(run, result, made.pop())
    return op.to(run, result, narrow)


def row(run: Run, style: Style, x: Tensor, features_in: int, parts: Parts, matrices: int = 1) -> Tensor:
    """The same where outputs are sums over slices of the width and both matrices are cut: B's columns of all slices
    are gathered, then each takes its own tokens of them."""
    tuned = style.tuned
    assert tuned is not None
    outputs, chosen = sum(width for _, width in parts), tuned.chosen(parts)
    stored = tuned.linear_dtype(parts[0][0], run.memory.operator)
    result = _frozen(run, style, x, features_in, outputs, stored, matrices=matrices)
    if style.scattered:
        result = between.scattered(run, result, style.tensor)
    if not chosen:
        return result
    own = _branches(style, matrices)
    x = _read(run, style, x, stored)
    down = op.linear(run, x, features_in, tuned.rank, False, dtype=tuned.dtype, matrices=own)
    del x
    update = op.linear(run, down, tuned.rank, outputs // style.tensor, False, dtype=tuned.dtype, matrices=own)
    del down
    update = between.widened(run, update, style.tensor)
    if style.scattered:
        update = between.scattered(run, update, style.tensor)
    return op.add(run, result, op.to(run, op.scale(run, update), result.dtype))


def router(run: Run, style: Style, x: Tensor, experts: int) -> Tensor:
    """A frozen router: Megatron's is no linear layer, and so stays as it is."""
    tuned = style.tuned
    assert tuned is not None
    stored = tuned.plain if style.modules == "megatron" else tuned.base
    return _frozen(run, style, x, style.hidden, experts, stored, blocks=False)


def _branches(style: Style, matrices: int) -> int:
    """Pairs of A and B beside `matrices` weights of experts."""
    return 1 if style.modules == "megatron" else matrices


def _read(run: Run, style: Style, x: Tensor, stored: str) -> Tensor:
    """A branch's input as A reads it; autocast casts it back."""
    tuned = style.tuned
    if tuned is not None and (not run.autocast or _casts(style, stored)):
        x = op.to(run, x, tuned.dtype)
    return op.dropout(run, x) if tuned is not None and tuned.drops else x


def _merged(run: Run, tuned: Tuned, x: Tensor, features_in: int, chosen: Parts, outputs: int) -> Tensor:
    """Parts of a fused projection: one A, a grouped product, and the result spread over all outputs.

    `index_copy` keeps its source, because its derivative expands to the source's shape (derivatives.yaml).
    """
    rows, width = x.elements // features_in, sum(w for _, w in chosen)
    down = op.linear(run, x, features_in, tuned.rank * len(chosen), False, dtype=tuned.dtype)
    up = _grouped(run, tuned, down, rows, width)
    del down
    if width < outputs:
        zeros = run.new(rows * outputs, up.dtype)
        source = op.clone(run, up)
        del up
        dtype = source.dtype
        node = run.node(lambda run, _: [run.new(rows * width, dtype)], (source.sink,))
        run.save(node, source.storage)
        up = Tensor(run.new(rows * outputs, dtype), rows * outputs, dtype, node.output())
        del zeros, source
    return op.scale(run, up)


def _grouped(run: Run, tuned: Tuned, x: Tensor, rows: int, width: int) -> Tensor:
    """`conv1d` with a group per part: each part has its own columns of `x`."""
    copy, sink = op.weight_copy(run, Weight(tuned.rank * width, tuned.dtype))
    elements, size, dtype = x.elements, tuned.rank * width, x.dtype
    node = run.node(lambda run, _: [run.new(elements, dtype), run.new(size, dtype)], (x.sink, sink))
    run.save(node, x.storage)
    if copy is not None:
        run.save(node, copy)
    return Tensor(run.new(rows * width, dtype), rows * width, dtype, node.output())


def _frozen(run: Run, style: Style, x: Tensor, features_in: int, features_out: int, stored: str,
            gathered: int = 1, matrices: int = 1, *, blocks: bool = True) -> Tensor:
    """The product with a frozen weight; its output has the input's dtype again if the weight was quantised.

    Args:
        blocks: of a block's own linear layers, which products in 8 bits and below are for.
    """
    tuned, source = style.tuned, x.dtype
    assert tuned is not None
    x = op.to(run, x, run.autocast or style.act)
    rows, size = gathered * x.elements // features_in, matrices * features_in * features_out
    needed, act = x.sink is not None, x.dtype
    quantised = narrow(style) if blocks else None
    whole = run.new(rows * features_in, act) if gathered > 1 else None
    four_bit, eight_bit = stored in ("int4", "nf4", "nf4-dq"), stored == "int8"

    def weight(run: Run) -> list[Storage]:
        """The weight as the product reads it, and the constants it is made from."""
        if not four_bit and not eight_bit:
            return []
        constants = [run.new(size // BLOCK, "fp32")] if stored == "nf4-dq" else []
        if not four_bit or act == "fp16" or not style.stack.quantised_through_half:
            return [*constants, run.new(size, act)]
        half = run.new(size, "fp16")
        cast = run.new(size, act)
        del half
        return [*constants, cast]

    def rule(run: Run, _: Gradients) -> Gradients:
        held = [*weight(run), *([] if quantised is None else [quantised.once(run, rows * features_out)])]
        gradient = run.new(rows * features_in, act) if needed else None
        held.clear()
        if gathered > 1 and needed:
            gradient = run.new(rows // gathered * features_in, act)
        return [gradient]

    node = run.node(rule, (x.sink,))
    if four_bit and style.stack.quantised_keeps_input:
        run.save(node, x.storage if whole is None else whole)
    if run.autocast and not four_bit and not eight_bit and stored != run.autocast:
        kind, run.kind = run.kind, COPIES  # autocast's cache holds copies of what is trained only
        run.save(node, run.new(size, run.autocast))
        run.kind = kind
    held = [run.new(rows * features_in, "int8"), run.new(rows * features_out, "fp32")] if eight_bit else weight(run)
    if quantised is not None:
        held += quantised.frozen(run, node, rows * features_in, size)
    made = run.new(rows * features_out, act) if eight_bit else run.output(rows * features_out, act, product=True)
    out = Tensor(made, rows * features_out, act, node.output())
    held.clear()
    del whole, made
    return op.to(run, out, source) if four_bit or eight_bit else out


def bottleneck(run: Run, style: Style, x: Tensor) -> Tensor:
    """Houlsby's adapter: down, activation, up, and the sum with its input; NeMo's has a norm in front of the sum, and
    of a cut model a share of the inner columns (`sim.model.adapters.bottlenecks`)."""
    tuned = style.tuned
    assert tuned is not None
    if style.modules == "megatron":
        own = tuned.rank // style.tensor
        down = between.widened(run, op.linear(run, x, style.hidden, own, False, dtype=tuned.dtype), style.tensor)
        inner = op.unary(run, down, saves_input=True)
        del down
        if style.tensor > 1:  # scatter_to_tensor_model_parallel_region: columns, not tokens, but as many of them
            inner = between.scattered(run, inner, style.tensor)
        up = op.linear(run, inner, own, style.hidden, False, dtype=tuned.dtype)
        del inner
        return op.add(run, x, op.layer_norm(run, op.to(run, up, x.dtype), style.hidden, 2, 2, tuned.dtype))
    down = op.linear(run, x, style.hidden, tuned.rank, True, dtype=tuned.dtype)
    inner = op.unary(run, down, saves_input=True)
    del down
    up = op.linear(run, inner, tuned.rank, style.hidden, True, dtype=tuned.dtype)
    del inner
    return op.add(run, x, op.to(run, up, x.dtype))


def behind(run: Run, style: Style, x: Tensor, sublayer: str) -> Tensor:
    """A sub-layer's output after its adapter, if it has one."""
    if style.tuned is None or not style.tuned.behind(sublayer):
        return x
    run.at(f"{sublayer}_adapter")
    return bottleneck(run, style, x)


def keeps_inputs(style: Style, target: str) -> bool:
    """Whether a target's linear layer keeps the very tensor it reads: a branch without dropout or cast does, and a
    4-bit layer whose library keeps what it does not need."""
    tuned = style.tuned
    if tuned is None:
        return True
    stored = tuned.linear_dtype(target)
    if stored in ("int4", "nf4", "nf4-dq") and style.stack.quantised_keeps_input:
        return True
    cast = style.act != tuned.dtype and (not style.autocast or _casts(style, stored))
    return bool(tuned.chosen(((target, 0),))) and not tuned.drops and not cast


def _casts(style: Style, stored: str) -> bool:
    """Whether a branch's input is cast to A's dtype under autocast too: peft does so beside layers as they are
    (tuners/lora/layer.py, Linear.forward: `_cast_input_dtype`), not beside quantised ones (bnb.py:
    `requires_conversion`)."""
    return style.modules == "transformers" and stored not in QUANTISED


def embedding(run: Run, rows: int, cols: int, dtype: str) -> Tensor:
    """A lookup in a frozen table: what comes back stops here."""
    return dropped(run.tensor(rows * cols, dtype))


def dropped(x: Tensor) -> Tensor:
    """A layer's output that nothing trained is behind: what comes back stops here."""
    return Tensor(x.storage, x.elements, x.dtype, Dropped()) if x.sink is None else x
