"""What every row of a search starts from: the scenario on one node of a cluster, without parallelism.

Fields whose defaults follow from the layout, and which the user did not write, follow it row by row. Until a row says
its strategy, a base holds what they are where they count: of strategies that shard gradients, and of tensor ranks that
cut the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sim.errors import Fault, UserError
from sim.parallel.sharded.secondary import neighbours
from sim.parallel.support.check import on_any_ranks
from sim.scenario import Scenario
from sim.scenario.change import Changing
from sim.scenario.dump import dump
from sim.software import stack_of

#: Fields of `parallel` whose defaults follow from what rows vary.
_FOLLOWING = ("reduce_every_micro_step", "async_tensor")


def one_node(scenario: Scenario, topology: str | None, gpus: Sequence[int]) -> dict[str, Any]:
    """Fields that put a scenario on one node of a topology, or of its own: a whole one where `part_of_one`.

    Args:
        gpus: numbers of GPUs that are searched.
    """
    if topology is not None:
        return {"cluster": {"topology": topology, "nodes": 1}}
    return {"cluster.nodes": 1, **({"cluster.gpus_per_node": None} if part_of_one(scenario, gpus) else {})}


def part_of_one(scenario: Scenario, gpus: Sequence[int]) -> bool:
    """Whether a scenario takes a part of a single node, and a search asks for more that whole nodes can be: the part
    then says how much of one the scenario uses, not that nodes are so small."""
    part, whole = scenario.cluster.gpus_per_node, scenario.cluster.topology.gpus_per_node
    return scenario.cluster.nodes == 1 and part < min(whole, max(gpus, default=0)) and all(
        number <= whole or number % whole == 0 for number in gpus)


def alone(scenario: Scenario, topology: str | None, gpus: Sequence[int] = (), precision: str | None = None) -> Scenario:
    """The scenario on one node of a topology, or of its own (`one_node`), in a precision by name, or in its own."""
    change, batch = Changing(scenario), scenario.training.global_batch
    assert batch is not None
    sets = {**one_node(scenario, topology, gpus), "parallel.strategy": "ddp", "parallel.sharding_factor": 1,
            "parallel.tensor": 1, "parallel.sequence_parallel": False, "parallel.context": 1, "parallel.expert": 1,
            "parallel.pipeline": 1, "parallel.expert_tensor": None,
            "parallel.virtual_stages": 1, "parallel.schedule": "1f1b", "parallel.split": None,
            "training.micro_batch": 1, "training.recompute": "none",
            "training.global_batch": _ANY_NODE * math.gcd(batch, _ODD),
            **({} if precision is None else {"training.precision": precision})}
    second = neighbours(scenario.parallel.reshard_after_forward)
    if second:  # among more ranks than a node may have; rows take it where they can (`Space.sets`)
        sets["parallel.reshard_after_forward"] = True
    base = change(sets).scenario
    known = dict(zip(_FOLLOWING, (True, _overlaps(change, sets)), strict=True))
    unsaid: dict[str, Any] = {name: value for name, value in known.items() if not change.wrote(f"parallel.{name}")}
    if second:
        unsaid["reshard_after_forward"] = second
    return base.model_copy(update={
        "training": base.training.model_copy(update={"global_batch": batch}),
        "parallel": base.parallel.model_copy(update=unsaid)})


def never_simulated(base: Scenario) -> list[Fault]:
    """What of a base no strategy makes possible (`sim.parallel.support.check`): frozen weights of another dtype than
    their adapters' are brought together by FSDP's mixed precision and by none beside it."""
    sharded = _of_strategy(base, "fsdp")
    return [fault for fault in _of_strategy(base, "ddp") if fault in sharded]


def refused_strategies(base: Scenario, names: Sequence[str]) -> set[str]:
    """Strategies of some that are refused for what `never_simulated` leaves to others."""
    always = never_simulated(base)
    return {name for name in names if any(fault not in always for fault in _of_strategy(base, name))}


def _of_strategy(base: Scenario, name: str) -> list[Fault]:
    parallel = base.parallel.model_copy(update={"strategy": name})
    return on_any_ranks(base.model_copy(update={"parallel": parallel}), stack_of(base.software))


#: Sequences that divide over nodes of any number of GPUs that the run's batch divides over, but for odder numbers.
_ANY_NODE, _ODD = 4608, 35


def _overlaps(change: Changing, sets: dict[str, Any]) -> bool:
    """Whether tensor ranks that cut the sequence exchange it beside their products unless they are told not to."""
    try:
        return bool(change({**sets, "parallel.tensor": 2, "parallel.sequence_parallel": True})
                    .scenario.parallel.async_tensor)
    except UserError:  # one GPU a node, or heads that two ranks cannot share: nothing is cut
        return False


def following(base: Scenario) -> dict[str, Any]:
    """A base as plain data that rows are put on top of."""
    plain = dump(base)
    written = {} if base.given is None else base.given.data.get("parallel") or {}
    for name in _FOLLOWING:
        if written.get(name) is None:
            del plain["parallel"][name]
    return plain
