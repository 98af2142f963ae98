"""Products that torch.compile pads: sizes that are no multiple of 16 bytes miss the libraries' fast kernels.

Source: torch 2.1.2 to 2.14.1 _inductor/fx_passes/pad_mm.py (can_pad, get_alignment_size, is_mm_compute_bound, pad_mm)
and config.py (shape_padding); what it makes of a head of 50,257 words was read off the code that 2.13.0 generates.
"""

from __future__ import annotations

import math
from dataclasses import replace

from sim.model.style import Style
from sim.work import DTYPE_BYTES, Kernel

#: What loads of the tensor cores take at once, bytes.
_LOAD_BYTES = 16
#: Products of fewer multiplications for every element they touch are bound by memory and left alone. Inductor asks half
#: of what the GPU at hand computes while it reads a byte, 76 on A100 and 147 on H100; one figure between stands for all
#: (judgement), since products near it are rarely uneven.
_BOUND = 100.0


def pads(style: Style, rows: int, features_in: int, features_out: int) -> bool:
    """Whether the products of a linear layer are padded. Those in 8 bits and fewer always are, by whoever makes them.

    Args:
        rows: tokens. Without them nothing is multiplied.
    """
    if not style.stack.pads_products or DTYPE_BYTES[style.gemm] <= 1 or not rows:
        return False
    if all(size == evened(size, style.gemm) for size in (features_in, features_out)):
        return False
    return 1.0 / (1.0 / rows + 1.0 / features_in + 1.0 / features_out) > _BOUND


def evened(size: int, dtype: str) -> int:
    """`size`, rounded up to a multiple of 16 bytes; a single row or column stays (it can be squeezed away)."""
    multiple = max(1, int(_LOAD_BYTES // DTYPE_BYTES[dtype]))
    return size if size == 1 else math.ceil(size / multiple) * multiple


def padded(kernel: Kernel) -> Kernel:
    """A product in padded shape; its FLOPs stay those that are asked for."""
    batch, *sizes = kernel.shape
    return replace(kernel, shape=(batch, *(evened(size, kernel.dtype) for size in sizes)))
