"""Decoder layers as PyTorch modules run them: plain modules, Hugging Face's GPT-2 and Llama code, Megatron's.

Local variables are those of the modules, because they decide how long a tensor lives. Operators carry the names of the
model's operators. Sources: transformers modeling_gpt2.py and modeling_llama.py (5.x), Megatron-LM core/transformer.
"""

from __future__ import annotations

from collections.abc import Callable

from sim.model.eager import chunked, tuned
from sim.model.eager import operations as op
from sim.model.eager.autograd import LOGITS, Gradients, Output, Run, Tensor, Weight
from sim.model.style import Style
from sim.work import DTYPE_BYTES

#: silu_backward as PyTorch composes it from sigmoid, ones, products and a sum: five tensors beside the gradient. That
#: is what runs on fake tensors, so the oracle has them; a CUDA build has one kernel, and a peak inside this operator (a
#: recomputed gated block that outweighs the logits) is lower there by these five.
_SILU_TEMPORARIES = 5


def block(run: Run, style: Style, x: Tensor, policy: str) -> Tensor:
    """One block; `policy` "selective" recomputes the attention core."""
    branch = norm(run, style, x, "norm1")
    if style.parallel_block:
        return _parallel(run, style, x, branch, policy)
    branch = _behind(run, style, attention(run, style, branch, policy), "attention")
    x = residual(run, style, x, branch, "1")
    branch = norm(run, style, x, "norm2")
    branch = _behind(run, style, mlp(run, style, branch), "mlp")
    return residual(run, style, x, branch, "2")


def _behind(run: Run, style: Style, x: Tensor, sublayer: str) -> Tensor:
    """A sub-layer's output after its adapter, if it has one."""
    if style.tuned is None or not style.tuned.behind(sublayer):
        return x
    run.at(f"{sublayer}_adapter")
    return tuned.bottleneck(run, style, x)


def _parallel(run: Run, style: Style, x: Tensor, normed: Tensor, policy: str) -> Tensor:
    attended = _behind(run, style, attention(run, style, normed, policy), "attention")
    fed = _behind(run, style, mlp(run, style, normed), "mlp")
    del normed
    return residual(run, style, x, op.add(run, attended, fed), "2")


def norm(run: Run, style: Style, x: Tensor, name: str) -> Tensor:
    """LayerNorm, a fused RMSNorm, or LlamaRMSNorm spelled out."""
    run.at(name)
    trained = style.tuned is None or style.tuned.trains_norms
    if style.norm == "layernorm":
        return op.layer_norm(run, x, style.hidden, (1 + style.bias) * trained, 2, style.weight)
    if not style.spelled_rmsnorm or style.stack.compile:
        return op.layer_norm(run, x, style.hidden, int(trained), 1, style.weight)
    return rms_norm(run, x, style.hidden, style.weight, trained)


def rms_norm(run: Run, hidden_states: Tensor, cols: int, dtype: str, trained: bool = True) -> Tensor:
    """LlamaRMSNorm, T5LayerNorm; a frozen weight needs nothing kept."""
    source, rows = hidden_states.dtype, hidden_states.elements // cols
    hidden_states = op.to(run, hidden_states, "fp32")
    variance = op.mean_rows(run, square(run, hidden_states), rows)
    hidden_states = op.mul_rows(run, hidden_states, op.unary(run, op.shift(run, variance), saves_output=True))
    normalised = op.to(run, hidden_states, source)
    return op.mul_weight(run, normalised, Weight(cols, dtype)) if trained else op.scale(run, normalised)


def square(run: Run, x: Tensor) -> Tensor:
    """`x.pow(2)` of an fp32 tensor."""
    return op.unary(run, x, saves_input=True, temporaries=2)


def attention(run: Run, style: Style, x: Tensor, policy: str, memory: Tensor | None = None,
              bias: Tensor | None = None) -> Tensor:
    """From the norm's output to the output projection.

    Args:
        memory: what keys and values are made from, default `x`.
        bias: added to the scores.
    """
    run.at("qkv")
    query, key, value = _projections(run, style, x, memory)
    del x
    if style.positions == "rotary":
        run.at("rotary")
        query, key = _rotary(run, style, query, key)
    run.at("attention")
    core: Callable[..., Tensor] = _flash if uses_flash(style) else _eager
    if policy == "selective":
        inputs = (query, key, value) if bias is None else (query, key, value, bias)
        out = run.checkpoint(lambda run, *tensors: core(run, style, *tensors), *inputs)
    else:
        out = core(run, style, query, key, value, bias)
    run.at("projection")
    return row_cut(run, style, _linear(run, style, out, style.query_width, (("projection", style.hidden),)))


def _linear(run: Run, style: Style, x: Tensor, features_in: int, parts: tuned.Parts, gathered: int = 1) -> Tensor:
    """A linear layer; `parts` names its outputs as fine-tuning does."""
    if style.tuned is not None:
        return tuned.linear(run, style, x, features_in, parts)
    features_out = sum(width for _, width in parts)
    return op.linear(run, x, features_in, features_out, style.bias, dtype=style.weight, bias_last=style.conv1d,
                     gathered=gathered, narrow=narrow(style), placeholder=style.weight_placeholder)


def narrow(style: Style) -> op.Narrow | None:
    """How the blocks' products are quantised; None where they run in the activations' dtype."""
    if DTYPE_BYTES[style.gemm] >= DTYPE_BYTES[style.act]:
        return None
    return op.Narrow(style.gemm, style.stack.narrow_keeps_inputs, style.stack.narrow_weights_cached)


def _column(run: Run, style: Style, x: Tensor, parts: tuned.Parts) -> Tensor:
    """A product of the stream, which is gathered where it is scattered, unless `_entered` has done so."""
    again = style.scattered and not style.stack.gathered_inputs_kept
    return _linear(run, style, x, style.hidden, parts, style.tensor if again else 1)


def _entered(run: Run, style: Style, x: Tensor) -> Tensor:
    """The stream as column-cut products read it where they keep it so (`Stack.gathered_inputs_kept`)."""
    return op.gathered(run, x, style.tensor) if style.scattered and style.stack.gathered_inputs_kept else x


def row_cut(run: Run, style: Style, x: Tensor) -> Tensor:
    """A sum over the slices of the width, on its way back into the stream."""
    return op.scattered(run, x, style.tensor) if style.scattered else x


def uses_flash(style: Style) -> bool:
    """Whether one kernel computes attention (`sim.model.attention`, which imports what imports this)."""
    from sim.model.attention import uses_flash as fused

    return fused(style)


def _projections(run: Run, style: Style, x: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values. Plain modules view them as (3, b, a, s, d), so their gradients are copied twice."""
    widths = (style.query_width, style.kv_width, style.kv_width)
    parts = tuple(zip(("query", "key", "value"), widths, strict=True))
    x = _entered(run, style, x)
    if style.separate_qkv or memory is not None:
        q = _column(run, style, x, parts[:1])
        k = _column(run, style, memory or x, parts[1:2])
        v = _column(run, style, memory or x, parts[2:])
        return q, k, v
    fused = _column(run, style, x, parts)
    if style.modules == "plain" and not style.stack.compile:
        fused = op.relayout(run, fused)
    q, k, v = op.split(run, fused, [style.tokens * width for width in widths])
    return q, k, v


def _rotary(run: Run, style: Style, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """apply_rotary_pos_emb; cos and sin are the embedding layer's and in the residual stream's dtype."""
    if style.stack.fused_rope or style.stack.compile:
        return op.unary(run, query), op.unary(run, key)
    return _rotated(run, style, query), _rotated(run, style, key)


def _rotated(run: Run, style: Style, x: Tensor) -> Tensor:
    return op.add(run, _times_table(run, style, x), _times_table(run, style, _rotate_half(run, x)))


def _times_table(run: Run, style: Style, x: Tensor) -> Tensor:
    """A product with cos or sin, which need no gradient: the input is not kept."""
    elements, source, wide = x.elements, x.dtype, op.promote(x.dtype, style.residual)

    def rule(run: Run, _: object) -> Gradients:
        full = run.new(elements, wide)
        return [full if wide == source else run.new(elements, source)]

    node = run.node(rule, (x.sink,))
    return Tensor(run.new(elements, wide), elements, wide, Output(node, 0))


def _rotate_half(run: Run, x: Tensor) -> Tensor:
    first, second = op.halves(run, x)
    return op.cat(run, [op.unary(run, second), first])


def _flash(run: Run, style: Style, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = style.tokens * style.heads
    if bias is None:
        q, k, v = (op.to(run, t, run.autocast or t.dtype) for t in (query, key, value))
        return op.attention(run, q, k, v, rows, gathered=style.context if style.gathers else 1)
    if not style.memory:  # create_position_bias_mask: with the causal mask, contiguous
        bias = op.clone(run, op.where(run, bias, style.sequence * style.keys * style.context) if style.causal else bias)
    half = op.expanded(run, op.to(run, bias, run.autocast or bias.dtype), style.batch)
    return op.attention(run, query, key, value, rows, half, style.batch)


def _eager(run: Run, style: Style, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    """Scores, scale, mask, softmax, dropout, values. `matmul` copies what it cannot view as one batch of matrices."""
    b, scores = style.batch, style.batch * style.heads * style.sequence * style.keys * style.context
    rotated, repeated = style.positions == "rotary", style.heads != style.kv_heads
    copies = b > 1 and style.modules != "megatron"
    if repeated:
        key, value = _repeat(run, style, key), _repeat(run, style, value)
    query = op.clone(run, query, copies and not rotated)
    key = op.clone(run, key, copies and not rotated and not repeated)
    weights = _softmax(run, style, op.matmul(run, query, key, scores), value.dtype, bias)
    value = op.clone(run, value, copies and not repeated)
    out = op.matmul(run, weights, value, style.tokens * style.query_width)
    return op.relayout(run, op.clone(run, out)) if copies else op.clone(run, out)


def _softmax(run: Run, style: Style, weights: Tensor, dtype: str, bias: Tensor | None) -> Tensor:
    from sim.model.attention import softmax_dtype

    soft = softmax_dtype(style)
    if style.stack.fused_softmax or style.stack.compile:
        weights = op.to(run, op.softmax(run, weights, soft), weights.dtype)
    elif style.modules == "plain" and style.causal and bias is None:
        weights = op.scale(run, weights)
        mask = run.new(style.sequence**2, "int8")  # tril
        weights = op.masked_fill(run, weights, run.new(style.sequence**2, "int8"))  # ~mask
        weights = op.softmax(run, weights, soft)
        weights = op.dropout(run, weights) if style.dropout else weights
        del mask
        return weights
    else:
        weights = op.scale(run, weights)
        if bias is not None:
            weights = op.add(run, weights, bias)
        if style.causal and not style.memory:
            weights = op.add(run, weights, _mask(style, weights))
        weights = op.to(run, op.softmax(run, weights, soft), dtype)
    return op.dropout(run, weights) if style.dropout else weights


def _mask(style: Style, like: Tensor) -> Tensor:
    """The additive mask, which the embedding layer made: only its dtype matters here."""
    return Tensor(like.storage, 0, style.residual, None)


def _repeat(run: Run, style: Style, x: Tensor) -> Tensor:
    """repeat_kv: copied out to every query head; the gradient is summed over the copies."""
    elements, source, dtype = style.batch * style.keys * style.query_width, x.elements, x.dtype
    node = run.node(lambda run, _: [run.new(source, dtype)], (x.sink,))
    return Tensor(run.new(elements, dtype), elements, dtype, Output(node, 0))


def mlp(run: Run, style: Style, x: Tensor) -> Tensor:
    """Up (and gate), activation, down."""
    run.at("up")
    x = _entered(run, style, x)
    if style.gated and style.modules != "megatron":
        hidden = _gated(run, style, x)
    elif style.gated:
        both = _column(run, style, x, (("mlp", 2 * style.ffn),))
        run.at("activation")
        hidden = _gated_kernel(run, both, style)
    else:
        up = _column(run, style, x, (("mlp", style.ffn),))
        run.at("activation")
        spelled = style.conv1d and style.activation == "gelu" and not style.stack.fused_bias_gelu
        hidden = _gelu_new(run, up) if spelled and not style.stack.compile else op.unary(run, up, saves_input=True)
        del up
    run.at("down")
    return row_cut(run, style, _linear(run, style, hidden, style.ffn, (("mlp", style.hidden),)))


def _gated(run: Run, style: Style, x: Tensor) -> Tensor:
    """act(gate(x)) * up(x)."""
    if style.stack.fused_swiglu or style.stack.compile:
        gate, up = (_column(run, style, x, (("mlp", style.ffn),)) for _ in range(2))
        run.at("activation")
        elements, dtype = gate.elements, gate.dtype
        node = run.node(lambda run, _: [run.new(elements, dtype), run.new(elements, dtype)], (gate.sink, up.sink))
        run.save(node, gate.storage, up.storage)
        return Tensor(run.new(elements, dtype), elements, dtype, Output(node, 0))
    gate = _column(run, style, x, (("mlp", style.ffn),))
    run.at("activation")
    gate = op.unary(run, gate, saves_input=True, temporaries=_SILU_TEMPORARIES)
    run.at("up")
    up = _column(run, style, x, (("mlp", style.ffn),))
    run.at("activation")
    return op.mul(run, gate, up)


def _gated_kernel(run: Run, both: Tensor, style: Style) -> Tensor:
    """Megatron's bias_swiglu on gate and up side by side."""
    elements, dtype, out = both.elements, both.dtype, style.tokens * style.ffn
    node = run.node(lambda run, _: [run.new(elements, dtype)], (both.sink,))
    run.save(node, both.storage)
    return Tensor(run.new(out, dtype), out, dtype, Output(node, 0))


def _gelu_new(run: Run, x: Tensor) -> Tensor:
    """0.5 * x * (1 + tanh(sqrt(2/pi) * (x + 0.044715 * pow(x, 3)))) (transformers NewGELUActivation)."""
    half = op.scale(run, x)
    inner = op.unary(run, op.scale(run, op.add(run, x, op.scale(run, op.power(run, x)))), saves_output=True)
    return op.mul(run, half, op.shift(run, inner))


def residual(run: Run, style: Style, x: Tensor, branch: Tensor, suffix: str) -> Tensor:
    """Dropout of the branch, and the sum."""
    if style.dropout:
        run.at(f"dropout{suffix}")
        branch = op.dropout(run, branch)
    run.at(f"residual{suffix}")
    return op.add(run, x, branch)


def embedding(run: Run, style: Style, policy: str) -> Tensor:
    """Tokens, positions, dropout; and what the model's forward holds meanwhile (rotary tables, masks, the embeddings).

    Args:
        policy: recomputation of the blocks, which keep what they are given until backward.
    """
    run.at("embedding")
    x = _lookup(run, style, style.tokens, style.vocab, style.tied)
    hugging_face = style.modules == "transformers"
    if hugging_face and not style.conv1d and policy == "none" and DTYPE_BYTES[x.dtype] < 4:
        run.held.append(run.new(style.tokens * style.hidden, x.dtype))  # the blocks' norms keep an fp32 copy
    if style.positions == "learned":
        run.at("positions")
        positions = _lookup(run, style, style.sequence, style.max_positions)
        run.retained.append(run.new(style.sequence, "fp64"))  # position numbers
        if hugging_face:
            run.held += [x.storage, positions.storage]
        x = op.add(run, x, positions)
        del positions
    x = row_cut(run, style, x)  # Megatron-LM scatters the sum
    if hugging_face:
        _held_by_model(run, style, x.dtype, policy)
    if style.dropout:
        run.at("embedding_dropout")
        x = op.dropout(run, x)
    return op.to(run, x, style.residual)


def _lookup(run: Run, style: Style, rows: int, table: int, shared: bool = False) -> Tensor:
    if style.tuned is not None:
        return tuned.embedding(run, rows, style.hidden, style.weight)
    return op.embedding(run, rows, style.hidden, Weight(table * style.hidden, style.weight, shared))


def _held_by_model(run: Run, style: Style, dtype: str, policy: str) -> None:
    if style.positions == "rotary":
        run.retained += [run.new(style.sequence * style.head_dim, dtype) for _ in range(2)]
    if not uses_flash(style):
        keep = run.held if policy == "none" else run.retained
        keep.append(run.new(style.batch * style.sequence**2, dtype))


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
        x = _entered(run, style, x)
        again = style.scattered and not style.stack.gathered_inputs_kept
        logits = op.linear(run, x, style.hidden, style.vocab, False, dtype=style.weight, shared=style.tied,
                           gathered=style.tensor if again else 1)
    if style.modules != "transformers":
        del x  # Hugging Face's model output holds it until the loss is there
    run.at("loss")
    return loss(run, style, logits, rows)


def loss(run: Run, style: Style, logits: Tensor, rows: int) -> Tensor:
    """Cross-entropy: Hugging Face's decoders cast logits to fp32 first; autocast casts log-softmax's output, which
    nll keeps."""
    if style.stack.loss == "fused":
        return _one_kernel(run, logits, rows)
    if style.stack.loss == "vocab_parallel":
        return _in_place(run, op.to(run, logits, "fp32"))
    wide = op.to(run, logits, "fp32") if style.widens_logits else logits
    scores = op.softmax(run, wide, wide.dtype)
    return _nll(run, op.to(run, scores, "fp32") if run.autocast else scores)


def _in_place(run: Run, wide: Tensor) -> Tensor:
    """Megatron's loss: maximum, exponential and quotient overwrite the fp32 logits, and backward makes the gradient of
    the softmax that is left (megatron/core/tensor_parallel/cross_entropy.py: `vocab_parallel_logits -=`,
    `torch.exp(..., out=)`, `div_`; `grad_input = softmax`)."""
    kept = [wide.storage]
    node = run.node(lambda run, _: [kept.pop()], (wide.sink,))
    return Tensor(run.new(1, "fp32"), 1, "fp32", Output(node, 0))


def _nll(run: Run, scores: Tensor) -> Tensor:
    """`nll_loss`: keeps its input; the gradient is a tensor of its own."""
    elements, dtype = scores.elements, scores.dtype
    node = run.node(lambda run, _: [run.new(elements, dtype)], (scores.sink,))
    run.save(node, scores.storage, run.new(1, "fp32"))
    return Tensor(run.new(1, "fp32"), 1, "fp32", Output(node, 0))


def _one_kernel(run: Run, logits: Tensor, rows: int) -> Tensor:
    """flash-attn's cross-entropy: keeps the logits and two numbers a row."""
    elements, dtype = logits.elements, logits.dtype
    node = run.node(lambda run, _: [run.new(elements, dtype)], (logits.sink,))
    run.save(node, logits.storage, run.new(rows, "fp32"))
    return Tensor(run.new(rows, "fp32"), rows, "fp32", Output(node, 0))
