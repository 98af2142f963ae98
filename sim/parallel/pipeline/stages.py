"""Which layers of the stack each chunk of the pipeline holds.

The embedding belongs to the first chunk and the head to the last. Blocks are split as given, or evenly, where embedding
and head can be counted as so many blocks (Megatron-LM `--account-for-embedding-in-pipeline-split`; Llama 3, arXiv
2407.21783, section 3.3.2: 126 blocks on 128 slots).
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.model.architecture import Architecture
from sim.scenario import Scenario
from sim.software import Stack


def split_of(scenario: Scenario, stack: Stack, blocks: int, placement: Sequence[Sequence[int]]) -> list[int]:
    """Blocks of every stage along the model, as the scenario says or the stack does it.

    Args:
        placement: for each rank the stages of its chunks.
    """
    parallel, model = scenario.parallel, scenario.model
    slots = parallel.split_slots
    if (stack.pipeline_split == "cost" and parallel.split is None and len(placement[0]) == 1
            and not slots.embedding and not slots.head):
        block = 4 * model.hidden**2 + (3 if model.gated_mlp else 2) * model.hidden * model.ffn
        found = by_cost(blocks, len(placement), block, model.vocab * model.hidden)
        if found is not None:
            return found
    return blocks_per_stage(blocks, placement, parallel.split, slots.embedding, slots.head)


def by_cost(blocks: int, stages: int, block: int, head: int) -> list[int] | None:
    """Blocks of every stage where a stage takes blocks until the sum of all costs so far exceeds its share of the whole
    model's; None if the head would not come to the last stage.

    Source: nanotron models/base.py, build_model (embedding, norm and loss cost nothing).

    Args:
        block, head: what they cost, in any unit.
    """
    counts, stage, done = [0] * stages, 0, 0
    total = blocks * block + head
    for _ in range(blocks):
        counts[stage] += 1
        done += block
        if done * stages > total * (stage + 1) and stage < stages - 1:
            stage += 1
    return counts if stage == stages - 1 else None


def blocks_per_stage(blocks: int, placement: Sequence[Sequence[int]], split: Sequence[int] | None,
                     embedding_slots: int = 0, head_slots: int = 0) -> list[int]:
    """Blocks of every stage along the model.

    Args:
        placement: for each rank the stages of its chunks; a stage may be held twice (dualpipe).
        split: blocks per pipeline rank; its chunks are filled as evenly as possible, earlier chunks first. Where stages
            are held twice it is per stage.
        embedding_slots, head_slots: blocks' worth of work that count for embedding and head in an even split.
    """
    stages = 1 + max(stage for own in placement for stage in own)
    if split is not None:
        if stages == len(split):
            return list(split)
        found = [0] * stages
        for own, of_rank in zip(placement, split, strict=True):
            for stage, count in zip(own, _even(of_rank, len(own)), strict=True):
                found[stage] = count
        return found
    slots = _even(blocks + embedding_slots + head_slots, stages)
    slots[0] -= embedding_slots
    slots[-1] -= head_slots
    for end in (0, stages - 1):  # more slots than a stage has: those that have most take the rest, the nearest first
        while slots[end] < 0:
            fullest = max(range(stages), key=lambda stage: (slots[stage], -abs(stage - end)))
            slots[end], slots[fullest] = slots[end] + 1, slots[fullest] - 1
    if 0 in slots[1:-1] and blocks == stages - 2:  # the embedding and the head are stages of their own
        return [0, *[1] * blocks, 0]
    return slots


def positions(architecture: Architecture, counts: Sequence[int],
              placement: Sequence[Sequence[int]]) -> list[list[range]]:
    """Positions of the stack that each chunk of each rank holds.

    Args:
        counts: blocks of each stage.
        placement: for each rank the stages of its chunks.
    """
    last, begins = len(counts) - 1, [0]
    for stage, count in enumerate(counts):
        begins.append(begins[-1] + count + (stage == 0) + (stage == last))
    if begins[-1] != len(architecture.stack):
        raise ValueError(f"stages hold {begins[-1]} layers of {len(architecture.stack)}")
    return [[range(begins[stage], begins[stage + 1]) for stage in own] for own in placement]


def _even(count: int, parts: int) -> list[int]:
    """`count` split into `parts`, the earlier ones larger by one."""
    return [count // parts + (i < count % parts) for i in range(parts)]
