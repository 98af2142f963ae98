"""`compare`: runs side by side, which term of the step and of memory moved by how much, and what stands behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sim.api import Source, run
from sim.errors import Fault, UserError
from sim.network.figures import catalogue
from sim.parallel.serving.request import run_of
from sim.report import words
from sim.report.numbers.bounding import felt
from sim.report.numbers.breakdown import category_flops
from sim.report.numbers.budget import BudgetResult
from sim.report.numbers.inference import InferenceResult, latency_row
from sim.report.result import Result, has_tokens, tokens_per_sample
from sim.report.tables import Frame, as_table
from sim.report.units import seconds
from sim.scenario import Loaded, Scenario
from sim.scenario.dump import dump

_EXPOSED = "exposed_communication"
_GIB = 2.0**30
#: Where a cluster has figures of its own, as `drystep calibrate` writes them, in place of the catalogue's.
_LINKS = "cluster.topology.links"


@dataclass(frozen=True)
class Comparison:
    """Runs against the first of them.

    Attributes:
        names: of the runs.
        step_time_s, gpus: of each.
        served: latencies and throughput of each, where all are inference; else empty.
        terms: term of the breakdown to its seconds in each run; they sum to the step (`whole_s`). Of inference, whose
            requests differ in tokens, seconds of a GPU for each token that is generated (by an encoder: read).
        moved: for each run but the first, terms by how far they moved, the farthest first: (term, seconds).
        why: for each run but the first, what stands behind each term that moved, in words.
        differs: field to its value in each run, where runs differ.
        scaling: throughput per GPU of each over the first's; None of a run whose samples are not of the first's kind
            (sequences of tokens, or what a table of layers counts).
        rates: throughput per GPU of each, and what it counts: (2016.5, "samples/s").
        memory: category to its bytes at the peak of the fullest rank in each run.
        memory_moved: as `moved`, in bytes.
        bound: what bounds each run; `bound_by` in words.
        fits: whether each run fits in memory: the step of one that does not is what it would take.
        contention_s: part of the compute terms of each by which collectives slow kernels down, in their unit.
        warnings: of each run.
        budgets: of each run, its length and price; None of one without `budget.tokens`.
    """

    names: list[str]
    step_time_s: list[float]
    gpus: list[int]
    terms: dict[str, list[float]]
    moved: list[list[tuple[str, float]]]
    differs: dict[str, list[Any]]
    scaling: list[float | None]
    why: list[dict[str, str]] = field(default_factory=list)
    memory: dict[str, list[float]] = field(default_factory=dict)
    memory_moved: list[list[tuple[str, float]]] = field(default_factory=list)
    bound: list[str] = field(default_factory=list)
    served: list[InferenceResult] = field(default_factory=list)
    fits: list[bool] = field(default_factory=list)
    contention_s: list[float] = field(default_factory=list)
    warnings: list[list[str]] = field(default_factory=list)
    bound_by: list[str] = field(default_factory=list)
    rates: list[tuple[float, str]] = field(default_factory=list)
    budgets: list[BudgetResult | None] = field(default_factory=list)

    @property
    def whole_s(self) -> list[float]:
        """What the terms of each run sum to."""
        if not self.served:
            return self.step_time_s
        return [gpus / one.tokens_per_second for gpus, one in zip(self.gpus, self.served, strict=True)]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"names": self.names, "step_time_s": self.step_time_s, "gpus": self.gpus, "bound": self.bound,
                **({"inference": [one.to_json() for one in self.served]} if self.served else {}),
                "fits": self.fits,
                "terms_s": self.terms, "moved_s": [dict(row) for row in self.moved], "why": self.why,
                "memory_bytes": self.memory, "memory_moved_bytes": [dict(row) for row in self.memory_moved],
                "contention_s": self.contention_s, "differs": self.differs, "scaling": self.scaling,
                **({"budget": [None if one is None else one.to_json() for one in self.budgets]}
                   if any(self.budgets) else {}),
                "warnings": self.warnings}

    def table(self) -> Frame:
        """One row per run: name, GPUs, step, what bounds it, whether it fits, scaling, and every term's seconds."""
        return as_table([
            {"name": name, "gpus": self.gpus[i], "step_time_s": self.step_time_s[i],
             **(latency_row(self.served[i]) if self.served else {}), "bound": self.bound[i], "fits": self.fits[i],
             "scaling": self.scaling[i], **_length(self.budgets[i]),
             **{f"{term}_s": values[i] for term, values in self.terms.items()},
             **{f"memory_{part}_bytes": values[i] for part, values in self.memory.items()}}
            for i, name in enumerate(self.names)])


def _length(budget: BudgetResult | None) -> dict[str, Any]:
    """Columns of a run's length and price."""
    return {} if budget is None else {"days": budget.days, "gpu_hours": budget.gpu_hours, "cost": budget.cost}


#: What comes with a machine: told last of what tells runs apart.
_HOST = "cluster.topology.host."
#: What a scenario says about itself, and not of the run.
_SAID = ("name", "expect", "claim", "sweep", "cluster.topology.name", "cluster.topology.source",
         "cluster.topology.notes")
#: What no request depends on, and follows from other fields.
_TRAINED = ("training.global_batch", "training.micro_batch", "training.sequence", "training.decoder_sequence",
            "training.predicted_tokens", "training.finetune.base", "parallel.reduce_every_micro_step")
#: What only strategies that gather parameters read; whether it is on by default follows from the pipeline.
_GATHERED, _GATHERING = "parallel.reshard_after_forward", ("fsdp", "zero3")
#: A topology's name, and its figures, which are told by it where runs have other topologies.
_TOPOLOGY, _FIGURES = "cluster.topology.name", "cluster.topology"
#: Fields told beside the name of a run that is called as another one: so many, and more where these leave two alike.
_TOLD, _TOLD_AT_MOST = 2, 6


def compare(runs: Result | Source | Sequence[Result | Source]) -> Comparison:
    """Lay runs side by side; the first is what the others are held against.

    Args:
        runs: results, or what `run` takes: it is run first. One alone has nothing that moved.

    Raises:
        UserError: nothing to compare, or a scenario is wrong.
    """
    runs = [runs] if isinstance(runs, Result | Scenario | Loaded | str | Path | Mapping) else runs
    if not runs:
        raise UserError(Fault("there is nothing to compare", "runs"))
    results = [one if isinstance(one, Result) else run(one) for one in runs]
    served = [r.inference for r in results if r.inference is not None]
    served = served if len(served) == len(results) else []
    shares = [_gpus_per_token(r) if served else 1.0 for r in results]
    terms = _side_by_side([{name: seconds * share for name, seconds in _terms(r.breakdown.to_json())}
                           for r, share in zip(results, shares, strict=True)])
    memory = _side_by_side([{name: float(held) for name, held in r.memory.at_peak.items()} for r in results])
    moved = _moved(terms, 1e-12)
    why = [{term: reason for term, _ in row if (reason := _reason(term, results[0], results[i]))}
           for i, row in enumerate(moved, 1)]
    fields = [dict(_leaves(dump(r.scenario))) for r in results]
    paths = list(dict.fromkeys(path for one in fields for path in one))
    gathers = any(r.scenario.parallel.strategy in _GATHERING for r in results)
    untold = (*_SAID, *_TRAINED * bool(served), *(() if gathers else (_GATHERED,)))
    differs = {path: [one.get(path) for one in fields] for path in paths
               if not any(path == said or path.startswith(f"{said}.") for said in untold)
               and any(one.get(path) != fields[0].get(path) for one in fields)}
    rates = [_rate(r) for r in results]
    names = _names([r.scenario.name for r in results], differs, [one.get(_TOPOLOGY) for one in fields])
    differs = {path: _in_force(path, values) for path, values in differs.items()}
    scaling = [each / rates[0][0] if of == rates[0][1] else None for each, of in rates]
    return Comparison(names, [r.step_time_s for r in results], [r.gpus for r in results],
                      terms, moved, differs, scaling, why, memory,
                      _moved(memory, 0.5), [r.bound for r in results], served, [r.memory.fits for r in results],
                      [r.breakdown.contention * share for r, share in zip(results, shares, strict=True)],
                      [r.warnings for r in results],
                      [words.bound(felt(r.bound, r.breakdown, r.waits), r.inference is not None) for r in results],
                      rates, [r.budget for r in results])


def _gpus_per_token(result: Result) -> float:
    """GPUs over the tokens of a request."""
    return result.gpus / (result.tokens_per_second * result.step_time_s)


def _in_force(path: str, values: Sequence[Any]) -> list[Any]:
    """Values of a field; figures of links that a cluster has none of its own of are the catalogue's."""
    figure = catalogue().get(path.removeprefix(f"{_LINKS}."))
    return [figure if value is None and figure is not None else value for value in values]


def _names(given: Sequence[str], differs: Mapping[str, Sequence[Any]],
           topologies: Sequence[Any] | None = None) -> list[str]:
    """Names that tell the runs apart: those called alike get the first fields in which they differ, or a number."""
    found = list(given)
    for name in dict.fromkeys(given):
        alike = [j for j, other in enumerate(given) if other == name]
        if len(alike) == 1:
            continue
        differ = {path: values for path, values in differs.items()
                  if any(values[j] != values[alike[0]] for j in alike)}
        if topologies is not None and len({topologies[j] for j in alike}) > 1:
            differ = {_FIGURES: topologies} | {path: values for path, values in differ.items()
                                               if not path.startswith(f"{_FIGURES}.")}
        told = [_fields_told(differ, i) for i in alike]
        for most in range(_TOLD, _TOLD_AT_MOST + 1):
            said = [", ".join(one[:most]) for one in told]
            if len(set(said)) == len(alike):
                break
        for number, i in enumerate(alike):
            found[i] = f"{name} ({said[number] if said.count(said[number]) == 1 else number + 1})"
    return found


def _fields_told(differ: Mapping[str, Sequence[Any]], run: int) -> list[str]:
    """What one run says of each field by which runs differ."""
    heads = [path for path in differ if not any(path.startswith(f"{other}.") for other in differ)]
    heads = list(dict.fromkeys(_LINKS if path.startswith(_LINKS) else path for path in heads))
    heads.sort(key=lambda path: path.startswith(_HOST))
    return [_told(path, {p: differ[p][run] for p in differ if f"{p}.".startswith(f"{path}.")}) for path in heads]


def _told(path: str, values: Mapping[str, Any]) -> str:
    """What one run says of a field, as a word or as fields of a mapping: "recompute full", "recompute layers 14". Of
    figures of links, by dozens, whose they are, and the first."""
    if path == _LINKS:
        own = {name.removeprefix(f"{_LINKS}."): value for name, value in values.items() if value is not None}
        return next((f"links as measured: {name} {_value(value)}{' and more' * (len(own) > 1)}"
                     for name, value in own.items()), "links as in the catalogue")
    given = [f"{name[len(path) + 1:]} {_value(value)}".strip() for name, value in values.items() if value is not None]
    return f"{path.rpartition('.')[2]} {' '.join(given) or _value(None)}".replace("_", " ")


def _value(value: Any) -> str:
    return words.written(value, "not set")


def _samples(result: Result) -> tuple[float, str]:
    """What a GPU takes in a training step, and what that counts."""
    scenario = result.scenario
    samples = scenario.training.global_batch / result.gpus
    return (samples * tokens_per_sample(scenario), "tokens") if has_tokens(scenario) else (samples, "samples")


def _rate(result: Result) -> tuple[float, str]:
    """Throughput of one GPU and what it counts."""
    if has_tokens(result.scenario):
        return result.tokens_per_second_per_gpu, "tokens/s"
    return result.samples_per_second / result.gpus, "samples/s"


def _side_by_side(columns: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    names = dict.fromkeys(name for one in columns for name in one)
    return {name: values for name in names if any(values := [one.get(name, 0.0) for one in columns])}


def _moved(terms: Mapping[str, Sequence[float]], least: float) -> list[list[tuple[str, float]]]:
    runs = len(next(iter(terms.values()), ()))
    shifts = [[(name, values[i] - values[0]) for name, values in terms.items()] for i in range(1, runs)]
    return [sorted((s for s in row if abs(s[1]) > least), key=lambda s: -abs(s[1])) for row in shifts]


# ----------------------------------------------------------------------------------------------------------- reasons
def _reason(term: str, before: Result, after: Result) -> str:
    """What changed in the quantities a term is made of: its work and its pace, or its traffic and what is hidden."""
    if term.startswith(_EXPOSED):
        return _communication(term.split(".")[1:], before, after)
    if term in ("compute.gemm", "compute.attention"):
        return _arithmetic(term.rpartition(".")[2], before, after)
    if term == "compute.optimizer":
        states = [r.memory.at_peak["optimizer_states"] / _GIB for r in (before, after)]
        return f"optimizer states of a GPU {states[0]:.3g} -> {states[1]:.3g} GiB" if states[0] != states[1] else ""
    if term == "pipeline_bubble":
        return _bubble(before, after)
    if term == "compute.memory_bound" and before.inference is None:
        (each, of), (later, of_later) = (_samples(r) for r in (before, after))
        return _times(f"{of} per GPU and step", each, later) if of == of_later else ""
    if term == "host":
        return _waits(before, after)
    if term == "offload":
        return " -> ".join(dict.fromkeys(str(r.copied or "nothing outside the GPU") for r in (before, after)))
    return ""


def _waits(before: Result, after: Result) -> str:
    """What of the host's term moved: its own time behind each task, training data, the allocator's retries."""
    waits, later = before.waits, after.waits
    said = [f"{words.term(name)} {seconds(waits[name])} -> {seconds(later[name])}" for name in ("data", "allocator")
            if waits[name] != later[name]]
    if abs(later["host"] - waits["host"]) > 1e-3 * before.step_time_s or not said:
        busy = [r.breakdown.compute_s / r.detail.timeline.tasks for r in (before, after)]
        said.append(f"mean task of kernels and calls {seconds(busy[0])} -> {seconds(busy[1])}")
    return ", ".join(said)


def _arithmetic(category: str, before: Result, after: Result) -> str:
    """Time = work / pace: the category's FLOPs on one GPU, and what is left for the FLOP/s."""
    if not after.breakdown.compute[category]:
        return "none of it any more"
    if not before.breakdown.compute[category]:
        return "new"
    each = [_flops(r, category) for r in (before, after)]
    if not all(each):
        return ""
    pace = (each[1] / each[0]) / (after.breakdown.compute[category] / before.breakdown.compute[category])
    gpus = "" if before.gpu == after.gpu else f", {before.gpu} -> {after.gpu}"
    per = "GPU"
    if before.inference is not None and after.inference is not None:
        each, per = [_gpus_per_token(r) * one for r, one in zip((before, after), each, strict=True)], "token"
    return f"work per {per} x{each[1] / each[0]:.3g}, pace x{pace:.3g}{gpus}"


def _flops(result: Result, category: str) -> float:
    """FLOPs of the kernels of one category on the GPU whose seconds the breakdown tells."""
    job = result.detail.lowered.job
    return category_flops(job.programs[job.classes[result.detail.critical].program]).get(category, 0.0)


def _communication(path: Sequence[str], before: Result, after: Result) -> str:
    """Seconds on the wire, the share of them that is hidden, and the ranks that take part."""
    kind, group = path[0], path[1] if len(path) > 1 else ""
    said = []
    for result in (before, after):
        total = result.breakdown.communication_total.get(kind, {}).get(group, 0.0)
        exposed = result.breakdown.exposed_communication.get(kind, {}).get(group, 0.0)
        said.append((total, 1 - exposed / total if total > exposed else 0.0, result.group_ranks.get(group, 0)))
    (wire, hidden, ranks), (wire2, hidden2, ranks2) = said
    if not wire2:
        return "none of it any more"
    if not wire:
        return f"new: {seconds(wire2)} on the wire, {100 * hidden2:.0f}% hidden, {ranks2} ranks"
    among = f"{ranks} ranks" if ranks == ranks2 else f"{ranks} -> {ranks2} ranks"
    share = f"hidden {100 * hidden:.0f}% -> {100 * hidden2:.0f}%"
    return f"on the wire {seconds(wire)} -> {seconds(wire2)}, {share}, {among}"


def _bubble(before: Result, after: Result) -> str:
    said = []
    for result in (before, after):
        parallel, micro = result.scenario.parallel, result.scenario.micro_steps
        if (run := run_of(result.scenario)) is not None:
            said.append(f"{parallel.pipeline} stages, {min(parallel.pipeline, run.batch)} parts of the batch")
            continue
        said.append(f"{parallel.pipeline} stages x {parallel.virtual_stages} chunks, {micro} micro-batches, "
                    f"{parallel.schedule}")
    return " -> ".join(dict.fromkeys(said))


def _times(what: str, before: float, after: float) -> str:
    return f"{what} x{after / before:.3g}" if before and after != before else ""


def _terms(value: Mapping[str, Any], head: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, part in value.items():
        path = f"{head}.{name}" if head else name
        found += _terms(part, path) if isinstance(part, Mapping) else [(path, float(part))]
    return found


def _leaves(value: Any, head: str = "") -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        return [(head, value)]
    return [leaf for name, part in value.items() for leaf in _leaves(part, f"{head}.{name}" if head else str(name))]
