"""What a search may try beside layouts: states kept outside the GPUs, transfers between stages beside compute. Each
choice is a variant of a cluster's scenario, with tables and bounds of its own, and with only those layouts that have
code for it (`sim.parallel.support`) and to which it makes a difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sim.errors import Fault, UserError, nearest
from sim.parallel.pipeline.actions import split
from sim.parallel.support.outside import on_cpu
from sim.scenario import Scenario
from sim.scenario.fields.schema import Offload
from sim.sizing.space.layouts import STRATEGIES, Choice
from sim.software import Stack, stack_of

#: What `--offload` may name: fields of `parallel.offload` that go to the host.
OFFLOADS: dict[str, tuple[str, ...]] = {
    "none": (), "activations": ("activations",), "optimizer": ("optimizer",), "states": ("parameters", "optimizer"),
    "everything": ("parameters", "optimizer", "activations")}
#: Who keeps what outside.
KEEPERS = "FSDP offloads states, DeepSpeed's ZeRO Adam too; without pipelines, and no 8-bit optimizer"


def variants(bases: Sequence[Scenario], names: Sequence[str]) -> list[Scenario]:
    """Every base with every choice; with none named the bases as they are.

    Raises:
        UserError: a name is not one of `OFFLOADS`.
    """
    wrong = [name for name in names if name not in OFFLOADS]
    if wrong:
        raise UserError([Fault(f"{name!r} is not one of {', '.join(OFFLOADS)}", "--offload", hint=nearest(
            name, list(OFFLOADS))) for name in wrong])
    if not names:
        return list(bases)
    made = []
    for base in bases:
        for name in dict.fromkeys(names):
            places = Offload.model_validate(dict.fromkeys(OFFLOADS[name], "cpu"))
            made.append(base.model_copy(update={"parallel": base.parallel.model_copy(update={"offload": places})}))
    return made


def nowhere(bases: Sequence[Scenario], names: Sequence[str], choice: Choice) -> list[str]:
    """Those of `names` that none of `bases` has code for in any layout of `choice`: they are not tried.

    Raises:
        UserError: that is all of them, or a name is not one of `OFFLOADS`.
    """
    made = variants(bases, names) if names else []
    count = len(made) // len(bases)
    dropped = [name for number, name in enumerate(dict.fromkeys(names))
               if all(narrowed(one, choice) is None for one in made[number::count])]
    if names and len(dropped) == len(set(names)):
        raise UserError(Fault(f"nothing of this framework keeps {' or '.join(dropped)} on the host", "--offload",
                              hint=KEEPERS))
    return dropped


def both_ways(bases: Sequence[Scenario]) -> list[Scenario]:
    """Every base without and with transfers between stages that overlap with compute."""
    return [base.model_copy(update={"parallel": base.parallel.model_copy(update={"overlap_p2p": overlap})})
            for base in bases for overlap in (False, True)]


def waiting(scenario: Scenario, choice: Choice) -> Choice | None:
    """The part of `choice` whose stages wait for their transfers unless these overlap with compute; None: nothing."""
    if _stack(scenario).pipeline_p2p == "overlapped":
        return None
    deepest = scenario.model.layers + scenario.model.decoder_layers + 2
    depths = [depth for depth in choice.pipeline or range(2, deepest + 1) if depth > 1]
    schedules = [name for name in choice.schedules if not split(name)]  # those that are split overlap anyway
    return replace(choice, pipeline=depths, schedules=schedules) if depths and schedules else None


def narrowed(scenario: Scenario, choice: Choice, both: bool = False) -> Choice | None:
    """The part of `choice` that can keep what `scenario` keeps outside; None: nothing of it can.

    Args:
        both: transfers that overlap are tried beside those that do not, so only where that makes a difference.
    """
    if both and scenario.parallel.overlap_p2p:
        staged = waiting(scenario, choice)
        if staged is None:
            return None
        choice = staged
    offload = scenario.parallel.offload
    outside = {field for field, place in offload if place in ("cpu", "nvme")}
    if not outside:
        return choice
    if choice.pipeline and 1 not in choice.pipeline:
        return None
    ipg = _stack(scenario).gradient_path == "ipg"
    if "optimizer" in outside and any(on_cpu(scenario, ipg)):
        return None
    if "parameters" in outside:
        able: Sequence[str] = ("zero3", "fsdp") if ipg else ("zero2", "zero3", "fsdp")
    elif "optimizer" in outside:
        able = ("zero1", "zero2", "zero3") if ipg else ()
    else:
        able = STRATEGIES
    left = [name for name in able if not choice.strategies or name in choice.strategies]
    return replace(choice, strategies=left, pipeline=(1,)) if left else None


def _stack(scenario: Scenario) -> Stack:
    return stack_of(scenario.software)
