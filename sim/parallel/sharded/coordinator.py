"""When DeepSpeed ZeRO-3 gathers a parameter, how far ahead, and when it lets it go: its parameter coordinator.

A micro-step is a trace of *uses*: one per direction of every sub-module. DeepSpeed records the trace once and then
decides by it, counting elements on the host, whatever the GPU is doing. The decisions are replayed here; nothing is
estimated. Two coordinators have existed:

* `streamed`, DeepSpeed 0.6 and later (`partitioned_param_coordinator.py`: `fetch_sub_module`, `release_sub_module`,
  `__params_to_release`): while fewer than the prefetch bucket's elements are on their way the next parameter of the
  trace is taken along, so that one parameter larger than the bucket is still fetched ahead.
* `blocking`, before 0.6 (`stage3.py`: `PrefetchCoordinator`, `PartitionedParameterCoordinator`): prefetching stops
  *before* the bucket would overflow, so that a parameter larger than the bucket is never fetched ahead.

Parameters below the persistence threshold are whole at all times and are not in the trace.

What is looked up in (embeddings) is not let go of by backward: a module's backward is over when a function around its
inputs runs, and inputs that need no gradient have none (`parameter_offload.py`, _post_backward_module_hook; before
0.10 in `stage3.py`). It stays until the optimizer steps, which lets everything go and counts it off what is there
after that count has been set to zero (`reset_step`, `release_and_reset_all`): `Kept`. A tied embedding that a module
around all others reads by itself is that module's external parameter, and it has that module's hooks to wait for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

#: A parameter of the trace and its elements.
Wanted = tuple[Hashable, int]


@dataclass(frozen=True, slots=True)
class Limits:
    """DeepSpeed's `config.py`, in elements.

    Attributes:
        prefetch: `stage3_prefetch_bucket_size`.
        live: `stage3_max_live_parameters`; nothing is fetched ahead beyond it.
        reuse: `stage3_max_reuse_distance`; a parameter that is used again within it stays.
    """

    prefetch: int = 50_000_000
    live: int = 1_000_000_000
    reuse: int = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Kept:
    """What the coordinator's count and its parameters were left as by what came before a micro-step.

    Attributes:
        counted_off: elements that were let go of after the count was set to zero.
        there: parameters that are whole and not counted.
        stay: parameters that backward does not let go of.
        lasting: those of them that forward does not let go of either.
    """

    counted_off: int = 0
    there: frozenset[Hashable] = frozenset()
    stay: frozenset[Hashable] = frozenset()
    lasting: frozenset[Hashable] = frozenset()


NOTHING_KEPT = Kept()


@dataclass(frozen=True, slots=True)
class Decision:
    """What the host does about one use, in this order.

    Attributes:
        fetch: parameters gathered now because the use needs them, in one call.
        ahead: parameters gathered for later uses, in one call.
        release: parameters dropped after the use.
        before, behind: what is gathered for later uses at modules that own nothing which is split, a call each: in
            front of everything else, and after the use.
    """

    fetch: tuple[Wanted, ...]
    ahead: tuple[Wanted, ...]
    release: tuple[Wanted, ...]
    before: tuple[tuple[Wanted, ...], ...] = ()
    behind: tuple[tuple[Wanted, ...], ...] = ()


def streamed(trace: Sequence[Sequence[Wanted]], limits: Limits, kept: Kept = NOTHING_KEPT) -> list[Decision]:
    """Decisions of the coordinator since 0.6 for every use of the trace."""
    queue = [(wanted, step) for step, use in enumerate(trace) for wanted in use]
    later = _Later(trace)
    place, live = 0, -kept.counted_off
    held: set[Hashable] = set(kept.there)
    seen: dict[Hashable, int] = {}  # the last use a parameter was fetched or passed over for
    decisions = []
    for step, use in enumerate(trace):
        fetch = tuple(w for w in use if w[0] not in held)
        held.update(name for name, _ in fetch)
        live += sum(numel for _, numel in fetch)
        unseen = len({name for name, _ in use if seen.get(name, -1) < step})
        for (name, _), used_at in queue[place:place + unseen]:
            seen[name] = max(seen.get(name, -1), used_at)
        place += unseen
        ahead: list[Wanted] = []
        coming, room = 0, min(limits.live - live, limits.prefetch)
        while place < len(queue) and coming < room:
            (name, numel), used_at = queue[place]
            place += 1
            seen[name] = max(seen.get(name, -1), used_at)
            if name not in held:
                held.add(name)
                ahead.append((name, numel))
                coming += numel
        live += coming
        release = tuple(w for w in use if seen.get(w[0], -1) <= step and not later.reused(step, w, limits.reuse)
                        and w[0] not in kept.lasting and not (w[0] in kept.stay and later.last(step, w)))
        held.difference_update(name for name, _ in release)
        live -= sum(numel for _, numel in release)
        decisions.append(Decision(fetch, tuple(ahead), release))
    return decisions


def met(trace: Sequence[Sequence[Wanted]], modules: Sequence[tuple[int, int]], limits: Limits,
        kept: Kept = NOTHING_KEPT) -> list[Decision]:
    """Decisions of the coordinator since 0.6 where hooks of other modules run between the uses of the trace: every
    module has them, and at each the coordinator looks how much it may still take along (`fetch_sub_module`).

    Args:
        modules: how many stand in front of what a use needs, and behind it.
    """
    decided = iter(streamed([one for use, (before, behind) in zip(trace, modules, strict=True)
                             for one in (*[()] * before, use, *[()] * behind)], limits, kept))
    found = []
    for before, behind in modules:
        early = [next(decided).ahead for _ in range(before)]
        own = next(decided)
        late = [next(decided).ahead for _ in range(behind)]
        found.append(replace(own, before=tuple(filter(None, early)), behind=tuple(filter(None, late))))
    return found


def blocking(trace: Sequence[Sequence[Wanted]], limits: Limits, kept: Kept = NOTHING_KEPT) -> list[Decision]:
    """Decisions of the coordinator before 0.6 for every use of the trace; what it keeps was not looked into."""
    live, later = 0, _Later(trace)
    held: set[Hashable] = set()
    decisions = []
    for step, use in enumerate(trace):
        fetch = tuple(w for w in use if w[0] not in held)
        held.update(name for name, _ in fetch)
        live += sum(numel for _, numel in fetch)
        ahead = _fitting(trace, step, held, limits.prefetch) if live < limits.live else ()
        held.update(name for name, _ in ahead)
        live += sum(numel for _, numel in ahead)
        numel_of_use = sum(numel for _, numel in use)
        release = tuple(w for w in use if not later.reused(step, w, limits.reuse - numel_of_use))
        held.difference_update(name for name, _ in release)
        live -= sum(numel for _, numel in release)
        decisions.append(Decision(fetch, ahead, release))
    return decisions


def _fitting(trace: Sequence[Sequence[Wanted]], step: int, held: set[Hashable], bucket: int) -> tuple[Wanted, ...]:
    """The next parameters of the trace that are not there, up to the first one that overflows the bucket."""
    found: dict[Hashable, int] = {}
    total = 0
    for use in trace[step + 1:]:
        for name, numel in use:
            if name not in held and name not in found:
                total += numel
                if total >= bucket:
                    return tuple(found.items())
                found[name] = numel
    return tuple(found.items())


class _Later:
    """Where each parameter of a trace is used, and how many elements uses hold together."""

    def __init__(self, trace: Sequence[Sequence[Wanted]]) -> None:
        self._before = [0, *accumulate(sum(numel for _, numel in use) for use in trace)]
        self._uses: dict[Hashable, list[int]] = {}
        for step, use in enumerate(trace):
            for name, _ in use:
                self._uses.setdefault(name, []).append(step)

    def last(self, step: int, wanted: Wanted) -> bool:
        """Whether a use is a parameter's last."""
        return self._uses[wanted[0]][-1] == step

    def reused(self, step: int, wanted: Wanted, distance: int) -> bool:
        """Whether a parameter is used again before `distance` elements of later uses have passed."""
        uses = self._uses[wanted[0]]
        at = bisect_right(uses, step)
        return at < len(uses) and self._before[uses[at]] - self._before[step + 1] < distance
