"""What outlives backward in QLoRA where the training loop holds its logits, and how a 4-bit weight is read."""

from __future__ import annotations

from typing import Any

import pytest

from sim.memory.ledger import peak
from sim.parallel import lower
from sim.scenario import resolve
from sim.software import stack_for

LAYERS, HIDDEN, FFN, VOCAB, TOKENS = 16, 1024, 4096, 2048, 4096
#: Inputs of qkv, projection, gate and up, down, in bf16; that of the head; fp32 logits.
OUTLIVING = 2 * TOKENS * (LAYERS * (3 * HIDDEN + FFN) + HIDDEN) + 4 * TOKENS * VOCAB


def highest(method: str = "qlora", base: str = "nf4", vocab: int = VOCAB, **software: Any) -> int:
    program = lower(resolve({
        "name": "x", "cluster": {"topology": "single-a100-80g-sxm"},
        "model": {"kind": "decoder", "positions": "rotary", "norm": "rmsnorm", "bias": False, "gated_mlp": True,
                  "layers": LAYERS, "hidden": HIDDEN, "heads": 8, "ffn": FFN, "vocab": vocab, "tied_embeddings": False},
        "training": {"micro_batch": 1, "global_batch": 1, "sequence": TOKENS, "precision": "pure-bf16",
                     "finetune": {"method": method, "rank": 8, "targets": ["query", "value"], "base": base}},
        "software": {"framework": "pytorch", "year": 2024, **software}})).job.programs[0]
    return peak(program).peak_allocated_bytes


def test_inputs_of_4_bit_layers_and_the_last_logits_are_held_until_the_next_forward_returns() -> None:
    """Against the loop of 2023, which meets its longest sample before there is a graph; the loss of so small a
    vocabulary adds less to the peak than is let go when the model returns."""
    versions = {"versions": {"torch": "2.3", "bitsandbytes": "0.42.0"}}
    more = highest(**versions) - highest(year=2023, **versions)
    logits = 4 * TOKENS * VOCAB
    assert OUTLIVING - 3 * logits < more <= OUTLIVING


@pytest.mark.parametrize("case", [
    {"versions": {"torch": "2.3", "bitsandbytes": "0.43.3"}}, {"modules": "transformers"}])
def test_nothing_outlives_backward_where_nodes_hold_saved_tensors_alone(case: dict[str, Any]) -> None:
    case = {"versions": {"torch": "2.3", "bitsandbytes": "0.42.0"}} | case
    more = highest(**case) - highest(**(case | {"year": 2023}))
    assert 0 <= more <= 4 * TOKENS * VOCAB  # the logits themselves at most


@pytest.mark.parametrize(("year", "per_logit"), [(2023, 8), (2024, 10)])
def test_bytes_of_a_logit_in_lora(year: int, per_logit: int) -> None:
    """The loss in chunks keeps fp32 logits and their log-softmax. Where the loop has the last logits still, more is
    held as the model returns: those, the new ones in bf16 and what they are cast to."""
    large, small = 65536, 32768
    versions = {"versions": {"torch": "2.3"}}
    more = (highest("lora", "bf16", large, year=year, **versions)
            - highest("lora", "bf16", small, year=year, **versions))
    tables = 2 * 2 * (large - small) * HIDDEN
    chunks = 2 * 4 * 128 * (large - small)
    assert more - tables == pytest.approx(per_logit * TOKENS * (large - small), abs=chunks)


def test_a_weight_is_read_through_fp16_unless_it_was_quantised_from_bf16() -> None:
    """bitsandbytes 0.43 keeps the dtype it is given; Fabric hands it fp16 whatever the release."""
    old, new = (stack_for(year=2024, versions={"bitsandbytes": release}, modules="transformers")
                for release in ("0.42.0", "0.43.0"))
    assert (old.quantised_through_half, new.quantised_through_half) == (True, False)
    assert stack_for(year=2024, versions={"bitsandbytes": "0.43.0"}).quantised_through_half
