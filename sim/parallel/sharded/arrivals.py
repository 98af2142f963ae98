"""Memory of the parameters that DeepSpeed's ZeRO-3 gathers, from the call to the end of their use.

A parameter that comes alone comes into the tensor it stays in. Several that come in one call come into one flat tensor;
when the first of them is waited for each is copied out of it (`torch.cat` of its pieces of all ranks), and the flat
tensor goes when the last of them has been waited for: while a use has one of them, they are there twice.

Source: deepspeed 0.6.7, 0.9.5, 0.12.6, 0.14.4 and 0.16.9 runtime/zero/partition_parameters.py, all_gather_coalesced and
AllGatherCoalescedHandle (partitions, wait); partitioned_param_coordinator.py, fetch_sub_module: every parameter has its
handle in a registry until it is waited for. 0.14.4 run on a driver that does nothing (tests/driver).
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Mapping
from dataclasses import dataclass

from sim.program import SectionBuilder

#: A tensor's name and bytes.
Tensor = tuple[str, int]
_CATEGORY = "gathered_parameters"


def tensor_of(parameter: Hashable, number: int = 0, lasting: Container[Hashable] = ()) -> str:
    """Name of a gathered parameter's own tensor, in the `number`th call of its micro-step; one for all micro-steps
    where the parameter is among what lasts from one to the next, or no call is told."""
    return f"fetched:{parameter}:{number}" if number and parameter not in lasting else f"fetched:{parameter}"


@dataclass
class _Flat:
    """What one call brings.

    Attributes:
        tensor: the flat one.
        parts: the parameters' own, by parameter.
        awaited: parameters that nobody has waited for.
    """

    tensor: Tensor
    parts: dict[Hashable, Tensor]
    awaited: int


class Arrivals:
    """Tensors of gathered parameters in one micro-step.

    Args:
        stream: of the gathers, whose memory it is.

    Attributes:
        held: memory of parameters as they are used.
    """

    def __init__(self, section: SectionBuilder, stream: int) -> None:
        self._section, self._stream = section, stream
        self._flats: dict[Hashable, _Flat] = {}
        self.held: dict[Hashable, Tensor] = {}

    def called(self, parts: Mapping[Hashable, Tensor], flat_bytes: int) -> None:
        """A gather is called: of parameters into `parts`, or first into one tensor of `flat_bytes` (0: not so)."""
        if not flat_bytes:
            self._make(parts)
            return
        first = next(iter(parts.values()))
        flat = _Flat((f"{first[0]}, flat", flat_bytes), dict(parts), len(parts))
        self._section.allocate(*flat.tensor, _CATEGORY, self._stream)
        self._flats.update(dict.fromkeys(parts, flat))

    def awaited(self, names: Iterable[Hashable]) -> None:
        """A use waits for parameters."""
        for name in names:
            flat = self._flats.pop(name, None)
            if flat is None:
                continue
            self._make(flat.parts)
            flat.parts = {}
            flat.awaited -= 1
            if not flat.awaited:
                self._section.free(*flat.tensor, _CATEGORY, self._stream)

    def _make(self, parts: Mapping[Hashable, Tensor]) -> None:
        for tensor in parts.values():
            self._section.allocate(*tensor, _CATEGORY, self._stream)
        self.held.update(parts)
