"""Why the best wins, in words: the runner-up term by term, and the best of each family."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sim.report.units import figure
from sim.sizing.search.why import Contrast, Family, Row, Why
from sim.sizing.words.compare import change_of, moved_lines, seconds_of, words

_GIB = 2.0**30


def why_lines(why: Why, tell: Callable[[Row], str], unit: Callable[[float], str]) -> Iterator[str]:
    """For a terminal: the runner-up term by term, then a line and the largest terms of each family.

    Args:
        tell: a row in words.
        unit: a value of the objective in words.
    """
    if (second := why.runner_up) is not None:
        named = "next layout" if why.between else "runner-up"
        yield f"why the best wins: what the {named} ({tell(second.row)}) has more or less of:"
        if why.between:
            yield (f"  (between them {len(why.between)} with the best's layout but other recomputation or chunks; of "
                   f"these the first: {tell(why.between[0])})")
        yield f"  {_behind(second)}"
        if priced := _priced(second):
            yield f"  {'price of a GPU-hour':42} {priced[0]:>11}   {priced[1]}, {_cost(second)}"
        yield from moved_lines(second.found, 1)
        yield f"  memory left free: {second.margin_bytes[0] / _GIB:.1f} GiB, {named} {_free(second)}"
        yield ""
    if why.families:
        yield "the best simulated layout of each family, held against the best (of the best's own family, the next):"
    for one in why.families:
        yield f"  {one.name:18} {_family(one, tell, unit)}"
        if (other := why.contrasts.get(one.name)) is not None:
            terms = "; ".join(f"{words(term)} {seconds_of(value)}" for term, value in other.found.moved[0][:3])
            price = f"price of a GPU-hour {priced[1]}, {_cost(other)}; " if (priced := _priced(other)) else ""
            yield f"  {'':18} {_behind(other)}: {price}{terms or 'no term moved'}; {_free(other)} left free"


def _behind(one: Contrast) -> str:
    winner, other = one.found.whole_s
    if abs(other - winner) < 1e-9 * winner:
        return "takes the same time"
    what = "" if one.found.served else "step "
    return f"{what}{change_of(one.found, other - winner)} ({100 * (other / winner - 1):+.1f}%)"


def _priced(one: Contrast) -> tuple[str, str] | None:
    """How far the price of a GPU-hour moved, and from what to what; None where it is one, or not known."""
    if one.prices is None or abs(one.prices[1] - one.prices[0]) < 1e-9 * max(one.prices):
        return None
    return f"{one.prices[1] - one.prices[0]:+.4g} USD", f"{one.prices[0]:.4g} -> {one.prices[1]:.4g} USD"


def _cost(one: Contrast) -> str:
    """What that comes to: cost is time by price."""
    if one.usd is None:
        return ""
    share = f" ({100 * (one.usd[1] / one.usd[0] - 1):+.1f}%)" if one.usd[0] else ""
    return f"cost {figure(one.usd[0])} -> {figure(one.usd[1])} USD{share}"


def _free(one: Contrast) -> str:
    return f"{one.margin_bytes[1] / _GIB:.1f} GiB"


def _family(one: Family, tell: Callable[[Row], str], unit: Callable[[float], str]) -> str:
    if one.best is not None:
        more = "" if one.settled or one.nearest is None else \
            f" (others not simulated{_below(one, unit, ', none below')})"
        return ("(has the best) next " if one.holds_best else "") + tell(one.best) + more
    if one.ruled_out == one.covered:
        return f"none simulated: all {one.covered:,} ruled out by memory, limits or rules"
    if one.holds_best:
        return "only the best was simulated" + _below(one, unit, ", none below")
    if one.simulated:
        return f"none of the {one.simulated:,} simulated fits" + _below(one, unit, "; of the others none is below")
    return f"none simulated of {one.covered:,}, {one.ruled_out:,} ruled out{_below(one, unit, ', none can be below')}"


def _below(one: Family, unit: Callable[[float], str], said: str) -> str:
    """The lowest bound of what was not simulated; 0 is that of rows without one."""
    if one.nearest is None:
        return ""
    return f"{said} {unit(one.nearest)}" if one.nearest > 0 else ", and not all were looked at"
