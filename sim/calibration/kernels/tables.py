"""The kernel tables that ship with the project (`data/*.csv.gz`, thinned) and any CSV of the same columns.

Matrix products: gpu,dtype,m,n,k,batch,time_us,source. Row-wise operators: gpu,dtype,op,rows,cols,time_us,source.
Attention: SimuMax's efficiency table, whose times are computed back; AIConfigurator's, as engines of inference call it.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sim.errors import Fault, UserError
from sim.hardware import Gpu, gpu
from sim.hardware.kernels.operators import attention_kernel
from sim.measured.rows import quantising_kernel, table_kernel
from sim.measured.timing import SOURCES, Timing, card, timing
from sim.work import Kernel

#: The engine whose calls write to the cache too.
_WRITES = "vllm-0.14.0"
DATA = Path(__file__).resolve().parents[1] / "data"
PRODUCT_COLUMNS = ("gpu", "dtype", "m", "n", "k", "batch", "time_us", "source")
ATTENTION_COLUMNS = ("gpu", "software", "kernel", "batch", "heads", "kv_heads", "queries", "keys", "head_dim",
                     "time_us")
ROW_WISE_COLUMNS = ("gpu", "dtype", "op", "rows", "cols", "time_us", "source")


@dataclass(frozen=True)
class Group:
    """Rows of one (file, GPU, dtype, operator): kernels and what the benchmark reported for them, seconds."""

    file: str
    label: str
    dtype: str
    op: str
    gpu: Gpu
    timing: Timing
    kernels: tuple[Kernel, ...]
    measured_s: NDArray[np.float64]
    hosts: tuple[str, ...]  # the operator as the host calls it, for the benchmark's floor
    beside: tuple[Kernel | None, ...] = ()  # what a row timed together with its kernel; () = nothing anywhere

    @property
    def name(self) -> str:
        """For tables: file, GPU, dtype, operator."""
        return f"{self.file} {self.label} {self.dtype} {self.op}"

    def pick(self, rows: NDArray[np.intp]) -> Group:
        """The same group with some of its rows."""
        return Group(self.file, self.label, self.dtype, self.op, self.gpu, self.timing,
                     tuple(self.kernels[row] for row in rows), self.measured_s[rows],
                     tuple(self.hosts[row] for row in rows), tuple(self.beside[row] for row in rows if self.beside))


def read_csv(path: Path, columns: Iterable[str]) -> list[dict[str, str]]:
    """Rows of a CSV, plain or gzipped.

    Raises:
        UserError: no such file, or a column is missing.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(Fault(f"cannot read {path}: {error.strerror}", str(path))) from error
    text = gzip.decompress(raw) if path.suffix == ".gz" else raw
    reader = csv.DictReader(io.StringIO(text.decode("utf-8")))
    missing = [name for name in columns if name not in (reader.fieldnames or ())]
    if missing:
        raise UserError(Fault(f"no column {', '.join(missing)}; expected {','.join(columns)}", str(path)))
    return list(reader)


def groups(folder: Path = DATA) -> list[Group]:
    """Every group of the tables in `folder`, file by file."""
    found: list[Group] = []
    for path in sorted(folder.glob("*.csv*")):
        source = next((name for name in SOURCES if path.name.startswith(name)), None)
        if source is None:
            continue
        if path.name.startswith("simumax_other"):
            found += _attention(path)
        elif path.name.startswith("aic_attention"):
            found += _engine_attention(path)
        else:
            found += _group(path, source)
    return found


def _group(path: Path, source: str) -> Iterator[Group]:
    row_wise = "_vec_" in path.name
    rows = read_csv(path, ROW_WISE_COLUMNS if row_wise else PRODUCT_COLUMNS)
    by_group: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for row in rows:
        by_group.setdefault((row["gpu"], row["dtype"], row.get("op", "gemm")), []).append(row)
    for (label, dtype, op), members in by_group.items():
        card_, method = gpu(card(source, label)), timing(source, label)
        kernels = tuple(method.found(table_kernel(row), card_.l2_bytes) for row in members)
        beside = () if row_wise else tuple(quantising_kernel(row) for row in members)
        hosts = tuple(op if row_wise else row["source"].split("-")[0] for row in members)
        yield Group(path.name.split(".")[0], label, dtype, op, card_, method, kernels,
                    np.array([float(row["time_us"]) for row in members]) * 1e-6, hosts, beside if any(beside) else ())


def _attention(path: Path) -> Iterator[Group]:
    by_group: dict[tuple[str, str], list[tuple[Kernel, float]]] = {}
    for row in read_csv(path, ("gpu", "op", "peak_tflops", "key", "efficiency")):
        if not row["op"].startswith("sdp"):
            continue
        given = dict(part.split("=") for part in row["key"].split(", "))
        sizes = {name: int(value) for name, value in given.items() if value.isdigit()}
        kernel = attention_kernel(sizes["batch"], sizes["head_num"], sizes["kv_head_num"], sizes["seq_len"],
                                  sizes["seq_len"], sizes["qk_head_dim"], "bf16", row["op"] == "sdp_bwd",
                                  value_dim=sizes["v_head_dim"])
        seconds = kernel.flops / (float(row["efficiency"]) * float(row["peak_tflops"]) * 1e12)
        by_group.setdefault((row["gpu"], row["op"]), []).append((kernel, seconds))
    for (label, op), members in by_group.items():
        kernels, seconds_ = zip(*members, strict=True)
        yield Group(path.name.split(".")[0], label, "bf16", op, gpu(card("simumax", label)), timing("simumax", label),
                    kernels, np.array(seconds_), (op,) * len(members))


def _engine_attention(path: Path) -> Iterator[Group]:
    """Forward kernels, causal, and those of one query a sequence (`sdp_decode`)."""
    by_group: dict[tuple[str, str], list[tuple[Kernel, float, str]]] = {}
    for row in read_csv(path, ATTENTION_COLUMNS):
        batch, heads, kv_heads, queries, keys, dim = (int(row[name]) for name in ATTENTION_COLUMNS[3:9])
        kernel = attention_kernel(batch, heads, kv_heads, queries, keys, dim, "bf16", causal=queries > 1,
                                  kernel=row["kernel"])
        before = "planned" if row["kernel"] == "flash3" else "written" if row["software"] == _WRITES else "alone"
        by_group.setdefault((row["gpu"], "sdp_fwd" if queries > 1 else "sdp_decode"), []).append(
            (kernel, float(row["time_us"]) * 1e-6, before))
    for (label, op), members in by_group.items():
        kernels, seconds, hosts = zip(*members, strict=True)
        yield Group(path.name.split(".")[0], label, "bf16", op, gpu(card("aic-vllm", label)),
                    timing("aic-vllm", label), kernels, np.array(seconds), hosts)
