"""Warnings of several runs told together: once each, with the runs they are of."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: Runs named behind a warning; of more their number is told.
_NAMED = 3
#: Figures of a warning, by which runs may differ that are warned of the same. No digits of names: h100, fp8.
_FIGURE = re.compile(r"(?<![\w.-])\d[\d.,]*")


def together(runs: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Lines that tell the warnings of all runs, in the order in which they first come up. One that all runs have word
    for word stands by itself; of those that differ in figures alone the first run's is told.

    Args:
        runs: the name of each run and its warnings.
    """
    said: dict[str, dict[str, str]] = {}
    for name, warnings in runs:
        for text in warnings:
            said.setdefault(_FIGURE.sub("#", text), {}).setdefault(name, text)
    return [_line(of, len({name for name, _ in runs})) for of in said.values()]


def _line(said: dict[str, str], runs: int) -> str:
    """A warning by the runs that have it."""
    (first, text), *_ = said.items()
    if len(set(said.values())) > 1:
        others = len(said) - 1
        return f"{text} ({first}; like it, with {'figures of their own' if others > 1 else 'its own figures'}, " \
               f"{others} other{'s' * (others > 1)})"
    if len(said) == runs:
        return text
    left = len(said) - _NAMED
    more = "" if left < 1 else " and one more" if left == 1 else f" and {left} more"
    return f"{text} ({'; '.join([*said][:_NAMED])}{more})"
