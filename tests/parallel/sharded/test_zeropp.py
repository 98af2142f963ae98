"""ZeRO++ and MiCS's gathers in two steps: bytes on every communicator, buffers and second shards by hand."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sim
from sim.api import machine_for
from sim.engine import simulate
from sim.errors import UserError
from sim.parallel import Lowered, lower
from sim.parallel.sharded.coordinator import Limits
from sim.parallel.sharded.quantised import scales
from sim.program import Kind
from sim.report.warned.asked import in_vain
from sim.scenario import Scenario, resolve

#: Four blocks of 12 · 1024² elements, no biases; norms are the only vectors.
H, LAYERS, VOCAB = 1024, 4, 8192
MODEL = {"kind": "decoder", "layers": LAYERS, "hidden": H, "heads": 8, "vocab": VOCAB, "positions": "rotary",
         "norm": "rmsnorm", "bias": False, "dropout": False, "gated_mlp": False, "tied_embeddings": False}
MATRICES = LAYERS * 12 * H**2 + 2 * VOCAB * H
VECTORS = (2 * LAYERS + 1) * H
ZERO_PP: dict[str, Any] = {"hpz": 8, "gather": "int8", "reduce": "int4"}


def asked(hpz: int | bool = True, gather: str = "fp16", reduce: str = "fp16", base: str = "mixed-fp16", nodes: int = 2,
          version: str = "0.14.4", micro_steps: int = 1, training: dict[str, Any] | None = None,
          strategy: str = "zero3", **parallel: Any) -> Scenario:
    half = {"fp16": base[-4:], "int8": "int8", "int4": "int4", "fp8": "fp8"}
    return resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": nodes}, "model": MODEL,
        "training": {"micro_batch": 1, "micro_steps": micro_steps, "sequence": 512, "recompute": "full",
                     "precision": {"name": base, "gather": half[gather], "reduce": half[reduce]}, **(training or {})},
        "parallel": {"strategy": strategy, "reshard_after_forward": hpz, **parallel},
        "software": {"framework": "deepspeed", "year": 2024, "modules": "plain", "versions": {"deepspeed": version}}})


def step_s(of: Scenario, low: Lowered) -> float:
    return simulate(low.job, machine_for(of, low)).step_time_s


@pytest.fixture
def lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model is let go of and gathered again as a large one is."""
    monkeypatch.setattr("sim.parallel.sharded.zero3.Limits", lambda: Limits(prefetch=0, reuse=1))


def moved(found: Lowered, phase: str = "") -> Counter[tuple[str, str, str]]:
    """Bytes of a step by kind, communicator and dtype."""
    program, names = found.job.programs[0], [c.name for c in found.job.communicators]
    bytes_moved: Counter[tuple[str, str, str]] = Counter()
    for number in program.section_runs():
        section = program.sections[number]
        for kind, payload, label in zip(section.kind, section.payload, section.label, strict=True):
            if kind == Kind.COLLECTIVE and phase in ("", program.labels[label].phase):
                call = program.collectives[payload]
                bytes_moved[call.kind, names[call.communicator], call.dtype] += call.size_bytes
    return bytes_moved


def held(found: Lowered, name: str) -> list[int]:
    """Sizes of tensors that a step allocates whose names begin so, in order."""
    program = found.job.programs[0]
    return [op.size_bytes for n, _ in program.schedule for op in program.sections[n].memory
            if op.tensor.startswith(name) and op.size_bytes > 0]


# ------------------------------------------------------------------------------------------------ quantised gathers
def deepspeeds_groups(numel: int) -> int:
    """partition_parameters.py, CUDAQuantizer.quantize, as it stands there (0.19.8)."""
    groups = math.ceil(numel / 8000)
    while groups < numel:
        if numel % (8 * groups) == 0:
            break
        groups += 1
    while numel % (8 * groups * 2) == 0 and numel / groups > 8000:
        groups *= 2
    assert numel % (8 * groups) == 0 and numel / groups < 16000 and numel > groups
    return groups


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.integers(1, 300_000).map(lambda n: 8 * n), st.sampled_from([8, 8000, 8008, 50257 * 160, 2**22])))
def test_groups_are_deepspeeds(numel: int) -> None:
    assert scales(numel) == deepspeeds_groups(numel)


def test_what_eight_does_not_divide_stops_deepspeed_and_is_refused() -> None:
    with pytest.raises(AssertionError):
        deepspeeds_groups(1004)
    with pytest.raises(UserError, match="stop at a rank's 1,004 elements"):
        scales(1004)


def test_gathers_in_int8_send_half_and_a_scale_for_every_group(lets_go: None) -> None:
    plain, narrow = moved(lower(asked())), moved(lower(asked(gather="int8")))
    small = 2 * VECTORS  # whole again behind the optimizer, as ever
    assert narrow["all_gather", "shard", "int8"] * 2 == plain["all_gather", "shard", "fp16"] - small
    assert narrow["all_gather", "shard", "fp16"] == small
    program = lower(asked(gather="int8")).job.programs[0]
    first = program.sections[program.schedule[0][0]]
    calls = [program.collectives[p] for kind, p in zip(first.kind, first.payload, strict=True)
             if kind == Kind.COLLECTIVE and program.collectives[p].kind == "all_gather"]
    # each gather with its scales behind it: of 16 ranks, 4 bytes for every group of a rank's elements
    assert [c.size_bytes for c in calls[1::2]] == [16 * 4 * scales(c.size_bytes // 16) for c in calls[::2]]
    # of a square matrix a rank has H² / 16, more than 8 · 8000, of queries, keys and values three times as many, more
    # than 24 · 8000: the next numbers of groups that divide them
    assert [scales(k * H**2 // 16) for k in (1, 3)] == [16, 32]


def test_int8_lasts_until_its_parameters_are_wide_and_needs_no_wide_buffer_of_one() -> None:
    found = lower(asked(gather="int8", nodes=1))
    own = held(found, "fetched:")
    assert sum(own) == 2 * MATRICES  # each parameter once, wide: what is used again within 1e9 elements stays
    narrow = held(found, "narrow:")
    assert sum(size for size in narrow) > MATRICES  # with scales, and flat tensors of several
    program = found.job.programs[0]
    assert sum(op.size_bytes for n, _ in program.schedule for op in program.sections[n].memory
               if op.tensor.startswith("narrow:")) == 0


# ------------------------------------------------------------------------------------------------ quantised reductions
def test_gradients_are_exchanged_in_the_node_and_then_between_nodes() -> None:
    found = moved(lower(asked(reduce="int4")), "backward")
    assert found["all_to_all", "intra_node", "int4"] == MATRICES / 2
    assert found["all_to_all", "inter_node", "int4"] == MATRICES / 2 / 8
    # as many groups as a matrix is high or wide: 3h, h, 4h, 4h of a block, the vocabulary twice
    groups = LAYERS * (3 + 1 + 4 + 4) * H + 2 * VOCAB
    assert found["all_to_all", "intra_node", "fp32"] == 4 * groups
    assert found["all_to_all", "inter_node", "fp32"] == 4 * groups / 8
    assert found["reduce_scatter", "shard", "fp16"] == 2 * VECTORS


def test_the_ranks_of_an_exchange() -> None:
    ranks = {c.name: c.ranks.tolist() for c in lower(asked(reduce="int4")).job.communicators}
    assert ranks["intra_node"] == [list(range(8)), list(range(8, 16))]
    assert ranks["inter_node"] == [[i, i + 8] for i in range(8)]


def test_a_matrix_that_twice_the_ranks_do_not_divide_is_reduced_in_16_bits() -> None:
    odd = {"vocab": 8191}
    scenario = asked(reduce="int4", nodes=16)  # 8191 · 1024 elements over 2 · 128 ranks: whole; so take 3 · 8 · 7 ranks
    assert moved(lower(scenario), "backward")["reduce_scatter", "shard", "fp16"] == 2 * VECTORS
    data = asked(reduce="int4", nodes=7)
    found = moved(lower(data.model_copy(update={"model": data.model.model_copy(update=odd)})), "backward")
    assert found["reduce_scatter", "shard", "fp16"] == 2 * (VECTORS + MATRICES - 2 * H)
    assert ("all_to_all", "intra_node", "int4") not in found


def test_on_one_node_nothing_is_quantised_and_that_is_said() -> None:
    narrow, plain = asked(reduce="int4", nodes=1), asked(nodes=1)
    assert sim.run(narrow).step_time_s == sim.run(plain).step_time_s
    assert any("between nodes only" in text for text in in_vain(narrow))
    assert not any("between nodes only" in text for text in in_vain(asked(reduce="int4")))


def test_buffers_of_an_exchange() -> None:
    """Of the largest gradient, 8192 · 1024: half a byte an element twice, an eighth of it twice, a sixteenth of 2 bytes
    on the device; each lies beside the gradient's before it."""
    found = lower(asked(reduce="int4"))
    numel = VOCAB * H
    assert max(held(found, "swizzled:")) == max(held(found, "exchanged inside:")) == numel / 2
    assert max(held(found, "summed:")) == max(held(found, "exchanged across:")) == numel / 16
    assert max(held(found, "wide:")) == 2 * numel / 8


# ------------------------------------------------------------------------------------------------ second shards
def test_one_gather_a_step_goes_over_all_ranks(lets_go: None) -> None:
    plain, near = (lower(asked(hpz, micro_steps=3)) for hpz in (True, 8))
    far, small = 2 * MATRICES, 2 * VECTORS
    assert moved(near)["all_gather", "shard", "fp16"] == far + small
    assert moved(near)["all_gather", "reshard", "fp16"] == moved(plain)["all_gather", "shard", "fp16"] - far - small
    assert moved(near)["reduce_scatter", "shard", "fp16"] == moved(plain)["reduce_scatter", "shard", "fp16"]
    ranks = {c.name: c.ranks.tolist() for c in near.job.communicators}
    assert ranks["reshard"] == [list(range(8)), list(range(8, 16))]


def test_second_shards_are_made_once_a_step_and_go_behind_the_optimizer(lets_go: None) -> None:
    found = lower(asked(4, micro_steps=3))
    program = found.job.programs[0]
    assert sum(held(found, "secondary:")) == 2 * MATRICES / 4
    assert all(program.sections[n].name == "optimizer step" for n, _ in program.schedule
               for op in program.sections[n].memory if op.tensor.startswith("secondary:") and op.size_bytes < 0)
    # whole matrices are read where they are let go of: 1/4 of each copied
    copies = [k for k in program.kernels if k.variant == "secondary shard"]
    assert {k.bytes for k in copies} >= {2 * 2 * 3 * H**2 / 4, 2 * 2 * H**2 / 4}


def test_a_peak_rises_by_the_second_shards(lets_go: None) -> None:
    plain, near = (sim.run(asked(hpz)).memory.use for hpz in (True, 2))
    assert near.at_peak["parameters"] - plain.at_peak["parameters"] == pytest.approx(2 * MATRICES / 2, rel=0.02)


@pytest.mark.parametrize(("version", "waits"), [("0.12.6", False), ("0.14.4", True), ("0.19.8", True)])
def test_the_host_waits_for_every_copy_from_0_14_on(version: str, waits: bool) -> None:
    program = lower(asked(8, version=version)).job.programs[0]
    first = program.sections[program.schedule[0][0]]
    found = [program.labels[label].name for label, kind in zip(first.label, first.kind, strict=True)
             if kind == Kind.HOST]
    assert ("secondary shard" in found) is waits


def test_frozen_parameters_keep_their_second_shards(lets_go: None) -> None:
    """LoRA's matrices are below the persistence threshold: what is let go of is all frozen."""
    tuned = {"finetune": {"method": "lora", "rank": 4, "targets": "all", "base": "fp16"}}
    found = lower(asked(8, training=tuned))
    gathered = moved(found)
    frozen = [size for name, size, _ in found.job.programs[0].resident if name == "secondary frozen parameters"]
    assert frozen == [2 * MATRICES / 8]
    assert not held(found, "secondary:")
    assert gathered["all_gather", "reshard", "fp16"] > 0
    assert gathered["all_gather", "shard", "fp16"] < 2 * MATRICES / 20  # adapters alone, behind the optimizer


# ------------------------------------------------------------------------------------------------ all together
def test_a_quarter_of_the_volume_crosses_nodes(lets_go: None) -> None:
    """Wang et al. 2023, table 1: 3 M against 0.75 M, of M elements in 16 bits, where scales and vectors are nothing and
    nothing is recomputed. An all-to-all between nodes has an eighth of the gradients in each of a node's GPUs."""
    plain, narrow = (moved(lower(asked(**ways, training={"recompute": "none"}))) for ways in ({}, ZERO_PP))
    m = 2 * MATRICES
    again = narrow["all_gather", "reshard", "int8"] / (m / 2)  # of the backward pass's gathers: all but the last's
    assert 0.8 < again <= 1
    assert plain["all_gather", "shard", "fp16"] + plain["reduce_scatter", "shard", "fp16"] == pytest.approx(
        (2 + again) * m, rel=1e-3)
    crossing = narrow["all_gather", "shard", "int8"] + 8 * narrow["all_to_all", "inter_node", "int4"]
    assert crossing == 0.75 * m


@pytest.mark.parametrize("ways", [{}, {"hpz": 8}, {"gather": "int8"}, {"reduce": "int4"}, ZERO_PP])
def test_memory_returns_to_where_it_began(ways: dict[str, Any], lets_go: None) -> None:
    program = lower(asked(**ways, micro_steps=2)).job.programs[0]
    level: Counter[str] = Counter()
    for number, repeats in program.schedule:
        for op in program.sections[number].memory * repeats:
            level[op.tensor] += op.size_bytes
            assert level[op.tensor] >= 0 or not op.tensor.startswith(("narrow", "secondary", "fetched", "swizzled"))
    assert not any(level.values())


def test_fewer_bytes_pay_where_links_between_nodes_are_slow() -> None:
    """On 100 Gb/s a node each of the three makes ZeRO-3 faster, and all together make it fastest."""
    def seconds(**ways: Any) -> float:
        data = asked(**ways, nodes=4, training={"sequence": 2048})
        slow = data.cluster.model_copy(update={"inter_gbps_per_node": 100.0})
        return sim.run(data.model_copy(update={"cluster": slow})).step_time_s

    plain, *each, both = (seconds(**w) for w in ({}, {"gather": "int8"}, {"reduce": "int4"}, ZERO_PP))
    assert both < min(each) and max(each) < plain


@pytest.mark.parametrize("ways", [{"hpz": 8}, {"gather": "int8"}, {"reduce": "int4"}])
def test_all_ranks_apart_take_as_long_as_one_for_all(ways: dict[str, Any]) -> None:
    scenario = asked(**ways)
    folded, apart = (step_s(scenario, lower(scenario, fold=fold)) for fold in (True, False))
    assert folded == pytest.approx(apart, rel=1e-9)


# ------------------------------------------------------------------------------------------------ gathers in two steps
def test_gathers_in_two_steps_cross_nodes_once() -> None:
    """32 ranks, shards over 16: what a node's eight GPUs each bring from the other node is an eighth."""
    flat, steps = (moved(lower(asked(nodes=4, sharding_factor=16, hierarchical_gather=two))) for two in (False, True))
    small = steps["all_gather", "shard", "fp16"]
    whole = flat["all_gather", "shard", "fp16"] - small
    assert steps["all_gather", "shard_inside", "fp16"] == whole
    assert steps["all_gather", "shard_across", "fp16"] == whole / 8
    ranks = {c.name: c.ranks.tolist() for c in lower(asked(
        nodes=4, sharding_factor=16, hierarchical_gather=True)).job.communicators}
    assert ranks["shard_inside"][1] == list(range(8, 16)) and ranks["shard_across"][0] == [0, 8]
    assert ranks["shard_across"][8] == [16, 24]


# ------------------------------------------------------------------------------------------------ refused, warned of
@pytest.mark.parametrize(("ways", "said"), [
    ({"hpz": 8, "version": "0.9.5"}, "second shards from 0.10"),
    ({"gather": "int8", "version": "0.9.5"}, "quantised gathers from 0.10"),
    ({"reduce": "int4", "strategy": "zero2"}, "quantised reductions in ZeRO-3 alone"),
    ({"gather": "int8", "strategy": "zero1"}, "quantised gathers in ZeRO-3 alone"),
    ({"gather": "int4"}, "quantises gathers to int8, not to int4"),
    ({"reduce": "int8"}, "quantises gradients to int4, not to int8"),
    ({"gather": "int8", "base": "mixed-bf16"}, "before 0.19"),
    ({"gather": "int8", "training": {"precision": {"name": "amp-fp16", "gather": "int8"}}}, "parameters are fp32"),
    ({"hpz": 8, "sharding_factor": 8}, "MiCS has no second shards"),
    ({"gather": "int8", "sharding_factor": 8}, "MiCS has no quantised gathers"),
    ({"hpz": 4, "tensor": 2}, "knows no tensor ranks"),
    ({"reduce": "int4", "tensor": 2}, "knows no tensor ranks"),
    ({"hpz": 1}, "over two ranks or more"),
    ({"hpz": 8, "offload": {"parameters": "cpu", "optimizer": "cpu"}}, "outside the GPU"),
    ({"hierarchical_gather": True}, "gathers in two steps are MiCS's"),
    ({"hierarchical_gather": True, "sharding_factor": 8}, "span a single node"),
    ({"hierarchical_gather": True, "sharding_factor": 24, "nodes": 6}, ""),
])
def test_what_deepspeed_has_no_code_for_is_refused(ways: dict[str, Any], said: str) -> None:
    scenario = asked(**ways)
    if not said:
        lower(scenario)
        return
    with pytest.raises(UserError, match=said):
        lower(scenario)


def test_gathers_of_tensor_slices_are_quantised_among_their_replicas() -> None:
    found = moved(lower(asked(gather="int8", tensor=2)))
    assert found["all_gather", "shard", "int8"] > 0


def test_bf16_is_cast_around_the_kernels_and_its_int4_reductions_are_warned_of() -> None:
    half, brain = (lower(asked(gather="int8", base=base, version="0.19.8")).job.programs[0].kernels
                   for base in ("mixed-fp16", "mixed-bf16"))
    assert {k.variant for k in brain} - {k.variant for k in half} == {"to fp16", "from fp16"}
    assert any("come out wrong" in text for text in in_vain(asked(reduce="int4", base="mixed-bf16", version="0.19.8")))


def test_resharding_that_changes_nothing_is_warned_of() -> None:
    kept = in_vain(asked(False))
    assert any("stage3_max_reuse_distance" in text for text in kept)
    assert any("zero2 keeps parameters whole" in text for text in in_vain(asked(8, strategy="zero2")))
    assert not any("reshard_after_forward" in text for ways in (asked(), asked(8)) for text in in_vain(ways))
