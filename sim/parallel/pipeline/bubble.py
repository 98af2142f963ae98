"""Closed forms of pipeline schedules with stages that are all alike and transfers that take no time.

In all of them `costs` are of one micro-batch in all chunks of a rank: p ranks, v chunks, m micro-batches, f, b and w.
"""

from __future__ import annotations

from sim.parallel.pipeline.actions import UNIFORM, Costs, check


def bubble_time(schedule: str, pipeline: int, virtual: int, micro_batches: int, costs: Costs = UNIFORM) -> float:
    """Time a rank is idle in a step.

    It belongs to the rank that is idle longest between its own first and last action, as ranks slide into the next
    step; for gpipe, 1f1b and interleaved that is also what a step takes longer than the work.

    * gpipe, 1f1b: (p - 1)(f + b + w); interleaved: 1/v of it (Narayanan et al. 2021, arXiv 2104.04473, section 2.2);
    * zb-h1: (p - 1)(f + b - w), zb-h2: (p - 1)(f + b - 2w) (Qi et al. 2023, arXiv 2401.10241, section 2). With m
      micro-batches there are m - 1 W to fill with: (p - 1)(f + b) - min(m - 1, p - 1) w, the paper's appendix H for
      m <= p;
    * zb-v: as zb-h2, derived for f = b = w, where it is 0 from 2p - 1 micro-batches on;
    * dualpipe: (p/2 - 1)(f + b - w) if forward and backward that run together take their times one after the other and
      each passes its result on as soon as it has it. For f = b = w it is half of what DeepSeek-V3 (arXiv 2412.19437,
      table 2) has: there neither is done before both are (`bubble_together`);
    * zb-1p, zb-2p: those of zb-h1 and zb-h2, which the search does not fall behind.

    Raises:
        UserError: as `check`.
    """
    check(schedule, pipeline, virtual, micro_batches)
    f, b, w, _ = costs
    behind = pipeline - 1
    if schedule in ("gpipe", "1f1b", "interleaved"):
        return behind * (f + b + w) / virtual
    if schedule == "dualpipe":
        return max(0.0, (pipeline // 2 - 1) * (f + b - w))
    fillers = behind if schedule in ("zb-h1", "zb-1p") else 2 * behind
    return max(0.0, behind * (f + b) - min(micro_batches - 1, fillers) * w)


def bubble_together(pipeline: int, costs: Costs = UNIFORM) -> float:
    """DualPipe's bubble as its authors count it: (p/2 - 1)(F&B + B - 3W), B a whole backward, F&B as long as both.

    Source: DeepSeek-V3, arXiv 2412.19437, table 2.
    """
    whole = costs.backward + costs.weight
    return (pipeline // 2 - 1) * (costs.forward + whole + whole - 3 * costs.weight)


def bubble_fraction(schedule: str, pipeline: int, virtual: int, micro_batches: int, costs: Costs = UNIFORM) -> float:
    """Share of a step in which a rank is idle, 0 to 1: (p - 1)/(m + p - 1) for 1f1b.

    Raises:
        UserError: as `check`.
    """
    idle = bubble_time(schedule, pipeline, virtual, micro_batches, costs)
    work = micro_batches * (costs.forward + costs.backward + costs.weight)
    return idle / (idle + work) if work else 0.0


def activations(schedule: str, pipeline: int, virtual: int, micro_batches: int, rank: int,
                kept_for_weights: float = 1.0) -> float:
    """Most activations a rank holds at once, in micro-batches of one chunk.

    Exact for gpipe, 1f1b, interleaved, zb-h1 and zb-h2; for the others the limit they keep to.

    * 1f1b: min(m, p - rank) (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.3);
    * interleaved: one more than the warm-up, 2(p - rank - 1) + (v - 1)p + 1; all m·v where m = p;
    * zb-h1, zb-h2: the warm-up, and what the W that are put off keep: p and 2p - 1 on every rank if W keep all;
    * zb-1p, zb-2p: p and 2p; zb-v: 2p chunks of half the size, 1F1B's; dualpipe: p + 1 (DeepSeek-V3, table 2).

    Args:
        kept_for_weights: share of a micro-batch's activations that stays between "B" and "W".

    Raises:
        UserError: as `check`.
    """
    check(schedule, pipeline, virtual, micro_batches)
    behind = pipeline - 1 - rank
    if schedule == "gpipe":
        return micro_batches
    if virtual > 1 and schedule == "interleaved" and micro_batches == pipeline:
        return micro_batches * virtual
    if schedule in ("1f1b", "interleaved"):
        warm_up = behind if virtual == 1 else 2 * behind + (virtual - 1) * pipeline
        return min(micro_batches * virtual, warm_up + 1)
    if schedule in ("zb-h1", "zb-h2"):
        times = 1 if schedule == "zb-h1" else 2
        whole = min(micro_batches, times * behind + 1)
        return whole + kept_for_weights * min(times * rank, micro_batches - whole)
    most = {"zb-1p": pipeline, "zb-2p": 2 * pipeline, "zb-v": 2 * pipeline, "dualpipe": pipeline + 1}[schedule]
    return min(micro_batches * virtual, most) if schedule != "dualpipe" else most
