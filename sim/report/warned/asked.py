"""What a scenario asks for in words and its stack or cluster does not do, or hardly a run does: never passed over in
silence."""

from __future__ import annotations

from sim.errors import nearest
from sim.model.scenario_style import fitting
from sim.network import Topology
from sim.network.fabric.topology import generation_of, reads_gpus, speeds
from sim.network.nccl.peer_sums import by_ranks
from sim.report.advice.candidates import own_half
from sim.report.warned.attention import documents_in_vain, joint_beside_frozen, not_flash, third_in_vain
from sim.scenario import Scenario
from sim.scenario.fields.schema import Inference
from sim.scenario.named.gpus import gpu_facts
from sim.software import is_release, packages, stack_of


def overlap_in_vain(scenario: Scenario) -> list[str]:
    """A warning where `parallel.overlap: true` is written and the stack reduces gradients behind its pipeline (the fact
    `pipeline_reduction` of its profile)."""
    parallel, software = scenario.parallel, scenario.software
    if not (parallel.overlap and "overlap" in parallel.model_fields_set and parallel.pipeline > 1
            and scenario.replica_ranks > 1):
        return []
    stack = stack_of(software)
    if stack.pipeline_reduction != "behind":
        return []
    return [f"software: overlap changes nothing about the reduction of gradients: {software.framework} of "
            f"{software.year} reduces them when its pipeline has ended"]


def takes_turns(scenario: Scenario) -> list[str]:
    """A warning where DeepSpeed's ZeRO-3 is predicted to hide nothing although `parallel.overlap` (overlap_comm) is on:
    the fact `coordinator_hides`, which published steps gave and its code does not explain."""
    parallel, software = scenario.parallel, scenario.software
    if parallel.strategy != "zero3" or not parallel.overlap or scenario.replica_ranks == 1:
        return []
    if stack_of(software).coordinator_hides:
        return []
    return [f"software: communication of {software.framework}'s ZeRO-3 takes turns with compute here, as in published "
            "steps, though overlap_comm gives it streams of its own"]


def schedule_of_another(scenario: Scenario) -> list[str]:
    """A warning where a pipeline's schedule is none that the stack's own releases have (the fact `pipeline_schedules`
    of its profile): it is simulated as such a stack would run it, which is a fork's to do."""
    parallel, software = scenario.parallel, scenario.software
    if parallel.pipeline == 1 or scenario.training.mode != "train":
        return []
    had = stack_of(software).schedules
    if parallel.schedule in had:
        return []
    others = f"it has {', '.join(had)}" if had else "nor any other"
    return [f"software: {software.framework} of {software.year} has no schedule {parallel.schedule} ({others}): the "
            "step is that of a fork which has it"]


def same_tokens(scenario: Scenario) -> list[str]:
    """A warning where a mixture trains over tensor ranks that all hold the same tokens and its stack refuses that (the
    fact `experts_scattered` of its profile)."""
    parallel, software = scenario.parallel, scenario.software
    if (scenario.model.moe is None or scenario.training.mode != "train" or parallel.tensor == 1
            or parallel.sequence_parallel or not stack_of(software).experts_scattered):
        return []
    return [f"software: {software.framework} of {software.year} trains mixtures over tensor ranks only where these cut "
            "the sequence (parallel.sequence_parallel=true): the step is that of a fork without this check"]


def autocast_alone(scenario: Scenario) -> list[str]:
    """A hint where FSDP or a framework with 16-bit parameters of its own trains under autocast alone: the default
    precision, and seldom what a run does that is meant.

    Sources: torchtitan, Composer and Hugging Face's Trainer give FSDP its MixedPrecision(Policy) (param_dtype
    bfloat16); the fact `half_policy` for frameworks.
    """
    precision, usual = scenario.training.precision, usual_half(scenario)
    if usual and scenario.parallel.strategy == "fsdp":
        return [f"precision: {precision.name} gathers parameters in fp32; FSDP's own mixed precision "
                f"({usual}), which most runs have, sends half as much"]
    if usual:
        return [f"precision: {precision.name} is torch's autocast, under which every micro-batch casts the weights and "
                f"keeps the copies until its backward; {scenario.software.framework}'s own training is {usual}"]
    return []


def usual_half(scenario: Scenario) -> str:
    """The precision that most runs of its kind have where it trains under autocast alone; "" elsewhere."""
    training, precision = scenario.training, scenario.training.precision
    if training.mode != "train" or training.finetune.method != "full" or precision.compute not in ("bf16", "fp16"):
        return ""
    if precision.gather != "fp32":
        return ""
    return f"fsdp-{precision.compute}" if scenario.parallel.strategy == "fsdp" else own_half(scenario)


def prefetch_in_vain(scenario: Scenario) -> list[str]:
    """A warning where FSDP 1's prefetch is asked of FSDP 2, which gathers the next unit of backward ahead of this one's
    and limits nothing (torch 2.13 distributed/fsdp/_fully_shard/_fsdp_param_group.py, _backward_prefetch)."""
    parallel, software = scenario.parallel, scenario.software
    if parallel.strategy != "fsdp" or software.fsdp != 2 or scenario.training.mode != "train":
        return []
    asked = [text for text, said in (("backward post", parallel.prefetch.backward == "post"),
                                     (f"limit {parallel.prefetch.limit}", parallel.prefetch.limit not in (None, 2)))
             if said]
    return [f"software: prefetch {' and '.join(asked)} {'change' if len(asked) > 1 else 'changes'} nothing: FSDP 2 has "
            "no such setting"] if asked else []


def versions_in_vain(scenario: Scenario) -> list[str]:
    """A warning where `software.versions` names packages that no fact of any profile goes by, or no releases."""
    known, versions = packages(), scenario.software.versions
    nameless = [f"software: versions.{name} '{text[:40]}' is no release: that of {scenario.software.year} is taken, "
                "and what only a named release turns on stays off"
                for name, text in versions.items() if name in known and not is_release(text)]
    others = [name for name in versions if name not in known]
    if not others:
        return nameless
    likely = next((found for name in others if (found := nearest(name, known))), "")
    return [*nameless, f"software: versions of {', '.join(others)} change nothing: facts go by releases of "
            f"{', '.join(known)}, and else by the year{f'; {likely}' if likely else ''}"]


def kernels_in_vain(scenario: Scenario) -> list[str]:
    """A warning where Liger Kernel is named and none of its kernels is in the model's modules."""
    release, software = scenario.software.versions.get("liger_kernel"), scenario.software
    if release is None or not is_release(release):
        return []
    stack = stack_of(software)
    if software.modules != "transformers":
        return ["software: versions.liger_kernel changes nothing: its kernels stand in for parts of Hugging Face's "
                "modules (software.modules: transformers)"]
    return [] if fitting(stack, scenario.model) is stack else [
        "software: versions.liger_kernel changes nothing: it has kernels for decoders with RMSNorm alone"]


def zero_plus_plus_in_vain(scenario: Scenario) -> list[str]:
    """Warnings where ZeRO++ or FSDP's resharding is asked of DeepSpeed's ZeRO and changes nothing, or goes wrong there:
    deepspeed 0.10.0 to 0.19.8 runtime/zero/stage3.py, __avg_scatter_grads (several nodes), csrc/quantization/
    pt_binding.cpp, ds_swizzle_quant (__half), partitioned_param_coordinator.py, __params_to_release."""
    parallel, training, stack = scenario.parallel, scenario.training, stack_of(scenario.software)
    strategy, reshard, name = parallel.strategy, parallel.reshard_after_forward, scenario.software.framework
    if stack.gradient_path != "ipg" or training.mode != "train" or scenario.replica_ranks == 1:
        return []
    found, said = [], "reshard_after_forward" in parallel.model_fields_set and reshard is not True
    if said and strategy in ("none", "ddp", "zero1", "zero2"):
        found.append(f"software: reshard_after_forward {str(reshard).lower()} changes nothing: {strategy} keeps "
                     "parameters whole")
    if said and strategy == "zero3" and reshard is False:
        found.append(f"software: reshard_after_forward false changes nothing: {name}'s ZeRO-3 keeps what is used again "
                     "within stage3_max_reuse_distance elements")
    if strategy == "zero3" and training.precision.reduce == "int4":
        if scenario.cluster.nodes == 1:
            found.append(f"software: reduce int4 changes nothing: {name} quantises gradients between nodes only, and "
                         "this is one")
        elif training.precision.parameters == "bf16":
            found.append(f"software: {name}'s int4 reductions read bf16 gradients as fp16, so they come out wrong; "
                         "time and memory are as predicted")
    return found


def algorithm_in_vain(scenario: Scenario) -> list[str]:
    """A warning where `software.nccl.algorithm` is one that nothing of this cluster can run: NCCL itself would refuse
    ("no algorithm/protocol available", 2.29.7 src/enqueue.cc); here it chooses as if nothing were asked."""
    wanted, cluster = scenario.software.nccl.algorithm, scenario.cluster
    if wanted in (None, "ring", "tree") or scenario.gpus == 1:
        return []
    why = "is not simulated"
    if wanted != "collnet":
        if Topology.from_mapping(cluster.template()).multicasts and (wanted == "nvls" or cluster.nodes > 1):
            return []
        why = "needs NVSwitches of Hopper or later" + (" and several nodes" if wanted == "nvls-tree" else "")
    return [f"software: nccl.algorithm {wanted} changes nothing: it {why}"]


def protocol_in_vain(scenario: Scenario) -> list[str]:
    """A warning where `software.nccl.protocol` is LL128 and no NVLink joins the GPUs of a node: NCCL keeps it for links
    that leave stores of 128 bytes whole (2.29.7 src/graph/tuning.cc)."""
    kind = scenario.cluster.topology.intra.kind
    if scenario.software.nccl.protocol != "ll128" or kind not in ("pcie", "none") or scenario.gpus == 1:
        return []
    return ["software: nccl.protocol ll128 changes nothing: it needs NVLink between the GPUs of a node"]


def determinism(scenario: Scenario) -> list[str]:
    """What `software.deterministic` leaves out: convolutions and inference; and NCCL's choice, where the stack's mode
    wants it made (the fact `names_algorithm`)."""
    software = scenario.software
    if not software.deterministic:
        return []
    what = ("a table of layers" if scenario.model.kind == "layers" else
            "inference" if scenario.training.mode != "train" else "")
    if what:
        return [f"software: deterministic changes nothing here: slower kernels of {what} are not simulated"]
    stack = stack_of(software)
    reordered = scenario.training.attention == "flash" and stack.attention_kernel in ("flash2", "flash3")
    if stack.fills == "none" and not reordered:
        return ["software: deterministic changes nothing here: new tensors are filled from torch 2.2 on, where kernels "
                "are not compiled, and flash attention keeps no order from its second release on"]
    if stack.names_algorithm and scenario.gpus > 1 and software.nccl.algorithm is None:
        return [f"software: {software.framework}'s deterministic mode wants NCCL_ALGO to be set: say which with "
                "nccl.algorithm (NCCL's own choice is simulated)"]
    return []


def accumulation_in_vain(scenario: Scenario) -> list[str]:
    """A warning where `software.fused_accumulation: false` is written and the stack never fuses it."""
    software = scenario.software
    if software.fused_accumulation or scenario.training.mode != "train":
        return []
    fuses = stack_of(software.model_copy(update={"fused_accumulation": True})).gradient_accumulation_fusion
    return [] if fuses else [f"software: fused_accumulation changes nothing: {software.framework} of {software.year} "
                             "adds gradients up by kernels of their own anyway"]


def budget_in_vain(scenario: Scenario) -> list[str]:
    """A warning where a `budget` says what a run may take and not how long it is, or is no run of training."""
    asked = scenario.budget
    if asked is None:
        return []
    if isinstance(scenario.training.mode, Inference):
        return ["budget: changes nothing: it is of a run of training; what a million tokens of requests cost, "
                "'drystep size --gpus N --price USD' tells"]
    return [] if asked.tokens is not None else [
        "budget: changes nothing without tokens: write how many the run takes (budget.tokens, a number or chinchilla)"]


def peer_sums_in_vain(scenario: Scenario) -> list[str]:
    """A warning where an engine's own kernels for sums are asked for and the number of GPUs or no NVLink prevents."""
    mode, tensor, cluster = scenario.training.mode, scenario.parallel.tensor, scenario.cluster
    if not isinstance(mode, Inference) or mode.inference.all_reduce == "nccl" or tensor == 1:
        return []
    able = by_ranks(stack_of(scenario.software).sums_kernel, Topology.from_mapping(cluster.template()))
    why = ("NVLink does not join the GPUs" if cluster.topology.intra.kind in ("pcie", "none") else
           f"{tensor} tensor ranks are more than a node has" if tensor > cluster.gpus_per_node else
           f"the engine has no such kernel for {tensor} GPUs of this kind" if tensor not in able else "")
    return [f"inference: all_reduce peers changes nothing: {why}"] if why else []


def fused_bias_in_vain(scenario: Scenario) -> list[str]:
    """A warning where attention with relative positions is predicted fused and the release has products of its own."""
    if (scenario.model.positions != "relative" or scenario.training.attention == "eager"
            or stack_of(scenario.software).biased_attention):
        return []
    return ["software: this release's T5 has no fused attention (transformers before 5): training.attention=eager is "
            "what it runs"]


def cache_in_vain(scenario: Scenario) -> list[str]:
    """A warning where a narrow cache is asked for and an encoder has none."""
    mode = scenario.training.mode
    if not isinstance(mode, Inference) or mode.inference.generate or mode.inference.kv_cache == "same":
        return []
    return ["inference: kv_cache changes nothing: an encoder has no cache"]


def token_budget_in_vain(scenario: Scenario) -> list[str]:
    """A warning where a budget of tokens is given and all prompts are read at once."""
    mode = scenario.training.mode
    if not isinstance(mode, Inference) or mode.inference.batching == "continuous":
        return []
    return ["inference: token_budget changes nothing under static batching"] if (
        "token_budget" in mode.inference.model_fields_set) else []


def links_in_vain(scenario: Scenario) -> list[str]:
    """Warnings where fields of a topology describe links that its kind of node or network does not have here."""
    topology = scenario.cluster.topology
    intra, inter = topology.intra, topology.inter
    of_a_mesh = ("links_per_pair", "matrix") if intra.kind != "nvlink-mesh" else ()
    told = [name for name in of_a_mesh if getattr(intra, name)]
    told += ["peer_copies"] if intra.peer_copies is not None and intra.kind != "pcie" else []
    change = "change" if len(told) > 1 else "changes"
    found = [f"cluster: intra.{' and '.join(told)} {change} nothing in a node of kind {intra.kind}"] if told else []
    if scenario.cluster.nodes > 1 and inter.kind in _OTHER_SHAPES:
        found.append(f"cluster: hops of a {inter.kind} are not simulated: its nodes are counted as joined by leaf "
                     f"switches of {inter.nodes_per_leaf} nodes each")
    return found


#: Shapes of networks whose links are not simulated. Groups of a dragonfly are leaves: their routers are joined all to
#: all, and `oversubscription` says what leaves a group.
_OTHER_SHAPES = ("torus", "ring")

#: How near to twice is twice.
_ALIKE = 0.02


def both_directions(scenario: Scenario) -> list[str]:
    """A warning where a GPU's links inside a node are given twice the speed that the topology's have: vendors state
    both directions together (NVLink 4: 900 GB/s, 450 each way), `intra_gbps_per_gpu` is one."""
    cluster = scenario.cluster
    asked = cluster.intra_gbps_per_gpu
    if asked is None or cluster.gpus_per_node == 1:
        return []
    topology = Topology.from_mapping(cluster.template())
    if abs(speeds(topology, asked).gpu / speeds(topology).gpu - 2) > _ALIKE:
        return []
    return [f"network: intra_gbps_per_gpu {asked:g} Gb/s ({asked / 8:g} GB/s) is twice what {cluster.topology.name} "
            f"has: it is one direction, and vendors state both together ({asked / 2:g} is its own)"]


def with_sparsity(scenario: Scenario) -> list[str]:
    """A warning where a GPU of one's own is given twice the products of the one it is like: vendors state both those of
    dense matrices and, first, those with structured sparsity (H100: 989 and 1,979 TFLOP/s in bf16)."""
    cluster, own = scenario.cluster, scenario.cluster.topology.gpu
    asked = cluster.gpu.tflops if cluster.gpu is not None else None
    name = own if isinstance(own, str) else str(own["like"])
    has = gpu_facts(name)["tflops"]
    told = [dtype for dtype, value in (asked or {}).items() if dtype in has and abs(value / has[dtype] - 2) <= _ALIKE]
    dense = ", ".join(f"{has[dtype]:g}" for dtype in told)
    return [f"hardware: tflops of {', '.join(told)} are twice those of {name}: dense products are meant, and vendors "
            f"state twice as much with sparsity ({dense} dense)"] if told else []


def direct_over_sockets(scenario: Scenario) -> list[str]:
    """A warning where a topology says that its cards read GPU memory over a fabric that stages messages through the
    host, as one does whose fabric alone was changed."""
    cluster = scenario.cluster
    inter = cluster.topology.inter
    generation = generation_of(cluster.topology.gpu)
    if cluster.nodes == 1 or not inter.gpu_direct_rdma or reads_gpus(inter.fabric, generation):
        return []
    return [f"network: {inter.fabric} is counted with gpu_direct_rdma true, as the topology says, which it does not "
            "have: --set cluster.topology.inter.gpu_direct_rdma=false counts messages through the host"]


def links_of_other_cards(scenario: Scenario) -> list[str]:
    """Warnings where a node joins its GPUs by links that these do not have, or by PCIe although they have NVLinks to
    all, as a topology does that says nothing of `intra`, or whose GPU alone was changed."""
    cluster = scenario.cluster
    topology = cluster.topology
    kind, own = topology.intra.kind, gpu_facts(topology.gpu).get("nvlink")
    name = topology.gpu if isinstance(topology.gpu, str) else topology.gpu["like"]
    if cluster.gpus_per_node == 1:
        return []
    if kind == "pcie" and own and not own["bridge_pairs_only"]:
        return [f"network: the {cluster.gpus_per_node} GPUs of a node are joined by PCIe alone, though {name} has "
                "links of its own: intra: {kind: nvswitch}, or nvlink-mesh, joins them by these"]
    if (kind == "nvlink-mesh" and not own) or (kind == "nvswitch" and (not own or own["bridge_pairs_only"])):
        has = "has NVLink between two cards at most" if own else "has no NVLink"
        return [f"network: {name} {has}, and {topology.name} joins GPUs by {topology.intra.link}: it is sold with "
                "intra: {kind: pcie}"]
    return []


#: What is asked in vain, in the order in which it is said.
_ASKED = (links_in_vain, links_of_other_cards, both_directions, with_sparsity, direct_over_sockets, overlap_in_vain,
          prefetch_in_vain, takes_turns, zero_plus_plus_in_vain, algorithm_in_vain, schedule_of_another, same_tokens,
          versions_in_vain, kernels_in_vain, determinism, accumulation_in_vain, autocast_alone, fused_bias_in_vain,
          cache_in_vain, token_budget_in_vain, peer_sums_in_vain, protocol_in_vain, budget_in_vain, not_flash,
          documents_in_vain, joint_beside_frozen, third_in_vain)


def in_vain(scenario: Scenario) -> list[str]:
    """All warnings of this file about a scenario."""
    return [text for asked in _ASKED for text in asked(scenario)]
