"""Facts of DeepSpeed's own code, which differ by its releases; part of every `Stack`."""

from __future__ import annotations

from dataclasses import dataclass

from sim.software.hugging_face import HuggingFace


@dataclass(frozen=True, slots=True)
class DeepSpeed(HuggingFace):
    """What DeepSpeed does beside its facts in `Stack`. Other frameworks read none of it.

    Attributes:
        masters_visit: updated master parameters come from the host to the device whole, where they become narrow.
    """

    masters_visit: bool
