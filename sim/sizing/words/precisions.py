"""What precisions come to, in words: the best layout of each side by side, and the best's layout in each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sim.report.units import seconds
from sim.sizing.space.variants import PRECISION
from sim.sizing.words.layout import layout_of
from sim.sizing.words.requests import figure

if TYPE_CHECKING:
    from sim.sizing.size import Sizing

Row = Mapping[str, Any]
_GIB = 2.0**30
_OWN = "the scenario's own"
#: The column that an objective is about.
_COLUMN = {"time": "step_time_s", "gpus": "step_time_s", "cost": "cost", "energy": "energy_kwh"}


def untried(found: Sizing) -> Iterator[str]:
    """A line for what was asked for and is not tried."""
    for one in found.untried:
        where = f" on {one.cluster}" if one.cluster else ""
        yield f"not tried: precision {one.precision}{where}: {one.why}"


def without(sets: Mapping[str, Any]) -> dict[str, Any]:
    """A row's fields but its precision, which has a column."""
    return {name: value for name, value in sets.items() if name != PRECISION}


def name_of(sets: Mapping[str, Any]) -> str:
    """A row's precision by its name."""
    said = sets[PRECISION]
    return str(said["name"] if isinstance(said, Mapping) else said)


def lines(found: Sizing) -> Iterator[str]:
    """A table of the precisions that were tried, the best first, and what it does not say; nothing where none has a
    layout that does what is asked."""
    if all(one["best"] is None for one in found.precisions):
        return
    column = _COLUMN[found.wish.objective]
    ranked = sorted(found.precisions, key=lambda one: (one["best"] is None, one["best"] and _rank(found, one["best"])))
    own = next((one for one in ranked if one["own"] and one["best"] is not None), None)
    base = own or next((one for one in ranked if one["best"] is not None), None)
    several = sum(one["best"] is not None for one in ranked) > 1
    against = f"; change against {_label(base)}" if base is not None and several else ""
    yield (f"\nby precision, the best layout of each ({'cost' if column == 'cost' else found.wish.objective}{against}; "
           "memory of the fullest GPU):")
    first = found.best[0] if found.best else None
    yield from _aligned([_heads(found), *(_cells(found, one, base, first, column) for one in ranked)])
    if not all(one["proven"] for one in found.precisions):
        yield ("! where not proven, a difference may be that of how far the search got, not of the precision: give it "
               "more time")
    yield ("! a precision changes what training computes, not only how fast: whether the loss still falls as well is "
           "not judged here")


def _rank(found: Sizing, row: Row) -> float:
    return float(row["gpus"] if found.wish.objective == "gpus" else 0) * 1e9 + float(row[_COLUMN[found.wish.objective]])


def _label(one: Mapping[str, Any]) -> str:
    return f"{one['precision']}, {_OWN}" if one["own"] else str(one["precision"])


def _heads(found: Sizing) -> list[str]:
    spent = {"cost": "USD" if found.wish.priced else "GPU-hours", "energy": "kWh"}.get(found.wish.objective)
    return ["precision", "step", *([spent] if spent else []), "change", "memory", *_where(found, None),
            "the best's layout with it", f"its layout in {_leading(found)}", "its best layout"]


def _leading(found: Sizing) -> str:
    """The precision of the best."""
    return name_of(found.best[0]["set"]) if found.best else ""


def _where(found: Sizing, row: Row | None) -> list[str]:
    """GPUs and cluster, where the best of precisions have not all the same; of no row the heads."""
    places = {(one["best"]["gpus"], one["best"]["cluster"]) for one in found.precisions if one["best"] is not None}
    if len(places) < 2:
        return []
    return ["GPUs", "cluster"] if row is None else [f"{row['gpus']:,}", str(row["cluster"])]


def _cells(found: Sizing, one: Mapping[str, Any], base: Mapping[str, Any] | None, first: Row | None,
           column: str) -> list[str]:
    row, name = one["best"], str(one["precision"])
    alike, back = (_alike(one[name], first) for name in ("with_the_best_layout", "its_layout_in_the_best_precision"))
    if row is None or base is None:
        nothing = "no layout does what is asked" if one["proven"] else "none was found in time"
        return [name, "–", *[""] * (len(_heads(found)) - 5), alike, "", nothing]
    change = "" if one is base else f"{100 * (row[column] / base['best'][column] - 1):+.1f}%"
    spent = [figure(row[column])] if column not in ("step_time_s",) else []
    same = first is not None and _fields(row) == _fields(first)
    layout = "the best" if first is not None and same and name == name_of(first["set"]) else (
        "the same" if same else layout_of(without(row["set"])))
    return [name, seconds(row["step_time_s"]), *spent, change, f"{row['device_used_bytes'] / _GIB:.1f} GiB",
            *_where(found, row), *(["", ""] if same else [alike, back]),
            layout + ("" if one["proven"] else " (not proven)")]


def _fields(row: Row) -> tuple[str, int, dict[str, Any]]:
    return row["cluster"], row["gpus"], without(row["set"])


def _alike(one: Mapping[str, Any] | None, first: Row | None) -> str:
    """What the layout of the best comes to in a precision."""
    if one is None:
        return "" if first is None else "cannot have it"
    if one["outcome"] != "ok":
        return "is refused" if one["outcome"] == "refused" else "failed, a fault of ours"
    memory = f"{one['device_used_bytes'] / _GIB:.1f} GiB"
    if one["step_time_s"] is None or not one["fits"]:
        return f"does not fit ({memory})"
    return f"{seconds(one['step_time_s'])}, {memory}"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as they must be; an empty one is left out."""
    kept = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in kept]
    for cells in zip(*kept, strict=True):
        yield ("  " + "  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True))).rstrip()
