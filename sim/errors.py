"""The one exception a user sees: a list of faults, each with its place and its mend. Floor 0."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with the user's input.

    Attributes:
        message: what is wrong and what is allowed.
        field: dotted path, "" if none.
        file: path as the user gave it, "" for the command line.
        line: 1-based, 0 if unknown.
        hint: how to mend it, e.g. "did you mean 'sharding_factor'?".
    """

    message: str
    field: str = ""
    file: str = ""
    line: int = 0
    hint: str = ""

    def __str__(self) -> str:
        place = self.file + (f":{self.line}" if self.line else "")
        head = ": ".join(part for part in (place, self.field, self.message) if part)
        return f"{head} ({self.hint})" if self.hint else head


class UserError(Exception):
    """The user's input is wrong; the command line prints the faults and exits with 2."""

    def __init__(self, faults: Fault | Iterable[Fault]) -> None:
        self.faults: Sequence[Fault] = (faults,) if isinstance(faults, Fault) else tuple(faults)
        super().__init__("\n".join(str(f) for f in self.faults))


def nearest(name: str, allowed: Iterable[str]) -> str:
    """A hint naming the closest allowed name, or "" when none is close."""
    close = difflib.get_close_matches(name.lower(), list(allowed), n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else ""
