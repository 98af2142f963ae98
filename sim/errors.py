"""The one exception a user sees: a list of faults, each with its place and its mend. Floor 0."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: A part of a name tells which name is meant from so many letters on, and where so few names have it.
_TELLING, _FEW = 4, 3


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


def closest(name: str, allowed: Iterable[str]) -> list[str]:
    """The allowed name that differs in hyphens and the like alone (`llama2-7b`), else those that `name` is part of
    where they are few (`dgx-a100` or `dgxa100`: both its sizes), else the most alike, of those that begin with it if
    there are any (`gpt3`)."""
    given, known = name.lower(), list(allowed)
    same = [one for one in known if bare(one) == bare(given)]
    if same and bare(given):
        return same[:_FEW]
    longer = sorted((one for one in known if given in one.lower()), key=lambda one: (len(one), one))
    if len(given) >= _TELLING and 0 < len(longer) <= _FEW:
        return longer
    parts = sorted((one for one in known if bare(given) in bare(one)), key=lambda one: (len(one), one))
    if len(bare(given)) >= _TELLING and 0 < len(parts) <= _FEW:
        return parts
    begins = re.compile("[^a-z0-9]*".join(bare(given)) + r"(?![0-9])" if len(bare(given)) >= _TELLING else r"(?!)")
    begun = [one for one in known if begins.match(one.lower())]
    return difflib.get_close_matches(given, begun, n=1, cutoff=0.6) or difflib.get_close_matches(
        given, known, n=1, cutoff=0.6)


def bare(name: str) -> str:
    """A name's letters and digits."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def nearest(name: str, allowed: Iterable[str]) -> str:
    """A hint naming the closest allowed name or names, or "" when none is close."""
    quoted = [f"'{one}'" for one in closest(name, allowed)]
    if not quoted:
        return ""
    return f"did you mean {' or '.join([', '.join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)}?"
