"""Fine-tuning as a change of an architecture: weights freeze, and small trained matrices appear beside or behind them.

A frozen layer's backward loses the products that make weight gradients; a quantised one dequantises its weight before
every product, in both directions. What is trained beside them: `branches.py`; behind them: `bottlenecks.py`. Sources:
peft tuners/lora/layer.py; bitsandbytes csrc/kernels.cu (kDequantizeBlockwise) and functional.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from sim.model.adapters.bottlenecks import bottleneck
from sim.model.adapters.branches import ROUTED, Linear, with_branches
from sim.model.adapters.narrow_frozen import one_way
from sim.model.architecture import Architecture, Layer, Operator, Parameter
from sim.model.kernels import elementwise, product, width
from sim.model.layers.chunked import output_chunks
from sim.model.layers.norms import frozen_backward
from sim.model.style import Style
from sim.model.tuning import BLOCK, Frozen, Tuned, stored_width
from sim.work import Kernel

#: Operators whose backward only makes the gradient of a table.
_LOOKUPS = ("embedding", "positions", "token_types", "position_bias")
#: What stands between frozen tables and the first block: nothing that needs a gradient is behind it. (A decoder's
#: dropout there has its backward, as if peft's `enable_input_require_grads` had asked for it.)
_BEHIND_LOOKUPS = ("embedding_norm", "embedding_dropout")
#: Kernels that only serve a weight's gradient; autocast's copies of weights that are half already.
_WEIGHT_GRADIENT = ("nt", "bias_gradient", "weight_gradient_cast", "main_grad_add", "tied_gradient_sum")
#: Kernels that only serve an input's gradient, and operators that add a branch to the stream.
_INPUT_GRADIENT = ("input_gradient", "lora_gradient_sum", "lora_dropout_backward", "dequantise")
_SUMS = ("residual", "dropout_add")
#: Modules that choose among experts: never trained beside frozen weights. peft's and bitsandbytes' rule is every
#: `torch.nn.Linear` but the head, which a router is in Hugging Face's and plain modules and is not in Megatron's.
_ROUTER = "router"
#: Which targets an operator's linear layers are; latent attention's compression and expansion make keys and values.
_TARGETS = {"projection": ("projection",), "up": ("mlp",), "down": ("mlp",), "logits": ("head",),
            "q_proj": ("query",), "q_down": ("query",), "q_up": ("query",),
            "kv_down": ("key", "value"), "kv_up": ("key", "value")}
#: What begins the name of a norm.
_NORMS = ("norm", "final_norm", "post_norm", "q_norm", "kv_norm", "query_norm", "key_norm", "embedding_norm",
          "transform_norm", "encoder_norm")
#: Modules that are queries, keys and values by the last part of their name; and a linear layer that is never a target
#: (BERT's, in front of the vocabulary).
_PARTS = {"q": "query", "k": "key", "v": "value", "kv": "key value", "qkv": "query key value",
          "query_key_value": "query key value"}
_UNTARGETED = "transform"
#: What cross attention is called, and the modules of it that read the encoder's output.
_CROSS, _READS_MEMORY, _MEMORY_SUM = "EncDecAttention", ("k", "v", "kv"), "memory_gradient_sum"


def finetuned(architecture: Architecture, style: Style) -> Architecture:
    """The architecture with `style.tuned` applied; layers that were one object stay one. An encoder-decoder has a style
    per stack, that of its layers' programs."""
    known: dict[int, Layer] = {}
    for layer in architecture.stack:
        if id(layer) not in known:
            own = style if layer.program is None or style.kind != "encoder-decoder" else layer.program.style
            known[id(layer)] = _layer(layer, own)
    return replace(architecture, stack=tuple(known[id(layer)] for layer in architecture.stack))


def _layer(layer: Layer, style: Style) -> Layer:
    tuned = style.tuned
    assert tuned is not None
    operators: list[Operator] = []
    owned: list[tuple[Parameter, ...]] = []  # each new operator's parameters before they froze
    behind = _places(layer, style)
    for position, op in enumerate(layer.operators):
        linears = _linears(op, style)
        base = _freeze(op, style, bool(linears) or op.name in (_ROUTER, _UNTARGETED), tuned)
        made = with_branches(one_way(base, style, any(tuned.chosen(one.parts) for one in linears)), linears, style)
        operators += made
        owned += [op.parameters, *(() for _ in made[1:])]
        if position in behind:
            operators[:] = [replace(one, recomputed=True) for one in operators]  # what the adapter keeps stands on them
            own = bottleneck(style, tuned, behind[position])
            operators += own
            owned += [() for _ in own]
    if style.constant_input and layer.program is not None and layer.program.layer == "first block":
        operators = list(_begun(zip(operators, owned, strict=True), tuned))
    trained = {p.name: p for op in operators for p in op.parameters}
    frozen = {p.name: Frozen(p.name, p.shape, _dtype_of(p, layer, style, tuned), p.routed)
              for p in layer.parameters if p.name not in trained}
    operators = [replace(op, frozen=tuple(frozen[p.name] for p in own if p.name in frozen))
                 for op, own in zip(operators, owned, strict=True)]
    kept = tuple(p for p in layer.parameters if p.name in trained)
    added = tuple(p for op in operators for p in reversed(op.parameters) if p not in kept)
    return replace(layer, operators=tuple(operators), parameters=(*kept, *added),
                   frozen=tuple(frozen.values()))


def _places(layer: Layer, style: Style) -> dict[int, str]:
    """Behind which operators of a block adapters stand, and what of: of T5 behind the dropout of a sub-layer's output
    (adapters 1.3.0 models/t5/modeling_t5.py), of a mixture behind the sum of all experts."""
    tuned, names = style.tuned, [op.name for op in layer.operators]
    assert tuned is not None
    if tuned.method != "adapter" or layer.kind != "block":
        return {}
    found: dict[int, str] = {}
    ends = "shared_add" if "shared_add" in names else "combine" if "combine" in names else "down"
    attentions = iter(("attention", "cross"))
    for position, name in enumerate(names):
        sublayer = next(attentions) if name == "projection" else "mlp" if name == ends else ""
        if sublayer and tuned.behind(sublayer):
            dropped = style.kind == "encoder-decoder" and names[position + 1].startswith("dropout") and (
                not names[position + 1].startswith("dropout_add"))
            found[position + dropped] = sublayer
    return found


def _dtype_of(parameter: Parameter, layer: Layer, style: Style, tuned: Tuned) -> str:
    """How a frozen parameter is stored: matrices of linear layers in the base's way, the rest plain."""
    if len(parameter.shape) < 2 or layer.kind == "embedding":
        return tuned.plain
    name = next((op.name for op in layer.operators if parameter in op.parameters), "")
    if name in _LOOKUPS:
        return tuned.plain
    return _stored("logits" if layer.kind == "head" and name != _UNTARGETED else name, style, tuned)


def _stored(name: str, style: Style, tuned: Tuned) -> str:
    """How the weights of an operator's linear layers are stored."""
    if name == _ROUTER and style.modules == "megatron":
        return tuned.plain
    return tuned.linear_dtype("head" if name == "logits" else "query", name)


# ----------------------------------------------------------------------------------------------------------- freezing
def _freeze(op: Operator, style: Style, is_linear: bool, tuned: Tuned) -> Operator:
    """The operator without what serves the gradients of its weights."""
    if op.name in _LOOKUPS:
        kept = tuple(t for t in op.saved if t.name != "position_buckets")
        return replace(op, backward=(), parameters=(), saved=kept)
    if op.name in _BEHIND_LOOKUPS and style.constant_input:
        return replace(op, backward=(), parameters=(), saved=())
    if op.name.startswith(_NORMS):
        if tuned.trains_norms:
            return op
        kernels = frozen_backward(style, op.backward)
        kept = tuple(t for t in op.saved if "normalised" not in t.name)
        return replace(op, backward=kernels, parameters=(), saved=kept)
    if op.name == "loss":  # logits in chunks: the head's product is in it
        kept = tuple(t for t in op.saved if t.name != "head_gradient")
        idle = {"nt", "chunk_weight_gradient_add"} | (
            set() if tuned.plain == "fp32" and style.autocast else {"weight_cast"})
        forward, backward = ([k for k in way if k.variant not in idle] for way in (op.forward, op.backward))
        return replace(op, forward=tuple(forward), parameters=(), saved=kept, backward=tuple(
            k for k in backward if k.variant not in _WEIGHT_GRADIENT))
    if not is_linear:
        return op
    stored = _stored(op.name, style, tuned)
    copied = stored == "fp32" and style.autocast
    forward = [k for k in op.forward if copied or k.variant != "weight_cast"]
    backward = [k for k in op.backward if k.variant not in _WEIGHT_GRADIENT]
    saved = tuple(t for t in op.saved if not t.name.endswith(("input", "compressed", "memory_copy")))
    if stored_width(stored) < width(style.act) or "nf4" in stored:
        forward, backward = (_dequantised(kernels, stored, style) for kernels in (forward, backward))
        if style.stack.quantised_keeps_input and stored != "int8":
            saved = op.saved
    cut = op.joint and op.joint._replace(again=False)
    return replace(op, forward=tuple(forward), backward=tuple(backward), parameters=(), saved=saved, joint=cut,
                   weight_copies=op.weight_copies if copied else ())


def _begun(operators: Iterable[tuple[Operator, tuple[Parameter, ...]]], tuned: Tuned) -> Iterator[Operator]:
    """A first block whose input needs no gradient: backward ends with the first weights that are trained.

    Args:
        operators: with what were their parameters.
    """
    stream, branch = True, True  # whether they need none so far
    for op, own in operators:
        if not stream or not (branch or op.name.startswith(_SUMS)):
            yield op
        elif op.name.startswith(_SUMS):
            stream = branch
            yield replace(op, backward=() if branch else tuple(k for k in op.backward if k.variant != "gradient_sum"))
        else:
            reads_memory = any(_CROSS in p.name for p in own)
            branch = not op.parameters and not reads_memory
            yield replace(op, backward=_of_memory(op) if reads_memory else tuple(
                k for k in op.backward if not (branch or _makes_input_gradient(k, tuned))))


def _of_memory(op: Operator) -> tuple[Kernel, ...]:
    """Backward of cross attention's projections without the queries', which comes last."""
    last, queries = [i for i, k in enumerate(op.backward) if k.op == "gemm"][-2:]
    casts = (k for k in op.backward[last + 1:queries] if k.variant == "input_gradient_cast")
    return (*op.backward[:last + 1], *casts, *(k for k in op.backward[queries:] if k.variant == _MEMORY_SUM))


def _makes_input_gradient(kernel: Kernel, tuned: Tuned) -> bool:
    """Whether it serves the gradient of what queries, keys and values are made from; B's input has `rank` columns."""
    if kernel.op == "gemm":
        return kernel.variant == "nn" and kernel.shape[2] != tuned.rank
    return kernel.variant.startswith(_INPUT_GRADIENT)


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
        count, m, n, k = kernel.shape  # several matrices of experts: one launch, or as many
        times = kernel.launches
        if stored == "int8" and kernel.variant == "tn":
            e = width(style.act)
            whole = product(count, m, n, k, "tn", "int8", "int8", "fp32")
            result += [elementwise("quantise_rows", count * m * k, e + 1, "int8", 2 * times),
                       replace(whole, flops=kernel.flops, launches=times),
                       elementwise("scale_rows", count * m * n, 4 + e, style.act, times)]
            continue
        result += [replace(made, launches=made.launches * times)
                   for made in dequantisation(count * n * k, stored, style.act)]
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


def _linears(op: Operator, style: Style) -> list[Linear]:
    """The linear layers behind an operator, in the order of its modules."""
    if op.name == "qkv":
        return _projections(op, style)
    assert style.tuned is not None
    chunked = ("head",) if style.chunked_loss and style.keeps_chunks else ("",)
    targets = chunked if op.name == "loss" else _TARGETS.get(op.name, ("",))
    target = next((name for name in targets if name in style.tuned.targets), targets[0])
    chunks = tuple(output_chunks(style.batch * style.predicted)) if op.name == "loss" and target else ()
    if target == "head" and not any(len(p.shape) > 1 for p in op.parameters):  # the embedding's table
        return [Linear("lm_head", style.hidden, ((target, style.vocab),), chunks=chunks)]
    found: dict[str, Linear] = {}
    for parameter in op.parameters if target else ():
        module, last = parameter.name.rsplit(".", 1)
        if last == "weight":
            outputs, inputs = parameter.shape[::-1] if style.conv1d else parameter.shape
            name = ROUTED.sub(".experts.", module)
            found[name] = Linear(name, inputs, ((target, outputs),), parameter.routed, chunks=chunks)
    return list(found.values())


def _projections(op: Operator, style: Style) -> list[Linear]:
    """Queries, keys and values: of one module, of three, or of two where cross attention is fused."""
    widths = {"query": style.query_width, "key": style.kv_width, "value": style.kv_width}
    modules = dict.fromkeys(p.name.rsplit(".", 1)[0] for p in op.parameters)
    if len(modules) == 1:
        return [Linear(next(iter(modules)), style.hidden, tuple(widths.items()))]
    found: list[Linear] = []
    for module in modules:
        last = module.rsplit(".", 1)[-1]
        names = _PARTS.get(last.removesuffix("_proj"), last).split()
        memory = style.batch * style.memory if _CROSS in module and last in _READS_MEMORY else 0
        found.append(Linear(module, style.hidden, tuple((name, widths[name]) for name in names), rows=memory))
    return sorted(found, key=lambda one: list(widths).index(one.parts[0][0]))
