"""MLCommons Chakra's `.et` files, decoded without a library: protobuf's wire format and the few messages in it.

Format (recalled): chakra schema/protobuf/et_def.proto 0.0.4 (AttributeProto, GlobalMetadata, IOInfo, Node), written
message by message behind their lengths (src/third_party/utils/protolib.py), the metadata first. What PyTorch had as
lists is in IOInfo as text, as Python prints it (src/converter/pytorch_converter.py).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from sim.imports.chakra.nodes import Node, node_of, telling

#: Bytes of one message, and characters of a text of lists, that are read at most.
_MOST_OF_A_MESSAGE, _MOST_OF_A_TEXT = 64 * 2**20, 4 * 2**20
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
#: Fields of the messages.
_ID, _NAME, _CTRL, _INPUTS, _OUTPUTS, _ATTR = 1, 2, 4, 8, 9, 10
_IO = {1: "values", 2: "shapes", 3: "types"}
_STRING, _NUMBERS = 29, (7, 9, 11, 13, 27)


class WireError(Exception):
    """The bytes are no such messages."""


@dataclass
class Messages:
    """What a file holds: the version its metadata says, and its nodes."""

    version: str = ""
    nodes: list[Node] = field(default_factory=list)


def read_messages(raw: BinaryIO, most: int) -> Messages:
    """All messages of a file. Raises WireError."""
    found = Messages()
    for number, message in enumerate(_messages(raw)):
        fields = list(_fields(message))
        if number == 0:
            found.version = _text(fields[0][1]) if fields and isinstance(fields[0][1], bytes) else ""
            continue
        if number > most:
            raise WireError(f"it holds more than {most:,} nodes")
        if (node := _node(fields)) is None:
            raise WireError(f"message {number + 1} has no number and name")
        found.nodes.append(node)
    if not found.nodes:
        raise WireError("it holds no nodes")
    return found


def _messages(raw: BinaryIO) -> Iterator[bytes]:
    while True:
        size = _length(raw)
        if size is None:
            return
        if size > _MOST_OF_A_MESSAGE:
            raise WireError("a length is beyond any message's")
        message = raw.read(size)
        if len(message) < size:
            raise WireError("it is cut off")
        yield message


def _length(raw: BinaryIO) -> int | None:
    value = shift = 0
    while byte := raw.read(1):
        value |= (byte[0] & 127) << shift
        if byte[0] < 128:
            return value
        shift += 7
        if shift > 28:
            raise WireError("a length is beyond any message's")
    if shift:
        raise WireError("it is cut off")
    return None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise WireError("a number has no end")


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of a message's fields."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _varint(data, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise WireError(f"a field is of the unknown kind {kind}")
        if number == 0 or at + size > len(data):
            raise WireError("a field goes beyond its message")
        yield number, data[at:at + size]
        at += size


def _node(fields: list[tuple[int, int | bytes]]) -> Node | None:
    raw: dict[str, Any] = {"attrs": []}
    for number, value in fields:
        if number == _ID and isinstance(value, int):
            raw["id"] = value
        elif number == _NAME and isinstance(value, bytes):
            raw["name"] = _text(value)
        elif number == _CTRL:  # one by itself, or packed
            first = value if isinstance(value, int) else _varint(value, 0)[0] if value else -1
            raw.setdefault("ctrl_deps", first)
        elif number == _ATTR and isinstance(value, bytes):
            raw["attrs"].append(_attribute(value))
    if not telling(str(raw.get("name", ""))):
        return node_of(raw)
    for number, value in fields:
        if number in (_INPUTS, _OUTPUTS) and isinstance(value, bytes):
            raw["inputs" if number == _INPUTS else "outputs"] = {
                _IO[key]: _lists(one) for key, one in _fields(value) if key in _IO and isinstance(one, bytes)}
    return node_of(raw)


def _attribute(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            found["name"] = _text(value)
        elif number == _STRING and isinstance(value, bytes):
            found["value"] = _text(value)
        elif number in _NUMBERS and isinstance(value, int):
            found["value"] = value
    return found


def _text(data: int | bytes) -> str:
    try:
        return data.decode("utf-8") if isinstance(data, bytes) else ""
    except UnicodeDecodeError:
        raise WireError("a text is not UTF-8") from None


def _lists(data: bytes) -> Any:
    """The list behind its text, [] where it is none."""
    text = _text(data)
    try:
        return ast.literal_eval(text) if len(text) < _MOST_OF_A_TEXT else []
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []
