"""Memory held against what PyTorch itself allocates (kind `oracle-memory`): phase peaks, breakdown, a block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sim.memory.ledger import allocated_bytes, peak
from sim.model.eager import KINDS, layer_profile
from sim.parallel.beside import WORKSPACES

if TYPE_CHECKING:
    from sim.parallel import Lowered
    from sim.validation.statistics import Record

#: Both sides' categories in groups that mean the same. The oracle calls a tensor `bwd_temp` that was born in backward,
#: whatever it is: a gradient on its way, a recomputed activation, a weight gradient before its parameter has it.
GROUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "states": (("param", "opt_state"), ("parameters", "master_parameters", "optimizer_states")),
    "buffers": (("input", "buffer", "fsdp_allgather_buf", "fsdp_reduce_buf", "ddp_bucket"), ("buffers", "kv_cache")),
    # autocast's half copies of gathered parameters are `activation` there: FSDP's own tensors hide what they came from
    "working": (("activation", "bwd_temp", "grad", "unsharded_grad", "opt_temp", "amp_weight_copy",
                 "fsdp_unsharded_param", "fsdp_post_forward_shard", "init_temp"),
                ("activations", "logits", "gradients", "workspace", "gathered_parameters")),
}

_PHASES = {"forward": "forward", "backward": "backward", "optim": "optimizer"}


def oracle_categories() -> dict[str, str]:
    """Group of every category of the oracle."""
    return {name: group for group, (theirs, _) in GROUPS.items() for name in theirs}


def grouped(levels: Mapping[str, int], ours: bool) -> dict[str, int]:
    """Bytes by group."""
    return {group: sum(levels.get(name, 0) for name in names[ours]) for group, names in GROUPS.items()}


def predicted(lowered: Lowered, recompute: str, sharded: bool) -> dict[str, Any]:
    """The measurements of a case as predicted; `at_peak` by group.

    Args:
        recompute: policy of the blocks.
        sharded: whether FSDP holds the parameters: the oracle then takes autocast's weight copies for activations.
    """
    program = lowered.job.programs[0]
    program = replace(program, resident=[row for row in program.resident if row[0] != WORKSPACES])  # it has no cuBLAS
    use = peak(program)
    phases = {"after_init": allocated_bytes(use.phases["after_init"])}
    phases |= {name: use.highest[ours] for name, ours in _PHASES.items()}
    return {"peak_allocated_bytes": use.peak_allocated_bytes, "phase_peaks": phases,
            "peak_phase": max(_PHASES, key=lambda name: phases[name]), "at_peak": grouped(use.at_peak, True),
            "block_retained": _retained(lowered, recompute, sharded), "parameters": lowered.architecture.parameters}


def _retained(lowered: Lowered, recompute: str, copies: bool) -> int:
    """What the middle block keeps for backward, with or without autocast's weight copies."""
    blocks = [layer for layer in lowered.architecture.stack if layer.kind == "block"]
    kinds = [layer.kind for layer in lowered.architecture.stack]
    count = kinds.index("bridge") - 1 if "bridge" in kinds else len(blocks)
    kept = layer_profile(blocks[count // 2], recompute, True).forward.net
    return kept[KINDS.index("activations")] + (kept[KINDS.index("gathered_parameters")] if copies else 0)


def compare(measured: Mapping[str, Any], got: Mapping[str, Any]) -> Record:
    """Which keys are equal to the byte, and the errors (predicted / measured - 1) of those in bytes."""
    wanted = {**measured}
    if "at_peak" in wanted:
        wanted["at_peak"] = grouped(wanted["at_peak"], False)
    equal = {key: got[key] == value for key, value in wanted.items()}
    errors: dict[str, float] = {}
    for key, value in wanted.items():
        pairs = {f"{key}.{name}": (got[key][name], size) for name, size in value.items()} if isinstance(
            value, Mapping) else {key: (got[key], value)}
        errors |= {name: ours / theirs - 1 for name, (ours, theirs) in pairs.items()
                   if isinstance(theirs, int) and theirs and key not in ("at_peak", "parameters")}
    worst = max(errors, key=lambda name: abs(errors[name]), default="")
    reason = f"{worst}: {100 * errors[worst]:+.3f}%" if worst and errors[worst] else ""
    return {"predicted": {key: got[key] for key in measured}, "equal": equal, "error": errors, "reason": reason}
