"""Fine-tuning as a change of an architecture: weights freeze, and small trained matrices appear beside or behind them.

A frozen layer's backward loses the products that make weight gradients; a quantised one dequantises its weight before
every product, in both directions. Sources: peft tuners/lora/layer.py, LitGPT lora.py, loralib layers.py; bitsandbytes
csrc/kernels.cu (kDequantizeBlockwise) and functional.py; Houlsby et al. 2019, section 2.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sim.model.architecture import Architecture, Joint, Layer, Operator, Parameter, Tensor
from sim.model.kernels import elementwise, joint, linear, product, width
from sim.model.style import Style
from sim.model.tuning import BLOCK, Frozen, Tuned, stored_width
from sim.work import Kernel

#: Operators whose backward only makes the gradient of a table.
_LOOKUPS = ("embedding", "positions")
#: Kernels that only serve a weight's gradient; autocast's copies of weights that are half already.
_WEIGHT_GRADIENT = ("nt", "bias_gradient", "weight_gradient_cast", "main_grad_add", "tied_gradient_sum")
#: Passes over the activation in backward of a norm, and those of them that make its weight's gradient (`norms.py`).
_NORM_BACKWARD, _NORM_WEIGHT = 5, 2

#: One linear layer of an operator: target, module, inputs and outputs by target (several if fused).
Linear = tuple[str, str, int, tuple[tuple[str, int], ...]]


def finetuned(architecture: Architecture, style: Style) -> Architecture:
    """The architecture of a decoder with `style.tuned` applied; layers that were one object stay one."""
    known: dict[int, Layer] = {}
    for layer in architecture.stack:
        if id(layer) not in known:
            known[id(layer)] = _layer(layer, style)
    return replace(architecture, stack=tuple(known[id(layer)] for layer in architecture.stack))


def _layer(layer: Layer, style: Style) -> Layer:
    tuned = style.tuned
    assert tuned is not None
    operators: list[Operator] = []
    owned: list[tuple[Parameter, ...]] = []  # each new operator's parameters before they froze
    for op in layer.operators:
        linears = _linears(op, style)
        made = _with_branches(_freeze(op, style, bool(linears), tuned), linears, style, tuned)
        operators += made
        owned += [op.parameters, *(() for _ in made[1:])]
        sublayer = {"projection": "attention", "down": "mlp"}.get(op.name, "")
        if sublayer and tuned.behind(sublayer):
            operators.append(_bottleneck(style, tuned, sublayer))
            owned.append(())
    trained = {p.name: p for op in operators for p in op.parameters}
    frozen = {p.name: Frozen(p.name, p.shape, _dtype_of(p, layer, tuned)) for p in layer.parameters
              if p.name not in trained}
    operators = [replace(op, frozen=tuple(frozen[p.name] for p in own if p.name in frozen))
                 for op, own in zip(operators, owned, strict=True)]
    kept = tuple(p for p in layer.parameters if p.name in trained)
    added = tuple(p for op in operators for p in reversed(op.parameters) if p not in kept)
    return replace(layer, operators=tuple(operators), parameters=(*kept, *added),
                   frozen=tuple(frozen.values()))


def _dtype_of(parameter: Parameter, layer: Layer, tuned: Tuned) -> str:
    """How a frozen parameter is stored: matrices of linear layers in the base's way, the rest plain."""
    if len(parameter.shape) < 2 or layer.kind == "embedding":
        return tuned.plain
    return tuned.linear_dtype("head" if layer.kind == "head" else "query")


# ----------------------------------------------------------------------------------------------------------- freezing
def _freeze(op: Operator, style: Style, is_linear: bool, tuned: Tuned) -> Operator:
    """The operator without what serves the gradients of its weights."""
    if op.name in _LOOKUPS:
        return replace(op, backward=(), parameters=())
    if op.name.startswith(("norm", "final_norm")):
        if tuned.trains_norms:
            return op
        kernels = tuple(replace(k, bytes=k.bytes * (1 - _NORM_WEIGHT / _NORM_BACKWARD),
                                launches=max(1, k.launches - 1)) for k in op.backward)
        kept = tuple(t for t in op.saved if "normalised" not in t.name)
        return replace(op, backward=kernels, parameters=(), saved=kept)
    if op.name == "loss":  # logits in chunks: the head's product is in it
        kept = tuple(t for t in op.saved if t.name != "head_gradient")
        idle = ("nt",) if tuned.plain == "fp32" and style.autocast else ("nt", "weight_cast")
        forward, backward = ([k for k in way if k.variant not in idle] for way in (op.forward, op.backward))
        return replace(op, forward=tuple(forward), parameters=(), saved=kept, backward=tuple(
            k for k in backward if k.variant not in _WEIGHT_GRADIENT))
    if not is_linear:
        return op
    stored = tuned.linear_dtype("head" if op.name == "logits" else "query")
    copied = stored == "fp32" and style.autocast
    forward = [k for k in op.forward if copied or k.variant != "weight_cast"]
    backward = [k for k in op.backward if k.variant not in _WEIGHT_GRADIENT]
    saved = tuple(t for t in op.saved if not t.name.endswith("input"))
    if stored_width(stored) < width(style.act) or "nf4" in stored:
        forward, backward = (_dequantised(kernels, stored, style) for kernels in (forward, backward))
        if style.stack.quantised_keeps_input and stored != "int8":
            saved = op.saved
    return replace(op, forward=tuple(forward), backward=tuple(backward), parameters=(), saved=saved,
                   weight_copies=op.weight_copies if copied else ())


def _dequantised(kernels: Sequence[Kernel], stored: str, style: Style) -> list[Kernel]:
    """Every product behind the kernels that make its weight readable.

    4 bits: one kernel reads weights and constants and writes them in the activations' dtype; double quantisation first
    makes the constants (two more small kernels). int8 (LLM.int8, Dettmers et al. 2022): forward quantises the rows of
    its input, multiplies in int8 and scales the result; backward makes a half copy of the weight and scales it.
    """
    result: list[Kernel] = []
    for kernel in kernels:
        if kernel.op != "gemm":
            result.append(kernel)
            continue
        _, m, n, k = kernel.shape
        if stored == "int8" and kernel.variant == "tn":
            e = width(style.act)
            result += [elementwise("quantise_rows", m * k, e + 1, "int8", 2),
                       product(1, m, n, k, "tn", "int8", "int8", "fp32"),
                       elementwise("scale_rows", m * n, 4 + e, style.act)]
            continue
        result += dequantisation(n * k, stored, style.act)
        result.append(kernel)
    return result


def dequantisation(elements: int, stored: str, dtype: str) -> list[Kernel]:
    """Kernels that write `elements` weights in `dtype` from how they are stored."""
    own = stored_width(stored)
    if stored == "int8":
        return [elementwise("dequantise", elements, 1 + width(dtype), dtype),
                elementwise("dequantise_scale", elements, 2 * width(dtype), dtype)]
    constants: list[Kernel] = []
    if stored == "nf4-dq":
        constants = [elementwise("dequantise_constants", elements // BLOCK, 1 + 4 + 8, "fp32", 2)]
        own += 4 / BLOCK
    return [*constants, elementwise("dequantise", elements, own + width(dtype), dtype)]


# ----------------------------------------------------------------------------------------------------------- branches
def _linears(op: Operator, style: Style) -> list[Linear]:
    """The linear layers behind an operator, in the order of its modules."""
    modules = list(dict.fromkeys(p.name.rsplit(".", 1)[0] for p in op.parameters))
    heads = (("query", style.query_width), ("key", style.kv_width), ("value", style.kv_width))
    if op.name == "qkv" and len(modules) == 1:
        return [("query", modules[0], style.hidden, heads)]
    if op.name == "qkv":
        ordered = {m: next(h for h in heads if h[0][0] + "_proj" in m) for m in modules}
        return [(h[0], m, style.hidden, (h,)) for m, h in sorted(ordered.items(), key=lambda x: heads.index(x[1]))]
    if op.name == "projection":
        return [("projection", modules[0], style.query_width, (("projection", style.hidden),))]
    if op.name == "up":
        outputs = 2 * style.ffn if style.gated and style.modules == "megatron" else style.ffn
        return [("mlp", m, style.hidden, (("mlp", outputs),)) for m in modules]
    if op.name == "down":
        return [("mlp", modules[0], style.ffn, (("mlp", style.hidden),))]
    if op.name == "logits":
        return [("head", modules[0] if modules else "lm_head", style.hidden, (("head", style.vocab),))]
    return []


def _with_branches(op: Operator, linears: Sequence[Linear], style: Style, tuned: Tuned) -> list[Operator]:
    """LoRA's products beside the linear layers that are targets: in the operator, or of a cut model behind it, because
    slices depend on one another there too."""
    rows = style.batch * style.predicted if op.name == "logits" else style.tokens
    branches: list[Operator] = []
    for _, module, inputs, parts in linears:
        chosen = tuple(part for part in parts if part[0] in tuned.targets)
        if tuned.method != "lora" or not chosen:
            continue
        merged = len(parts) > 1 and style.modules == "plain"
        down, up = tuned.rank * (len(chosen) if merged else 1), chosen if merged else parts
        pair = _branch(style, rows, inputs, down, up, sum(w for _, w in parts))
        matrices = (down, inputs), (sum(w for _, w in up), tuned.rank)
        branches += [replace(half, name=f"{op.name}_{half.name}", joint=_cut(op, half, style, rows * down), parameters=(
            Parameter(f"{module}.{half.name}", shape),)) for half, shape in zip(pair, matrices, strict=True)]
    # a branch of the block's last product is behind it, and so is what keeps its input
    again = op.recomputed or bool(branches) or (op.name == "down" and tuned.behind("mlp"))
    keeps = tuned.quantised and tuned.base != "int8" and style.stack.quantised_keeps_input
    base = replace(op, recomputed=again or keeps)
    if style.tensor > 1:
        return [base, *branches]
    reverse = branches[::-1]
    return [replace(
        base, forward=(*op.forward, *(k for half in branches for k in half.forward)),
        backward=(*(k for half in reverse for k in half.backward), *op.backward),
        parameters=(*op.parameters, *(p for half in reverse for p in half.parameters)),
        saved=(*op.saved, *(t for half in branches for t in half.saved)))]


def _cut(op: Operator, half: Operator, style: Style, between: int) -> Joint | None:
    """Where one of LoRA's matrices depends on other slices. Beside a product cut by columns A is whole on every rank
    and B is cut like the product, so that the gradient of the `between` elements in the middle is a sum over ranks;
    beside one cut by rows A is cut and makes partial sums, and B is whole (peft tuners/lora/tp_layer.py,
    LoraParallelLinear)."""
    if op.joint is None or half.name != {"column": "lora_B", "row": "lora_A"}.get(op.joint.kind):
        return None
    return joint(style, op.joint.kind, between)


def _branch(style: Style, rows: int, inputs: int, down: int, up: tuple[tuple[str, int], ...],
            outputs: int) -> tuple[Operator, Operator]:
    """LoRA's branch: dropout and A; B (one product per part), zeros around parts of a fused projection, scale, sum."""
    tuned = style.tuned
    assert tuned is not None
    e, act = width(style.act), style.act
    half = replace(style, gemm=act)
    parts = len(up) if len(up) > 1 or down > tuned.rank else 1
    written = sum(w for _, w in up)
    first, first_back = linear(half, rows, inputs, down, source=act, bias=False)
    widths = [w for _, w in up] if parts > 1 else [written]
    pairs = [linear(half, rows, down // parts, w, source=act, bias=False) for w in widths]
    forward = [k for f, _ in pairs for k in f]
    backward = [k for _, b in reversed(pairs) for k in b]
    compiled = style.stack.compile
    if compiled:  # parts, scale and sum in one kernel; the scaled gradient is written where the gradient is made
        forward.append(elementwise("lora_add", rows * outputs, 2 * e + e * written / outputs, act))
        backward.insert(0, elementwise("lora_scale_backward", rows * written, e, act))
    else:
        if written < outputs:  # zeros, copy of the parts, index_copy
            forward += [elementwise("zero_pad", rows * outputs, 4 * e + 3 * e * written / outputs, act, 4)]
            backward.insert(0, elementwise("zero_pad_backward", rows * written, 2 * e, act))
        forward += [elementwise("lora_scale", rows * outputs, 2 * e, act),
                    elementwise("lora_add", rows * outputs, 3 * e, act)]
        backward = [elementwise("lora_scale_backward", rows * outputs, 2 * e, act), *backward]
    kept = [Tensor("lora_input", rows * inputs, act)]
    if style.stack.adapter_dropout:
        first.insert(0, elementwise("lora_dropout", rows * inputs, 2 * e + (not compiled), act))
        if not compiled:  # compiled, it rides in the sum behind it, and the mask is drawn again
            first_back.append(elementwise("lora_dropout_backward", rows * inputs, 2 * e + 1, act))
            kept.append(Tensor("lora_dropout_mask", rows * inputs, "int8"))
    first_back.append(elementwise("lora_gradient_sum", rows * inputs, 3 * e, act))
    return (Operator("lora_A", tuple(first), tuple(first_back), saved=tuple(kept)),
            Operator("lora_B", tuple(forward), tuple(backward), saved=(Tensor("lora_rank", rows * down, act),)))


def _bottleneck(style: Style, tuned: Tuned, sublayer: str) -> Operator:
    """Houlsby's adapter behind a sub-layer: down, activation, up, sum."""
    rows, hidden, rank, act = style.tokens, style.hidden, tuned.rank, style.act
    half, e = replace(style, gemm=act), width(act)
    down, down_back = linear(half, rows, hidden, rank, source=act, bias=True)
    up, up_back = linear(half, rows, rank, hidden, source=act, bias=True)
    forward = [*down, elementwise("activation", rows * rank, 2 * e, act), *up,
               elementwise("adapter_add", rows * hidden, 3 * e, act)]
    backward = [*up_back, elementwise("activation_backward", rows * rank, 3 * e, act), *down_back,
                elementwise("adapter_gradient_sum", rows * hidden, 3 * e, act)]
    names = (("up", (hidden, rank)), ("down", (rank, hidden)))
    parameters = [p for side, shape in names for p in (Parameter(f"{sublayer}_adapter.{side}.bias", shape[:1]),
                                                       Parameter(f"{sublayer}_adapter.{side}.weight", shape))]
    kept = (Tensor("adapter_input", rows * hidden, act), Tensor("adapter_down", rows * rank, act),
            Tensor("adapter_inner", rows * rank, act))
    return Operator(f"{sublayer}_adapter", tuple(forward), tuple(backward), tuple(parameters), kept)
