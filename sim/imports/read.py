"""From files of one kind to a finished scenario: which reader takes which kind."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path

from sim.errors import Fault, UserError, nearest
from sim.imports.draft import Draft, Imported

#: Kind -> (module, function) that reads its files; loaded when asked for.
_READERS = {
    "hf": ("sim.imports.hugging.files", "read_hf"),
    "accelerate": ("sim.imports.hugging.files", "read_accelerate"),
    "deepspeed": ("sim.imports.hugging.files", "read_deepspeed"),
    "axolotl": ("sim.imports.hugging.files", "read_axolotl"),
    "llamafactory": ("sim.imports.hugging.files", "read_factory"),
    "torchtitan": ("sim.imports.torchtitan.read", "read"),
    "torchtune": ("sim.imports.torchtune.read", "read"),
    "litgpt": ("sim.imports.litgpt.read", "read"),
    "llm-foundry": ("sim.imports.foundry.read", "read"),
    "nemo": ("sim.imports.megatron.nemo", "read"),
    "megatron": ("sim.imports.megatron.read", "read"),
    "chakra": ("sim.imports.chakra.read", "read"),
}
#: Kinds that are read.
KINDS = tuple(_READERS)


def import_files(kind: str, files: Sequence[str], sets: Sequence[str] = ()) -> Imported:
    """The scenario that files of another tool say.

    Args:
        kind: one of `KINDS`.
        files: paths; which of them is what is told from what they hold.
        sets: texts `dotted.path=value`, put on top.

    Raises:
        UserError: a file that cannot be read or understood, settings that contradict each other, or something a
            scenario needs that is said nowhere.
    """
    if kind not in _READERS:
        raise UserError(Fault(f"'{kind[:40]}' is nothing that can be imported; known are {', '.join(KINDS)}", "KIND",
                              hint=nearest(kind, KINDS)))
    module, function = _READERS[kind]
    reader: Callable[[Sequence[str], Draft], None] = getattr(importlib.import_module(module), function)
    draft = Draft(f"{kind}: {', '.join(Path(file).name or file for file in files)}"[:120], sets)
    reader(files, draft)
    return draft.finish()
