"""Execution traces as files: JSON, gzipped or not, read object by object; and Chakra's protobuf (`wire.py`)."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from sim.errors import Fault, UserError
from sim.imports.chakra.nodes import Node, in_order, node_of
from sim.imports.chakra.wire import WireError, read_messages

#: Nodes and characters of a file that are read at most; a step of a large model has some hundred thousand nodes.
MOST_NODES, _MOST_TEXT = 4_000_000, 16 * 2**30
_CHUNK, _HEAD = 4 * 2**20, 2**20
#: Characters of one node at most: the list of groups of a large job is the largest there is.
_MOST_OF_A_NODE = 256 * 2**20
#: Characters of the longest word of JSON, of which a part may be left.
_SHORT = 8
_NODES = re.compile(r'"nodes"\s*:\s*\[')
_AGAIN = "record one training step with torch.profiler.ExecutionTraceObserver"


@dataclass
class Trace:
    """One rank's trace.

    Attributes:
        file: as the user named it; schema: of the file; year: when it was recorded, 0 if unknown.
        nodes: those that tell something, in the order they began.
    """

    file: str
    schema: str = ""
    year: int = 0
    nodes: list[Node] = field(default_factory=list)


def read_trace(file: str) -> Trace:
    """The trace in a file.

    Raises:
        UserError: it cannot be read, or is no execution trace.
    """
    path = Path(file)
    try:
        if path.is_dir() or not path.exists():
            _refuse("is a folder, not a file" if path.is_dir() else "no such file", file)
        with open(path, "rb") as raw:
            first = raw.read(2)
            raw.seek(0)
            opened = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if first == b"\x1f\x8b" else raw
            start = opened.read(64)
            opened.seek(0)
            if not start.strip():
                _refuse("is empty", file)
            if start.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in b"{[":
                return _json(opened, file)
            return _protobuf(opened, file)
    except (OSError, EOFError, zlib.error) as error:
        _refuse(f"cannot be read: {getattr(error, 'strerror', None) or error}", file)
    except (RecursionError, MemoryError):
        _refuse("is nested too deep, or too large", file)


def is_trace(file: str) -> bool:
    """Whether a file looks like a trace rather than a model's config.json."""
    try:
        with open(file, "rb") as raw:
            first = raw.read(4096)
    except OSError:
        return True  # read_trace says what is wrong
    return first[:1] != b"{" or (b'"model_type"' not in first and b'"architectures"' not in first)


def _refuse(message: str, file: str, hint: str = "") -> NoReturn:
    raise UserError(Fault(message, "", file, 0, hint))


def _json(raw: BinaryIO, file: str) -> Trace:
    """A trace in JSON; nodes are taken one by one as the text comes in."""
    text = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="replace")
    head = text.read(_HEAD)
    found = _NODES.search(head)
    if '"traceEvents"' in head[:found.start() if found else None]:
        _refuse("is a trace of the profiler's events (Kineto), not an execution trace", file,
                f"'drystep diff' compares it with a prediction; {_AGAIN}")
    if found is None:
        _refuse("is no execution trace: it has no list of nodes", file, _AGAIN)
    before = head[:found.start()]
    schema = _said(r'"schema"\s*:\s*"([^"]{1,60})"', before)
    time = _said(r'"time"\s*:\s*"(20\d\d)-', before)
    nodes = [node for one in _objects(text, head[found.end():], file) if (node := node_of(one)) is not None]
    if not nodes:
        _refuse("is no execution trace: its nodes have neither number nor name", file, _AGAIN)
    return Trace(file, schema, int(time or 0), in_order(nodes))


def _said(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else ""


def _objects(text: io.TextIOWrapper, buffer: str, file: str) -> Iterator[dict[str, Any]]:
    """The objects of a list whose bracket is behind the reader, up to the list's end."""
    decoder = json.JSONDecoder()
    count, read, at = 0, len(buffer), 0
    while True:
        while at < len(buffer) and buffer[at] in " \t\r\n,":
            at += 1
        if at < len(buffer) and buffer[at] == "]":
            return
        try:
            one, at = decoder.raw_decode(buffer, at)
        except ValueError as error:
            # Wrong to its end: it may go on; wrong before that, it never will.
            cut = getattr(error, "pos", at) >= len(buffer.rstrip()) - _SHORT or "Unterminated" in str(error)
            more = text.read(max(_CHUNK, len(buffer) - at))
            read += len(more)
            buffer, at = buffer[at:] + more, 0
            if not more:
                _refuse(f"is {'cut off' if cut else 'not JSON'} behind {count:,} nodes", file, _AGAIN)
            if len(buffer) > _MOST_OF_A_NODE + _CHUNK or read > _MOST_TEXT:
                _refuse(f"is not JSON that can be read, behind {count:,} nodes", file)
            continue
        count += 1
        if count > MOST_NODES:
            _refuse(f"holds more than {MOST_NODES:,} nodes", file, _AGAIN)
        if isinstance(one, dict):
            yield one


def _protobuf(raw: BinaryIO, file: str) -> Trace:
    """Chakra's .et."""
    try:
        found = read_messages(raw, MOST_NODES)
    except WireError as error:
        _refuse(f"is neither JSON nor a Chakra trace in protobuf: {error}", file, f"pass PyTorch's JSON: {_AGAIN}")
    return Trace(file, found.version, 0, in_order(found.nodes))
