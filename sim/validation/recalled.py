"""Steps, and requests of inference, that papers outside the collection give: predicted beside the lengths of whole runs
(reports/runs.md).

The case files stand in scenarios/runs/steps and scenarios/runs/requests. One figure alone rests on some of them
(reports/provenance.md), so they show how predictions do on jobs that nobody tuned for; but their figures are recalled,
and layouts that a paper leaves open are assumed. Requests of engines under load (InferenceMAX) are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from sim.catalog import folder
from sim.report.numbers.neighbours import RECALLED
from sim.validation.runner import Validation, validate
from sim.validation.statistics import Record
from sim.validation.words.table import HEADLINE, headline, percent

_HEAD = """## Steps of papers outside the collection

Read by the same command from `scenarios/runs/steps` (`drystep validate scenarios/runs/steps` shows them too). Figures
are recalled; layouts that a paper leaves open are assumed, which each file's note says. One figure of drystep rests
on some of them: what attention takes of an H100's power (torchtitan's steps of 32k tokens; reports/provenance.md).
Changed after a first look, since the paper or its code says so: which release of flash attention a row of
FlashAttention-2 ran, AMP in both FlashAttention papers (the first look had Hugging Face's GPT-2 at -40%), GLM's gated
MLP, no overlapped reduction in MegaScale's baseline, TinyLlama's fused kernels (+23% without), Pythia's cluster
(AWS), torchtitan's micro-batches on pipelines (as many as stages, its default: -41% and -31% with single sequences),
torchtune's offloaded activations (its table adds one technique a row), how FLOPs count in Llama 3 and in NeoX-20B,
Nemotron-4 15B's micro-batches, and of nanoGPT's ladder that torch.compile pads products (+38 and +55% for a vocabulary
of 50,257 before). Mechanisms found on the memory of these rows and built, each as the code says: what
torchtitan's loss holds (58 GiB were predicted for 77, 42 for 70), what gathers in 8 bits leave in 16, what PyTorch's
pipeline stages keep of all micro-batches and which forwards they run first."""

_REQUESTS = """## Requests of inference engines

From `scenarios/runs/requests` (`drystep validate scenarios/runs/requests`): a request is the prompt and all tokens
behind it. Figures of gpt-fast and TensorRT-LLM are recalled, those of InferenceMAX are engines under load and those of
Dynamo's planner times to a first token beside a server, both copied from packages; how fast an SM expands weights of
few bits rests on the two of int4, no other figure of drystep on any.
Changed after a first look: the cache in fp8 on H100 and gpt-fast's own kernel for small sums (`kv_cache` and
`all_reduce`, fields of the scenario since then; +52% and +69% at worst without); and, seen on InferenceMAX's dense
models (+15 to +40% before): that compiled norms loop over a row by 2,048 elements, that what quantises a product's
input rides in the norm or activation in front of it and is shared by products of one input, that keys are written
beside their rotation and read by groups, and that operands in 8 and 4 bits are padded. On Dynamo's long prompts it was
seen that FlashAttention-3 could not be named (-16% at 3,000 tokens to +17% at 16,000 before); of its rows some 15 ms
are the server's, which is not simulated. That sums are those of each engine's own kernels (November 2026, from
AIConfigurator's timings of them; Llama 3 70B under TensorRT-LLM on eight B200 +5 to +44% before) asks for the release,
which InferenceMAX's file tells of few rows: the others' are recalled."""

#: What follows the name of a source in the record of errors where its figures are recalled.
MARK = RECALLED
_GIB = 2.0**30
#: Figures of memory that a paper may give.
_MEMORY = ("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes")


def steps(workers: int | None = None) -> Validation:
    """Every recalled step beside its prediction."""
    return validate([folder("scenarios") / "runs" / "steps"], workers=workers)


def requests(workers: int | None = None) -> Validation:
    """Every recalled request of inference beside its prediction."""
    return validate([folder("scenarios") / "runs" / "requests"], workers=workers)


def copied(record: Record) -> bool:
    """Whether a request's figures were copied from where they are published, and not recalled."""
    file = folder("scenarios") / "runs" / "requests" / str(record["file"])
    return "recalled" not in str(_read(file)["source"]["licence"])


@cache
def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def markdown(found: Validation, head: str = _HEAD, least: float = 0.0) -> str:
    """A section of reports/runs.md: figures by paper, every step or request that is off by `least` or more (worst
    first), what each rests on."""
    every = sorted(found.records, key=lambda one: -abs(one["error"].get("step_time_s", float("inf"))))
    ordered = [one for one in every if abs(one["error"].get("step_time_s", float("inf"))) >= least]
    rest = [f"The other {len(every) - len(ordered)} are within {least:.0%}.", ""] if len(ordered) < len(every) else []
    sources = [_about(Path(file.path)) for file in found.files]
    memory = _memory(found)
    steps_ = _rows(("step", "published s", "predicted s", "error"), [_row(one) for one in ordered])
    return "\n".join([head, "", *_rows(HEADLINE, headline(found.summary)), "", *steps_, "", *rest,
                      *([*_rows(("memory", "figure", "published GiB", "predicted GiB", "error"), memory), ""]
                        if memory else []), *sources, ""])


def both(workers: int | None = None) -> str:
    """Both sections."""
    return markdown(steps(workers)) + "\n" + markdown(requests(workers), _REQUESTS, 0.05)


def _about(path: Path) -> str:
    file = _read(path)
    return f"* {path.stem}: {file['source']['cite']}. {file['note'][:1].upper()}{file['note'][1:]}."


def _row(record: Record) -> tuple[str, ...]:
    predicted = record["predicted"].get("step_time_s")
    if predicted is None:
        return record["id"], f"{record['measured']['step_time_s']:.4g}", "–", record["reason"]
    return (record["id"], f"{record['measured']['step_time_s']:.4g}", f"{predicted:.4g}",
            percent(record["error"]["step_time_s"], signed=True))


def _memory(found: Validation) -> list[tuple[str, ...]]:
    """Every figure of memory, worst first."""
    rows = [(abs(one["error"][name]), one, name) for one in found.records for name in _MEMORY if name in one["error"]]
    return [(one["id"], name.removesuffix("_bytes").replace("_", " "), f"{one['measured'][name] / _GIB:.1f}",
             f"{one['predicted'][name] / _GIB:.1f}", percent(one["error"][name], signed=True))
            for _, one, name in sorted(rows, key=lambda row: -row[0])]


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
