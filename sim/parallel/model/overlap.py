"""Tokens that travel to their experts beside compute: of the shared experts, or of another micro-batch.

Sources: Megatron-LM `moe/shared_experts.py` (SharedExpertMLP: the first product and its activation run beside the
dispatch, the second product beside the combination; `--moe-shared-expert-overlap`); `models/common/
model_chunk_schedule_plan.py` (TransformerLayerSchedulePlan.run: a layer's forward and another micro-batch's backward of
a layer as one; `--overlap-moe-expert-parallel-comm`); DeepSeek-AI 2024 (arXiv 2412.19437), section 3.2.1 and figure 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, zip_longest

from sim.parallel.model.calls import Items
from sim.program import InlineCall
from sim.work import Kernel

#: An item of a segment and the host time of its launch, seconds.
Timed = tuple[Kernel | InlineCall, float]

def beside_shared(turned: Sequence[tuple[str, Items]]) -> Items:
    """A layer's operators as they run where the shared experts hide the all-to-alls.

    Args:
        turned: name and items of each operator, in the order of the direction; the shared experts stand between
            "combine" and "shared_add".
    """
    places = {name: place for place, (name, _) in enumerate(turned) if name in ("dispatch", "combine", "shared_add")}
    hides = len(places) == 3 and all(any(map(_travels, turned[places[name]][1])) for name in ("dispatch", "combine"))
    if not hides:
        return tuple(chain.from_iterable(items for _, items in turned))
    low, high = sorted((places["combine"], places["shared_add"]))
    shared = [items for _, items in turned[low + 1:high]]
    down = [name for name, _ in turned[low + 1:high]].index("down")  # the second product, and what is beside it
    cut = down if places["combine"] < places["shared_add"] else down + 1
    first, second = (tuple(chain.from_iterable(part)) for part in (shared[:cut], shared[cut:]))
    behind = dict(zip(sorted((places["dispatch"], places["combine"])), (first, second), strict=True))
    found: list[Kernel | InlineCall] = []
    for place, (_, items) in enumerate(turned):
        if low < place < high:
            continue
        if place not in behind:
            found += items
            continue
        timed = [(item, 0.0) for item in items]
        (begin, end), = _journeys(timed, None)
        hidden = _beside(timed[begin:end], [(k, 0.0) for k in behind[place]])
        found += [own for own, _ in (*timed[:begin], *hidden, *timed[end:])]
    return tuple(found)


def together(forward: Iterable[Sequence[Timed]], backward: Iterable[Sequence[Timed]],
             weights: Callable[[Kernel], bool], expert: int | None = None) -> list[Timed]:
    """Layers of one micro-batch's forward and of another's backward, two by two, each side's tokens travelling while
    the other side computes.

    Of a pair the compute stream runs attention forward, experts backward, experts forward, attention backward; beside
    them travel the gradients that come to the experts, tokens to the experts, gradients from the experts, tokens back.

    Args:
        forward, backward: items of each layer, in the order in which they run.
        weights: whether nothing of a backward pass waits for a kernel.
        expert: number of the communicator on which tokens travel, where there are all-to-alls on others too.
    """
    found: list[Timed] = []
    for ahead, back in zip_longest(forward, backward, fillvalue=()):
        first, dispatch, experts, combine, rest = _parts(ahead, expert, first=True)
        behind, combined, undone, dispatched, last = _parts(back, expert, first=False)
        loose = [(item, s) for item, s in undone if isinstance(item, Kernel) and weights(item)]
        bound = [(item, s) for item, s in undone if not (isinstance(item, Kernel) and weights(item))]
        found += [*behind, *_beside(combined, first), *_beside(dispatch, bound),
                  *_beside(dispatched, [*loose, *experts]), *_beside(combine, last), *rest]
    return found


def _parts(items: Sequence[Timed], expert: int | None, first: bool) -> tuple[Sequence[Timed], ...]:
    """A layer cut at its two journeys of tokens (in backward the last two: those before belong to a recomputation):
    what comes before, the first, what is between, the second, what comes behind. A dense layer is all in front of them
    in forward (`first`), all behind them in backward."""
    at = _journeys(items, expert)
    if len(at) < 2:
        return (items, (), (), (), ()) if first else ((), (), (), (), items)
    one, two = at[-2:]
    return items[:one[0]], items[slice(*one)], items[one[1]:two[0]], items[slice(*two)], items[two[1]:]


def _journeys(items: Sequence[Timed], expert: int | None) -> list[tuple[int, int]]:
    """Begin and end of each run of all-to-alls in which tokens travel, with their scores."""
    at = [i for i, (item, _) in enumerate(items) if _travels(item, expert)]
    begins = [i for i in at if i - 1 not in at]
    return [(i, next(j for j in range(i, len(items) + 1) if j not in at)) for i in begins]


def _travels(item: Kernel | InlineCall, expert: int | None = None) -> bool:
    """Whether tokens go to their experts or back, on communicator `expert` if there are other all-to-alls."""
    return (isinstance(item, InlineCall) and item.call.kind == "all_to_all"
            and expert in (None, item.call.communicator))


def _beside(calls: Sequence[Timed], behind: Sequence[Timed]) -> Sequence[Timed]:
    """A journey beside kernels: of its calls that of the tokens has them all, but for a last one beside the scores."""
    if len(calls) < 2:
        return _hidden(calls[0], behind) if calls else behind
    kernels = [(item, s) for item, s in behind if isinstance(item, Kernel)]
    most = max(range(len(calls)), key=lambda i: _size(calls[i]))
    found: list[Timed] = [(item, s) for item, s in behind if not isinstance(item, Kernel)]
    for i, call in enumerate(calls):
        found += _hidden(call, kernels[:-1] if i == most else kernels[-1:])
    return found


def _size(call: Timed) -> int:
    assert isinstance(call[0], InlineCall)
    return call[0].call.size_bytes


def _hidden(call: Timed, behind: Sequence[Timed]) -> list[Timed]:
    """A collective beside kernels. Collectives among these (of tensor ranks) hide nothing: they come first."""
    inline, launch_s = call
    assert isinstance(inline, InlineCall)
    kernels = [(item, s) for item, s in behind if isinstance(item, Kernel)]
    others = [(item, s) for item, s in behind if not isinstance(item, Kernel)]
    merged = inline._replace(beside=(*inline.beside, *(kernel for kernel, _ in kernels)))
    return [*others, (merged, launch_s + sum(s for _, s in kernels))]
