"""What figures are called wherever a person reads them: one name for each, in every table and picture."""

from __future__ import annotations

#: Terms of the breakdown whose field says it in another way.
TERMS = {"gemm": "matrix products", "memory_bound": "memory-bound kernels", "host": "waiting for the host",
         "offload": "waiting for offload"}
#: What bounds a step (`bound` of result.md).
BOUNDS = {"compute": "the tensor cores", "communication": "communication", "memory_bandwidth": "memory bandwidth",
          "host": "the host", "pipeline": "the pipeline's bubble"}


def term(name: str) -> str:
    """A term of the breakdown, by its field: "matrix products"."""
    return TERMS.get(name, name.replace("_", " "))
