"""PYTORCH_CUDA_ALLOC_CONF as fields of a scenario.

Options: docs/source/notes/cuda.rst of PyTorch, "Optimizing memory usage with PYTORCH_CUDA_ALLOC_CONF" (from memory).
"""

from __future__ import annotations

import re

from sim.imports.draft import Draft
from sim.imports.settings import Said

#: Variables that hold it, the newest name last.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
EXPANDABLE, SPLIT = "software.allocator.expandable_segments", "software.allocator.max_split_size_mb"


def read_conf(said: Said, draft: Draft) -> None:
    """Takes the options that a scenario can say; the others are left, by name.

    Raises:
        UserError: an option's value is none of its values.
    """
    left = []
    for option in str(said.value).split(","):
        name, _, value = (part.strip() for part in option.partition(":"))
        if name == "expandable_segments":
            if value not in ("True", "False"):
                raise said.wrong("expandable_segments:True or expandable_segments:False")
            draft.take(EXPANDABLE, value == "True", said)
        elif name == "max_split_size_mb":
            if not re.fullmatch(r"\d{1,7}", value) or int(value) <= 20:
                raise said.wrong("max_split_size_mb of more than 20")
            draft.take(SPLIT, int(value), said)
        elif name:
            left.append(name)
    if left:
        draft.leave(said, f"{', '.join(left)}: the allocator is replayed without")
