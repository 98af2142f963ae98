"""A trace that shows what is predicted shows no gap; what is changed in it is found where it was changed."""

from __future__ import annotations

import copy
import csv
import io
import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from kineto_of import NAMES, SMALL, kineto_of

import sim
from sim.errors import UserError
from sim.report.result import Result
from sim.report.terminal.render import console
from sim.scenario import resolve
from sim.traces.diff import Difference, compare
from sim.traces.foreseen import class_of_rank, foresee
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
    assert len(found.measured.times_s) == 2
    assert sum(found.measured.terms.values()) == pytest.approx(result.step_time_s, rel=1e-6)
    for term in found.terms:
        assert term.gap_s == pytest.approx(0.0, abs=2e-3 * result.step_time_s), term
    for shape, measured, predicted in found.products():
        assert measured.count == pytest.approx(predicted.count), shape
    for kind, measured, predicted in found.collectives():
        assert (measured.count, measured.size_bytes) == pytest.approx((predicted.count, predicted.size_bytes)), kind
    assert 0.8 * found.predicted.kernels < found.measured.kernels <= found.predicted.kernels  # chains are drawn as one
    assert found.notes == ()


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
    assert len(found.measured.times_s) == 1 and found.error == pytest.approx(0.0, abs=0.02)
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
    return Ran(name, more.pop("copy", False), start, end, more.pop("launched", start - 1.0), **more)


def test_terms_of_a_step_by_hand() -> None:
    """0-10 product, 5-20 gather beside it, 15-25 add, 22-30 gather, 28-40 copy, 40-50 nothing: 50 us in all."""
    things = (ran("gemm", 0, 10), ran("nccl AllGather", 5, 20), ran("add", 15, 25), ran("nccl AllGather", 22, 30),
              ran("Memcpy HtoD (Pinned -> Device)", 28, 40, copy=True))
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
    wide, tall = ((8, 4), (4, 16)), ((16, 4), (4, 8))
    things = (ran("gemm", 0, 1, call=1, shapes=wide, **mm), ran("gemm", 2, 3, call=2, shapes=tall, **mm),
              ran("gemm_splitK", 3, 4, call=3, shapes=tall, **mm), ran("splitKreduce", 4, 5, call=3, shapes=tall, **mm),
              ran("Memset (Device)", 5, 5.5, call=3, shapes=tall, copy=True, **mm),
              ran("gemm", 6, 7, call=4, op="aten::addmm", dtype="float", shapes=((16,), (8, 4), (4, 16))),
              ran("gemm", 8, 9, call=5, shapes=((8, 4), (5, 16)), **mm), ran("gemm", 9, 10, op="te::gemm"))
    step = measure(Trace("t", "", 0, 1, things, ()), steps=1)
    half = step.products[Shape(1, 8, 16, 4, "fp16")]
    assert (half.count, half.seconds) == (3, pytest.approx(4e-6))
    assert step.products[Shape(1, 8, 16, 4, "fp32")].count == 1 and step.unshaped_s == pytest.approx(2e-6)
    assert Shape.of(2, 16, 8, 4, "fp16") == Shape(2, 8, 16, 4, "fp16")


def test_products_beside_communication_are_told_from_those_alone() -> None:
    mm = {"op": "aten::mm", "dtype": "c10::Half", "shapes": ((8, 4), (4, 16))}
    things = (ran("gemm", 0, 10, call=1, **mm), ran("nccl AllGather", 12, 40), ran("gemm", 20, 36, call=2, **mm))
    total = measure(Trace("t", "", 0, 1, things, ()), steps=1).products[Shape(1, 8, 16, 4, "fp16")]
    assert (total.count, total.alone, total.each_s) == (2, 1, pytest.approx(10e-6))


def test_what_still_runs_of_the_step_before_counts_where_it_runs() -> None:
    """Launched for the first step, it reaches 4 us into the second; the second's batch is copied during the first."""
    things = (ran("gemm", 0, 10, launched=-20), ran("Memcpy HtoD", 2, 3, launched=-5, copy=True),
              ran("nccl AllGather", 6, 9, launched=-4), ran("gemm", 10, 14, launched=-12),
              ran("add", 14, 20, launched=-3), ran("gemm", 24, 30, launched=5))
    step = measure(Trace("t", "", 0, 1, things, ((1, -21.0, -6.0), (2, -6.0, 4.0), (3, 4.0, 6.0))))
    assert step.times_s == pytest.approx((14e-6, 10e-6))
    assert {name: time_s for name, time_s in step.terms.items() if time_s} == pytest.approx(
        {"gemm": 7e-6, "memory_bound": 3e-6, "idle": 2e-6})


def test_a_marked_step_without_kernels_counts_as_one() -> None:
    things = (ran("gemm", 0, 4, launched=-9), ran("gemm", 20, 24, launched=8))
    step = measure(Trace("t", "", 0, 1, things, ((1, -10.0, -5.0), (2, -5.0, 5.0), (3, 5.0, 15.0))))
    assert step.times_s == pytest.approx((10e-6, 10e-6))


def test_steps_without_length_are_refused() -> None:
    things = (ran("gemm", 0, 0, launched=-9), ran("gemm", 0, 0, launched=8))
    with pytest.raises(UserError, match="no length"):
        measure(Trace("t", "", 0, 1, things, ((1, -10.0, 5.0), (2, 5.0, 15.0))))
    with pytest.raises(UserError, match="no length"):
        measure(Trace("t", "", 0, 1, things[:1], ()), steps=1)


NAMES_OF = {"gemm": "gemm", "memory_bound": "add", "exposed all_gather": "nccl AllGather",
            "exposed all_reduce": "nccl AllReduce", "copy": "Memcpy HtoD"}
PIECE = st.tuples(st.sampled_from(sorted(NAMES_OF)), st.integers(0, 40), st.integers(0, 15))


@given(st.lists(PIECE, min_size=1, max_size=12))
def test_terms_are_those_of_every_moment(pieces: list[tuple[str, int, int]]) -> None:
    """Against a look at every microsecond: compute before communication before copies, the first of a kind."""
    things = [ran(NAMES_OF[term], begin, begin + length) for term, begin, length in pieces]
    start, end = min(one.start_us for one in things), max(one.end_us for one in things)
    assume(end > start)
    found = measure(Trace("t", "", 0, 1, tuple(sorted(things, key=lambda one: one.start_us)), ()), steps=1)
    rank = {"gemm": 0, "memory_bound": 0, "exposed all_gather": 1, "exposed all_reduce": 1, "copy": 2}
    for term in {"idle", *rank}:
        here = 0
        for moment in range(int(start), int(end)):
            running = [(rank[one], begin, begin + length, one) for one, begin, length in pieces
                       if begin <= moment < begin + length]
            first = min(running)[:2] if running else None
            here += (term == "idle") if first is None else any(one[3] == term for one in running if one[:2] == first)
        if len({(rank[one], begin) for one, begin, _ in pieces}) == len(pieces):  # no two of a kind begin together
            assert found.terms.get(term, 0.0) == pytest.approx(here * 1e-6, abs=1e-12), term
    assert sum(found.terms.values()) == pytest.approx((end - start) * 1e-6)


# -------------------------------------------------------------------------------------------- traces as they really are
def each(trace: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["cat"] == kind]


def test_full_names_of_kernels_change_nothing(traced: dict[str, Any], result: Result, tmp_path: Path) -> None:
    real = copy.deepcopy(traced)
    for event in each(real, "kernel"):
        if event["name"] == NAMES["memory_bound"]:
            event["name"] = ("void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<"
                             "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() "
                             "const::{lambda()#12}::operator()() const::{lambda(c10::BFloat16)#1}>(...)")
        elif event["name"] == NAMES["gemm"]:
            event["name"] = "nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT"
    found = held(real, result, tmp_path)
    for term in found.terms:
        assert term.gap_s == pytest.approx(0.0, abs=2e-3 * result.step_time_s), term
    assert all(measured.count == pytest.approx(predicted.count) for _, measured, predicted in found.products())


def test_a_batch_copied_ahead_makes_no_idle_time(traced: dict[str, Any], result: Result, tmp_path: Path) -> None:
    ahead = copy.deepcopy(traced)
    lead = 0.4 * result.step_time_s * 1e6
    for event in ahead["traceEvents"]:
        event["ts"] -= lead if event["cat"] != "kernel" else 0.0
    for number, mark in enumerate(each(ahead, "user_annotation")):
        args = {"correlation": 10**6 + number, "External id": 10**6 + number}
        ahead["traceEvents"] += [
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaMemcpyAsync", "ts": mark["ts"] + 2, "dur": 3, "args": args},
            {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": mark["ts"] + 9, "dur": 9,
             "args": {**args, "stream": 14, "device": 0}}]
    for term in held(ahead, result, tmp_path).terms:
        assert term.gap_s == pytest.approx(0.0, abs=5e-3 * result.step_time_s), term


def test_products_of_fused_layers_have_no_shape(traced: dict[str, Any], result: Result, tmp_path: Path) -> None:
    fused = copy.deepcopy(traced)
    fused["traceEvents"] = [event for event in fused["traceEvents"]
                            if event["cat"] != "cpu_op" or 50257 in map(max, event["args"]["Input Dims"])]
    for event in each(fused, "kernel"):
        event["dur"] *= 1.5 if event["name"] == NAMES["gemm"] else 1.0
    text = " ".join(shown(held(fused, result, tmp_path)).split())
    assert "the trace does not say the shape" in text and "shape unknown" in text and "not there" not in text


def test_two_gpus_in_a_file(traced: dict[str, Any], result: Result, tmp_path: Path) -> None:
    both = copy.deepcopy(traced)
    both["traceEvents"] += [{**event, "pid": 1, "args": {**event["args"], "device": 1}}
                            for event in each(both, "kernel")]
    found = held(both, result, tmp_path)
    assert any("2 GPUs; compared is number 0" in note for note in found.notes)
    assert found.measured.kernels == held(traced, result, tmp_path).measured.kernels


def test_steps_marked_for_every_micro_batch_are_told(traced: dict[str, Any], result: Result, tmp_path: Path) -> None:
    marked = copy.deepcopy(traced)
    marks = each(marked, "user_annotation")
    marked["traceEvents"].append({**marks[0], "name": "Optimizer.step#AdamW.step", "dur": 9.0})
    assert any("is a micro-step" in note for note in held(marked, result, tmp_path).notes)


def test_fp32_that_is_multiplied_as_tf32(tmp_path: Path) -> None:
    predicted = sim.run(resolve(SMALL, sets={"training.precision": "tf32"}))
    plain = kineto_of(predicted)
    for event in each(plain, "cpu_op"):
        event["args"]["Input type"] = ["float", "float"]
    found = held(plain, predicted, tmp_path)
    assert {shape.dtype for shape, _, _ in found.products()} == {"tf32"}
    assert all(measured.count == predicted_.count for _, measured, predicted_ in found.products())


def test_experts_that_run_as_batched_products_are_no_attention(tmp_path: Path) -> None:
    moe = {"model": {"preset": "gpt2", "moe": {"experts": 8, "top_k": 2}}}
    predicted = sim.run(resolve(SMALL, sets={**moe, "cluster.nodes": 1}))
    found = held(kineto_of(predicted), predicted, tmp_path)
    for term in found.terms:
        assert term.gap_s == pytest.approx(0.0, abs=0.01 * predicted.step_time_s), term


def test_the_stage_of_the_trace_s_rank_is_compared(tmp_path: Path) -> None:
    predicted = sim.run(resolve(SMALL, sets={"parallel": {"strategy": "ddp", "pipeline": 2}, "cluster.nodes": 1,
                                             "model.preset": "gpt3-125m"}))
    stages = [foresee(predicted, rank).terms["gemm"] for rank in (0, 7)]
    assert stages[0] != stages[1] and class_of_rank(predicted, 99) == predicted.detail.critical


def test_a_trace_of_the_prediction_teaches_it_nothing(tmp_path: Path) -> None:
    large = sim.run(resolve(SMALL, sets={"model.preset": "gpt3-1.3b", "training.micro_batch": 4, "parallel": {},
                                         "training.sequence": 2048, "cluster.topology": "single-a100-80g-sxm",
                                         "cluster.nodes": 1}))
    found = held(kineto_of(large), large, tmp_path)
    alone = {(int(row["m"]), int(row["n"]), int(row["k"])): float(row["time_us"]) * 1e-6
             for row in csv.DictReader(products_csv(found).splitlines()) if row["batch"] == "1"}
    assert alone
    for (m, n, k), time_s in alone.items():
        assert time_s == pytest.approx(found.predicted.products[Shape(1, m, n, k, "bf16")].each_s, rel=5e-3)


WILD = st.dictionaries(st.sampled_from(["ph", "cat", "name", "ts", "dur", "args"]), st.sampled_from(
    ["X", "kernel", "cpu_op", "aten::mm", "ProfilerStep#1", "ProfilerStep#2", "gemm", 0, 1, 2.5, -3, 1e308, "7", None,
     True, {"External id": 1, "correlation": 1, "Input Dims": [[2, 3], [3, 4]], "device": 0}]), max_size=6)


@given(st.lists(WILD, max_size=8), st.sampled_from([None, 1]))
def test_no_trace_makes_it_fail_but_with_an_error_for_users(result: Result, events: list[Any],
                                                            steps: int | None) -> None:
    good = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1.0, "dur": 2.0, "args": {"device": 0}}
    with tempfile.TemporaryDirectory() as folder, suppress(UserError):
        found = held({"traceEvents": [*events, good]}, result, Path(folder), steps)
        shown(found)
        json.dumps(found.to_json(), allow_nan=False)
