"""`python -m sim.validation.claims`: puts every claim of scenarios/claims to the test and writes what came of it.

    python -m sim.validation.claims [FILE ...] [--out reports] [--readme README.md] [--check]

Each scenario is predicted (all points of its sweep), its `expect` is judged, and the numbers its reasons quote are read
off the results. Written are reports/claims.md and the README's table, between two comment lines. `--check` writes
nothing and exits with 3 when a text is not current; a broken bound exits with 3 in any case.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim import api
from sim.catalog import folder
from sim.errors import Fault, UserError, nearest
from sim.report.expect import Broken, Point, judge, where
from sim.report.result import Result
from sim.scenario.fields.claim import Claim, Figure

_COMMAND = "python -m sim.validation.claims"
_README = re.compile(r"(<!-- claims:begin[^\n]*-->).*?(<!-- claims:end -->)", re.DOTALL)
_QUOTED = re.compile(r"\{(\w+)\}")
#: Points of a sweep that the report prints as a table; longer sweeps are told by their figures.
_TABLE_POINTS = 90
_HEAD = f"""# The claims this project started from, held against the simulator

Written by `{_COMMAND}`; do not edit. Each claim is a scenario of `scenarios/claims/`: its `expect` bounds are what is
predicted today, its verdict is what that says of the claim. Every number of the reasons is read off the prediction.
"""
#: Bytes, FLOP/s or seconds of one written unit.
_SCALES = {"GB": 1e9, "GiB": 2.0**30, "TB": 1e12, "GB/s": 1e9, "TFLOP/s": 1.0, "s": 1.0, "ms": 1e-3, "tokens/s": 1.0}


@dataclass(frozen=True)
class Checked:
    """One claim, put to the test.

    Attributes:
        why: the reasons with their figures filled in.
        bounds: how many bounds its `expect` has.
        broken: those that the prediction does not meet.
        points: what was predicted, by point of the sweep.
        skipped: points that are impossible, with their reason.
    """

    path: Path
    name: str
    claim: Claim
    why: str
    bounds: int
    broken: tuple[Broken, ...]
    points: tuple[Point, ...]
    skipped: tuple[Mapping[str, Any], ...]


def claim_files() -> list[Path]:
    """The shipped claims, by name."""
    return sorted((folder("scenarios") / "claims").glob("*.yaml"))


def check(path: Path) -> Checked:
    """Predicts a claim's scenario and judges it.

    Raises:
        UserError: the file is wrong, makes no claim or has no bounds, nothing of it can be simulated, or its reasons
            quote a figure that does not exist.
    """
    loaded = api.load(path)
    claim = loaded.scenario.claim
    missing = "claim" if claim is None else "" if loaded.expect else "expect"
    if claim is None or missing:
        raise UserError(Fault(f"a claim's scenario needs '{missing}'", missing, str(path)))
    points: list[Point] = []

    def keep(result: Result) -> None:
        as_json = result.to_json()
        del as_json["traffic"]
        points.append((result.set, as_json))

    sweep = api.run_sweep(loaded, each=keep)
    if not points:
        reasons = sorted({str(one["reason"]) for one in sweep.skipped})
        raise UserError(Fault(f"nothing of it can be simulated: {'; '.join(reasons)}", "", str(path)))
    broken = judge(loaded.expect, points, lambda other: api.run(other).to_json())
    return Checked(path, loaded.scenario.name, claim, quoted(claim, points, str(path)), len(loaded.expect),
                   tuple(broken), tuple(points), tuple(sweep.skipped))


def quoted(claim: Claim, points: Sequence[Point], file: str = "") -> str:
    """The reasons with each `{name}` replaced by its figure.

    Raises:
        UserError: there is no such figure, its point or one of its fields.
    """
    def fill(match: re.Match[str]) -> str:
        name = match[1]
        if name not in claim.figures:
            raise UserError(Fault(f"there is no figure '{name}'", "claim.why", file, 0, nearest(name, claim.figures)))
        try:
            return written(value(claim.figures[name], points), claim.figures[name].unit)
        except KeyError as error:
            raise UserError(Fault(str(error.args[0]), f"claim.figures.{name}", file)) from error

    return _QUOTED.sub(fill, " ".join(claim.why.split()))


def value(figure: Figure, points: Sequence[Point]) -> float:
    """A figure's number.

    Raises:
        KeyError: its point was not predicted, or the result has no such field.
    """
    here = _point(points, figure.at)
    number = _total(here, figure.fields) / figure.per
    if figure.relative_to:
        number /= _total(_point(points, figure.relative_to), figure.fields)
    if figure.share_of:
        number /= _total(here, figure.share_of)
    return number


def written(number: float, unit: str) -> str:
    """A number as a person reads it, with its unit."""
    if unit == "change":
        return f"{100 * (number - 1):+.3g}%".replace("-", "−")
    if unit in ("%", "x"):
        return f"{_three_digits(100 * number)}%" if unit == "%" else f"{_three_digits(number)}×"
    if unit == "number":
        return _three_digits(number)
    return f"{_three_digits(number / _SCALES[unit])} {unit}"


def _three_digits(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 999.5 else f"{number:.3g}"


def _point(points: Sequence[Point], at: Mapping[str, Any]) -> Mapping[str, Any]:
    found = [result for sets, result in points if all(path in sets and sets[path] == v for path, v in at.items())]
    if len(found) != 1:
        raise KeyError(f"{len(found)} predicted points have {where(at) or 'no set'}: one is needed")
    return found[0]


def _total(result: Mapping[str, Any], fields: Sequence[str]) -> float:
    return sum(_number(result, name) for name in fields)


def _number(result: Mapping[str, Any], dotted: str) -> float:
    """A field's number; a mapping counts as the sum of what it holds, and what was never spent is zero."""
    here: Any = result
    parts = dotted.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(here, Mapping) or part not in here:
            if depth and parts[0] in ("breakdown_s", "communication_s"):
                return 0.0  # a collective that this point does not have
            raise KeyError(f"the result has no '{dotted}'")
        here = here[part]
    return _sum(here)


def _sum(tree: Any) -> float:
    return sum(_sum(v) for v in tree.values()) if isinstance(tree, Mapping) else float(tree)


# ------------------------------------------------------------------------------------------------------------- reports
def markdown(checked: Sequence[Checked]) -> str:
    """The text of reports/claims.md; the same predictions give the same text."""
    parts = [_HEAD, *_rows(checked), ""]
    for one in checked:
        parts += _section(one)
    return "\n".join(parts)


def readme_with(text: str, checked: Sequence[Checked]) -> str:
    """`text` with the table between `<!-- claims:begin ... -->` and `<!-- claims:end -->` renewed.

    What holds is listed there, what is wrong is explained too; all of it stands in reports/claims.md.
    """
    lines = ["| claim | verdict | where wrong, why |", "|---|---|---|"]
    lines += [f"| [{_cell(one.claim.text)}](scenarios/claims/{one.path.name}) | {one.claim.verdict} "
              f"| {_cell(one.why) if one.claim.verdict == 'wrong' else ''} |" for one in checked]
    return _README.sub(lambda found: "\n".join([found[1], *lines, found[2]]), text)


def _rows(checked: Sequence[Checked]) -> list[str]:
    lines = ["| claim | verdict | what is predicted |", "|---|---|---|"]
    return lines + [f"| [{_cell(one.claim.text)}](../scenarios/claims/{one.path.name}) | {one.claim.verdict} "
                    f"| {_cell(one.why)} |" for one in checked]


def _section(one: Checked) -> list[str]:
    text = " ".join(one.claim.text.split())
    bounds = "its bound holds" if one.bounds == 1 else f"all {one.bounds} bounds hold"
    state = f"broken: {'; '.join(map(str, one.broken))}" if one.broken else bounds
    source = f" ({one.claim.source})" if one.claim.source else ""
    lines = [f"## {one.name}\n", f"> {text}{source}\n", f"**{one.claim.verdict}**: {one.why}\n",
             f"`drystep run scenarios/claims/{one.path.name} --check`: {len(one.points)} predicted, {state}.\n"]
    if 1 < len(one.points) <= _TABLE_POINTS:
        lines += [*_points_table(one.points), ""]
    reasons = dict.fromkeys(str(point["reason"]) for point in one.skipped)
    return lines + [f"Not predicted: {reason}.\n" for reason in reasons]


def _points_table(points: Sequence[Point]) -> list[str]:
    axes = list(points[0][0])
    heads = [*(axis.rpartition(".")[2].replace("_", " ") for axis in axes), "step s", "tokens/s per GPU",
             "TFLOP/s per GPU", "exposed", "memory GB", "fits"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for sets, result in points:
        memory, step_s = result["memory"], result["step_time_s"]
        exposed = _sum(result["breakdown_s"]["exposed_communication"]) / step_s
        cells = [*(_axis_value(sets[axis]) for axis in axes), f"{step_s:.4g}",
                 _three_digits(result["tokens_per_second_per_gpu"]), f"{result['model_tflops_per_gpu']:.1f}",
                 f"{100 * exposed:.1f}%", _three_digits(memory["device_used_bytes"] / 1e9),
                 "yes" if memory["fits"] else "no"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _axis_value(setting: Any) -> str:
    if isinstance(setting, Mapping):
        return _cell(", ".join(f"{key} {_axis_value(inner)}" for key, inner in setting.items()))
    return _cell(str(setting))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog=_COMMAND, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="claims; default: all shipped ones")
    parser.add_argument("--out", type=Path, default=Path("reports"), help="folder of claims.md")
    parser.add_argument("--readme", type=Path, default=Path("README.md"), help="file with the table of claims")
    parser.add_argument("--check", action="store_true", help="only say whether the texts are current")
    given = parser.parse_args(arguments)
    checked, failed = [], False
    for path in given.files or claim_files():
        try:
            checked.append(check(path))
        except UserError as error:
            print(error, file=sys.stderr)
            failed = True
            continue
        for broken in checked[-1].broken:
            print(f"{path}: {broken}", file=sys.stderr)
            failed = True
    texts = {given.out / "claims.md": markdown(checked)}
    if given.readme.is_file():
        texts[given.readme] = readme_with(given.readme.read_text(encoding="utf-8"), checked)
    stale = [path for path, text in texts.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if given.check:
        print("\n".join(f"{path}: not current; run {_COMMAND}" for path in stale) or "the claims are current")
        return 3 if stale or failed else 0
    given.out.mkdir(parents=True, exist_ok=True)
    for path in stale:
        path.write_text(texts[path], encoding="utf-8")
    print(f"{len(checked)} claims; written: {', '.join(map(str, stale)) or 'nothing, all was current'}")
    return 3 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
