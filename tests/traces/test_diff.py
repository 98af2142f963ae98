"""A trace that shows what is predicted shows no gap; what is changed in it is found where it was changed."""

from __future__ import annotations

import copy
import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from kineto_of import NAMES, SMALL, kineto_of

import sim
from sim.errors import UserError
from sim.report.result import Result
from sim.report.text import console
from sim.scenario import resolve
from sim.traces.diff import Difference, compare
from sim.traces.kineto import Ran, Trace, read_trace
from sim.traces.steps import Shape, measure
from sim.traces.text import products_csv, render


def held(trace: dict[str, Any], result: Result, folder: Path, steps: int | None = None) -> Difference:
    (folder / "t.json").write_text(json.dumps(trace))
    return compare(read_trace(str(folder / "t.json")), result, steps)


@pytest.fixture(scope="module")
def traced(result: Result) -> dict[str, Any]:
    return kineto_of(result)


def test_what_is_predicted_has_no_gap(traced: dict[str, Any], result: Result, tmp_path: Path) -> None:
    found = held(traced, result, tmp_path)
    assert found.error == pytest.approx(0.0, abs=1e-6)
    assert found.measured.numbers == (3, 4)
    assert sum(found.measured.terms.values()) == pytest.approx(result.step_time_s, rel=1e-6)
    for term in found.terms:
        assert term.gap_s == pytest.approx(0.0, abs=2e-3 * result.step_time_s), term
    for shape, measured, predicted in found.products():
        assert measured.count == pytest.approx(predicted.count), shape
    for kind, measured, predicted in found.collectives():
        assert (measured.count, measured.size_bytes) == pytest.approx((predicted.count, predicted.size_bytes)), kind
    assert found.measured.kernels == pytest.approx(found.predicted.kernels) and found.notes == ()


@pytest.mark.parametrize("scenario", [
    {"training.attention": "eager"}, {"parallel": {"strategy": "ddp"}}, {"parallel": {"strategy": "zero2"},
     "software": {"framework": "deepspeed"}}, {"parallel": {"strategy": "zero1", "tensor": 4}, "software": {
         "framework": "megatron"}, "training.precision": "megatron-bf16"},
])
def test_other_strategies_have_none_either(scenario: dict[str, Any], tmp_path: Path) -> None:
    predicted = sim.run(resolve(SMALL, sets=scenario))
    found = held(kineto_of(predicted), predicted, tmp_path)
    for term in found.terms:
        assert term.gap_s == pytest.approx(0.0, abs=0.02 * predicted.step_time_s), term


def test_slower_products_are_found(result: Result, tmp_path: Path) -> None:
    """Every product 10% longer, on the compute stream alone, so that the step is longer by that."""
    slow = kineto_of(result)
    shift = 0.0
    for event in sorted((e for e in slow["traceEvents"]), key=lambda e: e["ts"] + 5000 * (e["cat"] != "kernel")):
        event["ts"] += shift
        if event["name"] == NAMES["gemm"]:
            shift += 0.1 * event["dur"]
            event["dur"] *= 1.1
    found = held(slow, result, tmp_path)
    largest = found.terms[0]
    gemm = found.predicted.terms["gemm"]
    assert largest.name == "gemm" and largest.gap_s == pytest.approx(0.1 * gemm, rel=0.1)
    text = shown(found)
    assert "matrix products: those of equal shape take" in text and "longer each than predicted" in text


def shown(found: Difference) -> str:
    out = io.StringIO()
    render(found, console(out, 110))
    return out.getvalue()


def test_without_shapes_products_are_one_sum(result: Result, tmp_path: Path) -> None:
    found = held(kineto_of(result, shapes=False), result, tmp_path)
    assert found.products() == [] and "record_shapes=True" in " ".join(found.notes)
    assert products_csv(found).count("\n") == 1


def test_without_marks_the_number_of_steps_has_to_be_said(result: Result, tmp_path: Path) -> None:
    unmarked = kineto_of(result, steps=2, marks=False)
    with pytest.raises(UserError, match="--steps N"):
        held(unmarked, result, tmp_path)
    found = held(unmarked, result, tmp_path, steps=2)
    assert found.error == pytest.approx(0.0, abs=0.02)


def test_one_step_is_measured_to_its_end(result: Result, tmp_path: Path) -> None:
    found = held(kineto_of(result, steps=1), result, tmp_path)
    assert found.measured.numbers == (3,) and found.error == pytest.approx(0.0, abs=0.02)
    assert any("one step" in note for note in found.notes)


def test_what_is_not_alike_is_said(traced: dict[str, Any], result: Result, tmp_path: Path) -> None:
    other = copy.deepcopy(traced)
    other["distributedInfo"]["world_size"] = 64
    other["deviceProperties"][0]["name"] = "NVIDIA H100 80GB HBM3"
    notes = " ".join(held(other, result, tmp_path).notes)
    assert "a job of 64 ranks, the scenario of 16" in notes and "NVIDIA H100 80GB HBM3" in notes


def test_products_are_written_as_calibrate_takes_them(traced: dict[str, Any], result: Result, tmp_path: Path) -> None:
    rows = list(csv.DictReader(products_csv(held(traced, result, tmp_path)).splitlines()))
    assert rows and set(rows[0]) == {"gpu", "dtype", "m", "n", "k", "batch", "time_us", "source"}
    assert all(float(row["time_us"]) > 0 and row["dtype"] == "bf16" for row in rows)


def test_json_has_every_table(traced: dict[str, Any], result: Result, tmp_path: Path) -> None:
    data = held(traced, result, tmp_path).to_json()
    assert set(data) == {"step_time_s", "terms", "products", "collectives", "kernels", "notes"}
    json.dumps(data, allow_nan=False)


# ------------------------------------------------------------------------------------------------- a step by hand
def ran(name: str, start: float, end: float, **more: Any) -> Ran:
    return Ran(name, more.pop("copy", False), 7, start, end, more.pop("launched", start - 1.0), **more)


def test_terms_of_a_step_by_hand() -> None:
    """0-10 product, 5-20 gather beside it, 15-25 add, 22-30 gather, 28-40 copy, 40-50 nothing: 50 us in all."""
    things = (ran("gemm", 0, 10), ran("nccl AllGather", 5, 20), ran("add", 15, 25), ran("nccl AllGather", 22, 30),
              ran("Memcpy", 28, 40, copy=True))
    later = tuple(ran(one.name, one.start_us + 50, one.end_us + 50, copy=one.copy) for one in things)
    step = measure(Trace("t", "", 0, 1, (*things, *later), ((1, -5.0, 45.0), (2, 45.0, 95.0))))
    assert step.times_s == pytest.approx((50e-6,))
    assert step.terms == pytest.approx({"gemm": 10e-6, "memory_bound": 10e-6, "exposed all_gather": 10e-6,
                                        "copy": 10e-6, "idle": 10e-6})
    assert step.collectives["all_gather"].count == 2 and step.kernels == 2


def test_kernels_side_by_side_count_once() -> None:
    things = (ran("gemm", 0, 10), ran("add", 4, 8), ran("add", 8, 12), ran("add", 1, 3))
    step = measure(Trace("t", "", 0, 1, things, ()), steps=1)
    assert step.terms == pytest.approx({"gemm": 10e-6, "memory_bound": 2e-6, "idle": 0.0})


def test_a_product_and_its_transposed_are_one_shape() -> None:
    mm = {"op": "aten::mm", "dtype": "c10::Half"}
    things = (ran("gemm", 0, 1, shapes=((8, 4), (4, 16)), **mm), ran("gemm", 2, 3, shapes=((16, 4), (4, 8)), **mm),
              ran("splitKreduce", 3, 4, shapes=((16, 4), (4, 8)), **mm),
              ran("gemm", 5, 6, op="aten::addmm", dtype="float", shapes=((16,), (8, 4), (4, 16))),
              ran("gemm", 7, 8, shapes=((8, 4), (5, 16)), **mm), ran("gemm", 9, 10, op="te::gemm"))
    step = measure(Trace("t", "", 0, 1, things, ()), steps=1)
    half = step.products[Shape(1, 8, 16, 4, "fp16")]
    assert (half.count, half.seconds) == (2, pytest.approx(3e-6))
    assert step.products[Shape(1, 8, 16, 4, "fp32")].count == 1 and step.unshaped_s == pytest.approx(2e-6)
    assert Shape.of(2, 16, 8, 4, "fp16") == Shape(2, 8, 16, 4, "fp16") and Shape(1, 2, 3, 4).flops == 48
