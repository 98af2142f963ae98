"""`python -m sim.calibration.kernels_report`: reports/kernels.md and its pictures, worst groups first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sim.calibration.fit_kernels import Outcome, assess
from sim.calibration.kernels import eager, experts
from sim.calibration.kernels.tables import groups
from sim.hardware import Device, gpu
from sim.hardware.kernels.operators import attention_kernel, product_kernel, row_wise_kernel

REPORTS = Path(__file__).resolve().parents[2] / "reports"
_COMMAND = "python -m sim.calibration.kernels_report"
Mask = NDArray[np.bool_]
_WITH_FEW_ROWS = "aic"  # benchmark whose tables hold products of few rows too
_WIRE_BPS = 0.7e12  # device memory an all-gather at 350 GB/s takes: every byte received is written, every one sent read
_WEAK_SPOTS = """## Weak spots

* Which kernel a library picks is not known: products of equal work differ by 10-15% in ways no tile model gives (A100
  n 3072 against 3584 at k 4096; H100 k 4096 and 8192 against 5504 and 7168).
* The T4's tables disagree with themselves: shapes within 12% of each other in every dimension differ by 9.9% in rate
  (`linear-train`, median; A100 3.9%, V100 3.3%), and `linear-test` runs 1.21 times as fast as `linear-train` at like
  shapes (A100 1.00, V100 1.10): a card on its 70 W limit in two states. No model of shapes can come below that.
* Every fifth shape of vidur's rope table is its narrowest column (512 queries, 3-18 us at 1 us resolution), which is
  what *left-out shapes* then shows; the other columns are within 2-8%.
* B200: SimuMax's machine and AIConfigurator's four settle at different rates: bf16 products of 1-10 ms at 1050-1150
  TFLOP/s there (and as little from 0.1 ms on, once it is hot), at 1400-1580 here, 1260-1330 in loops of ten seconds,
  random operands both. Its family's figures in 16 bits are SimuMax's, whose training steps agree with them, so that
  AIConfigurator's loops come out slow, GB300's most. Short loops and graphs do not explain all of it; chips and cooling
  may.
* H100 and H200 in AIConfigurator's loops are 5-7% faster than vidur's figures give (large products; libraries of
  2026); fitted together vidur's large products miss their aim (5.1%) and steps stay as they are. A100: 6 to 13%
  faster; fitted together, steps of 2023 come out 1-2% too fast (LLM Foundry v2 1.8 to 3.0%, zero-bubble 4.1 to 5.7%).
* L40S: held back by 350 W even in short loops, so its figures do not carry over to GeForce cards, which stay judged.
* 8 bits with scales of blocks (DeepSeek's, 1 x 128 by 128 x 128) take 1.3 times as long as predicted for scales of
  tensors on H100 and H200 (DeepGEMM), 1.5-1.65 times on Blackwell with the library's own quantisation; SGLang's scales
  of tokens (CUTLASS) 1.1-1.2 times on Hopper, 1.2-1.3 on Blackwell. Not modelled, and no tables of it are kept.
* fp4: TensorRT-LLM's and SGLang's products differ by 20-30%, by 40% in single shapes; quantising kernels are counted
  by their bytes, so few rows come out up to 40% fast. B300 and GB300 gain little from half as much more of it.
* Backward norms, column sums, cross-entropy, optimizers and SM contention have no table here: judgement.
* The kernels behind names of the vidur tables are taken to be vLLM's of 2023; their steps by waves of 2 or 4 blocks an
  SM and by rounds of 1024 threads agree, instructions per element are fitted.
* A100's batched fp32 products step by whole 128 rows and 128 of K in the tables; why the library has but that kernel is
  not known, nor whether other releases do. Batches of 2 to 4 take twice as long as predicted there.
* fp32 softmax of 1600, 3072 and 10240 columns on A100 is 14-19% slower than its blocks' rounds explain.
* Attention as engines call it (pages, ragged batches) may start its blocks slower than training's kernels do: of an
  A5000's FlashAttention-2 as much is published at 512 tokens as at 8192.
* One query on Blackwell: a block of heads of 256 starts half as fast as one of 128; one figure stands for both.
* Which order cuDNN deals its backward blocks in on Blackwell is inferred from 19 rows; sequences of 32k and 131k there
  run 14-31% faster than predicted.
"""


@dataclass(frozen=True)
class Line:
    """Errors of one subset of one group."""

    name: str
    subset: str
    rows: int
    aim: float | None
    median: float
    p90: float
    bias: float
    shapes_out: float
    gpu_out: float
    stand_in: str
    compared: bool = False


def _subsets(outcome: Outcome) -> list[tuple[str, Mask, float | None]]:
    """Subsets the aims are stated for: large products, all with m >= 128; row-wise and attention as a whole."""
    group = outcome.group
    if group.op != "gemm":
        return [("all", np.ones(len(group.kernels), dtype=bool), 0.08)]
    shapes = np.array([kernel.shape for kernel in group.kernels], dtype=np.float64)
    flops = 2.0 * shapes.prod(axis=1)
    big = (flops >= 20e9) & (shapes[:, 1:].min(axis=1) >= 512)
    aim = {"volta": 0.06, "ga100": 0.05, "hopper": 0.05}.get(group.gpu.kernels)
    rows = shapes[:, 1]
    if not group.file.startswith(_WITH_FEW_ROWS):
        return [("large", big, aim), ("m >= 128", rows >= 128, 0.10)]
    named = [("large", big, aim), ("m >= 128", rows >= 128, 0.10), ("m < 128", rows < 128, None)]
    return [(name, mask, None) for name, mask, _ in named] if outcome.compared else named


def lines(outcomes: Sequence[Outcome]) -> list[Line]:
    """One line per group and subset, worst first by the larger of in-sample and left-out error over its aim; of those
    only compared by their error."""
    found = []
    for outcome in outcomes:
        for subset, mask, aim in _subsets(outcome):
            if not mask.any():
                continue
            inside = outcome.inside[mask]
            out = outcome.shapes_out[mask[outcome.out_rows]] if len(outcome.out_rows) else np.empty(0)
            found.append(Line(outcome.group.name, subset, int(mask.sum()), aim, _median(inside),
                              float(np.percentile(np.abs(inside), 90)), float(np.median(inside)), _median(out),
                              _median(outcome.gpu_out[mask]) if len(outcome.gpu_out) else float("nan"),
                              outcome.stand_in, outcome.compared))
    return sorted(found, key=lambda line: -np.nanmax([line.median, line.shapes_out]) / (line.aim or 0.10))


def _median(errors: NDArray[np.float64]) -> float:
    return float(np.median(np.abs(errors))) if len(errors) else float("nan")


def markdown(found: Sequence[Line]) -> str:
    """The report."""
    aimed = [line for line in found if line.aim is not None]
    kept = [line for line in aimed if line.median <= (line.aim or 0) and not line.shapes_out > (line.aim or 0)]
    missed = [line for line in aimed if line not in kept]
    text = [
        "# Kernel times: predicted against measured", "",
        f"Written by `{_COMMAND}`; the figures behind it by `python -m sim.calibration.fit_kernels`. Errors are",
        "|predicted / measured - 1|. *Left-out shapes*: fitted without every fifth shape, error on those.",
        "*Left-out GPU*: figures fitted on the other GPUs of the family; where there is none, those of the generation",
        "before that has memory of the same kind (stacked or graphics), which is what a new generation would get.",
        "The tables under `sim/calibration/data` are thinned copies; times include the benchmark's own host part as",
        "`sim/measured/timings.yaml` states it. No training step enters any of it.", "",
        f"{len(kept)} of {len(aimed)} aims are met, inside and on left-out shapes. Missed:", "",
        *(f"* {line.name} ({line.subset}): {_percent(line.median)} inside, {_percent(line.shapes_out)} left out, aim "
          f"{_percent(line.aim or 0)}" for line in missed), "",
        "| table, GPU, dtype, operator | subset | rows | aim | median | 90% | bias | left-out shapes | left-out GPU "
        "| from |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for line in (line for line in found if not line.compared):
        aim = "" if line.aim is None else _percent(line.aim)
        errors = " | ".join((_percent(line.median), _percent(line.p90), f"{100 * line.bias:+.1f}%",
                             _percent(line.shapes_out), _percent(line.gpu_out)))
        text.append(f"| {line.name} | {line.subset} | {line.rows} | {aim} | {errors} | {line.stand_in} |")
    text += ["", *_compared([line for line in found if line.compared]), *eager.section(), *experts.section(),
             "## Pictures", "", "![matrix products](kernels_products.png)", "",
             "![residuals of matrix products by work](kernels_residuals.png)", "",
             "![residuals of AIConfigurator's linear layers by work](kernels_aic.png)", "",
             "![row-wise operators](kernels_rows.png)", "", "![fused attention](kernels_attention.png)", "",
             *_contention(), _WEAK_SPOTS]
    return "\n".join(text)


def _compared(found: Sequence[Line]) -> list[str]:
    """Tables that gave no figure."""
    if not found:
        return []
    text = ["## Only compared", "",
            "Tables of newer libraries on GPUs whose figures rest on others: nothing was fitted to them.", "",
            "| table, GPU, dtype, operator | subset | rows | median | 90% | bias |", "|---|---|---|---|---|---|"]
    for line in found:
        text.append(f"| {line.name} | {line.subset} | {line.rows} | {_percent(line.median)} | {_percent(line.p90)} | "
                    f"{100 * line.bias:+.1f}% |")
    return [*text, ""]


def _contention() -> list[str]:
    """Products beside collectives, against two published figures that set nothing."""
    single, mean = contention()
    return ["## Beside a collective (24 channels, H100)", "",
            f"A product of 132 tiles on 132 SMs: {single:.2f} times slower (published: 1.6-2.0).",
            "Mean slowdown of the kernels of three decoder blocks (4096, 5120 and 8192 wide), both directions, as long",
            f"as the collective lasts: {100 * mean:.0f}%. Published for whole runs (arXiv 2507.03114, FSDP on four",
            "A100, H100 and others): compute takes 18.9% longer on average, 40% at most, over steps that collectives",
            "cover in part; so kernels beside them slow down by more.", ""]


def contention() -> tuple[float, float]:
    """Slowdown of a product of 132 tiles beside 24 channels; mean slowdown less 1 of typical blocks' kernels."""
    device = Device(gpu("h100-80g-sxm"))
    single = [product_kernel(1408, 3072, 4096, 1, "bf16")]  # 11 x 12 tiles of 128 x 256
    slowdowns = []
    for hidden in (4096, 5120, 8192):
        kernels = [row_wise_kernel("layernorm", 4096, hidden, "bf16"), row_wise_kernel("add", 4096, hidden, "bf16"),
                   row_wise_kernel("gelu", 4096, 4 * hidden, "bf16"),
                   attention_kernel(1, hidden // 128, hidden // 128, 4096, 4096, 128, "bf16"),
                   attention_kernel(1, hidden // 128, hidden // 128, 4096, 4096, 128, "bf16", backward=True)]
        for n, k in ((3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)):
            kernels += [product_kernel(4096, n, k, 1, "bf16"), product_kernel(4096, k, n, 1, "bf16", "nn"),
                        product_kernel(n, k, 4096, 1, "bf16", "nt")]
        slowdowns.append(float(device.times(kernels, 24, _WIRE_BPS).sum() / device.times(kernels).sum()) - 1.0)
    ratio = float(device.times(single, 24, _WIRE_BPS)[0] / device.times(single)[0])
    return ratio, float(np.mean(slowdowns))


def _percent(value: float) -> str:
    return "" if np.isnan(value) else f"{100 * value:.1f}%"


def pictures(outcomes: Sequence[Outcome], folder: Path = REPORTS) -> None:
    """Measured against predicted on logarithmic axes, by kind; residuals of products by their work."""
    import matplotlib

    matplotlib.use("Agg")
    many = [outcome for outcome in outcomes if outcome.group.file.startswith(_WITH_FEW_ROWS)
            and outcome.group.op == "gemm"]
    chosen: list[tuple[str, Callable[[Outcome], bool]]] = [
        ("kernels_products.png", lambda outcome: outcome.group.op == "gemm" and outcome not in many),
        ("kernels_rows.png", lambda outcome: "_vec_" in outcome.group.file),
        ("kernels_attention.png", lambda outcome: outcome.group.op.startswith("sdp")),
    ]
    for name, belongs in chosen:
        _against([outcome for outcome in outcomes if belongs(outcome)], folder / name)
    _residuals([outcome for outcome in outcomes if outcome.group.op == "gemm" and outcome not in many],
               folder / "kernels_residuals.png")
    if many:
        _residuals(many, folder / "kernels_aic.png")


def _against(outcomes: Sequence[Outcome], path: Path) -> None:
    import matplotlib.pyplot as plt

    panels: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        panels.setdefault(f"{outcome.group.label} {outcome.group.dtype} ({outcome.group.file.split('_')[0]})",
                          []).append(outcome)
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.6 * columns, 4.2 * rows), squeeze=False)
    for axis in axes.flat[len(panels):]:
        axis.axis("off")
    for axis, (title, members) in zip(axes.flat, panels.items(), strict=False):
        spans = []
        for member in members:
            measured = 1e6 * member.group.measured_s
            axis.plot(measured, measured * (1 + member.inside), ".", markersize=2.5, alpha=0.5, label=member.group.op)
            spans += [measured.min(), measured.max()]
        ends = np.array([min(spans), max(spans)])
        axis.plot(ends, ends, "k-", linewidth=0.8)
        axis.plot(ends, 1.1 * ends, "k:", ends, ends / 1.1, "k:", linewidth=0.6)
        axis.set(xscale="log", yscale="log", xlabel="measured, us", ylabel="predicted, us", title=title)
        if len(members) > 1:
            axis.legend(fontsize=6, markerscale=3, ncol=2)
    figure.suptitle("Predicted against measured; dotted: 10%")
    _save(figure, path)


def _residuals(outcomes: Sequence[Outcome], path: Path) -> None:
    import matplotlib.pyplot as plt

    columns = 3
    rows = -(-len(outcomes) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.6 * columns, 3.2 * rows), squeeze=False, sharey=True)
    for axis in axes.flat[len(outcomes):]:
        axis.axis("off")
    for axis, outcome in zip(axes.flat, outcomes, strict=False):
        work = np.array([kernel.flops for kernel in outcome.group.kernels])
        axis.plot(work, 100 * outcome.inside, ".", markersize=2, alpha=0.4)
        edges = np.geomspace(work.min(), work.max() * 1.001, 13)
        places = np.digitize(work, edges)
        filled = [place for place in range(1, 14) if (places == place).sum() >= 3]
        axis.plot([np.median(work[places == place]) for place in filled],
                  [100 * np.median(outcome.inside[places == place]) for place in filled], "r.-", linewidth=1)
        axis.axhline(0, color="k", linewidth=0.8)
        axis.set(xscale="log", ylim=(-60, 60), xlabel="FLOP", ylabel="predicted / measured - 1, %",
                 title=f"{outcome.group.label} {outcome.group.dtype} ({_origin(outcome.group.file)})")
    figure.suptitle("Residuals of matrix products by work; red: median")
    _save(figure, path)


def _origin(file: str) -> str:
    """Who made a table, for titles: the benchmark, of AIConfigurator's the library too."""
    parts = file.split("_")
    return f"{parts[0]} {parts[-1]}" if parts[0] == _WITH_FEW_ROWS else parts[0]


def _save(figure: object, path: Path) -> None:
    from matplotlib.figure import Figure

    assert isinstance(figure, Figure)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(path, dpi=70)


def main() -> None:
    """Writes the report and its pictures."""
    outcomes = assess(groups(), print)
    REPORTS.mkdir(exist_ok=True)
    (REPORTS / "kernels.md").write_text(markdown(lines(outcomes)), encoding="utf-8")
    pictures(outcomes)
    print(f"wrote {REPORTS / 'kernels.md'}")


if __name__ == "__main__":
    main()
