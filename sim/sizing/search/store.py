"""Results of a search in one SQLite file, written as they come: a killed search loses nothing that was finished.

Tables:

- `meta(key text primary key, value text)`: `search`: the scenarios of the clusters searched, as JSON; `drystep`: the
  version that wrote the file, whose figures another may not go on from.
- `runs`: one row per simulated configuration, in the order in which they were finished:
    - `key text primary key`: 12 digits of the SHA-256 of the cluster's scenario, a blank, and the dotted fields of the
      configuration as canonical JSON;
    - `gpus integer`; `outcome text`: ok, refused or fault; `reason text`: why not, else empty;
    - `step_time_s real`: null where there is none: what does not fit is not simulated; `fits integer`: 0 or 1;
    - `device_used_bytes integer`: of what does not fit, without what the allocator's blocks would waste;
    - `step_energy_j real`: of all GPUs' boards over a step, joules; null where there is no step;
    - `prompt_time_s real`, `time_per_token_s real`: of a request; 0 in training, null where there is no step.

Which rows there are, and what they say, does not depend on the workers; only their order does. Write-ahead logging,
one transaction per configuration, on disk before the next (https://sqlite.org/wal.html).
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sim import __version__
from sim.errors import Fault, UserError


@dataclass(frozen=True, slots=True)
class Outcome:
    """One simulated configuration.

    Attributes:
        key: cluster and fields as canonical JSON: the same configuration has the same key in every search.
        gpus, step_time_s (inf where there is none), fits, device_used_bytes: see result.md; step_energy_j: of all GPUs'
            boards, joules, inf where there is no step.
        prompt_time_s, time_per_token_s: of a request, see result.md; inf where there is none, 0 in training.
        outcome: ok, refused (by a rule of a technique) or fault (of ours); reason: why not.
    """

    key: str
    gpus: int
    outcome: str
    step_time_s: float
    fits: bool
    device_used_bytes: int
    step_energy_j: float
    reason: str = ""
    prompt_time_s: float = 0.0
    time_per_token_s: float = 0.0


_SCHEMA = """
create table if not exists meta(key text primary key, value text);
create table if not exists runs(key text primary key, gpus integer, outcome text, step_time_s real, fits integer,
                                device_used_bytes integer, step_energy_j real, reason text,
                                prompt_time_s real, time_per_token_s real);
"""
_COLUMNS = tuple(f.name for f in fields(Outcome))
#: What a file is marked with: the version, and the columns it has.
_WRITER = f"{__version__} {','.join(_COLUMNS)}"


class Store:
    """Outcomes by key, in memory and, with a path, in a file.

    Args:
        path: the SQLite file, None = memory only.
        of: what is searched; a file of something else is refused.
        resume: continue a file that is there.

    Raises:
        UserError: the file is there and `resume` is false, or it holds another search, or is no such file.
    """

    def __init__(self, path: Path | None, of: Mapping[str, Any], resume: bool = False) -> None:
        self.known: dict[str, Outcome] = {}
        self._file: sqlite3.Connection | None = None
        if path is None:
            return
        if path.exists() and not resume:
            raise UserError(Fault(f"{path} is there already", "--out", hint="add --resume to go on, or name another"))
        text = json.dumps(of, sort_keys=True)
        try:
            self._file = sqlite3.connect(path)
            self._file.execute("pragma journal_mode=wal")
            self._file.executescript(_SCHEMA)
            known = dict(self._file.execute("select key, value from meta").fetchall())
            if not known:
                with self._file:
                    self._file.executemany("insert into meta values(?, ?)", [("search", text), ("drystep", _WRITER)])
            elif known.get("drystep") != _WRITER:
                raise UserError(Fault(f"{path} was written by another version of drystep, whose figures may differ: it "
                                      "is not resumed", "--out", hint="name another file"))
            elif known.get("search") != text:
                raise UserError(Fault(f"{path} holds the results of another scenario", "--out", hint="name another"))
            for values in self._file.execute(f"select {', '.join(_COLUMNS)} from runs"):
                one: dict[str, Any] = dict(zip(_COLUMNS, values, strict=True))
                read: dict[str, Any] = {name: math.inf if value is None else value for name, value in one.items()}
                self.known[one["key"]] = Outcome(**{**read, "fits": bool(one["fits"])})
        except sqlite3.DatabaseError as error:
            raise UserError(Fault(f"{path} cannot be used: {error}", "--out", hint="name another")) from None

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """Keep outcomes, on disk before this returns.

        Raises:
            UserError: they cannot be written (the disk is full, say); what was kept before stays as it is.
        """
        if self._file is not None and outcomes:
            self._write(self._file, outcomes)
        self.known.update((one.key, one) for one in outcomes)

    def _write(self, file: sqlite3.Connection, outcomes: Sequence[Outcome]) -> None:
        rows = [[None if v == math.inf else v for v in asdict(one).values()] for one in outcomes]
        try:
            with file:
                file.executemany(f"insert or ignore into runs values({', '.join('?' * len(_COLUMNS))})", rows)
        except sqlite3.DatabaseError as error:
            raise UserError(Fault(f"results cannot be written: {error}", "--out",
                                  hint="what was written is kept: mend it, then go on with --resume")) from None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
