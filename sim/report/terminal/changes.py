"""What would make a job fit, as the terminal tells it. Knows rich."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from sim.report.advice.combined import DEAR
from sim.report.advice.trials import Change
from sim.report.units import size
from sim.scenario.change import said

#: Changes listed for a job that does not fit.
_CHANGES = 5
#: Of them, how many on more GPUs stand beside those on as many.
_ON_MORE = 2
#: Characters of options on a line, the least a terminal has less the indent.
_OPTIONS_WIDTH, _INDENT = 76, 4
_SEARCHES = ("'drystep size' searches whole layouts", "'drystep size' searches ways to serve")
#: What is said of a job that fits where nothing is free (`Change.filled`; "" = tensors take all to the last byte).
_FILLED = {"": "to the last byte", "short": "only just (the allocator runs short)",
           "cache": "the allocator's cache takes what is left", "pages": "unified memory takes what is left"}


def changes_lines(changes: Sequence[Change], most: int = _CHANGES, request: bool = False,
                  width: int = 80) -> list[Any]:
    """What would make a job fit that does not, cheapest first; else what comes closest. What leaves no memory free is
    not told behind a cheaper change that does, of which the cheapest is always told.

    Args:
        request: whether it is one of inference.
        width: of the terminal; an option that is wider is left whole, for it is there to be copied.
    """
    fitting = [change for change in changes if change.fits]
    search = _SEARCHES[request]
    if not fitting:
        return [Text(f"nothing that was tried makes it fit, neither alone nor up to three at once; closest alone is "
                     f"{c.what}, {_still_lacking(c)} ({search})")
                for c in changes[:1]]
    here, more = (_telling([c for c in fitting if c.more_gpus == wanted]) for wanted in (False, True))
    shown = _first(here, most - min(len(more), _ON_MORE))
    lines = [Text(_head([c for c in fitting if not c.more_gpus]), style="bold")] if here else []
    for c in shown:
        lines += _change_lines(c, request, width)
    if more:
        lines.append(Text("on more GPUs it would fit with" if here else
                          "nothing that was tried makes it fit on as many GPUs; on more it would with", style="bold"))
    shown_more = _first(more, most - len(shown))
    for c in shown_more:
        lines += _change_lines(c, request, width)
    rest = len(fitting) - len(shown) - len(shown_more)
    below = [f"  and {rest} more, dearer ones or such that leave nothing free (--json has all)"] if rest > 0 else []
    below += [f"  {search}"] if min(c.gpu_time or 1.0 for c in fitting) > DEAR else []
    return [*lines, *(Text(line, style="dim") for line in below)]


def _telling(fitting: Sequence[Change]) -> list[Change]:
    """Without those that leave nothing free though a cheaper one does."""
    roomy = next((place for place, c in enumerate(fitting) if c.roomy), len(fitting))
    return [c for place, c in enumerate(fitting) if c.roomy or place < roomy]


def _first(fitting: Sequence[Change], most: int) -> list[Change]:
    """The first few, the last of them the cheapest with room where no other has."""
    shown = list(fitting[:most])
    roomy = next((c for c in fitting if c.roomy), None)
    return shown if roomy is None or roomy in shown or not shown else [*shown[:-1], roomy]


def _head(here: Sequence[Change]) -> str:
    counts = sorted({change.count for change in here})
    if counts[0] == 1:
        return "it would fit with"
    many = " or ".join({2: "two", 3: "three"}[count] for count in counts)
    return f"no single change makes it fit; {many} at once would"


def _change_lines(c: Change, request: bool, width: int) -> list[Any]:
    options = _options(c.set, min(_OPTIONS_WIDTH, width - _INDENT))
    return [Text(f"  {c.what}: {_room(c)}, {_cost(c, request)}"),
            *(Text(" " * _INDENT + line, style="dim", no_wrap=True, overflow="ignore") for line in options)]


def _room(c: Change) -> str:
    """What a change leaves free, or what takes the rest."""
    if c.headroom_bytes > 0:
        return f"{size(c.headroom_bytes)} free" + (" (the allocator may run short)" if c.filled == "short" else "")
    return _FILLED[c.filled]


def _options(sets: Mapping[str, Any], width: int) -> list[str]:
    """The command line's options for a change, as few lines as hold them; a line ends where an option does."""
    lines = [""]
    for text in said(sets):
        option = f"--set {shlex.quote(text)}"
        if lines[-1] and len(lines[-1]) + len(option) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {option}".strip()
    return lines


def _still_lacking(change: Change) -> str:
    if change.missing_bytes:
        return f"{size(change.missing_bytes)} too much"
    return f"with which the host of a node lacks {size(change.host_missing_bytes)}"


def _cost(change: Change, request: bool) -> str:
    """Time of a step or request with a change against without it, and what it comes to in GPU time where that is
    another: on another number of GPUs, or with fewer sequences in a request."""
    slowdown, gpu_time = change.slowdown or 1.0, change.gpu_time or 1.0
    what, of = ("request", " of a token") if request else ("step", "")
    more = f", GPU time{of} {100 * (gpu_time - 1):+.0f}%" if abs(gpu_time / slowdown - 1) > 1e-9 else ""
    return f"{what} {100 * (slowdown - 1):+.0f}%{more}"
