"""What can be asked but is not simulated yet: one clear error, never a silent approximation."""

from __future__ import annotations

from sim.errors import Fault, UserError
from sim.scenario.schema import Scenario


def check(scenario: Scenario) -> None:
    """Raise `UserError` naming every field of the scenario that this version cannot simulate."""
    training, parallel = scenario.training, scenario.parallel
    asked = {
        "training.recompute": training.recompute == "selective-op" and "selective-op",
        "training.optimizer_in_backward": training.optimizer_in_backward and "gradients freed in backward",
        "training.chunked_loss": training.chunked_loss and "chunked loss",
        "training.finetune": training.finetune is not None and training.finetune.method != "full"
        and training.finetune.method,
        "training.mode": training.mode != "train" and "inference",
        "training.precision": training.precision.compute in ("fp8", "mxfp8", "nvfp4", "int8", "int4")
        and training.precision.compute,
        "parallel.pipeline": parallel.pipeline > 1 and parallel.strategy in ("fsdp", "zero2", "zero3")
        and f"pipeline parallelism with {parallel.strategy}",
        "parallel.offload": any(v not in (None, "none") for _, v in parallel.offload) and "offload",
    }
    faults = [Fault(f"{what} is understood but not simulated yet in this version", field, hint="remove it, or see "
                    "the README's validity limits") for field, what in asked.items() if what]
    if faults:
        raise UserError(faults)
