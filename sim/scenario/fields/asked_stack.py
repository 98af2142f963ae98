"""What a user says of the software: which training stack, collective library and allocator."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sim.scenario.fields.tables import Table, Text, Year, count, has, late

Framework = Literal["pytorch", "megatron", "deepspeed", "composer", "torchtitan", "nanotron", "ideal"]


class Nccl(Table):
    """Settings of the collective library."""

    version: Text | None = has(None, "version")
    algorithm: Literal["ring", "tree", "collnet", "nvls", "nvls-tree"] | None = has(None, "forces an algorithm")
    protocol: Literal["simple", "ll", "ll128"] | None = has(None, "forces a protocol")
    channels: Annotated[int, count(64)] | None = has(None, "forces a number of channels")


class AllocatorConf(Table):
    """What PYTORCH_CUDA_ALLOC_CONF asks of PyTorch's caching allocator."""

    expandable_segments: bool = has(False, "segments that grow by pages and waste less (PyTorch 2.1 on)")
    max_split_size_mb: Annotated[int, Field(gt=20, le=2**20)] | None = has(
        None, "blocks of so many MiB are not split; none = all may be")


class Software(Table):
    """Which stack runs the job."""

    framework: Framework = has("pytorch", "whose code trains; ideal = nobody's: no host time, kernels fused, gradients "
                                          "reduced as PyTorch's DDP does")
    year: Year = late("of the stack; none given = 2026")
    compile: bool = has(False, "torch.compile")
    fused: bool = has(True, "fused kernels of the framework")
    fused_accumulation: bool = has(
        True, "products add weight gradients up themselves, where the framework can (Megatron's "
        "gradient_accumulation_fusion)")
    cuda_graphs: bool = has(False, "kernels launched as graphs")
    dispatcher: Literal["alltoall", "flex"] | None = has(
        None, "how tokens go to spread experts: alltoall = a row to each expert, by NCCL; flex = once to every node or "
        "GPU that holds some (DeepEP, HybridEP); none given = what the stack does")
    deterministic: bool = has(
        False, "kernels that give the same bits every time (torch.use_deterministic_algorithms, Megatron's "
        "--deterministic-mode)")
    fsdp: Literal[1, 2] = late(
        "FSDP 1 (flat parameters) or 2 (per parameter); none given = 2 from 2025 on")
    modules: Literal["plain", "transformers", "megatron"] = late(
        "whose layers run; none given = megatron under megatron and deepspeed, transformers of pytorch's encoders, "
        "else plain")
    optimizer_kernel: Literal["loop", "foreach", "fused"] = late(
        "how the optimizer's kernels are launched; none given = what the stack does")
    versions: dict[str, Text] = late("package -> version")
    nccl: Nccl = late("settings of the collective library")
    allocator: AllocatorConf = late("settings of PyTorch's caching allocator (PYTORCH_CUDA_ALLOC_CONF)")
    max_connections: Annotated[int, count(32)] = late(
        "CUDA_DEVICE_MAX_CONNECTIONS; changes no prediction, and a result says so where it is not the framework's own")
