"""`python -m sim.validation.runs`: whole training runs of known length, predicted and put side by side, worst first.

    python -m sim.validation.runs [--select TEXT] [--out reports/runs.md]

Steps that papers outside the collection give stand below them (`sim.validation.recalled`), unless runs are selected.

The runs stand in scenarios/runs/published.yaml. A published length holds what a step does not: restarts, evaluation,
stretches at other batch sizes, machines that were down. Only failures are predicted (where a paper counts them), so a
prediction should come out somewhat short.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sim import api
from sim.catalog import folder
from sim.errors import Fault, UserError
from sim.report.result import Result
from sim.scenario.load import resolve
from sim.validation import recalled

_COMMAND = "python -m sim.validation.runs"
#: Figures a paper may give of a run, by their names in a result or its budget.
_FIGURES = ("gpu_hours", "days", "tokens_per_second_per_gpu", "model_tflops_per_gpu", "hardware_tflops_per_gpu")
_HEAD = f"""# Lengths of published runs, predicted

Written by `{_COMMAND} --out reports/runs.md`; do not edit. Runs, layouts and sources: `scenarios/runs/published.yaml`;
figures are recalled from the papers. The error is of time: positive = predicted slower than published. Published
lengths hold evaluation, other batch sizes at the start and machines that were down, so a good prediction is somewhat
short. `goodput` is what failures leave, below 100% only where the paper counts them.
"""


@dataclass(frozen=True)
class RunLength:
    """One published figure of one run.

    Attributes:
        figure: one of `_FIGURES`.
        error: of the time, share of the published: > 0 = predicted slower.
        fits: whether the predicted job fits in memory.
    """

    run: str
    figure: str
    measured: float
    predicted: float
    error: float
    goodput: float
    fits: bool
    confidence: str
    layout: str
    source: str
    note: str


def published() -> list[dict[str, Any]]:
    """The runs of scenarios/runs/published.yaml."""
    return list(yaml.safe_load((folder("scenarios") / "runs" / "published.yaml").read_text(encoding="utf-8"))["runs"])


def predict(run: Mapping[str, Any]) -> list[RunLength]:
    """Every published figure of a run beside its prediction.

    Raises:
        UserError: the run's scenario is wrong or not simulated; a figure is not known.
    """
    unknown = set(run["measured"]) - set(_FIGURES)
    if unknown:
        raise UserError(Fault(f"no such figure of a run: {', '.join(sorted(unknown))}", f"{run['id']}.measured"))
    result = api.run(resolve({"name": run["id"], **run["scenario"]}, "scenarios/runs/published.yaml"))
    return list(_figures(run, result))


def _figures(run: Mapping[str, Any], result: Result) -> Iterator[RunLength]:
    assert result.budget is not None, "every run has tokens"
    for figure, measured in run["measured"].items():
        length = figure in ("gpu_hours", "days")
        predicted = getattr(result.budget if length else result, figure)
        if predicted is None:
            raise UserError(Fault("failures leave no time for work", f"{run['id']}.scenario.budget"))
        ratio = predicted / measured if length else measured / predicted
        yield RunLength(run["id"], figure, float(measured), float(predicted), ratio - 1,
                        result.budget.goodput if length else 1.0, result.memory.fits, run["confidence"],
                        run["layout"].partition(":")[0], run["source"],
                        " ".join(run.get("note", "").split()))


def markdown(found: Sequence[RunLength]) -> str:
    """The text of reports/runs.md."""
    lines = [_HEAD, "| run | figure | published | predicted | error of time | goodput | fits | layout known |",
             "|---|---|---|---|---|---|---|---|"]
    for one in sorted(found, key=lambda r: -abs(r.error)):
        lines.append(f"| {one.run} | {one.figure.replace('_', ' ')} | {one.measured:,.4g} | {one.predicted:,.4g} "
                     f"| {100 * one.error:+.1f}% | {100 * one.goodput:.1f}% | {'yes' if one.fits else 'no'} "
                     f"| {one.layout} |")
    mean = sum(abs(one.error) for one in found) / len(found) if found else 0.0
    sources = dict.fromkeys(f"* {one.run}: {one.source} (figures: confidence {one.confidence}). {one.note}".rstrip()
                            for one in found)
    return "\n".join([*lines, "", f"Mean of the absolute errors: {100 * mean:.1f}% of {len(found)} figures.", "",
                      *sources, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog=_COMMAND, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--select", default="", help="only runs whose id holds this text")
    parser.add_argument("--out", type=Path, help="write the report here; default: print it")
    given = parser.parse_args(arguments)
    found: list[RunLength] = []
    failed = False
    for run in published():
        if given.select not in run["id"]:
            continue
        try:
            found += predict(run)
        except UserError as error:
            print(error, file=sys.stderr)
            failed = True
    text = markdown(found)
    if not given.select:
        text += "\n" + recalled.both()
    if given.out is None:
        print(text)
    else:
        given.out.write_text(text, encoding="utf-8")
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
