"""Encoder layers as Hugging Face's BERT runs them: norms behind the sums, a transform before the vocabulary.

Source: transformers modeling_bert.py.
"""

from __future__ import annotations

from sim.model.eager import tuned
from sim.model.eager.attention.modules import attention
from sim.model.eager.head import loss
from sim.model.eager.mlp import mlp
from sim.model.eager.products import summed_apart
from sim.model.eager.tensors import operations as op
from sim.model.eager.tensors.autograd import Run, Tensor, Weight
from sim.model.eager.tensors.storage import LOGITS, Storage
from sim.model.style import Style

#: Sentence A or B (BertConfig.type_vocab_size).
_TOKEN_TYPES = 2


def block(run: Run, style: Style, x: Tensor, policy: str) -> Tensor:
    """BertLayer."""
    variables: list[Storage] = []  # until the block is done
    branch = tuned.behind(run, style, attention(run, style, x, policy, variables=variables), "attention")
    attended = _post_norm(run, style, branch, x, "1")
    del branch
    return _post_norm(run, style, tuned.behind(run, style, mlp(run, style, attended), "mlp"), attended, "2")


def _post_norm(run: Run, style: Style, branch: Tensor, x: Tensor, suffix: str) -> Tensor:
    """BertSelfOutput, BertOutput."""
    if style.dropout:
        run.at(f"dropout{suffix}")
        branch = op.dropout(run, branch)
    run.at(f"norm{suffix}")
    return _norm(run, style, op.add(run, branch, x))


def _norm(run: Run, style: Style, x: Tensor) -> Tensor:
    """LayerNorm, which autocast runs in fp32 unless the stack keeps its norms in the residual stream's dtype."""
    trained = style.tuned is None or style.tuned.trains_norms
    return op.layer_norm(run, op.to(run, x, style.residual) if run.autocast else x, style.hidden, 2 * trained, 2,
                         style.weight)


def embedding(run: Run, style: Style, policy: str) -> Tensor:
    """BertEmbeddings; the model's forward holds the result."""
    run.at("embedding")
    words = _lookup(run, style, style.tokens, style.vocab, style.tied)
    types = _lookup(run, style, style.tokens, _TOKEN_TYPES)
    numbers = run.new(style.sequence, "fp64")  # of token types
    if style.tuned is None:
        run.retained.append(numbers)
    embeddings = op.add(run, words, types)
    if style.positions == "learned":
        run.at("positions")
        positions = _lookup(run, style, style.sequence, style.max_positions)
        embeddings = op.add(run, embeddings, positions)
    run.at("embedding_norm")
    embeddings = _norm(run, style, embeddings)
    if style.dropout:
        run.at("embedding_dropout")
        embeddings = op.dropout(run, embeddings)
    if run.autocast and policy == "none":  # the blocks keep half copies only
        run.held.append(run.new(style.tokens * style.hidden, embeddings.dtype))
    return tuned.dropped(op.to(run, embeddings, style.residual))


def _lookup(run: Run, style: Style, rows: int, table: int, shared: bool = False) -> Tensor:
    if style.tuned is not None:
        return run.tensor(rows * style.hidden, style.weight)
    return op.embedding(run, rows, style.hidden, Weight(table * style.hidden, style.weight, shared,
                                                             apart=summed_apart(style)))


def head(run: Run, style: Style, x: Tensor) -> Tensor:
    """BertOnlyMLMHead and the loss, on the predicted tokens where they are picked out."""
    rows = style.batch * style.predicted
    if rows < style.tokens:
        run.at("gather_predicted")
        x = _gather(run, x, rows * style.hidden)
    run.at("logits")
    run.kind = LOGITS
    x = _transform(run, style, x)
    if style.tuned is not None:
        logits = tuned.linear(run, style, x, style.hidden, (("head", style.vocab),))
    else:
        logits = op.linear(run, x, style.hidden, style.vocab, True, dtype=style.weight, shared=style.tied)
    run.at("loss")
    return loss(run, style, logits, rows)


def _transform(run: Run, style: Style, x: Tensor) -> Tensor:
    """BertPredictionHeadTransform: dense, activation, norm."""
    run.at("transform")
    if style.tuned is not None:
        x = tuned.linear(run, style, x, style.hidden, (("", style.hidden),))
    else:
        x = op.linear(run, x, style.hidden, style.hidden, True, dtype=style.weight)
    x = op.unary(run, x, saves_input=True)
    return _norm(run, style, x)


def _gather(run: Run, x: Tensor, elements: int) -> Tensor:
    source, dtype = x.elements, x.dtype
    node = run.node(lambda run, _: [run.new(source, dtype)], (x.sink,))
    return Tensor(run.new(elements, dtype), elements, dtype, node.output())
