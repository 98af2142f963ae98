"""Tokens that travel beside compute: of the shared experts, or of another micro-batch; order by hand, nothing lost."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.api import machine_for, run
from sim.engine import simulate
from sim.errors import UserError
from sim.parallel import lower
from sim.parallel.model.expert import hidden_by
from sim.parallel.model.overlap import beside_shared, together
from sim.parallel.pipeline.orders import order
from sim.program import CollectiveCall, InlineCall, Program
from sim.report.numbers.traffic import traffic_totals
from sim.scenario import resolve
from sim.work import Kernel

TRAVEL, REDUCE = (InlineCall(CollectiveCall(kind, 8, "bf16", 0)) for kind in ("all_to_all", "all_reduce"))


def kernel(name: str) -> Kernel:
    return Kernel("elementwise", "bf16", (1,), name, 0.0, 1.0, "memory_bound")


def told(items: Any) -> list[str]:
    """Items as text: a kernel's name, a collective's kind with the kernels beside it."""
    return [item.variant if isinstance(item, Kernel) else
            ":".join((item.call.kind, *(own.variant for own in item.beside))) for item in items]


def test_shared_experts_run_beside_what_travels() -> None:
    forward = [("dispatch", (kernel("copy"), TRAVEL)), ("up", (kernel("expert"),)),
               ("combine", (TRAVEL, kernel("sum"))), ("up", (kernel("one"),)), ("act", (kernel("act"),)),
               ("down", (kernel("two"), REDUCE)), ("shared_add", (kernel("add"),))]
    assert told(beside_shared(forward)) == [
        "copy", "all_to_all:one:act", "expert", "all_reduce", "all_to_all:two", "sum", "add"]
    backward = [("shared_add", (kernel("add"),)), ("down", (kernel("two"),)), ("act", (kernel("act"),)),
                ("up", (kernel("one"),)), ("combine", (kernel("sum"), TRAVEL)), ("up", (kernel("expert"),)),
                ("dispatch", (TRAVEL, kernel("copy")))]
    assert told(beside_shared(backward)) == [
        "add", "sum", "all_to_all:two", "expert", "all_to_all:act:one", "copy"]
    assert told(beside_shared(forward[:1])) == ["copy", "all_to_all"]  # a cut between the operators: nothing at hand


def test_two_micro_batches_hide_each_other_s_tokens() -> None:
    """A layer's forward is a D m C p, its backward P c e w d A; host times go where the kernels go."""
    def timed(*items: Any) -> list[Any]:
        return [(item, 1.0) for item in items]

    forward = timed(kernel("attention"), TRAVEL, kernel("experts"), TRAVEL, kernel("after"))
    backward = timed(kernel("before"), TRAVEL, kernel("data"), kernel("weight"), TRAVEL, kernel("gradients"))
    found = together([forward], [backward], lambda k: k.variant == "weight")
    assert told(item for item, _ in found) == [
        "before", "all_to_all:attention", "all_to_all:data", "all_to_all:weight:experts", "all_to_all:gradients",
        "after"]
    assert [launch_s for _, launch_s in found] == [1.0, 2.0, 2.0, 3.0, 2.0, 1.0]
    # a dense layer hides what it can; a layer without a partner is as it was
    found = together([timed(kernel("dense")), forward], [backward], lambda k: False)
    assert told(item for item, _ in found) == [
        "before", "all_to_all:dense", "data", "weight", "all_to_all", "gradients",
        "attention", "all_to_all", "experts", "all_to_all", "after"]


def test_scores_travel_beside_the_last_kernel() -> None:
    scores = InlineCall(CollectiveCall("all_to_all", 2, "fp32", 0))
    forward = [(i, 0.0) for i in (kernel("a"), TRAVEL, scores, kernel("experts"), TRAVEL, kernel("after"))]
    backward = [(i, 0.0) for i in (kernel("b"), TRAVEL, kernel("data"), kernel("more"), scores, TRAVEL, kernel("c"))]
    found = together([forward], [backward], lambda k: False)
    assert told(item for item, _ in found) == [
        "b", "all_to_all:a", "all_to_all:data", "all_to_all:more", "all_to_all:experts", "all_to_all", "all_to_all:c",
        "after"]


def scenario(overlap: str | None, year: int = 2024, **changes: Any) -> dict[str, Any]:
    parallel = {"strategy": "zero1", "pipeline": 4, "expert": 4, "schedule": "interleaved", "virtual_stages": 2,
                "order": ["tensor", "context", "pipeline", "expert", "data"],  # experts over nodes
                **({"overlap_experts": overlap} if overlap else {}), **changes.pop("parallel", {})}
    return {"name": "experts", "cluster": {"topology": "dgx-a100-80g", "nodes": 2},
            "model": {"kind": "decoder", "layers": 8, "hidden": 4096, "heads": 32, "ffn": 8192, "vocab": 1024,
                      "tied_embeddings": False, "gated_mlp": True, "positions": "rotary", "max_positions": 2048,
                      "moe": {"experts": 16, "top_k": 2, "expert_ffn": 4096, "shared_experts": 1,
                              **changes.pop("moe", {})}},
            "training": {"micro_batch": 1, "global_batch": 64, "sequence": 2048, "precision": "megatron-bf16",
                         **changes.pop("training", {})},
            "parallel": parallel, "software": {"framework": "megatron", "year": year}}


def kernels_of(program: Program) -> Counter[tuple[Any, ...]]:
    """Kernels of a step by what they are, those beside collectives included."""
    found: Counter[tuple[Any, ...]] = Counter()
    for number, repeats in program.schedule:
        section = program.sections[number]
        for kind, payload in zip(section.kind, section.payload, strict=True):
            rows = program.segments[payload].kernels if kind == 0 else ()
            for row in rows:
                for own in (row,) if row >= 0 else program.inlines[-1 - row].beside:
                    k = program.kernels[own]
                    found[k.op, k.shape, k.variant] += repeats
    return found


def launched_s(program: Program) -> float:
    """Host time of a step's launches."""
    return sum(repeats * sum(program.segments[payload].host_s) for number, repeats in program.schedule
               for kind, payload in zip(program.sections[number].kind, program.sections[number].payload, strict=True)
               if kind == 0)


@settings(max_examples=25, deadline=None)
@given(overlap=st.sampled_from(["shared", "batches"]), schedule=st.sampled_from(["interleaved", "dualpipe"]),
       tensor=st.sampled_from([1, 2]), first_dense=st.integers(0, 2),
       recompute=st.sampled_from(["none", "selective", "selective-op"]))
def test_overlap_changes_neither_work_nor_traffic(overlap: str, schedule: str, tensor: int, first_dense: int,
                                                  recompute: str) -> None:
    asked = {"schedule": schedule, "tensor": tensor, "expert": 2, "sequence_parallel": tensor > 1}
    made = [lower(resolve(scenario(one, parallel=asked, moe={"first_dense": first_dense},
                                   training={"recompute": recompute}))).job for one in ("none", overlap)]
    for number in range(4):
        plain, hidden = (kernels_of(job.programs[number]) for job in made)
        assert plain == hidden
        moved = [sum(row["bytes"] for row in traffic_totals(job, number) if row["kind"] == "all_to_all")
                 for job in made]
        assert moved[0] == moved[1] > 0
        # what is recomputed is launched operator by operator, as in any forward
        assert launched_s(made[1].programs[number]) == pytest.approx(launched_s(made[0].programs[number]))


def step_s(mapping: dict[str, Any], fold: bool = True) -> float:
    resolved = resolve(mapping)
    lowered = lower(resolved, fold=fold)
    return simulate(lowered.job, machine_for(resolved, lowered)).step_time_s


def test_what_is_hidden_saves_time() -> None:
    none, shared, batches = (step_s(scenario(overlap)) for overlap in ("none", "shared", "batches"))
    assert max(shared, batches) < 0.95 * none
    assert step_s(scenario("batches"), fold=False) == pytest.approx(batches, rel=1e-9)


def test_nothing_overlaps_unless_asked() -> None:
    """Megatron-LM leaves both overlaps off."""
    assert step_s(scenario(None)) == step_s(scenario("none"))
    assert step_s(scenario(None, 2026)) == step_s(scenario("none", 2026)) > step_s(scenario("batches", 2026))


@pytest.mark.parametrize(("topology", "precision", "year", "schedule", "habit"), [
    ("hgx-b200", "fp8", 2026, "interleaved", "batches"),
    ("hgx-b200", "fp8", 2026, "1f1b", "none"),  # not at hand
    ("hgx-b200", "fp8", 2025, "interleaved", "none"),
    ("hgx-b200", "megatron-bf16", 2026, "interleaved", "none"),
    ("dgx-h100", "fp8", 2026, "interleaved", "none"),  # scaled by tensors
])
def test_recipes_in_block_scaled_fp8_run_two_micro_batches_as_one(
        topology: str, precision: str, year: int, schedule: str, habit: str) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    mapping = scenario(None, year, parallel={"schedule": schedule, "virtual_stages": chunks},
                       training={"precision": precision})
    mapping["cluster"]["topology"] = topology
    resolved = resolve(mapping)
    stack = lower(resolved).stack
    assert hidden_by(resolved, stack) == habit
    mapping["parallel"]["overlap_experts"] = "none"
    assert hidden_by(resolve(mapping), stack) == "none"


def test_warm_up_is_one_forward_longer_where_both_run_as_one() -> None:
    """Else the last rank's first backward would run beside the forward it needs."""
    for actions, longer in zip(order("interleaved", 4, 2, 8), order("interleaved", 4, 2, 8, ahead=1), strict=True):
        first, later = ([a.kind for a in one].index("B") for one in (actions, longer))
        assert later == first + 1 and sorted(actions) == sorted(longer)
        pairs = [(f, b) for f, b in pairwise(longer) if (f.kind, b.kind) == ("F", "B")]
        assert all((f.chunk, f.micro) != (b.chunk, b.micro) for f, b in pairs)


@pytest.mark.parametrize(("overlap", "changes", "message"), [
    ("batches", {"parallel": {"schedule": "1f1b", "virtual_stages": 1}}, "chunks of a pipeline take turns"),
    ("batches", {"parallel": {"strategy": "fsdp"}}, "one after the other"),
    ("batches", {"training": {"recompute": "full"}}, "full recomputation"),
    ("shared", {"moe": {"shared_experts": 0}}, "no shared experts"),
])
def test_what_has_nothing_to_hide_behind_is_refused(overlap: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        lower(resolve(scenario(overlap, **changes)))
    assert [fault.field for fault in caught.value.faults] == ["parallel.overlap_experts"]
    assert message in caught.value.faults[0].message


def alone(overlap: str, year: int = 2024, **changes: Any) -> dict[str, Any]:
    return scenario(overlap, year, parallel={"pipeline": 1, "virtual_stages": 1, "schedule": "1f1b", "expert": 16,
                                       **changes.pop("parallel", {})}, **changes)


@settings(max_examples=10, deadline=None)
@given(tensor=st.sampled_from([1, 2]), first_dense=st.integers(0, 2), recompute=st.sampled_from(["none", "selective"]))
def test_micro_batches_without_a_pipeline_do_the_same_work_together(tensor: int, first_dense: int,
                                                                    recompute: str) -> None:
    asked = {"tensor": tensor, "sequence_parallel": tensor > 1, "expert": 16 // tensor}
    made = [lower(resolve(alone(one, parallel=asked, moe={"first_dense": first_dense},
                                training={"recompute": recompute}))).job for one in ("none", "batches")]
    plain, hidden = (kernels_of(job.programs[0]) for job in made)
    assert plain == hidden
    moved = [Counter[str]() for _ in made]
    for totals, job in zip(moved, made, strict=True):
        for row in traffic_totals(job, 0):
            totals[row["kind"]] += row["bytes"]
    assert moved[0] == moved[1]


def test_the_first_forward_and_the_last_backward_are_alone() -> None:
    """Four micro-batches: a forward, three times both, a backward (combined_1f1b.py)."""
    resolved = resolve(alone("batches", training={"global_batch": 64}))
    program = lower(resolved).job.programs[0]
    names = [program.sections[number].name.split(" of ")[0] for number, _ in program.schedule]
    assert resolved.micro_steps == 4 and [repeats for _, repeats in program.schedule] == [1, 1, 2, 1, 1]
    assert names == ["forward", "forward", "forward", "backward", "optimizer step"]
    assert step_s(alone("batches")) < 0.97 * step_s(alone("none"))


def test_two_micro_batches_together_keep_little_more_than_one() -> None:
    """What the one's forward keeps the other's backward has let go, but for a layer."""
    one, two = (run(resolve(alone(overlap))).memory.use for overlap in ("none", "batches"))
    assert one.peak_allocated_bytes < two.peak_allocated_bytes
    assert two.peak_allocated_bytes - one.peak_allocated_bytes < 0.5 * one.at_peak["activations"]


def test_without_a_pipeline_it_is_asked_for_alone() -> None:
    """Recipes overlap two micro-batches with virtual stages; those without a pipeline do not unless told."""
    mapping = alone("none", 2026, training={"precision": "fp8"})
    mapping["cluster"]["topology"] = "hgx-b200"
    del mapping["parallel"]["overlap_experts"]
    resolved = resolve(mapping)
    assert hidden_by(resolved, lower(resolved).stack) == "none"
