"""Memory alone: what `drystep memory` reports of a scenario. Nothing is simulated, since memory follows the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sim.model import build
from sim.parallel import Lowered
from sim.parallel.lower import with_parallel
from sim.report.advice.largest import Largest
from sim.report.advice.trials import Change
from sim.report.numbers.memory import MemoryResult, fullest
from sim.report.thumb import Thumb, rules_of_thumb
from sim.report.units import size
from sim.scenario.dump import dump
from sim.scenario.fields.schema import Scenario


@dataclass(frozen=True, slots=True)
class StageMemory:
    """One class of ranks.

    Attributes:
        name: "stage 3" of a pipeline, else "every rank".
        rank: the first of them; ranks: how many they are.
        layers: what of the model they hold, by position.
    """

    name: str
    rank: int
    ranks: int
    layers: tuple[str, ...]
    memory: MemoryResult


@dataclass
class MemoryPlan:
    """Memory of a scenario, without its times.

    Attributes:
        gpu: name of the GPU.
        stages: every class of ranks, in order; `memory` is that of the fullest.
        searched: works out the largest sizes that fit; advised: what would make a job fit. Both on first use.
        set: the sweep point's dotted fields.
    """

    scenario: Scenario
    gpu: str
    lowered: Lowered
    stages: tuple[StageMemory, ...]
    searched: Callable[[], list[Largest]]
    advised: Callable[[], list[Change]]
    set: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        """One line, for notebooks."""
        used, held = size(self.memory.shown_bytes), size(self.memory.capacity_bytes)
        return (f"<MemoryPlan '{self.scenario.name}' on {self.gpu}: {used} of {held}"
                f"{'' if self.memory.fits else ', does not fit'}>")

    @cached_property
    def memory(self) -> MemoryResult:
        """Of the fullest rank."""
        return fullest([stage.memory for stage in self.stages])

    @property
    def fullest(self) -> StageMemory:
        """The class of ranks with the least headroom."""
        return next(stage for stage in self.stages if stage.memory is self.memory)

    @cached_property
    def parameters(self) -> int:
        """Of the whole model, frozen ones too."""
        architecture = self.lowered.architecture
        if self.lowered.serving is not None:  # whose architecture is what one tensor rank holds
            architecture = build(with_parallel(self.scenario, tensor=1), self.lowered.stack, 1)
        return architecture.parameters + architecture.frozen_parameters

    @cached_property
    def rules(self) -> list[Thumb]:
        """Rules of thumb beside the prediction."""
        return rules_of_thumb(self.scenario, self.parameters, self.memory)

    @cached_property
    def largest(self) -> list[Largest]:
        """The largest micro-batch and the longest sequence that fit."""
        return self.searched()

    @cached_property
    def changes(self) -> list[Change]:
        """What would make the job fit; nothing where it does."""
        return [] if self.memory.fits else self.advised()

    def to_json(self, searched: bool = True) -> dict[str, Any]:
        """The object `drystep memory --json` writes: `memory` as in result.md, and what stands beside it.

        Args:
            searched: whether the largest sizes and the changes are worked out for it.
        """
        sets = {"set": dict(self.set)} if self.set else {}
        found = {"largest": [one.to_json() for one in self.largest],
                 "changes": [change.to_json() for change in self.changes]} if searched else {}
        return {
            **sets, "scenario": dump(self.scenario), "gpu": self.gpu, "gpus": self.scenario.gpus,
            "parameters": self.parameters, "memory": self.memory.to_json(),
            "stages": [{"name": stage.name, "rank": stage.rank, "ranks": stage.ranks,
                        "layers": list(stage.layers), **_levels(stage.memory)}
                       for stage in self.stages],
            "rules_of_thumb": [rule.to_json() for rule in self.rules],
            **found, "warnings": self.memory.warnings,
        }


def _levels(memory: MemoryResult) -> dict[str, Any]:
    return {name: value for name, value in memory.to_json().items()
            if name not in ("stages", "complete", "host", "outside")}
