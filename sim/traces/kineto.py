"""A trace of PyTorch's profiler (Kineto), read: what ran on the GPU, who launched it, and where steps begin.

Format: Trace Event Format as `torch.profiler.profile.export_chrome_trace` writes it (torch 1.9 on): complete events
with times in microseconds; category `kernel`, `gpu_memcpy` or `gpu_memset` (`Kernel`, `Memcpy` in old ones) for what a
GPU did, with `args.stream`, `args.correlation` of the call that launched it and `args."External id"` of the operator;
`cuda_runtime` and `cuda_driver` for the calls; `cpu_op` for operators, with `args."Input Dims"` where shapes were
recorded; `user_annotation` for `ProfilerStep#N` and `Optimizer.step#NAME.step`.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sim.errors import Fault, UserError

_STEP = re.compile(r"ProfilerStep#(\d+)")
_OPTIMIZER = "Optimizer.step#"
#: Categories of old traces, as today's are called.
_OLD = {"operator": "cpu_op", "runtime": "cuda_runtime", "memcpy": "gpu_memcpy", "memset": "gpu_memset"}
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver", "hip_runtime")
_PASSED_OVER = ("python_function", "ac2g", "fwdbwd", "async_cpu_to_gpu", "overhead", "trace", "gpu_user_annotation")


@dataclass(frozen=True, slots=True)
class Ran:
    """One kernel or copy on the GPU.

    Attributes:
        name: as the trace has it; copy: whether it is a copy or fill by the copy engines.
        start_us, end_us: on the trace's clock; launched_us: when the host called for it.
        op: the operator that launched it, "" if unknown; call: number of that operator's call, -1 if unknown; shapes:
            its inputs' sizes, empty where none were recorded; dtype: of its first input, "" if unknown.
        collective: PyTorch's name of the collective, "" if none; size_bytes: of its larger buffer, 0 if unknown.
        updating: launched inside an optimizer's step.
    """

    name: str
    copy: bool
    start_us: float
    end_us: float
    launched_us: float
    op: str = ""
    call: int = -1
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str = ""
    collective: str = ""
    size_bytes: int = 0
    updating: bool = False


@dataclass(frozen=True)
class Trace:
    """What a trace holds of one rank.

    Attributes:
        file: as the user named it; gpu: its GPU's name, "" if unknown; rank, ranks: of the job, -1 and 0 if unknown.
        ran: everything on the GPU, in order of its start.
        steps: number, begin and end of every `ProfilerStep` on the host, microseconds, in order.
        updates: begin and end of every optimizer's step on the host, those inside others left out.
        devices: GPUs that the file shows; `ran` is of the first.
    """

    file: str
    gpu: str
    rank: int
    ranks: int
    ran: tuple[Ran, ...]
    steps: tuple[tuple[int, float, float], ...]
    updates: tuple[tuple[float, float], ...] = ()
    devices: tuple[int, ...] = ()


@dataclass
class _Events:
    """Events sorted out by what they are."""

    on_gpu: list[Mapping[str, Any]] = field(default_factory=list)
    launched: dict[int, float] = field(default_factory=dict)
    ops: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    calls: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    updates: list[tuple[float, float]] = field(default_factory=list)


def read_trace(file: str) -> Trace:
    """Read a trace, compressed or not.

    Raises:
        UserError: it cannot be read, is no trace, or shows nothing of a GPU.
    """
    data = _load(file)
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list):
        raise UserError(Fault("is no trace: it has no 'traceEvents'", "", file,
                              hint="torch.profiler.profile.export_chrome_trace writes one"))
    found = _sort(event for event in events if isinstance(event, dict) and event.get("ph") == "X")
    if not found.on_gpu:
        raise UserError(Fault("shows nothing of a GPU", "", file,
                              hint="profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"))
    head = data if isinstance(data, dict) else {}
    listed, job = head.get("deviceProperties"), head.get("distributedInfo")
    seen = sorted({_int(event["args"], "device") for event in found.on_gpu})
    gpu = next((str(one.get("name", "")) for one in listed if isinstance(one, dict) and one.get("id") == seen[0]),
               "") if isinstance(listed, list) else ""
    job = job if isinstance(job, dict) else {}
    updates = _outer(found.updates)
    ran = sorted((_ran(event, found, updates) for event in found.on_gpu if _int(event["args"], "device") == seen[0]),
                 key=lambda one: one.start_us)
    steps = tuple((n, *span) for n, span in sorted(found.steps.items()))
    return Trace(file, gpu, _int(job, "rank", -1), _int(job, "world_size", 0), tuple(ran), steps, tuple(updates),
                 tuple(seen))


def _outer(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans in order, those inside others left out: wrapped optimizers mark their step more than once."""
    outer: list[tuple[float, float]] = []
    for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        if not outer or begin >= outer[-1][1]:
            outer.append((begin, end))
    return outer


def _load(file: str) -> Any:
    path = Path(file)
    if path.is_dir():
        raise UserError(Fault("is a folder, not a file", "", file, hint="name a trace inside it"))
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8-sig")
        del raw
        return _parsed(text)
    except FileNotFoundError:
        raise UserError(Fault("no such file", "", file)) from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise UserError(Fault("is compressed and cut off or damaged", "", file)) from None
    except OSError as error:
        raise UserError(Fault(f"cannot be read: {error.strerror or error}", "", file)) from None
    except (ValueError, RecursionError) as error:  # JSONDecodeError, UnicodeDecodeError
        line = getattr(error, "lineno", 0)
        raise UserError(Fault(f"is not JSON: {getattr(error, 'msg', error)}", "", file, line)) from None


def _parsed(text: str) -> Any:
    """The JSON of a trace. Some profilers write control characters and a bare N/A into it."""
    try:
        return json.loads(text, strict=False, object_hook=_slim)
    except json.JSONDecodeError:
        if "N/A" not in text:
            raise
        return json.loads(re.sub(r":\s*N/A\b", ': "N/A"', text), strict=False, object_hook=_slim)


def _slim(found: dict[str, Any]) -> dict[str, Any] | None:
    """Nothing in the place of events that are not looked at: stacks of Python make most of a large trace."""
    kind = found.get("cat")
    return None if isinstance(kind, str) and kind.lower() in _PASSED_OVER else found


def _sort(events: Iterable[Mapping[str, Any]]) -> _Events:
    found = _Events()
    for event in events:
        begin, length, args = event.get("ts"), event.get("dur"), event.get("args")
        if not isinstance(begin, int | float | str) or not isinstance(length, int | float | str):
            continue
        try:
            start, end = float(begin), float(begin) + float(length)
        except ValueError:
            continue
        if not (math.isfinite(start) and math.isfinite(end)):
            continue
        args = args if isinstance(args, dict) else {}
        kind = str(event.get("cat", "")).lower()
        kind = _OLD.get(kind, kind)
        one = {"name": str(event.get("name", "")), "cat": kind, "start": start, "end": end, "args": args}
        if kind in _ON_GPU:
            found.on_gpu.append(one)
        elif kind in _CALLS:
            if (correlation := _int(args, "correlation")) >= 0:
                found.launched.setdefault(correlation, start)
        elif kind in ("cpu_op", "user_annotation"):
            _host_event(one, found)
    return found


def _host_event(event: Mapping[str, Any], found: _Events) -> None:
    name, span = str(event["name"]), (float(event["start"]), float(event["end"]))
    step = _STEP.match(name)
    external = _external(event["args"])
    if step:
        found.steps[int(step[1][:9])] = span
    elif name.startswith(_OPTIMIZER):
        found.updates.append(span)
    elif external < 0:
        return
    elif name == "record_param_comms":
        found.calls[external] = event["args"]
    else:
        found.ops[external] = event


def _ran(event: Mapping[str, Any], events: _Events, updates: list[tuple[float, float]]) -> Ran:
    args = event["args"]
    external = _external(args)
    op = events.ops.get(external) if event["cat"] == "kernel" else None
    of_op = op["args"] if op is not None else {}
    call = args if "Collective name" in args else events.calls.get(external, {})
    launched = events.launched.get(_int(args, "correlation"), float(event["start"]))
    types = of_op.get("Input type")
    dtype = str(types[0]) if isinstance(types, list) and types else ""
    before = bisect_right(updates, (launched, float("inf"))) - 1
    return Ran(str(event["name"]), event["cat"] != "kernel", float(event["start"]), float(event["end"]), launched,
               str(op["name"]) if op is not None else "", external if op is not None else -1,
               _shapes(of_op.get("Input Dims")), dtype, str(call.get("Collective name", "")).lower(), _size(call),
               before >= 0 and launched <= updates[before][1])


#: Bytes of an element by the name that PyTorch gives its type in a collective's record.
_BYTES = {"double": 8, "long": 8, "float": 4, "int": 4, "half": 2, "bfloat16": 2, "char": 1, "byte": 1, "bool": 1,
          "float8_e4m3fn": 1, "float8_e5m2": 1}


def _size(call: Mapping[str, Any]) -> int:
    """Bytes of the larger of a collective's buffers: what a gather makes, what a reduce-scatter is given."""
    elements = max(_int(call, "In msg nelems", 0), _int(call, "Out msg nelems", 0))
    return elements * _BYTES.get(str(call.get("dtype", "")).lower(), 0)


def _shapes(dims: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(dims, list):
        return ()
    return tuple(tuple(side for side in one if isinstance(side, int)) if isinstance(one, list) else () for one in dims)


def _external(args: Mapping[str, Any]) -> int:
    return _int(args, "External id" if "External id" in args else "external id")


def _int(args: Mapping[str, Any], name: str, without: int = -1) -> int:
    value = args.get(name)
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1 << 62:
        return without
    return int(value)
