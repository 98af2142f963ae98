"""What the order lists of a pipeline schedule say for certain: what every rank holds at once, and what it waits for.

Read once per schedule, number of ranks, chunks and micro-batches. Long schedules repeat themselves: what a rank holds
in the first forwards of a schedule it holds in every longer one too, because both begin alike, and how many actions
come before the first backward and behind the last one does not change (a test compares them).

The orders of zb-1p and zb-2p are searched for costs (`sim.parallel.pipeline.automatic`), so only what every way of
searching does is counted here: the first rank runs forwards until its memory is full or the first backward has come
back, which takes the forwards of all ranks and the backwards of all others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from sim.parallel.pipeline.actions import Action, batches_of, placement, places
from sim.parallel.pipeline.orders import order

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

#: Schedules whose order depends on costs, and how many micro-batches their first rank may hold, in pipelines.
SEARCHED = {"zb-1p": 1, "zb-2p": 2}
#: Micro-batches, in pipelines, from which on a schedule only repeats itself.
_REPEATS = 4


@dataclass(frozen=True)
class Facts:
    """Of one schedule; shapes in (ranks, chunks).

    Attributes:
        held: chunks whose activations a rank holds when a backward begins, and chunks that are kept for "W", where
            neither is less than in another such moment: shape (ranks, moments, 2 chunks).
        at_head: the same when the forward of the model's last chunk runs; zeros on other ranks.
        batches: micro-batches that run through each chunk.
        ahead: forwards of each chunk before a rank's first backward; `through`: those up to the one it belongs to.
        late: weights' gradients of each chunk behind its last backward.
        first, back, last: chunk of a rank's first forward, first backward and last backward.
        along: for each direction the chunks in the order of the model, rank * chunks + chunk: shape (directions, n).
        sends: forwards and backwards whose result goes to another rank, of every rank.
        ends: of every rank, forwards and backwards of each chunk from the first backward on that is its chunk's last:
            shape (ranks, 2, chunks).
        certain: whether `ahead`, `through` and `late` are those of the order, not just of no order at all.
    """

    held: Floats
    at_head: Floats
    batches: int
    ahead: Ints
    through: Ints
    late: Ints
    first: Ints
    back: Ints
    last: Ints
    along: Ints
    sends: Ints
    ends: Ints
    certain: bool = True


def facts(schedule: str, pipeline: int, virtual: int, micro_batches: int, backward: float = 1.0,
          all_first: bool = True) -> Facts:
    """Facts of a schedule; "" = one rank.

    Args:
        backward: time of a chunk's "B" in its forwards', which zb-1p and zb-2p go by.
        all_first: see `sim.parallel.pipeline.orders.order`.
    """
    if not schedule:
        return _alone(micro_batches)
    if schedule in SEARCHED:
        return _searched(schedule, pipeline, micro_batches, round(backward, 6))
    least = _REPEATS * pipeline
    few = micro_batches
    if schedule != "gpipe" and micro_batches > least:
        few = least + (micro_batches - least) % pipeline if schedule != "dualpipe" else least
    found = _listed(schedule, pipeline, virtual, few, all_first)
    return found if few == micro_batches else _longer(found, batches_of(schedule, micro_batches))


def _longer(found: Facts, batches: int) -> Facts:
    """The same schedule with more micro-batches."""
    fields = dict(found.__dict__)
    fields["sends"] = found.sends * batches // found.batches
    fields["batches"] = batches
    return Facts(**fields)


def _alone(micro_batches: int) -> Facts:
    """One rank that runs forward and backward in turn."""
    one, none, zero = np.ones((1, 1), dtype=np.int64), np.zeros((1, 1), dtype=np.int64), np.zeros(1, dtype=np.int64)
    held = np.array([[[1.0, 0.0]]])
    return Facts(held, held, micro_batches, one, one, none, zero, zero, zero, np.zeros((1, 1), dtype=np.int64), zero,
                 np.array([[[0], [1]]]))


@lru_cache(maxsize=4096)
def _searched(schedule: str, pipeline: int, micro_batches: int, backward: float) -> Facts:
    ranks = np.arange(pipeline)
    # the first backward comes to the first rank at the earliest after all forwards and the others' backwards; of the
    # hand-made orders that may be chosen instead, ZB-H1 runs p forwards before it and ZB-H2 2p - 1
    limit = SEARCHED[schedule] * pipeline
    sure = min(micro_batches, limit, pipeline if schedule == "zb-1p" else 2 * pipeline - 1,
               max(1, math.floor(pipeline + (pipeline - 1) * backward * (1 - 1e-6))))
    held = np.zeros((pipeline, 1, 2))
    held[:, 0, 0] = 1.0
    held[0, 0, 0] = sure
    at_head = np.zeros((pipeline, 1, 2))
    at_head[-1, 0, 0] = 1.0
    most = np.minimum(micro_batches, limit) * np.ones((pipeline, 1), dtype=np.int64)
    zero = np.zeros(pipeline, dtype=np.int64)
    sends = np.where((ranks == 0) | (ranks == pipeline - 1), micro_batches, 2 * micro_batches)
    ends = np.zeros((pipeline, 2, 1), dtype=np.int64)
    return Facts(held, at_head, micro_batches, most, np.ones((pipeline, 1), dtype=np.int64),
                 np.zeros((pipeline, 1), dtype=np.int64), zero, zero, zero, ranks[None, :], sends, ends, False)


@lru_cache(maxsize=4096)
def _listed(schedule: str, pipeline: int, virtual: int, micro_batches: int, all_first: bool) -> Facts:
    orders = order(schedule, pipeline, virtual, micro_batches, all_first=all_first)
    where = places(schedule, pipeline, virtual)
    chunks = len(where.stage[0])
    shape = (pipeline, chunks)
    ahead, through, late = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    first, back, last, sends = (np.zeros(pipeline, dtype=np.int64) for _ in range(4))
    ends = np.zeros((pipeline, 2, chunks), dtype=np.int64)
    held, heads = [], []
    for rank, actions in enumerate(orders):
        firsts = next(i for i, a in enumerate(actions) if a.kind == "B")
        lasts = max(i for i, a in enumerate(actions) if a.kind == "B")
        begun = actions[firsts]
        for a in actions[:firsts]:
            ahead[rank, a.chunk] += 1
        for a in actions[:1 + actions.index(Action("F", begun.chunk, begun.micro))]:
            through[rank, a.chunk] += 1
        for a in actions[lasts + 1:]:
            late[rank, a.chunk] += 1
        first[rank], back[rank], last[rank] = actions[0].chunk, begun.chunk, actions[lasts].chunk
        final = {a.chunk: i for i, a in enumerate(actions) if a.kind == "B"}
        for a in actions[min(final.values()):]:
            if a.kind != "W":
                ends[rank, int(a.kind == "B"), a.chunk] += 1
        moves = {"F": where.after[rank], "B": where.before[rank]}
        sends[rank] = sum(a.kind != "W" and (to := moves[a.kind][a.chunk]) is not None and to.rank != rank
                          for a in actions)
        ending = [c for c in range(chunks) if where.after[rank][c] is None]
        mine = _moments(actions, chunks, ending)
        held.append(mine[0])
        heads.append(mine[1])
    return Facts(_stacked(held), _stacked(heads), batches_of(schedule, micro_batches), ahead, through, late, first,
                 back, last, _along(schedule, pipeline, virtual), sends, ends)


def _moments(actions: Sequence[Action], chunks: int, ending: Sequence[int]) -> tuple[set[tuple[int, ...]],
                                                                                   set[tuple[int, ...]]]:
    """What is held when backwards begin, and when forwards of `ending` chunks run."""
    splits = any(a.kind == "W" for a in actions)
    now = [0] * (2 * chunks)
    backward: set[tuple[int, ...]] = set()
    head: set[tuple[int, ...]] = set()
    for kind, chunk, _ in actions:
        if kind == "F":
            now[chunk] += 1
            if chunk in ending:
                head.add(tuple(now))
        elif kind == "B":
            backward.add(tuple(now))
            now[chunk] -= 1
            now[chunks + chunk] += splits
        else:
            now[chunks + chunk] -= 1
    return backward, head


def _stacked(found: Sequence[set[tuple[int, ...]]]) -> Floats:
    """Moments that no other of the rank exceeds in everything, padded to as many for every rank."""
    tops: list[list[tuple[int, ...]]] = []
    for moments in found:
        if not moments:
            tops.append([])
            continue
        array = np.array(sorted(moments))
        over = (array[:, None, :] >= array[None, :, :]).all(axis=2).sum(axis=0)  # each is over itself, and all differ
        tops.append([tuple(row) for row in array[over == 1].tolist()])
    width = next((len(rows[0]) for rows in tops if rows), 2)
    most = max(1, max(map(len, tops)))
    return np.array([[*rows, *[rows[0] if rows else (0,) * width] * (most - len(rows))] for rows in tops],
                    dtype=np.float64)


def _along(schedule: str, pipeline: int, virtual: int) -> Ints:
    """Chunks in the order in which each direction passes them."""
    if schedule == "dualpipe":
        ranks = np.arange(pipeline)
        return np.stack((ranks * 2, ranks[::-1] * 2 + 1))
    stages = np.array(placement(schedule, pipeline, virtual))
    return np.argsort(stages.reshape(-1))[None, :]
