"""The oracle forms of the traffic: sums, and issue order folded by repeat."""

from __future__ import annotations

import numpy as np

from sim.program import CollectiveCall, Communicator, Job, Label, ProgramBuilder, RankClass
from sim.report.numbers.traffic import traffic_count, traffic_order, traffic_totals


def two_micro_steps() -> Job:
    builder = ProgramBuilder(("compute", "communication"), ("shard", "replicate"))
    micro = builder.section("micro-step")
    for layer in ("a", "b"):
        micro.collective(1, CollectiveCall("all_gather", 10, "bf16", 0), 0.0, Label(layer, "forward", "gather"))
    micro.collective(1, CollectiveCall("reduce_scatter", 10, "fp32", 0), 0.0, Label("b", "backward", "reduce"))
    micro.collective(1, CollectiveCall("all_reduce", 3, "fp32", 1), 0.0, Label("b", "backward", "reduce"))
    builder.run(micro, 2)
    update = builder.section("optimizer step")
    update.collective(1, CollectiveCall("all_gather", 7, "fp16", 0), 0.0, Label("all", "optimizer", "gather"))
    builder.run(update)
    shard, replicate = np.arange(8).reshape(2, 4), np.arange(8).reshape(2, 4).T
    return Job([builder.build()], [RankClass(0, np.arange(8), 0, 0, (0, 1))],
               [Communicator("shard", shard, 1), Communicator("replicate", replicate.copy(), 1)], 8)


def test_totals_are_per_phase_kind_dtype_and_ranks() -> None:
    rows = {(r["phase"], r["kind"], r["dtype"], r["ranks"]): (r["count"], r["bytes"])
            for r in traffic_totals(two_micro_steps())}
    assert rows == {
        ("forward", "all_gather", "bfloat16", 4): (4, 40), ("backward", "reduce_scatter", "float32", 4): (2, 20),
        ("backward", "all_reduce", "float32", 2): (2, 6), ("optimizer", "all_gather", "float16", 4): (1, 7)}
    assert traffic_count(two_micro_steps(), 0) == 4 + 2 + 2 + 1


def test_order_folds_equal_neighbours_and_counts_micro_steps() -> None:
    order = [(r["kind"], r["micro"], r["bytes"], r["repeat"]) for r in traffic_order(two_micro_steps())]
    per_micro = [("all_gather", 2), ("reduce_scatter", 1), ("all_reduce", 1)]
    sizes = {"all_gather": 10, "reduce_scatter": 10, "all_reduce": 3}
    assert order == [(kind, micro, sizes[kind], repeat) for micro in (0, 1) for kind, repeat in per_micro] + [
        ("all_gather", 1, 7, 1)]
