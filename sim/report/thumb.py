"""Rules of thumb in bytes per parameter beside the prediction, and what each of them leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sim.report.numbers.memory import MemoryResult
from sim.report.units import figure, size
from sim.scenario.fields.schema import Inference, Scenario
from sim.work import DTYPE_BYTES

_STATES = ("parameters", "gradients", "optimizer_states", "master_parameters")
#: Bytes below this share of the device are not worth a word.
_SMALLEST_SHARE = 0.01
#: Bytes per parameter that round to nothing, and that make no difference.
_FEW_BYTES, _CLOSE_BYTES = 0.005, 0.5


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of thumb.

    Attributes:
        bytes_per_parameter: what it says.
        counts: what is in it, and where it comes from.
    """

    bytes_per_parameter: int
    counts: str


RULES = (
    Rule(4, "fp32 weights, nothing else"),
    # Rajbhandari et al. 2020 (ZeRO), section 3.1: 2 + 2 + K with K = 12
    Rule(16, "weights, gradients and Adam: 2 + 2 + 12 with 16-bit weights and an fp32 master, or 4 + 4 + 8 in fp32"),
    # Megatron-LM's README (distributed optimizer, bf16 with fp32 gradients); BigScience, chronicles of the prequel
    Rule(18, "16-bit weights, fp32 gradients and Adam with an fp32 master: 2 + 4 + 12"),
    Rule(20, "the 16 of weights, gradients and Adam, and 4 for one more fp32 copy: a temporary of the update, or "
             "fp32 gradients beside 16-bit ones"),
    Rule(24, "4 weights + 4 gradients + 8 Adam + 8 for activations"),
)


@dataclass(frozen=True, slots=True)
class Thumb:
    """A rule beside the prediction.

    Attributes:
        whole_bytes: for the whole model; per_gpu_bytes: shared evenly over the GPUs that share the model.
        off: prediction of the device's memory over the rule's, e.g. 1.3.
        why: what it leaves out or counts double here.
    """

    rule: Rule
    whole_bytes: float
    per_gpu_bytes: float
    off: float
    why: str

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"bytes_per_parameter": self.rule.bytes_per_parameter, "counts": self.rule.counts,
                "whole_bytes": self.whole_bytes, "per_gpu_bytes": self.per_gpu_bytes, "off": self.off,
                "why": self.why}


def rules_of_thumb(scenario: Scenario, parameters: int, memory: MemoryResult) -> list[Thumb]:
    """All rules held against the fullest rank.

    Args:
        parameters: of the whole model, frozen ones too.
    """
    shares = _shares(scenario)
    per_parameter = parameters / shares
    found = []
    for rule in RULES:
        per_gpu = rule.bytes_per_parameter * per_parameter
        found.append(Thumb(rule, float(rule.bytes_per_parameter * parameters), per_gpu,
                           memory.device_used_bytes / per_gpu, _why(rule, scenario, memory, per_parameter)))
    return found


def _shares(scenario: Scenario) -> int:
    """GPUs over which a rule of thumb would be divided: those that hold one copy of the model between them."""
    parallel = scenario.parallel
    sharded = parallel.sharding_factor if parallel.strategy not in ("none", "ddp") else 1
    return parallel.tensor * parallel.pipeline * sharded


def _held(memory: MemoryResult) -> dict[str, int]:
    """Model states at their highest, wherever in the step that is; the rest at the peak."""
    use = memory.use
    states = {name: use.category_peaks[name] for name in _STATES}
    return {**memory.at_peak, **states}


def _why(rule: Rule, scenario: Scenario, memory: MemoryResult, per_parameter: float) -> str:
    """One sentence: what the rule counts against what is there."""
    held = _held(memory)
    own = {name: held[name] / per_parameter for name in _STATES}
    if rule.bytes_per_parameter == 4:
        return _weights(held, own, memory.device_used_bytes)
    if isinstance(scenario.training.mode, Inference):
        return "inference keeps no gradients and no optimizer"
    if rule.bytes_per_parameter == 16:
        return f"{_states(scenario, own)}; it leaves out {_others(held, memory.device_used_bytes)}"
    if rule.bytes_per_parameter == 18:
        narrow, wide = scenario.training.precision.parameters, scenario.training.precision.gradients
        if narrow in ("bf16", "fp16") and wide == "fp32":
            return "the right one for these dtypes, and as blind to everything but model states as 16"
        tuned = scenario.training.finetune
        stored = narrow if tuned.method == "full" else f"{narrow} where they are trained and {tuned.base} where not"
        return f"meant for 16-bit weights with fp32 gradients; here weights are {stored}, gradients {wide}"
    if rule.bytes_per_parameter == 20:
        copies = {name: held[name] for name in ("buffers", "workspace", "gathered_parameters")}
        total = sum(copies.values()) / per_parameter
        return (f"its 4 B more stand for a copy that lives for a moment; what there is of that at the peak, "
                f"{_listed(copies, 2)}, is {figure(total)} B here" if total >= _FEW_BYTES else
                "its 4 B more stand for a copy that lives for a moment; at the peak there is none")
    spent = held["activations"] + held["logits"]
    return (f"activations and logits are {figure(spent / per_parameter)} B at the peak here, not 8: they grow with "
            "tokens, not with parameters")


def _weights(held: Mapping[str, int], own: Mapping[str, float], device_bytes: int) -> str:
    """What a count of weights alone leaves out."""
    states = sum(held[name] for name in _STATES[1:])
    rest = device_bytes - sum(held[name] for name in _STATES)
    more = f" gradients and optimizer take {size(states)} beside them," if states else ""
    return f"weights are {own['parameters']:.3g} B here;{more} all the rest {size(max(0, rest))}"


def _states(scenario: Scenario, own: Mapping[str, float]) -> str:
    """What the states take here, per parameter of the share, and why it is not 16."""
    said = ", ".join(f"{_name(name)} {value:.3g}" for name, value in own.items() if value > _FEW_BYTES)
    total = sum(own.values())
    text = f"model states take up to {figure(total)} B here ({said or 'all of it elsewhere'})"
    return text if abs(total - 16) < _CLOSE_BYTES else f"{text}: {_reason(scenario, own)}"


def _reason(scenario: Scenario, own: Mapping[str, float]) -> str:
    """What of the scenario moves the bytes of the states away from 16, the largest first."""
    training, parallel = scenario.training, scenario.parallel
    if training.finetune.method != "full":
        return f"{training.finetune.method} trains few of the parameters"
    reasons = []
    offloaded = [name for name, place in parallel.offload if place in ("cpu", "nvme") and name != "activations"]
    if offloaded:
        reasons.append(f"{_and(offloaded)} outside the GPU")
    if parallel.strategy in ("zero1", "zero2") and parallel.sharding_factor > 1:
        whole = "weights and gradients are" if parallel.strategy == "zero1" else "weights are"
        reasons.append(f"{whole} on each of the {parallel.sharding_factor} GPUs that split the optimizer")
    if training.optimizer not in ("adam", "adamw", "lamb"):
        reasons.append(f"the optimizer is {training.optimizer}")
    if training.optimizer_in_backward:
        reasons.append("gradients are applied as they come")
    elif own["gradients"] > 1.1 * DTYPE_BYTES[training.precision.gradients] and parallel.strategy in ("fsdp", "zero3"):
        reasons.append("the gradients of a unit are there whole before they are split")
    if parallel.pipeline > 1:
        reasons.append("stages are not equal")
    if not reasons:
        dtypes = training.precision
        master = f", {dtypes.master} master" if dtypes.master != "none" else ""
        reasons.append(f"{dtypes.parameters} weights, {dtypes.gradients} gradients{master}")
    return _and(reasons[:2])


def _others(held: Mapping[str, int], device_bytes: int) -> str:
    """Everything but model states, the largest by name."""
    others = {name: bytes_ for name, bytes_ in held.items()
              if name not in _STATES and bytes_ > _SMALLEST_SHARE * device_bytes}
    return _listed(others, 4) or "hardly anything"


def _listed(held: Mapping[str, int], most: int) -> str:
    """The largest with their sizes, and the sum of the others."""
    largest = sorted((name for name in held if held[name]), key=lambda name: held[name], reverse=True)
    words = [f"{_name(name)} ({size(held[name])})" for name in largest[:most]]
    rest = sum(held[name] for name in largest[most:])
    return _and([*words, f"{size(rest)} of others"] if rest else words)


def _name(category: str) -> str:
    return "weights" if category == "parameters" else category.replace("_", " ")


def _and(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)

