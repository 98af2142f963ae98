"""`python -m sim.calibration.measure_gpu --out DIR`: measures what the kernel models need on a real GPU, with PyTorch.

Writes CSVs that `drystep calibrate` reads and that can join `sim/calibration/data`:

* gemm.csv (gpu,dtype,m,n,k,batch,time_us,source): products by shape and layout; `alone` = median of single calls with
  the host's gaps between, `sequence` = mean within a queue of some seconds, which is at the sustained clock.
* rows.csv (gpu,dtype,op,rows,cols,time_us,source): row-wise operators, cross-entropy, optimizers (rows = parameters).
* spelled.csv: norms and rotary positions as models spell them in operators.
* attention.csv, host.csv, beside.csv (a product beside a kernel that holds k SMs), memory.csv (context), steps.csv
  (steps of small transformers with peak allocated and reserved memory).

PyTorch is imported when measuring, never at import. `--dry-run` measures tiny shapes on the CPU: it tests the script.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sim.calibration.kernels.tables import PRODUCT_COLUMNS, ROW_WISE_COLUMNS

ATTENTION_COLUMNS = ("gpu", "dtype", "batch", "heads", "kv_heads", "seq", "head_dim", "causal", "direction", "time_us",
                     "source")
HOST_COLUMNS = ("gpu", "operator", "time_us", "source")
BESIDE_COLUMNS = ("gpu", "dtype", "m", "n", "k", "sms_held", "time_us", "source")
MEMORY_COLUMNS = ("gpu", "what", "bytes", "source")
STEP_COLUMNS = ("gpu", "dtype", "layers", "hidden", "heads", "vocab", "batch", "seq", "optimizer", "step_us",
                "peak_allocated", "peak_reserved", "source")
Row = tuple[Any, ...]

_PRODUCTS = [(m, n, k) for m in (128, 512, 1024, 2048, 4096, 8192, 16384)
             for n, k in ((1024, 1024), (3072, 1024), (4096, 1024), (1024, 4096), (2560, 2560), (4096, 4096),
                          (12288, 4096), (11008, 4096), (4096, 11008), (5120, 5120), (8192, 8192), (28672, 8192),
                          (8192, 28672), (50304, 4096), (50257, 2048))]
_TINY_PRODUCTS = [(32, 48, 16), (16, 16, 64)]
_ROWS = [(rows, cols) for rows in (256, 2048, 16384, 65536)
         for cols in (512, 1024, 1600, 2048, 4096, 5120, 8192, 16384)]
_VOCABS = (32000, 50304, 128256)
_STEPS = [(12, 768, 12, 8, 1024), (12, 1536, 12, 8, 1024), (24, 1024, 16, 4, 2048), (8, 4096, 32, 1, 2048)]


class Bench:
    """A device to time on: CUDA events on a GPU, the wall clock on a CPU."""

    def __init__(self, dry_run: bool) -> None:
        try:
            import torch
        except ImportError:
            raise SystemExit("PyTorch is not installed here: measure where the training runs") from None
        self.torch: Any = torch
        self.tiny = dry_run
        if not dry_run and not torch.cuda.is_available():
            raise SystemExit("no CUDA device; --dry-run tests the script on the CPU")
        self.device = "cpu" if dry_run else "cuda"
        self.gpu = "cpu" if dry_run else torch.cuda.get_device_name()
        self.dtypes: Sequence[str] = ("fp32",) if dry_run else (
            ("bf16", "fp16", "fp32") if torch.cuda.is_bf16_supported() else ("fp16", "fp32"))

    def kind(self, dtype: str) -> Any:
        """PyTorch's dtype of that name."""
        return {"bf16": self.torch.bfloat16, "fp16": self.torch.float16, "fp32": self.torch.float32}[dtype]

    def tensor(self, *shape: int, dtype: str = "fp32", grad: bool = False) -> Any:
        """Normal random values: power, and so the clock, depends on the bits."""
        return self.torch.randn(*shape, device=self.device, dtype=self.kind(dtype), requires_grad=grad)

    def wait(self) -> None:
        """Until the GPU is idle."""
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def alone_us(self, call: Callable[[], Any], calls: int = 20) -> float:
        """Median GPU time of single calls, each with the GPU idle before it."""
        call()
        return statistics.median(self._events_us(call, 1) for _ in range(2 if self.tiny else calls))

    def sequence_us(self, call: Callable[[], Any], seconds: float = 2.0) -> float:
        """Mean time of a call within a queue that keeps the GPU busy for about `seconds`, after as long a warm-up."""
        if self.tiny:
            return self._events_us(call, 2) / 2
        count = max(10, int(seconds * 1e6 / max(1.0, self.alone_us(call, 5))))
        self._events_us(call, count)
        return self._events_us(call, count) / count

    def _events_us(self, call: Callable[[], Any], count: int) -> float:
        self.wait()
        if self.device == "cpu":
            begin = time.perf_counter()
            for _ in range(count):
                call()
            return 1e6 * (time.perf_counter() - begin)
        first, last = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(count):
            call()
        last.record()
        self.wait()
        return 1e3 * float(first.elapsed_time(last))


def products(bench: Bench) -> Iterator[Row]:
    """Matrix products in three layouts, alone and in a sequence; batched ones of eager attention."""
    shapes = _TINY_PRODUCTS if bench.tiny else _PRODUCTS
    for dtype in bench.dtypes:
        for m, n, k in shapes:
            a, b = bench.tensor(m, k, dtype=dtype), bench.tensor(n, k, dtype=dtype)
            across, down = bench.tensor(k, n, dtype=dtype), bench.tensor(k, m, dtype=dtype)
            for layout, left, right in (("TN", a, b.t()), ("NN", a, across), ("NT", down.t(), across)):
                call = partial(bench.torch.mm, left, right)
                for how, measured in (("alone", bench.alone_us), ("sequence", bench.sequence_us)):
                    if how == "sequence" and (2.0 * m * n * k < 2e11 and not bench.tiny):
                        continue
                    yield bench.gpu, dtype, m, n, k, 1, round(measured(call), 3), f"measure_gpu {layout} {how}"
        scores = [(64, seq, seq, dim) for seq in (512, 2048) for dim in (64, 128)]
        for batch, m, n, k in [(2, 16, 16, 8)] if bench.tiny else scores:
            x, y = bench.tensor(batch, m, k, dtype=dtype), bench.tensor(batch, k, n, dtype=dtype)
            time_us = bench.alone_us(partial(bench.torch.bmm, x, y))
            yield bench.gpu, dtype, m, n, k, batch, round(time_us, 3), "measure_gpu NN alone"


def rows(bench: Bench) -> Iterator[Row]:
    """Row-wise operators, cross-entropy forward and backward, optimizers."""
    functional = bench.torch.nn.functional
    for dtype in bench.dtypes:
        for count, cols in [(4, 64)] if bench.tiny else _ROWS:
            x, y, w = (bench.tensor(*shape, dtype=dtype) for shape in ((count, cols), (count, cols), (cols,)))
            calls: dict[str, Callable[[], Any]] = {
                "add": partial(bench.torch.add, x, y), "mul": partial(bench.torch.mul, x, y),
                "gelu": partial(functional.gelu, x), "tanh": partial(bench.torch.tanh, x),
                "softmax": partial(bench.torch.softmax, x, -1), "ln": partial(functional.layer_norm, x, (cols,), w, w),
                "dropout": partial(functional.dropout, x, 0.1),
            }
            for op, call in calls.items():
                yield bench.gpu, dtype, op, count, cols, round(bench.alone_us(call), 3), "measure_gpu alone"
        for vocab in (64,) if bench.tiny else _VOCABS:
            logits = bench.tensor(4 if bench.tiny else 4096, vocab, dtype=dtype, grad=True)
            target = bench.torch.zeros(len(logits), dtype=bench.torch.long, device=bench.device)

            def loss(logits: Any = logits, target: Any = target) -> Any:
                return functional.cross_entropy(logits.float(), target)

            def loss_and_gradient(loss: Callable[[], Any] = loss) -> None:
                loss().backward()

            forward, both = bench.alone_us(loss), bench.alone_us(loss_and_gradient)
            yield bench.gpu, dtype, "cross_entropy", len(logits), vocab, round(forward, 3), "measure_gpu alone"
            yield bench.gpu, dtype, "cross_entropy_both", len(logits), vocab, round(both, 3), "measure_gpu alone"
    yield from _optimizers(bench)


def spelled(bench: Bench) -> Iterator[Row]:
    """Norms and rotary positions as models spell them in operators: products with broadcast or strided operands, which
    ATen runs without wide loads (CUDALoops.cuh, launch_legacy_kernel), and casts: `scalar` kernels.

    Sources, as recalled: transformers modeling_llama.py (LlamaRMSNorm, apply_rotary_pos_emb), Meta's llama model.py
    (complex products), foundation-model-stack modules/positions.py (2 x 2 matrices)."""
    torch, dtype, head = bench.torch, bench.dtypes[0], 8 if bench.tiny else 128
    for tokens, heads in ((4, 2),) if bench.tiny else ((2048, 32), (8192, 32), (8192, 64)):
        x = bench.tensor(tokens, heads * head, dtype=dtype, grad=True)
        weight = bench.tensor(heads * head, dtype=dtype, grad=True)
        angle = bench.tensor(tokens, head // 2)
        cos, sin = (torch.cat((part, part), -1).to(bench.kind(dtype))[:, None] for part in (angle.cos(), angle.sin()))
        turns = torch.polar(torch.ones_like(angle), angle)[:, None]
        matrices = torch.stack((angle.cos(), -angle.sin(), angle.sin(), angle.cos()), -1).view(tokens, 1, -1, 2, 2)

        def norm(x: Any = x, weight: Any = weight) -> Any:
            wide = x.float()
            return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

        def halves(x: Any = x, cos: Any = cos, sin: Any = sin) -> Any:
            q = x.view(len(x), -1, head)
            early, late = q.chunk(2, -1)
            return q * cos + torch.cat((-late, early), -1) * sin

        def complex_products(x: Any = x, turns: Any = turns) -> Any:
            pairs = torch.view_as_complex(x.float().view(len(x), -1, head // 2, 2))
            return torch.view_as_real(pairs * turns).flatten(2).type_as(x)

        def in_matrices(x: Any = x, matrices: Any = matrices) -> Any:
            pairs = x.float().view(len(x), -1, head // 2, 1, 2)
            return matrices.mul(pairs).sum(-1).flatten(2).type_as(x)

        calls: dict[str, Callable[[], Any]] = {
            "cast": partial(torch.Tensor.float, x), "mul_row": partial(torch.mul, x, weight), "rmsnorm": norm,
            "rotary_halves": halves, "rotary_complex": complex_products, "rotary_matrices": in_matrices}
        for op, call in calls.items():
            gradient = torch.ones_like(call())

            def both(call: Callable[[], Any] = call, gradient: Any = gradient, inputs: Any = (x, weight)) -> None:
                torch.autograd.grad(call(), inputs, gradient, allow_unused=True)  # none is added to what is there

            for name, timed in ((op, call), (f"{op}_both", both)):
                yield bench.gpu, dtype, name, tokens, heads * head, round(bench.alone_us(timed), 3), "measure_gpu alone"


def _optimizers(bench: Bench) -> Iterator[Row]:
    ways: dict[str, dict[str, bool]] = {"adamw_loop": {"foreach": False}, "adamw_foreach": {"foreach": True}}
    if bench.device == "cuda":
        ways["adamw_fused"] = {"fused": True}
    for tensors, size in ((2, 16),) if bench.tiny else ((16, 2**20), (100, 2**22), (12, 2**26)):
        for op, options in ways.items():
            parameters = [bench.tensor(size, grad=True) for _ in range(tensors)]
            for parameter in parameters:
                parameter.grad = bench.torch.ones_like(parameter)
            optimizer = bench.torch.optim.AdamW(parameters, **options)
            time_us = bench.alone_us(optimizer.step, 5)
            yield bench.gpu, "fp32", op, tensors * size, 1, round(time_us, 3), "measure_gpu alone"


def attention(bench: Bench) -> Iterator[Row]:
    """Fused attention by head size, sequence, heads, causal or not; forward, and both directions."""
    dtype = bench.dtypes[0]
    shapes = [(1, 2, 16, 8)] if bench.tiny else [(b, h, s, d) for d in (64, 128, 256) for b, h, s in (
        (8, 16, 512), (4, 16, 1024), (2, 16, 2048), (1, 4, 4096), (1, 16, 4096), (1, 64, 4096), (1, 16, 16384))]
    for batch, heads, seq, dim in shapes:
        q, k, v = (bench.tensor(batch, heads, seq, dim, dtype=dtype, grad=True) for _ in range(3))
        for causal in (True, False):
            def forward(q: Any = q, k: Any = k, v: Any = v, causal: bool = causal) -> Any:
                return bench.torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
            def both(forward: Callable[[], Any] = forward) -> None:
                forward().sum().backward()
            for direction, call in (("forward", forward), ("both", both)):
                yield (bench.gpu, dtype, batch, heads, heads, seq, dim, int(causal), direction,
                       round(bench.alone_us(call), 3), "measure_gpu sdpa alone")


def host(bench: Bench) -> Iterator[Row]:
    """Host time of an operator: wall clock of a queue of tiny ones that the GPU outruns; a kernel's time in a graph."""
    x = bench.tensor(64, 64)
    parameter = bench.tensor(64, 64, grad=True)
    count = 5 if bench.tiny else 2000
    calls: dict[str, Callable[[], Any]] = {
        "add": lambda: x + x, "mm": lambda: bench.torch.mm(x, x), "softmax": lambda: x.softmax(-1),
        "layer_norm": lambda: bench.torch.layer_norm(x, (64,)),
        "linear": lambda: bench.torch.nn.functional.linear(x, parameter),
        "linear_forward_backward": lambda: bench.torch.nn.functional.linear(x, parameter).sum().backward(),
    }
    for name, call in calls.items():
        call()
        bench.wait()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        host_us = 1e6 * (time.perf_counter() - begin) / count
        yield bench.gpu, name, round(host_us, 3), "measure_gpu queue of tiny operators"
        bench.wait()
    if bench.device == "cuda":
        graph = bench.torch.cuda.CUDAGraph()
        with bench.torch.cuda.graph(graph):
            for _ in range(100):
                x.add_(1.0)
        kernel_us = bench.sequence_us(graph.replay, 0.2) / 100
        yield bench.gpu, "graph_kernel", round(kernel_us, 3), "measure_gpu 100 in a graph"


_HOLD = r"""
extern "C" __global__ void hold(const volatile int* stop, long long most) {
  long long begin = clock64();
  while (!*stop && clock64() - begin < most) {}
}
"""


def beside(bench: Bench) -> Iterator[Row]:
    """A product beside a kernel whose blocks hold k SMs each (all of an SM's shared memory), as channels do."""
    large = [(2048, 4096, 4096), (4096, 4096, 4096), (8192, 8192, 4096), (1408, 3072, 4096)]
    shapes = [(16, 16, 16)] if bench.tiny else large
    dtype = bench.dtypes[0]
    for held in (0,) if bench.device == "cpu" else (0, 2, 8, 16, 24, 32):
        for m, n, k in shapes:
            a, b = bench.tensor(m, k, dtype=dtype), bench.tensor(k, n, dtype=dtype)
            time_us = _beside_us(bench, held, partial(bench.torch.mm, a, b))
            yield bench.gpu, dtype, m, n, k, held, round(time_us, 3), "measure_gpu beside a spinning kernel"


def _beside_us(bench: Bench, held: int, call: Callable[[], Any]) -> float:
    if not held:
        return bench.alone_us(call)
    torch = bench.torch
    from torch.cuda import _compile_kernel  # PyTorch 2.9 and later

    stop = torch.zeros(1, dtype=torch.int32).pin_memory()
    shared = int(torch.cuda.get_device_properties(0).shared_memory_per_block_optin) - 1024
    kernel = _compile_kernel(_HOLD, "hold")
    kernel.set_shared_memory_config(shared)
    stream = torch.cuda.Stream()
    call()
    bench.wait()
    with torch.cuda.stream(stream):
        kernel(grid=(held, 1, 1), block=(32, 1, 1), args=[stop, 10**10], shared_mem=shared, stream=stream)
    time.sleep(0.01)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(10):
        call()
    last.record()
    last.synchronize()
    stop.fill_(1)
    bench.wait()
    return 1e2 * float(first.elapsed_time(last))


def memory(bench: Bench) -> Iterator[Row]:
    """Device memory outside PyTorch's allocator: context, libraries after a first product."""
    if bench.device == "cpu":
        yield bench.gpu, "context", 0, "measure_gpu"
        return
    torch = bench.torch
    for what in ("context", "context_and_cublas"):
        if what == "context_and_cublas":
            torch.mm(bench.tensor(64, 64, dtype="fp32"), bench.tensor(64, 64, dtype="fp32"))
        bench.wait()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        yield bench.gpu, what, total - free - torch.cuda.memory_reserved(), "measure_gpu mem_get_info less reserved"


def steps(bench: Bench) -> Iterator[Row]:
    """Training steps of small decoders (AdamW, autocast where there is half precision): time and peak memory."""
    torch = bench.torch
    for layers, hidden, heads, batch, seq in [(1, 16, 2, 2, 8)] if bench.tiny else _STEPS:
        vocab = 64 if bench.tiny else 50304
        dtype = bench.dtypes[0]
        block = torch.nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, 0.0, "gelu", batch_first=True,
                                                 norm_first=True)
        body = torch.nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(vocab, hidden), "body": body,
                                     "head": torch.nn.Linear(hidden, vocab, bias=False)}).to(bench.device)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        tokens = torch.randint(0, vocab, (batch, seq), device=bench.device)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(seq, device=bench.device)

        def step(model: Any = model, optimizer: Any = optimizer, tokens: Any = tokens, mask: Any = mask,
                 dtype: str = dtype) -> None:
            with torch.autocast(bench.device, dtype=bench.kind(dtype), enabled=dtype != "fp32"):
                logits = model["head"](model["body"](model["embed"](tokens), mask=mask, is_causal=True))
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        if bench.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        time_us = bench.sequence_us(step, 3.0)
        allocated = torch.cuda.max_memory_allocated() if bench.device == "cuda" else 0
        reserved = torch.cuda.max_memory_reserved() if bench.device == "cuda" else 0
        yield (bench.gpu, dtype, layers, hidden, heads, vocab, batch, seq, "adamw_foreach", round(time_us, 1),
               allocated, reserved, f"measure_gpu torch {torch.__version__}")


PARTS: dict[str, tuple[Sequence[str], Callable[[Bench], Iterable[Row]]]] = {
    "memory": (MEMORY_COLUMNS, memory), "gemm": (PRODUCT_COLUMNS, products), "rows": (ROW_WISE_COLUMNS, rows),
    "spelled": (ROW_WISE_COLUMNS, spelled), "attention": (ATTENTION_COLUMNS, attention), "host": (HOST_COLUMNS, host),
    "beside": (BESIDE_COLUMNS, beside), "steps": (STEP_COLUMNS, steps),
}


def measure(out: Path, parts: Sequence[str] = tuple(PARTS), dry_run: bool = False) -> list[Path]:
    """Measures the parts named and writes one CSV each into `out`; a row is on disk as soon as it is measured."""
    bench = Bench(dry_run)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for part in parts:
        columns, rows_of = PARTS[part]
        path = out / f"{part}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(columns)
            for row in rows_of(bench):
                writer.writerow(row)
                file.flush()
        written.append(path)
    return written


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("measured"))
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU: tests the script")
    given = parser.parse_args()
    for path in measure(given.out, given.parts, given.dry_run):
        print(path)


if __name__ == "__main__":
    main()
