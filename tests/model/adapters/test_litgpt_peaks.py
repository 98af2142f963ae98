"""LitGPT's fine-tuning against its own modules and loop, run on fake CUDA tensors.

Peaks are of litgpt 0.2.0 (Gemma-2 and Llama 3: 0.4.13) under torch 2.13 with the shared oracle's tracker, the 4-bit
product as bitsandbytes 0.42.0 has it: the first micro-batch's for 2023, whose loop meets its longest sample first,
else that of one behind others. Gradients (2 bytes) and AdamW's states (4) of what is trained were added where that
micro-batch had none, since a step that is met again has them.
"""

from __future__ import annotations

from typing import Any

import pytest

from sim.memory.ledger import peak
from sim.parallel import lower
from sim.scenario import resolve

_LLAMA = {"norm": "rmsnorm", "bias": False, "gated_mlp": True}
_LLAMA2 = {**_LLAMA, "layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008, "vocab": 32000}
_LLAMA3 = {**_LLAMA2, "kv_heads": 8, "ffn": 14336, "vocab": 128256}
_SMALL = {**_LLAMA3, "layers": 16, "hidden": 2048, "ffn": 8192}
_MISTRAL = {**_LLAMA2, "kv_heads": 8, "ffn": 14336}
_GEMMA = {**_LLAMA, "layers": 18, "hidden": 2048, "heads": 8, "kv_heads": 1, "ffn": 16384, "vocab": 256000}
_GEMMA2 = {**_GEMMA, "layers": 26, "hidden": 2304, "kv_heads": 4, "ffn": 9216, "head_dim": 256, "block_norms": "both",
           "score_softcap": True, "logit_softcap": True}
_PHI = {"norm": "layernorm", "bias": True, "layers": 24, "hidden": 2048, "heads": 32, "vocab": 51200,
        "parallel_block": True, "rotary_share": 0.5}
_SOME, _ALL = ["query", "value"], ["query", "key", "value", "projection", "mlp", "head"]
#: cuBLAS's workspace, which the oracle has not.
_WORKSPACE = 17_040_384


def _peak(model: dict[str, Any], batch: int, sequence: int, base: str, rank: int, targets: list[str], year: int,
          precision: str = "pure-bf16") -> int:
    method = "qlora" if base == "nf4" else "lora"
    scenario = resolve({
        "name": "x", "cluster": {"topology": "single-a100-80g-sxm"},
        "model": {"kind": "decoder", "positions": "rotary", "dropout": False, "tied_embeddings": False, **model},
        "training": {"micro_batch": batch, "global_batch": 4 * batch, "sequence": sequence, "precision": precision,
                     "finetune": {"method": method, "rank": rank, "targets": targets, "base": base}},
        "software": {"framework": "pytorch", "year": year}})
    return peak(lower(scenario).job.programs[0]).peak_allocated_bytes - _WORKSPACE


@pytest.mark.parametrize(("case", "real", "within"), [
    ((_LLAMA2, 1, 1304, "nf4", 8, _SOME, 2023), 14.107e9, 0.003),
    ((_LLAMA2, 2, 512, "bf16", 32, _SOME, 2024), 19.734e9, 0.003),
    ((_LLAMA2, 2, 512, "nf4", 32, _SOME, 2024), 13.666e9, 0.003),
    ((_MISTRAL, 2, 512, "bf16", 32, _SOME, 2024), 20.630e9, 0.003),
    ((_SMALL, 2, 512, "nf4", 32, _SOME, 2024), 5.491e9, 0.005),
    ((_LLAMA3, 1, 512, "nf4", 32, _SOME, 2024), 12.446e9, 0.01),
    ((_GEMMA, 2, 512, "nf4", 16, _ALL, 2024), 11.651e9, 0.01),
    ((_GEMMA2, 2, 512, "bf16", 8, _ALL, 2024), 14.243e9, 0.02),
    ((_GEMMA2, 2, 512, "nf4", 16, _ALL, 2024), 13.458e9, 0.03),
    ((_PHI, 4, 1044, "bf16", 8, _SOME, 2023), 10.662e9, 0.012),
])
def test_a_peak_is_that_of_its_own_code(case: tuple[Any, ...], real: float, within: float) -> None:
    assert _peak(*case) == pytest.approx(real, rel=within)


def test_under_autocast_every_chunk_has_a_copy_of_the_frozen_head() -> None:
    """Autocast's cache has copies of what is trained only, and a product keeps its own: at a vocabulary of 51,200 and
    1,024 tokens eight copies of the head, a second half of them beside twice the tokens."""
    model = {**_LLAMA2, "layers": 2, "vocab": 51200}
    more = [_peak(model, 1, tokens, "fp32", 8, _SOME, 2023, "amp-bf16") for tokens in (1024, 2048)]
    head, tokens = 2 * 51200 * 4096, 1024
    logits = 2 * 4 * tokens * 51200
    assert more[1] - more[0] > 8 * head + logits
