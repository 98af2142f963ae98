"""A warning of widths that are no multiple of 16 bytes, whose products miss the fast kernels."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from sim.hardware import Device
from sim.scenario.fields.schema import Scenario
from sim.work import DTYPE_BYTES, Kernel

#: What loads of the tensor cores take at once, bytes.
_LOAD_BYTES = 16
#: Share of the step from which on it is worth a word.
_MUCH = 0.05
#: Widths are padded to a multiple of so many elements by those who pad them (Megatron's
#: --make-vocab-size-divisible-by, torch.compile's padding of products): a whole tile's edge.
_PADDED_TO = 64
#: Widths that are named; more are counted.
_NAMED = 3


def uneven(scenario: Scenario, device: Device, kernels: Sequence[Kernel], counts: Sequence[float],
           step_s: float) -> list[str]:
    """What a training step would gain if the inner dimensions of its products were multiples of 16 bytes, where that is
    much: the same products in padded shapes, by the same device.

    Args:
        kernels, counts: of the critical rank's step, and how often each runs.
    """
    if scenario.training.mode != "train":
        return []
    gained: defaultdict[int, float] = defaultdict(float)
    multiples: dict[int, int] = {}
    for kernel, count in zip(kernels, counts, strict=True):
        if kernel.op != "gemm" or not count:
            continue
        multiple = max(1, int(_LOAD_BYTES // DTYPE_BYTES[kernel.dtype]))
        batch, m, n, k = kernel.shape
        odd = [size for size in ((m, n) if kernel.variant == "nt" else (k, n)) if size % multiple]
        if not odd:
            continue
        m, n, k = ((_up(m, multiple), _up(n, multiple), k) if kernel.variant == "nt"
                   else (m, _up(n, multiple), _up(k, multiple)))
        now_s, even_s = device.times((kernel, replace(kernel, shape=(batch, m, n, k))))
        multiples[odd[0]] = multiple
        gained[odd[0]] += count * (now_s - even_s)
    gain_s = sum(gained.values())
    if gain_s < _MUCH * step_s:
        return []
    widths = sorted(gained, key=lambda size: -gained[size])
    named = ", ".join(_said(scenario, size) for size in widths[:_NAMED]) + (
        f" and {len(widths) - _NAMED} more" if len(widths) > _NAMED else "")
    padded = ", ".join(f"{_up(size, _PADDED_TO):,}" for size in widths[:_NAMED])
    return [f"kernels: products with {named}, no multiple of {multiples[widths[0]]} elements, miss the library's "
            f"fast kernels: padded (to {padded}) the step would be about {100 * gain_s / step_s:.0f}% shorter"]


def _up(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple


def _said(scenario: Scenario, size: int) -> str:
    """A width by the field that has it, of a cut model its share."""
    model = scenario.model
    fields = {"model.vocab": model.vocab, "model.ffn": model.ffn, "model.hidden": model.hidden,
              "model.head_dim": model.head_dim, "training.sequence": scenario.training.sequence,
              "model.moe.expert_ffn": 0 if model.moe is None else model.moe.expert_ffn}
    for field, value in fields.items():
        if value == size:
            return f"{field} {size:,}"
    return f"a width of {size:,}"
