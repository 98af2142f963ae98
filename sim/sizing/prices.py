"""Prices of clusters: what is given, else the topology's own, else a catalogue of cloud instances (`prices.yaml`)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from sim.catalog import table
from sim.errors import Fault, UserError
from sim.report.numbers.budget import price_per_gpu_hour
from sim.scenario import Scenario


def catalogue() -> Mapping[str, Any]:
    """Kind of instance to its usd_per_gpu_hour, source, date, confidence and the topologies it is rented as."""
    kinds: Mapping[str, Any] = table("sizing/prices.yaml")["kinds"]
    return kinds


def given(text: str) -> tuple[float | None, dict[str, float]]:
    """`--price`: USD per GPU-hour of every cluster, a kind of instance, or NAME=USD and NAME=KIND, separated by commas.

    Returns:
        The price of clusters not named, None where there is none, and prices by name of the topology.

    Raises:
        UserError: what is neither a number of at least 0 nor a kind of instance.
    """
    rest: float | None = None
    named: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.strip().rpartition("=")
        usd = _usd(value)
        if equals:
            named[name.strip()] = usd
        else:
            rest = usd
    return rest, named


def _usd(text: str) -> float:
    kinds = catalogue()
    if text.strip() in kinds:
        return float(kinds[text.strip()]["usd_per_gpu_hour"])
    try:
        usd = float(text)
    except ValueError:
        near = difflib.get_close_matches(text, kinds, 1)
        hint = f"did you mean '{near[0]}'?" if near else f"a number of USD per GPU-hour, or one of {', '.join(kinds)}"
        raise UserError(Fault(f"'{text}' is no price", "--price", hint=hint)) from None
    if not 0 <= usd <= 1e6:
        raise UserError(Fault(f"'{text}' is no price of 0 to 1,000,000 USD per GPU-hour", "--price"))
    return usd


def prices_of(clusters: Sequence[Scenario], text: str | None) -> tuple[dict[str, float], dict[str, str]]:
    """USD per GPU-hour and where it comes from, of the clusters that have one, by name of the topology.

    `--price` wins over the scenario's budget, that over the topology's own price, that over the catalogue.

    Args:
        text: of `--price`.

    Raises:
        UserError: `text` is wrong, or names a cluster that is not searched.
    """
    rest, named = (None, {}) if text is None else given(text)
    names = [one.cluster.topology.name for one in clusters]
    for name in named:
        if name not in names:
            raise UserError(Fault(f"no cluster '{name}' is searched", "--price",
                                  hint=f"one of {', '.join(dict.fromkeys(names))}"))
    found: dict[str, float] = {}
    origin: dict[str, str] = {}
    for name, one in zip(names, clusters, strict=True):
        usd, whence = named.get(name, rest), "--price"
        if usd is None:
            usd = price_per_gpu_hour(one)
            asked = one.budget is not None and one.budget.price_per_gpu_hour is not None
            whence = "the scenario" if asked else "its topology file"
        if usd is None:
            kind = next((k for k, entry in catalogue().items() if name in entry["topologies"]), None)
            if kind is not None:
                usd, whence = float(catalogue()[kind]["usd_per_gpu_hour"]), \
                    f"{kind} on demand, {catalogue()[kind]['date']}, {catalogue()[kind]['confidence']}"
        if usd is not None:
            found[name], origin[name] = usd, whence
    return found, origin
