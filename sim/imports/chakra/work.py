"""What a step of a trace does beside the model: batch, dtypes, optimizer, recomputation, kernels."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sim.imports.chakra.files import Trace
from sim.imports.chakra.groups import Collective
from sim.imports.chakra.layout import Counts
from sim.imports.chakra.nodes import Node
from sim.imports.chakra.operators import Pass, most_common
from sim.imports.chakra.told import Told
from sim.scenario.fields.precisions import FIELDS, PRECISIONS

_STEP = re.compile(r"Optimizer\.step#(\w+)\.step")
#: Class of an optimizer -> what it is here (torch.optim, apex, deepspeed, bitsandbytes, transformers; recalled).
_OPTIMIZERS = {
    "AdamW": "adamw", "FusedAdam": "adamw", "Adam": "adam", "DeepSpeedCPUAdam": "adamw", "SGD": "sgd",
    "Adafactor": "adafactor", "LAMB": "lamb", "FusedLAMB": "lamb", "FusedLamb": "lamb", "Lamb": "lamb", "Muon": "muon",
    "AdamW8bit": "adamw-8bit", "Adam8bit": "adamw-8bit", "PagedAdamW8bit": "adamw-8bit",
}
#: What SGD calls with momentum alone.
_MOMENTUM = ("aten::mul_", "aten::_foreach_mul_", "aten::_fused_sgd_")
_COMPILED = ("Torch-Compiled Region", "CompiledFunction", "triton_")
_LIBRARY = re.compile(r"flash_?attn|flex_attention", re.I)


def read_batch(told: Told, one: Pass, embedding: Node | None, counts: Counts, context: int) -> None:
    """Batch, sequence and micro-steps."""
    attention = one.attention[0]
    sizes = embedding.shape(1) if embedding is not None else ()
    if embedding is not None and len(sizes) == 2:
        batch, tokens, origin = sizes[0], sizes[1], embedding
    elif attention.batch:
        batch, tokens, origin = attention.batch, attention.tokens, attention.node
    else:
        told.leave(attention.node.name, attention.tokens, "neither the embedding nor attention tells the batch")
        return
    told.take("training.micro_batch", batch, origin)
    told.take("training.sequence", tokens * context, origin,
              f"{tokens} on each of {context} context ranks" if context > 1 else "")
    if counts.passes % max(1, counts.steps):
        told.leave("forwards", counts.passes, f"no multiple of the {counts.steps} optimizer steps: {counts.micro_steps}"
                                              " of each step are counted")
    told.take("training.micro_steps", counts.micro_steps, origin,
              f"{counts.passes} forwards, {counts.steps} optimizer steps")


def optimizer_steps(trace: Trace) -> list[Node]:
    """Calls of an optimizer's step, wrappers' too, those of optimizers that are known first."""
    found = [node for node in trace.nodes if _STEP.match(node.name)]
    return sorted(found, key=lambda node: node.name.split("#")[1].removesuffix(".step") not in _OPTIMIZERS)


def read_optimizer(told: Told, trace: Trace, steps: Sequence[Node]) -> str:
    """Optimizer and its kernels; the dtype of its states, "" if unknown."""
    inside = [node for node in trace.nodes if node.updating]
    if not steps:
        told.assume("training.optimizer", "adamw", "no optimizer's step is in the trace")
        return ""
    classes = list(dict.fromkeys(found[1] for node in steps if (found := _STEP.match(node.name))))
    known = [_OPTIMIZERS[name] for name in classes if name in _OPTIMIZERS]
    kind = "muon" if "muon" in known else known[0] if known else ""
    if kind == "sgd" and any(node.name in _MOMENTUM for node in inside):
        kind = "sgd-momentum"
    if kind:
        told.take("training.optimizer", kind, steps[0].name)
    else:
        told.leave(steps[0].name, classes[0], f"not simulated; known are {', '.join(_OPTIMIZERS)}")
        told.assume("training.optimizer", "adamw", f"{classes[0]} is not known here")
    _offload(told, steps, inside)
    fused = [node for node in inside if node.name.startswith("aten::_fused_")]
    # Counters of steps are added to together even where the rest is one kernel each.
    each = [node for node in inside if node.name.startswith("aten::_foreach_") and "add_" not in node.name]
    single = [node for node in inside if node.name in ("aten::lerp_", "aten::addcdiv_", "aten::add_")]
    if fused or each or single:
        how = "fused" if fused else "foreach" if each else "loop"
        told.take("software.optimizer_kernel", how, (fused or each or single)[0].name)
    states = (fused or [node for node in each if "mul" in node.name] or single)
    if fused:
        return fused[0].dtype(2) or fused[0].dtype(0)
    return most_common([node.dtype(0) for node in states])


def _offload(told: Told, steps: Sequence[Node], inside: Sequence[Node]) -> None:
    """An optimizer that steps on the CPU beside a model on a GPU."""
    native = next((node for node in steps if "CPUAdam" in node.name), None)
    places = [node for node in inside if node.name in ("aten::lerp_", "aten::addcdiv_") or "_foreach_lerp" in node.name
              or node.name.startswith("aten::_fused_")]
    there = [node for node in places if node.first_device(0).startswith("cpu")]
    if native is not None or (there and told.device not in ("", "cpu")):
        origin = native or there[0]
        told.take("parallel.offload.optimizer", "cpu", origin, "the optimizer steps on the CPU")
        if told.draft.value("parallel.strategy") == "fsdp":
            told.take("parallel.offload.parameters", "cpu", origin, "FSDP's optimizer steps where its shards are")


def read_precision(told: Told, forward: Pass, calls: Sequence[Collective], strategy: str, states: str,
                   gradients: str) -> None:
    """The seven dtypes, or the name they have together."""
    products = forward.products
    computes = most_common([one.computes for one in products]) or "fp32"
    stored = most_common([one.stored for one in products if one.stored != "fp8"]) or computes
    narrow = [one for one in products if one.narrow]
    states = states or stored
    gather = most_common([one.dtype for one in calls if one.kind == "all-gather" and not one.node.updating])
    reduce = most_common([one.dtype for one in calls if one.elements > 64 and (
        one.kind == "reduce-scatter" or (one.kind == "all-reduce" and strategy != "fsdp"))])
    if strategy == "fsdp":  # shards are what the optimizer steps over, gathered in the dtype that computes
        row = [computes, states, "none", states, states, gather or computes, reduce or computes]
    elif stored == states:
        row = [computes, stored, "none", gradients or stored, states, gather or stored, reduce or gradients or stored]
    else:  # 16-bit parameters beside masters
        wire = reduce or stored
        row = [computes, stored, states, wire, states, gather or stored, wire]
    if narrow:
        row[0] = "fp8"
    value = _named(dict(zip(FIELDS, row, strict=True)), strategy)
    if not products:
        told.assume("training.precision", value, "no product of the trace tells dtypes")
        return
    wires = [f"{name} {dtype}" for name, dtype in (("gathered", gather), ("reduced", reduce)) if dtype]
    told.take("training.precision", value, (narrow or products)[0].node,
              ", ".join([f"products of {stored} weights in {row[0]}", f"states {states}", *wires])
              + ("; TF32 is not told apart" if computes == "fp32" else ""))


def _named(dtypes: dict[str, str], strategy: str) -> str | dict[str, str]:
    """The name of seven dtypes, or the name that all but one of them have with that one, the strategy's first."""
    names = sorted(PRECISIONS, key=lambda name: not name.startswith(strategy))
    for most in (0, 1):
        for name, known in ((name, PRECISIONS[name]) for name in names):
            other = {field: dtype for field, dtype in dtypes.items() if known[field] != dtype}
            if len(other) <= most:
                return {"name": name, **other} if other else name
    return dtypes


def read_recompute(told: Told, again: Pass, layers: int, passes: int, compiled: bool) -> None:
    """What of forward runs again in backward."""
    path, each = "training.recompute", max(1, passes)
    attention, products = again.attention, again.products
    if not attention and (compiled or not products):
        told.take(path, "none", "backward", "no attention of forward runs again in it"
                  + ("; the compiler's own recomputation is its" if compiled else ""))
    elif attention and any(one.ran for one in products) and not any(one.ran for one in attention):
        told.take(path, "selective-op", attention[0].node, f"{sum(one.ran for one in products)} of {len(products)} "
                  "products run again in backward, and attention is kept")
    elif attention and not products:
        told.take(path, "selective", attention[0].node, "attention alone runs again in backward")
    elif not attention:
        told.leave("products in backward", len(products), "parts of blocks run again; counted as Megatron's mlp alone")
        told.take(path, {"modules": ["mlp"]}, products[0].node)
    elif 0 < round(len(attention) / each) < layers:
        told.take(path, {"layers": round(len(attention) / each)}, attention[0].node,
                  f"attention of {round(len(attention) / each)} of {layers} blocks runs again")
    else:
        told.take(path, "full", attention[0].node, f"{round(len(products) / each)} products of a forward run again in "
                  "backward")


def compiler_in(trace: Trace) -> Node | None:
    """A call that shows torch.compile at work."""
    return next((node for node in trace.nodes if node.name.startswith(_COMPILED)), None)


def read_kernels(told: Told, trace: Trace, one: Pass) -> None:
    """Attention's kernel, the compiler, graphs."""
    attention = one.attention[0]
    inner = next((node.name for node in trace.nodes if node.id > attention.node.id and "ackward" not in node.name
                  and node.name.startswith("aten::_scaled_dot_product") and attention.node.name in node.above), "")
    if attention.kernel == "eager":
        told.take("training.attention", "eager", attention.node, "products and a softmax of scores")
    elif _LIBRARY.search(attention.kernel):
        told.take("training.attention", "flash", attention.node)
    else:
        took = f"it took {inner.removeprefix('aten::')}" if inner else ""
        told.take("training.attention", "sdpa", attention.node, took)
    if (compiled := compiler_in(trace)) is not None:
        told.take("software.compile", True, compiled)
    graphs = next((node for node in trace.nodes if "cudaGraphLaunch" in node.name), None)
    if graphs is not None:
        told.take("software.cuda_graphs", True, graphs.name)
    if trace.year:
        told.take("software.year", trace.year, "time")
    if told.device == "cpu":
        told.leave("device", told.device, "recorded on the CPU: which kernels ran tells nothing of a GPU's")
