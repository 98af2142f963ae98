"""Muon among ranks: states, who orthogonalises what, collectives on the timeline, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sim.api import run
from sim.errors import UserError
from sim.memory.ledger import peak
from sim.model import build
from sim.model.update.muon import newton_schulz_flops, takes
from sim.parallel import Lowered, lower
from sim.parallel import muon as of_ranks
from sim.parallel.lower import choose, layout_of
from sim.parallel.sharded.dist_muon import critical, dealt_in_bucket
from sim.parallel.sharded.fsdp2 import Fsdp2
from sim.program import Kind
from sim.scenario import resolve
from sim.scenario.fields.schema import Scenario
from sim.software import stack_of

DENSE: dict[str, Any] = {"kind": "decoder", "layers": 4, "hidden": 512, "heads": 8, "kv_heads": 4, "ffn": 1024,
                         "vocab": 8000, "positions": "rotary", "norm": "rmsnorm", "bias": False, "gated_mlp": True,
                         "activation": "silu"}
SPARSE: dict[str, Any] = {**DENSE, "moe": {"experts": 8, "top_k": 2, "expert_ffn": 256}}
MEGATRON: dict[str, Any] = {"framework": "megatron", "year": 2026}
TITAN: dict[str, Any] = {"framework": "torchtitan", "year": 2026, "versions": {"torchtitan": "0.3"}}


def scenario(*, gpus: int = 1, model: Any = None, software: Any = None, training: Any = None,
             **parallel: Any) -> Scenario:
    framework = (software or {}).get("framework")
    precision = {"megatron": "megatron-bf16", "torchtitan": "fsdp-bf16"}.get(str(framework), "fp32")
    return resolve({
        "name": "t", "cluster": {"topology": "dgx-h100", "gpus_per_node": gpus}, "model": model or DENSE,
        "training": {"micro_batch": 1, "global_batch": 16, "sequence": 256, "precision": precision,
                     "optimizer": "muon", **(training or {})},
        "parallel": parallel, "software": software or {"framework": "pytorch", "year": 2026}})


def collectives(low: Lowered, phase: str = "optimizer") -> list[tuple[str, str, int]]:
    """Kind, communicator and bytes of every collective of a phase, those inside segments too."""
    p = low.job.programs[0]
    found = []
    for section in p.sections:
        for kind, payload, label in zip(section.kind, section.payload, section.label, strict=True):
            if p.labels[label].phase != phase:
                continue
            if kind == Kind.COLLECTIVE:
                found.append(p.collectives[payload])
            elif kind == Kind.KERNELS:
                found += [p.collectives[p.inlines[-1 - row].collective] for row in p.segments[payload].kernels
                          if row < 0]
    return [(call.kind, low.job.programs[0].communicators[call.communicator], call.size_bytes) for call in found]


def flops(low: Lowered) -> float:
    """Of products of the optimizer."""
    p = low.job.programs[0]
    return sum(p.kernels[row].flops for section in p.sections for kind, payload, label in zip(
        section.kind, section.payload, section.label, strict=True) if kind == Kind.KERNELS
        and p.labels[label].phase == "optimizer" for row in p.segments[payload].kernels if row >= 0)


def test_matrices_of_blocks_keep_one_state_and_the_rest_two() -> None:
    low = lower(scenario())
    stack = low.architecture.stack
    hidden = sum(p.numel for layer in stack for p in layer.parameters if takes(layer, p))
    # by hand: queries, keys and values, output, three of the feed-forward part, in four blocks
    assert hidden == 4 * (512 * (512 + 2 * 256) + 512 * 512 + 3 * 512 * 1024)
    states = peak(low.job.programs[0]).category_peaks["optimizer_states"]
    assert 0 <= states - 4 * (hidden + 2 * (low.architecture.parameters - hidden)) < 512 * 100


def test_one_gpu_orthogonalises_everything_once_a_step() -> None:
    low = lower(scenario())
    wide = 4 * 512 * 512 * 1024 + 2 * 512**3  # 512 x 1,024, transposed or not: queries with keys and values too
    assert flops(low) == 5 * 4 * (4 * wide + 6 * 512**3)
    assert flops(lower(scenario(training={"muon": {"ns_steps": 3}}))) == flops(low) * 3 / 5
    assert collectives(low) == []


def test_what_it_makes_for_a_moment_is_in_the_workspace() -> None:
    """512 x 1,024 in fp32: Nesterov's sum (4 bytes an element), two of bf16 beside two 512 x 512."""
    program = lower(scenario()).job.programs[0]
    sizes = {op.size_bytes for section in program.sections for op in section.memory if op.tensor == "orthogonalisation"}
    held = 512 * 1024 * (4 + 2 + 2) + 2 * 512 * 512 * 2
    assert sizes == {held, -held}


def test_replicas_all_do_everything() -> None:
    alone, two = lower(scenario()), lower(scenario(gpus=8, strategy="ddp"))
    assert flops(two) == flops(alone)
    assert [kind for kind, *_ in collectives(two)] == []


def test_whole_parameters_are_dealt_out_back_and_forth() -> None:
    """Four ranks and ten parameters, as the docstring of shard_params has it."""
    plan = SimpleNamespace(replicas=4, groups={}, stack=SimpleNamespace(muon="emerging", muon_nesterov=False),
                           expert_replicas=1)
    ones = [of_ranks._One(10 + i, None, False) for i in range(10)]
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patched:
        patched.setattr(of_ranks, "_ones", lambda _: ones)
        patched.setattr(of_ranks, "recipe_of", lambda _: SimpleNamespace(steps=5))
        found = of_ranks.dealt(plan)  # type: ignore[arg-type]
    # [[p0, p7, p8], [p1, p6, p9], [p2, p5], [p3, p4]]: the second has most
    assert found.fullest.others == (11, 16, 19)


def test_layer_wise_shares_cover_everything_and_gather_it_again() -> None:
    low = lower(scenario(gpus=8, software=MEGATRON, strategy="zero1"))
    every = lower(scenario(gpus=8, software=MEGATRON, strategy="ddp"))
    # 16 matrices and 17 other tensors over eight ranks: nobody has less than an eighth, or more than all
    assert flops(every) / 8 <= flops(low) < flops(every) / 2
    half = low.architecture.parameters * 2
    assert ("all_gather", "data", half) in collectives(low)
    assert [kind for kind, *_ in collectives(low, "backward")] == ["all_reduce"]
    assert all(kind != "all_gather" for kind, *_ in collectives(every))
    own, all_ = (peak(one.job.programs[0]).category_peaks["optimizer_states"] for one in (low, every))
    table = 8 * 8000 * 512  # AdamW's two moments of the embedding, or of the head, which one rank has whole
    assert table < own < table + all_ / 8


def test_experts_are_dealt_among_those_that_hold_them() -> None:
    low = lower(scenario(gpus=8, model=SPARSE, software=MEGATRON, strategy="zero1", expert=4))
    stack = low.architecture.stack
    routed = sum(p.numel for layer in stack for p in layer.parameters if p.routed) // 4
    dense = sum(p.numel for layer in stack for p in layer.parameters if not p.routed)
    gathers = [one for one in collectives(low) if one[0] == "all_gather"]
    assert gathers == [("all_gather", "data", 2 * dense), ("all_gather", "expert_data", 2 * routed)]


@pytest.mark.parametrize(("mode", "kinds"), [
    ("blockwise", set()), ("duplicated", {"all_gather"}), ("distributed", {"all_reduce"})])
def test_what_tensor_ranks_do_is_on_the_timeline(mode: str, kinds: set[str]) -> None:
    low = lower(scenario(gpus=4, software=MEGATRON, strategy="ddp", tensor=4, sequence_parallel=True,
                         training={"muon": {"tensor": mode}}))
    norms = 4 * (2 * 4 + 1) * 512  # whose gradients tensor ranks add up in fp32, four blocks' and the head's
    assert ("all_reduce", "tensor", norms) in collectives(low)
    found = [one for one in collectives(low) if one[1] == "tensor" and one[2] not in (4, norms)]
    assert {kind for kind, *_ in found} == kinds
    if mode == "duplicated":  # every cut matrix whole in fp32: queries, keys, values; output; up with gate; down
        assert sorted(size for *_, size in found) == sorted(
            4 * [4 * 512 * 512, 4 * 256 * 512, 4 * 256 * 512, 4 * 512 * 512, 4 * 2048 * 512, 4 * 512 * 1024])


def test_stages_orthogonalise_their_own() -> None:
    low = lower(scenario(gpus=2, software=MEGATRON, strategy="none", pipeline=2))
    whole = lower(scenario(software=MEGATRON))
    assert flops(low) == flops(whole) / 2


# ---------------------------------------------------------------------------------------------------- torchtitan's
def fsdp(gpus: int, **more: Any) -> Fsdp2:
    s = scenario(gpus=gpus, software=TITAN, strategy="fsdp", **more)
    stack = stack_of(s.software)
    found = choose(s, stack, build(s, stack, 1), layout_of(s))
    assert isinstance(found, Fsdp2)
    return found


def test_buckets_are_the_first_block_and_pairs() -> None:
    muon = fsdp(8).muon
    assert muon is not None
    assert [len(bucket.owned) for bucket in muon.buckets] == [5, 10, 5]
    total = sum(newton_schulz_flops(t.matrix, 5) for bucket in muon.buckets for t in bucket.owned)
    every = sum(newton_schulz_flops(m, 5) for bucket in muon.buckets for rank in range(8) for m in bucket.of(rank))
    assert every == total == flops(lower(scenario()))


def test_shards_travel_to_owners_and_back() -> None:
    low = lower(scenario(gpus=8, software=TITAN, strategy="fsdp"))
    calls = [one for one in collectives(low) if one[0] == "all_to_all"]
    # the fullest owner of a block has 512 x 1,024 in fp32. Two blocks have eight such for eight ranks, and two of
    # 512 x 512 besides
    assert len(calls) == 6 and {group for _, group, _ in calls} == {"shard"}
    one, two = 4 * 512 * 1024, 4 * 512 * 1536
    assert [size for *_, size in calls] == [one, two, one, one, two, one]


def test_experts_stay_where_they_are() -> None:
    technique = fsdp(8, model=SPARSE, expert=2)
    assert technique.muon is not None
    local = [t for bucket in technique.muon.buckets for t in bucket.local]
    # eight experts over eight ranks: one of each product on every rank
    assert [t.matrix[:3] for t in local] == [(256, 512, 1), (256, 512, 1), (512, 256, 1)] * 4
    assert all(not t.matrix.routed for bucket in technique.muon.buckets for t in bucket.owned)


def test_one_rank_sends_nothing() -> None:
    low = lower(scenario(gpus=8, software=TITAN, strategy="fsdp", sharding_factor=1))
    assert not [one for one in collectives(low) if one[0] == "all_to_all"]
    assert flops(low) == flops(lower(scenario()))


def test_the_heaviest_goes_to_who_has_least() -> None:
    owners, totals = dealt_in_bucket([(3, 30), (5, 50), (4, 40), (1, 10)], [0.0, 2.0])
    # 5 to the first (least in all), 4 to the other, 3 to it too, which is at 4 of this bucket, 1 to who is at 5
    assert owners == [1, 0, 1, 0] and totals == [6.0, 9.0]


@pytest.mark.parametrize(("work", "chain"), [
    ([[4.0], [2.0], [3.0]], [0, 0, 0]),                         # one rank does it all
    ([[5.0, 0.0], [0.0, 4.0], [0.0, 5.0]], [0, -1, 1]),         # buckets beside one another: only every second counts
    ([[9.0, 0.0], [1.0, 1.0], [0.0, 4.0]], [0, -1, 1])])        # the third waits for the first to be back
def test_the_chain_that_takes_longest(work: list[list[float]], chain: list[int]) -> None:
    assert critical(work) == chain


# ---------------------------------------------------------------------------------------------------- refused
@pytest.mark.parametrize(("given", "field"), [
    ({"software": {"framework": "pytorch", "year": 2025}}, "training.optimizer"),
    ({"software": {"framework": "deepspeed", "year": 2026}, "gpus": 8, "strategy": "zero2"}, "training.optimizer"),
    ({"software": {"framework": "torchtitan", "year": 2026}, "gpus": 8, "strategy": "fsdp"}, "training.optimizer"),
    ({"gpus": 8, "strategy": "fsdp"}, "parallel.strategy"),
    ({"gpus": 8, "strategy": "zero1"}, "parallel.strategy"),
    ({"gpus": 8, "tensor": 2}, "parallel.tensor"),
    ({"software": {"framework": "pytorch", "year": 2026, "modules": "transformers"}, "model": SPARSE},
     "training.optimizer"),
    ({"training": {"optimizer_in_backward": True}}, "training.optimizer_in_backward"),
    ({"training": {"muon": {"tensor": "duplicated"}}}, "training.muon.tensor"),
    ({"training": {"muon": {"split_qkv": True}}}, "training.muon.split_qkv"),
    ({"training": {"finetune": {"method": "lora"}}}, "training.optimizer"),
    ({"offload": {"optimizer": "paged"}}, "parallel.offload"),
    ({"software": MEGATRON, "gpus": 8, "strategy": "fsdp"}, "parallel.strategy"),
    ({"software": MEGATRON, "gpus": 8, "strategy": "zero1", "sharding_factor": 4}, "parallel.sharding_factor"),
    ({"software": MEGATRON, "gpus": 8, "strategy": "zero1", "offload": {"optimizer": "cpu"}},
     "parallel.offload.optimizer"),
    ({"software": MEGATRON, "training": {"precision": "megatron-fp16"}}, "training.precision"),
    ({"software": MEGATRON, "training": {"precision": "pure-bf16"}}, "training.precision"),
    ({"software": TITAN, "gpus": 8, "strategy": "ddp"}, "parallel.strategy"),
    ({"software": TITAN, "gpus": 8, "strategy": "fsdp", "pipeline": 2}, "parallel.pipeline"),
    ({"software": TITAN, "gpus": 8, "strategy": "fsdp", "tensor": 2}, "parallel.tensor"),
])
def test_what_no_code_runs_is_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError) as caught:
        lower(scenario(**given))
    faults = {fault.field: fault for fault in caught.value.faults}
    assert field in faults and faults[field].hint


def test_settings_of_muon_without_it() -> None:
    with pytest.raises(UserError) as caught:
        scenario(training={"optimizer": "adamw", "muon": {"ns_steps": 6}})
    assert [fault.field for fault in caught.value.faults] == ["training.muon"]


def test_a_step_that_is_mostly_muon_is_bound_by_tensor_cores() -> None:
    """Of 256 tokens; the optimizer's other kernels count as memory traffic."""
    wide = {**DENSE, "hidden": 4096, "heads": 32, "ffn": 11008}
    found = {name: run(scenario(model=wide, training={"global_batch": 1, "optimizer": name}))
             for name in ("muon", "adamw")}
    parts = found["muon"].breakdown
    assert parts.compute["optimizer"] > parts.optimizer_products > parts.compute["optimizer"] / 2
    assert parts.compute["optimizer"] > 2 * (parts.compute["gemm"] + parts.compute["attention"])
    assert found["muon"].bound == "compute" and found["adamw"].breakdown.optimizer_products == 0


# ---------------------------------------------------------------------------------------------------- whole models
LLAMA: dict[str, Any] = {
    "kind": "decoder", "gated_mlp": True, "positions": "rotary", "norm": "rmsnorm", "bias": False, "layers": 4,
    "tied_embeddings": False, "hidden": 4096, "heads": 32, "head_dim": 128, "kv_heads": 32, "ffn": 11008,
    "vocab": 32000}


@pytest.mark.parametrize(("more", "precision", "gpus", "states", "peaks"), [
    ({}, "pure-bf16", 1, 2667724800, (5373948416, 6958655488, 7478821888)),
    ({}, "fp32", 1, 5335449600, (10475491840, 13917300736, 14957634560)),
    ({"kv_heads": 8, "ffn": 14336, "vocab": 128256}, "amp-bf16", 8, 11895341056,
     (31257629184, 34981242880, 39175693312)),
])
def test_memory_is_pytorchs(more: dict[str, Any], precision: str, gpus: int, states: int,
                            peaks: tuple[int, int, int]) -> None:
    """Transformers' Llama of four layers on 512 tokens, alone or under DDP, with torch.optim.Muon on its blocks'
    matrices and foreach AdamW on the rest: PyTorch 2.13.0 on fake tensors (the oracle's way), to the byte. What it does
    not see is cuBLAS' workspace."""
    program = lower(scenario(
        gpus=gpus, model={**LLAMA, **more}, strategy="ddp" if gpus > 1 else "none",
        training={"precision": precision, "global_batch": gpus, "sequence": 512, "attention": "flash"},
        software={"framework": "pytorch", "year": 2026, "modules": "transformers"})).job.programs[0]
    unseen = sum(size for name, size, _ in program.resident if name == "cuBLAS workspaces")
    program.resident = [row for row in program.resident if row[2] != "context"]
    found = peak(program)
    assert found.category_peaks["optimizer_states"] == states
    assert tuple(round(found.highest[phase] - unseen) for phase in ("forward", "backward", "optimizer")) == peaks
