"""What nanotron's gather of updated parameters holds beside them, against its own code.

Recorded by `tests/driver/nanotron_steps.py` with nanotron 0.4 and torch 2.3.1 on a device like an A100: highest
allocated MiB of a step whose peak is the gather (4 layers of 1,024, 8 heads, ffn 4,096, vocabulary 32,768, two
micro-batches of 1,024 tokens on four replicas).
"""

from __future__ import annotations

import pytest

from sim.memory.ledger import peak
from sim.parallel import lower
from sim.parallel.lower import Lowered
from sim.scenario import resolve


def lowered(tensor: int, hidden: int = 1024, layers: int = 4, heads: int = 8, ffn: int = 4096) -> Lowered:
    return lower(resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": 1, "gpus_per_node": 4 * tensor},
        "model": {"kind": "decoder", "positions": "rotary", "norm": "rmsnorm", "bias": False, "gated_mlp": True,
                  "dropout": False, "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": 8, "ffn": ffn,
                  "vocab": 32768, "tied_embeddings": False},
        "training": {"micro_batch": 1, "global_batch": 8, "sequence": 1024, "precision": "megatron-bf16",
                     "optimizer": "adamw", "recompute": "none", "attention": "flash"},
        "parallel": {"strategy": "zero1", "tensor": tensor, **({"sequence_parallel": True} if tensor > 1 else {})},
        "software": {"framework": "nanotron", "year": 2024, "versions": {"torch": "2.3"}}}))


@pytest.mark.parametrize(("tensor", "shape", "allocated_mib"), [
    (1, {}, 1741.3), (2, {}, 880.1), (1, {"hidden": 2048, "heads": 16, "ffn": 5632, "layers": 2}, 2955.8)])
def test_the_peak_is_nanotron_s(tensor: int, shape: dict[str, int], allocated_mib: float) -> None:
    found = peak(lowered(tensor, **shape).job.programs[0])
    assert found.where.phase == "optimizer"
    assert found.peak_allocated_bytes / 2**20 == pytest.approx(allocated_mib, rel=3e-3)


def test_a_list_goes_in_one_of_every_rank_comes_out_and_both_pass_a_flat_tensor() -> None:
    job = lowered(1)
    (section,) = (s for s in job.job.programs[0].sections if any(m.tensor == "flattened input" for m in s.memory))
    made = [m for m in section.memory if m.tensor.startswith("flattened") and m.size_bytes > 0]
    size = 2 * job.architecture.parameters  # bf16, on four replicas
    assert [m.size_bytes for m in made] == [size // 4] * 5 + [size]
