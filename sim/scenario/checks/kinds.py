"""What only some kinds of models have, and what cannot be of windows among blocks that attend to all tokens, or of
documents inside a sequence."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sim.scenario.checks.findings import Finding
from sim.scenario.fields.schema import RecomputeModules, Scenario

#: What the blocks of encoders, encoder-decoders and tables of layers are not simulated with.
_OF_DECODERS = {"moe": "a mixture of experts", "mla": "latent attention", "window": "sliding-window attention",
                "parallel_block": "attention and MLP side by side", "qk_norm": "a norm of queries and keys",
                "score_softcap": "a bound on the scores", "logit_softcap": "a bound on the logits",
                "mtp_layers": "prediction of further tokens"}
#: What a model lacks that has no such module.
_LACKS = {"layernorm": "no norm that stands alone (only latent attention and mixtures of experts have one in front)",
          "mla_up_proj": "no latent attention", "mlp": "no dense MLP", "moe": "no experts", "moe_act": "no experts",
          "shared_experts": "no shared experts"}
#: What a table of layers says nothing of, or says itself, and how it is filled in there.
_OF_TRANSFORMERS: dict[str, object] = {
    "hidden": 0, "heads": 0, "kv_heads": 0, "head_dim": 0, "ffn": 0, "decoder_layers": 0, "vocab": 0,
    "max_positions": 0, "gated_mlp": False, "positions": "none", "norm": "layernorm", "dropout": 0.0}


def of_decoders(written: Scenario, s: Scenario) -> Iterator[Finding]:
    """Parts that the model's kind would pass over in silence."""
    del written
    if s.model.kind == "decoder":
        return
    for name, what in _OF_DECODERS.items():
        if getattr(s.model, name):
            yield f"model.{name}", f"{what} is for kind decoder, and the model is of kind {s.model.kind}", "remove it"
    if s.model.block_norms != "input":
        yield "model.block_norms", f"norms elsewhere are for kind decoder, and the model is of kind {s.model.kind}", (
            "remove it")


def norms(written: Scenario, s: Scenario) -> Iterator[Finding]:
    """Norms that a block has no place for, and blocks behind the model that its head does not go with."""
    del written
    m = s.model
    if m.parallel_block and m.block_norms != "input":
        yield "model.block_norms", "attention and MLP side by side read one norm and have none behind them", (
            "remove it, or set parallel_block: false")
    if m.parallel_norms > 1 and not m.parallel_block:
        yield "model.parallel_norms", "two norms are those of attention and MLP side by side, which they are not", (
            "set parallel_block: true, or remove it")
    if m.mtp_layers and m.tied_embeddings and m.kind == "decoder":
        yield "model.tied_embeddings", ("further tokens are predicted by models whose head has a matrix of its own, "
                                        "and this one's is the embedding's"), "set it to false, or mtp_layers: 0"
    if m.qk_norm and m.mla is not None:
        yield "model.qk_norm", "latent attention has norms of its own", "remove it"


def of_transformers(written: Scenario, s: Scenario) -> Iterator[Finding]:
    """Parts of a transformer beside a table of layers, which has none."""
    if s.model.kind != "layers":
        return
    for name, neutral in _OF_TRANSFORMERS.items():
        if getattr(written.model, name) not in (None, neutral):
            yield f"model.{name}", f"{name} is of a transformer, and the model is a table of layers", (
                "remove it, or change the table")


def modules(written: Scenario, s: Scenario) -> Iterator[Finding]:
    """Parts of a block that are to be recomputed, of a model that has none of them."""
    del written
    model, recompute = s.model, s.training.recompute
    if not isinstance(recompute, RecomputeModules):
        return
    moe, field = model.moe, "training.recompute.modules"
    if (model.kind != "decoder" or model.parallel_block or model.positions == "relative"
            or model.block_norms != "input"):
        yield field, ("modules are parts of a decoder's block whose MLP follows attention, each with a norm in front "
                      "alone, without relative positions"), (
            "write recompute: full")
        return
    dense = moe is None or moe.first_dense > 0 or moe.every > 1
    there = {"core_attn": True, "layernorm": model.mla is not None or moe is not None,
             "mla_up_proj": model.mla is not None, "mlp": dense, "moe": moe is not None, "moe_act": moe is not None,
             "shared_experts": moe is not None and moe.shared_experts > 0}
    for name in recompute.modules:
        if not there[name]:
            yield field, f"{name} is recomputed but the model has {_LACKS[name]}", "remove it"


def windows(written: Scenario, s: Scenario) -> Iterator[Finding]:
    """Fields about a window without one, and more blocks at the start than there are."""
    m, said = s.model, written.model
    for name in ("full_every", "first_full", "chunked_window"):
        if not getattr(said, name):
            continue
        if m.window is None:
            yield (f"model.{name}", f"{name} is about blocks with a window, and the model has none",
                   "give model.window, or remove it")
        elif m.kind != "decoder":
            yield f"model.{name}", f"{name} is for kind decoder, and the model is of kind {m.kind}", "remove it"
    if m.first_full > (m.layers or 0):
        yield "model.first_full", f"first_full {m.first_full} is more than layers {m.layers}", f"at most {m.layers}"


def documents(written: Scenario, s: Scenario) -> Iterator[Finding]:
    """Documents that are longer than what holds them, or of a model or run that has none."""
    del written
    t, m, field = s.training, s.model, "training.document"
    documents = t.documents
    if documents is None:
        return
    if t.mode != "train":
        yield field, "documents are packed into sequences of training, and this is inference", "remove it"
    elif m.kind != "decoder" or m.positions == "relative":
        whose = f"models of kind {m.kind}" if m.kind != "decoder" else "relative positions"
        yield field, f"attention within documents is for decoders and not simulated with {whose}", (
            "remove it: attention is then counted over the whole sequence")
    elif documents.mean > t.sequence:
        yield (field, f"documents of {documents.mean} tokens are longer than the sequence of {t.sequence}, and what a "
               "sequence cuts off is a document of its own", f"at most {t.sequence}")
    elif t.attended > t.sequence:  # no lengths up to the sequence have a larger second moment
        most = math.floor(100 * math.sqrt(t.sequence / documents.mean - 1)) / 100
        yield (f"{field}.spread", f"documents of {documents.mean} tokens on average do not spread by "
               f"{documents.spread:g} of that within a sequence of {t.sequence}: a mean token would stand in one of "
               f"{t.attended:,.0f}", f"at most {most:g}")
