"""Expert parallelism: tokens travel to the ranks that hold their experts and back, by all-to-all.

Source: Lepikhin et al. 2020, "GShard" (arXiv 2006.16668), section 3.2; Megatron-LM `moe/token_dispatcher.py`
(MoEAlltoAllTokenDispatcher): one all-to-all behind the permutation, one before it is undone, their conjugates backward.
DeepSeek-AI 2024 (arXiv 2412.19437), section 3.2.2, and its DeepEP: a token is sent once to a node.
"""

from __future__ import annotations

import math

from sim.hardware import gpu
from sim.model.architecture import Joint
from sim.parallel.layout import Ranks
from sim.parallel.model.calls import Calls, Items
from sim.program import InlineCall
from sim.scenario.fields.schema import RecomputeLayers, Scenario
from sim.software import Stack


def sent_once(top_k: int, places: int, groups: int = 1, top_groups: int = 1) -> float:
    """Share of a token's `top_k` rows that travels where it is sent once to each place: the expected number of places
    that hold one of its experts, drawn evenly, over `top_k`.

    Args:
        places: nodes of an expert group, or its ranks where all are on one node.
        groups, top_groups: a token's experts come from so many of these groups of neighbouring experts, drawn evenly
            too (node-limited routing, DeepSeek-V3, arXiv 2412.19437, section 2.1.2). A place holds whole groups, or a
            group several places whole.
    """
    if places > groups:  # a chosen group is spread over several places
        apart = places / groups
        return places * top_groups / groups * (1.0 - (1.0 - 1.0 / (top_groups * apart)) ** top_k) / top_k
    held = max(1, groups // places)
    drawn = math.comb(groups, top_groups)
    hit = sum(math.comb(held, n) * math.comb(groups - held, top_groups - n) / drawn
              * (1.0 - (1.0 - n / top_groups) ** top_k) for n in range(1, min(held, top_groups) + 1))
    return places * hit / top_k


def dispatched(scenario: Scenario, stack: Stack, ranks: Ranks | None) -> float:
    """Share of the rows for experts that travels in this stack.

    Args:
        ranks: expert groups, shape (instances, members); None where experts are not spread.
    """
    moe = scenario.model.moe
    if moe is None or ranks is None or not stack.dispatch_once:
        return 1.0
    nodes = len(set((ranks[0] // scenario.cluster.gpus_per_node).tolist()))
    return sent_once(moe.top_k, nodes if nodes > 1 else ranks.shape[1], moe.groups, moe.top_groups)


def hidden_by(scenario: Scenario, stack: Stack) -> str:
    """What hides tokens on their way: "none", "shared" (experts) or "batches"; asked for, or the stack's habit where
    the layout has it at hand."""
    asked, habit = scenario.parallel.overlap_experts, overlap_habit(scenario, stack)
    if asked is not None:
        return asked
    alone = habit == "batches" and scenario.parallel.pipeline == 1  # recipes ask for it with virtual stages alone
    return "none" if alone or misfit(scenario, habit) else habit


def pairs(scenario: Scenario, stack: Stack) -> bool:
    """Whether a forward and the backward of another micro-batch run as one."""
    return scenario.parallel.expert > 1 and hidden_by(scenario, stack) == "batches"


def overlap_habit(scenario: Scenario, stack: Stack) -> str:
    """What the stack hides tokens behind where nobody says it, if the layout has it at hand: it may depend on whether
    products are scaled in blocks, which fp8 is on GPUs that multiply mxfp8 (`Stack.expert_overlap_blocks`)."""
    compute = scenario.training.precision.compute
    blocks = compute == "mxfp8" or (compute == "fp8" and gpu(scenario.cluster.topology.gpu).supports("mxfp8"))
    return stack.expert_overlap_blocks if blocks else stack.expert_overlap


def misfit(scenario: Scenario, overlap: str) -> tuple[str, str] | None:
    """Why tokens cannot travel beside that in this layout, and what would help."""
    parallel, moe = scenario.parallel, scenario.model.moe
    if overlap == "none" or parallel.expert == 1 or moe is None:
        return None
    if overlap == "shared" and scenario.software.dispatcher == "flex":
        return ("a dispatcher that sends tokens once does not run beside shared experts (megatron-core "
                "token_dispatcher.py, MoEFlexTokenDispatcher)", "use software.dispatcher alltoall, or remove it")
    if overlap == "shared":
        return None if moe.shared_experts else ("the model has no shared experts to hide the all-to-alls behind",
                                                "remove it")
    if parallel.pipeline > 1 and parallel.schedule not in ("interleaved", "dualpipe"):
        return ("a forward and a backward run as one where chunks of a pipeline take turns, or without a pipeline",
                "use schedule interleaved with virtual_stages, or dualpipe")
    if parallel.strategy in ("fsdp", "zero2", "zero3"):
        return ("ranks whose parameters are sharded run forward and backward one after the other",
                "use zero1, or remove it")
    if parallel.pipeline == 1 and any(place in ("cpu", "nvme", "paged") for _, place in parallel.offload):
        return "a forward and a backward run as one on the GPU alone", "remove it, or parallel.offload"
    recompute = scenario.training.recompute
    if recompute == "full" or (isinstance(recompute, RecomputeLayers) and recompute.layers):
        return ("Megatron-LM refuses full recomputation beside the overlap of micro-batches (training/arguments.py)",
                "recompute less, or remove it")
    return None


def staying(items: Items, expert: int) -> Items:
    """Items without tokens on their way on communicator `expert`, which may travel beside them."""
    return tuple(item for item in items if not isinstance(item, InlineCall) or item.call.kind != "all_to_all"
                 or item.call.communicator != expert)


def counted(calls: Calls, joint: Joint, kernels: Items) -> Items:
    """How many tokens each expert has is summed over the slices of the sequence, for the loss that balances them: one
    call over all of them there, one group after another here (megatron-core 0.14.0 `moe/router.py`, _apply_aux_loss).
    """
    groups = ("context", "context_heads", "context_ring", *["tensor"] * (joint.kind == "counts"))
    return (*kernels, *(calls.call(name, "all_reduce", joint.elements, joint.dtype) for name in groups
                        if calls.has(name)))


def around(calls: Calls, joint: Joint, kernels: Items, direction: str) -> Items:
    """Dispatch sends behind its kernels, combine receives before its own; backward the other way round.

    NCCL's all-to-all wants to know how many rows come from whom: all ranks' counts are gathered before, as int64.
    The host has to read them before it can launch one (`Stack.dispatch_read`); backward knows them. Scores follow their
    rows, and their gradients come before those of the rows (Megatron-LM `moe/token_dispatcher.py`, preprocess and
    token_dispatch).
    """
    if not calls.has("expert"):
        return kernels
    tokens = calls.call("expert", "all_to_all", joint.elements * calls.dispatched, joint.dtype)
    travel: Items = (tokens._replace(reads_s=joint.reads_s),) if direction == "forward" else (tokens,)
    scores: Items = (calls.call("expert", "all_to_all", joint.scores, "fp32"),) if joint.scores else ()
    if joint.kind == "combine":
        return (*kernels, *travel) if direction == "backward" else (*travel, *kernels)
    if direction == "backward":
        return (*scores, *travel, *kernels)
    known = calls.call("expert", "all_gather", 8 * joint.counts, "int8")._replace(told=joint.told)
    counts: Items = (known,) if joint.counts else ()
    return (*counts, *kernels, *travel, *scores)
