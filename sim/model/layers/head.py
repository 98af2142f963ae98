"""The head layer: final norm, logits, loss and the metrics some stacks evaluate on the training logits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from sim.model.architecture import Joint, Layer, Operator, Parameter, Tensor
from sim.model.compiled import compiles_loss, splits_loss
from sim.model.kernels import cast, elementwise, joint, linear_operator, softcap, strided, strided_chain, width
from sim.model.layers.chunked import Ways, chunked_cut, chunked_forward, chunked_gathered, chunked_kept
from sim.model.layers.norms import norm_operator
from sim.model.style import Style
from sim.work import Kernel

_NAMES = {"plain": ("ln_f", "head"), "gpt2": ("transformer.ln_f", "lm_head"),
          "transformers": ("model.norm", "lm_head"), "megatron": ("decoder.final_layernorm", "output_layer")}

#: Bytes per logit of PyTorch's cross-entropy on a cut vocabulary, in elements read and written: maximum (1),
#: exponential (2), sum (1), and both differences, from what is broadcast (2); backward fills with zeros (1), takes the
#: exponential (2), adds (3), multiplies (2). Source: torch 2.6.0 distributed/tensor/parallel/loss.py.
_SPLIT = ((1, 2, 1), (2, 2), (1, 2, 3, 2))

#: Bytes per logit of Megatron's vocab-parallel cross-entropy on fp32 logits: maximum (4), exp in place (8), sum (4),
#: and by what is broadcast subtraction and division in place (8); backward scales the kept softmax in place so (8).
#: Source: megatron/core/tensor_parallel/cross_entropy.py.
_VOCAB_PARALLEL = ((4, 8, 4), (8, 8), (8,))


def head_layer(style: Style) -> Layer:
    """Final norm, product with the vocabulary, loss. Tied, the product's weight belongs to the embedding layer."""
    norm_name, head_name = _NAMES["gpt2" if style.conv1d else style.modules]
    norm, norm_parameters = norm_operator(style.stream, "final_norm", norm_name)
    rows = style.batch * style.predicted
    logits, weight = logits_operator(style, rows, head_name)
    stream = Tensor("head_input_stream", style.stream.tokens * style.hidden, style.residual)
    own = () if style.tied else weight
    bounded = (_softcap(style, rows),) if style.logit_softcap else ()
    last = chunked_loss(style, rows, logits) if style.chunked_loss else (logits, *bounded, loss_operator(style, rows))
    return Layer("head", (norm, *last), stream, (*norm_parameters, *own),
                 weight if style.tied else ())


def logits_operator(style: Style, rows: int, module: str) -> tuple[Operator, tuple[Parameter, ...]]:
    """The product of `rows` tokens with the vocabulary, and its matrix (which is not its own where tied)."""
    kept = rows // style.tensor if style.scattered else rows
    inputs = Tensor("head_input", kept * style.hidden, style.act)
    plain_linear = replace(style, gemm=style.wide)  # narrow formats leave the head alone
    logits, weight = linear_operator(plain_linear, "logits", module, style.hidden, style.vocab,
                                     source=style.residual, saved=(inputs,), rows=rows, bias=False)
    weight = (Parameter(weight[0].name, (style.vocab, style.hidden)),)
    cut = joint(plain_linear, "column", rows * style.hidden)
    return replace(logits, parameters=() if style.tied else weight, joint=cut), weight


def _softcap(style: Style, rows: int) -> Operator:
    """A bound on the logits, which keeps the tanh."""
    elements = rows * style.vocab
    forward, backward = softcap("softcap", elements, style.act, style.stack.compile, "memory_bound")
    return Operator("softcap", (forward,), (backward,), saved=(Tensor("bounded", elements, style.act),))


def loss_operator(style: Style, rows: int) -> Operator:
    """Cross-entropy over the vocabulary in the stack's way, and its metrics (forward only)."""
    metrics = _metrics(style, rows)
    if style.stack.loss == "fused":
        forward, backward, saved = _fused(style, rows)
    elif style.stack.loss == "fused_in_place":
        forward, backward, saved = _in_place(style, rows)
    elif style.stack.loss == "vocab_parallel":
        forward, backward, saved = _vocab_parallel(style, rows)
    else:
        late = _upcast(style) and not (style.widens_logits or compiles_loss(style) or splits_loss(style))
        ways = _widened_late(style, rows) if late else plain_loss(style, rows, upcast=_upcast(style))
        forward, backward, saved = ways
        forward, backward = _shifted(style, rows, forward, backward)
    cut = Joint("vocabulary_loss", rows, "fp32") if style.tensor > 1 else None
    return Operator("loss", (*forward, *metrics), tuple(backward), saved=saved, joint=cut)


def chunked_loss(style: Style, rows: int, logits: Operator) -> tuple[Operator, ...]:
    """Product and loss, a chunk of rows at a time, in the stack's way."""
    if style.tensor > 1 and style.stack.chunks_cut == "whole":
        return chunked_gathered(style, rows, logits, partial(plain_loss, upcast=width(style.act) < 4))
    if style.tensor > 1:
        return chunked_cut(style, rows, logits, partial(plain_loss, upcast=width(style.act) < 4))
    if style.keeps_chunks:
        forward, backward, saved = chunked_kept(style, rows, logits, partial(plain_loss, upcast=width(style.act) < 4))
    else:
        forward, backward, saved = chunked_forward(style, rows, logits)
    return (Operator("loss", (*forward, *_metrics(style, rows)), tuple(backward), logits.parameters, saved),)


def _upcast(style: Style) -> bool:
    """Whether the loss runs in fp32: autocast's cross_entropy does, others call logits.float()."""
    return width(style.act) < 4 and (style.autocast or style.widens_logits)


def plain_loss(style: Style, rows: int, *, upcast: bool) -> Ways:
    """log_softmax (read, write) and nll forward; nll's zero-filled gradient and log_softmax's, which reads the gradient
    for its sum, then gradient and output, and writes (aten/src/ATen/native/cuda/SoftMax.cu, cunn_SoftMaxBackward).

    Args:
        upcast: whether it runs in fp32 on narrower logits.
    """
    elements = rows * style.vocab
    dtype = "fp32" if upcast else style.act
    e = width(dtype)
    shape = (rows, style.vocab)
    if upcast and compiles_loss(style):  # as `sim.model.eager.head.loss` keeps it
        narrow = width(style.act) * elements
        one, back = (Kernel("cross_entropy", dtype, shape, way, 0.0, passes * narrow, "memory_bound", launches=2)
                     for way, passes in (("forward", 1), ("backward", 2)))
        return [one], [back], (Tensor("logits", elements, style.act), Tensor("loss_statistics", 2 * rows, "fp32"))
    forward = [log_softmax(rows, style.vocab, dtype), _picked("nll", rows, 2)]
    backward = [elementwise("log_softmax_backward", elements, 5 * e, dtype, 2), _picked("nll_backward", rows, 1)]
    if splits_loss(style):
        steps, strided, behind = ([e * step for step in part] for part in _SPLIT)
        forward = list(strided_chain("split_loss", elements, steps, strided, dtype))
        backward = list(strided_chain("split_loss_backward", elements, behind, (), dtype))
    if upcast:
        forward.insert(0, cast("logits_cast", elements, style.act, dtype))
        backward.append(cast("logits_gradient_cast", elements, dtype, style.act))
    return forward, backward, (Tensor("log_softmax", elements, dtype),)


def shifts_logits(style: Style) -> bool:
    """Whether logits are cut by a token in front of a loss in operators (Hugging Face's decoders')."""
    own = style.modules == "transformers" and style.kind == "decoder" and not compiles_loss(style)
    return own and style.tensor == 1 and style.stack.loss == "plain" and style.stack.shifts_logits


def _shifted(
    style: Style, rows: int, forward: list[Kernel], backward: list[Kernel],
) -> tuple[list[Kernel], list[Kernel]]:
    """The kernels of a loss whose logits are cut by a token: `logits[..., :-1, :].contiguous()`, which copies nothing
    of a single sequence. Backward both slices (`:-1` and `:`) fill a whole with zeros and copy the gradient into it.

    Source: transformers 4.40.2 and 4.46.3 run on torch 2.3.1 and 2.6.0 (tests/driver); aten/src/ATen/native/
    TensorShape.cpp, slice_backward.
    """
    if not shifts_logits(style):
        return forward, backward
    e, elements = width("fp32" if style.widens_logits else style.act), rows * style.vocab
    casts = [k for k in forward if k.variant == "logits_cast"]
    behind = [k for k in backward if k.variant == "logits_gradient_cast"]
    copied = [strided(style, elementwise("shifted_logits", elements, 2 * e, style.act))] if style.batch > 1 else []
    made = [elementwise("shifted_logits_backward", elements, 4 * e, style.act, 3),
            strided(style, elementwise("shifted_logits_backward", elements, 2 * e, style.act))]
    if not style.widens_logits:  # autocast casts behind the copy
        return [*copied, *forward], [*backward, *made]
    return ([*casts, *copied, *(k for k in forward if k not in casts)],
            [*(k for k in backward if k not in behind), *made, *behind])


def _widened_late(style: Style, rows: int) -> Ways:
    """The loss of halves under autocast: log-softmax in halves, whose dtype cross_entropy hands it, and nll in fp32 on
    a copy that it keeps.

    Source: aten/src/ATen/native/LossNLL.cpp, cross_entropy_loss: log_softmax(self, class_dim, dtype of self),
    and autocast_mode.cpp (nll_loss casts to fp32), GPT-2 and BERT run on tests/driver.
    """
    elements, act, e = rows * style.vocab, style.act, width(style.act)
    forward = [log_softmax(rows, style.vocab, act), cast("logits_cast", elements, act, "fp32"), _picked("nll", rows, 2)]
    backward = [_picked("nll_backward", rows, 1), elementwise("nll_gradient", elements, 4, "fp32"),
                cast("logits_gradient_cast", elements, "fp32", act),
                elementwise("log_softmax_backward", elements, 4 * e, act)]
    return forward, backward, (Tensor("log_softmax", elements, act), Tensor("log_softmax_wide", elements, "fp32"))


def log_softmax(rows: int, cols: int, dtype: str) -> Kernel:
    """The first of cross-entropy's two kernels, which works off a row as softmax does."""
    return Kernel("softmax", dtype, (rows, cols), "forward", 0.0, 2 * width(dtype) * rows * cols, "memory_bound")


def _picked(name: str, rows: int, loads: int) -> Kernel:
    """nll over all rows by one warp (aten/src/ATen/native/cuda/Loss.cu, nll_loss_forward_reduce_cuda_kernel_2d: one
    block of NLL_LOSS_THREADS = 32), `loads` that wait for one another a row: its label, the element that says. Its few
    bytes are not what it takes."""
    return Kernel("elementwise", "fp32", (rows * loads,), name, 0.0, 0.0, "memory_bound", kernel="one_warp")


def _fused(style: Style, rows: int) -> tuple[list[Kernel], list[Kernel], tuple[Tensor, ...]]:
    """flash-attn's cross-entropy: one kernel reads the logits, one reads them again and writes their gradient."""
    elements, e, shape = rows * style.vocab, width(style.act), (rows, style.vocab)
    forward = Kernel("cross_entropy", style.act, shape, "forward", 0.0, e * elements, "memory_bound")
    backward = Kernel("cross_entropy", style.act, shape, "backward", 0.0, 2 * e * elements, "memory_bound")
    return [forward], [backward], (Tensor("logits", elements, style.act), Tensor("loss_statistics", rows, "fp32"))


def _in_place(style: Style, rows: int) -> tuple[list[Kernel], list[Kernel], tuple[Tensor, ...]]:
    """TransformerEngine's cross-entropy: a pass for each row's maximum and sum, one that writes the gradient over the
    logits; backward scales it (transformer_engine 2.8.0 pytorch/triton/cross_entropy.py: online_softmax_kernel,
    cross_entropy_kernel, element_mul_kernel)."""
    elements, e, shape = rows * style.vocab, width(style.act), (rows, style.vocab)
    forward = Kernel("cross_entropy", style.act, shape, "forward", 0.0, 3 * e * elements, "memory_bound", launches=2)
    backward = Kernel("cross_entropy", style.act, shape, "backward", 0.0, 2 * e * elements, "memory_bound")
    return [forward], [backward], (Tensor("logits", elements, style.act),)


def _vocab_parallel(style: Style, rows: int) -> tuple[list[Kernel], list[Kernel], tuple[Tensor, ...]]:
    """Megatron's chain of kernels on fp32 logits; the softmax is kept."""
    elements = rows * style.vocab
    steps, strided, back = _VOCAB_PARALLEL
    forward = list(strided_chain("vocab_parallel_cross_entropy", elements, steps, strided, "fp32"))
    backward = list(strided_chain("vocab_parallel_cross_entropy_backward", elements, (), back, "fp32"))
    if width(style.act) < 4:
        forward.insert(0, cast("logits_cast", elements, style.act, "fp32"))
        backward.append(cast("logits_gradient_cast", elements, "fp32", style.act))
    return forward, backward, (Tensor("softmax", elements, "fp32"),)


def _metrics(style: Style, rows: int) -> list[Kernel]:
    """Losses evaluated again as training metrics, without gradients, under autocast as the loss itself is."""
    once = [log_softmax(rows, style.vocab, style.act), _picked("nll", rows, 2)]
    if width(style.act) < 4:
        once.insert(1, cast("metric_cast", rows * style.vocab, style.act, "fp32"))
    return once * style.stack.metric_losses
