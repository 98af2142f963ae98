"""A scenario changed as its user would change it: fields put on top of what was written, so that defaults which follow
from other fields follow them (gradients of FSDP are reduced in every micro-step, those of DDP are not)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sim.errors import UserError
from sim.scenario.dump import dump
from sim.scenario.fields.schema import Scenario
from sim.scenario.load import resolve

Sets = Mapping[str, Any]

#: Two ways to say a batch, of which a scenario has one.
_BATCH = ("training.micro_steps", "training.global_batch")


def said(sets: Sets) -> list[str]:
    """Changes as they are written behind `--set`."""
    return [f"{path}={_text(value)}" for path, value in sets.items()]


def _text(value: Any) -> str:
    return str(yaml.safe_dump(value, default_flow_style=True, width=10**6)).removesuffix("...\n").strip()


class Changed(NamedTuple):
    """A changed scenario and the fields that say so, on the command line as here."""

    scenario: Scenario
    sets: Sets


class Changing:
    """Changes of one scenario.

    Attributes:
        data: what its user wrote, or all of it where that is not known or no longer what the scenario says.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        given = scenario.given
        self.data, self._folder = dump(scenario), Path(".")
        if given is not None and _same(resolve(given.data, "", {}, given.folder), scenario):
            self.data, self._folder = dict(given.data), given.folder

    def wrote(self, path: str) -> bool:
        """Whether a field (dotted) was written."""
        here: Any = self.data
        for part in path.split("."):
            if not isinstance(here, Mapping) or here.get(part) is None:
                return False
            here = here[part]
        return True

    def __call__(self, sets: Sets) -> Changed:
        """The scenario with `sets` (dotted field -> value) on top. Its global batch stays, unless they say another:
        where micro-steps were written instead, the batch is said too.

        Raises:
            UserError: the change is not possible.
        """
        steps, batch = _BATCH
        if self.wrote(steps):
            sets = {**sets, steps: None, batch: sets.get(batch, self._scenario.training.global_batch)}
        return Changed(resolve(self.data, self._scenario.name, sets, self._folder), sets)

    def fewest(self, changed: Changed) -> Sets:
        """The fields of a change without those that follow from the others or are so already."""
        sets = dict(changed.sets)
        for paths in (_BATCH, *((path,) for path in changed.sets)):
            fewer = {name: value for name, value in sets.items() if name not in paths}
            try:
                if resolve(self.data, self._scenario.name, fewer, self._folder) == changed.scenario:
                    sets = fewer
            except UserError:  # impossible without it
                continue
        return sets


def _same(again: Scenario, scenario: Scenario) -> bool:
    return again == scenario.model_copy(update={"sweep": again.sweep, "expect": again.expect})
