"""What each technique issues, in which order, and that its memory balances."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from sim.errors import UserError
from sim.parallel import Lowered, lower
from sim.program import Kind, Program
from sim.scenario import resolve

MODEL = {"kind": "decoder", "layers": 3, "hidden": 256, "heads": 4, "vocab": 1000, "max_positions": 128,
         "positions": "learned", "norm": "layernorm", "bias": True, "tied_embeddings": True}


def scenario(nodes: int = 1, micro_batch: int = 2, global_batch: int = 16, precision: str = "fsdp-bf16",
             recompute: Any = "none", software: dict[str, Any] | None = None, **parallel: Any) -> Any:
    return resolve({
        "name": "test", "cluster": {"topology": "dgx-a100-80g", "nodes": nodes}, "model": MODEL,
        "training": {"micro_batch": micro_batch, "global_batch": global_batch, "sequence": 128, "precision": precision,
                     "recompute": recompute},
        "parallel": parallel, "software": {"framework": "pytorch", "year": 2025, **(software or {})}})


def issued(program: Program, section: int = 0) -> list[str]:
    """Names of a section's collectives and compute tasks in host order."""
    s = program.sections[section]
    result = []
    for kind, payload, label in zip(s.kind, s.payload, s.label, strict=True):
        name = program.labels[label]
        if kind == Kind.COLLECTIVE:
            result.append(f"{program.collectives[payload].kind} {name.layer}")
        elif kind == Kind.KERNELS and name.name in ("embedding", "block", "head"):
            result.append(f"{name.phase} {name.layer}")
    return result


def program(s: Any) -> Program:
    return lower(s).job.programs[0]


def collectives(s: Any) -> Counter[tuple[str, int]]:
    """(kind, bytes) of a whole step."""
    p, count = program(s), Counter[tuple[str, int]]()
    for number in p.section_runs():
        section = p.sections[number]
        for kind, payload in zip(section.kind, section.payload, strict=True):
            if kind == Kind.COLLECTIVE:
                count[p.collectives[payload].kind, p.collectives[payload].size_bytes] += 1
    return count


def test_fsdp1_backward_pre_gathers_before_compute_and_before_the_reduction() -> None:
    order = issued(program(scenario(strategy="fsdp", software={"fsdp": 1})))
    assert order == [
        "all_gather root", "forward embedding", "all_gather block0", "forward block0", "all_gather block1",
        "forward block1", "all_gather block2", "forward block2", "forward head",
        "all_gather block2", "backward head", "all_gather block1", "backward block2", "reduce_scatter block2",
        "all_gather block0", "backward block1", "reduce_scatter block1", "backward block0", "reduce_scatter block0",
        "backward embedding", "reduce_scatter root"]


def test_fsdp1_backward_post_gathers_after_compute_and_before_the_reduction() -> None:
    order = issued(program(scenario(strategy="fsdp", software={"fsdp": 1}, prefetch={"backward": "post"})))
    start = order.index("backward head")
    assert order[start:start + 7] == [
        "backward head", "all_gather block2", "backward block2", "all_gather block1", "reduce_scatter block2",
        "backward block1", "all_gather block0"]


def test_fsdp1_without_prefetch_gathers_when_needed() -> None:
    order = issued(program(scenario(strategy="fsdp", software={"fsdp": 1}, prefetch={"backward": "none"})))
    start = order.index("backward head")
    assert order[start:start + 5] == [
        "backward head", "all_gather block2", "backward block2", "reduce_scatter block2", "all_gather block1"]


def test_fsdp1_forward_prefetch_issues_the_next_gather_before_compute() -> None:
    order = issued(program(scenario(strategy="fsdp", software={"fsdp": 1}, prefetch={"forward": True})))
    assert order[:5] == ["all_gather root", "all_gather block0", "forward embedding", "all_gather block1",
                         "forward block0"]


def test_fsdp1_rate_limiter_lets_two_frees_be_pending() -> None:
    def waiting(limit: int | str) -> list[tuple[str, str, str]]:
        p = program(scenario(strategy="fsdp", software={"fsdp": 1}, prefetch={"limit": limit}))
        s = p.sections[0]
        found = []
        for kind, label, waits in zip(s.kind, s.label, s.waits, strict=True):
            if kind == Kind.HOST and p.labels[label].name == "rate limiter":
                awaited = p.labels[s.label[waits[0]]]
                found.append((p.labels[label].layer, awaited.phase, awaited.layer))
        return found
    assert waiting("none") == []
    assert waiting(2)[0] == ("block2", "forward", "block0")
    assert waiting(1)[0] == ("block1", "forward", "block0")


def test_fsdp2_order_and_one_reduce_buffer() -> None:
    p = program(scenario(strategy="fsdp"))
    order = issued(p)
    start = order.index("forward head")
    assert order[start:start + 8] == [
        "forward head", "all_gather block2", "backward head", "all_gather block1", "backward block2",
        "reduce_scatter block2", "all_gather block0", "backward block1"]
    s = p.sections[0]
    names = [(p.labels[label].layer, p.labels[label].name) for label in s.label]
    copy_in = names.index(("block1", "copy-in"))
    assert names.index(("block2", "reduce_scatter")) in s.waits[copy_in]


def test_kept_parameters_are_gathered_once() -> None:
    full = collectives(scenario(strategy="fsdp"))
    kept = collectives(scenario(strategy="fsdp", reshard_after_forward=False))
    gathers = {k: n for k, n in full.items() if k[0] == "all_gather"}
    assert sorted(gathers.values()) == [1, 6]
    assert sorted(n for k, n in kept.items() if k[0] == "all_gather") == [1, 3]


def test_hybrid_shards_reduce_inside_and_across() -> None:
    count = collectives(scenario(nodes=2, global_batch=32, strategy="fsdp", sharding_factor=8))
    scattered = {size: n for (kind, size), n in count.items() if kind == "reduce_scatter"}
    reduced = {size: n for (kind, size), n in count.items() if kind == "all_reduce"}
    assert reduced == {size // 8: n for size, n in scattered.items()}


@pytest.mark.parametrize(("parallel", "software"), [
    ({"strategy": "ddp"}, {}), ({"strategy": "ddp", "gradient_as_bucket_view": True}, {}),
    ({"strategy": "ddp", "overlap": False}, {}), ({"strategy": "ddp", "reduce_every_micro_step": True}, {}),
    ({"strategy": "zero1"}, {}), ({"strategy": "zero1"}, {"framework": "megatron"}),
    ({"strategy": "ddp"}, {"framework": "megatron"}), ({"strategy": "zero1"}, {"framework": "deepspeed"}),
    ({"strategy": "zero2"}, {"framework": "deepspeed"}), ({"strategy": "zero3"}, {"framework": "deepspeed"}),
    ({"strategy": "zero2"}, {"fsdp": 1}), ({"strategy": "fsdp"}, {"fsdp": 1}), ({"strategy": "fsdp"}, {"fsdp": 2}),
    ({"strategy": "fsdp", "sharding_factor": 4}, {"fsdp": 1}), ({"strategy": "fsdp", "sharding_factor": 4}, {}),
    ({"strategy": "fsdp", "sharding_factor": 1}, {"fsdp": 1}), ({"strategy": "fsdp", "sharding_factor": 1}, {}),
    ({"strategy": "fsdp", "reshard_after_forward": False}, {"fsdp": 1}),
    ({"strategy": "fsdp", "reshard_after_forward": False}, {}), ({"strategy": "fsdp", "reshard_after_forward": 4}, {}),
    ({"strategy": "fsdp", "reduce_every_micro_step": False}, {"fsdp": 1}),
    ({"strategy": "fsdp", "reduce_every_micro_step": False}, {}), ({"strategy": "fsdp", "wrap": 10**9}, {}),
    ({"strategy": "fsdp", "sharding_factor": 4, "reduce_every_micro_step": False}, {}),
])
@pytest.mark.parametrize("recompute", ["none", "full", "selective", {"layers": 2}])
def test_every_allocation_is_freed_once(parallel: dict[str, Any], software: dict[str, Any], recompute: Any) -> None:
    p = program(scenario(nodes=2, global_batch=72 * 16, micro_batch=16, recompute=recompute, software=software,
                         **parallel))
    live: dict[str, int] = {}
    pools: dict[str, int] = {}  # the layers' own tensors rise and fall in parts
    for number in p.section_runs():
        for op in p.sections[number].memory:
            if op.tensor.startswith("layers: "):
                pools[op.tensor] = pools.get(op.tensor, 0) + op.size_bytes
                assert pools[op.tensor] >= 0
            elif op.size_bytes > 0:
                assert op.tensor not in live, f"{op.tensor} allocated twice"
                live[op.tensor] = op.size_bytes
            elif op.size_bytes < 0:
                assert live.pop(op.tensor, None) == -op.size_bytes, op.tensor
    assert live == {}
    assert not any(pools.values())


def test_accumulation_without_reduction_reduces_once() -> None:
    every = collectives(scenario(global_batch=64, strategy="fsdp"))
    once = collectives(scenario(global_batch=64, strategy="fsdp", reduce_every_micro_step=False))
    for (kind, size), n in every.items():
        assert once[kind, size] == (n // 4 if kind == "reduce_scatter" else n)


def test_a_smaller_last_micro_step_is_its_own_section() -> None:
    p = program(scenario(micro_batch=2, global_batch=8 * 5, strategy="fsdp"))
    assert [(p.sections[s].name, n) for s, n in p.schedule][:3] == [
        ("micro-step of 2, reduced", 1), ("micro-step of 2, reduced", 1), ("micro-step of 1, reduced", 1)]


def test_zero_volumes() -> None:
    """ZeRO paper, section 7: a gather of the parameters behind the optimizer, and gradients by release."""
    def moved(strategy: str) -> dict[str, int]:
        total: Counter[str] = Counter()
        count = collectives(scenario(precision="mixed-bf16", strategy=strategy,
                                     software={"framework": "deepspeed", "modules": "plain"}))
        for (kind, size), n in count.items():
            if size > 4:  # without the gradient norm's scalar
                total[kind] += n * size
        return dict(total)
    parameters = lower(scenario(strategy="ddp")).architecture.parameters
    # since 0.12 DeepSpeed reduces a bucket to all ranks, of which each keeps its part: half as much again
    assert moved("zero1") == moved("zero2") == {"all_reduce": 2 * parameters, "all_gather": 2 * parameters}
    three = moved("zero3")  # gathered once: all of a model this small is used again within the reuse distance
    assert three["reduce_scatter"] == 2 * parameters
    assert 2 * parameters <= three["all_gather"] < 2.3 * 2 * parameters  # and small parameters in the optimizer step


def test_unfolded_jobs_simulate_every_rank() -> None:
    low: Lowered = lower(scenario(nodes=2, global_batch=32, strategy="fsdp", sharding_factor=4), fold=False)
    assert len(low.job.classes) == 16
    assert Counter(c.name for c in low.job.communicators) == {"shard": 4, "replicate": 4}
    assert all(c.parties == 4 for c in low.job.communicators)


@pytest.mark.parametrize(("change", "field"), [
    ({"pipeline": 3, "reshard_after_forward": 2}, "parallel.reshard_after_forward"),
    ({"offload": {"activations": "paged"}}, "parallel.offload"),
    ({"offload": {"activations": "cpu"}, "pipeline": 3, "strategy": "ddp"}, "parallel.offload.activations"),
])
def test_what_is_not_simulated_says_so(change: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError) as caught:
        lower(scenario(nodes=3 if "pipeline" in change else 1, global_batch=48, **{"strategy": "fsdp"} | change))
    assert field in [f.field for f in caught.value.faults]


def test_hosts_that_meet_every_step_wait_for_the_latest_node() -> None:
    """Composer sums samples over all ranks on the host: 15 ms times 1/2 + 1/3 + 1/4 beyond one node's own work."""
    def step_s(nodes: int) -> float:
        section = program(scenario(nodes=nodes, global_batch=64, strategy="fsdp",
                                   software={"framework": "composer", "year": 2023})).sections[-1]
        return max(section.host_s)
    assert step_s(4) - step_s(1) == pytest.approx(15e-3 * (1 / 2 + 1 / 3 + 1 / 4))
