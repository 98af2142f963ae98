"""Precisions as an axis of the search: each is a variant of a cluster's scenario, with tables and bounds of its own.

What the user did not write and a precision decides (the dtype of frozen weights, overlap of tensor ranks in 8 bits)
follows it. Names that stand for the same dtypes are one; what a cluster's GPUs or a technique have not is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sim.errors import Fault, UserError, nearest
from sim.parallel.support.check import check
from sim.scenario import Scenario
from sim.scenario.fields.precisions import PRECISIONS
from sim.sizing.space.base import alone, never_simulated
from sim.sizing.space.layouts import Choice, Space
from sim.sizing.space.variants import PRECISION
from sim.software import stack_of

OPTION = "--precision"


class Untried(NamedTuple):
    """A precision that is not tried: on which cluster, "" where on none for it is another by name; and why."""

    precision: str
    cluster: str
    why: str


def with_precisions(scenario: Scenario, topologies: Sequence[str | None],
                    choice: Choice) -> tuple[list[Scenario], list[Untried]]:
    """The scenario on one node of every topology (None: its own), in its own precision and in each of the choice's.

    Raises:
        UserError: a name is no precision, or one that no topology has; or the scenario is impossible on one. What no
            layout of it makes possible is left to be refused: its base alone is then returned.
    """
    if not choice.precision:
        return [alone(scenario, name, choice.gpus) for name in topologies], []
    _known(choice.precision)
    names = list(dict.fromkeys(choice.precision))
    found: list[Scenario] = []
    untried: list[Untried] = []
    refused: dict[str, Fault] = {}
    for topology in topologies:
        bases = {asked: _based(scenario, topology, choice, asked) for asked in (None, *names)}
        own, wrong = bases[None]
        if set.intersection(*(set(faults) for _, faults in bases.values())):  # whatever the precision
            if own is None:
                raise UserError(wrong)
            return [own], []
        same: dict[str, str] = {}
        for asked, (base, faults) in bases.items():
            name = asked or (scenario if base is None else base).training.precision.name
            if base is None or faults:
                refused.setdefault(name, faults[0])
                untried.append(Untried(name, topology or scenario.cluster.topology.name, faults[0].message))
            elif (dtypes := str(_dtypes(base))) not in same:
                same[dtypes] = name
                found.append(base)
            elif same[dtypes] != name:
                untried.append(Untried(name, "", f"has the dtypes of {same[dtypes]}"))
    tried = {base.training.precision.name for base in found} | {one.precision for one in untried if not one.cluster}
    nowhere = [name for name in names if name not in tried]
    if nowhere:
        raise UserError([Fault(f"{name} cannot be tried: {refused[name].message}", OPTION,
                               hint=refused[name].hint or "leave it out") for name in nowhere])
    return found, list(dict.fromkeys(untried))


def _known(names: Sequence[str]) -> None:
    wrong = [name for name in dict.fromkeys(names) if name not in PRECISIONS]
    if wrong:
        raise UserError([Fault(f"'{name}' is no precision", OPTION, hint=_hint(name)) for name in wrong])


def _hint(name: str) -> str:
    """The names that a wrong one may mean: all of a dtype's where it is one (`bf16`)."""
    with_it = [one for one in PRECISIONS if one.endswith(f"-{name}")]
    return f"one of {', '.join(with_it)}" if with_it else (
        nearest(name, PRECISIONS) or f"one of {', '.join(PRECISIONS)}")


def _based(scenario: Scenario, topology: str | None, choice: Choice,
           asked: str | None) -> tuple[Scenario | None, Sequence[Fault]]:
    """A base in a precision, or in the scenario's own, and what is wrong with that."""
    try:
        base = alone(scenario, topology, choice.gpus, asked)
    except UserError as error:
        return None, error.faults
    faults = never_simulated(base)
    try:
        check(base, stack_of(base.software))
    except UserError as error:  # of what depends on the layout, what no layout changes
        faults += [one for one in error.faults if one.field.startswith(PRECISION) and one not in faults
                   and asked is not None]
    return base, faults


def _dtypes(scenario: Scenario) -> dict[str, Any]:
    return scenario.training.precision.model_dump(exclude={"name"})


def clusters_of(space: Space) -> dict[str, list[int]]:
    """Numbers of the clusters of each precision that a space has, by its name, in the order in which they were asked
    for; none where precisions are no axis or there is but one."""
    found: dict[str, list[int]] = {}
    for number, one in enumerate(space.clusters):
        found.setdefault(one.training.precision.name, []).append(number)
    return found if space.by_precision and len(found) > 1 else {}


def twin(space: Space, cluster: int, name: str) -> int | None:
    """The number of the cluster that differs from one in its precision alone; None if there is none."""
    own = space.clusters[cluster]
    return next((number for number, one in enumerate(space.clusters) if one.training.precision.name == name
                 and one.cluster == own.cluster and one.parallel.offload == own.parallel.offload
                 and one.parallel.overlap_p2p == own.parallel.overlap_p2p), None)
