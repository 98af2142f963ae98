"""The head of a report: what runs on what, cut how, and the figures that are asked for first."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from sim import hardware
from sim.report.result import has_tokens
from sim.report.units import rate, seconds, size
from sim.scenario.fields.schema import Inference, InferenceRun, Precision, Scenario, Training

if TYPE_CHECKING:
    from sim.report.numbers.inference import InferenceResult
    from sim.report.result import Result


def described(scenario: Scenario, gpu: str) -> list[Any]:
    """Three lines: name, machine and layout, sizes."""
    training, cluster = scenario.training, scenario.cluster
    return [
        Text(scenario.name, style="bold"),
        Text(f"{_cards(scenario, gpu)} ({cluster.nodes} × {cluster.topology.name}) · "
             + " · ".join(part for part in (layout(scenario), _precision(training.precision)) if part), style="dim"),
        Text(_request(scenario, training.mode.inference) if isinstance(training.mode, Inference) else _batch(scenario),
             style="dim"),
    ]


def layout(scenario: Scenario) -> str:
    """How the model is cut and what keeps its replicas alike: "tensor 8 × pipeline 4 · zero1 over 2"; "" on one GPU.
    Replicas of a request have nothing to keep alike."""
    parallel = scenario.parallel
    cuts = [f"{axis} {degree}" for axis in ("tensor", "context", "expert", "pipeline")
            if (degree := int(getattr(parallel, axis))) > 1]
    data: str = "" if parallel.strategy == "none" or (
        parallel.strategy == "ddp" and isinstance(scenario.training.mode, Inference)) else parallel.strategy
    if parallel.strategy in ("fsdp", "zero1", "zero2", "zero3"):
        data += f" over {parallel.sharding_factor}"
    if 1 < parallel.sharding_factor < scenario.replica_ranks:
        data += f" × {_replicas(scenario.replica_ranks // parallel.sharding_factor)}"
    return " · ".join(part for part in (" × ".join(cuts), data) if part)


def headline(result: Result) -> list[Any]:
    """The lines of `described`, and the figures: step, throughput, utilisation; of a request its latencies."""
    lines = [*described(result.scenario, result.gpu), Text()]
    if result.inference is not None:
        return [*lines, *_inference(result, result.inference)]
    what, per_second = "tokens", result.tokens_per_second
    if not has_tokens(result.scenario):
        what, per_second = "samples", result.samples_per_second
    grid = _grid()
    grid.add_row(*(Text.assemble((value, "bold"), f" {unit}") for value, unit in (
        (seconds(result.step_time_s), "per step"), (rate(per_second), f"{what}/s"),
        (rate(per_second / result.gpus), f"{what}/s/GPU"))))
    grid.add_row(*(Text.assemble((value, "bold"), f" {unit}") for value, unit in (
        (f"{100 * result.mfu:.1f}%", "MFU"),
        (f"{result.model_tflops_per_gpu:.1f}", f"of {result.peak_flops_per_gpu / 1e12:.0f} TFLOP/s/GPU"),
        (f"{100 * result.hfu:.1f}%", "HFU"))))
    return [*lines, grid]


def _grid() -> Table:
    """Three figures a row, with what they are of; a narrow terminal breaks words, and cuts none."""
    grid = Table.grid(padding=(0, 3))
    for _ in range(3):
        grid.add_column(overflow="fold")
    return grid


def _cards(scenario: Scenario, gpu: str) -> str:
    """How many of which GPU; of a mixed cluster every kind."""
    cluster = scenario.cluster
    if not cluster.other_gpus:
        return f"{scenario.gpus} × {_card(scenario, gpu)}"
    own = hardware.gpu(cluster.topology.gpu).name
    nodes = [own] * cluster.nodes
    for other in cluster.other_gpus:
        nodes[other.first_node:other.first_node + other.nodes] = [hardware.gpu(other.gpu).name] * other.nodes
    return " + ".join(f"{count * cluster.gpus_per_node} × {_card(scenario, name) if name == own else name}"
                      for name, count in Counter(nodes).items())


def _card(scenario: Scenario, gpu: str) -> str:
    """The GPU; figures of the user's own are said to be, since the catalogue's name promises others."""
    asked = scenario.cluster.gpu
    own = asked is not None and any(value is not None for value in asked.model_dump().values())
    return f"own GPU like {gpu}" if own else gpu


def _batch(scenario: Scenario) -> str:
    training, steps, last = scenario.training, scenario.micro_steps, scenario.last_micro_batch
    each = f"{training.micro_batch}" + (f" × {steps} micro-steps" if steps > 1 else "")
    if last != training.micro_batch and steps > 1:  # the last micro-step is smaller
        whole = f"{training.micro_batch} × {steps - 1}" if steps > 2 else f"{training.micro_batch}"
        each = f"({whole} + {last}), {steps} micro-steps"
    what = "sequence" if has_tokens(scenario) else "sample"
    what += "s" if training.global_batch != 1 else ""
    what += f" of {training.sequence:,} tokens" if has_tokens(scenario) else ""
    what += _documents(training)
    return (f"{training.global_batch:,} {what} per step = {_replicas(scenario.data_parallel)} × {each}")


def _documents(training: Training) -> str:
    """Their mean, and what attention goes by where they differ."""
    documents = training.documents
    if documents is None:
        return ""
    spread = f" (a mean token's has {training.attended:,.0f})" if documents.spread else ""
    return f" in documents of {documents.mean:,}{spread}"


def _precision(of: Precision) -> str:
    """Its name; of the user's own mixture the dtypes that decide most."""
    return of.name if of.name != "custom" else f"{of.compute} products, {of.parameters} parameters"


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} replicas"


def _request(scenario: Scenario, run: InferenceRun) -> str:
    weights = scenario.training.precision.parameters
    ranks = {"tensor": scenario.parallel.tensor, "pipeline": scenario.parallel.pipeline}
    split = [f"{name} {n}" for name, n in ranks.items() if n > 1]
    what = "prompt" if run.generate else "sequence"
    prompts = f"1 {what}" if run.batch == 1 else f"{run.batch:,} {what}s"
    cache = "" if run.kv_cache == "same" or not run.generate else f", {run.kv_cache} cache"
    made = "1 token generated" if run.generate == 1 else f"{run.generate:,} tokens generated"
    made = f"{made} each" if run.generate else "read in one pass"
    flight = ", continuous batching" if run.batching == "continuous" else ""
    return (f"inference: {prompts} of {run.prompt:,} tokens, {made}{flight}, "
            f"{weights} weights{cache} · {' × '.join([*split, _replicas(scenario.data_parallel)])}")


def _inference(result: Result, served: InferenceResult) -> list[Any]:
    """What a request takes, and how a token slows down as the cache grows."""
    grid = _grid()
    if result.scenario.model.kind == "encoder":
        grid.add_row(*(Text.assemble((value, "bold"), f" {unit}") for value, unit in (
            (seconds(result.step_time_s), "per pass"), (rate(result.samples_per_second), "sequences/s"),
            (rate(served.tokens_per_second), "tokens/s"))))
        each = result.samples_per_second / result.gpus
        grid.add_row(*(Text.assemble((value, "bold"), f" {unit}") for value, unit in (
            (f"{100 * result.mfu:.1f}%", "MFU"), (rate(each), "sequences/s/GPU"),
            (rate(result.tokens_per_second_per_gpu), "tokens/s/GPU"))))
        return [grid]
    crossing = served.crossing_cache_bytes
    further = [(seconds(served.time_per_token_s), "per further token")] if served.time_per_token_s else []
    grid.add_row(*(Text.assemble((value, "bold"), f" {unit}") for value, unit in (
        (seconds(served.prompt_time_s), "to the first token"), *further, (rate(served.tokens_per_second), "tokens/s"))))
    grid.add_row(*(Text.assemble((value, "bold"), f" {unit}") for value, unit in (
        (seconds(result.step_time_s), "per request"), (size(served.kv_cache_bytes), "cache per GPU"),
        (rate(result.tokens_per_second_per_gpu), "tokens/s/GPU"))))
    found: list[Any] = [grid]
    if crossing:
        found.append(Text(f"of the cache {size(crossing)} is for cross attention: the prompt's, whatever is generated",
                          style="dim"))
    if len(served.lengths) < 2:
        return found
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 3, 0, 0))
    for head in ("tokens of the decoder" if crossing else "tokens in the cache", "per token"):
        table.add_column(head, justify="right")
    for at in (served.lengths[0], served.lengths[len(served.lengths) // 2], served.lengths[-1]):
        table.add_row(f"{at.cached_tokens:,}", seconds(at.time_per_token_s))
    return [*found, Text(), table]
