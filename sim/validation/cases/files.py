"""Reads case files: published measurements, oracle files, collective sweeps and kernel timings.

The format is the project's own (scenarios/published/): a YAML file holds one source, shared defaults and one line per
measurement; a `.csv` file holds kernel timings. What is wrong with a file is a `UserError` with file and line; whether
a case can be *predicted* is not asked here.
"""

from __future__ import annotations

import csv
import fnmatch
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sim.catalog import folder
from sim.errors import Fault, UserError, nearest
from sim.scenario.fields.units import figure

#: What a training case may have measured (all but `noise` and `relative_to` are compared).
MEASURED = ("step_time_s", "peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes", "oom", "relative_to",
            "ratio", "noise", "peak_unknown_bytes")
#: Marks of rows that are reported apart and carry no bound.
QUALITIES = ("plot", "outlier", "derived", "bound", "average")
#: Values of a file's `kind`; a file without it holds training cases.
KINDS = ("training", "collectives", "oracle-memory", "oracle-traffic", "oracle-flops")
#: Largest case file read; the largest published one has 0.3 MB.
LIMIT_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement and where it stands.

    Attributes:
        file: name of its file. path: the file as the user gave it. line: 1-based, of the case.
        kind: one of `KINDS`, or "kernels" (a CSV file).
        id: unique within the file.
        given: what the case starts from: the file's partial scenario (training and oracle kinds), the sweep as
            written (collectives), or gpu, dtype and op (kernels).
        sets: dotted paths on top of `given`; the two together are a whole scenario.
        measured: what was measured; {} for collectives and kernels.
        quality: mark of a row reported apart, or None.
        assumed: dotted paths of fields that the source did not state.
        rows: the table of a collectives or kernels case.
    """

    file: str
    path: str
    line: int
    kind: str
    id: str
    given: dict[str, Any]
    measured: dict[str, Any]
    sets: dict[str, Any] = field(default_factory=dict)
    quality: str | None = None
    assumed: tuple[str, ...] = ()
    rows: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class CaseFile:
    """A file's cases in their order, with its title."""

    name: str
    path: str
    kind: str
    title: str
    cases: tuple[Case, ...] = field(default=())


def expand(paths: Sequence[str | Path]) -> list[Path]:
    """Files meant by `paths`: files as they are, folders searched for .yaml and .csv, names of shipped sources.

    `fsdp_paper` means the shipped `scenarios/published/fsdp_paper.yaml`. A file named twice is read once.

    Raises:
        UserError: a path that is none of these, or a folder without such files.
    """
    shipped = folder("scenarios") / "published"
    found: dict[Path, None] = {}
    faults = []
    for given in map(Path, paths):
        inside = shipped / f"{given}.yaml"
        if given.is_dir():
            inside_it = sorted(p for p in given.rglob("*") if p.suffix in (".yaml", ".yml", ".csv"))
            found.update(dict.fromkeys(inside_it))
            if not inside_it:
                faults.append(Fault("the folder holds no case files (.yaml, .csv)", file=str(given)))
        elif given.is_file():
            found[given] = None
        elif not given.is_absolute() and inside.is_file():
            found[inside] = None
        else:
            hint = nearest(str(given), sorted(p.stem for p in shipped.glob("*.yaml")))
            faults.append(Fault("no such case file, folder or published source", file=str(given), hint=hint))
    if faults:
        raise UserError(faults)
    return list(found)


def read(path: Path) -> CaseFile:
    """The cases of one file.

    Raises:
        UserError: the file is unreadable, too large or not a case file; every fault with its line.
    """
    try:
        size = path.stat().st_size
        text = path.read_text(encoding="utf-8-sig") if size <= LIMIT_BYTES else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(Fault(f"cannot be read: {error}", file=str(path))) from error
    if size > LIMIT_BYTES:
        raise UserError(Fault(f"is {size} bytes; a case file may have {LIMIT_BYTES}", file=str(path)))
    return _read_csv(path, text) if path.suffix == ".csv" else _read_yaml(path, text)


def selects(pattern: str | None, case: Case) -> bool:
    """Whether `--select PATTERN` takes the case: a glob over `file/id`, or a part of it where it has no wildcard."""
    if pattern is None:
        return True
    name = f"{case.file}/{case.id}"
    if any(c in pattern for c in "*?["):
        return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(case.id, pattern)
    return pattern in name


class _Checker:
    """Collects the faults of one file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.faults: list[Fault] = []

    def fault(self, message: str, line: int, field_: str = "", hint: str = "") -> None:
        self.faults.append(Fault(message, field_, self.path, line, hint))

    def raise_any(self) -> None:
        if self.faults:
            raise UserError(self.faults)


def _read_yaml(path: Path, text: str) -> CaseFile:
    check = _Checker(path)
    data, node = _parse(path, text)
    if not isinstance(data, dict):
        raise UserError(Fault("a case file is a mapping with 'cases'", file=str(path), line=1))
    kind = data.get("kind", "training")
    if kind not in KINDS:
        check.fault(f"unknown kind {kind!r}; allowed: {', '.join(KINDS[1:])}", 1, "kind", nearest(str(kind), KINDS))
        check.raise_any()
    key = "sweeps" if kind == "collectives" and "cases" not in data else "cases"
    entries = data.get(key)
    if not isinstance(entries, list) or not entries:
        raise UserError(Fault(f"needs a list '{key}' with at least one entry", key, str(path), 1))
    lines = [n.start_mark.line + 1 for n in _children(node, key)]
    make = _sweep if kind == "collectives" else _case
    defaults = data.get("defaults") or {}
    if not isinstance(defaults, dict):
        check.fault("must be a mapping", 1, "defaults")
        check.raise_any()
    cases = []
    for line, entry in zip(lines, entries, strict=True):
        if not isinstance(entry, dict) or not isinstance(entry.get("id"), str):
            check.fault("a case is a mapping with an 'id'", line, key)
        else:
            made = make(path, kind, line, defaults, entry, check)
            cases.extend([made] if made else [])
    _check_references(cases, check)
    check.raise_any()
    return CaseFile(path.name, str(path), kind, str(data.get("title", path.stem)), tuple(cases))


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML 1.2's numbers, as in scenario files: `5.2e10` is one, which PyYAML takes for text; and no key given twice,
    whose first value PyYAML drops without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """See PyYAML."""
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in lines:
                said = f"'{key.value[:60]}' is given twice (first on line {lines[key.value]})"
                raise yaml.MarkedYAMLError(problem=said, problem_mark=key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        return dict(super().construct_mapping(node, deep=deep))


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+\Z"),
                              list("-+.0123456789"))


def _parse(path: Path, text: str) -> tuple[Any, yaml.Node | None]:
    """The file's data and its node tree, which knows lines; libyaml's parser where PyYAML was built with it."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        data = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise UserError(Fault(f"is not valid YAML: {error.problem}", file=str(path), line=line)) from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UserError(Fault(f"is not valid YAML: {error}", file=str(path))) from error
    finally:
        loader.dispose()
    return data, node


def _children(node: yaml.Node | None, key: str) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if name.value == key and isinstance(value, yaml.SequenceNode):
                yield from value.value


def _case(path: Path, kind: str, line: int, defaults: dict[str, Any], entry: dict[str, Any],
          check: _Checker) -> Case | None:
    before = len(check.faults)
    changes, measured, name = entry.get("set", {}), entry.get("measured"), entry["id"]
    if not isinstance(changes, dict) or not all(isinstance(k, str) for k in changes):
        check.fault("must be a mapping of dotted paths", line, f"{name}.set")
    if not isinstance(measured, dict) or not measured:
        check.fault("must be a mapping with at least one measurement", line, f"{name}.measured")
    elif kind == "training":
        measured = _check_measured(name, measured, line, check)
    quality = entry.get("quality")
    if quality is not None and quality not in QUALITIES:
        check.fault(f"unknown quality {quality!r}; allowed: {', '.join(QUALITIES)}", line, f"{name}.quality",
                    nearest(str(quality), QUALITIES))
    if len(check.faults) > before:
        return None
    return Case(path.name, str(path), line, kind, name, {"name": name, **defaults}, dict(measured or {}), changes,
                quality, tuple(entry.get("assumed") or ()))


def _check_measured(name: str, measured: dict[str, Any], line: int, check: _Checker) -> dict[str, Any]:
    """What was measured, sizes and times with units in bytes and seconds."""
    read: dict[str, Any] = {}
    for key, given in measured.items():
        where = f"{name}.measured.{key}"
        value, wrong = figure(str(key), given)
        read[key] = value
        if wrong:
            check.fault(wrong, line, where)
        elif key not in MEASURED:
            check.fault(f"unknown measurement; allowed: {', '.join(MEASURED)}", line, where,
                        nearest(str(key), MEASURED))
        elif key == "oom" and not isinstance(value, bool):
            check.fault("must be true or false", line, where)
        elif key not in ("oom", "relative_to") and not _positive(value, zero=key == "noise"):
            check.fault(f"must be a positive number, not {value!r}", line, where)
    if ("relative_to" in measured) != ("ratio" in measured):
        check.fault("'relative_to' and 'ratio' belong together", line, f"{name}.measured")
    return read


def _positive(value: Any, zero: bool = False) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return number and (value > 0 or (zero and value == 0))


def _check_references(cases: Sequence[Case], check: _Checker) -> None:
    seen: dict[str, int] = {}
    for case in cases:
        if case.id in seen:
            check.fault(f"id {case.id!r} stands on line {seen[case.id]} too", case.line, "id")
        seen.setdefault(case.id, case.line)
    for case in cases:
        other = case.measured.get("relative_to")
        if case.kind == "training" and other is not None and other not in seen:
            check.fault(f"no case {other!r} in this file", case.line, f"{case.id}.measured.relative_to",
                        nearest(str(other), seen))


def _sweep(path: Path, kind: str, line: int, defaults: dict[str, Any], entry: dict[str, Any],
           check: _Checker) -> Case | None:
    before = len(check.faults)
    rows = entry.get("rows")
    if not isinstance(rows, list) or not all(
            isinstance(r, list) and len(r) == 2 and all(_positive(v) for v in r) for r in rows):
        check.fault("must be a list of [bytes, time_us]", line, f"{entry['id']}.rows")
    ranks, cluster = entry.get("ranks"), entry.get("cluster")
    if type(ranks) is not int or ranks < 1 or not isinstance(entry.get("op"), str):
        check.fault("needs 'op' and a whole number of 'ranks' from 1 on", line, entry["id"])
    if not isinstance(cluster, str) and not (isinstance(cluster, dict) and cluster.get("topology")):
        check.fault("needs a 'cluster': the name of a topology, or a mapping with 'topology'", line, entry["id"])
    if len(check.faults) > before or not isinstance(rows, list):
        return None
    given = {key: value for key, value in entry.items() if key != "rows"}
    table = tuple({"bytes": r[0], "measured_us": float(r[1])} for r in rows)
    return Case(path.name, str(path), line, kind, entry["id"], given, {}, quality=entry.get("quality"), rows=table)


#: Columns of the three layouts of kernel files: matrix products, row-wise kernels, and SimuMax's efficiencies. Others
#: may stand beside them, in any order; `source` may be left out.
_LAYOUTS = (("gpu", "dtype", "m", "n", "k", "batch", "time_us", "source"),
            ("gpu", "dtype", "op", "rows", "cols", "time_us", "source"),
            ("gpu", "op", "peak_tflops", "key", "efficiency"))
#: Columns that hold sizes, and those that hold other numbers: all above 0.
_SIZES, _NUMBERS = frozenset({"m", "n", "k", "batch", "rows", "cols"}), ("time_us", "peak_tflops", "efficiency")


def _read_csv(path: Path, text: str) -> CaseFile:
    """One case per (gpu, dtype, op) of a kernel file; matrix products are the operator `gemm`."""
    check = _Checker(path)
    reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
    header = tuple(reader.fieldnames or ())
    layout = next((columns for columns in _LAYOUTS if {*columns} <= {*header, "source"}), None)
    if layout is None:
        allowed = " | ".join(",".join(layout) for layout in _LAYOUTS)
        raise UserError(Fault(f"unknown header {','.join(header)!r}; allowed: {allowed}", file=str(path), line=1))
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    first: dict[tuple[str, str, str], int] = {}
    for raw in reader:
        row, line = _row(raw, layout), reader.line_num
        if isinstance(row, str):
            check.fault(row, line)
            continue
        key = (row["gpu"], row.get("dtype", "bf16"), row.get("op", "gemm"))
        groups.setdefault(key, []).append(row)
        first.setdefault(key, line)
    check.raise_any()
    cases = tuple(Case(path.name, str(path), first[k], "kernels", ":".join(k),
                       {"gpu": k[0], "dtype": k[1], "op": k[2]}, {}, rows=tuple(rows)) for k, rows in groups.items())
    return CaseFile(path.name, str(path), "kernels", path.stem, cases)


def _row(raw: Mapping[str, str | None], layout: Sequence[str]) -> dict[str, Any] | str:
    """A row of a kernel file with its numbers read, or what is wrong with it."""
    row: dict[str, Any] = {}
    for name in layout:
        cell = raw.get(name)
        if cell is None and name != "source":
            return f"the row has no '{name}'"
        row[name] = cell or ""
        if name in _SIZES or name in _NUMBERS:
            try:
                value = float(row[name])
            except ValueError:
                value = math.nan
            if not 0 < value < 1e12 or (name in _SIZES and value != int(value)):
                kind = "whole number" if name in _SIZES else "number"
                return f"{name} is not a {kind} above 0: '{row[name][:40]}'"
            row[name] = value
    return row
