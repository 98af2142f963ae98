"""Operators of eager PyTorch as Liger's benchmark timed them, beside the kernels that a model's operators have."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from sim.calibration.kernels.eager import COLUMNS, TABLE, errors, kernels, section
from sim.calibration.kernels.tables import read_csv

ROWS = read_csv(TABLE, COLUMNS)


def row(op: str, direction: str = "forward", **said: str) -> dict[str, str]:
    return next(one for one in ROWS if one["op"] == op and one["direction"] == direction
                and all(one[name] == value for name, value in said.items()))


def test_a_row_is_what_a_model_runs() -> None:
    """Of 1,024 tokens with 32 query and 8 key heads of 256: every element by 4.5 unvectorised kernels."""
    (spelled,) = kernels(row("rotary", rows="1024", cols="8192"))
    assert (spelled.kernel, spelled.shape, spelled.launches) == ("scalar", (round(4.5 * 1024 * 40 * 256),), 10)
    assert [k.kernel for k in kernels(row("gate", rows="8192", cols="1024"))] == ["scalar"]
    softmax, picked = kernels(row("cross_entropy", gpu="a100-80g-sxm", cols="4096"))
    assert (softmax.op, softmax.shape, picked.kernel) == ("softmax", (16384, 4096), "one_warp")


def test_what_a_benchmark_adds_is_counted() -> None:
    plain, added = (sum(k.bytes for k in kernels(row("cross_entropy", "both", cols="4096") | {"also": also}))
                    for also in ("", "accumulated"))
    assert added - plain == 12 * 16384 * 4096
    plain, added = (sum(k.bytes for k in kernels(row("gate", "both", cols="4096") | {"also": also}))
                    for also in ("", "summed"))
    assert added - plain == 2 * 2 * 8192 * 4096


@pytest.mark.parametrize(("op", "least", "most"), [
    ("rotary", -0.05, 0.14), ("gate", -0.11, 0.08), ("cross_entropy", -0.05, 0.07), ("vocab_parallel", -0.05, 0.0),
    ("rms_norm_spelled", -0.2, 0.0), ("embedding", -0.02, 0.02), ("rms_norm", -0.13, 0.0), ("softmax", -0.04, 0.24),
    ("rms_norm_liger", -0.16, 0.01), ("rms_norm_rows", 0.0, 0.17), ("rotary_liger", -0.08, 0.0),
    ("gate_liger", -0.09, 0.01)])
def test_each_operator_is_near_what_was_measured(op: str, least: float, most: float) -> None:
    """Medians by GPU and direction. The spelled-out norm's weight was fp32 there, whose products move more."""
    medians = [float(np.median(found)) for (name, *_), found in errors(ROWS).items() if name == op]
    assert medians and least <= min(medians) and max(medians) <= most


def test_liger_s_norm_runs_backward_by_one_program_an_sm() -> None:
    """Since 0.4; before, a kernel wrote a gradient of the weight for every row, which a second one summed."""
    forward, backward, *_ = kernels(row("rms_norm_liger", "both"))
    assert (forward.kernel, backward.kernel, backward.launches) == ("persistent", "per_sm", 3)
    assert [k.variant for k in kernels(row("rms_norm_rows", "backward"))] == ["inputs", "weights"]


def test_unvectorised_kernels_go_by_sms_and_clock() -> None:
    """Rotary positions, elements a second over SMs and clock: alike on A100 and B200 of four times its bandwidth."""
    rates = defaultdict(list)
    for one in ROWS:
        if one["op"] == "rotary" and one["direction"] == "forward" and int(one["rows"]) >= 4096:
            (kernel,) = kernels(one)
            speed = {"a100-80g-sxm": 108 * 1.41e9, "b200": 148 * 1.965e9}[one["gpu"]]
            rates[one["gpu"]].append(kernel.shape[0] / (float(one["time_us"]) * 1e-6) / speed)
    a100, b200 = (float(np.median(rates[name])) for name in ("a100-80g-sxm", "b200"))
    assert a100 == pytest.approx(b200, rel=0.2)


def test_the_report_has_its_part() -> None:
    assert sum(line.startswith("| rotary |") for line in section()) == 4
