"""Fills in every default that depends on other fields (spec: the paragraph below the top-level table).

Each function takes what the user wrote, with None where nothing was written, and returns the same with concrete values.
Nothing is checked here: impossible combinations are `checks`' business, so divisions round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from sim.catalog import table
from sim.scenario.fields.asked_stack import AllocatorConf, Nccl, Software
from sim.scenario.fields.cluster import Cluster, Host, Inter, Intra, TopologySpec
from sim.scenario.fields.model import Model
from sim.scenario.fields.schema import (
    FULL,
    Finetune,
    Inference,
    Muon,
    Offload,
    Parallel,
    Precision,
    Prefetch,
    Scenario,
    SplitSlots,
    Training,
    matrix_dtype,
    named_precision,
)
from sim.scenario.named.gpus import gpu_facts

#: Strategies that split something over the data ranks; the others keep whole copies.
SHARDED = frozenset({"zero1", "zero2", "zero3", "fsdp"})
#: Strategies that reduce gradients in every micro-step unless told otherwise: accumulation happens in the shard.
_EAGER_REDUCTION = frozenset({"zero2", "zero3", "fsdp"})
#: Dtypes of matrix products that the fused attention kernels take.
_FLASH_DTYPES = frozenset({"fp16", "bf16", "fp8", "mxfp8", "nvfp4", "int8"})
#: Dtypes of matrix products that only TransformerEngine's layers offer.
_FLOAT_NARROW = frozenset({"fp8", "mxfp8", "nvfp4"})
_ORDER = ["tensor", "context", "expert", "data", "pipeline"]
#: Rank of LoRA's matrices where none is given (Hugging Face PEFT, LoraConfig.r), and the matrices that get them.
_LORA_RANK = 8
_LORA_TARGETS = ["query", "value"]


def fill(written: Scenario) -> Scenario:
    """The scenario with every default in place."""
    cluster = _cluster(written.cluster)
    parallel = written.parallel if written.parallel is not None else Parallel.model_construct()
    training = _training(written.training, written.model, cluster)
    gpus = cluster.nodes * cluster.gpus_per_node
    software = _software(written.software if written.software is not None else Software.model_construct(),
                         written.model, training.optimizer, parallel.overlap_experts == "shared")
    if training.global_batch is None:
        replicas = max(1, gpus // (parallel.tensor * parallel.context * parallel.pipeline))
        whole = training.micro_batch * replicas * (training.micro_steps or 1)
        training = training.model_copy(update={"global_batch": whole, "micro_steps": None})
    return written.model_copy(
        update={
            "cluster": cluster,
            "model": _model(written.model, training),
            "training": training,
            "parallel": _parallel(parallel, gpus, software, training.precision.compute in _FLOAT_NARROW),
            "software": software,
            "sweep": written.sweep if written.sweep is not None else {},
            "expect": written.expect if written.expect is not None else {},
        }
    )


def has_bf16(cluster: Cluster) -> bool:
    """Whether the GPU has bf16 units, by the catalogue or by the user's own figures."""
    own = cluster.gpu.tflops if cluster.gpu is not None else None
    return "bf16" in gpu_facts(cluster.topology.gpu)["tflops"] or (own is not None and "bf16" in own)


def _cluster(written: Cluster) -> Cluster:
    topology = written.topology
    topology = topology.model_copy(
        update={
            "intra": _intra(topology),
            "inter": _inter(topology.inter),
            "host": _host(topology),
        }
    )
    return written.model_copy(
        update={
            "topology": topology,
            "nodes": _or(written.nodes, topology.nodes),
            "gpus_per_node": _or(written.gpus_per_node, topology.gpus_per_node),
        }
    )


#: Cards of sixteen lanes that one PCIe switch has room for, beside its uplink.
_ONE_SWITCH = 4


def _intra(topology: TopologySpec) -> Intra:
    written = topology.intra
    if written is None:
        written = Intra.model_construct(kind="pcie" if topology.gpus_per_node > 1 else "none")
    pcie = _pcie(topology)
    nvlink = gpu_facts(topology.gpu).get("nvlink") or {}
    update: dict[str, Any] = {}
    if written.kind == "pcie":
        link = written.link or (f"gen{written.gen}x16" if written.gen else pcie)
        update = {
            "link": link,
            "gen": _or(written.gen, int(link[3]) if link.startswith("gen") else None),
            "links_per_gpu": _or(written.links_per_gpu, 1),
            "gpus_per_switch": _or(written.gpus_per_switch, _below_one_cpu(topology.gpus_per_node)),
        }
    elif written.kind == "none":
        update = {"link": _or(written.link, "none"), "links_per_gpu": _or(written.links_per_gpu, 0)}
    else:
        peers = max(1, topology.gpus_per_node - 1)
        mesh = written.kind == "nvlink-mesh" and written.matrix is None
        links = written.links_per_pair * peers if mesh and written.links_per_pair else _links(written, nvlink)
        update = {"link": _or(written.link, _nvlink_name(nvlink)), "links_per_gpu": _or(written.links_per_gpu, links)}
        if written.matrix and _islands(written.matrix):
            update["gpus_per_switch"] = _or(written.gpus_per_switch, _below_one_cpu(topology.gpus_per_node))
        elif str(update["link"]).startswith("nvlink"):
            update["gpus_per_switch"] = _or(written.gpus_per_switch, _on_one_uplink(topology.gpus_per_node, pcie))
        if mesh:
            update["links_per_pair"] = _or(written.links_per_pair, update["links_per_gpu"] // peers)
    return written.model_copy(update=update)


def _pcie(topology: TopologySpec) -> str:
    """Link of a GPU to its host: what the topology says of it, of its PCIe generation, or of the PCIe that joins its
    GPUs, which is the same slots; else the GPU's own. A superchip's stays NVLink-C2C, whatever PCIe it has beside."""
    own, intra, host = str(gpu_facts(topology.gpu)["pcie"]), topology.intra, topology.host
    if host is not None and host.pcie is not None:
        return host.pcie
    if intra is None or not own.startswith("gen"):
        return own
    return f"gen{intra.gen}x16" if intra.gen else intra.link if str(intra.link).startswith("gen") else own


def _below_one_cpu(gpus: int) -> int | None:
    """GPUs below one PCIe switch of a node that says nothing of them: of more than four half, for two CPUs.

    A switch has about a hundred lanes, sixteen of which a card takes (Broadcom PEX88096: 98, from memory), and all
    nodes of the catalogue with eight such cards have four on each. Fewer stand in slots of their own.
    """
    return gpus // 2 if gpus > _ONE_SWITCH and gpus % 2 == 0 else None


#: PCIe uplinks of a node of more GPUs, joined by NVLink, where not every GPU has one of its own.
_UPLINKS = 4


def _on_one_uplink(gpus: int, pcie: str) -> int | None:
    """GPUs behind one PCIe uplink of an NVLink node that says nothing of it: what they copy to and from the host shares
    it. Up to gen 4 eight GPUs have four (DGX-1, HGX A100), and so have the sixteen of a DGX-2, where each copies 3 GB/s
    when all do and 12 alone (Rajbhandari et al. 2021, figure 2b; recalled); from gen 5 on each has its own.
    """
    shared = pcie in ("gen3x16", "gen4x16") and gpus > _UPLINKS and gpus % _UPLINKS == 0
    return gpus // _UPLINKS if shared else None


def _islands(matrix: Sequence[Sequence[int]]) -> bool:
    """Whether links join some GPUs of a node but not all: what goes between the others crosses PCIe."""
    reached, found = {0}, [0]
    while found:
        row = matrix[found.pop()][:len(matrix)]  # one that is no square is refused later
        near = [i for i, count in enumerate(row) if count and i not in reached]
        reached.update(near)
        found += near
    return len(reached) < len(matrix)


def _inter(written: Inter | None) -> Inter:
    """The network between nodes; how flows choose their path is the fabric's, unless the topology says."""
    inter = written if written is not None else Inter.model_construct(kind="none")
    hashed = bool(table("network/links.yaml")["fabrics"][inter.fabric]["ecmp"])
    return inter.model_copy(update={"routing": _or(inter.routing, "ecmp" if hashed else "adaptive")})


def _nvlink_name(nvlink: dict[str, Any]) -> str:
    """Name of a GPU's own links; AMD's Infinity Fabric is generation 0 of the catalogue, told apart by its speed."""
    generation = nvlink.get("generation", 3)
    if generation == 0:
        return "xgmi" if nvlink["gb_s_per_link"] > 50 else "xgmi2"
    return f"nvlink{generation}"


def _links(written: Intra, nvlink: dict[str, Any]) -> int:
    if written.matrix:
        return max(sum(row) for row in written.matrix)
    return int(nvlink.get("links") or 1)


def _host(topology: TopologySpec) -> Host:
    written = topology.host if topology.host is not None else Host.model_construct()
    pcie = _pcie(topology)
    name = topology.gpu if isinstance(topology.gpu, str) else topology.gpu["like"]
    own = table("hardware/host.yaml")["memory_bandwidth_of_gpu"].get(name)
    memory = own["gb_s"] * 1e9 * topology.gpus_per_node if own and pcie == gpu_facts(name)["pcie"] else None
    return written.model_copy(update={"pcie": pcie, "storage": _or(written.storage, written.nvme_read),
                                      "memory_bandwidth": _or(written.memory_bandwidth, memory)})


def _model(written: Model, training: Training) -> Model:
    if written.kind == "layers":
        return _layer_table(written)
    heads, hidden = written.heads, written.hidden
    ffn = _or(written.ffn, 4 * hidden)
    update: dict[str, Any] = {
        "decoder_layers": _or(written.decoder_layers, written.layers if written.kind == "encoder-decoder" else 0),
        "kv_heads": _or(written.kv_heads, heads),
        "head_dim": _or(written.head_dim, hidden // heads),
        "ffn": ffn,
        # T5's feed-forward part is plain with relu (Raffel et al. 2020, section 2.1)
        "activation": _or(written.activation, "silu" if written.gated_mlp else
                          "relu" if written.kind == "encoder-decoder" else "gelu"),
        "max_positions": _or(written.max_positions, longest_sequence(training)),
        "positions": _or(written.positions, "relative" if written.kind == "encoder-decoder" else "learned"),
    }
    if written.moe is not None and written.moe.expert_ffn is None:
        update["moe"] = written.moe.model_copy(update={"expert_ffn": ffn})
    return written.model_copy(update=update)


def longest_sequence(training: Training) -> int:
    """Tokens of the longest sequence the model meets."""
    mode = training.mode
    generated = mode.inference.prompt + mode.inference.generate if isinstance(mode, Inference) else 0
    return max(training.sequence, training.decoder_sequence, generated)


def _layer_table(written: Model) -> Model:
    """A table of layers has no transformer sizes: zeros, and nothing that a transformer would have."""
    sizes = ("layers", "decoder_layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "max_positions")
    return written.model_copy(
        update={
            **{name: _or(getattr(written, name), 0) for name in sizes},
            "activation": _or(written.activation, "relu"),
            "positions": _or(written.positions, "none"),
            "tied_embeddings": False,
        }
    )


def _training(written: Training, model: Model, cluster: Cluster) -> Training:
    half = "bf16" if has_bf16(cluster) else "fp16"
    precision = _or(written.precision, Precision.model_construct(**named_precision(f"amp-{half}")))
    decoder_sequence = _or(written.decoder_sequence, written.sequence)
    flash = has_bf16(cluster) and matrix_dtype(written.finetune, precision) in _FLASH_DTYPES
    predicting = decoder_sequence if model.kind == "encoder-decoder" else written.sequence
    return written.model_copy(
        update={
            "decoder_sequence": decoder_sequence,
            "predicted_tokens": _or(written.predicted_tokens, predicting),
            "precision": precision,
            "attention": _or(written.attention, "flash" if flash else "eager"),
            "finetune": _finetune(written.finetune, precision),
            "muon": Muon() if written.optimizer == "muon" and written.muon is None else written.muon,
        }
    )


def plain_base(precision: Precision) -> str:
    """Dtype of frozen weights of which a scenario says nothing: the parameters', where fine-tuning knows that."""
    known = get_args(Finetune.model_fields["base"].annotation)
    return precision.parameters if precision.parameters in known else "fp32"


def _finetune(written: Finetune | None, precision: Precision) -> Finetune:
    finetune = written if written is not None else Finetune.model_construct()
    small = finetune.method != "full"
    return finetune.model_copy(
        update={
            "rank": _or(finetune.rank, _LORA_RANK if small else 0),
            "targets": _or(finetune.targets, list(_LORA_TARGETS) if small else []),
            "base": _or(finetune.base, "nf4" if finetune.method == "qlora" else plain_base(precision)),
        }
    )


def _parallel(written: Parallel, gpus: int, software: Software, narrow: bool) -> Parallel:
    scatters, buffers = (_of_stack(fact, software) for fact in ("pipeline_scatter", "tensor_user_buffers"))
    strategy = _or(written.strategy, "ddp" if gpus > 1 else "none")
    shards = max(1, gpus // (written.tensor * written.pipeline))
    factor = written.sharding_factor if strategy in SHARDED or written.sharding_factor else 1
    v_shaped = written.schedule in ("zb-v", "dualpipe") and written.pipeline > 1
    virtual = _or(written.virtual_stages, 2 if v_shaped else 1)
    return written.model_copy(
        update={
            "strategy": strategy,
            "sharding_factor": shards if factor is None or factor == FULL else factor,
            "prefetch": _or(written.prefetch, Prefetch.model_construct()),
            "reduce_every_micro_step": _or(written.reduce_every_micro_step, strategy in _EAGER_REDUCTION),
            "reshard_after_forward": _reshard(written, software),
            "virtual_stages": virtual,
            "schedule": _or(written.schedule, "interleaved" if virtual > 1 else "1f1b"),
            "split_slots": _or(written.split_slots, SplitSlots.model_construct()),
            "order": _or(written.order, list(_ORDER)),
            "offload": _or(written.offload, Offload.model_construct()),
            "pipeline_scatter": _or(written.pipeline_scatter, scatters),
            "async_tensor": _or(written.async_tensor, buffers and narrow and written.sequence_parallel),
        }
    )


def _reshard(written: Parallel, software: Software) -> bool | int:
    if written.pipeline == 1 or "reshard_after_forward" in written.model_fields_set:
        return written.reshard_after_forward
    in_pipeline: dict[int | None, bool] = table("scenario/defaults.yaml")["reshard_after_forward_in_pipeline"]
    return in_pipeline[software.fsdp]


def _of_stack(fact: str, software: Software) -> Any:
    by = table("scenario/defaults.yaml")[fact]
    return _since(by.get(software.framework, by["other"]), software.year)


def usual_connections(framework: str) -> int:
    """Hardware work queues (CUDA_DEVICE_MAX_CONNECTIONS) that a framework's jobs run with."""
    by: dict[str, int] = table("scenario/defaults.yaml")["max_connections"]
    return by.get(framework, by["other"])


def _modules(framework: str, model: Model) -> str:
    by = table("scenario/defaults.yaml")
    usual = by["modules"].get(framework, by["modules"]["other"])
    return str(by["encoder_modules"].get(framework, usual) if model.kind == "encoder" else usual)


def _software(written: Software, model: Model, optimizer: str, shared: bool) -> Software:
    by = table("scenario/defaults.yaml")
    year = _or(written.year, by["year"])
    name = written.framework
    launched = by["optimizer_kernel_of"].get(optimizer) if name != "ideal" else None
    return written.model_copy(
        update={
            "year": year,
            "fsdp": _or(written.fsdp, _since(by["fsdp"], year)),
            "modules": _or(written.modules, _modules(name, model)),
            "optimizer_kernel": _or(written.optimizer_kernel, launched or _since(by["optimizer_kernel"][name], year)),
            "versions": _or(written.versions, {}),
            "dispatcher": _or(written.dispatcher, "alltoall" if shared and name in by["shared_by_alltoall"] else None),
            "nccl": _or(written.nccl, Nccl.model_construct()),
            "allocator": _or(written.allocator, AllocatorConf.model_construct()),
            "max_connections": _or(written.max_connections, usual_connections(name)),
        }
    )


def _since(steps: dict[int, Any], year: int) -> Any:
    """The value of the latest year that is not after `year`; of a year before all of them the first."""
    return steps[max((y for y in steps if y <= year), default=min(steps))]


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
