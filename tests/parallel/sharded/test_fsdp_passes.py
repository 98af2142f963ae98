"""FSDP's own passes over gradients and shards, by hand: bytes per parameter in the sections of a step.

Where micro-steps add up whole gradients the passes were read off real PyTorch (torch 2.14, `fully_shard` on eight fake
processes, a dispatch mode around backward): `_to_copy` in the first where dtypes differ, `add_` tensor by tensor in all
later ones, `chunk_cat` of the sums in the last.
"""

from __future__ import annotations

from typing import Any

import pytest

from sim.parallel import lower
from sim.parallel.lower import Lowered
from sim.program import Kind
from sim.scenario import resolve


def lowered(year: int, reduce: str, every: bool, **parallel: Any) -> Lowered:
    precision = {"name": "fsdp-bf16", "reduce": reduce}
    return lower(resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": 1},
        "model": {"kind": "decoder", "layers": 2, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 8192,
                  "positions": "learned", "max_positions": 1024, "tied_embeddings": False},
        "training": {"micro_batch": 1, "global_batch": 24, "sequence": 1024, "precision": precision,
                     "optimizer": "adam"},
        "parallel": {"strategy": "fsdp", "reduce_every_micro_step": every, **parallel},
        "software": {"framework": "pytorch", "year": year}}))


def own(found: Lowered, name: str) -> list[tuple[float, int]]:
    """Bytes per parameter and launches of the kernels called `name`, micro-step by micro-step."""
    program = found.job.programs[0]
    sums = []
    for section, _ in program.schedule:
        part = program.sections[section]
        kernels = [program.kernels[k] for task, kind in enumerate(part.kind) if kind == Kind.KERNELS
                   for k in program.segments[part.payload[task]].kernels if program.kernels[k].variant == name]
        sums.append((round(sum(k.bytes for k in kernels) / found.architecture.parameters, 2),
                     sum(k.launches for k in kernels)))
    return sums[:-1]


@pytest.mark.parametrize(("reduce", "first", "later", "copied"), [("bf16", 0, 6, 4), ("fp32", 6, 10, 8)])
def test_whole_gradients_are_added_in_every_micro_step_and_the_sums_copied(reduce: str, first: int, later: int,
                                                                           copied: int) -> None:
    found = lowered(2026, reduce, False)
    launches = 29 if first else 0
    assert own(found, "accumulate") == [(first, launches), (later, 29), (later, 29)]
    assert own(found, "copy-in") == [(0, 0), (0, 0), (copied, 3)]


@pytest.mark.parametrize(("reduce", "copied"), [("bf16", 4), ("fp32", 6)])
def test_fresh_gradients_are_copied_into_the_buffer_of_their_reduction(reduce: str, copied: int) -> None:
    found = lowered(2026, reduce, True)
    assert own(found, "accumulate") == [(0, 0)] * 2
    assert own(found, "copy-in") == [(copied, 3)] * 2


def test_a_flat_gradient_is_added_to_the_one_before() -> None:
    """Views' gradients side by side (read, written), added (two reads, a write), and divided before the reduction: cat,
    add_ and div_ of FSDP 1 (torch 2.13 on fake CUDA tensors)."""
    assert [size for size, _ in own(lowered(2024, "bf16", False), "flatten gradient")] == [4, 10, 14]
    assert [size for size, _ in own(lowered(2024, "bf16", True), "flatten gradient")] == [8, 8]


def test_shards_are_cast_and_copied_in_front_of_every_gather() -> None:
    """fp32 to bf16 and into the gather's input, ten bytes; the blocks' twice, what is the root's once: an eighth of the
    parameters each."""
    found = lowered(2026, "bf16", True)
    blocks = sum(layer.numel for layer in found.architecture.stack if layer.kind == "block")
    gathered = (found.architecture.parameters + blocks) / found.architecture.parameters
    assert own(found, "shards to gather")[0] == (pytest.approx(10 / 8 * gathered, abs=0.01), 10)  # two each
