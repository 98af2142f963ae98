"""What cannot be: sizes that contradict each other, degrees that do not divide. Every message names both numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from sim.catalog import table
from sim.errors import Fault, nearest
from sim.scenario.checks.cluster import cluster
from sim.scenario.checks.experts import mixture, spread
from sim.scenario.checks.findings import Finding, divisors_near
from sim.scenario.checks.kinds import documents, modules, norms, of_decoders, of_transformers, windows
from sim.scenario.checks.trouble import trouble
from sim.scenario.defaults import SHARDED, plain_base
from sim.scenario.fields.model import Model
from sim.scenario.fields.schema import FULL, InferenceRun, Scenario, Training
from sim.scenario.text.document import Document

#: What a transformer must be told; everything else has a default.
_TRANSFORMER_SIZES = ("layers", "hidden", "heads", "vocab")
#: Longest accumulation that is taken for meant.
MAX_MICRO_STEPS = 1_000_000
#: Schedules that hold several chunks of the model on each rank.
_CHUNKED = frozenset({"interleaved", "zb-v", "dualpipe"})


def check_names(data: dict[str, Any], document: Document) -> list[Fault]:
    """Faults that are worth reporting together with wrong types, before defaults are filled in."""
    return [*_batch_given(data.get("training"), document), *_model_given(data.get("model"), document),
            *_links_known(data.get("cluster"), document)]


#: A measured link may reach more than its nominal speed, but not twice that.
_MOST_SHARE = 2.0


def _links_known(cluster: Any, document: Document) -> list[Fault]:
    """Figures of links measured on a cluster have the catalogue's names."""
    topology = cluster.get("topology") if isinstance(cluster, dict) else None
    links = topology.get("links") if isinstance(topology, dict) else None
    if not isinstance(links, dict):
        return []
    known = table("network/figures.yaml")
    percent = [document.fault(f"cluster.topology.links.{name}", f"{value:g} is no share of what a link has: at most "
                              f"{_MOST_SHARE:g}", f"write {value / 100:g}" if value <= 100 * _MOST_SHARE else "")
               for name, value in links.items() if "_share." in str(name) and isinstance(value, int | float)
               and value > _MOST_SHARE]
    nameless = [document.fault(f"cluster.topology.links.{name}", f"no figure of links is called '{str(name)[:60]}'",
                               nearest(str(name), known) or "its names are those of sim/network/figures.yaml")
                for name in links if name not in known]
    return percent + nameless


def _batch_given(training: Any, document: Document) -> list[Fault]:
    """The batch is told by one of two fields."""
    if not isinstance(training, dict):
        return []
    given = [name for name in ("global_batch", "micro_steps") if name in training]
    if len(given) == 2:
        return [document.fault("training.micro_steps", "'global_batch' and 'micro_steps' both tell the batch",
                               "keep one of the two")]
    if given or any(nearest(n, [*Training.model_fields]) for n in training if n not in Training.model_fields):
        return []  # or a slip of the keyboard, reported as such
    return [document.fault("training.global_batch", "'global_batch' is required: "
                           f"{Training.model_fields['global_batch'].description}", "add 'global_batch: …', or "
                           "'micro_steps: 1' for one micro-batch per replica")]


def _model_given(model: Any, document: Document) -> list[Fault]:
    """The architecture is named, or its sizes are there."""
    if not isinstance(model, dict) or model.get("preset") or model.get("hf"):
        return []
    if not model:
        return [document.fault("model", "the model is not given", "name a 'preset', an 'hf' config.json, or its sizes")]
    if model.get("kind", "decoder") == "layers":
        if "table" not in model:
            return [document.fault("model", "kind layers needs 'table', the path of a CSV", "add 'table: layers.csv'")]
        return []
    missing = [f"'{name}'" for name in _TRANSFORMER_SIZES if name not in model]
    if not missing:
        return []
    if any(nearest(name, [*Model.model_fields]) for name in model if name not in Model.model_fields):
        return []  # a slip of the keyboard, reported as such
    return [
        document.fault(
            "model", f"the model needs {', '.join(missing)}", "give them, or a 'preset': see 'drystep list models'"
        )
    ]


def check(written: Scenario, scenario: Scenario, document: Document) -> list[Fault]:
    """Every impossible combination of a scenario whose fields are each well-formed."""
    findings: list[Finding] = [*cluster(written, scenario), *_layout(written, scenario)]
    laid_out = not findings  # else the number of replicas means nothing
    rules = (trouble, _model, mixture, of_decoders, of_transformers, norms, windows, documents, modules, _tensor,
             _context, _pipeline, _modes, _tokens, _nccl, _allocator)
    for rule in (*rules, _batch, _sharding, spread) if laid_out else rules:
        findings += rule(written, scenario)
    return [document.fault(path, message, hint) for path, message, hint in findings]


def _divides(part: int, whole: int) -> bool:
    return part > 0 and whole % part == 0


def _model(written: Scenario, s: Scenario) -> Iterator[Finding]:
    m = s.model
    if m.kind == "layers":
        return
    if m.table is not None:
        yield "model.table", f"a table of layers needs kind layers, and the model is a {m.kind}", "add 'kind: layers'"
    if written.model.head_dim is None and m.mla is None and not _divides(m.heads, m.hidden):
        yield (
            "model.heads",
            f"hidden {m.hidden} is not a multiple of heads {m.heads}",
            "; ".join(h for h in (divisors_near(m.hidden, m.heads), "or give head_dim") if h),
        )
    if m.kv_heads > m.heads:
        yield "model.kv_heads", f"kv_heads {m.kv_heads} is more than heads {m.heads}", f"at most {m.heads}"
    elif not _divides(m.kv_heads, m.heads):
        yield (
            "model.kv_heads",
            f"kv_heads {m.kv_heads} does not divide heads {m.heads}",
            divisors_near(m.heads, m.kv_heads),
        )
    if written.model.decoder_layers and m.kind != "encoder-decoder":
        yield (
            "model.decoder_layers",
            f"decoder_layers is for kind encoder-decoder, and the model is a {m.kind}",
            "put all blocks in 'layers'",
        )
    longest = max(s.training.sequence, s.training.decoder_sequence if m.kind == "encoder-decoder" else 0)
    if m.positions == "learned" and longest > m.max_positions:
        yield (
            "training.sequence",
            f"a sequence of {longest} tokens but the model has {m.max_positions} learned positions "
            "(model.max_positions)",
            f"set model.max_positions to {longest}, or shorten the sequence",
        )
    if 12 * m.hidden**2 * m.layers > 10**18:
        yield "model.hidden", f"{m.layers} blocks of width {m.hidden} are over 10^18 parameters, absurdly many", ""


def _layout(written: Scenario, s: Scenario) -> Iterator[Finding]:
    p = s.parallel
    group = p.tensor * p.context * p.pipeline
    if not _divides(group, s.gpus):
        path = max(("tensor", "context", "pipeline"), key=lambda name: int(getattr(p, name)))
        yield (
            f"parallel.{path}",
            f"tensor {p.tensor} · context {p.context} · pipeline {p.pipeline} = {group} does not "
            f"divide {s.gpus} GPUs ({s.cluster.nodes} node{'s' * (s.cluster.nodes > 1)} of {s.cluster.gpus_per_node})",
            divisors_near(s.gpus, group),
        )
        return
    if sorted(p.order) != sorted(["tensor", "context", "expert", "data", "pipeline"]):
        yield ("parallel.order", "order must name each of tensor, context, expert, data and pipeline once", "")
    if s.data_parallel > 1 and p.strategy == "none" and s.training.mode == "train":
        yield (
            "parallel.strategy",
            f"strategy none would leave {s.data_parallel} data-parallel replicas unsynchronised",
            "write ddp, zero1, zero2, zero3 or fsdp",
        )


def _batch(written: Scenario, s: Scenario) -> Iterator[Finding]:
    t, replicas = s.training, s.data_parallel
    if t.global_batch % replicas:
        nearby = t.global_batch // replicas * replicas
        near = f"{nearby} or {nearby + replicas}" if nearby else str(replicas)
        yield (
            "training.global_batch",
            f"global_batch {t.global_batch} does not divide over {replicas} data-parallel replicas",
            f"{near} would",
        )
    elif t.micro_batch > t.global_batch // replicas:
        share, what = t.global_batch // replicas, "samples" if s.model.kind == "layers" else "sequences"
        yield (
            "training.micro_batch",
            f"micro_batch {t.micro_batch} is more than the {share} {what} each of {replicas} "
            f"replicas has of global_batch {t.global_batch}",
            f"at most {share}",
        )
    elif s.micro_steps > MAX_MICRO_STEPS:
        yield (
            "training.global_batch",
            f"{s.micro_steps:,} micro-steps per step are absurdly many: at most {MAX_MICRO_STEPS:,}",
            "",
        )


def _tokens(written: Scenario, s: Scenario) -> Iterator[Finding]:
    t, kind = s.training, s.model.kind
    if kind != "encoder-decoder" and t.decoder_sequence != t.sequence:
        yield (
            "training.decoder_sequence",
            f"decoder_sequence is for kind encoder-decoder, and the model is a {kind}",
            "remove it",
        )
    limit = t.decoder_sequence if kind == "encoder-decoder" else t.sequence
    if t.predicted_tokens > limit:
        yield (
            "training.predicted_tokens",
            f"predicted_tokens {t.predicted_tokens} is more than the {limit} tokens of a sequence",
            f"at most {limit}",
        )


def _sharding(written: Scenario, s: Scenario) -> Iterator[Finding]:
    p = s.parallel
    asked = written.parallel.sharding_factor if written.parallel is not None else None
    ranks = s.replica_ranks
    if asked is not None and p.strategy not in SHARDED and asked not in (1, FULL):
        yield (
            "parallel.sharding_factor",
            f"sharding_factor {asked} needs a strategy that shards; {p.strategy} keeps whole copies",
            "write strategy zero1, zero2, zero3 or fsdp",
        )
    elif not _divides(p.sharding_factor, ranks):
        yield (
            "parallel.sharding_factor",
            f"sharding_factor {p.sharding_factor} does not divide the {ranks} data-parallel "
            "ranks" + (f" (data {s.data_parallel} · context {p.context})" if p.context > 1 else ""),
            divisors_near(ranks, p.sharding_factor),
        )
    reshard = p.reshard_after_forward
    if not isinstance(reshard, bool) and not _divides(reshard, p.sharding_factor):
        yield (
            "parallel.reshard_after_forward",
            f"reshard_after_forward {reshard} does not divide the sharding factor {p.sharding_factor}",
            divisors_near(p.sharding_factor, reshard),
        )


def _tensor(written: Scenario, s: Scenario) -> Iterator[Finding]:
    p, m = s.parallel, s.model
    if p.tensor == 1 or m.kind == "layers":
        if p.tensor > 1:
            yield "parallel.tensor", f"tensor {p.tensor} cannot split a table of layers", "use data parallelism"
        return
    path = "parallel.tensor"
    if m.heads % p.tensor:
        yield path, f"tensor {p.tensor} does not divide heads {m.heads}", divisors_near(m.heads, p.tensor)
    if m.kv_heads % p.tensor and p.tensor % m.kv_heads:
        yield (
            path,
            f"tensor {p.tensor} and kv_heads {m.kv_heads}: neither divides the other",
            divisors_near(m.kv_heads, p.tensor),
        )
    if m.ffn % p.tensor:
        yield path, f"tensor {p.tensor} does not divide ffn {m.ffn}", divisors_near(m.ffn, p.tensor)
    if p.sequence_parallel and m.kind != "decoder":
        message = f"sequence parallelism is for decoders, not for an {m.kind}"
        yield "parallel.sequence_parallel", message, "set it to false"
    if p.sequence_parallel and s.training.sequence % (p.tensor * p.context):
        yield (
            "parallel.sequence_parallel",
            f"a sequence of {s.training.sequence} tokens does not divide over tensor "
            f"{p.tensor}" + (f" · context {p.context}" if p.context > 1 else ""),
            "pad the sequence",
        )


def _context(written: Scenario, s: Scenario) -> Iterator[Finding]:
    context = s.parallel.context
    if context == 1:
        return
    if s.model.kind == "layers":
        yield "parallel.context", f"context {context} cannot split a table of layers", "use data parallelism"
    elif s.training.sequence % context:
        yield (
            "parallel.context",
            f"context {context} does not divide the sequence of {s.training.sequence} tokens",
            divisors_near(s.training.sequence, context),
        )
    inner = s.parallel.context_all_to_all
    if inner is None:
        return
    if s.parallel.context_exchange != "all-to-all":
        yield ("parallel.context_all_to_all", f"context_all_to_all is for context_exchange all-to-all, not "
               f"{s.parallel.context_exchange}", "remove it")
    elif not _divides(inner, context):
        yield ("parallel.context_all_to_all", f"context_all_to_all {inner} does not divide context {context}",
               divisors_near(context, inner))


def _pipeline(written: Scenario, s: Scenario) -> Iterator[Finding]:
    p, m = s.parallel, s.model
    blocks = m.layers + m.decoder_layers
    if p.virtual_stages > 1 and p.pipeline == 1 and not (written.parallel and written.parallel.virtual_stages is None):
        yield (
            "parallel.virtual_stages",
            f"virtual_stages {p.virtual_stages} needs a pipeline of 2 or more stages, not 1",
            "give parallel.pipeline",
        )
    elif p.virtual_stages > 1 and p.schedule not in _CHUNKED:
        yield (
            "parallel.schedule",
            f"schedule {p.schedule} has one chunk per rank, and virtual_stages is {p.virtual_stages}",
            "write interleaved, or remove virtual_stages",
        )
    if p.pipeline > 1 and p.schedule in ("zb-v", "dualpipe") and p.virtual_stages != 2:
        yield (
            "parallel.virtual_stages",
            f"schedule {p.schedule} has 2 chunks per rank, not {p.virtual_stages}",
            "write 2",
        )
    if m.kind != "layers" and p.pipeline > 1 and p.pipeline * p.virtual_stages > blocks + 2:
        yield (
            "parallel.pipeline",
            f"pipeline {p.pipeline} · virtual_stages {p.virtual_stages} = "
            f"{p.pipeline * p.virtual_stages} chunks, but the model has only {blocks} blocks, an embedding and a head",
            f"at most {(blocks + 2) // p.virtual_stages} stages",
        )
    if p.split is None:
        return
    if len(p.split) != p.pipeline:
        yield (
            "parallel.split",
            f"split has {len(p.split)} entries for {p.pipeline} pipeline ranks",
            f"give {p.pipeline} numbers" if p.pipeline > 1 else f"give parallel.pipeline: {len(p.split)}",
        )
    elif sum(p.split) != blocks:
        yield ("parallel.split", f"split adds up to {sum(p.split)} blocks but the model has {blocks}", "")


def _generated(model: Model, run: InferenceRun) -> Iterator[Finding]:
    """Tokens that a kind of model does not generate, or has no positions for."""
    if run.batching == "continuous" and run.token_budget < run.batch:
        yield "training.mode.inference.token_budget", (
            f"an iteration of {run.token_budget:,} tokens has no room for a token of each of {run.batch:,} answers"), (
            "as large as the batch at least; engines have 2,048 to 16,384")
    path, kind = "training.mode.inference.generate", model.kind
    if kind == "encoder" and run.generate:
        yield path, f"an encoder makes one pass over its prompt and generates nothing, not {run.generate} tokens", (
            "write generate: 0, or leave it out")
    if kind != "encoder" and not run.generate:
        yield path, "generate 0 is for kind encoder", "1 is the prompt and the token that comes of it"
    both = max(run.prompt, run.generate) if kind == "encoder-decoder" else run.prompt + run.generate
    if model.positions == "learned" and both > model.max_positions:
        yield path, f"{both} tokens but the model has {model.max_positions} learned positions", ""


def _nccl(written: Scenario, s: Scenario) -> Iterator[Finding]:
    """A release that cannot be read would silently be another."""
    del written
    version = s.software.nccl.version
    if version is not None and re.match(r"\s*v?\d+\.\d+", version) is None:
        yield "software.nccl.version", f"'{version[:40]}' is no release of NCCL", "write it as 2.21, or remove it"


def _allocator(written: Scenario, s: Scenario) -> Iterator[Finding]:
    """Expandable segments came with PyTorch 2.1, in October 2023."""
    del written
    version = re.match(r"v?(\d+)\.(\d+)", s.software.versions.get("torch", ""))
    known = tuple(map(int, version.groups())) >= (2, 1) if version else s.software.year >= 2023
    if s.software.allocator.expandable_segments and not known:
        yield ("software.allocator.expandable_segments", "PyTorch has expandable segments from 2.1 on (2023)",
               "use a later software.year or software.versions, or remove it")


def _modes(written: Scenario, s: Scenario) -> Iterator[Finding]:
    tuned = s.training.finetune
    if written.training.finetune is not None and tuned.method == "full":
        plain = {"base": plain_base(s.training.precision)}
        for name in ("rank", "targets", "base"):
            asked = getattr(written.training.finetune, name)
            if asked and asked != plain.get(name):
                yield (
                    f"training.finetune.{name}",
                    f"{name} is for lora, qlora and adapter; method is full",
                    "set finetune.method, or remove it",
                )
    if tuned.method != "full" and (tuned.rank < 1 or not tuned.targets):
        yield ("training.finetune", f"{tuned.method} needs a rank of 1 or more and at least one target", "")
    if tuned.method == "qlora" and tuned.base not in ("int8", "int4", "nf4", "nf4-dq"):
        yield (
            "training.finetune.base",
            f"qlora keeps a quantised base, not {tuned.base}",
            "write nf4, or use method lora",
        )
    if tuned.unquantised is not None and (tuned.method == "full" or tuned.base in ("fp32", "bf16", "fp16")):
        yield ("training.finetune.unquantised", f"is for a quantised base, not {tuned.base}",
               "remove it: base holds every frozen weight")
    if (run := getattr(s.training.mode, "inference", None)) is not None:
        yield from _generated(s.model, run)
    layers = getattr(s.training.recompute, "layers", None)
    if layers is not None and layers > s.model.layers + s.model.decoder_layers:
        yield (
            "training.recompute.layers",
            f"{layers} recomputed blocks but the model has {s.model.layers + s.model.decoder_layers}",
            "",
        )
    if s.training.optimizer == "none" and s.training.optimizer_in_backward:
        yield ("training.optimizer_in_backward", "there is no optimizer to run in backward", "remove it")
    if s.training.optimizer != "muon" and s.training.muon is not None:
        yield "training.muon", f"settings of Muon, and the optimizer is {s.training.optimizer}", "use optimizer: muon"
    software = s.software
    if s.training.optimizer == "adafactor" and software.optimizer_kernel == "fused" and software.framework != "ideal":
        yield "software.optimizer_kernel", "no library has a fused Adafactor", "use loop, or foreach (torch.optim's)"
