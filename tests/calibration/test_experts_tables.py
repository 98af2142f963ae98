"""Layers of experts and DeepEP's calls as measured, beside what is predicted for them: the tables that ship."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from sim.calibration.kernels.experts import TABLE, Layer, errors, grouped, layer_kernels, section
from sim.calibration.kernels.tables import read_csv
from sim.calibration.nccl import dispatch


def test_even_loads_ask_for_as_many_experts_as_there_are_places() -> None:
    """Mixtral's: four tokens have all eight; one token its two."""
    assert [Layer(tokens, 64, 128, 2, 8).asked for tokens in (1, 2, 3, 4, 100)] == [2, 4, 6, 8, 8]
    assert Layer(3, 64, 128, 8, 256).asked == 24


def test_a_layer_multiplies_what_its_tokens_are_for() -> None:
    layer = Layer(1024, 64, 128, 2, 8)
    flops = sum(k.flops for k in layer_kernels(layer, "bf16", permutes=True))
    assert flops == 2 * 1024 * 2 * 3 * 64 * 128
    names = [[k.variant for k in layer_kernels(layer, dtype, dtype == "fp8")] for dtype in ("bf16", "fp8")]
    assert names[0] == ["route", "tn", "act", "tn", "combine"]
    assert names[1] == ["route", "quantise", "dispatch", "tn", "act", "tn", "combine"]
    assert grouped(Layer(1024, 64, 128, 2, 8, even=False), 256, 64, "bf16").kernel == "uneven"
    assert grouped(layer, 256, 64, "int4").bytes < grouped(layer, 256, 64, "bf16").bytes


def test_grouped_products_of_cutlass_are_as_fast_as_dense_ones() -> None:
    """On Hopper, in 16 bits, by rows an expert: what the batched product is taken to be. Triton's are slower."""
    rows = [row for row in read_csv(TABLE, ("gpu",)) if row["gpu"] in ("h100_sxm", "h200_sxm")
            and row["dtype"] == "bf16" and row["loads"] == "even"]
    found: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for (_, engine, _, _), pairs in errors(rows).items():
        for share, error in pairs:
            found[engine, share >= 256].append(error)
    assert abs(np.median(found["trtllm", False])) < 0.08 and abs(np.median(found["trtllm", True])) < 0.08
    assert np.median(found["sglang", True]) < -0.4  # not tuned for the shapes


@pytest.mark.parametrize(("nodes", "tokens", "both_us"), [(1, 4096, 1464), (4, 16384, 20836)])
def test_deepeps_calls_are_predicted(nodes: int, tokens: int, both_us: float) -> None:
    found = sum(dispatch.predicted_us(nodes, tokens, 7168, 8, width) for width in (1 + 4 / 128, 2.0))
    assert found == pytest.approx(both_us, rel=0.06)


def test_both_reports_have_their_part() -> None:
    assert sum(line.startswith("| 4 |") for line in dispatch.section()) == 10
    assert any(line.startswith("| h100_sxm trtllm bf16 even |") for line in section())
