"""Blocks and embedding of decoders as PyTorch modules run them: plain ones, Hugging Face's GPT-2 and Llama, Megatron's.

Local variables are those of the modules, because they decide how long a tensor lives. Operators carry the names of the
model's operators. Sources: transformers modeling_gpt2.py and modeling_llama.py (5.x), Megatron-LM core/transformer.
"""

from __future__ import annotations

from dataclasses import replace

from sim.model.attention.core_choice import in_math, masked, uses_flash
from sim.model.eager import tuned
from sim.model.eager.attention.latent import latent_attention
from sim.model.eager.attention.modules import attention
from sim.model.eager.experts import experts
from sim.model.eager.mlp import mlp
from sim.model.eager.norms import norm
from sim.model.eager.products import row_cut, summed_apart
from sim.model.eager.tensors import operations as op
from sim.model.eager.tensors.autograd import Frame, Run, Tensor, Weight
from sim.model.eager.tensors.storage import Storage
from sim.model.recompute import modules_of
from sim.model.style import Style
from sim.work import DTYPE_BYTES


def block(run: Run, style: Style, x: Tensor, policy: str) -> Tensor:
    """One block; modules of `policy` are recomputed (`sim.model.recompute`)."""
    if style.one_forward:
        return _one_forward(run, style, x, policy)
    if style.parallel_block:
        return _parallel(run, style, x, policy)
    variables: list[Storage] = []  # until the block is done
    attend = attention if style.latent is None else latent_attention
    branch, frame = _normed(run, style, x, "norm1", policy, alone=style.latent is not None)
    attended = attend(run, style, branch, policy, variables=variables)
    run.discard(frame, attended)
    branch = tuned.behind(run, style, attended, "attention")
    del attended
    branch = _behind(run, style, branch, "post_norm1")
    branch = _dropped(run, style, branch, "1")
    if style.conv1d:
        variables.append(branch.storage)  # GPT2Block's `attn_output`; Llama's sum takes its place
    x = _added(run, x, branch, "1")
    if style.experts is None and "mlp" in modules_of(policy):  # with the norm in front of it, which is its own
        branch = run.checkpoint(lambda run, x: mlp(run, style, norm(run, style, x, "norm2")), x)
        branch = tuned.behind(run, style, branch, "mlp")
        return residual(run, style, x, branch, "2")
    branch, frame = _normed(run, style, x, "norm2", policy, alone=style.experts is not None)
    fed = _fed(run, style, branch, policy)
    run.discard(frame, fed)
    branch = tuned.behind(run, style, fed, "mlp")
    del fed
    branch = _behind(run, style, branch, "post_norm2")
    return residual(run, style, x, branch, "2")


def _normed(run: Run, style: Style, x: Tensor, name: str, policy: str, *, alone: bool) -> tuple[Tensor, Frame | None]:
    """A norm whose output may be given up once its sub-layer has run, if it stands alone (Megatron-LM
    core/transformer/transformer_layer.py, `recompute_input_layernorm`, `recompute_pre_mlp_layernorm`)."""
    if not style.norms_input:
        return x, None
    if not (alone and "layernorm" in modules_of(policy)):
        return norm(run, style, x, name), None
    (out,), frame = run.without_output(lambda run, x: [norm(run, style, x, name)], x)
    return out, frame


def _behind(run: Run, style: Style, branch: Tensor, name: str) -> Tensor:
    """The norm of what a sub-layer adds to the stream, if there is one."""
    return norm(run, replace(style, residual=style.act), branch, name) if style.norms_output else branch


def _one_forward(run: Run, style: Style, x: Tensor, policy: str) -> Tensor:
    """A block of two expressions: `x + dropout(proj(core(qkv(norm(x)))))` and the like, no variable for a norm."""
    variables: list[Storage] = []
    branch = attention(run, style, norm(run, style, x, "norm1"), policy, variables=variables)
    x = residual(run, style, x, branch, "1")
    del branch
    return residual(run, style, x, mlp(run, style, norm(run, style, x, "norm2")), "2")


def _fed(run: Run, style: Style, x: Tensor, policy: str = "none") -> Tensor:
    """The feed-forward part, dense or a mixture."""
    if style.experts is None:
        return mlp(run, style, x)
    if "moe" in modules_of(policy):
        return run.checkpoint(lambda run, x: experts(run, style, x), x)
    return experts(run, style, x, policy)


def _parallel(run: Run, style: Style, x: Tensor, policy: str) -> Tensor:
    normed = norm(run, style, x, "norm1")
    variables: list[Storage] = []
    attend = attention if style.latent is None else latent_attention
    attended = tuned.behind(run, style, attend(run, style, normed, policy, variables=variables), "attention")
    if style.parallel_norms == 2:
        normed = norm(run, style, x, "norm2")
    fed = tuned.behind(run, style, _fed(run, style, normed), "mlp")
    del normed
    return residual(run, style, x, op.add(run, attended, fed), "2")


def residual(run: Run, style: Style, x: Tensor, branch: Tensor, suffix: str, sublayer: str = "") -> Tensor:
    """Dropout of the branch, the adapter of a sub-layer behind it (in front of it where dropout and sum are one
    kernel), and the sum."""
    if sublayer and style.stack.fused_dropout_add:
        branch = tuned.behind(run, style, branch, sublayer)
    branch = _dropped(run, style, branch, suffix)
    if sublayer and not style.stack.fused_dropout_add:
        branch = tuned.behind(run, style, branch, sublayer)
    return _added(run, x, branch, suffix)


def _dropped(run: Run, style: Style, branch: Tensor, suffix: str) -> Tensor:
    if not style.dropout:
        return branch
    run.at(f"dropout{suffix}")
    return op.dropout(run, branch)


def _added(run: Run, x: Tensor, branch: Tensor, suffix: str) -> Tensor:
    run.at(f"residual{suffix}")
    return op.add(run, x, branch)


def embedding(run: Run, style: Style, policy: str) -> Tensor:
    """Tokens, positions, dropout; and what the model's forward holds meanwhile (rotary tables, masks, the embeddings).

    Args:
        policy: recomputation of the blocks, which keep what they are given until backward.
    """
    run.at("embedding")
    x = _lookup(run, style, style.tokens, style.vocab, style.shares_table)
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
    return op.embedding(run, rows, style.hidden, Weight(table * style.hidden, style.weight, shared,
                                                             apart=summed_apart(style)))


def _held_by_model(run: Run, style: Style, dtype: str, policy: str) -> None:
    keep = run.held if policy == "none" else run.retained
    if style.positions == "rotary":
        turned = (style.turned or style.head_dim) if style.latent is None else style.latent.rope
        run.retained += [run.new(style.sequence * turned, dtype) for _ in range(2)]
        keep.append(run.new(style.sequence, "fp64"))  # position numbers
    if not (uses_flash(style) or in_math(style)):
        keep.append(run.new(style.batch * style.sequence**2, dtype))
    _mask_of_calls(run, style, keep)


def _mask_of_calls(run: Run, style: Style, keep: list[object]) -> None:
    """The mask of calls of `scaled_dot_product_attention`: of booleans for all sequences, of which every block makes
    one of numbers (transformers 5.24.0 masking_utils.py, sdpa_mask), or of numbers, which all blocks keep."""
    if not masked(style):
        return
    if style.stack.sdpa_mask_each:
        keep.append(run.new(style.sequence**2, "int8"))
    else:
        run.retained.append(run.new(style.batch * style.sequence**2, style.act))
