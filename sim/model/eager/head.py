"""The vocabulary and the losses: plain, in one kernel, or cut over tensor ranks (in chunks: `chunked.py`).

Sources: torch/nn/functional.py (cross_entropy), flash-attn losses/cross_entropy.py, Megatron-LM
core/tensor_parallel/cross_entropy.py.
"""

from __future__ import annotations

from sim.model.compiled import compiles_loss, splits_loss
from sim.model.eager import chunked, further, tuned
from sim.model.eager.norms import norm
from sim.model.eager.products import entered
from sim.model.eager.tensors import operations as op
from sim.model.eager.tensors.autograd import Gradients, Run, Tensor
from sim.model.eager.tensors.storage import ACTIVATIONS, LOGITS, Storage
from sim.model.kernels import width
from sim.model.layers.chunked import by_position, parts_of
from sim.model.layers.head import shifts_logits
from sim.model.style import Style


def head(run: Run, style: Style, x: Tensor, policy: str = "none") -> Tensor:
    """Final norm, logits, loss; with further tokens, their blocks (recomputed by `policy`) and losses in front."""
    normed = [norm(run, style, x, "final_norm")]
    del x  # and nothing here holds what `_predicted` lets go
    if not style.further:
        return _predicted(run, style, normed.pop())
    x = normed.pop()
    states = further.hidden_states(run, style, x, policy)
    for depth in range(style.further):
        x = further.joined(run, x, _predicted(run, style, states[depth], depth))
    return _predicted(run, style, x, style.further)


def _predicted(run: Run, style: Style, x: Tensor, depth: int = 0) -> Tensor:
    """Logits and loss.

    Args:
        depth: of a further token, from 0 on; the model's own comes behind them. The vocabulary's gradients add up.
    """
    rows = style.batch * style.predicted
    if rows < style.tokens:  # a slice's share of them where the stream is scattered
        x = Tensor(x.storage, x.elements * rows // style.tokens, x.dtype, x.sink)
    if style.chunked_loss:
        inputs = [x]
        del x  # what is not kept goes with the model's forward
        return chunked.loss(run, style, inputs, rows)
    run.at("logits")
    run.kind = LOGITS
    if by_position(style):
        return _by_position(run, style, x, rows)
    x = entered(run, style, x)
    slices = style.tensor if style.scattered and not style.stack.gathered_inputs_kept else 1
    if style.tuned is not None:
        logits = tuned.linear(run, style, x, style.hidden, (("head", style.vocab),), slices)
    else:
        logits = op.linear(run, x, style.hidden, style.vocab, False, dtype=style.weight,
                           shared=style.tied or style.further > 0, more=0 < depth < style.further, gathered=slices,
                           lasting=style.stack.shared_buffer != "none")
    logits = _bounded(run, style, logits)
    if style.modules != "transformers":
        del x  # Hugging Face's model output holds it until the loss is there
    run.at("loss")
    if shifts_logits(style) and style.widens_logits and not style.stack.narrow_logits_stay:
        logits = op.to(run, logits, "fp32")
    if style.stack.loss == "vocab_parallel" and not style.stack.loss_overwrites:
        logits = op.to(run, logits, "fp32")
        return _in_place(run, Tensor(run.new(logits.elements, "fp32"), logits.elements, "fp32", logits.sink))
    return loss(run, style, logits, rows)


def _by_position(run: Run, style: Style, x: Tensor, rows: int) -> Tensor:
    """Logits and losses of a few positions at a time: all logits and log-softmaxes are kept, and a 4-bit head is made
    whole for every chunk. The model's wrapper casts the logits of all chunks when it returns, and the training loop has
    them in a variable until its next forward does (`_previous`).

    Source: LitGPT 0.2 to 0.4 lora.py, GPT.forward (x.split(lm_head_chunk_size, dim=1)); utils.py,
    chunked_cross_entropy; lightning_fabric 2.1.0 to 2.3.0 plugins/precision/half.py, convert_output.
    """
    previous, dtype = _previous(run, style, rows), x.dtype
    parts = parts_of(rows, style.batch * style.stack.tuning_chunk)
    loop = run.node(lambda _, gradients: [gradients[0]], (x.sink,))
    whole = rows * style.hidden
    split = run.node(lambda run, _: [run.new(whole, dtype)], (loop.output(),), len(parts))
    logits = []
    for i, part in enumerate(parts):
        run.at("logits")
        piece = Tensor(x.storage, part * style.hidden, dtype, split.output(i))
        logits.append(_bounded(run, style, tuned.linear(run, style, piece, style.hidden, (("head", style.vocab),))))
        del piece
    del x
    run.at("loss")
    wide = [op.to(run, one, "fp32" if style.widens_logits else one.dtype) for one in logits]
    run.save(loop, *(one.storage for one in wide))
    del logits, previous
    sinks = [_nll(run, op.softmax(run, one, one.dtype), []).sink for one in wide]
    del wide
    node = run.node(lambda run, _: [run.new(part, "fp32") for part in parts], sinks)
    return Tensor(run.new(rows, "fp32"), rows, "fp32", node.output())


def _bounded(run: Run, style: Style, logits: Tensor) -> Tensor:
    """Logits under a tanh, which keeps what it makes."""
    if not style.logit_softcap:
        return logits
    run.at("softcap")
    return op.scale(run, op.unary(run, op.scale(run, logits), saves_output=True))


def _previous(run: Run, style: Style, rows: int) -> Storage | None:
    """What is left of the last micro-batch where the training loop keeps its logits (`graph_kept`): the logits, and
    what their graph holds that is no saved tensor, the inputs of all 4-bit layers.

    Source: LitGPT 0.2 to 0.4 finetune/lora.py, fit: `logits = model(...)` in a loop; bitsandbytes 0.41.0 to 0.43.0
    autograd/_functions.py, MatMul4Bit: `ctx.tensors = (A, B)`, an attribute, not save_for_backward.
    """
    if not style.stack.graph_kept:
        return None
    size, frozen = rows * style.vocab * (4.0 if style.widens_logits else width(style.act)), style.tuned
    four_bit = frozen is not None and frozen.quantised and frozen.base != "int8"
    if four_bit and style.stack.quantised_keeps_input and style.experts is None:
        norms = style.parallel_norms if style.parallel_block else 2
        each = norms * style.hidden + style.query_width + style.ffn
        size += width(style.act) * (style.layers * style.tokens * each + rows * style.hidden)
    kind, run.kind = run.kind, ACTIVATIONS
    held = run.new(round(size), "int8")
    run.kind = kind
    return held


def loss(run: Run, style: Style, logits: Tensor, rows: int) -> Tensor:
    """Cross-entropy: Hugging Face's decoders cast logits to fp32 first; autocast casts log-softmax's output, which
    nll keeps. Compiled, a loss in fp32 on narrower logits is one kernel each way, and what is kept of every row is its
    maximum and the logarithm of its sum: the partitioner makes the rest again from the logits, which are narrower
    (torch/_functorch/partitioners.py, min_cut_rematerialization_partition; torch/_decomp/decompositions.py,
    _log_softmax; from memory)."""
    if style.stack.loss == "fused":
        return _one_kernel(run, logits, rows)
    if style.stack.loss == "fused_in_place":
        return _in_place(run, logits)
    if compiles_loss(style) and width(logits.dtype) < 4 and (run.autocast or style.widens_logits):
        return _one_kernel(run, logits, rows, 2)
    if style.stack.loss == "vocab_parallel":
        return _in_place(run, op.to(run, logits, "fp32"))
    labels = _shifted(run, style)
    if style.stack.outputs_kept:
        logits = _held(run, logits)
    wide = op.to(run, logits, "fp32") if style.widens_logits else logits
    if splits_loss(style):
        return _split(run, wide)
    cut = _cut(run, style, wide)
    scores = op.softmax(run, cut, wide.dtype)
    return _nll(run, op.to(run, scores, "fp32") if run.autocast else scores, labels)


def _held(run: Run, logits: Tensor) -> Tensor:
    """The same tensor, which stays until its gradient is there: the trainer has it too."""
    node = run.node(lambda _, gradients: [gradients[0]], (logits.sink,))
    run.save(node, logits.storage)
    return Tensor(logits.storage, logits.elements, logits.dtype, node.output())


def _in_place(run: Run, wide: Tensor) -> Tensor:
    """Megatron's loss, and nanotron's on a copy (`loss_overwrites`): maximum, exponential and quotient overwrite the
    fp32 logits, and backward makes the gradient of the softmax that is left (megatron/core/tensor_parallel/
    cross_entropy.py: `vocab_parallel_logits -=`, `torch.exp(..., out=)`, `div_`; `grad_input = softmax`).
    TransformerEngine's leaves the gradient in the place of the logits as they came."""
    kept = [wide.storage]
    node = run.node(lambda run, _: [kept.pop()], (wide.sink,))
    return Tensor(run.new(1, "fp32"), 1, "fp32", node.output())


def _split(run: Run, logits: Tensor) -> Tensor:
    """The loss of a DTensor whose vocabulary is cut: log-softmax in steps, backward of it and of nll in one function,
    of which the zeros, the exponential and their sum, then the product with the incoming gradient stand side by side
    (torch 2.6.0 distributed/tensor/parallel/loss.py: _log_softmax, _nll_loss_and_log_softmax_backward)."""
    elements, dtype = logits.elements, logits.dtype
    wide = op.to(run, logits, "fp32")
    shifted = run.new(elements, "fp32")
    exponential = run.new(elements, "fp32")
    del exponential
    result = run.new(elements, "fp32")
    del shifted
    scores = op.to(run, Tensor(result, elements, "fp32", wide.sink), dtype).storage

    def rule(run: Run, _: Gradients) -> Gradients:
        gradient, exponential = run.new(elements, dtype), run.new(elements, dtype)
        both = run.new(elements, dtype)
        del exponential
        product = run.new(elements, dtype)
        del gradient, both
        return [product]

    node = run.node(rule, (logits.sink,))
    run.save(node, scores)
    return Tensor(run.new(1, "fp32"), 1, "fp32", node.output())


def _cut(run: Run, style: Style, logits: Tensor) -> Tensor:
    """Logits without each sequence's last: a copy, of a single sequence a view; backward a whole for each slice."""
    if not shifts_logits(style):
        return logits
    whole, dtype, left = logits.elements, logits.dtype, logits.elements // style.sequence * (style.sequence - 1)
    rows = run.node(lambda run, _: [run.new(whole, dtype)], (logits.sink,))
    cols = run.node(lambda run, _: [run.new(left, dtype)], (rows.output(),))
    cut = Tensor(logits.storage, left, dtype, cols.output())
    return op.clone(run, cut, style.batch > 1)


def _shifted(run: Run, style: Style) -> list[Storage]:
    """Hugging Face's labels of a decoder, padded to be shifted unless logits are cut; of several sequences the shifted
    ones are a copy, of one a view (transformers loss/loss_utils.py, ForCausalLMLoss)."""
    if style.modules != "transformers" or style.kind != "decoder":
        return []
    if shifts_logits(style):
        return [run.new(style.batch * (style.sequence - 1), "fp64")] if style.batch > 1 else []
    padded = run.new(style.batch * (style.sequence + 1), "fp64")
    return [padded, run.new(style.batch * style.sequence, "fp64")] if style.batch > 1 else [padded]


def _nll(run: Run, scores: Tensor, labels: list[Storage]) -> Tensor:
    """`nll_loss`: keeps its input and the last of `labels`; the gradient is a tensor of its own."""
    elements, dtype = scores.elements, scores.dtype
    node = run.node(lambda run, _: [run.new(elements, dtype)], (scores.sink,))
    run.save(node, scores.storage, run.new(1, "fp32"), *labels[-1:])
    return Tensor(run.new(1, "fp32"), 1, "fp32", node.output())


def _one_kernel(run: Run, logits: Tensor, rows: int, statistics: int = 1) -> Tensor:
    """flash-attn's cross-entropy: keeps the logits and a number a row, its log-sum-exp; others keep so many."""
    elements, dtype = logits.elements, logits.dtype
    node = run.node(lambda run, _: [run.new(elements, dtype)], (logits.sink,))
    run.save(node, logits.storage, *(run.new(rows, "fp32") for _ in range(statistics)))
    return Tensor(run.new(rows, "fp32"), rows, "fp32", node.output())
