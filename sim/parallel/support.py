"""What can be asked but is not simulated yet: one clear error, never a silent approximation."""

from __future__ import annotations

from sim.errors import Fault, UserError
from sim.scenario.schema import Scenario


def _tuned(scenario: Scenario) -> str:
    """What of fine-tuning is not simulated."""
    finetune, model, precision = scenario.training.finetune, scenario.model, scenario.training.precision
    if finetune is None or finetune.method == "full":
        return ""
    if model.kind != "decoder" or model.moe is not None or model.mla is not None or model.positions == "relative":
        return f"{finetune.method} of anything but a dense decoder"
    if precision.master != "none":
        return f"{finetune.method} with a master copy of the parameters"
    if scenario.software.modules == "megatron":
        return f"{finetune.method} of Megatron's modules"
    parallel = scenario.parallel
    if max(parallel.tensor, parallel.context, parallel.pipeline, parallel.expert) > 1:
        return f"{finetune.method} of a model that is cut over GPUs (tensor, context, pipeline, expert)"
    autocast = precision.compute in ("fp16", "bf16") and precision.parameters == precision.gather == "fp32"
    if finetune.base in ("fp32", "bf16", "fp16") and finetune.base != precision.parameters and not autocast:
        return (f"{finetune.method} of {finetune.base} weights beside {precision.parameters} adapters without autocast "
                "(amp-bf16, amp-fp16)")
    return ""


def check(scenario: Scenario) -> None:
    """Raise `UserError` naming every field of the scenario that this version cannot simulate."""
    training, parallel = scenario.training, scenario.parallel
    asked = {
        "training.recompute": training.recompute == "selective-op" and "selective-op",
        "training.optimizer_in_backward": training.optimizer_in_backward and "gradients freed in backward",
        "training.chunked_loss": training.chunked_loss and "chunked loss",
        "training.finetune": _tuned(scenario),
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
