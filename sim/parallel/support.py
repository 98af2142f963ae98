"""What can be asked but is not simulated yet: one clear error, never a silent approximation."""

from __future__ import annotations

from sim.errors import Fault, UserError
from sim.model.inference import QUANTISED
from sim.scenario.schema import Scenario


def check(scenario: Scenario) -> None:
    """Raise `UserError` naming every field of the scenario that this version cannot simulate."""
    training, parallel = scenario.training, scenario.parallel
    asked: dict[str, object] = {
        "training.recompute": training.recompute == "selective-op" and "selective-op",
        "training.optimizer_in_backward": training.optimizer_in_backward and "gradients freed in backward",
        "training.chunked_loss": training.chunked_loss and "chunked loss",
        "training.finetune": training.finetune is not None and training.finetune.method != "full"
        and training.finetune.method,
        "training.precision.parameters": training.mode == "train" and training.precision.parameters in QUANTISED
        and f"training with {training.precision.parameters} weights",
        "training.precision": training.precision.compute in ("fp8", "mxfp8", "nvfp4", "int8", "int4")
        and training.precision.compute,
        "parallel.pipeline": parallel.pipeline > 1 and parallel.strategy in ("fsdp", "zero2", "zero3")
        and f"pipeline parallelism with {parallel.strategy}",
        "parallel.offload": any(v not in (None, "none") for _, v in parallel.offload) and "offload",
    }
    if training.mode != "train":
        asked |= _inference(scenario)
    faults = [Fault(f"{what} is understood but not simulated yet in this version", field, hint="remove it, or see "
                    "the README's validity limits") for field, what in asked.items() if what]
    if faults:
        raise UserError(faults)


def _inference(scenario: Scenario) -> dict[str, object]:
    """What inference cannot be asked: weights are whole on every tensor and pipeline rank."""
    model, parallel = scenario.model, scenario.parallel
    return {
        "model.kind": model.kind != "decoder" and f"inference of kind {model.kind}",
        "model.positions": model.positions == "relative" and "inference with relative positions",
        "parallel.strategy": parallel.strategy not in ("none", "ddp") and f"inference with {parallel.strategy}",
        "parallel.context": parallel.context > 1 and "inference with context parallelism",
        "parallel.expert": parallel.expert > 1 and "inference with expert parallelism",
        "parallel.sequence_parallel": parallel.sequence_parallel and "inference with sequence parallelism",
        "parallel.virtual_stages": parallel.virtual_stages > 1 and "inference with several chunks per rank",
    }
