"""Profiles as written: named facts by framework, release and switch (`profiles/*.yaml`)."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sim.catalog import table
from sim.errors import Fault, UserError, nearest

#: The profile every other one descends from: it also holds the releases of each year.
_ROOT = "pytorch"
#: What stands in place of a release: MPT's attention kernel of 2023 (LLM Foundry's attn_impl).
_NAMED = ("triton",)
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, "<": operator.lt, ">": operator.gt,
}


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of a profile: a value with its unit, where it comes from and how sure it is.

    Attributes:
        range: least and largest value that the evidence allows, for a figure that may be fitted.
    """

    value: float | int | bool | str
    unit: str
    source: str
    confidence: str
    range: tuple[float, float] | None = None

    @property
    def free(self) -> bool:
        """Whether the value is a figure that may be calibrated, not a documented choice of the software."""
        return self.confidence in ("estimated", "inferred")


def profile_names() -> list[str]:
    """Names of the profiles, sorted, for messages and `drystep list`."""
    return sorted(path.stem for path in (Path(__file__).parent / "profiles").glob("*.yaml"))


def _profile(name: str) -> dict[str, Any]:
    """A profile as written. Each has a file of its own, so that a run parses only the ones it needs."""
    return table(f"software/profiles/{name}.yaml")


def packages() -> tuple[str, ...]:
    """Packages whose releases decide facts; what else a scenario's `versions` names changes nothing."""
    return tuple(_profile(_ROOT)["releases"])


def release(package: str, year: int | None = None) -> str:
    """The release of a package that a project typically ran in a year; none given: the latest that is known."""
    by_year = _profile(_ROOT)["releases"][package]
    return _release(by_year, max(by_year) if year is None else year)


def is_release(text: str) -> bool:
    """Whether a version says something: a number, or a name that stands for one. Else the year's release counts."""
    return bool(_version(text)) or text in _NAMED


class Switches(NamedTuple):
    """What a scenario's `software` turns on or off, by its fields' names, which eras of profiles go by.

    Attributes:
        compile: torch.compile.
        fused: false turns off the framework's optional fused kernels.
        cuda_graphs: forward and backward are replayed as graphs.
        deterministic: kernels give the same bits every time.
        fused_accumulation: false turns off products that add weight gradients up.
        dispatcher: how tokens go to spread experts, alltoall or flex; None = what the stack does. Eras call it
            `alltoall_dispatcher`, `flex_dispatcher`.
    """

    compile: bool = False
    fused: bool = True
    cuda_graphs: bool = False
    deterministic: bool = False
    fused_accumulation: bool = True
    dispatcher: str | None = None


_USUAL = Switches()


def facts_of(
    framework: str, year: int, versions: Mapping[str, str] | None = None, modules: str = "plain",
    switches: Switches = _USUAL,
) -> dict[str, Fact]:
    """Every fact of a profile in an era, with unit, source and confidence.

    Raises:
        UserError: no profile of that name.
    """
    names = profile_names()
    if framework not in names:
        message = f"unknown framework '{framework}'; known: {', '.join(names)}"
        raise UserError(Fault(message, field="software.framework", hint=nearest(framework, names)))
    releases = _profile(_ROOT)["releases"]
    versions = {name: text for name, text in (versions or {}).items() if is_release(text)}
    known = {name: _release(by_year, year) for name, by_year in releases.items()} | versions
    given = {f"{name}_given": True for name in versions}
    on = {name: value for name, value in switches._asdict().items() if isinstance(value, bool)} | given | {
        f"{modules}_modules": True, f"{switches.dispatcher}_dispatcher": True}
    lines: dict[str, dict[str, Any]] = {}
    for profile in _lineage(framework):
        _override(lines, profile["facts"])
        for era in profile.get("eras", ()):
            if all(_holds(key, wanted, year, known, on) for key, wanted in era["when"].items()):
                _override(lines, era["facts"])
    return {name: _fact(line) for name, line in lines.items()}


def free_figures(name: str) -> dict[tuple[str, str], Fact]:
    """Figures that may be fitted, by (profile that states them, figure): a profile's own and those it inherits.

    They are the facts with a range whose value is a judgement (`Fact.free`). A figure that an era states is named with
    the era: "product_rate (year >=2022)".
    """
    found: dict[tuple[str, str], Fact] = {}
    stated = _stated(name)
    units = {fact: line["unit"] for _, profile in stated for fact, line in profile["facts"].items() if "unit" in line}
    for where, profile in stated:
        found = {key: value for key, value in found.items() if key[1] not in profile["facts"]}
        for era in ({"facts": profile["facts"]}, *profile.get("eras", ())):
            for fact, line in era["facts"].items():
                if "range" in line and (made := _fact({"unit": units[fact], **line})).free:
                    found[where, _figure(fact, era)] = made
    return found


def _figure(fact: str, era: Mapping[str, Any]) -> str:
    """What a fact is called as a free figure."""
    when = ", ".join(f"{key} {wanted}" for key, wanted in era.get("when", {}).items())
    return f"{fact} ({when})" if when else fact


def _fact(line: Mapping[str, Any]) -> Fact:
    """A line as a fact."""
    return Fact(**{**line, "range": tuple(line["range"]) if "range" in line else None})


def _stated(name: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, profile as written) of a profile and its ancestors, eldest first."""
    profile = _profile(name)
    parent = profile.get("inherits")
    return [*(_stated(parent) if parent else ()), (name, profile)]


#: Values put in the place of facts, by (profile, fact): see `trial`.
TRIED: dict[tuple[str, str], float] = {}


def _lineage(name: str) -> list[dict[str, Any]]:
    """The profile after all its ancestors, eldest first."""
    profile = _profile(name)
    parent = profile.get("inherits")
    tried = {fact: value for (where, fact), value in TRIED.items() if where == name}
    if tried:
        own, *eras = (era | {"facts": {fact: line | {"value": tried.get(_figure(fact, era), line["value"])}
                                       for fact, line in era["facts"].items()}}
                      for era in ({"facts": profile["facts"]}, *profile.get("eras", ())))
        profile = profile | own | {"eras": eras}
    return [*(_lineage(parent) if parent else ()), profile]


def _override(lines: dict[str, dict[str, Any]], facts: Mapping[str, dict[str, Any]]) -> None:
    """Lay facts over those of an ancestor. A fact keeps the unit it was introduced with."""
    for name, line in facts.items():
        lines[name] = {"unit": lines[name]["unit"], **line} if name in lines else line


def _release(by_year: Mapping[int, str], year: int) -> str:
    """The latest release of a year not after `year` (the first one for earlier years)."""
    past = [y for y in by_year if y <= year]
    return by_year[max(past) if past else min(by_year)]


def _holds(
    key: str, wanted: str | bool, year: int, versions: Mapping[str, str], switches: Mapping[str, bool],
) -> bool:
    """Whether one condition of an era is met. A version that is not a number ("triton") meets none."""
    if isinstance(wanted, bool):
        return switches.get(key, False) == wanted
    match = re.fullmatch(r"([<>=]{1,2})([\d.]+)", wanted)
    if match is None:
        raise ValueError(f"software profiles: condition {key}: {wanted!r} is not a comparison")
    actual = (year,) if key == "year" else _version(versions[key])
    return bool(actual) and _COMPARE[match[1]](actual, _version(match[2]))


def _version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version, e.g. "2.1.0a3" → (2, 1, 0); () when it has none."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
