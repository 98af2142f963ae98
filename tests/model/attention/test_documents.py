"""Attention that keeps to documents packed into a sequence: pairs, kernels and tensors counted by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sim.model import Architecture, build
from sim.model.eager.attention.modules import attended
from sim.model.eager.tensors.autograd import Boundary, Run
from sim.model.scenario_style import style_of
from sim.model.style import Style
from sim.scenario import Scenario, resolve
from sim.software import stack_of
from sim.work import DTYPE_BYTES, Kernel

HIDDEN, HEADS, HEAD = 64, 4, 16


def scenario(document: Any = None, batch: int = 1, sequence: int = 8192, model: dict[str, Any] | None = None,
             parallel: dict[str, Any] | None = None, software: dict[str, Any] | None = None,
             **training: Any) -> Scenario:
    return resolve({
        "name": "t", "cluster": {"topology": "dgx-h100"},
        "model": {"kind": "decoder", "layers": 1, "hidden": HIDDEN, "heads": HEADS, "kv_heads": 4, "ffn": 96,
                  "vocab": 128, "gated_mlp": True, "positions": "rotary", "norm": "rmsnorm", "bias": False,
                  **(model or {})},
        "training": {"micro_batch": batch, "micro_steps": 1, "sequence": sequence, "precision": "pure-bf16",
                     "attention": "flash", **training, **({} if document is None else {"document": document})},
        "parallel": {"strategy": "ddp", **(parallel or {})},
        "software": {"framework": "ideal", "year": 2025, **(software or {})}})


def style(*args: Any, **kwargs: Any) -> Style:
    made = scenario(*args, **kwargs)
    return style_of(made, stack_of(made.software), made.training.micro_batch)


def built(*args: Any, **kwargs: Any) -> Architecture:
    made = scenario(*args, **kwargs)
    return build(made, stack_of(made.software), made.training.micro_batch)


def kernels(*args: Any, **kwargs: Any) -> list[Kernel]:
    """Attention's fused kernels, both ways."""
    return [k for layer in built(*args, **kwargs).stack for op in layer.operators
            for k in (*op.forward, *op.backward) if k.op == "attention"]


@pytest.mark.parametrize(("document", "squares"), [
    (500, 500), ({"mean": 500}, 500), ({"mean": 500, "spread": 1.0}, 1000), ({"mean": 400, "spread": 1.5}, 1300)])
def test_a_mean_token_s_document_is_longer_than_the_mean_document(document: Any, squares: float) -> None:
    """E[length^2] / E[length] = mean (1 + spread^2): twice the mean where lengths are exponential."""
    assert scenario(document).training.attended == squares


def test_documents_of_two_lengths_by_hand() -> None:
    """A document of 1,024 and one of 3,072 tokens: mean 2,048, standard deviation half of it; the squares are 10 x
    1,024^2 = 4,096 tokens x 2,560."""
    lengths = (1024, 3072)
    document = {"mean": 2048, "spread": 0.5}
    assert scenario(document, sequence=4096).training.attended == sum(n * n for n in lengths) / 4096 == 2560
    forward, backward = kernels(document, sequence=4096)
    assert forward.flops == 4 * HEADS * HEAD * sum(n * n for n in lengths)  # two products, a multiply and an add each
    assert backward.flops == 2.5 * forward.flops
    pieces, heads, _, queries, keys, _ = forward.shape
    assert (pieces, heads, queries, keys) == (2, HEADS, 2290, 2290)  # 1.6 documents of 2,560: two, of as many pairs
    assert pieces * queries * keys == pytest.approx(sum(n * n for n in lengths), rel=1e-3)


def test_equal_documents_are_sequences_of_their_length() -> None:
    """Sixteen documents of 512 tokens in a sequence cost attention what sixteen sequences of 512 do."""
    packed, apart = kernels(512), kernels(batch=16, sequence=512)
    assert packed == apart and packed[0].shape[0] == 16 and packed[0].causal
    whole = kernels()
    assert [16 * k.flops for k in packed] == [k.flops for k in whole]  # 8k of 512 tokens: a sixteenth
    assert [k.bytes for k in packed] == [k.bytes for k in whole]  # queries, keys and values are as many


@pytest.mark.parametrize("document", [8192, {"mean": 4096, "spread": 1.0}])
def test_documents_as_long_as_the_sequence_are_sequences(document: Any) -> None:
    assert not scenario(document).training.packed
    assert built(document) is built()  # memoised on everything that matters


def test_a_short_document_takes_a_whole_block() -> None:
    forward = kernels(16)[0]
    assert forward.shape[:1] + forward.shape[3:5] == (512, 128, 64)
    assert forward.flops == 4 * 8192 * 16 * HEADS * HEAD  # what counts is what was asked for


@pytest.mark.parametrize("exchange", ["ring", "all-gather", "all-to-all"])
@pytest.mark.parametrize("document", [512, {"mean": 512, "spread": 2.0}])
def test_context_ranks_share_a_document_s_work(exchange: str, document: Any) -> None:
    """Ranks are alike, and together they compute the pairs of all documents."""
    cut = kernels(document, parallel={"context": 4, "context_exchange": exchange})
    assert sum(k.flops for k in cut) * 4 == sum(k.flops for k in kernels(document))
    computed = sum(k.shape[0] * k.shape[1] * k.shape[3] * k.shape[4] * (0.5 if k.causal else 1.0) for k in cut
                   if k.variant == "forward")
    whole = sum(k.shape[0] * k.shape[1] * k.shape[3] * k.shape[4] * 0.5 for k in kernels(document)
                if k.variant == "forward")
    assert 4 * computed == pytest.approx(whole, rel=0.01)


def test_a_ring_cuts_every_document() -> None:
    """Of 16 documents of 512 tokens each of four ranks has 128 tokens, on its own keys and on half of the others'."""
    shapes = [k.shape for k in kernels(512, parallel={"context": 4}) if k.variant == "forward"]
    assert shapes == [(16, HEADS, 4, 128, 128, HEAD)] + 3 * [(16, HEADS, 4, 128, 64, HEAD)]


def test_a_window_inside_documents_by_hand() -> None:
    """Documents of 2,048 tokens and a window of 512: 2,048 x 512 - 512 x 511 / 2 pairs, 448 keys a query; a document
    that is no longer than the window is met whole."""
    forward = kernels(2048, model={"window": 512})[0]
    assert (forward.shape[3], forward.shape[4], forward.causal) == (8192, round(512 - 512 * 511 / 2 / 2048), False)
    assert forward.shape[4] == 448
    assert kernels(512, model={"window": 512}) == kernels(512)
    chunk = kernels(2048, model={"window": 512, "chunked_window": True})[0]
    assert chunk.shape[4] == round(513 / 2)  # four chunks of 512 a document


def test_a_window_behind_gathered_keys_is_met_whole() -> None:
    """Context ranks of a window together compute what one would, however keys come."""
    def flops(**parallel: Any) -> float:
        return sum(k.flops for k in kernels(model={"window": 1024}, parallel=parallel))

    whole = flops()
    assert 4 * flops(context=4, context_exchange="all-gather") == whole
    assert 4 * flops(context=4) == pytest.approx(whole, rel=2e-3)  # whole keys a step


def test_a_mask_computes_all_pairs_and_counts_the_documents() -> None:
    """PyTorch's call has no word for documents: a mask costs it its flash kernel."""
    hugging = {"framework": "pytorch", "modules": "transformers", "year": 2025}
    forward = kernels(512, attention="sdpa", software=hugging)[0]
    assert forward.kernel == "efficient" and not forward.causal
    assert forward.shape[0] == 1 and forward.shape[3:5] == (8192, 8192)
    assert forward.flops == kernels(512, software=hugging)[0].flops
    assert forward.bytes > 8192 * 8192 * 2 * HEADS  # the mask is read for every head


def test_spelled_out_attention_computes_all_pairs() -> None:
    assert built(512, attention="eager").forward_flops == built(attention="eager").forward_flops


def test_memory_keeps_a_mask_where_one_is_made_and_nothing_else() -> None:
    def kept(document: Any, attention: str) -> float:
        made = built(document, attention=attention, software={"framework": "pytorch", "modules": "transformers"})
        return sum(t.elements * DTYPE_BYTES[t.dtype]
                   for layer in made.stack for op in layer.operators for t in op.saved)

    assert kept(512, "flash") == kept(None, "flash")
    assert kept(512, "sdpa") == kept(None, "sdpa") + 2 * 8192**2


def test_backward_has_room_for_a_block_of_every_document() -> None:
    """The fp32 sums of the queries' gradient: 128 rows more for each of 64 documents, which are as many as tokens."""
    def highest(document: Any) -> int:
        of = style(document, software={"framework": "pytorch", "modules": "plain", "year": 2025})
        run, boundary = Run("", False, True), Boundary()
        query, key, value = (run.tensor(of.tokens * HIDDEN, "bf16", boundary) for _ in range(3))
        out = attended(run, of, query, key, value, "none", variables=[])
        assert out.sink is not None
        run.memory.mark()
        out.sink.receive(run, run.new(of.tokens * HIDDEN, "bf16"))
        boundary.gradient = run.new(1, "fp32")  # gradients are not this test's
        run.backward()
        return run.memory.top

    assert highest(128) - highest(None) == 4 * 64 * 128 * HIDDEN


def test_a_fixed_order_deals_parts_of_documents() -> None:
    """132 SMs over one sequence's 4 heads are 33 parts of each; over sixteen documents' 64 heads three."""
    deterministic = {"framework": "pytorch", "deterministic": True}
    assert style(software=deterministic).gradient_parts == 33
    assert style(512, software=deterministic).gradient_parts == 3


def test_pieces_are_of_the_slice() -> None:
    one = style(512, batch=2)
    assert (one.pieces, replace(one, document=0.0).pieces) == (32, 2)
    assert style({"mean": 8000, "spread": 0.1}, batch=2).pieces == 2  # never fewer than sequences
