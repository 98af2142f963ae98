"""What further tokens (`model.mtp_layers`) cannot be asked with: Megatron's code alone predicts them."""

from __future__ import annotations

from collections.abc import Iterator

from sim.errors import Fault
from sim.scenario.fields.schema import Scenario
from sim.software import Stack

#: Strategies that do not gather the blocks of further tokens yet.
NOT_BESIDE_FURTHER = ("zero2", "zero3", "fsdp")


def further(scenario: Scenario, stack: Stack) -> Iterator[Fault]:
    """Everything of a training step with further tokens that is not simulated."""
    training, field = scenario.training, "model.mtp_layers"
    if not scenario.model.mtp_layers or training.mode != "train":
        return
    if stack.modules != "megatron":
        yield Fault(f"{stack.modules} modules predict no further tokens (Hugging Face's leave them out of a model that "
                    "was trained with them)", field, hint="set software.modules: megatron, or remove it")
    beside = {
        "learned positions": scenario.model.positions == "learned",
        "relative positions": scenario.model.positions == "relative",
        "weights that are frozen": training.finetune is not None and training.finetune.method != "full",
        "a chunked loss": training.chunked_loss,
        "recompute: selective-op": training.recompute == "selective-op",
        "Muon": training.optimizer == "muon",
        f"strategy {scenario.parallel.strategy}": scenario.parallel.strategy in NOT_BESIDE_FURTHER,
    }
    yield from (Fault(f"further tokens beside {what} are understood but not simulated yet in this version", field,
                      hint="remove one of the two") for what, asked in beside.items() if asked)
