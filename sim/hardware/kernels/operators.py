"""Operators by the names that kernel tables and users give them, as the kernels PyTorch or vLLM runs for them.

Each row-wise operator states the full-size accesses of its kernels (reads plus writes of a rows x cols tensor) and how
many kernels it launches, counted in the source named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sim.errors import Fault, UserError, nearest
from sim.work import DTYPE_BYTES, Kernel


@dataclass(frozen=True, slots=True)
class RowWise:
    """A row-wise operator.

    Attributes:
        op: what `sim.work.Kernel` calls it.
        accesses: reads plus writes of a rows x cols tensor.
        launches: kernels.
        kernel: code other than PyTorch's that works off the rows (`row_blocks.py`).
        width: elements of a row that its block works off, over the columns.
    """

    op: str
    accesses: float
    launches: int = 1
    kernel: str = ""
    width: float = 1.0


#: `add` and `mul` take two tensors, the `u` forms a tensor and a scalar (NeuSight). Counted per kernel: reads + writes.
ROW_WISE = {
    "add": RowWise("elementwise", 3), "mul": RowWise("elementwise", 3), "div": RowWise("elementwise", 3),
    "pow": RowWise("elementwise", 3), "addu": RowWise("elementwise", 2), "mulu": RowWise("elementwise", 2),
    "divu": RowWise("elementwise", 2), "powu": RowWise("elementwise", 2), "gelu": RowWise("elementwise", 2),
    "relu": RowWise("elementwise", 2), "tanh": RowWise("elementwise", 2), "dropout": RowWise("elementwise", 2.25),
    "ln": RowWise("norm", 2), "layernorm": RowWise("norm", 2), "softmax": RowWise("softmax", 2),
    "emb": RowWise("embedding", 2), "embedding": RowWise("embedding", 2),
    # vLLM's, of single 2-byte loads: the norm, silu of one half times the other (columns are those of the output),
    # queries and keys rotated in place (columns are the queries').
    "input_layernorm": RowWise("rows", 2, 1, "norm_scalar"), "rmsnorm": RowWise("norm", 2),
    "mlp_act": RowWise("rows", 3, 1, "gated_scalar"), "silu_mul": RowWise("elementwise", 3),
    "attn_rope": RowWise("rows", 4, 1, "rotary_scalar", 2), "rope": RowWise("elementwise", 4),
}

def row_wise_kernel(op: str, rows: int, cols: int, dtype: str, counted: RowWise | None = None) -> Kernel:
    """The forward kernel of a row-wise operator on a rows x cols tensor; `counted` stands for other code of that name.

    Raises:
        UserError: no such operator.
    """
    found = counted or ROW_WISE.get(op) or ROW_WISE.get(op.lower().replace("_", ""))
    if found is None:
        raise UserError(Fault(f"no operator {op!r}; known are {', '.join(ROW_WISE)}", "op", hint=nearest(op, ROW_WISE)))
    shape = (rows * cols,) if found.op == "elementwise" else (rows, int(cols * found.width))
    size_bytes = rows * cols * found.accesses * DTYPE_BYTES[dtype]
    variant = op if found.op == "elementwise" else "forward"
    return Kernel(found.op, dtype, shape, variant, 0.0, size_bytes, "memory_bound", launches=found.launches,
                  kernel=found.kernel)


def product_kernel(m: int, n: int, k: int, batch: int, dtype: str, layout: str = "tn",
                   output_accesses: Sequence[float] = (2.0,)) -> Kernel:
    """A matrix product of (m, k) by (k, n); `output_accesses` = bytes of each pass over an element of the output."""
    size_bytes = batch * ((m * k + k * n) * DTYPE_BYTES[dtype] + m * n * sum(output_accesses))
    return Kernel("gemm", dtype, (batch, m, n, k), layout, 2.0 * batch * m * n * k, size_bytes, "gemm")


def attention_kernel(batch: int, heads: int, kv_heads: int, queries: int, keys: int, dim: int, dtype: str,
                     backward: bool = False, causal: bool = True, kernel: str = "flash2",
                     value_dim: int | None = None) -> Kernel:
    """A fused attention kernel; FLOPs as published figures count them, causal not halved; each tensor moved once.

    `value_dim`, where it differs, enters as the mean of both head dimensions in the work.
    """
    mean = (dim + (value_dim or dim)) / 2
    width = DTYPE_BYTES[dtype]
    tensors = batch * (2 * heads * queries + 2 * kv_heads * keys) * mean * width
    flops = 4.0 * batch * heads * queries * keys * mean * (2.5 if backward else 1.0)
    return Kernel("attention", dtype, (batch, heads, kv_heads, queries, keys, round(mean)),
                  "backward" if backward else "forward", flops, tensors * (2.0 if backward else 1.0), "attention",
                  causal=causal, kernel=kernel)
