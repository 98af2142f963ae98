"""What would make a job fit: every single change worth trying, predicted, the cheapest in step time first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sim.errors import UserError
from sim.scenario import Scenario, resolve
from sim.scenario.dump import dump
from sim.scenario.schema import Inference, InferenceRun
from sim.work import DTYPE_BYTES

if TYPE_CHECKING:
    from sim.report.result import Result

Sets = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a scenario and what it does.

    Attributes:
        set: dotted fields and their new values.
        what: in words.
        fits: whether the job fits with it; headroom_bytes: by how much (negative: not).
        step_time_s, slowdown: the step with it, and over the step without.
    """

    set: dict[str, Any]
    what: str
    fits: bool
    headroom_bytes: int
    step_time_s: float
    slowdown: float

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"set": dict(self.set), "what": self.what, "fits": self.fits, "headroom_bytes": self.headroom_bytes,
                "step_time_s": self.step_time_s, "slowdown": self.slowdown}


def advise(result: Result, predict: Callable[[Scenario], Result]) -> list[Change]:
    """Single changes that free memory: those that make the job fit first, the cheapest in step time before the others,
    then the rest by what they free. Of changes of the same fields (micro-batches of 8, 4, 2 ...) only the best is
    there; one that the scenario rules out, or that frees nothing, is left out.

    Args:
        predict: runs a scenario.
    """
    plain = dump(result.scenario)
    found: dict[tuple[str, ...], Change] = {}
    for what, sets in candidates(result.scenario):
        fields = tuple(sets)
        if fields in found and found[fields].fits:
            continue
        try:
            other = predict(resolve(plain, result.scenario.name, sets))
        except UserError:
            continue
        if other.memory.headroom_bytes > result.memory.headroom_bytes:
            found[fields] = Change(dict(sets), what, other.memory.fits, other.memory.headroom_bytes, other.step_time_s,
                                   other.step_time_s / result.step_time_s)
    return sorted(found.values(), key=lambda c: (not c.fits, c.slowdown if c.fits else -c.headroom_bytes))


def candidates(scenario: Scenario) -> Iterator[tuple[str, Sets]]:
    """Changes that may free memory, in words and as fields; of the same fields the smallest first."""
    if isinstance(scenario.training.mode, Inference):
        yield from _serving(scenario, scenario.training.mode.inference)
        return
    yield from _activations(scenario)
    yield from _sharding(scenario)
    yield from _offload(scenario)
    if scenario.software.optimizer_kernel != "fused":
        yield "fused optimizer kernels", {"software.optimizer_kernel": "fused"}
    if not scenario.training.chunked_loss and scenario.model.kind == "decoder":
        yield "logits and loss in chunks", {"training.chunked_loss": True}
    if not scenario.training.optimizer_in_backward and scenario.micro_steps == 1:
        yield "the optimizer in backward", {"training.optimizer_in_backward": True}
    if scenario.parallel.strategy == "ddp" and not scenario.parallel.gradient_as_bucket_view:
        yield "gradients as views of their buckets", {"parallel.gradient_as_bucket_view": True}


def _serving(scenario: Scenario, run: InferenceRun) -> Iterator[tuple[str, Sets]]:
    """Fewer bits per weight, more ranks per replica, fewer sequences at once."""
    fields = ("training.precision.parameters", "training.finetune.base")  # the second follows the first
    for dtype in ("int8", "int4"):
        if DTYPE_BYTES[dtype] < DTYPE_BYTES.get(scenario.training.precision.parameters, 0.5):
            yield f"weights in {dtype}", dict.fromkeys(fields, dtype)
    size = run.batch // 2
    while size:
        yield f"{size} sequences at once instead of {run.batch}", {"training.mode.inference.batch": size}
        size //= 2
    tensor, replicas = scenario.parallel.tensor, scenario.data_parallel
    for factor in (f for f in (2, 4, 8) if replicas % f == 0):
        yield f"{factor * tensor} tensor ranks", {"parallel.tensor": factor * tensor}


def _activations(scenario: Scenario) -> Iterator[tuple[str, Sets]]:
    training = scenario.training
    if training.recompute != "full":
        yield "full recomputation", {"training.recompute": "full"}
    if training.recompute == "none":
        yield "recomputation of every second product", {"training.recompute": "selective-op"}
    if training.attention == "eager":
        yield "a fused attention kernel", {"training.attention": "flash"}
        if training.recompute == "none":
            yield "recomputation of the attention core", {"training.recompute": "selective"}
    size = training.micro_batch // 2
    while size:
        yield f"micro-batches of {size} instead of {training.micro_batch}", {"training.micro_batch": size}
        size //= 2


def _offload(scenario: Scenario) -> Iterator[tuple[str, Sets]]:
    """What can live in host memory; what the strategy of the stack cannot offload, lowering rules out."""
    field, places = "parallel.offload", scenario.parallel.offload
    if places.optimizer == "none" and scenario.training.optimizer != "none":
        yield "the optimizer on the CPU", {f"{field}.optimizer": "cpu"}
    if places.parameters == "none":
        yield "parameters and optimizer in host memory", {f"{field}.parameters": "cpu", f"{field}.optimizer": "cpu"}
    if places.activations == "none":
        yield "activations in host memory", {f"{field}.activations": "cpu"}


def _sharding(scenario: Scenario) -> Iterator[tuple[str, Sets]]:
    parallel, whole = scenario.parallel, {"parallel.sharding_factor": "full"}
    strategy = parallel.strategy
    if strategy in ("none", "ddp") and scenario.data_parallel > 1:
        yield "FSDP over all ranks", {"parallel.strategy": "fsdp", "parallel.reshard_after_forward": True, **whole}
    if strategy in ("zero1", "zero2"):
        for stage in range(int(strategy[-1]) + 1, 4):
            yield f"ZeRO-{stage}", {"parallel.strategy": f"zero{stage}"}
    if strategy == "fsdp":
        factor = parallel.sharding_factor
        for wider in dict.fromkeys((2 * factor, scenario.data_parallel)):
            if factor < wider <= scenario.data_parallel:
                yield f"sharding over {wider} ranks instead of {factor}", {"parallel.sharding_factor": wider}
        if parallel.reshard_after_forward is not True:
            yield "resharding after forward", {"parallel.reshard_after_forward": True}
    if strategy not in ("none", "ddp"):
        nodes = scenario.cluster.nodes
        sets: dict[str, Any] = {"cluster.nodes": 2 * nodes}
        yield f"{2 * nodes} nodes instead of {nodes}", {**sets, **whole} if strategy == "fsdp" else sets
