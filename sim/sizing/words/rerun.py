"""The command that runs what a search found: the fewest `--set` on top of the user's file that say it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from sim import api
from sim.errors import UserError
from sim.scenario import Scenario
from sim.scenario.change import said
from sim.scenario.dump import dump

#: Parts of a scenario that no step depends on.
_ASIDE = ("name", "note", "sweep", "expect", "budget", "claim")
#: Strategies that gather parameters, so that what is done with them behind forward matters.
_GATHERING = ("fsdp", "zero3")
#: Times that fields are added: once for what a file's own layout has refused, once for what is then different.
_ROUNDS = 2


def command(path: str, given: Sequence[str], target: Scenario, fields: Mapping[str, Any],
            topology: str | None) -> str | None:
    """`drystep run` of the scenario that a row of `Sizing.best` stands for.

    Args:
        path: the user's file; given: the `--set` texts the search was given.
        target: what was simulated (`Sizing.winner`).
        fields: the row's `set`.
        topology: cluster of the row as `--cluster` named it; None where the search kept the file's.

    Returns:
        One line, or None where `--set` cannot say it.
    """
    wanted = _essence(target)
    texts = [] if topology is None else [f"cluster.topology={topology}"]
    texts += said(fields)
    whole = texts
    for _ in range(_ROUNDS):
        more = _differing(_read(path, [*given, *whole]), wanted)
        whole = [*whole, *(text for name, value in more for text in said({name: value}))]
    if not _says(path, [*given, *whole], wanted):
        return None
    for text in list(whole):
        fewer = [other for other in whole if other != text]
        if _says(path, [*given, *fewer], wanted):
            whole = fewer
    swept = ["sweep={}", "expect={}"] if api.load(path, given).document.data.get("sweep") else []
    pairs = (("--set", text) for text in [*given, *whole, *swept])
    return shlex.join(["drystep", "run", path, *(part for pair in pairs for part in pair)])


def _says(path: str, texts: Sequence[str], wanted: Mapping[str, Any]) -> bool:
    return _read(path, texts) == wanted


def _read(path: str, texts: Sequence[str]) -> dict[str, Any] | None:
    """What a file and its sets say; None where they are refused."""
    try:
        return _essence(api.load(path, texts).scenario)
    except UserError:
        return None


def _essence(scenario: Scenario) -> dict[str, Any]:
    """Everything that a step depends on."""
    plain = {name: part for name, part in dump(scenario).items() if name not in _ASIDE}
    plain["parallel"]["expert_tensor"] = scenario.expert_tensor  # said or come of itself
    if scenario.parallel.strategy not in _GATHERING:
        plain["parallel"].pop("reshard_after_forward")
    return plain


def _differing(read: Mapping[str, Any] | None, wanted: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Fields that a refused or different scenario is to be given: what the file says of a layout of its own."""
    if read is None:
        return [("parallel.split", None), ("training.micro_steps", None),
                ("training.global_batch", wanted["training"]["global_batch"])]
    return [(f"{part}.{name}", value) for part in ("training", "parallel") for name, value in wanted[part].items()
            if read[part].get(name) != value]
