"""What `--only` asks for: a choice narrowed to values of some axes, as the fields of a scenario name them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sim.errors import Fault, UserError, nearest
from sim.sizing.space.layouts import SCHEDULES, STRATEGIES, Choice
from sim.sizing.space.policies import POLICIES
from sim.sizing.space.variants import PRECISION

_OPTION = "--only"
#: Fields whose values are numbers, and those whose values are names: the axis, and the names it has.
_NUMBERS = {f"parallel.{name}": name for name in ("tensor", "context", "expert", "expert_tensor", "pipeline",
                                                         "virtual_stages")} | {
    "training.micro_batch": "micro_batch", "training.mode.inference.batch": "batch"}
#: What stands for recomputation of the first k blocks, for every k that is tried (`thinned`).
BLOCKS = "blocks"
_NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "parallel.strategy": ("strategies", STRATEGIES), "parallel.schedule": ("schedules", SCHEDULES),
    "training.recompute": ("recompute", (*POLICIES, BLOCKS))}


def only(choice: Choice, asked: Sequence[str]) -> Choice:
    """The part of a choice in which some axes have the values asked for.

    Args:
        asked: `FIELD=VALUE[,VALUE...]` each, e.g. `parallel.tensor=4,8`; the field may go without what is before its
            dot. Of a field named twice all values count.

    Raises:
        UserError: a field that is no axis, or a value that it cannot have.
    """
    found: dict[str, list[Any]] = {}
    for text in asked:
        field, sign, values = text.partition("=")
        field = _field(field.strip(), bool(sign))
        parts = [part.strip() for part in values.split(",") if part.strip()]
        if not parts:
            raise UserError(Fault(f"{field} is given no value", _OPTION, hint=f"write {field}=VALUE or VALUE,VALUE"))
        if field in _NUMBERS:
            found.setdefault(_NUMBERS[field], []).extend(_number(field, part) for part in parts)
        else:
            axis, allowed = _NAMES[field]
            found.setdefault(axis, []).extend(_name(field, part, allowed) for part in parts)
    axes: dict[str, Any] = {axis: tuple(dict.fromkeys(values)) for axis, values in found.items()}
    if "recompute" in axes:
        axes["partial_recompute"] = BLOCKS in axes["recompute"]
        axes["recompute"] = tuple(name for name in axes["recompute"] if name != BLOCKS)
    return replace(choice, **axes)


def _field(name: str, complete: bool) -> str:
    if name in (PRECISION, PRECISION.rpartition(".")[2]):
        raise UserError(Fault(f"'{name}' is the scenario's in all layouts, unless others are tried beside it", _OPTION,
                              hint="give --precision NAME,NAME to try others, or --set training.precision=NAME"))
    fields = [*_NUMBERS, *_NAMES]
    by_name = {field.rpartition(".")[2]: field for field in fields} | {field: field for field in fields}
    if name not in by_name:
        raise UserError(Fault(f"'{name}' is no axis of the search", _OPTION,
                              hint=nearest(name, by_name) or f"the axes are {', '.join(fields)}"))
    if not complete:
        raise UserError(Fault(f"'{name}' is given no value", _OPTION, hint=f"write {name}=VALUE or VALUE,VALUE"))
    return by_name[name]


def _number(field: str, text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 1_000_000:
        raise UserError(Fault(f"'{text}' is no number of 1 to 1,000,000 for {field}", _OPTION,
                              hint=f"write {field}=1,2,4"))
    return int(text)


def _name(field: str, text: str, allowed: Sequence[str]) -> str:
    if text not in allowed:
        raise UserError(Fault(f"'{text}' is no {field} of the search", _OPTION,
                              hint=nearest(text, allowed) or f"it has {', '.join(allowed)}"))
    return text
