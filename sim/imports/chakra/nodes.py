"""One node of an execution trace, whatever file it comes from, and what its inputs are.

Format: torch/csrc/profiler/standalone/execution_trace_observer.cpp, schema 1.0.1 to 1.1.1-chakra.0.0.4 (seen as torch
2.13.0 writes it; 1.0.* recalled). Numbers of nodes grow with their start, a child's number is above its parent's; the
value of a tensor is [tensor, storage, offset, elements, bytes of one, device].
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

Shape = tuple[int, ...]

_TENSOR = re.compile(r"Tensor\(([^()]*)\)")
_DTYPES = {"float": "fp32", "double": "fp64", "c10::BFloat16": "bf16", "c10::Half": "fp16", "c10::Float8_e4m3fn": "fp8",
           "c10::Float8_e5m2": "fp8", "signed char": "int8", "unsigned char": "int8"}
#: Operators of PyTorch that tell something; of all other libraries every node is kept.
_TELLING = frozenset(f"aten::{name}" for name in (
    "linear", "addmm", "mm", "matmul", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "embedding", "softmax",
    "_softmax", "layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm", "rsqrt", "dropout", "native_dropout",
    "topk", "gelu", "silu", "relu", "tanh", "cos", "polar", "view_as_complex", "lt", "ge", "lerp_", "addcdiv_", "mul_",
    "add_"))
_FAMILIES = ("aten::_scaled_dot_product", "aten::scaled_dot_product", "aten::_flash_attention", "aten::_fused_ad",
             "aten::_fused_sgd", "aten::_foreach_", "aten::_efficient_attention")
_NONE: Mapping[str, Any] = {}
_ENGINE = "autograd::engine::evaluate_function"
#: Calls around a call that are kept; wrappers of modules are few.
_DEEPEST = 40
#: More elements or bytes than any tensor has: sizes of a broken file.
_MOST = 10**15


@dataclass(slots=True)
class Node:
    """A call.

    Attributes:
        id, name, parent: as the trace has them; parent -1 where there is none.
        shapes, types, values: of the inputs, as far as they are lists; out: shapes of the outputs; out_types: types.
        attrs: name -> value, of collectives alone; thread: it ran on.
        backward, updating: inside autograd's backward, inside an optimizer's step; above: names of the calls around it.
    """

    id: int
    name: str
    parent: int
    shapes: Sequence[Any] = ()
    types: Sequence[Any] = ()
    values: Sequence[Any] = ()
    out: Sequence[Any] = ()
    out_types: Sequence[Any] = ()
    attrs: Mapping[str, Any] = field(default_factory=lambda: _NONE)
    thread: int = 0
    backward: bool = False
    updating: bool = False
    above: tuple[str, ...] = ()

    def shape(self, index: int) -> Shape:
        """Sizes of an input, () of what is no tensor or of no size."""
        return _shape(self.shapes, index)

    def shape_out(self, index: int = 0) -> Shape:
        """Sizes of an output."""
        return _shape(self.out, index)

    def dtype(self, index: int) -> str:
        """Dtype of an input, of a list's first tensor; "" if it is none."""
        return _dtype(self.types, index)

    def dtype_out(self, index: int = 0) -> str:
        """Dtype of an output."""
        return _dtype(self.out_types, index)

    def value(self, index: int) -> Any:
        """An input that is no tensor, None without one."""
        return self.values[index] if index < len(self.values) else None

    def place(self, index: int) -> tuple[Any, ...] | None:
        """What tells an input tensor's memory from others': storage, offset and elements."""
        value = self.value(index)
        if isinstance(value, list) and len(value) >= 4 and all(isinstance(one, int) for one in value[:4]):
            return tuple(value[1:4])
        return None

    def first_device(self, index: int) -> str:
        """Device of an input tensor, or of the first of a list, as `cpu` or `cuda:0`; "" if unknown."""
        value = self.value(index)
        if isinstance(value, list) and value and isinstance(value[0], list):
            value = value[0]
        return value[5] if isinstance(value, list) and len(value) > 5 and isinstance(value[5], str) else ""

    def sizes(self, index: int) -> list[Shape]:
        """Shapes of all tensors of an input that may be a list of them, or of lists."""
        return list(_nested(self.shapes[index])) if index < len(self.shapes) else []


def telling(name: str) -> bool:
    """Whether anything is read from nodes of this name."""
    return name in _TELLING or name.startswith(_FAMILIES) or not name.startswith(("aten::", _ENGINE))


def node_of(raw: Mapping[str, Any]) -> Node | None:
    """A node of the JSON, None where it is none: number or name are missing."""
    number, name = raw.get("id"), raw.get("name")
    parent = raw.get("ctrl_deps", raw.get("parent"))
    if not isinstance(number, int) or isinstance(number, bool) or not isinstance(name, str):
        return None
    parent = parent if isinstance(parent, int) and not isinstance(parent, bool) else -1
    node = Node(number, name if name.isascii() else readable(name), parent)
    attrs = [one for one in _list(raw.get("attrs")) if isinstance(one, Mapping)]
    thread = next((one.get("value") for one in attrs if one.get("name") == "tid"), raw.get("tid"))
    node.thread = thread if isinstance(thread, int) else 0
    if not telling(name):
        return node
    inputs, outputs = raw.get("inputs"), raw.get("outputs")
    if isinstance(inputs, Mapping):
        node.shapes, node.types, node.values = (_list(inputs.get(key)) for key in ("shapes", "types", "values"))
    else:  # 1.0.*
        node.shapes, node.types = _list(raw.get("input_shapes")), _list(raw.get("input_types"))
        node.values = _list(inputs)
    if isinstance(outputs, Mapping):
        node.out, node.out_types = _list(outputs.get("shapes")), _list(outputs.get("types"))
    else:
        node.out, node.out_types = _list(raw.get("output_shapes")), _list(raw.get("output_types"))
    if name == "record_param_comms":
        node.attrs = {one["name"]: one.get("value") for one in attrs if isinstance(one.get("name"), str)}
    return node


def readable(text: str) -> str:
    """Text that can be printed: JSON may hold halves of characters."""
    return text.encode("utf-8", "replace").decode("utf-8")[:300]


def in_order(found: Iterable[Node]) -> list[Node]:
    """The telling ones in the order they began, each knowing what it is called from.

    The observer writes a node when it ends, so that a call stands behind all that it called. That is gone by, and not
    by parents, since an exception that ends a recomputation early leaves the observer with the wrong ones (seen in
    torch 2.13.0). Files that are sorted otherwise have their parents.
    """
    nodes = list(found)
    ends = {id(node): place for place, node in enumerate(nodes)}
    written = any(one.id > other.id for one, other in pairwise(nodes))
    nodes.sort(key=lambda node: node.id)
    around: dict[int, tuple[bool, bool, tuple[str, ...]]] = {}
    open_calls: dict[int, list[Node]] = {}
    kept = []
    for node in nodes:
        parent = node.parent
        if written:
            stack = open_calls.setdefault(node.thread, [])
            while stack and ends[id(stack[-1])] < ends[id(node)]:
                stack.pop()
            parent = stack[-1].id if stack else -1
            stack.append(node)
        node.backward, node.updating, node.above = around.get(parent, (False, False, ()))
        inside = (*node.above, node.name) if telling(node.name) and len(node.above) < _DEEPEST else node.above
        around[node.id] = (node.backward or node.name.startswith(_ENGINE),
                           node.updating or node.name.startswith("Optimizer.step#"), inside)
        if telling(node.name):
            kept.append(node)
    return kept


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _shape(shapes: Sequence[Any], index: int) -> Shape:
    value = shapes[index] if index < len(shapes) else None
    if isinstance(value, list) and all(_size(one) for one in value):
        return tuple(value)
    return ()


def _size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST


def _nested(value: Any, depth: int = 0) -> Iterator[Shape]:
    if isinstance(value, list) and value and all(_size(one) for one in value):
        yield tuple(value)
    elif isinstance(value, list) and depth < 4:
        for one in value:
            yield from _nested(one, depth + 1)


def _dtype(types: Sequence[Any], index: int) -> str:
    text = types[index] if index < len(types) else ""
    found = _TENSOR.search(text) if isinstance(text, str) else None
    return _DTYPES.get(found[1], "") if found else ""
