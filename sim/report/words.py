"""What figures are called wherever a person reads them: one name for each, in every table and picture."""

from __future__ import annotations

from collections.abc import Mapping

#: Terms of the breakdown whose field says it in another way.
TERMS = {"gemm": "matrix products", "memory_bound": "memory-bound kernels", "host": "waiting for the host",
         "offload": "waiting for offload", "data": "waiting for training data",
         "allocator": "the allocator's retries"}
#: What bounds a step (`bound` of result.md).
BOUNDS = {"compute": "the tensor cores", "communication": "communication", "memory_bandwidth": "memory bandwidth",
          "host": "the host", "pipeline": "the pipeline's bubble", "offload": "copies to the host and its optimizer",
          "data": "reading training data", "allocator": "the allocator, which runs short of memory"}


def bound(name: str, serving: bool) -> str:
    """What bounds a step, or a request, which has no optimizer: "the tensor cores"."""
    return "copies of weights from the host" if serving and name == "offload" else BOUNDS[name]


def term(name: str) -> str:
    """A term of the breakdown, by its field: "matrix products"."""
    return TERMS.get(name, name.replace("_", " "))


def written(value: object, nothing: str = "none") -> str:
    """A value of a field as a scenario has it: true, {layers: 4}, [1, 2].

    Args:
        nothing: what stands for a field that is not given.
    """
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {written(one)}' for name, one in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return nothing if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def forward_of(section: str) -> str:
    """Which forward of a request a section of its Program is, "" for training's. What such a forward holds beside the
    cache is one figure, its largest layer's, so no layer of it is where the peak is."""
    return "the prompt" if section == "prompt" else "a token" if section.startswith("token at ") else ""


def others(alike: int) -> str:
    """How many ranks are like the one that is shown."""
    return f", like {alike:,} other{'s' * (alike > 1)}" if alike > 0 else ""
