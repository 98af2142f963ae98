"""The record of errors: published runs like this one, and how far their predictions were off.

`record.yaml` beside this file holds one row per published run that was compared, written by
`python -m sim.validation.report`. It is read when a result is asked about it, never by a prediction.
"""

from __future__ import annotations

import math
from dataclasses import asdict, astuple, dataclass, fields, replace
from functools import lru_cache
from typing import Any

from sim.catalog import table
from sim.model import build
from sim.parallel import Lowered
from sim.scenario.fields.schema import Scenario
from sim.work import DTYPE_BYTES

RECORD = "report/record.yaml"
#: Runs from which a mean says something; where the nearest are fewer, a wider search is asked as well.
ENOUGH = 5
#: Follows the name of a source whose figures are recalled, not collected.
RECALLED = " (recalled)"
#: Chips in the order of their makers' generations. What one does with a kernel says little of another maker's.
_GENERATIONS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("volta",), ("turing",), ("ga100", "ga102"), ("ada", "hopper"), ("blackwell",)), (("cdna2",), ("cdna3",)))


@dataclass(frozen=True, slots=True)
class Features:
    """What makes runs alike. Every field but the last two must agree for runs to be of one kind.

    Attributes:
        model: shape of the model (`model.kind`), "mixture" with experts.
        mode: train, infer (compiled or in graphs), infer-eager, or the method of fine-tuning.
        strategy: data parallelism of training; of inference "none" where weights are whole.
        splits: other axes that split the model, e.g. "tensor+pipeline"; "" for none.
        offload: whether anything lives outside the GPU.
        generation: chip of the GPU as its kernels know it (volta, ga100, ga102, hopper …).
        compute: fp32, half or fp8: class of the products' dtype.
        framework: profile of the training stack.
        gpus, parameters: scale.
    """

    model: str
    mode: str
    strategy: str
    splits: str
    offload: bool
    generation: str
    compute: str
    framework: str
    gpus: int
    parameters: float


#: What a wider search no longer asks for, one after the other, and how many times larger or smaller a run may be.
_SEARCHES: tuple[tuple[tuple[str, ...], tuple[float, ...]], ...] = (
    ((), (4.0, 16.0)), (("framework",), (16.0,)), (("framework", "splits"), (64.0,)))


@dataclass(frozen=True, slots=True)
class Validated:
    """Record of the nearest published runs (`validated` of result.md).

    Attributes:
        count: runs found; 0 leaves the figures None.
        mean_error: signed mean of predicted / measured - 1.
        spread: their standard deviation, None for one run.
        worst: the error largest in size.
        differs: features in which those runs need not agree with this one.
        sources: files they are from.
        generations: chips they ran on, where that is not this one's.
        wider: the record of a wider kind with enough runs, where the nearest are few.
    """

    count: int
    mean_error: float | None = None
    spread: float | None = None
    worst: float | None = None
    differs: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    generations: tuple[str, ...] = ()
    wider: Validated | None = None

    def to_json(self) -> dict[str, Any]:
        """The field of the result."""
        lists = {name: list(getattr(self, name)) for name in ("differs", "sources", "generations")}
        return {**asdict(self), **lists, "wider": None if self.wider is None else self.wider.to_json()}

    def __str__(self) -> str:
        """As the report prints it: "34 published runs like this: −1% ± 3% (step predicted against measured)"."""
        if not self.count:
            return "no published run like this has been compared"
        runs = "1 published run" if self.count == 1 else f"{self.count} published runs"
        wider = "" if self.wider is None else f"; {self.wider.count} {self.wider._found()}"
        what = "step predicted against measured"
        if any(source.endswith(RECALLED) for source in self.sources):
            what = "predicted against published, figures recalled"
        return f"{runs} {self._found()}{wider} ({what})"

    def _found(self) -> str:
        but = [name for name in self.differs if name not in ("generation", "chip")]
        kind = "like this" + (f" but for {' and '.join(but)}" if but else "")
        if self.generations:
            other = "another chip of this generation" if "chip" in self.differs else "another generation of GPU"
            kind += f" on {other} ({', '.join(self.generations)})"
        spread = "" if self.spread is None else f" ± {100 * self.spread:.0f}%"
        return f"{kind}: {_percent(self.mean_error or 0.0)}{spread}"


def _percent(error: float) -> str:
    return f"{100 * error:+.0f}%".replace("-", "−").replace("+0%", "0%").replace("−0%", "0%")


def features(scenario: Scenario, lowered: Lowered, generation: str) -> Features:
    """Features of a run on GPUs of a chip (`Gpu.kernels`)."""
    parallel, training = scenario.parallel, scenario.training
    axes = ("tensor", "context", "expert", "pipeline")
    offload = parallel.offload
    width = DTYPE_BYTES[training.matrix_dtype]
    engine = scenario.software.compile or scenario.software.cuda_graphs
    mode = "train" if isinstance(training.mode, str) else "infer" if engine else "infer-eager"
    method = training.finetune.method if training.finetune is not None else "full"
    return Features(
        model="mixture" if scenario.model.moe is not None else scenario.model.kind,
        mode=method if mode == "train" and method != "full" else mode,
        strategy=parallel.strategy if mode == "train" or parallel.strategy != "ddp" else "none",
        splits="+".join(axis for axis in axes if getattr(parallel, axis) > 1),
        offload=any(place != "none" for place in (offload.parameters, offload.optimizer, offload.activations)),
        generation=generation,
        compute="fp32" if width > 2 else "half" if width > 1 else "fp8", framework=scenario.software.framework,
        gpus=scenario.gpus, parameters=float(f"{_whole(scenario, lowered):.3g}"))


def _whole(scenario: Scenario, lowered: Lowered) -> int:
    """Parameters of the model before it is cut by tensor and expert parallelism."""
    parallel = scenario.parallel
    if parallel.tensor * parallel.expert == 1:
        return lowered.architecture.parameters
    uncut = parallel.model_copy(update={"tensor": 1, "context": 1, "expert": 1, "sequence_parallel": False})
    return build(scenario.model_copy(update={"parallel": uncut}), lowered.stack, 1).parameters


@lru_cache(maxsize=256)
def validated(of: Features) -> Validated:
    """The record of published runs like `of`: the nearest kind with any. Another generation's runs are taken only where
    its own has none, the nearest generation first."""
    for chips in _by_generation(of.generation):
        found = [(one, ignored) for ignored, factors in _SEARCHES if (one := _search(of, chips, ignored, factors))]
        if found:
            nearest, *others = (_summary(rows, _elsewhere(of.generation, chips) + ignored) for rows, ignored in found)
            enough = (one for one in others if one.count >= ENOUGH)
            return nearest if nearest.count >= ENOUGH else replace(nearest, wider=next(enough, None))
    return Validated(0)


def _by_generation(chip: str) -> list[tuple[str, ...]]:
    """Chips to ask about, one after the other: this one, then its maker's others, the nearest generation first."""
    for generations in _GENERATIONS:
        if (own := next((i for i, chips in enumerate(generations) if chip in chips), None)) is None:
            continue
        apart = [tuple(c for i, chips in enumerate(generations) if abs(i - own) == far for c in chips if c != chip)
                 for far in range(len(generations))]
        return [(chip,), *(chips for chips in apart if chips)]
    return [(chip,)]


def _search(of: Features, chips: tuple[str, ...], ignored: tuple[str, ...], factors: tuple[float, ...]) -> list[_Row]:
    """Runs on chips that agree but for what is ignored, of the nearest scale with enough."""
    found: list[_Row] = []
    for factor in factors:
        found = [row for row in record() if row[1].generation in chips and _alike(row[1], of, ignored, factor)]
        if len(found) >= ENOUGH:
            break
    return found


def _elsewhere(own: str, chips: tuple[str, ...]) -> tuple[str, ...]:
    """What chips differ in from a GPU's own: nothing, the chip alone (A100 and A10) or the generation too."""
    if own in chips:
        return ()
    alike = any(own in row and set(chips) <= set(row) for generations in _GENERATIONS for row in generations)
    return ("chip",) if alike else ("generation",)


def _summary(rows: list[_Row], differs: tuple[str, ...]) -> Validated:
    errors = [error for _, _, error in rows]
    mean = sum(errors) / len(errors)
    spread = math.sqrt(sum((e - mean) ** 2 for e in errors) / (len(errors) - 1)) if len(errors) > 1 else None
    chips = tuple(sorted({of.generation for _, of, _ in rows})) if {"chip", "generation"} & {*differs} else ()
    return Validated(len(errors), mean, spread, max(errors, key=abs), differs,
                     tuple(sorted({source for source, _, _ in rows})), chips)


def _alike(one: Features, other: Features, ignored: tuple[str, ...], factor: float) -> bool:
    near = factor * (1 + 1e-9)
    return (all(getattr(one, name) == getattr(other, name) for name in _KIND if name not in ignored)
            and one.gpus <= near * other.gpus and other.gpus <= near * one.gpus
            and one.parameters <= near * other.parameters and other.parameters <= near * one.parameters)


_KIND = tuple(f.name for f in fields(Features) if f.name not in ("generation", "gpus", "parameters"))
#: Source, features and error of a published run.
_Row = tuple[str, Features, float]


@lru_cache(maxsize=1)
def record() -> tuple[_Row, ...]:
    """(source, features, error) of every published run that was compared."""
    return tuple((row[0], Features(*row[1:-1]), row[-1]) for row in table(RECORD)["rows"])


def row(source: str, of: Features, error: float) -> list[Any]:
    """A run as a row of the record."""
    return [source, *astuple(of), round(error, 3)]
