"""Encoder layers as Hugging Face's BERT runs them: norms behind the sums, a transform before the vocabulary.

Source: transformers modeling_bert.py.
"""

from __future__ import annotations

from sim.model.eager import operations as op
from sim.model.eager.attention import attention
from sim.model.eager.autograd import LOGITS, Output, Run, Storage, Tensor, Weight
from sim.model.eager.head import loss
from sim.model.eager.mlp import mlp
from sim.model.style import Style

#: Sentence A or B (BertConfig.type_vocab_size).
_TOKEN_TYPES = 2


def block(run: Run, style: Style, x: Tensor, policy: str) -> Tensor:
    """BertLayer."""
    variables: list[Storage] = []  # until the block is done
    attended = _post_norm(run, style, attention(run, style, x, policy, variables=variables), x, "1")
    return _post_norm(run, style, mlp(run, style, attended), attended, "2")


def _post_norm(run: Run, style: Style, branch: Tensor, x: Tensor, suffix: str) -> Tensor:
    """BertSelfOutput, BertOutput."""
    if style.dropout:
        run.at(f"dropout{suffix}")
        branch = op.dropout(run, branch)
    run.at(f"norm{suffix}")
    return _norm(run, style, op.add(run, branch, x))


def _norm(run: Run, style: Style, x: Tensor) -> Tensor:
    """LayerNorm, which autocast runs in fp32 unless the stack keeps its norms in the residual stream's dtype."""
    return op.layer_norm(run, op.to(run, x, style.residual) if run.autocast else x, style.hidden, 2, 2, style.weight)


def embedding(run: Run, style: Style, policy: str) -> Tensor:
    """BertEmbeddings; the model's forward holds the result."""
    run.at("embedding")
    words = op.embedding(run, style.tokens, style.hidden, Weight(style.vocab * style.hidden, style.weight, style.tied))
    types = op.embedding(run, style.tokens, style.hidden, Weight(_TOKEN_TYPES * style.hidden, style.weight))
    run.retained.append(run.new(style.sequence, "fp64"))  # token types
    embeddings = op.add(run, words, types)
    if style.positions == "learned":
        run.at("positions")
        positions = op.embedding(run, style.sequence, style.hidden,
                                 Weight(style.max_positions * style.hidden, style.weight))
        embeddings = op.add(run, embeddings, positions)
    run.at("embedding_norm")
    embeddings = _norm(run, style, embeddings)
    if style.dropout:
        run.at("embedding_dropout")
        embeddings = op.dropout(run, embeddings)
    if run.autocast and policy == "none":  # the blocks keep half copies only
        run.held.append(run.new(style.tokens * style.hidden, embeddings.dtype))
    return op.to(run, embeddings, style.residual)


def head(run: Run, style: Style, x: Tensor) -> Tensor:
    """BertOnlyMLMHead and the loss, on the predicted tokens where they are picked out."""
    rows = style.batch * style.predicted
    if rows < style.tokens:
        run.at("gather_predicted")
        x = _gather(run, x, rows * style.hidden)
    run.at("logits")
    run.kind = LOGITS
    logits = op.linear(run, _transform(run, style, x), style.hidden, style.vocab, True, dtype=style.weight,
                       shared=style.tied)
    run.at("loss")
    return loss(run, style, logits, rows)


def _transform(run: Run, style: Style, x: Tensor) -> Tensor:
    """BertPredictionHeadTransform: dense, activation, norm."""
    run.at("transform")
    x = op.linear(run, x, style.hidden, style.hidden, True, dtype=style.weight)
    x = op.unary(run, x, saves_input=True)
    return _norm(run, style, x)


def _gather(run: Run, x: Tensor, elements: int) -> Tensor:
    source, dtype = x.elements, x.dtype
    node = run.node(lambda run, _: [run.new(source, dtype)], (x.sink,))
    return Tensor(run.new(elements, dtype), elements, dtype, Output(node, 0))
