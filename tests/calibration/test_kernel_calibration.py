"""Kernel figures fitted from tables: known figures come back, profiles work, CSVs are checked, the report orders."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sim.calibration import fit_kernels, measure_gpu
from sim.calibration.kernels import gemm_fit, row_fit
from sim.calibration.kernels.command import calibrate_gemm, kernel_command
from sim.calibration.kernels.optimise import minimise
from sim.calibration.kernels.tables import PRODUCT_COLUMNS, Group, groups
from sim.calibration.kernels_report import Line, contention, lines, markdown
from sim.catalog import table as catalogue
from sim.errors import UserError
from sim.hardware import Device, gpu
from sim.hardware.kernels.operators import product_kernel, row_wise_kernel
from sim.measured.rows import quantising_kernel, table_kernel
from sim.measured.timing import Timing, card, reported_s, source_of, timing

SHAPES = [(m, n, k) for m in (256, 640, 1024, 2048, 4096)
          for n, k in ((1024, 1024), (4096, 4096), (11008, 4096), (4096, 768))]


def table(tmp_path: Path, scale: float = 1.0, dtype: str = "bf16") -> Path:
    """A user's CSV of products whose times are this model's own, `scale` times as long."""
    device = Device(gpu("a100-80g-sxm"), sustained=False, gap_s=0.0)
    kernels = [product_kernel(m, n, k, 1, dtype) for m, n, k in SHAPES]
    path = tmp_path / "gemm.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(PRODUCT_COLUMNS)
        for (m, n, k), seconds in zip(SHAPES, device.times(kernels), strict=True):
            writer.writerow(("my card", dtype, m, n, k, 1, 1e6 * scale * seconds, "bench TN"))
    return path


def test_the_simplex_finds_a_minimum_inside_and_on_the_bounds() -> None:
    target = np.array([0.3, 2.0])
    found = minimise(lambda x: float(((x - target) ** 2).sum()), np.array([0.5, 0.5]), np.zeros(2), np.ones(2))
    np.testing.assert_allclose(found, [0.3, 1.0], atol=1e-3)


def test_calibrating_recovers_a_slower_card(tmp_path: Path) -> None:
    out = tmp_path / "mine.yaml"
    result = calibrate_gemm(table(tmp_path, 1.25), "A100", out)
    (fit,) = result.fits
    assert fit["rows"] == len(SHAPES) and fit["before"] > 0.15
    assert fit["median"] < 0.03 and fit["left_out"] < 0.08
    assert "20 products" in result.to_text() and "left out" in result.to_text()
    assert "the rows are of my card; the profile starts from a100-80g-sxm" in result.to_text()
    assert "calibrate: gemm.csv" in kernel_command(out, "gemm", "4096,4096,4096").to_text()
    assert "calibrate:" not in kernel_command(out, "gemm", "4096,4096,4096", "fp32").to_text()
    mine, theirs = gpu(str(out)), gpu("A100")
    assert mine.name == "a100-80g-sxm-calibrated" and mine.memory_bytes == theirs.memory_bytes
    kernel = product_kernel(3000, 5000, 4096, 1, "bf16")
    slower = Device(mine, sustained=False).times([kernel])[0] / Device(theirs, sustained=False).times([kernel])[0]
    assert slower == pytest.approx(1.25, rel=0.05)


@pytest.mark.parametrize(("text", "word"), [
    ("gpu,dtype,m,n,k\n", "batch"), (",".join(PRODUCT_COLUMNS) + "\nx,bf16,1,1,1,1,5,s\n", "at least 10"),
    (",".join(PRODUCT_COLUMNS) + "\n" + "x,bf16,1,1,one,1,5,s\n" * 10, "one"),
    (",".join(PRODUCT_COLUMNS) + "\n" + "x,bf17,1,1,1,1,5,s\n" * 10, "bf17"),
    (",".join(PRODUCT_COLUMNS) + "\n" + "x,bf16,1,1,1,1,0,s\n" * 10, "positive"),
    (",".join(PRODUCT_COLUMNS) + "\n", "no products"),
    (",".join(PRODUCT_COLUMNS) + "\n" + "x,bf16,4096,4096,4096,1,1,s\n" * 10, "137,439 TFLOP/s, and a100"),
])
def test_a_csv_that_cannot_be_fitted_says_why(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=word):
        calibrate_gemm(path, "A100")


def test_a_missing_csv_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        calibrate_gemm(tmp_path / "none.csv", "A100")


def test_the_kernel_command_answers_in_text_and_json() -> None:
    answer = kernel_command("H100", "gemm", "4096x4096x4096")
    assert answer.time_us < answer.sustained_us < answer.beside_24_channels_us
    assert answer.share_of_peak is not None and 0.6 < answer.share_of_peak < 0.85
    assert "TFLOP/s" in answer.to_text() and '"time_us"' in answer.to_json()
    assert kernel_command("A100", "softmax", (4096, 2048), "fp32").tflops is None
    assert kernel_command("B200", "attention", "1,32,8,4096,4096,128").confidence in ("high", "medium")
    other = kernel_command("A100", "attention", "1,32,8,4096,4096,128", kernel="flash3")
    assert "no figures of flash3 on this family, flash2 stands in" in other.to_text()
    assert kernel_command("RTX-4090", "gemm", "512,512,512").confidence == "low"
    measured, sibling = (kernel_command(name, "gemm", "512,512,512") for name in ("L40S", "L40"))
    assert "confidence high, measured on this GPU: fit_kernels: aic_bf16" in measured.to_text()
    assert sibling.confidence == "medium" and "measured on this GPU" not in sibling.to_text()
    assert kernel_command("A100", "optimizer", "1000000").gb_s > 500


@pytest.mark.parametrize(("op", "shape", "dtype", "word"), [
    ("gemm", "4096,4096", "bf16", "m,n,k"), ("gemm", "4096,0,1", "bf16", "positive"),
    ("gemm", "a,b,c", "bf16", "integers"),
    ("sofmax", "4,4", "bf16", "sofmax"), ("gemm", "4,4,4", "bf17", "dtype"), ("attention", "1,2", "bf16", "heads"),
])
def test_the_kernel_command_refuses_what_it_cannot_time(op: str, shape: str, dtype: str, word: str) -> None:
    with pytest.raises(UserError, match=word):
        kernel_command("A100", op, shape, dtype)


def test_shipped_tables_have_every_kind_and_their_own_cards() -> None:
    found = groups()
    assert {key[0] for key in fit_kernels.by_key(found)} == {
        "gemm", "memory", "sdp_fwd", "sdp_bwd", "sdp_decode"}
    assert all(len(group.kernels) == len(group.measured_s) == len(group.hosts) for group in found)
    assert card("vidur", "A100-80GB") == "a100-80g-pcie"
    files = {group.file for group in found}
    assert {"vidur_fp16_a100", "simumax_bf16", "deepbench_v100", "neusight_vec_fp32"} <= files


def test_an_accumulating_product_reads_and_writes_its_output() -> None:
    row = {"gpu": "x", "dtype": "bf16", "m": "8", "n": "16", "k": "4", "batch": "1", "time_us": "1",
           "source": "SimuMax NT acc=True out=fp32"}
    kernel = table_kernel(row)
    assert kernel.variant == "nt" and kernel.bytes == 2 * (8 * 4 + 4 * 16) + 8 * 8 * 16


def test_every_fifth_shape_is_left_out_with_all_its_rows() -> None:
    kernels = tuple(product_kernel(m, 64, 64, 1, "fp16") for m in (1, 2, 3, 4, 5, 6) for _ in range(2))
    group = Group("f", "l", "fp16", "gemm", gpu("A100"), Timing(0.0, 0.0, 0.0, 1.0, None), kernels,
                  np.ones(len(kernels)), ("gemm",) * len(kernels))
    assert fit_kernels._kept(group).tolist() == [2, 3, 4, 5, 6, 7, 8, 9]


def test_a_benchmark_adds_its_lead_and_never_reads_less_than_the_host_takes() -> None:
    method = timing("neusight", "A100-PCIe-40GB")
    read = method.read("add", np.array([1e-6, 1e-3]))
    assert read[0] == pytest.approx(26.5e-6)
    assert read[1] == pytest.approx(1e-3 + 0.45 * 26.5e-6)
    device = Device(gpu("a100-40g-pcie"), sustained=False)
    kernel = row_wise_kernel("add", 8192, 8192, "fp32")
    alone_s = device.times([kernel])[0]
    told = reported_s(gpu("a100-40g-pcie"), method, [kernel], ["add"])
    assert told[0] == pytest.approx(alone_s + 0.45 * 26.5e-6)


def test_a_benchmark_of_zeros_knows_no_power_limit() -> None:
    card_, large = gpu("v100-16g-sxm"), [product_kernel(8192, 8192, 8192, 1, "fp16")]
    zeros = timing("deepbench", "V100-SXM2 (DGX-1)")
    assert zeros.zeros == ("half",)
    flops_s = reported_s(card_, zeros, large, ["gemm"])[0]
    drawing_s = reported_s(card_, replace(zeros, zeros=()), large, ["gemm"])[0]
    assert drawing_s > 1.1 * flops_s
    single = [product_kernel(8192, 8192, 8192, 1, "fp32")]
    wide_s = [reported_s(card_, method, single, ["gemm"])[0] for method in (zeros, replace(zeros, zeros=()))]
    assert wide_s[0] == wide_s[1]


def test_operands_that_stay_in_the_cache_move_no_bytes() -> None:
    """Five copies of weights and output, and one input: 5 x (2 + 2) + 2 MiB of 1024 squared, beside 96 MiB of L2."""
    method, l2_bytes = timing("aic", "l40s"), gpu("l40s").l2_bytes
    small, beyond = (product_kernel(m, 1024, 1024, 1, "bf16") for m in (1024, 8192))
    assert method.found(small, l2_bytes).bytes == 0.0 and method.found(small, l2_bytes).flops == small.flops
    assert method.found(beyond, l2_bytes) == beyond
    assert method.found(small, 21 * 2**20).bytes == small.bytes and method.found(small, 22 * 2**20).bytes == 0.0
    assert timing("vidur", "H100-80GB").found(small, l2_bytes) == small


def test_boards_are_held_back_sooner_than_modules() -> None:
    assert timing("aic", "l40s").gap_s < timing("aic", "h100_sxm").gap_s == timing("aic", "b200_sxm").gap_s


def test_a_quantising_kernel_is_counted_where_a_row_holds_it() -> None:
    row = {"m": "128", "n": "64", "k": "256", "batch": "1", "dtype": "nvfp4", "source": "scaled-x with quantisation"}
    beside = quantising_kernel(row)
    assert beside is not None and beside.bytes == 128 * 256 * 2.5 and not beside.flops
    assert quantising_kernel({**row, "source": "scaled-x less quantisation"}) is None
    found = {group.file: group for group in groups() if group.gpu.name == "b200"}
    held, without = (gemm_fit.sample(found[file], None).beside_s for file in ("aic_nvfp4_trtllm", "aic_fp8_trtllm"))
    assert (held > 0).all() and not without.any()
    assert len(found["aic_nvfp4_trtllm"].pick(np.array([3, 5])).beside) == 2


def test_a_table_that_is_only_compared_gives_no_figure() -> None:
    found = groups()
    held_out = [group for group in found if fit_kernels.compared(group) and group.op == "gemm"]
    assert {group.gpu.name for group in held_out} == {
        "a100-80g-sxm", "h100-80g-sxm", "h200", "b200", "b300", "gb200", "gb300"}
    assert all(group not in members for members in fit_kernels.by_key(found).values() for group in held_out)
    (outcome,) = fit_kernels.assess(held_out[:1])
    assert outcome.compared and not len(outcome.shapes_out) and len(outcome.inside) == len(held_out[0].kernels)
    text = markdown(lines([outcome]))
    assert "0 of 0 aims" in text and "## Only compared" in text and "m < 128" in text.split("## Only compared")[1]


def test_every_benchmark_weighs_the_same_however_many_tables_it_has() -> None:
    """Three tables of one benchmark and one of another, faster one: the fit is not that of the three."""
    card_, kernels = gpu("A100"), tuple(product_kernel(m, 4096, 4096, 1, "bf16") for m in range(2048, 8192, 512))
    true_s = Device(card_, sustained=False, gap_s=0.0).times(kernels)

    def one(file: str, factor: float) -> Group:
        return Group(file, "a", "bf16", "gemm", card_, Timing(0.0, 0.0, 0.0, 1.0, None), kernels, factor * true_s,
                     ("gemm",) * len(kernels))

    slow = [gemm_fit.sample(one(f"one_{name}", 1.3)) for name in "abc"]
    three, both = (gemm_fit.fit(some, 40) for some in (slow, [*slow, gemm_fit.sample(one("two_a", 1.0))]))
    errors = [np.median(slow[0].predict(figures) / slow[0].group.measured_s) - 1 for figures in (three, both)]
    assert abs(errors[0]) < 0.03 and errors[1] < -0.05


def test_a_table_of_an_unknown_benchmark_is_read_as_a_loop() -> None:
    assert source_of("vidur_fp16_h100.csv") == "vidur" and source_of("mine.csv") == "loop"
    assert timing("loop", "H200").read("gemm", np.array([1e-6]))[0] == 1e-6
    assert card("loop", "NVIDIA H200") == "h200"


def test_shipped_figures_are_those_of_the_fit_within_the_aims() -> None:
    """The V100 half-precision fit is small enough to repeat; large tables are checked with the shipped figures."""
    found = {group.name: group for group in groups()}
    aims = {"vidur_fp16_a100 A100-80GB fp16 gemm": 0.05, "vidur_fp16_h100 H100-80GB fp16 gemm": 0.05,
            "deepbench_v100 V100-SXM2 (DGX-1) fp16 gemm": 0.06, "simumax_bf16 A100-PCIe-80GB bf16 gemm": 0.05,
            "aic_bf16_trtllm l40s bf16 gemm": 0.07, "aic_fp8_trtllm l40s fp8 gemm": 0.06,
            "aic_bf16_trtllm rtx_pro_6000_server bf16 gemm": 0.05,
            "aic_fp8_trtllm b200_sxm fp8 gemm": 0.06, "simumax_bf16 B200-SXM bf16 gemm": 0.07,
            "aic_fp8_trtllm h100_sxm fp8 gemm": 0.07}
    for name, aim in aims.items():
        sample = gemm_fit.sample(found[name], None)
        big = gemm_fit.large(sample.products)
        errors = np.abs(sample.predict({}) / found[name].measured_s - 1)[big]
        assert np.median(errors) <= aim, name


def test_contention_lies_in_the_published_ranges() -> None:
    """Whole runs lose 18.9% of their compute time on average, with collectives beside a part of it only: the kernels
    beside them lose more, and a second pass is the most they can lose."""
    single, mean = contention()
    assert 1.6 <= single <= 2.0
    assert 0.189 <= mean <= 1.0


def test_the_report_puts_the_worst_first_and_names_what_is_missed() -> None:
    kernels = tuple(product_kernel(m, 4096, 4096, 1, "fp16") for m in (1024, 2048, 4096, 8192))

    def outcome(name: str, error: float) -> fit_kernels.Outcome:
        method = Timing(0.0, 0.0, 0.0, 1.0, None)
        group = Group(name, "A100", "fp16", "gemm", gpu("A100"), method, kernels, np.ones(4), ("gemm",) * 4)
        return fit_kernels.Outcome(group, np.full(4, error), np.full(1, error), np.array([0]), np.full(4, error), "-")

    found: list[Line] = lines([outcome("good", 0.01), outcome("bad", 0.2)])
    assert [line.name.split()[0] for line in found] == ["bad", "bad", "good", "good"]
    text = markdown(found)
    assert "2 of 4 aims are met" in text and "* bad A100 fp16 gemm (large): 20.0%" in text


def test_measured_csvs_have_the_columns_that_calibrate_reads() -> None:
    assert measure_gpu.PARTS["gemm"][0] == PRODUCT_COLUMNS
    assert all(columns[0] == "gpu" and columns[-1] == "source" for columns, _ in measure_gpu.PARTS.values())


def test_measuring_writes_rows_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_gpu, "Bench", lambda dry_run: None)
    row = ("g", "bf16", 1, 2, 3, 1, 4.5, "s")
    monkeypatch.setitem(measure_gpu.PARTS, "gemm", (PRODUCT_COLUMNS, lambda bench: [row]))
    (path,) = measure_gpu.measure(tmp_path / "out", ("gemm",), dry_run=True)
    assert path.read_text(encoding="utf-8") == ",".join(PRODUCT_COLUMNS) + "\ng,bf16,1,2,3,1,4.5,s\n"


def test_without_pytorch_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # an import of it fails then
    with pytest.raises(SystemExit, match="PyTorch is not installed here"):
        measure_gpu.measure(tmp_path, dry_run=True)


def test_a_dry_run_measures_every_part_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for path in measure_gpu.measure(tmp_path, dry_run=True):
        with path.open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert rows and all(None not in row and None not in row.values() for row in rows), path.name


@pytest.mark.whole
def test_fitting_twice_gives_the_same_figures() -> None:
    """Nothing fitted before enters a fit: the shipped B200 figures, energy included, come out again."""
    keyed = fit_kernels.by_key(groups())
    key = ("gemm", "blackwell", "half")
    again = fit_kernels.document({key: fit_kernels.fit(key, keyed[key])}, keyed)["families"]["blackwell"]
    shipped = catalogue("hardware/kernels_fitted.yaml")["families"]["blackwell"]
    for name in gemm_fit.FIGURES:
        assert again["gemm"]["half"][name] == pytest.approx(shipped["gemm"]["half"][name], rel=0.02, abs=1e-8)
    assert again["power"]["pj_per_flop"]["half"] == pytest.approx(shipped["power"]["pj_per_flop"]["half"], rel=0.02)


@pytest.mark.parametrize(("left_out", "confidence"), [(0.04, "high"), (0.15, "medium"), (1.2, "low")])
def test_a_profile_is_as_sure_as_its_fit(left_out: float, confidence: str) -> None:
    from sim.calibration.kernels.command import Calibration, _confidence

    fit = {"dtype": "bf16", "rows": 20, "before": 0.3, "median": 0.03, "p90": 0.1, "left_out": left_out}
    assert _confidence([fit]) == confidence
    assert ("this fit is poor" in Calibration({"confidence": confidence}, (fit,)).to_text()) == (confidence == "low")


def test_streaming_is_fitted_only_to_tensors_far_beyond_the_cache() -> None:
    """H100's sums are 201 MB at most, four times its L2; A100's 805 MB are twenty times its own."""
    sums = {group.gpu.name: group for group in groups() if group.file.startswith("vidur_vec") and group.op == "add"}
    h100, a100 = (next(g for name, g in sums.items() if kind in name) for kind in ("h100", "a100"))
    assert "elementwise" not in row_fit.fit_memory([h100], rounds=1)
    assert "elementwise" in row_fit.fit_memory([a100], rounds=1)


def test_a_dtype_without_units_of_its_own_is_said_to_stand_in() -> None:
    assert "no arithmetic for fp8: these are the times of bf16 units" in kernel_command(
        "A100", "gemm", "4096,4096,4096", "fp8").to_text()
    assert "no arithmetic" not in kernel_command("h100", "gemm", "4096,4096,4096", "fp8").to_text()
