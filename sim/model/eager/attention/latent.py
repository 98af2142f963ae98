"""Latent attention as PyTorch modules run it: Hugging Face's DeepSeek-V3, and Megatron's.

Local variables are those of the modules. Queries and keys are written whole, values are a part of what keys and values
are expanded to. Plain modules (torchtitan's deepseek_v3) run as Megatron's do.

Sources (read): transformers 5.23.0 modeling_deepseek_v3.py (DeepseekV3Attention, apply_rotary_pos_emb_interleave);
megatron-core 0.15.0 transformer/multi_latent_attention.py, models/common/embeddings/rope_utils.py,
fusions/fused_mla_yarn_rope_apply.py;
torch/csrc/autograd/functions/tensor.cpp (CopySlices, CopyBackwards).
"""

from __future__ import annotations

from dataclasses import replace

from sim.model.attention.core_choice import unequal, uses_flash
from sim.model.eager.attention.modules import attended, rotated, times_table
from sim.model.eager.norms import norm
from sim.model.eager.products import column, entered, linear, row
from sim.model.eager.tensors import between
from sim.model.eager.tensors import operations as op
from sim.model.eager.tensors.autograd import Gradients, Run, Tensor
from sim.model.eager.tensors.narrow import keeping
from sim.model.eager.tensors.storage import Storage
from sim.model.recompute import modules_of
from sim.model.style import Latent, Style


def latent_attention(run: Run, style: Style, x: Tensor, policy: str, *, variables: list[Storage]) -> Tensor:
    """From the norm's output to the output projection; arguments as of `attention.attention`."""
    latent = style.latent
    assert latent is not None
    style = replace(style, kv_heads=style.heads)  # grouped they are not: every head expands its own
    if style.modules == "transformers":
        out = _hugging_face(run, style, latent, x, policy, variables)
    else:
        out = _megatron(run, style, latent, x, policy, variables)
        style = keeping(style)  # attention keeps its output itself (`set_save_original_input(self.linear_proj)`)
    run.at("projection")
    return row(run, style, out, style.heads * latent.value, (("projection", style.hidden),))


def _hugging_face(run: Run, style: Style, latent: Latent, hidden_states: Tensor, policy: str,
                  variables: list[Storage]) -> Tensor:
    """`DeepseekV3Attention.forward` to the core's output."""
    q_states = op.relayout(run, _queries(run, style, latent, hidden_states))
    q_pass, q_rot = op.split(run, q_states, [style.tokens * style.heads * n for n in (latent.nope, latent.rope)])
    compressed_kv = _down(run, style, hidden_states, _keys(style), "kv", latent.kv_rank + latent.rope)
    del hidden_states
    kv_nope, k_rot = op.split(run, compressed_kv, [style.tokens * n for n in (latent.kv_rank, latent.rope)])
    kv_nope = _normed(run, style, kv_nope, "kv", latent.kv_rank)
    run.at("assemble")
    q_rot, k_rot = _interleaved(run, style, q_rot), _interleaved(run, style, k_rot)
    query_states = _joined(run, q_pass, q_rot)
    key_states, value_states = _expanded(run, style, latent, kv_nope, k_rot)
    variables += [q_states.storage, compressed_kv.storage, kv_nope.storage, query_states.storage, key_states.storage]
    out = attended(run, style, query_states, key_states, value_states, policy, variables=variables)
    half = run.autocast or query_states.dtype != "fp32"
    # flash writes what it makes as queries lie, heads in front of tokens, and `transpose(1, 2).contiguous()` copies
    return op.clone(run, out, uses_flash(style) and bool(half) and not unequal(style))


def _expanded(run: Run, style: Style, latent: Latent, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """`expand_kv`: keys are a new tensor that two parts are copied into."""
    kv_nope = op.relayout(run, _up(run, style, kv_nope, _keys(style), "kv", latent.nope + latent.value))
    run.at("assemble")
    parts = [style.tokens * style.heads * n for n in (latent.nope, latent.value)]
    k_nope, value_states = op.split(run, kv_nope, parts)
    whole, dtype = style.tokens * style.heads * (latent.nope + latent.rope), kv_nope.dtype
    key_states = Tensor(run.new(whole, dtype), whole, dtype, None)
    key_states = _copied_into(run, key_states, k_nope)
    return _copied_into(run, key_states, _spread(run, k_rot, style.heads)), value_states


def _copied_into(run: Run, base: Tensor, part: Tensor) -> Tensor:
    """`base[...] = part`: backward copies the whole gradient, then the part's, and zeroes the part of what goes on."""
    whole, dtype, elements, source = base.elements, base.dtype, part.elements, part.dtype
    written, needed = base.sink is not None, part.sink is not None

    def rule(run: Run, _: Gradients) -> Gradients:
        result, own = run.new(whole, dtype), run.new(elements, dtype)
        zeros = run.new(elements, dtype) if written else None
        gradient = (own if source == dtype else run.new(elements, source)) if needed else None
        del zeros
        return [result if written else None, gradient]

    node = run.node(rule, (base.sink, part.sink))
    return Tensor(base.storage, whole, dtype, node.output())


def _interleaved(run: Run, style: Style, x: Tensor) -> Tensor:
    """`apply_rotary_pos_emb_interleave` of queries or keys: even and odd columns are views."""
    even, odd = op.slices(run, x, [x.elements // 2] * 2)
    return op.cat(run, [op.subtract(run, times_table(run, style, even), times_table(run, style, odd)),
                        op.add(run, times_table(run, style, odd), times_table(run, style, even))])


def _megatron(run: Run, style: Style, latent: Latent, x: Tensor, policy: str, variables: list[Storage]) -> Tensor:
    """`MultiLatentAttention.forward` to the core's output: the expansion may be a checkpoint without output."""
    alone = "layernorm" in modules_of(policy)  # its output is given up
    compressed = _compressed(run, keeping(style) if alone else style, latent, x)
    del x

    def expansion(run: Run, *inputs: Tensor) -> tuple[Tensor, ...]:
        return _assembled(run, style, latent, *inputs)

    frame = None
    if "mla_up_proj" in modules_of(policy):
        made, frame = run.without_output(expansion, *compressed)
    else:
        made = expansion(run, *compressed)
    del compressed
    query, key, value = made
    out = attended(run, style, query, key, value, policy, variables=variables)
    run.discard(frame, out)
    return out


def _compressed(run: Run, style: Style, latent: Latent, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values compressed (or what queries are made of), and the key's rotary columns of all tokens."""
    keys, whole = _keys(style), style.stream
    q_compressed = _down(run, style, x, "query", "q", latent.q_rank) if latent.q_rank else x
    kv_combined = _down(run, style, x, keys, "kv", latent.kv_rank + latent.rope)
    del x
    kv_compressed, k_pos_emb = op.split(run, kv_combined, [whole.tokens * n for n in (latent.kv_rank, latent.rope)])
    if style.scattered:
        k_pos_emb = between.gathered(run, k_pos_emb, style.tensor)
    return q_compressed, kv_compressed, k_pos_emb


def _assembled(run: Run, style: Style, latent: Latent, q_compressed: Tensor, kv_compressed: Tensor,
               k_pos_emb: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`qkv_up_proj_and_rope_apply` of `MLASelfAttention.get_query_key_value_tensors`."""
    keys, heads = _keys(style), style.heads
    if latent.q_rank:
        q_compressed = _normed(run, style, q_compressed, "q", latent.q_rank)
        q = _up(run, style, q_compressed, "query", "q", latent.nope + latent.rope)
    else:
        q = _queries(run, style, latent, q_compressed)
    kv_compressed = _normed(run, style, kv_compressed, "kv", latent.kv_rank)
    kv = _up(run, style, kv_compressed, keys, "kv", latent.nope + latent.value)
    run.at("assemble")
    if style.stack.fused_latent_rope:
        return op.overwritten(run, q), *_written(run, style, latent, kv, k_pos_emb)
    q_no_pe, q_pos_emb = op.split(run, q, [style.tokens * heads * n for n in (latent.nope, latent.rope)])
    k_no_pe, value = op.split(run, kv, [style.tokens * heads * n for n in (latent.nope, latent.value)])
    q_pos_emb, k_pos_emb = _turned(run, style, q_pos_emb), _turned(run, style, k_pos_emb)
    query = _joined(run, q_no_pe, q_pos_emb)
    key = _joined(run, k_no_pe, _spread(run, k_pos_emb, heads))
    return query, key, op.clone(run, value)


def _written(run: Run, style: Style, latent: Latent, kv: Tensor, k_pos_emb: Tensor) -> tuple[Tensor, Tensor]:
    """`fused_apply_mla_rope_for_kv` writes keys and values; backward their gradient side by side, and the rotary
    columns' of every token."""
    rows, dtype = style.tokens * style.heads, kv.dtype
    sizes = (kv.elements, k_pos_emb.elements)
    node = run.node(lambda run, _: [run.new(n, dtype) for n in sizes], (kv.sink, k_pos_emb.sink), 2)
    widths = (latent.nope + latent.rope, latent.value)
    key, value = (Tensor(run.new(rows * width, dtype), rows * width, dtype, node.output(i))
                  for i, width in enumerate(widths))
    return key, value


def _turned(run: Run, style: Style, t: Tensor) -> Tensor:
    """`_apply_rotary_pos_emb_bshd` of all columns: even and odd ones put side by side, turned, and joined with none."""
    t = op.cat(run, op.slices(run, t, [t.elements // 2] * 2))
    return op.cat(run, [rotated(run, style, t)])


def _queries(run: Run, style: Style, latent: Latent, x: Tensor) -> Tensor:
    """Queries of all heads from the norm's output, in one step or two."""
    width = latent.nope + latent.rope
    if not latent.q_rank:
        run.at("q_proj")
        return column(run, style, entered(run, style, x), (("query", style.heads * width),))
    x = _normed(run, style, _down(run, style, x, "query", "q", latent.q_rank), "q", latent.q_rank)
    return _up(run, style, x, "query", "q", width)


def _down(run: Run, style: Style, x: Tensor, target: str, name: str, columns: int) -> Tensor:
    """A compression, whole on every slice of the width and of its own tokens."""
    run.at(f"{name}_down")
    return linear(run, style, x, style.hidden, ((target, columns),))


def _normed(run: Run, style: Style, x: Tensor, name: str, rank: int) -> Tensor:
    return norm(run, replace(style, hidden=rank, residual=style.act), x, f"{name}_norm")


def _up(run: Run, style: Style, x: Tensor, target: str, name: str, width: int) -> Tensor:
    """An expansion to `width` columns of every head; what it reads is gathered where it is scattered."""
    run.at(f"{name}_up")
    rank = x.elements // style.stream.tokens
    x = entered(run, style, x)
    return column(run, replace(style, hidden=rank), x, ((target, style.heads * width),))


def _keys(style: Style) -> str:
    """The target that keys and values are, which come of the same layers."""
    tuned = style.tuned
    return "value" if tuned is not None and "key" not in tuned.targets else "key"


def _spread(run: Run, x: Tensor, heads: int) -> Tensor:
    """A view that gives one key's columns to all heads; its gradient is summed over them."""
    elements, dtype = x.elements, x.dtype
    node = run.node(lambda run, _: [run.new(elements, dtype)], (x.sink,))
    return Tensor(x.storage, elements * heads, dtype, node.output())


def _joined(run: Run, first: Tensor, second: Tensor) -> Tensor:
    """`torch.cat` of two parts of a head, in the wider of their dtypes."""
    wide = op.promote(first.dtype, second.dtype)
    return op.cat(run, [op.to(run, first, wide), op.to(run, second, wide)])
