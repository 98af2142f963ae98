"""The vocabulary and the losses: plain, in one kernel, or cut over tensor ranks (in chunks: `chunked.py`).

Sources: torch/nn/functional.py (cross_entropy), flash-attn losses/cross_entropy.py, Megatron-LM
core/tensor_parallel/cross_entropy.py.
"""

from __future__ import annotations

from sim.model.eager import chunked, tuned
from sim.model.eager import operations as op
from sim.model.eager.autograd import LOGITS, Output, Run, Tensor
from sim.model.eager.decoder import norm
from sim.model.eager.products import entered
from sim.model.kernels import width
from sim.model.style import Style


def head(run: Run, style: Style, x: Tensor) -> Tensor:
    """Final norm, logits, loss."""
    rows = style.batch * style.predicted
    x = norm(run, style, x, "final_norm")
    if rows < style.tokens:
        x = Tensor(x.storage, rows * style.hidden, x.dtype, x.sink)
    if style.chunked_loss:
        return chunked.loss(run, style, x, rows)
    run.at("logits")
    run.kind = LOGITS
    if style.tuned is not None:
        logits = tuned.linear(run, style, x, style.hidden, (("head", style.vocab),))
    else:
        x = entered(run, style, x)
        again = style.scattered and not style.stack.gathered_inputs_kept
        logits = op.linear(run, x, style.hidden, style.vocab, False, dtype=style.weight, shared=style.tied,
                           gathered=style.tensor if again else 1)
    if style.modules != "transformers":
        del x  # Hugging Face's model output holds it until the loss is there
    run.at("loss")
    if style.stack.loss == "vocab_parallel" and not style.stack.loss_overwrites:
        logits = op.to(run, logits, "fp32")
        return _in_place(run, Tensor(run.new(logits.elements, "fp32"), logits.elements, "fp32", logits.sink))
    return loss(run, style, logits, rows)


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
    if style.stack.compile and width(logits.dtype) < 4 and (run.autocast or style.widens_logits):
        return _one_kernel(run, logits, rows, 2)
    if style.stack.loss == "vocab_parallel":
        return _in_place(run, op.to(run, logits, "fp32"))
    wide = op.to(run, logits, "fp32") if style.widens_logits else logits
    scores = op.softmax(run, wide, wide.dtype)
    return _nll(run, op.to(run, scores, "fp32") if run.autocast else scores)


def _in_place(run: Run, wide: Tensor) -> Tensor:
    """Megatron's loss, and nanotron's on a copy (`loss_overwrites`): maximum, exponential and quotient overwrite the
    fp32 logits, and backward makes the gradient of the softmax that is left (megatron/core/tensor_parallel/
    cross_entropy.py: `vocab_parallel_logits -=`, `torch.exp(..., out=)`, `div_`; `grad_input = softmax`).
    TransformerEngine's leaves the gradient in the place of the logits as they came."""
    kept = [wide.storage]
    node = run.node(lambda run, _: [kept.pop()], (wide.sink,))
    return Tensor(run.new(1, "fp32"), 1, "fp32", Output(node, 0))


def _nll(run: Run, scores: Tensor) -> Tensor:
    """`nll_loss`: keeps its input; the gradient is a tensor of its own."""
    elements, dtype = scores.elements, scores.dtype
    node = run.node(lambda run, _: [run.new(elements, dtype)], (scores.sink,))
    run.save(node, scores.storage, run.new(1, "fp32"))
    return Tensor(run.new(1, "fp32"), 1, "fp32", Output(node, 0))


def _one_kernel(run: Run, logits: Tensor, rows: int, statistics: int = 1) -> Tensor:
    """flash-attn's cross-entropy: keeps the logits and a number a row, its log-sum-exp; others keep so many."""
    elements, dtype = logits.elements, logits.dtype
    node = run.node(lambda run, _: [run.new(elements, dtype)], (logits.sink,))
    run.save(node, logits.storage, *(run.new(rows, "fp32") for _ in range(statistics)))
    return Tensor(run.new(rows, "fp32"), rows, "fp32", Output(node, 0))
