"""Lines of the terminal report about the cluster's troubles and about the whole run (budget)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from sim.report.lengths import length, never, time
from sim.report.numbers.budget import BudgetResult
from sim.report.numbers.troubles import ALL
from sim.report.result import has_tokens
from sim.report.units import figure

if TYPE_CHECKING:
    from sim.report.result import Result

#: Published runs of weeks whose layout is known (OPT, BLOOM, GPT-NeoX, Pythia, StarCoder, DeepSeek-V2 and V3, Skywork:
#: reports/runs.md), and by how much their average step was longer than predicted, percent. A test holds them to it.
LONGER = (8, -5, 19)
#: Steps that differ by less, relative to one another, are as long: sums of doubles in another order.
_SAME = 1e-6
#: Shares of a run below which one figure is as good as another.
_LEAST = 1e-5
_LEAST_KEPT = 1e-3
#: Shares that two digits would round to all of a run, as 1e+02.
_ALL = 0.995


def trouble_lines(result: Result) -> list[Text]:
    """What each trouble of the cluster costs, the dearest first."""
    if not result.troubles:
        return []
    lines = [Text(), Text("trouble", style="bold")]
    for one in result.troubles:
        cost = _percent(one.slowdown) if abs(one.slowdown - 1) > _SAME else "as long"
        usual = ", with what chips of a kind usually differ by" if one.field == "cluster.clock_spread" else ""
        them = "them" if one.field == ALL else "it"
        lines.append(Text(f"{one.what}: step {cost}, {one.without_s:.4g} s without {them}{usual}"))
    return lines


def budget_lines(result: Result) -> list[Text]:
    """The whole run."""
    found = result.budget
    if found is None:
        return []
    lines = [Text(), Text("the whole run", style="bold")]
    of = "tokens" if has_tokens(result.scenario) else "samples"
    head = f"{_big(found.tokens)} {of} in {found.steps:,} step{'' if found.steps == 1 else 's'}"
    if why := never(found):
        return [*lines, Text(head), Text(why, style="bold red"), *_failures(found, result)]
    lines += [Text(head), Text(" · ".join(length(found)))]
    asked = result.scenario.budget
    if found.in_time is not None and asked is not None and asked.deadline is not None:
        lines.append(Text(f"the deadline of {time(asked.deadline)} is {'kept' if found.in_time else 'missed'}",
                          style="green" if found.in_time else "bold red"))
    if not result.memory.fits:
        lines.append(Text("this is what it would take if it fitted: as it stands the job runs out of memory",
                          style="bold red"))
    said = "steady steps: {} published runs of weeks took {} to {}% longer a step".format(*LONGER)
    lines.append(Text(said, style="dim"))
    return [*lines, *_failures(found, result)]


def _failures(found: BudgetResult, result: Result) -> list[Text]:
    if found.mtbf_s is None or found.checkpoint_every_s is None or found.checkpoint_s is None:
        return []
    lost = ", ".join(f"{name.replace('_', ' ')} {_share(share)}" for name, share in found.overhead.items())
    if (asked := result.scenario.budget) is not None and asked.restart is None:
        lost += "; no budget.restart is given: of a restart only the checkpoint's reading counts"
    return [Text(f"a failure every {time(found.mtbf_s)}: goodput {_kept(found.goodput)} with a checkpoint of "
                 f"{time(found.checkpoint_s)} every {time(found.checkpoint_every_s)}"),
            *([Text(f"lost: {lost}", style="dim")] if found.overhead else [])]


def _share(share: float) -> str:
    if 0 < share < _LEAST:
        return f"under {100 * _LEAST:g}%"
    return f"{100 * share:.{2 if share < _ALL else 3}g}%"


def _kept(share: float) -> str:
    return f"{100 * share:.1f}%" if share >= _LEAST_KEPT else "under 0.1%"


def _percent(ratio: float) -> str:
    return f"{figure(100 * (ratio - 1), '+')}%"


def _big(value: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value:,.0f}"
