"""Houlsby's adapters: a bottleneck behind a sub-layer, whole or cut over tensor ranks.

The paper's has biases and is added to its own input, and the model's norms are trained beside it. NeMo's, the one that
is cut with a model, has none; a norm of its own stands behind it and the model's stay frozen. Its first matrix makes a
share of the inner columns, which are gathered for the activation; the second takes a share of them and makes partial
sums. Neither knows activations that are scattered along the sequence.

Sources: Houlsby et al. 2019 (arXiv 1902.00751), section 2.1; NeMo 1.20.0 (read)
collections/nlp/modules/common/megatron/adapters/parallel_adapters.py (ParallelLinearAdapter: gather_output, norm
position "post"), transformer.py (adapter_1, adapter_2), models/language_modeling/megatron_gpt_peft_models.py (freeze).
"""

from __future__ import annotations

from dataclasses import replace

from sim.model.architecture import Joint, Operator, Parameter, Tensor
from sim.model.kernels import elementwise, linear, width
from sim.model.layers.norms import norm_operator
from sim.model.style import Style
from sim.model.tuning import Tuned


def bottleneck(style: Style, tuned: Tuned, sublayer: str) -> list[Operator]:
    """The operators behind a sub-layer ("attention", "cross", "mlp")."""
    if style.modules == "megatron":
        return _cut(style, tuned, f"{sublayer}_adapter")
    return [_whole(style, tuned, f"{sublayer}_adapter")]


def _whole(style: Style, tuned: Tuned, name: str) -> Operator:
    """Down, activation, up, sum."""
    rows, hidden, rank, act = style.tokens, style.hidden, tuned.rank, style.act
    half, e = replace(style, gemm=style.wide), width(act)
    down, down_back = linear(half, rows, hidden, rank, source=act, bias=True)
    up, up_back = linear(half, rows, rank, hidden, source=act, bias=True)
    forward = [*down, elementwise("activation", rows * rank, 2 * e, act), *up,
               elementwise("adapter_add", rows * hidden, 3 * e, act)]
    backward = [*up_back, elementwise("activation_backward", rows * rank, 3 * e, act), *down_back,
                elementwise("adapter_gradient_sum", rows * hidden, 3 * e, act)]
    names = (("up", (hidden, rank)), ("down", (rank, hidden)))
    parameters = [p for side, shape in names for p in (Parameter(f"{name}.{side}.bias", shape[:1]),
                                                       Parameter(f"{name}.{side}.weight", shape))]
    kept = (Tensor("adapter_input", rows * hidden, act), Tensor("adapter_down", rows * rank, act),
            Tensor("adapter_inner", rows * rank, act))
    return Operator(name, tuple(forward), tuple(backward), tuple(parameters), kept)


def _cut(style: Style, tuned: Tuned, name: str) -> list[Operator]:
    """NeMo's, of one slice or of several: down, activation, up, norm and sum."""
    rows, hidden, rank, act = style.tokens, style.hidden, tuned.rank, style.act
    own, half, e = rank // style.tensor, replace(style, gemm=style.wide), width(act)
    down, down_back = linear(half, rows, hidden, own, source=act, bias=False)
    up, up_back = linear(half, rows, own, hidden, source=act, bias=False)
    between = [elementwise("activation", rows * rank, 2 * e, act)]
    between_back = [elementwise("activation_backward", rows * rank, 3 * e, act)]
    if style.tensor > 1:  # columns of all ranks side by side (cat), then a rank's own (contiguous): both ways
        together = elementwise("adapter_gather_cat", rows * rank, 2 * e, act)
        apart = elementwise("adapter_split", rows * own, 2 * e, act)
        between, between_back = [together, *between, apart], [together, *between_back, apart]
    norm, parameters = norm_operator(replace(style, norm="layernorm", bias=True, residual=act), f"{name}_norm",
                                     f"{name}.layer_norm")
    added = elementwise("adapter_add", rows * hidden, 3 * e, act)
    summed = elementwise("adapter_gradient_sum", rows * hidden, 3 * e, act)
    return [
        Operator(f"{name}_down", tuple(down), (*down_back, summed),
                 (Parameter(f"{name}.linear_in.weight", (own, hidden)),),
                 (Tensor("adapter_input", rows * hidden, act),), joint=Joint("read", rows * hidden, act)),
        Operator(f"{name}_activation", tuple(between), tuple(between_back),
                 saved=(Tensor("adapter_down", rows * rank, act),), joint=Joint("whole", rows * rank, act)),
        Operator(f"{name}_up", tuple(up), tuple(up_back), (Parameter(f"{name}.linear_out.weight", (hidden, own)),),
                 (Tensor("adapter_inner", rows * own, act),), joint=Joint("sum", rows * hidden, act)),
        replace(norm, name=f"{name}_norm", forward=(*norm.forward, added), parameters=parameters[::-1]),
    ]
