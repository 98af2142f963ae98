"""Every number of a result, on a step that can be drawn by hand (see conftest)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sim.report.numbers.breakdown import breakdown, leaves
from sim.report.numbers.columns import of_class
from sim.report.result import Result

Make = Callable[..., Result]
MS = 1e-3


def test_the_breakdown_of_one_micro_step(result_of: Make) -> None:
    """gather 0-3, forward 3-7, backward 7-13, reduce 13-18, optimizer 18-19, host 19-21."""
    result = result_of(1)
    assert result.step_time_s == pytest.approx(21 * MS)
    parts = result.breakdown
    assert parts.compute == pytest.approx({"gemm": 7 * MS, "attention": 2 * MS, "memory_bound": MS, "optimizer": MS})
    assert parts.exposed_communication["all_gather"] == pytest.approx({"shard": 3 * MS})
    assert parts.exposed_communication["reduce_scatter"] == pytest.approx({"shard": 5 * MS})
    assert parts.host == pytest.approx(2 * MS)
    assert parts.communication_total == {"all_gather": pytest.approx({"shard": 5 * MS}),
                                         "reduce_scatter": pytest.approx({"shard": 5 * MS})}


@pytest.mark.parametrize("micro_steps", [1, 2, 3, 4, 5, 6, 20])
def test_the_breakdown_sums_to_the_step(result_of: Make, micro_steps: int) -> None:
    result = result_of(micro_steps)
    assert leaves(result.to_json()["breakdown_s"]) == pytest.approx(result.step_time_s, rel=1e-12)


@pytest.mark.parametrize("micro_steps", [5, 9, 40])
def test_skipped_repeats_change_nothing(result_of: Make, micro_steps: int) -> None:
    skipped, whole = result_of(micro_steps).to_json(), result_of(micro_steps, skip_repeats=False).to_json()
    for field in ("breakdown_s", "communication_s"):
        assert _flat(skipped[field]) == pytest.approx(_flat(whole[field]), rel=1e-9, abs=1e-12)
    assert len(skipped["traffic"]) == len(whole["traffic"]) == 3 * micro_steps
    for one, other in zip(skipped["traffic"], whole["traffic"], strict=True):
        assert (one.pop("start_s"), one.pop("end_s")) == pytest.approx((other.pop("start_s"), other.pop("end_s")))
        assert one == other


def test_repeats_are_skipped_and_windowed(result_of: Make) -> None:
    detail = result_of(40).detail
    assert max(run.repeats for run in detail.timeline.classes[0]) > 30
    (window,) = of_class(detail.lowered.job, detail.timeline, 0).windows
    assert window.copies > 30


def test_flops_and_throughput(result_of: Make) -> None:
    result = result_of(4)
    assert result.hardware_flops == 4 * 3e12 * 8
    assert result.samples_per_second == pytest.approx(32 / result.step_time_s)
    assert result.tokens_per_second_per_gpu == pytest.approx(32 * 16 / result.step_time_s / 8)
    assert result.hfu == pytest.approx(4 * 3e12 / result.step_time_s / 312e12)


def test_slowdown_is_against_a_network_of_infinite_speed(result_of: Make) -> None:
    """Without communication: 4 + 6 + 1 + 2 ms."""
    assert result_of(1).slowdown == pytest.approx(21 / 13)


def test_traffic_lists_every_collective_in_issue_order(result_of: Make) -> None:
    traffic = result_of(1).traffic
    assert [(t["kind"], t["phase"], t["bytes"], t["dtype"], t["ranks"], t["group"]) for t in traffic] == [
        ("all_gather", "forward", 3, "bf16", 8, "shard"), ("all_gather", "backward", 2, "bf16", 8, "shard"),
        ("reduce_scatter", "backward", 5, "fp32", 8, "shard")]
    assert [t["start_s"] for t in traffic] == pytest.approx([0, 3 * MS, 13 * MS])
    assert traffic[2]["end_s"] == pytest.approx(18 * MS)


def test_memory(result_of: Make) -> None:
    memory = result_of(1).to_json()["memory"]
    assert memory["peak_allocated_bytes"] == 3 * 2**30 + 2**28
    assert memory["fits"] is True
    assert memory["headroom_bytes"] == memory["capacity_bytes"] - memory["device_used_bytes"]
    assert memory["where"]["layer"] == "block0"


def test_a_released_result_keeps_its_numbers(result_of: Make) -> None:
    result = result_of(1)
    result.release()
    assert result.mfu >= 0
    with pytest.raises(RuntimeError, match="released"):
        result.to_json()


def _flat(tree: object, prefix: str = "") -> dict[str, float]:
    if isinstance(tree, dict):
        return {k: v for name, inner in tree.items() for k, v in _flat(inner, f"{prefix}.{name}").items()}
    return {prefix: float(tree)}  # type: ignore[arg-type]


def test_contention_is_what_kernels_take_longer_than_alone(result_of: Make) -> None:
    result = result_of(6)
    assert result.breakdown.contention == pytest.approx(0, abs=1e-12)
    columns = of_class(result.detail.lowered.job, result.detail.timeline, 0)
    program = columns.program
    shares = np.full((3, 4 + len(program.collectives)), 1 / (4 + len(program.collectives)))
    slowed = breakdown(columns, shares, np.array([3.0, 6.0, 1.0]) * MS)  # as if forward took 3 ms alone, not 4
    assert slowed.contention == pytest.approx(6 * MS)
