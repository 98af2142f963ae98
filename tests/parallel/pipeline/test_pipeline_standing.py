"""What torch.distributed.pipelining keeps of all micro-batches, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sim.parallel import Lowered, lower
from sim.parallel.pipeline.orders import UNIFORM
from sim.parallel.pipeline.patterns import Habits, Schedule, rows
from sim.parallel.pipeline.standing import most_in_flight, standing
from sim.scenario import resolve

HIDDEN, TOKENS, VOCAB = 512, 2 * 128, 1024


def patterns(name: str, virtual: int, micro_batches: int, rank: int) -> Any:
    schedule = Schedule(name, 2, virtual, micro_batches, UNIFORM, 1.0, 0, False)
    return rows(schedule, Habits(False, False))[rank].patterns


def test_tensors_of_two_stages() -> None:
    """Four micro-batches. The first rank holds two at once: two outputs, and of four gradient buffers all but the one
    its layers count. The last one holds one: three inputs and three gradients of inputs beside it, four logits."""
    first, last = patterns("1f1b", 1, 4, 0), patterns("1f1b", 1, 4, 1)
    assert most_in_flight(first, {0}) == 2 and most_in_flight(last, {0}) == 1
    assert standing(first, 4, (), (0,), last=False) == (2 + 3, 0)
    assert standing(last, 4, (0,), (), last=True) == (3 + 3, 4)


def test_interleaved_chunks_have_buffers_of_their_own() -> None:
    """Rank 0 receives for its second chunk only and sends from both; of its chunks it holds five and two at once."""
    first = patterns("interleaved", 2, 4, 0)
    assert (most_in_flight(first, {0, 1}), most_in_flight(first, {1})) == (5, 2)
    assert standing(first, 4, (1,), (0, 1), last=False) == (2 * (4 - 2) + 2 * 4 - 1 + 5, 0)


def lowered(framework: str) -> Lowered:
    return lower(resolve({
        "name": "t", "cluster": {"topology": "dgx-h100", "gpus_per_node": 2},
        "model": {"kind": "decoder", "layers": 4, "hidden": HIDDEN, "heads": 8, "vocab": VOCAB, "positions": "rotary",
                  "tied_embeddings": False},
        "training": {"micro_batch": 2, "global_batch": 8, "sequence": 128, "precision": "pure-bf16"},
        "parallel": {"strategy": "none", "pipeline": 2}, "software": {"framework": framework, "year": 2025}}))


@pytest.mark.parametrize(("framework", "kept"), [("torchtitan", True), ("megatron", False)])
def test_every_rank_declares_its_own(framework: str, kept: bool) -> None:
    held = [{name: size for name, size, _ in program.resident if "all micro-batches" in name}
            for program in lowered(framework).job.programs]
    one, logits = 2 * TOKENS * HIDDEN, 2 * TOKENS * VOCAB
    wanted = [{"transfers of all micro-batches": 5 * one},
              {"transfers of all micro-batches": 6 * one, "outputs of all micro-batches": 4 * logits}]
    assert held == (wanted if kept else [{}, {}])
