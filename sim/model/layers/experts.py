"""Mixtures of experts in place of the feed-forward part: router, dispatch, experts' products, combination.

A slice computes what the slice that is asked most computes (`Experts.load`): all wait for it. Sources: Jiang et al.
2024 (Mixtral), section 2; DeepSeek-AI 2024 (DeepSeek-V3), section 2.1.2; transformers modeling_mixtral.py, which loops
over the experts; Megatron-LM `moe/experts.py` (TEGroupedMLP), `moe/token_dispatcher.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from sim.model.architecture import Joint, Operator, Parameter, Tensor
from sim.model.kernels import (
    elementwise,
    gradient_ready,
    joint,
    linear,
    linear_operator,
    linear_parameters,
    strided,
    width,
)
from sim.model.layers.mlp import activation_operator, mlp_operators
from sim.model.mixture import Experts
from sim.model.style import Style
from sim.work import Kernel

#: Passes over the scores of all experts: softmax or sigmoid, top-k (a sort), gather, sum, divide; and backward.
_ROUTER_PASSES, _ROUTER_BACKWARD_PASSES = 8, 4
#: Compiled: softmax in one kernel, topk in two of its own (aten's, a selection and a sort), the division by the chosen
#: ones' sum in one; passes over the scores: softmax's two, the selection's, and its result's.
_COMPILED_ROUTER = (4, 4)
#: Kernels a loop over experts adds for each: where, two index reads, multiply, index_add, slicing.
_LOOP_LAUNCHES = 5
#: Of an element picked by its row's number, or put back so, and of one added up (index_add_: an atomic in 16 bits), in
#: visits of a product with what is broadcast: a lookup's, and what Liger's benchmark leaves of Hugging Face's loop on
#: an H100 with eight experts, whose kernels hide the host (forward 4.5 ms, of which products and activation take 1.2).
_PICKED, _ADDED = 2.5, 4.5


def experts_operators(style: Style, source: str) -> tuple[list[Operator], list[Parameter]]:
    """Operators of a mixture of experts and parameters in registration order.

    Args:
        source: dtype in which the norm's output arrives.
    """
    experts = style.experts
    assert experts is not None
    local = style.stream  # where activations are scattered every tensor rank routes and sends its own tokens
    router, router_parameters = _router(local, experts, source)
    router = replace(router, joint=_counts(style, experts))
    rows = expert_rows(style, experts)
    spread = replace(style, batch=1, sequence=rows, ffn=experts.ffn, scattered=False)
    up, up_parameters = _up(spread, experts, source)
    activation, arrives = activation_operator(spread)
    down, down_parameters = _product(
        spread, experts, "down", "down_proj", experts.ffn, style.hidden, arrives,
        (Tensor("expert_down_input", rows * experts.ffn, style.act),))
    up, down = _copied(style, spread, experts, up, down)
    if experts.tensor > 1:
        up, down = (replace(operator, joint=_met(style, kind, rows)) for operator, kind in (
            (up, "column"), (down, "row")))
    operators = [router, _dispatch(local, experts, source), up, activation, down, _combine(local, experts)]
    parameters = [*router_parameters, *up_parameters, *down_parameters]
    if experts.shared:
        shared, more = _shared(style, experts, source)
        operators += shared
        parameters += more
    return operators, parameters


def _met(style: Style, kind: str, rows: int) -> Joint | None:
    """Rows of all slices that an expert's width is cut into, in front of its products and behind them.

    Where slices have tokens of their own the dispatcher gathers rows, which the products keep, and scatters sums, both
    by nodes of autograd of their own (megatron-core 0.9.0 to 0.14.0 `moe/token_dispatcher.py`,
    MoEAlltoAllTokenDispatcher: gather_from_sequence_parallel_region, reduce_scatter_to_sequence_parallel_region).
    """
    found = joint(style, kind, rows * style.hidden)
    return found._replace(gathered="", apart=True) if found is not None and style.scattered else found


def expert_rows(style: Style, experts: Experts) -> int:
    """Rows that the experts of a slice compute: its tokens' copies, of all slices an expert's width is cut into."""
    slices = experts.tensor if style.scattered else 1  # whose tokens meet before the products of cut experts
    return max(1, round(style.stream.tokens * experts.top_k * experts.load * slices / experts.alike))


def _router(style: Style, experts: Experts, source: str) -> tuple[Operator, tuple[Parameter, ...]]:
    """Scores of all experts and the choice among them; keeps the tokens, the scores in fp32 and the choice."""
    inputs = Tensor("router_input", style.tokens * style.hidden, style.act)
    operator, parameters = linear_operator(replace(style, gemm=style.wide), "router", "mlp.gate", style.hidden,
                                           experts.count, source=source, saved=(inputs,), bias=False)
    scores = style.tokens * experts.count
    eager = (_ROUTER_PASSES, style.stack.router_launches)
    passes, launches = _COMPILED_ROUTER if style.stack.compile else eager
    choose = elementwise("route", scores, 4 * passes, "fp32", launches)
    back = elementwise("route_backward", scores, 4 * _ROUTER_BACKWARD_PASSES, "fp32",
                       style.stack.router_backward_launches)
    kept = (Tensor("router_scores", scores, "fp32"), Tensor("chosen_scores", style.tokens * experts.top_k, "fp32"),
            Tensor("chosen_experts", style.tokens * experts.top_k, "fp64"))
    return replace(operator, forward=(*operator.forward, choose), backward=(back, *operator.backward),
                   saved=(*operator.saved, *kept)), parameters


def _counts(style: Style, experts: Experts) -> Joint | None:
    """What slices of the sequence sum for the loss that balances experts (`Stack.counts_summed`)."""
    slices = {"none": 1, "context": style.context,
              "all": max(style.context, style.tensor if style.scattered else 1)}[style.stack.counts_summed]
    kind = "counts" if style.stack.counts_summed == "all" else "context_counts"
    return Joint(kind, experts.count, "fp64") if slices > 1 else None


def loop(style: Style, experts: Experts) -> int:
    """Launches one operation on all experts takes: a grouped kernel, or a loop over them."""
    return experts.held if style.takes_turns else 1


def _travels(style: Style, experts: Experts, kind: str, dtype: str) -> Joint | None:
    """Rows that leave for their experts or come back, those of the busiest slice."""
    if style.expert == 1:
        return None
    rows = style.tokens * experts.top_k * experts.load
    apart = kind == "dispatch" and not style.stack.dispatch_once
    scores = round(rows) if apart and style.stack.fused_permutation else 0  # which then weigh the activation
    stack, reads = style.stack, kind == "dispatch" and style.stack.dispatch_read != "none" and not experts.padded
    return Joint(kind, round(rows * style.hidden), dtype, scores=scores,
                 counts=experts.count * style.expert if apart else 0, reads_s=stack.host_read_s if reads else 0.0,
                 told=reads and stack.dispatch_read == "beside")


def _copied(style: Style, spread: Style, experts: Experts, up: Operator, down: Operator) -> tuple[Operator, Operator]:
    """Products of experts between copies: rows come rank by rank and are sorted by expert, are padded to what narrow
    products take, and back. A dispatcher that sends a token once copies it to its rows where it arrives, so that one
    permutation is all there is."""
    def copy(name: str) -> Kernel:
        return elementwise(name, spread.tokens * spread.hidden, 2 * width(spread.act), spread.act)
    names = [("sort_rows", "unsort_rows")] * sorts(style, experts) + [("pad_rows", "unpad_rows")] * pads(spread)
    there, back = (tuple(copy(pair[way]) for pair in names) for way in (0, 1))
    return (replace(up, forward=(*there, *up.forward), backward=(*up.backward, *back[::-1])),
            replace(down, forward=(*down.forward, *back[::-1]), backward=(*there, *down.backward)))


def pads(spread: Style) -> bool:
    """Whether each expert's rows are padded for its products, which are narrow (16 rows, of mxfp8 32)."""
    return spread.stack.pads_rows and not spread.takes_turns and width(spread.gemm) < width(spread.act)


def sorts(style: Style, experts: Experts) -> bool:
    """Whether rows that have come from other ranks are sorted by expert (Megatron-LM `moe/token_dispatcher.py`,
    MoEAlltoAllTokenDispatcher: sort_chunks_by_idxs where a rank has several; torchtitan models/moe likewise)."""
    spread = style.expert > 1 or style.stack.permutation_kept
    return spread and experts.held > 1 and not style.stack.dispatch_once and not style.takes_turns


def _dispatch(style: Style, experts: Experts, source: str) -> Operator:
    """Every token copied to each of its experts' rows; backward adds the copies' gradients up again."""
    rows, e = style.tokens * experts.top_k // experts.alike, width(source)
    elements, launches = max(1, rows) * style.hidden, loop(style, experts)
    forward = elementwise("dispatch", elements, 2 * e, source, launches if style.stack.compile else 2 * launches)
    backward = elementwise("dispatch_backward", elements, 2 * e + e / experts.top_k, source, launches)
    if not style.stack.fused_permutation:
        forward, backward = strided(style, forward, _PICKED), strided(style, backward, _PICKED)
    return Operator("dispatch", (forward,), (backward,), joint=_travels(style, experts, "dispatch", source))


def _combine(style: Style, experts: Experts) -> Operator:
    """Experts' outputs weighted by their scores and added up; keeps them for the gradient of the scores. A loop keeps
    what it adds, too (`index_add_`, derivatives.yaml).

    Fused or compiled, one kernel reads every row and writes the sums, and the scores weigh the activation in its own
    kernel, whose inputs are kept anyway.
    """
    elements, e = max(1, style.tokens * experts.top_k // experts.alike) * style.hidden, width(style.act)
    travels = _travels(style, experts, "combine", style.act)
    if style.stack.fused_permutation or (style.stack.compile and loop(style, experts) == 1):
        one = e + e / experts.top_k
        return Operator("combine", (elementwise("combine", elements, one, style.act),),
                        (elementwise("combine_backward", elements, one, style.act),), joint=travels)
    launches, kept = _LOOP_LAUNCHES * loop(style, experts), style.stack.permutation_kept and not style.takes_turns
    moved = (6 if kept else 4) * e + e / experts.top_k  # zeros and a copy into them, before rows are weighed and summed
    forward = strided(style, elementwise("combine", elements, moved, style.act, launches), 1.0 + _ADDED)
    backward = strided(style, elementwise("combine_backward", elements, 5 * e, style.act, launches), 1.0 + _PICKED)
    names = ["expert_outputs", *["weighted_outputs"] * style.takes_turns, *["returned_outputs"] * kept,
             *["sorted_outputs"] * (kept and experts.held > 1)]
    return Operator("combine", (forward,), (backward,), joint=travels,
                    saved=tuple(Tensor(name, elements, style.act) for name in names))


def _up(spread: Style, experts: Experts, source: str) -> tuple[Operator, tuple[Parameter, ...]]:
    """Up (and gate) products of all experts; Megatron's modules and transformers 5 hold both in one matrix."""
    inputs = (Tensor("expert_input", spread.tokens * spread.hidden, spread.act),)
    if not spread.gated or spread.merges_gate:
        outputs = experts.ffn * (2 if spread.gated else 1)
        return _product(spread, experts, "up", "up_proj", spread.hidden, outputs, source, inputs)
    gate, gate_parameters = _product(spread, experts, "gate", "gate_proj", spread.hidden, experts.ffn, source, inputs)
    up, up_parameters = _product(spread, experts, "up", "up_proj", spread.hidden, experts.ffn, source, ())
    sums = elementwise("input_gradient_sum", spread.tokens * spread.hidden, 3 * width(source), source)
    operator = Operator("up", (*gate.forward, *up.forward), (*up.backward, *gate.backward, sums),
                        (*up.parameters, *gate.parameters), gate.saved,
                        weight_copies=(*gate.weight_copies, *up.weight_copies))
    return operator, (*gate_parameters, *up_parameters)


def _product(
    spread: Style, experts: Experts, name: str, module: str, features_in: int, features_out: int, source: str,
    saved: tuple[Tensor, ...],
) -> tuple[Operator, tuple[Parameter, ...]]:
    """One linear layer of every expert on its share of the rows."""
    forward, backward = every_expert(spread, experts, spread.tokens, features_in, features_out, source)
    parameters = _matrices(spread, experts, module, features_in, features_out)
    size = experts.held * features_in * features_out
    copies = (Tensor(f"{name}_weight_copy", size, spread.act),) if spread.autocast else ()
    return Operator(name, tuple(forward), tuple(backward), gradient_ready(spread, parameters), saved,
                    weight_copies=copies), parameters


def _matrices(
    spread: Style, experts: Experts, module: str, features_in: int, features_out: int,
) -> tuple[Parameter, ...]:
    """A matrix of every expert, or one tensor of all (transformers 5.23.0 modeling_mixtral.py, MixtralExperts)."""
    if spread.modules == "transformers" and not spread.takes_turns:
        return (Parameter(f"mlp.experts.{module}", (experts.held, features_out, features_in), True),)
    names = (f"mlp.experts.{i}.{module}" for i in range(experts.held))
    return tuple(replace(p, routed=True) for own in names
                 for p in linear_parameters(spread, own, features_in, features_out, False))


def every_expert(style: Style, experts: Experts, rows: int, features_in: int, features_out: int,
                 source: str) -> tuple[list[Kernel], list[Kernel]]:
    """Forward and backward kernels of one linear layer of every expert on its share of `rows`.

    A stack that loops launches every expert's product by itself (on a few streams, so that they fill the GPU together);
    what it quantises is one kernel with scales of earlier steps, one kernel for each expert otherwise.
    """
    expected = asked(experts, rows)
    busy = max(1, round(expected))
    share = max(1, round(rows / busy))
    mean = rows / experts.load  # which only rounding keeps from being whole, where slices have tokens of their own
    stack, scale = style.stack, (round(mean) if experts.alike == 1 else mean) / (busy * share)
    each = style.takes_turns or stack.experts_looped
    loops = {True: each, False: each and (style.takes_turns or stack.narrow_amax_pass)}
    differ = not experts.padded and busy > 1
    times = {product: _repeated(busy, scale, expected / busy, looped, differ) for product, looped in loops.items()}
    forward, backward = linear(style, share, features_in, features_out, source=source, bias=False)
    return [times[k.op == "gemm"](k) for k in forward], [times[k.op == "gemm"](k) for k in backward]


def asked(experts: Experts, rows: int) -> float:
    """Expected experts of a slice that any of its `rows` is for, whose weights are read: every token takes `top_k`
    different ones of all, each as likely. All of them in training; of 8 with two a token, 3.5 for two tokens, 7.2 for
    eight."""
    tokens = rows * experts.count / (experts.held * experts.top_k * experts.load)
    missed = math.pow(1 - experts.top_k / experts.count, tokens)
    return min(float(rows), experts.held * (1 - missed))


def _repeated(experts: int, scale: float, read: float, loop: bool, differ: bool) -> Callable[[Kernel], Kernel]:
    """One expert's kernel as that of all: a grouped product, or as many launches; FLOPs as routed on average, `scale`
    corrects the share's rounding and the load of a slice that computes more, `read` the rounding of their number.
    Where experts' rows `differ`, products on rows cover each expert's with tiles of its own; those of weight gradients
    only sum over more or fewer of them."""
    def all_experts(kernel: Kernel) -> Kernel:
        shape = (kernel.shape[0] * experts, *kernel.shape[1:])
        runs_as = "uneven" if differ and kernel.op == "gemm" and kernel.variant != "nt" else kernel.kernel
        return replace(kernel, shape=shape, flops=kernel.flops * experts * scale, bytes=kernel.bytes * experts * read,
                       launches=kernel.launches * (experts if loop else 1), kernel=runs_as)
    return all_experts


def _shared(style: Style, experts: Experts, source: str) -> tuple[list[Operator], list[Parameter]]:
    """Experts that see every token: a dense part beside the mixture, on the router's input, and their sum."""
    dense = replace(style, experts=None, ffn=experts.shared_ffn)
    names = ("mlp.shared_experts.up_proj", "mlp.shared_experts.gate_proj", "mlp.shared_experts.down_proj")
    operators, parameters = mlp_operators(dense, source, names)
    if source == style.act:  # its input is kept by the router already
        operators[0] = replace(operators[0], saved=operators[0].saved[1:])
    elements, e = style.stream.tokens * style.hidden, width(style.act)
    add = Operator("shared_add", (elementwise("shared_add", elements, 3 * e, style.act),),
                   (elementwise("input_gradient_sum", elements, 3 * width(source), source, 2),))
    return [*operators, add], parameters
