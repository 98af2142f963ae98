"""Vocabulary of work: what a GPU can be asked to compute and a link to carry.

Floor 0 of the house: every room may import this file, and it imports none of them. It knows sizes, not speeds: how long
a `Kernel` takes is `sim.hardware`'s business, how long a collective takes is `sim.network`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Bytes of one element. `nf4` counts the 4-bit weights alone, without their block constants.
DTYPE_BYTES: dict[str, float] = {
    "fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "mxfp8": 1, "nvfp4": 0.5, "int8": 1, "int4": 0.5,
    "nf4": 0.5,
}

#: PyTorch's names, used by the traffic list and by the oracle files.
TORCH_DTYPES: dict[str, str] = {
    "fp64": "float64", "fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16",
    "fp8": "float8_e4m3fn", "mxfp8": "float8_e4m3fn", "int8": "int8",
}

#: Collective kinds of result.md. For each, `size_bytes` is the full buffer: all-gather output, reduce-scatter input,
#: all-reduce tensor, all-to-all send buffer of one rank, send/recv message.
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "recv", "broadcast", "reduce")

#: Other people's names: nccl-tests' types and numpy's or PyTorch's, and collectives without underscores.
_DTYPE_SPELLINGS = {
    "double": "fp64", "float": "fp32", "half": "fp16", "f8e4m3": "fp8",
    "float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8",
}
_COLLECTIVE_SPELLINGS = {
    "alltoall": "all_to_all", "allreduce": "all_reduce", "allgather": "all_gather", "sendrecv": "send_recv",
    "reducescatter": "reduce_scatter",
}


def dtype_name(spelling: str) -> str:
    """The name of a dtype here, from any usual spelling; an unknown one comes back in lower case."""
    name = spelling.strip().lower().removeprefix("torch.")
    return _DTYPE_SPELLINGS.get(name, name)


def collective_name(spelling: str) -> str:
    """The name of a collective here (`AllReduce`, `all-reduce`, `all_reduce_perf`: all_reduce); an unknown one comes
    back in lower case. `send_recv` is nccl-tests' exchange of neighbours."""
    name = spelling.strip().lower().removesuffix("_perf").replace("-", "_")
    return _COLLECTIVE_SPELLINGS.get(name, name)


#: Behind the name of an attention kernel whose backward adds up the queries' gradient in a fixed order.
FIXED_ORDER = "-fixed"

#: Rows of `breakdown_s` that kernels can fall in.
CATEGORIES = ("gemm", "attention", "memory_bound", "optimizer")


@dataclass(frozen=True, slots=True)
class Kernel:
    """One device operation as the model asks for it: shape and traffic, no time.

    `op` decides what `shape` means:

    ================  =============================================  =====================================
    op                shape                                          variant
    ================  =============================================  =====================================
    gemm              (batch, m, n, k)                               tn forward, nn data grad, nt weight grad
    attention         (batch, heads, kv_heads, seq_q, seq_k, dim)    forward, backward; causal or full: see `causal`
    norm              (rows, cols)                                   forward, backward or its two: inputs, weights
    softmax           (rows, cols)                                   forward, backward
    cross_entropy     (rows, cols)                                   forward, backward
    embedding         (rows, cols)                                   forward, backward
    elementwise       (elements,), of all launches where `scalar`    the function; of a few its arithmetic counts
    rows              (rows, cols)                                   free text; a map of each row, see `kernel`
    reduction         (rows, cols)                                   free text; a sum over the rows
    optimizer         (parameters,)                                  loop, foreach, fused
    ================  =============================================  =====================================

    Attributes:
        dtype: compute dtype (a key of `DTYPE_BYTES`).
        flops: matrix-product FLOPs as published figures count them (2 per multiply-add, attention in full, without
            causal halving); 0 for memory-bound operations.
        bytes: bytes read plus written in device memory when nothing is cached.
        category: one of `CATEGORIES`.
        causal: for attention, whether a kernel may skip the upper triangle.
        launches: how many CUDA kernels (and host operator calls) this stands for. 0 = rides inside its neighbour.
        kernel: implementation where it matters to speed (`flash1`, `flash2`, `flash3`, `triton`, `eager`, of backward
            with `FIXED_ORDER` behind; of rows those of `row_blocks.py`; of norms `persistent`, `per_sm`; of softmax
            `fused` with what stands around it; of products `expanding` and `marlin`: by weights that the main loop
            expands from fewer bits; `uneven`: a batch whose members differ in m, their mean; `streamed`: of one row, a
            sum over weights; of element-wise ones `scalar`: one at a time, `one_warp`: by 32 threads in all, and
            `by_tensor`: a launch for each tensor of a list, which meets no tensor twice),
            else "".
    """

    op: str
    dtype: str
    shape: tuple[int, ...]
    variant: str
    flops: float
    bytes: float
    category: str
    causal: bool = False
    launches: int = 1
    kernel: str = ""
