"""`compare`: runs side by side, and which term of the step moved by how much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sim.report.result import Result
from sim.scenario.dump import dump


@dataclass(frozen=True)
class Comparison:
    """Runs against the first of them.

    Attributes:
        names: of the runs.
        step_time_s, gpus: of each.
        terms: term of the breakdown to its seconds in each run.
        moved: for each run but the first, terms by how far they moved, the farthest first: (term, seconds).
        differs: field to its value in each run, where runs differ.
        scaling: throughput per GPU of each over the first's.
    """

    names: list[str]
    step_time_s: list[float]
    gpus: list[int]
    terms: dict[str, list[float]]
    moved: list[list[tuple[str, float]]]
    differs: dict[str, list[Any]]
    scaling: list[float]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"names": self.names, "step_time_s": self.step_time_s, "gpus": self.gpus, "terms_s": self.terms,
                "moved_s": [dict(row) for row in self.moved], "differs": self.differs, "scaling": self.scaling}


def compare(results: Sequence[Result]) -> Comparison:
    """Lay runs side by side; the first is what the others are held against."""
    flat = [dict(_terms(r.to_json()["breakdown_s"])) for r in results]
    names = list(dict.fromkeys(name for one in flat for name in one))
    terms = {name: [one.get(name, 0.0) for one in flat] for name in names}
    moved = []
    for i in range(1, len(results)):
        shifts = [(name, values[i] - values[0]) for name, values in terms.items()]
        moved.append(sorted((s for s in shifts if abs(s[1]) > 1e-12), key=lambda s: -abs(s[1])))
    fields = [dict(_leaves(dump(r.scenario))) for r in results]
    paths = list(dict.fromkeys(path for one in fields for path in one))
    differs = {path: [one.get(path) for one in fields] for path in paths
               if path != "name" and any(one.get(path) != fields[0].get(path) for one in fields)}
    first = results[0].tokens_per_second_per_gpu or results[0].step_time_s
    return Comparison([r.scenario.name for r in results], [r.step_time_s for r in results], [r.gpus for r in results],
                      terms, moved, differs, [(r.tokens_per_second_per_gpu or r.step_time_s) / first for r in results])


def _terms(value: Mapping[str, Any], head: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, part in value.items():
        path = f"{head}.{name}" if head else name
        found += _terms(part, path) if isinstance(part, Mapping) else [(path, float(part))]
    return found


def _leaves(value: Any, head: str = "") -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        return [(head, value)]
    return [leaf for name, part in value.items() for leaf in _leaves(part, f"{head}.{name}" if head else str(name))]
