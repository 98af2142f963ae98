"""Mixtures of experts as PyTorch modules run them: a loop over experts, or grouped products on permuted rows.

Rows are shared out evenly over the experts of a slice, as `sim.model.layers.experts` has them. Sources: transformers
modeling_mixtral.py (4.36 to 4.57: MixtralSparseMoeBlock loops over its experts); Megatron-LM core/transformer/moe:
router.py, token_dispatcher.py (MoEAlltoAllTokenDispatcher), experts.py (TEGroupedMLP).
"""

from __future__ import annotations

from dataclasses import replace

from sim.model.eager.mlp import activation, inner, mlp
from sim.model.eager.products import linear, router, row
from sim.model.eager.tensors import between
from sim.model.eager.tensors import operations as op
from sim.model.eager.tensors.autograd import Gradients, Run, Tensor
from sim.model.eager.tensors.narrow import keeping
from sim.model.eager.tensors.storage import Storage
from sim.model.layers.experts import expert_rows, pads, sorts
from sim.model.mixture import Experts
from sim.model.recompute import modules_of
from sim.model.style import Style

#: Most turns of a loop that are written out; more experts take them several at a time.
_TURNS = 8


def experts(run: Run, style: Style, x: Tensor, policy: str = "none") -> Tensor:
    """Router, dispatch, experts, combination, and the experts that see every token; modules of `policy` are recomputed
    (`sim.model.recompute`)."""
    made = style.experts
    assert made is not None
    scores = _routed(run, style, made, x)
    # whole experts know nothing of tensor ranks, cut ones work on rows that are whole in front of them
    spread = replace(style, scattered=style.scattered and made.tensor > 1, tensor=made.tensor, bias=False)
    if style.takes_turns:
        out = _loop(run, style, spread, x, scores)
    else:
        out = _grouped(run, style, spread, x, scores, again="moe_act" in modules_of(policy))
    if not made.shared:
        return out
    dense = replace(style, experts=None, ffn=made.shared_ffn)
    given_up = "layernorm" in modules_of(policy)  # what they read
    if "shared_experts" in modules_of(policy):
        shared = run.checkpoint(lambda run, x: mlp(run, dense, x, keeps=given_up), x)
    else:
        shared = mlp(run, dense, x, keeps=given_up)
    run.at("shared_add")
    return op.add(run, out, shared)


def _routed(run: Run, style: Style, made: Experts, x: Tensor) -> Tensor:
    """Softmax of all scores in fp32, the largest of them, divided by their sum; keeps which they are."""
    run.at("router")
    logits = router(run, style, x, made.count)
    tokens = style.stream.tokens
    every = op.softmax(run, logits, "fp32")
    elements, chosen = every.elements, tokens * made.top_k
    node = run.node(lambda run, _: [run.new(elements, "fp32")], (every.sink,))
    run.save(node, run.new(chosen, "fp64"))
    best = Tensor(run.new(chosen, "fp32"), chosen, "fp32", node.output())
    return op.to(run, op.unary(run, best, saves_input=True), style.act)


def _copied(run: Run, x: Tensor, elements: int, which: Storage) -> Tensor:
    """Rows of `x` by their numbers, which are kept; the gradient is spread over all of `x`."""
    whole, dtype = x.elements, x.dtype
    node = run.node(lambda run, _: [run.new(whole, dtype)], (x.sink,))
    run.save(node, which)
    return Tensor(run.new(elements, dtype), elements, dtype, node.output())


def _weighted(run: Run, rows: Tensor, scores: Tensor, count: int) -> Tensor:
    """Rows times their scores: both are kept; a score's gradient is a product of rows and a sum."""
    elements, dtype, every, kind = rows.elements, rows.dtype, scores.elements, scores.dtype

    def rule(run: Run, _: Gradients) -> Gradients:
        gradient, full = run.new(elements, dtype), run.new(elements, dtype)
        total = run.new(every, kind)
        del full
        return [gradient, total]

    node = run.node(rule, (rows.sink, scores.sink))
    run.save(node, rows.storage, run.new(count, kind))
    return Tensor(run.new(elements, dtype), elements, dtype, node.output())


def _sent(run: Run, style: Style, x: Tensor, elements: int) -> Tensor:
    """Rows on their way to their experts, or back: what arrives is new, and so is the gradient that goes back."""
    if style.expert == 1:
        return x
    own, dtype = x.elements, x.dtype
    node = run.node(lambda run, _: [run.new(own, dtype)], (x.sink,))
    return Tensor(run.new(elements, dtype), elements, dtype, node.output())


def _moved(run: Run, x: Tensor, moves: bool, keeps: bool = False) -> Tensor:
    """Rows in another order, and their gradient: copies both. `index_copy_` keeps what it copies, for its shape's sake
    (derivatives.yaml: `grad.index_select(dim, index).expand_as(source)`)."""
    if not moves:
        return x
    elements, dtype = x.elements, x.dtype
    node = run.node(lambda run, _: [run.new(elements, dtype)], (x.sink,))
    if keeps:
        run.save(node, x.storage)
    return Tensor(run.new(elements, dtype), elements, dtype, node.output())


def _one(run: Run, spread: Style, x: Tensor, matrices: int, *, again: bool = False) -> Tensor:
    """Products and activation of an expert, or of `matrices` of them on their rows, side by side.

    Args:
        again: what the activation made is given up and made again (`TEGroupedMLP.forward`, activation_recompute).
    """
    made = spread.experts
    assert made is not None
    run.at("up")
    padded = pads(spread)
    x = _moved(run, x, padded)
    if again:
        both = linear(run, spread, x, spread.hidden, (("mlp", made.ffn * (2 if spread.gated else 1)),),
                      matrices=matrices)
        (hidden,), frame = run.without_output(lambda run, both: [activation(run, spread, both)], both)
        del both
        run.at("down")
        out = row(run, keeping(spread), hidden, made.ffn, (("mlp", spread.hidden),), matrices)
        run.discard(frame, out)
        return _moved(run, out, padded)
    hidden = inner(run, spread, made.ffn, lambda outputs: linear(
        run, spread, x, spread.hidden, (("mlp", outputs),), matrices=matrices))
    run.at("down")
    return _moved(run, row(run, spread, hidden, made.ffn, (("mlp", spread.hidden),), matrices), padded)


# ------------------------------------------------------------------------------------------------------------ in turns
def _loop(run: Run, style: Style, spread: Style, x: Tensor, scores: Tensor) -> Tensor:
    """Expert by expert: its rows, its products, its share of the sum (`index_add_`)."""
    made = style.experts
    assert made is not None
    turns = min(made.held, _TURNS)
    whole, act = x.elements, x.dtype
    leaving, arriving = (count // turns for count in _rows(style, made))
    run.at("dispatch")
    mask = run.new(style.stream.tokens * made.top_k * made.count, "fp64")  # one_hot
    total = Tensor(run.new(whole, act), whole, act, None)
    for _ in range(turns):
        run.at("dispatch")
        which = run.new(2 * leaving, "fp64")  # their tokens, and which of a token's choices they are
        own = _sent(run, style, _copied(run, x, leaving * style.hidden, which), arriving * style.hidden)
        out = _one(run, spread, _whole(run, spread, own), made.held // turns)
        del own
        run.at("combine")
        out = _weighted(run, _sent(run, style, out, leaving * style.hidden), scores, leaving)
        total = _added(run, total, out, which)
        del out, which
    del mask
    return total


def _added(run: Run, total: Tensor, rows: Tensor, which: Storage) -> Tensor:
    """`index_add_` into a sum: its gradient passes through, and its rows of it are copied out; the rows are kept for
    their shape's sake (derivatives.yaml: `grad.index_select(dim, index).expand_as(source)`)."""
    elements, dtype = rows.elements, rows.dtype
    node = run.node(lambda run, g: [g[0], run.new(elements, dtype)], (total.sink, rows.sink))
    run.save(node, which, rows.storage)
    return Tensor(total.storage, total.elements, total.dtype, node.output())


# --------------------------------------------------------------------------------------------------------- all at once
def _grouped(run: Run, style: Style, spread: Style, x: Tensor, scores: Tensor, *, again: bool) -> Tensor:
    """Rows in the order of their experts, products of all experts at once, rows back in their order and summed."""
    made = style.experts
    assert made is not None
    whole, act = x.elements, x.dtype
    leaving, arriving = _rows(style, made)
    run.at("dispatch")
    which = run.new(leaving, "fp64")
    own = _sent(run, style, _copied(run, x, leaving * style.hidden, which), arriving * style.hidden)
    moves = sorts(style, made)
    arrived = _moved(run, _whole(run, spread, own), moves)
    del own
    kept = style.stack.permutation_kept
    out = _moved(run, _one(run, spread, arrived, made.held, again=again), moves, kept)
    del arrived
    run.at("combine")
    out = _moved(run, _sent(run, style, out, leaving * style.hidden), kept, kept)
    if not style.stack.fused_permutation:
        out = _weighted(run, out, scores, leaving)
    # behind what is put back in the tokens' order stands a sum, whose gradient is a view
    node = run.node(lambda run, g: [g[0] if kept else run.new(leaving * style.hidden, act)], (out.sink,))
    run.save(node, which)
    return Tensor(run.new(whole, act), whole, act, node.output())


def _rows(style: Style, made: Experts) -> tuple[int, int]:
    """Rows of the slice's own tokens, and those that come to its experts; of cut experts, from as many tokens."""
    leaving = style.stream.tokens * made.top_k
    return leaving, expert_rows(style, made) // (made.tensor if style.scattered else 1) if style.expert > 1 else leaving


def _whole(run: Run, spread: Style, x: Tensor) -> Tensor:
    """Rows of all slices an expert's width is cut into."""
    return between.gathered(run, x, spread.tensor) if spread.scattered else x
