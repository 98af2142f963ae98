"""Hand-made schedules whose weight gradients ("W") fill what would be a bubble: ZB-H1, ZB-H2, ZB-V."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sim.parallel.pipeline.actions import Action


def handcrafted(pipeline: int, micro_batches: int, generous: bool) -> list[list[Action]]:
    """ZB-H1, and ZB-H2 if `generous`: shape (pipeline, 3 · micro-batches).

    Qi et al. 2023 (arXiv 2401.10241), sections 2.1 and 2.2. ZB-H1 has 1F1B's warm-up and ZB-H2 twice as much. Rank r
    puts off the W of its first r (or 2r) backwards, so that all ranks hold as many micro-batches as the first: p, or
    2p - 1.
    """
    forward, backward, weight = ([Action(kind, 0, micro) for micro in range(micro_batches)] for kind in "FBW")
    orders = []
    for rank in range(pipeline):
        ahead, late = (2 * (pipeline - 1 - rank), 2 * rank) if generous else (pipeline - 1 - rank, rank)
        actions = forward[:ahead]
        for micro, back in enumerate(backward):
            actions += forward[ahead + micro:ahead + micro + 1]
            actions.append(back)
            if micro >= late:
                actions.append(weight[micro - late])
        orders.append(actions + weight[max(0, micro_batches - late):])
    return orders


def v_shaped(pipeline: int, micro_batches: int) -> list[list[Action]]:
    """ZB-V: stages r and 2p - 1 - r on rank r, no bubble if F, B and W take the same time, 1F1B's memory.

    Qi et al. 2023 (arXiv 2401.10241), section 6, and 2024 (arXiv 2405.15362), as PyTorch writes it
    (`torch/distributed/pipelining/schedules.py`, ScheduleZBVZeroBubble): fewer micro-batches than 2p - 1 are the
    beginning of a longer schedule.
    """
    counted = max(2 * pipeline - 1, micro_batches)
    return [[action for action in _v_of_rank(pipeline, rank, counted) if action.micro < micro_batches]
            for rank in range(pipeline)]


def _v_of_rank(pipeline: int, rank: int, micro_batches: int) -> Sequence[Action]:
    actions: list[Action] = []
    counted = {(kind, chunk): 0 for kind in "FBW" for chunk in (0, 1)}

    def run(*steps: tuple[str, int]) -> None:
        for kind, chunk in steps:
            actions.append(Action(kind, chunk, counted[kind, chunk]))
            counted[kind, chunk] += 1

    for _ in range(2 * (pipeline - rank) - 1):
        run(("F", 0))
    for _ in range(rank):
        run(("F", 1), ("F", 0))
    for _ in range(pipeline - rank):
        run(("F", 1), ("B", 1), ("W", 1))
    while counted["F", 1] < counted["F", 0] or counted["F", 0] < micro_batches:
        if counted["F", 0] < micro_batches:
            run(("F", 0))
        run(("B", 0), ("W", 0), ("F", 1), ("B", 1), ("W", 1))
    for _ in range(rank):
        run(("B", 0), ("B", 1))
    for _ in range(pipeline - rank):
        run(("B", 0), ("W", 0))
    for chunk in (1, 0):
        while counted["W", chunk] < counted["B", chunk]:
            run(("W", chunk))
    return actions


def bidirectional(pipeline: int, micro_batches: int) -> list[list[Action]]:
    """DualPipe: half of the micro-batches flow up the ranks (chunk 0), half down (chunk 1).

    DeepSeek-V3 (arXiv 2412.19437), section 3.2.1 and figure 5; the eight steps are those of
    `github.com/deepseek-ai/DualPipe`, `dualpipe.py`, DualPipe.step. A backward whose weights' part is not put off is a
    "B" with its "W" behind it; a forward with the backward of the other direction behind it is run as one
    (`overlapped`).
    """
    return [list(_dual_of_rank(pipeline, rank, micro_batches // 2)) for rank in range(pipeline)]


def _dual_of_rank(pipeline: int, rank: int, micro_batches: int) -> Iterator[Action]:
    half = min(rank, pipeline - 1 - rank)
    turned = int(rank >= pipeline // 2)
    counted = {(kind, chunk): 0 for kind in "FB" for chunk in (0, 1)}
    late: list[Action] = []

    def next_of(kind: str, phase: int) -> Action:
        chunk = phase ^ turned
        counted[kind, chunk] += 1
        return Action(kind, chunk, counted[kind, chunk] - 1)

    def back(phase: int, put_off: bool = False) -> Iterator[Action]:
        action = next_of("B", phase)
        yield action
        if put_off:
            late.append(action._replace(kind="W"))
        else:
            yield action._replace(kind="W")

    away = pipeline // 2 - half - 1
    for _ in range(2 * away):
        yield next_of("F", 0)
    for _ in range(half + 1):
        yield next_of("F", 0)
        yield next_of("F", 1)
    for _ in range(away):
        yield from back(1, put_off=True)
        yield late.pop(0)
        yield next_of("F", 1)
    for _ in range(micro_batches - pipeline + half + 1):
        yield next_of("F", 0)
        yield from back(1)
        yield next_of("F", 1)
        yield from back(0)
    for _ in range(away):
        yield from back(1)
        yield next_of("F", 1)
        yield from back(0)
    put_off = False
    for i in range(half + 1):
        put_off = put_off or (i == (half + 1) // 2 and half % 2 == 1)
        yield from back(1, put_off)
        put_off = put_off or (i == (half + 1) // 2 and half % 2 == 0)
        yield from back(0, put_off)
    for _ in range(away):
        yield late.pop(0)
        yield from back(0, put_off=True)
    yield from late


def overlapped(actions: Sequence[Action]) -> list[int]:
    """Positions of the forwards of dualpipe that run together with the backward behind them.

    They belong to opposite directions; the backward's "W" follows it. The authors' code runs the first such pair of the
    two middle ranks apart.
    """
    return [i for i in range(len(actions) - 1)
            if actions[i].kind == "F" and actions[i + 1].kind == "B" and actions[i].chunk != actions[i + 1].chunk]
