"""What takes fields of a draft, each with the call of the trace that says it."""

from __future__ import annotations

from dataclasses import dataclass

from sim.imports.chakra.nodes import Node
from sim.imports.draft import Draft
from sim.imports.settings import Said


@dataclass
class Told:
    """What takes fields of a draft with calls of a trace as their origin.

    Attributes:
        draft, file: where they go, and the trace's name; tensor: ranks that share a block's products; overall:
            whether nothing is taken of the model, since its config.json is at hand.
        device: kind of device that the model's products run on, "" if unknown.
    """

    draft: Draft
    file: str
    tensor: int = 1
    overall: bool = False
    device: str = ""

    def take(self, path: str, value: object, origin: Node | str, text: str = "") -> None:
        """A field's value, and the call that says it."""
        if self.overall and path.startswith("model."):
            return
        name = origin if isinstance(origin, str) else f"{origin.name} {_sizes(origin)}".rstrip()
        self.draft.take(path, value, Said(self.file, name, value), text)

    def assume(self, path: str, value: object, why: str) -> None:
        """A field's value where the trace says none."""
        if not (self.overall and path.startswith("model.")):
            self.draft.assume(path, value, why)

    def leave(self, name: str, value: object, why: str) -> None:
        """What the trace says and no field."""
        self.draft.leave(Said(self.file, name, value), why)


def _sizes(node: Node) -> str:
    """Sizes of a call's first inputs, as `2x32x64, 64x64`."""
    shapes = ["x".join(map(str, node.shape(index))) for index in range(min(3, len(node.shapes)))]
    return ", ".join(shape for shape in shapes if shape)
