"""What-if axes: dotted field -> list of values; the run is repeated for the product of the lists."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from sim.errors import Fault, closest
from sim.scenario.expand import expand
from sim.scenario.fields.cluster import GpuFigures, GpuProfile
from sim.scenario.fields.schema import Scenario
from sim.scenario.text.document import MAX_FAULTS, Document, describe
from sim.scenario.text.explain import explain, field_table, tables_of

#: Largest sweep that is run.
MAX_POINTS = 100_000
#: Axes that would change what is compared rather than what is run.
_NO_AXIS = frozenset({"name", "sweep", "expect", "claim"})


def read_axes(document: Document, faults: list[Fault]) -> dict[str, list[Any]]:
    """The axes of a document's `sweep`, each checked by itself; faults are added to `faults`."""
    written = document.data.get("sweep")
    if written is None:
        return {}
    if not isinstance(written, dict):
        faults.append(
            document.fault(
                "sweep",
                f"expected dotted fields with lists, not {describe(written)}",
                "such as cluster.nodes: [1, 2, 4]",
            )
        )
        return {}
    axes: dict[str, list[Any]] = {}
    for path, values in written.items():
        here = f"sweep.{path}"
        message, hint = check_path(path)
        if message:
            faults.append(document.fault(here, message, hint))
        elif not isinstance(values, list):
            faults.append(
                document.fault(here, f"expected a list of values, not {describe(values)}", f"write [{values}]")
            )
        elif not values:
            faults.append(document.fault(here, "an empty list leaves nothing to run", "give at least one value"))
        else:
            axes[path] = values
            faults += _check_values(path, values, document)
    points = math.prod(len(values) for values in axes.values())
    if points > MAX_POINTS:
        sizes = " · ".join(str(len(values)) for values in axes.values())
        faults.append(
            document.fault(
                "sweep",
                f"{sizes} = {points:,} points, more than {MAX_POINTS:,}",
                "shorten the lists, or use 'drystep size' to search",
            )
        )
        return {}
    return axes


def points(axes: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Each point of the product as dotted path -> value; the last axis turns fastest."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def fix_axes(document: Document, fixed: Sequence[str], faults: list[Fault]) -> tuple[str, ...]:
    """Takes the axes out of a document's `sweep` whose field `--set` gives: the field has that value everywhere.

    Bounds of `expect` that name a point of such an axis go with it. An axis of whole mappings around such a field would
    take its value away again at every point: that is a fault.

    Returns:
        A note for each axis taken out.
    """
    axes = document.data.get("sweep")
    if not isinstance(axes, dict):
        return ()
    for path in fixed:
        for around in (axis for axis in axes if path.startswith(f"{axis}.")):
            faults.append(Fault(f"the sweep gives '{around}' whole at every point, '{path}' in it included", path,
                                "--set", hint=f"change sweep.{around}, or leave the sweep out with --set sweep={{}}"))
    gone = [axis for axis in axes if axis in fixed]
    if not gone:
        return ()
    document.data["sweep"] = {axis: values for axis, values in axes.items() if axis not in gone}
    bounds = document.data.get("expect")
    if isinstance(bounds, dict):
        left = {name: _without_points(bound, gone) for name, bound in bounds.items()}
        document.data["expect"] = {name: bound for name, bound in left.items() if bound != []}
    return tuple(f"{document.file}: {axis} is given by --set: it is not swept" for axis in gone)


def _without_points(bound: Any, gone: Sequence[str]) -> Any:
    """A result field's bound, or its list of bounds, without those that name a point of the axes that are gone."""
    named = {key for part in ("at", "relative_to") if isinstance(bound, dict) and isinstance(bound.get(part), dict)
             for key in bound[part]}
    if isinstance(bound, list):
        return [one for one in bound if _without_points(one, gone) != []]
    return [] if named & set(gone) else bound


def check_path(path: str) -> tuple[str, str]:
    """("", "") where a dotted path names a field of the scenario, else what is wrong with it and a hint."""
    parts = path.split(".")
    if parts[0] in _NO_AXIS:
        return f"'{parts[0]}' cannot vary", ""
    table, known = field_table(Scenario, parts)
    if known == len(parts):
        return "", ""
    if table is None:
        head = ".".join(parts[:known])
        if _free_keys(parts, known):
            return "", ""
        return f"'{head}' has no fields, so there is no '{path[:80]}'", f"did you mean '{head}'?"
    wrong = f"there is no field '{path[:80]}'"
    for name, field in Scenario.model_fields.items():
        if any(parts[-1] in model.model_fields for model in tables_of(field.annotation)):
            return wrong, f"did you mean '{name}.{parts[-1]}'?"
    near = closest(parts[known], table.model_fields)
    if near:
        whole = ".".join([*parts[:known], near[0], *parts[known + 1 :]])
        return wrong, f"did you mean '{whole}'?"
    return wrong, f"known there: {', '.join(table.model_fields)}"


def _free_keys(parts: list[str], known: int) -> bool:
    """Whether the path goes into a mapping whose keys the user chooses, or into an inline GPU."""
    inside = ".".join(parts[:known])
    if inside == "cluster.topology.gpu":
        return len(parts) == known + 1 and parts[known] in {*GpuFigures.model_fields, *GpuProfile.model_fields}
    return inside in ("software.versions", "cluster.gpu.tflops") and len(parts) == known + 1


def _check_values(path: str, values: list[Any], document: Document) -> list[Fault]:
    """Faults of an axis' values that no other field could mend: wrong type, wrong unit, out of range, unknown name."""
    faults: list[Fault] = []
    for index, value in enumerate(values):
        for fault in _value_faults(path, value, document):
            message = fault.message if fault.field == path else f"{fault.field}: {fault.message}"
            faults.append(document.fault(f"sweep.{path}.{index}", message, fault.hint))
        if len(faults) >= MAX_FAULTS:
            break
    return faults


def _value_faults(path: str, value: Any, document: Document) -> list[Fault]:
    nested: Any = value
    for part in reversed(path.split(".")):
        nested = {part: nested}
    found: list[Fault] = []
    alone = Document(nested, {}, document.file, document.folder)
    data = expand(alone, found)
    try:
        Scenario.model_validate(data)
    except ValidationError as error:
        found += explain(error, Scenario, alone, inside=path)
    return found
