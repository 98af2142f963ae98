"""The cluster of a scenario: what a node is, how nodes are joined, and figures measured on this very hardware."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from sim.scenario.fields.tables import NodeGpus, Nodes, Table, Text, count, has, late, needs
from sim.scenario.fields.units import Bytes, BytesPerSecond, Gbps, Watts

Dtype = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4", "int8", "int4"]


_Positive = Annotated[float, Field(gt=0, le=1e9)]


class Intra(Table):
    """How the GPUs of a node reach each other."""

    kind: Literal["nvswitch", "nvlink-mesh", "pcie", "none"] = needs("what joins the GPUs of a node")
    link: Literal[
        "nvlink1", "nvlink2", "nvlink3", "nvlink4", "nvlink5", "xgmi", "xgmi2", "gen3x16", "gen4x16", "gen5x16",
        "nvlink-c2c", "none",
    ] = late("kind of link")
    links_per_gpu: Annotated[int, Field(ge=0, le=1000)] = late("links of one GPU")
    links_per_pair: Annotated[int, Field(ge=0, le=1000)] | None = has(None, "links between every pair of a mesh")
    matrix: list[list[Annotated[int, Field(ge=0, le=1000)]]] | None = has(None, "links between each pair of a mesh")
    gpus_per_switch: NodeGpus | None = late("GPUs below one PCIe switch; none given = up to four have slots of their "
                                            "own, of more half are on each of two CPUs; of a node joined by NVLink, "
                                            "a quarter up to PCIe gen 4")
    peer_copies: bool | None = has(None, "GPUs reach one another over PCIe, else through the host; none given = as the "
                                         "GPU's driver has it")
    gen: Annotated[int, Field(ge=3, le=5)] | None = has(None, "PCIe generation")


class Inter(Table):
    """How the nodes reach each other."""

    kind: Literal["fat-tree", "dragonfly", "torus", "ring", "none"] = needs("shape of the network")
    fabric: Literal["infiniband", "roce", "efa", "omni-path", "slingshot", "tcpx", "ethernet"] = has(
        "infiniband", "kind of network"
    )
    nics_per_node: Annotated[int, count(1024)] = has(1, "network cards of a node")
    gbps_per_nic: Gbps = has(100.0, "Gb/s of one card, one direction")
    rail_optimized: bool = has(False, "card i of every node on the same leaf switch")
    oversubscription: Annotated[float, Field(ge=1, le=1000)] = has(1.0, "leaf down-links over up-links")
    nodes_per_leaf: Annotated[int, count(100_000)] = has(16, "nodes below one leaf switch")
    gpu_direct_rdma: bool | None = late("cards read and write GPU memory; none given = as the fabric has it: not over "
                                        "Ethernet's sockets, on Omni-Path, nor with V100 on EFA")
    routing: Literal["adaptive", "ecmp"] = late("how flows choose their path; none given = as the fabric has it: ecmp "
                                                "on RoCE, Ethernet, TCPX and Omni-Path, else adaptive")


class Host(Table):
    """The host side of a node."""

    memory: Bytes = has(1e12, "host memory of a node")
    pcie: Literal["gen3x16", "gen4x16", "gen5x16", "nvlink-c2c"] = late(
        "link of a GPU to its host; none given = as intra says of PCIe, else the GPU's own")
    nvme_read: BytesPerSecond = has(12e9, "sequential read of a node's disks")
    nvme_write: BytesPerSecond = has(6e9, "sequential write of a node's disks")
    storage: BytesPerSecond = late("reading of training data by a node, default nvme_read")
    memory_bandwidth: BytesPerSecond | None = has(None, "host memory of a node, default by its PCIe generation "
                                                          "or its superchips")


class GpuFigures(Table):
    """Single figures of a GPU that replace the catalogue's."""

    memory: Bytes | None = has(None, "device memory")
    memory_bandwidth: BytesPerSecond | None = has(None, "device memory bandwidth")
    tflops: dict[Dtype, Annotated[float, Field(gt=0, le=1e6)]] | None = has(None, "dense TFLOP/s by dtype")
    power_limit_w: Watts | None = has(None, "power limit")


class GpuProfile(Table):
    """A GPU that resembles one of the catalogue, as `drystep calibrate --gemm` writes it (fields of gpus.yaml)."""

    like: Text = needs("the GPU of the catalogue it resembles")
    name: Text = has("inline", "shown in reports")
    memory_gib: _Positive | None = has(None, "device memory, GiB")
    usable_memory_gib: _Positive | None = has(None, "what CUDA reports as total, GiB")
    memory_bandwidth_gb_s: _Positive | None = has(None, "device memory bandwidth, GB/s")
    sms: Annotated[int, count(10_000)] | None = has(None, "streaming multiprocessors")
    l2_mib: _Positive | None = has(None, "second-level cache, MiB")
    clock_mhz: _Positive | None = has(None, "boost clock")
    tensor_clock_mhz: _Positive | None = has(None, "clock the tensor peak is stated at")
    reached_mhz: _Positive | None = has(None, "clock under load where it boosts beyond the stated one")
    exponentials: _Positive | None = has(None, "exponentials per clock and SM over those of its family's first chip")
    tdp_w: _Positive | None = has(None, "power limit by the datasheet")
    kernel_figures: dict[str, Any] | None = has(None, "figures of kernels measured on it, nested as in kernels.yaml")
    confidence: Literal["high", "medium", "low"] | None = has(None, "how sure its figures are")
    sources: list[Text] | None = has(None, "where they come from")
    calibration: Any = has(None, "how good the fit was")


class Degraded(Table):
    """A link that is slower than its like, in both directions, or failed."""

    link: Literal["gpu", "nic", "leaf", "pcie"] = needs("kind of link")
    share: Annotated[float, Field(ge=0, le=1)] = needs("share of its capacity left; 0 = failed")
    index: Annotated[int, Field(ge=0, le=1_000_000)] = has(0, "which of its kind")


_Share = Annotated[float, Field(gt=0, le=1)]


class SlowGpu(Table):
    """A GPU that is slower than its like: throttled, or with memory that retires rows."""

    gpu: Annotated[int, Field(ge=0, le=1_000_000)] = needs("which of the job's GPUs, counted from 0, node by node")
    clock: _Share = has(1.0, "share of the clock its like run at")
    memory_bandwidth: _Share = has(1.0, "share of its device memory's bandwidth")


class OtherGpus(Table):
    """Nodes whose GPUs are of another kind; links and hosts are as everywhere."""

    gpu: Text = needs("a GPU of the catalogue")
    first_node: Annotated[int, Field(ge=0, le=200_000)] = needs("first node that has them, counted from 0")
    nodes: Nodes = has(1, "how many nodes from there on")


class ClockSpread(Table):
    """GPUs of one kind do not run at one clock: each draws its own, normally distributed around its kind's."""

    sigma: Annotated[float, Field(ge=0, le=0.1)] = needs("standard deviation, share of the clock; 0 = all are alike")
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = has(0, "of the draws: the same seed, the same GPUs")


def _name_or_profile(value: Any) -> Any:
    if isinstance(value, dict) or (isinstance(value, str) and 0 < len(value) <= 4096):
        return value
    raise PydanticCustomError("plain", "expected a GPU of the catalogue, the path of a profile, or a mapping")


class TopologySpec(Table):
    """A cluster: one node and how many of them, joined how."""

    name: Text = has("inline", "shown in reports")
    gpu: Annotated[str | dict[str, Any], PlainValidator(_name_or_profile), WithJsonSchema({})] = needs(
        "a GPU of the catalogue, the path of a profile, or a mapping with 'like'"
    )
    gpus_per_node: NodeGpus = needs("GPUs of a node")
    nodes: Nodes = has(1, "nodes")
    intra: Intra = late("links inside a node")
    inter: Inter = late("network between nodes")
    host: Host = late("host side of a node")
    links: dict[str, Annotated[float, Field(gt=0, lt=1e9)]] | None = has(
        None, "figures of links measured on this cluster, by their names in sim/network/figures.yaml"
    )
    degraded: Annotated[list[Degraded], Field(max_length=10_000)] | None = has(None, "links slower than their like")
    source: Any = has(None, "where the figures come from")
    notes: Any = has(None, "free text")
    price_per_gpu_hour: Annotated[float, Field(ge=0, le=1e6)] | None = has(None, "USD")


class Cluster(Table):
    """The hardware."""

    topology: TopologySpec = needs("a name, a path, or the mapping such a file holds")
    nodes: Nodes = late("overrides the topology's own count")
    gpus_per_node: NodeGpus = late("use only the first k GPUs of each node")
    intra_gbps_per_gpu: Gbps | None = has(None, "overrides the link speed inside a node (Gb/s, one direction)")
    inter_gbps_per_node: Gbps | None = has(None, "overrides the link speed between nodes (Gb/s, one direction)")
    gpu: GpuFigures | None = has(None, "overrides single GPU figures")
    slow_gpus: Annotated[list[SlowGpu], Field(max_length=10_000)] | None = has(None, "GPUs slower than their like")
    other_gpus: Annotated[list[OtherGpus], Field(max_length=1000)] | None = has(None, "nodes with other GPUs")
    clock_spread: ClockSpread | None = has(None, "how far apart the clocks of GPUs of one kind are")
    degraded: Annotated[list[Degraded], Field(max_length=10_000)] | None = has(
        None, "links of this cluster slower than their like, beside the topology's own"
    )

    def template(self) -> dict[str, Any]:
        """The topology as plain data, this cluster's own degraded links beside the template's."""
        plain = self.topology.model_dump()
        plain["degraded"] = [*(plain["degraded"] or ()), *(one.model_dump() for one in self.degraded or ())]
        return plain
