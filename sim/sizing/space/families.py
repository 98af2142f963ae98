"""Families of layouts, and of ways to serve: what a search shows the best of, each beside the others."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sim.sizing.space.layouts import STRATEGIES, Space
from sim.sizing.space.precisions import clusters_of
from sim.sizing.space.requests import ServedSpace

#: Families of layouts, by the first of them that a layout uses: cuts of the model before how its states are kept.
FAMILIES = ("tensor + pipeline", "tensor", "pipeline", "context", "expert", "FSDP", "ZeRO", "DDP")
_BY_STRATEGY = {"none": "DDP", "ddp": "DDP", "fsdp": "FSDP", "zero1": "ZeRO", "zero2": "ZeRO", "zero3": "ZeRO"}


def families_of(space: Space) -> npt.NDArray[np.int64]:
    """Index into `FAMILIES` of every row, shape (rows,)."""
    columns = space.columns
    kept = np.array([FAMILIES.index(_BY_STRATEGY[name]) for name in STRATEGIES])
    index = kept[columns["strategy"]]
    for name in ("expert", "context", "pipeline", "tensor"):
        index = np.where(columns[name] > 1, FAMILIES.index(name), index)
    both: npt.NDArray[np.int64] = np.where((columns["tensor"] > 1) & (columns["pipeline"] > 1), 0, index)
    return both


def kinds_of(space: Space) -> dict[str, npt.NDArray[np.bool_]]:
    """Rows of each family that a space has, by its name; then of each precision, where there are several."""
    if isinstance(space, ServedSpace):
        return space.kinds()
    return {**layouts_of(space), **{f"in {name}": np.isin(space.columns["cluster"], numbers)
                                    for name, numbers in clusters_of(space).items()}}


def layouts_of(space: Space) -> dict[str, npt.NDArray[np.bool_]]:
    """Rows of each family of layouts that a space of training steps has, by its name."""
    index = families_of(space)
    return {name: index == number for number, name in enumerate(FAMILIES) if (index == number).any()}
