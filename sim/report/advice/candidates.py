"""Single changes of a scenario that may free memory, in words and as fields; nothing is predicted here.

Changes of one group are degrees of the same thing (micro-batches of 8, 4, 2 ...), the mildest first: of a group only
the first that suffices is worth its cost. What a stack or a model rules out is found by who resolves and lowers it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from sim.scenario.fields.schema import Inference, InferenceRun, Scenario
from sim.software import stack_of
from sim.work import DTYPE_BYTES

Sets = Mapping[str, Any]

#: Rank of LoRA's matrices where a user asked for none: peft's examples have 8 to 64.
_RANK = 16
#: Degrees to which a number of ranks is raised.
_FACTORS = (2, 4, 8)
#: Schedules that hold fewer micro-batches than others do.
_LEANER = {"gpipe": ("1f1b",), "interleaved": ("1f1b",), "zb-2p": ("zb-1p", "1f1b"), "zb-h2": ("zb-h1", "1f1b"),
           "zb-1p": ("zb-h1", "1f1b"), "zb-h1": ("1f1b",), "zb-v": ("1f1b",), "dualpipe": ("zb-v",)}


def own_half(scenario: Scenario) -> str:
    """The precision in which a framework trains with 16-bit parameters of its own, where the scenario keeps them in
    fp32; "" elsewhere."""
    policy, precision = stack_of(scenario.software).half_policy, scenario.training.precision
    wide = precision.parameters == "fp32" and precision.compute in ("bf16", "fp16")
    return f"{policy}-{precision.compute}" if wide and policy != "autocast" else ""


class Candidate(NamedTuple):
    """One change.

    Attributes:
        group: what it is a degree of.
        what: in words.
        set: dotted fields and their new values.
    """

    group: str
    what: str
    set: Sets


def candidates(scenario: Scenario) -> Iterator[Candidate]:
    """Changes that may free memory, group by group, the mildest of a group first."""
    if isinstance(scenario.training.mode, Inference):
        yield from _serving(scenario, scenario.training.mode.inference)
        return
    yield from _activations(scenario)
    yield from _optimizer(scenario)
    yield from _dtypes(scenario)
    yield from _sharding(scenario)
    yield from _cuts(scenario)
    yield from _offload(scenario)


def _serving(scenario: Scenario, run: InferenceRun) -> Iterator[Candidate]:
    """Fewer bits per weight, fewer sequences at once, more ranks per replica, weights shared out or in host memory."""
    fields = ("training.precision.parameters", "training.finetune.base")  # the second follows the first
    precision = scenario.training.precision
    # products in 8 bits and below go with weights of the same format
    narrow = DTYPE_BYTES[precision.compute] < 2
    products: Sets = {"training.precision.compute": "bf16"} if narrow else {}
    for dtype in ("int8", "int4"):
        if DTYPE_BYTES[dtype] < DTYPE_BYTES.get(precision.parameters, 0.5):
            yield Candidate("weights", f"weights in {dtype}", {**dict.fromkeys(fields, dtype), **products})
    if run.kv_cache == "same" and run.generate:
        yield Candidate("cache", "a cache of keys and values in fp8", {"training.mode.inference.kv_cache": "fp8"})
    for size in _halves(run.batch):
        yield Candidate("batch", f"{size} sequence{'s' if size > 1 else ''} at once instead of {run.batch}",
                        {"training.mode.inference.batch": size})
    for name in ("tensor", "pipeline"):
        yield from _more_ranks(scenario, name)
    parallel = scenario.parallel
    if parallel.strategy in ("none", "ddp") and scenario.data_parallel > 1:
        yield Candidate("sharding", f"weights shared out over {scenario.data_parallel} GPUs, gathered block by block",
                        {"parallel.strategy": "fsdp", **({"software.fsdp": 2} if scenario.software.fsdp == 1 else {})})
    if parallel.offload.parameters == "none":
        yield Candidate("offload", "weights in host memory, copied as they are needed",
                        {"parallel.offload.parameters": "cpu"})


def _activations(scenario: Scenario) -> Iterator[Candidate]:
    training = scenario.training
    if training.recompute == "none":
        yield Candidate("selective-op", "recomputation of every second product", {"training.recompute": "selective-op"})
        if training.attention == "eager":
            yield Candidate("selective", "recomputation of the attention core", {"training.recompute": "selective"})
        if scenario.model.mla is not None:
            yield Candidate("expansion", "recomputation of latent attention's expansion",
                            {"training.recompute": {"modules": ["mla_up_proj"]}})
        if scenario.model.moe is not None:
            yield Candidate("experts", "recomputation of the experts' activation and lone norms",
                            {"training.recompute": {"modules": ["layernorm", "moe_act"]}})
    if training.recompute != "full":
        yield Candidate("recompute", "full recomputation", {"training.recompute": "full"})
    if training.attention == "eager":
        yield Candidate("attention", "a fused attention kernel", {"training.attention": "flash"})
    for size in _halves(training.micro_batch):
        yield Candidate("micro-batch", f"micro-batches of {size} instead of {training.micro_batch}",
                        {"training.micro_batch": size})
    if not training.chunked_loss and scenario.model.kind == "decoder":
        yield Candidate("loss", "logits and loss in chunks", {"training.chunked_loss": True})


def _optimizer(scenario: Scenario) -> Iterator[Candidate]:
    training, parallel = scenario.training, scenario.parallel
    if scenario.software.optimizer_kernel != "fused":
        yield Candidate("kernel", "fused optimizer kernels", {"software.optimizer_kernel": "fused"})
    if not training.optimizer_in_backward and scenario.micro_steps == 1:
        yield Candidate("in backward", "the optimizer in backward", {"training.optimizer_in_backward": True})
    if training.optimizer in ("adam", "adamw"):
        yield Candidate("8-bit", "an 8-bit optimizer (AdamW's states in 8 bits)", {"training.optimizer": "adamw-8bit"})
    if training.optimizer in ("adam", "adamw", "adamw-8bit"):
        yield Candidate("adafactor", "Adafactor instead of Adam", {"training.optimizer": "adafactor"})
    if parallel.strategy == "ddp" and not parallel.gradient_as_bucket_view:
        yield Candidate("view", "gradients as views of their buckets", {"parallel.gradient_as_bucket_view": True})


def _dtypes(scenario: Scenario) -> Iterator[Candidate]:
    precision, tuned = scenario.training.precision, scenario.training.finetune
    if tuned.method == "lora":
        # what is not quantised as it is: peft's function for k bits makes it fp32, the residual stream with it
        rest: Sets = {"training.finetune.unquantised": tuned.base} if tuned.base in ("bf16", "fp16") else {}
        yield Candidate("base", "a frozen base in 4 bits (QLoRA)",
                        {"training.finetune.method": "qlora", "training.finetune.base": "nf4", **rest})
    if precision.compute in ("fp32", "tf32"):
        sharded = scenario.parallel.strategy in ("fsdp", "zero3")
        for half in ("bf16", "fp16"):
            name = f"fsdp-{half}" if sharded else f"amp-{half}"
            yield Candidate("half", f"mixed precision ({name})", {"training.precision": name})
    elif precision.compute in ("bf16", "fp16") and _full(scenario):
        if scenario.parallel.strategy == "fsdp" and precision.gather == "fp32":
            name = f"fsdp-{precision.compute}"
            yield Candidate("gathers", f"gathers in {precision.compute} ({name}) instead of autocast",
                            {"training.precision": name})
        if (own := own_half(scenario)) and scenario.parallel.strategy != "fsdp":
            yield Candidate("own", f"{scenario.software.framework}'s own mixed precision ({own}) instead of autocast",
                            {"training.precision": own})
        yield Candidate("fp8", "products in fp8", {"training.precision": "fp8"})


#: Strategies under which every replica holds all parameters.
WHOLE = ("none", "ddp", "zero1", "zero2")
#: Parameters, gradients and states on one rank alone each, gathered again in backward.
FSDP_OVER_ALL = Candidate("FSDP", "FSDP over all ranks", {
    "parallel.strategy": "fsdp", "parallel.reshard_after_forward": True, "parallel.sharding_factor": "full"})


def _sharding(scenario: Scenario) -> Iterator[Candidate]:
    parallel, whole = scenario.parallel, {"parallel.sharding_factor": "full"}
    strategy, replicas = parallel.strategy, scenario.replica_ranks
    if strategy in WHOLE and replicas > 1:
        at = int(strategy[-1]) if strategy.startswith("zero") else 0
        for stage in range(at + 1, 4):
            yield Candidate("ZeRO", f"ZeRO-{stage}", {"parallel.strategy": f"zero{stage}", **whole})
        fsdp = dict(FSDP_OVER_ALL.set)
        yield FSDP_OVER_ALL
        precision = scenario.training.precision
        if precision.compute in ("bf16", "fp16") and precision.parameters == "fp32" and _full(scenario):
            name = f"fsdp-{precision.compute}"
            fsdp = {**fsdp, "training.precision": name}
            yield Candidate("FSDP", f"FSDP over all ranks, gathers in {precision.compute} ({name})", fsdp)
        # without sharding parameters stay where they are, so that neither alone is a change to combine with the other
        outside = {"parallel.offload.parameters": "cpu", "parallel.offload.optimizer": "cpu"}
        if scenario.parallel.offload.parameters == "none":
            yield Candidate("FSDP outside", "FSDP over all ranks, parameters and optimizer in host memory",
                            {**fsdp, **outside})
            yield Candidate("ZeRO outside", "ZeRO-3, parameters and optimizer in host memory",
                            {"parallel.strategy": "zero3", **whole, **outside})
    if strategy not in ("none", "ddp"):
        factor = parallel.sharding_factor
        for wider in dict.fromkeys((2 * factor, replicas)):
            if factor < wider <= replicas:
                yield Candidate("sharding", f"sharding over {wider} ranks instead of {factor}",
                                {"parallel.sharding_factor": wider})
    if strategy == "fsdp":
        if parallel.reshard_after_forward is not True:
            yield Candidate("reshard", "resharding after forward", {"parallel.reshard_after_forward": True})
        if not parallel.reduce_every_micro_step and scenario.micro_steps > 1:
            yield Candidate("reduction", "gradients reduced in every micro-step",
                            {"parallel.reduce_every_micro_step": True})
        if parallel.prefetch.backward != "none":
            yield Candidate("prefetch", "no prefetch in backward", {"parallel.prefetch.backward": "none"})
    if strategy not in ("none", "ddp"):
        for factor in _FACTORS:
            many, before, sets = _more_gpus(scenario, factor)
            yield Candidate("nodes", f"{many} instead of {before}", {**sets, **_resharded(scenario)})


def _cuts(scenario: Scenario) -> Iterator[Candidate]:
    """The model over more ranks, and what a cut model holds more of than it needs."""
    parallel = scenario.parallel
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        yield Candidate("sequence parallel", "sequence parallelism", {"parallel.sequence_parallel": True})
    for leaner in _LEANER.get(parallel.schedule, ()) if parallel.pipeline > 1 else ():
        chunks = {"parallel.virtual_stages": 1} if leaner != "zb-v" else {}
        yield Candidate(leaner, f"schedule {leaner} instead of {parallel.schedule}",
                        {"parallel.schedule": leaner, **chunks})
    names = ["tensor", "pipeline", "context"] + (["expert"] if scenario.model.moe is not None else [])
    for name in names:
        yield from _more_ranks(scenario, name)


def _more_ranks(scenario: Scenario, name: str) -> Iterator[Candidate]:
    """A cut over more ranks: of the same GPUs where replicas can be given up for it, else of more nodes."""
    now = getattr(scenario.parallel, name)
    words = {"tensor": "tensor ranks", "pipeline": "pipeline stages", "context": "context ranks",
             "expert": "expert ranks"}[name]
    for factor in _FACTORS:
        sets: dict[str, Any] = {f"parallel.{name}": factor * now}
        again = {} if name == "expert" else dict(_resharded(scenario))
        if (name == "tensor" and scenario.model.moe is not None and scenario.training.mode == "train"
                and stack_of(scenario.software).experts_scattered):
            again["parallel.sequence_parallel"] = True
        if name == "expert" or scenario.data_parallel % factor == 0:
            yield Candidate(name, f"{factor * now} {words} instead of {now}", {**sets, **again})
        else:
            many, _, larger = _more_gpus(scenario, factor)
            yield Candidate(name, f"{factor * now} {words} instead of {now}, on {many}", {**sets, **larger, **again})


def _more_gpus(scenario: Scenario, factor: int) -> tuple[str, str, Sets]:
    """So many times the GPUs: what of a single node is not taken yet, else whole nodes more. In words, as they are now,
    and the fields that say it."""
    cluster = scenario.cluster
    nodes, own, whole = cluster.nodes, cluster.gpus_per_node, cluster.topology.gpus_per_node
    wanted = own * factor
    if nodes > 1 or own == whole or wanted % min(whole, wanted):
        return f"{factor * nodes} nodes", str(nodes), {"cluster.nodes": factor * nodes}
    more, each = wanted // min(whole, wanted), min(whole, wanted)
    spread: Sets = {"cluster.nodes": more} if more > 1 else {}
    return (f"{wanted} GPUs" + (f" of {more} nodes" if more > 1 else ""), str(own),
            {"cluster.gpus_per_node": each, **spread})


def _offload(scenario: Scenario) -> Iterator[Candidate]:
    """What can live in host memory; what the strategy of the stack cannot offload, lowering rules out."""
    field, places = "parallel.offload", scenario.parallel.offload
    if places.optimizer == "none" and scenario.training.optimizer != "none":
        yield Candidate("optimizer offload", "the optimizer on the CPU", {f"{field}.optimizer": "cpu"})
        yield Candidate("paged optimizer", "the optimizer's states in unified memory",
                        {f"{field}.optimizer": "paged"})
    if places.parameters == "none":
        yield Candidate("parameter offload", "parameters and optimizer in host memory",
                        {f"{field}.parameters": "cpu", f"{field}.optimizer": "cpu"})
    if places.activations == "none":
        yield Candidate("activation offload", "activations in host memory", {f"{field}.activations": "cpu"})
    states = [name for name in ("parameters", "optimizer") if getattr(places, name) == "cpu"]
    if states:
        what = " and ".join(states)
        third: Sets = {"parallel.strategy": "zero3"} if scenario.parallel.strategy in ("zero1", "zero2") else {}
        yield Candidate("disks", f"{what} on NVMe" + (" under ZeRO-3" if third else ""),
                        {**third, **{f"{field}.{name}": "nvme" for name in states}})
        yield Candidate("back", f"{what} on the GPU", {f"{field}.{name}": "none" for name in states})
    if places.activations != "none":
        yield Candidate("kept", "activations kept on the GPU", {f"{field}.activations": "none"})


def few_trained(scenario: Scenario) -> Iterator[Candidate]:
    """LoRA in place of training all weights, then with its frozen weights in 4 bits: another training, for a job that
    nothing else makes fit."""
    half, field = scenario.training.precision.compute, "training.finetune"
    if not _full(scenario) or half not in ("bf16", "fp16") or scenario.model.kind == "layers":
        return
    rank = {f"{field}.rank": _RANK, f"{field}.targets": "all-linear"}
    yield Candidate("LoRA", f"LoRA of rank {_RANK} instead of training all weights",
                    {f"{field}.method": "lora", f"{field}.base": half, **rank})
    yield Candidate("QLoRA", f"QLoRA of rank {_RANK} (frozen weights in 4 bits) instead of training all weights",
                    {f"{field}.method": "qlora", f"{field}.base": "nf4", f"{field}.unquantised": half, **rank})


def _full(scenario: Scenario) -> bool:
    """Whether all weights are trained."""
    return scenario.training.finetune.method == "full"


def _resharded(scenario: Scenario) -> Sets:
    """Shards over all replicas stay over all replicas when their number changes."""
    parallel = scenario.parallel
    whole = parallel.strategy not in ("none", "ddp") and parallel.sharding_factor == scenario.replica_ranks
    return {"parallel.sharding_factor": "full"} if whole else {}


def _halves(size: int) -> Iterator[int]:
    while size := size // 2:
        yield size
