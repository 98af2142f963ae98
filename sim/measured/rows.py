"""Which kernel a row of a published table timed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sim.hardware.kernels.operators import RowWise, product_kernel, row_wise_kernel
from sim.work import DTYPE_BYTES, Kernel

_LAYOUT = re.compile(r"\b(TN|NN|NT)\b")  # forward, data gradient, weight gradient, in a table's `source`

#: What a table's `source` column says of the model changes the kernels behind a name: (operator, word) to what runs, or
#: to the operator it is.
VARIANTS: dict[tuple[str, str], RowWise | str] = {
    ("add", "phi-2"): RowWise("elementwise", 6, 2),  # a parallel block adds attention and MLP: two sums of two tensors
    ("mlp_act", "phi-2"): "gelu",  # not gated
    ("input_layernorm", "phi-2"): "ln",  # PyTorch's, in place of vLLM's RMSNorm
    # Keys are an eighth to a quarter of the queries; a quarter in what the tables hold.
    ("attn_rope", "Llama-3"): RowWise("rows", 2.5, 1, "rotary_grouped_scalar", 1.25),
}


def quantising_kernel(row: Mapping[str, Any]) -> Kernel | None:
    """The kernel that a row of a product table timed beside the product, where its `source` says `with quantisation`:
    it reads the input in 16 bits and writes it in the row's `dtype`."""
    if "with quantisation" not in str(row["source"]):
        return None
    elements = int(row["m"]) * int(row["k"])
    size_bytes = elements * (DTYPE_BYTES["bf16"] + DTYPE_BYTES[row["dtype"]])
    return Kernel("elementwise", "bf16", (elements,), "quantise", 0.0, size_bytes, "memory_bound")


def table_kernel(row: Mapping[str, Any]) -> Kernel:
    """The kernel behind one row of a product table (m, n, k, batch) or a row-wise table (op, rows, cols).

    Both have `dtype` and `source`, whose words tell layout, accumulation and, by the model's name, variants.
    """
    if row.get("op", "gemm") != "gemm":
        op, source = str(row["op"]), str(row["source"])
        counted = next((variant for (name, word), variant in VARIANTS.items() if name == op and word in source), None)
        if isinstance(counted, str):
            return row_wise_kernel(counted, int(row["rows"]), int(row["cols"]), row["dtype"])
        return row_wise_kernel(op, int(row["rows"]), int(row["cols"]), row["dtype"], counted)
    m, n, k, batch = (int(row[name]) for name in ("m", "n", "k", "batch"))
    layout = _LAYOUT.search(str(row["source"]))
    width = 4.0 if row["dtype"] in ("fp32", "tf32") or "out=fp32" in str(row["source"]) else 2.0
    passes = (width, width) if "acc=True" in str(row["source"]) else (width,)
    return product_kernel(m, n, k, batch, row["dtype"], layout.group().lower() if layout else "tn", passes)
