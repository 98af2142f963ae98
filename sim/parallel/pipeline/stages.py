"""Which layers of the stack each chunk of the pipeline holds.

The embedding belongs to the first chunk and the head to the last. Blocks are split as given, or evenly, where embedding
and head can be counted as so many blocks (Megatron-LM `--account-for-embedding-in-pipeline-split`; Llama 3, arXiv
2407.21783, section 3.3.2: 126 blocks on 128 slots).
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.model.architecture import Architecture


def blocks_per_chunk(blocks: int, pipeline: int, virtual: int, split: Sequence[int] | None, embedding_slots: int = 0,
                     head_slots: int = 0) -> list[list[int]]:
    """Blocks of every chunk, by pipeline rank, for chunks laid out round robin: shape (pipeline, virtual).

    Args:
        split: blocks per pipeline rank; its chunks are filled as evenly as possible, earlier chunks first.
        embedding_slots, head_slots: blocks' worth of work that count for embedding and head in an even split.
    """
    if split is not None:
        return [_even(of_rank, virtual) for of_rank in split]
    chunks = pipeline * virtual
    slots = _even(blocks + embedding_slots + head_slots, chunks)
    slots[0] -= embedding_slots
    slots[-1] -= head_slots
    for i, j in ((0, 1), (-1, -2)):  # more slots than a chunk has: its neighbours take the rest
        while slots[i] < 0:
            slots[i], slots[j] = slots[i] + 1, slots[j] - 1
    return [[slots[chunk * pipeline + rank] for chunk in range(virtual)] for rank in range(pipeline)]


def positions(architecture: Architecture, counts: Sequence[Sequence[int]],
              placement: Sequence[Sequence[int]]) -> list[list[range]]:
    """Positions of the stack that each chunk of each rank holds.

    Args:
        counts: blocks of each chunk of each rank.
        placement: for each rank the number of its chunks' stages along the model.
    """
    stages = {stage: counts[rank][chunk] for rank, own in enumerate(placement) for chunk, stage in enumerate(own)}
    last = len(stages) - 1
    begins, at = {}, 0
    for stage in range(len(stages)):
        begins[stage] = at
        at += stages[stage] + (stage == 0) + (stage == last)
    if at != len(architecture.stack):
        raise ValueError(f"chunks hold {at} layers of {len(architecture.stack)}")
    begins[last + 1] = at
    return [[range(begins[stage], begins[stage + 1]) for stage in own] for own in placement]


def _even(count: int, parts: int) -> list[int]:
    """`count` split into `parts`, the earlier ones larger by one."""
    return [count // parts + (i < count % parts) for i in range(parts)]
