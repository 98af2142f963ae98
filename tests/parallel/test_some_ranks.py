"""ZeRO that keeps each set of states on some of the ranks that hold the same parameters: who talks to whom, by hand."""

from __future__ import annotations

from typing import Any

import pytest

import sim
from sim.errors import UserError
from sim.parallel import Lowered, lower
from sim.report.numbers.traffic import traffic_totals
from sim.scenario import Scenario, resolve

MIB = 2**20
MOE = {"experts": 8, "top_k": 2, "expert_ffn": 384}
#: Two linear maps and no bias: 8 blocks of 12 · 512² elements, a head apart from the embedding.
MODEL = {"kind": "decoder", "layers": 8, "hidden": 512, "heads": 8, "vocab": 4096, "positions": "rotary",
         "norm": "rmsnorm", "bias": False, "dropout": False, "gated_mlp": False, "tied_embeddings": False}


def asked(framework: str = "megatron", micro_steps: int = 1, model: dict[str, Any] | None = None, nodes: int = 2,
          year: int = 2025, **parallel: Any) -> Scenario:
    return resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": nodes}, "model": {**MODEL, **(model or {})},
        "training": {"micro_batch": 1, "micro_steps": micro_steps, "sequence": 512, "precision": "mixed-bf16"},
        "parallel": {"strategy": "zero1", **parallel}, "software": {"framework": framework, "year": year}})


def calls(found: Lowered) -> dict[tuple[str, int], tuple[int, int]]:
    """Number and bytes of collectives above a MiB altogether, by kind and ranks."""
    moved: dict[tuple[str, int], tuple[int, int]] = {}
    for row in traffic_totals(found.job):
        if row["bytes"] > MIB:
            count, size = moved.get((row["kind"], row["ranks"]), (0, 0))
            moved[row["kind"], row["ranks"]] = count + row["count"], size + row["bytes"]
    return moved


def held(found: Lowered, category: str) -> int:
    return sum(size for _, size, of in found.job.programs[0].resident if of == category)


def test_megatron_scatters_inside_an_instance_and_sums_across() -> None:
    """16 ranks in instances of 4: everything is scattered and gathered among 4, a quarter of it summed among 4."""
    whole = lower(asked()).architecture.parameters
    found = calls(lower(asked(sharding_factor=4)))
    assert set(found) == {("reduce_scatter", 4), ("all_reduce", 4), ("all_gather", 4)}
    assert found["reduce_scatter", 4][1] == found["all_gather", 4][1] == 2 * whole
    assert found["all_reduce", 4] == (found["reduce_scatter", 4][0], 2 * whole / 4)


def test_instances_that_lie_in_nodes_sum_over_the_network_alone() -> None:
    found = lower(asked(sharding_factor=8))
    ranks = {c.name: c.ranks for c in found.job.communicators}
    assert ranks["shard"].tolist() == [list(range(8)), list(range(8, 16))]
    assert ranks["replicate"].tolist() == [[i, i + 8] for i in range(8)]


@pytest.mark.parametrize("framework", ["megatron", "pytorch", "deepspeed"])
def test_a_rank_keeps_its_part_of_a_set(framework: str) -> None:
    """Master copies and two moments in fp32 over the ranks of a set; DeepSpeed's (MiCS) parameters too."""
    strategy = "zero3" if framework == "deepspeed" else "zero1"
    few, all_of_them = (lower(asked(framework, strategy=strategy, sharding_factor=factor)) for factor in (4, 16))
    for category in ("optimizer_states", "master_parameters"):
        assert held(few, category) == pytest.approx(4 * held(all_of_them, category), rel=1e-3)
    whole = few.architecture.parameters
    assert held(few, "optimizer_states") == pytest.approx(8 * whole / 4, rel=1e-3)
    peaks = [sim.run(asked(framework, strategy=strategy, sharding_factor=factor)).memory.use.peak_allocated_bytes
             for factor in (4, 16)]
    assert peaks[0] > peaks[1]


def test_reduced_to_all_ranks_is_reduced_as_before() -> None:
    """PyTorch's ZeroRedundancyOptimizer and InternEvo reduce to every rank; only parameters come from the set."""
    found = calls(lower(asked("pytorch", sharding_factor=4)))
    whole = lower(asked("pytorch")).architecture.parameters
    assert found["all_reduce", 16][1] == 2 * whole
    assert found["all_gather", 4][1] == 2 * whole


def test_over_all_ranks_is_what_it_was() -> None:
    for framework, strategy in (("megatron", "zero1"), ("deepspeed", "zero3")):
        said, unsaid = (sim.run(asked(framework, strategy=strategy, **more)) for more in ({"sharding_factor": 16}, {}))
        assert said.step_time_s == unsaid.step_time_s
        assert said.memory.use.peak_allocated_bytes == unsaid.memory.use.peak_allocated_bytes


def test_instances_of_experts_are_as_many() -> None:
    """8 experts over 2 ranks on 16: 8 ranks hold the same; two instances share theirs over 4 each."""
    found = lower(asked(model={"moe": MOE}, expert=2, sharding_factor=8))
    ranks = {c.name: c.ranks for c in found.job.communicators}
    assert ranks["expert_shard"][0].tolist() == [0, 2, 4, 6]
    assert ranks["expert_replicate"][0].tolist() == [0, 8]
    assert ranks["shard"].shape == (2, 8)
    routed, part = found.architecture.routed // 2, held(found, "optimizer_states")
    dense = found.architecture.parameters - found.architecture.routed
    assert part == pytest.approx(8 * (dense / 8 + routed / 4), rel=1e-3)


def test_experts_alone_on_their_rank_of_a_set_are_summed_only() -> None:
    """16 experts' ranks in two instances of 8, every expert once in each: nothing to scatter, nothing to gather."""
    found = calls(lower(asked(model={"moe": MOE}, expert=8, sharding_factor=8)))
    routed = lower(asked(model={"moe": MOE})).architecture.routed
    assert found["all_reduce", 2][1] >= 2 * routed / 8
    assert ("reduce_scatter", 1) not in found and ("all_gather", 1) not in found


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)])
def test_stages_have_instances_of_their_own(schedule: str, virtual: int) -> None:
    found = lower(asked(micro_steps=4, pipeline=2, schedule=schedule, virtual_stages=virtual, sharding_factor=4))
    moved = calls(found)
    assert {(kind, ranks) for kind, ranks in moved if kind not in ("send", "recv")} == {
        ("reduce_scatter", 4), ("all_reduce", 2), ("all_gather", 4)}
    assert sum(size for (kind, _), (_, size) in moved.items() if kind == "reduce_scatter") == pytest.approx(
        4 * sum(size for (kind, _), (_, size) in moved.items() if kind == "all_reduce"))


def test_mics_meets_across_behind_the_last_micro_step_alone() -> None:
    """ZeRO-3 reduces in every micro-step among its 8, and twice 8 ranks average what they keep once."""
    once, thrice = (calls(lower(asked("deepspeed", strategy="zero3", sharding_factor=8, micro_steps=steps)))
                    for steps in (1, 3))
    for found, steps in ((once, 1), (thrice, 3)):
        assert found["reduce_scatter", 8][1] == pytest.approx(steps * 2 * 8 * 12 * 512**2, rel=0.2)
    assert once["all_reduce", 2] == thrice["all_reduce", 2]
    assert once["all_reduce", 2][1] == pytest.approx(once["reduce_scatter", 8][1] / 8, rel=1e-3)


@pytest.mark.parametrize("parallel", [
    {"sharding_factor": 4}, {"sharding_factor": 8}, {"sharding_factor": 4, "tensor": 2},
    {"sharding_factor": 2, "context": 2, "tensor": 2}, {"sharding_factor": 2, "pipeline": 2}])
def test_one_rank_stands_for_all(parallel: dict[str, Any]) -> None:
    folded, every = (sim.run(asked(micro_steps=2, **parallel), fold=fold) for fold in (True, False))
    assert folded.step_time_s == pytest.approx(every.step_time_s, rel=1e-9)


def test_sets_within_nodes_gather_sooner_than_over_the_network() -> None:
    exposed_s = [sum(sim.run(asked("pytorch", model={"hidden": 2048}, nodes=4, sharding_factor=factor))
                     .breakdown.exposed_communication["all_gather"].values()) for factor in (8, 32)]
    assert exposed_s[0] < exposed_s[1]


@pytest.mark.parametrize(("framework", "more", "said"), [
    ("deepspeed", {"strategy": "zero1"}, "DeepSpeed's zero1 splits states over all ranks"),
    ("deepspeed", {"strategy": "zero2"}, "DeepSpeed's zero2 splits states over all ranks"),
    ("nanotron", {}, "nanotron's zero1 splits states over all ranks"),
    ("megatron", {"sharding_factor": 1}, "zero1 over one rank splits nothing"),
    ("deepspeed", {"strategy": "zero3", "year": 2021}, "DeepSpeed before 0.6 has no MiCS"),
    ("deepspeed", {"strategy": "zero3", "tensor": 2}, "knows no tensor ranks"),
    ("deepspeed", {"strategy": "zero3", "offload": {"optimizer": "cpu"}}, "MiCS has no support for offload"),
    ("megatron", {"pipeline": 2, "schedule": "dualpipe", "virtual_stages": 2, "micro_steps": 4},
     "beside schedule dualpipe"),
    ("megatron", {"model": {"moe": MOE}, "expert": 8, "sharding_factor": 4},
     "4 sets of states do not divide the 2 ranks that hold the same experts")])
def test_what_no_framework_splits_so_is_refused(framework: str, more: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        lower(asked(framework, **{"sharding_factor": 4, **more}))
