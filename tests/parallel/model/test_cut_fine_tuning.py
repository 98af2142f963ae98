"""LoRA of a cut model: what each tensor rank holds and sends, and stages of a pipeline, counted by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import UserError
from sim.memory.ledger import peak
from sim.parallel import Lowered, lower
from sim.program import Kind, Program
from sim.scenario import resolve

HIDDEN, FFN, LAYERS, HEADS, VOCAB, SEQUENCE, RANK = 512, 1536, 4, 8, 4096, 256, 8
ALL = ["query", "key", "value", "projection", "mlp"]


def tuned(modules: str = "plain", base: str = "bf16", method: str = "lora", targets: list[str] | None = None,
          batch: int = 2, recompute: str = "none", rank: int = RANK, **parallel: Any) -> Lowered:
    cut = parallel.get("tensor", 1) * parallel.get("pipeline", 1)
    return lower(resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": 1},
        "model": {"kind": "decoder", "layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "ffn": FFN, "vocab": VOCAB,
                  "gated_mlp": True, "norm": "rmsnorm", "positions": "rotary", "bias": False, "dropout": False,
                  "tied_embeddings": False},
        "training": {"micro_batch": batch, "global_batch": batch * 4 * 8 // cut, "sequence": SEQUENCE,
                     "precision": "pure-bf16", "optimizer": "adamw", "recompute": recompute,
                     "finetune": {"method": method, "rank": rank, "base": base, "targets": targets or ALL}},
        "parallel": {"strategy": "ddp", **parallel},
        "software": {"framework": "pytorch", "modules": modules}}))


def sent(program: Program) -> dict[int, int]:
    """All-reduces of the tensor group in one micro-step, by their bytes."""
    number = program.communicators.index("tensor")
    found: Counter[int] = Counter()

    def note(row: int) -> None:
        if program.collectives[row].communicator == number:
            found[program.collectives[row].size_bytes] += 1

    section = program.sections[0]
    for kind, payload in zip(section.kind, section.payload, strict=True):
        if kind == Kind.COLLECTIVE:
            note(payload)
        elif kind == Kind.KERNELS:
            for row in program.segments[payload].kernels:
                if row < 0:
                    note(program.inlines[-1 - row].collective)
    return dict(found)


def trained(tensor: int) -> int:
    """Elements of one rank's matrices: A whole and B cut beside columns, A cut and B whole beside rows."""
    qkv = 3 * RANK * HIDDEN + 3 * HIDDEN * RANK // tensor
    projection = RANK * HIDDEN // tensor + HIDDEN * RANK
    up = 2 * (RANK * HIDDEN + FFN * RANK // tensor)
    down = RANK * FFN // tensor + HIDDEN * RANK
    return LAYERS * (qkv + projection + up + down)


def states(program: Program) -> int:
    return sum(size for _, size, category in program.resident if category == "optimizer_states")


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("modules", ["plain", "transformers"])
def test_each_rank_trains_the_whole_and_the_cut_matrices(tensor: int, modules: str) -> None:
    assert states(tuned(modules, tensor=tensor).job.programs[0]) == 2 * 2 * trained(tensor)


def test_branches_add_small_sums_to_those_of_the_products() -> None:
    tokens = 2 * SEQUENCE
    found = sent(tuned(tensor=4).job.programs[0])
    # forward: A of projection and down are cut by rows; backward: B of up, gate (rank each) and qkv (three parts)
    assert found[2 * tokens * RANK] == LAYERS * (2 + 2)
    assert found[2 * tokens * 3 * RANK] == LAYERS
    # the products' own: two a block each way, the table forward and the head backward
    assert found[2 * tokens * HIDDEN] == LAYERS * (2 + 2) + 2
    few = sent(tuned(tensor=4, targets=["projection"]).job.programs[0])
    assert few[2 * tokens * RANK] == LAYERS


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([2, 4]), st.sampled_from(["plain", "transformers"]), st.sampled_from(["none", "full"]),
       st.sampled_from([1, 2, 3]), st.lists(st.sampled_from(ALL), min_size=1, unique=True))
def test_a_cut_job_is_steady_and_needs_less_than_a_whole_one(
        tensor: int, modules: str, recompute: str, batch: int, targets: list[str]) -> None:
    uses = [peak(tuned(modules, targets=targets, batch=batch, recompute=recompute, tensor=t).job.programs[0])
            for t in (1, tensor)]
    assert all(use.steady for use in uses)
    assert uses[1].peak_allocated_bytes < uses[0].peak_allocated_bytes


@pytest.mark.parametrize(("base", "schedule"), [("bf16", "1f1b"), ("bf16", "gpipe"), ("bf16", "zb-h1"),
                                                ("nf4", "1f1b")])
def test_stages_share_what_is_trained(base: str, schedule: str) -> None:
    whole = states(tuned(base=base).job.programs[0])
    stages = tuned(base=base, pipeline=2, schedule=schedule).job.programs
    assert sum(states(stage) for stage in stages) == pytest.approx(whole, rel=1e-3)
    assert all(peak(stage).steady for stage in stages)


@pytest.mark.parametrize(("method", "base"), [("lora", "bf16"), ("qlora", "nf4"), ("adapter", "bf16")])
def test_context_ranks_share_tokens_and_reduce_adapters_with_the_replicas(method: str, base: str) -> None:
    def products(lowered: Lowered) -> float:
        program = lowered.job.programs[0]
        section = program.sections[0]
        rows = [row for kind, payload in zip(section.kind, section.payload, strict=True) if kind == Kind.KERNELS
                for row in program.segments[payload].kernels if row >= 0]
        return sum(program.kernels[row].flops for row in rows if program.kernels[row].op == "gemm")

    whole, cut = (tuned(method=method, base=base, context=context) for context in (1, 2))
    assert products(cut) == pytest.approx(products(whole) / 2)
    uses = [peak(one.job.programs[0]) for one in (whole, cut)]
    assert uses[1].steady
    # flash attention's keys and values of the neighbour come on top
    assert 0.45 < uses[1].category_peaks["activations"] / uses[0].category_peaks["activations"] < 0.6
    program = cut.job.programs[0]
    reduced = [call for call in program.collectives if call.kind == "all_reduce"]
    groups = {program.communicators[call.communicator] for call in reduced}
    assert groups == {"data"}
    assert {c.size for c in cut.job.communicators if c.name == "data"} == {8}


@pytest.mark.parametrize(("more", "said"), [
    ({"tensor": 2, "method": "adapter"}, "no framework cuts adapters of plain modules"),
    ({"modules": "megatron", "tensor": 2, "method": "adapter", "sequence_parallel": True}, "different tokens"),
    ({"modules": "megatron", "tensor": 8, "method": "adapter", "rank": 12}, "width 12"),
    ({"tensor": 8, "sequence_parallel": True, "rank": 12}, "rank 12")])
def test_what_is_not_simulated_is_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        tuned(**more)


# -------------------------------------------------------------------------------------------- both matrices cut (NeMo)
def both_cut(tensor: int, parts: bool) -> int:
    """Elements of one rank's matrices in Megatron-Bridge's ParallelLinearAdapter: A and B cut over the ranks.

    Args:
        parts: projections are modules of their own (Hugging Face's), not fused as Megatron's.
    """
    columns = [HIDDEN] * 3 + [FFN] * 2 if parts else [3 * HIDDEN, 2 * FFN]
    beside = sum(RANK * HIDDEN + outputs * RANK for outputs in columns)
    behind = sum(RANK * inputs + HIDDEN * RANK for inputs in (HIDDEN, FFN))
    return LAYERS * (beside + behind) // tensor


@pytest.mark.parametrize("tensor", [2, 4, 8])
@pytest.mark.parametrize(("modules", "sequence"), [("megatron", False), ("megatron", True), ("transformers", True)])
def test_both_matrices_are_cut(tensor: int, modules: str, sequence: bool) -> None:
    program = tuned(modules, tensor=tensor, sequence_parallel=sequence).job.programs[0]
    assert states(program) == 2 * 2 * both_cut(tensor, modules == "transformers")


def kinds(program: Program) -> Counter[tuple[str, int]]:
    """Collectives of the tensor group in one micro-step, by kind and bytes."""
    number, found = program.communicators.index("tensor"), Counter[tuple[str, int]]()
    section = program.sections[0]
    for kind, payload in zip(section.kind, section.payload, strict=True):
        rows = [payload] if kind == Kind.COLLECTIVE else [
            program.inlines[-1 - row].collective for row in program.segments[payload].kernels if row < 0
        ] if kind == Kind.KERNELS else []
        for row in rows:
            call = program.collectives[row]
            if call.communicator == number:
                found[call.kind, call.size_bytes] += 1
    return found


def test_branches_of_scattered_activations_gather_columns_and_outputs() -> None:
    """ParallelLinearAdapter in a block: beside qkv and fc1 A's columns are gathered and B's input gradient summed;
    beside the other two A's partial sums are summed, B's outputs gathered and B's input gradient summed; their
    output's gradient is gathered as scatter_to_sequence_parallel_region's derivative. The base gathers its input and
    scatters its output both ways, and nothing again for weights that are frozen."""
    between, stream = 2 * 2 * SEQUENCE * RANK, 2 * 2 * SEQUENCE * HIDDEN
    bare = kinds(tuned("megatron", tensor=4, sequence_parallel=True, targets=["head"]).job.programs[0])
    found = kinds(tuned("megatron", tensor=4, sequence_parallel=True).job.programs[0])
    assert bare["all_gather", stream] >= 2 * LAYERS * 2
    more = Counter({key: n - bare[key] for key, n in found.items() if n != bare[key]})
    head = Counter({("all_gather", between): 1, ("all_reduce", between): 1})  # only where it is a target
    assert more + head == Counter({
        ("all_gather", between): 2 * LAYERS, ("all_reduce", between): (2 + 2 + 2) * LAYERS,
        ("all_gather", stream): (2 + 2) * LAYERS})


def test_branches_of_whole_activations_sum_the_inputs_gradient_themselves() -> None:
    between, stream = 2 * 2 * SEQUENCE * RANK, 2 * 2 * SEQUENCE * HIDDEN
    bare, found = (kinds(tuned("megatron", tensor=4, targets=targets).job.programs[0])
                   for targets in (["head"], ["query", "mlp", "head"]))
    assert found["all_reduce", stream] - bare["all_reduce", stream] == 2 * LAYERS  # of qkv's A and fc1's A
    assert found["all_gather", stream] - bare["all_gather", stream] == LAYERS  # fc2's outputs
    assert found["all_gather", between] - bare["all_gather", between] == 2 * LAYERS


def test_a_frozen_scattered_product_gathers_its_input_once() -> None:
    """Without a weight gradient the second gathering, of backward, has nothing to serve."""
    stream = 2 * 2 * SEQUENCE * HIDDEN
    found = kinds(tuned("megatron", tensor=4, sequence_parallel=True, targets=["head"]).job.programs[0])
    # forward: qkv, fc1 of every block and the head; backward: the gradient before projection and fc2
    assert found["all_gather", stream] == 2 * LAYERS + 1 + 2 * LAYERS


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([2, 4, 8]), st.sampled_from(["plain", "transformers", "megatron"]), st.booleans(),
       st.sampled_from(["bf16", "nf4", "int8"]), st.sampled_from(["none", "full", "selective"]),
       st.lists(st.sampled_from(ALL), min_size=1, unique=True))
def test_cut_branches_of_any_base_are_steady(tensor: int, modules: str, sequence: bool, base: str, recompute: str,
                                             targets: list[str]) -> None:
    method = "lora" if base == "bf16" else "qlora"
    uses = [peak(tuned(modules, base, method, targets, recompute=recompute, tensor=t,
                       sequence_parallel=sequence and t > 1).job.programs[0]) for t in (1, tensor)]
    assert all(use.steady for use in uses)
    assert uses[1].peak_allocated_bytes < uses[0].peak_allocated_bytes


# ------------------------------------------------------------------------------------ bottlenecks behind cut sub-layers
@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_adapters_are_cut_like_their_columns_and_their_norm_is_whole(tensor: int) -> None:
    """NeMo's ParallelLinearAdapter behind attention and the feed-forward part: no biases, a LayerNorm, and the model's
    own norms stay frozen."""
    program = tuned("megatron", method="adapter", tensor=tensor).job.programs[0]
    assert states(program) == 2 * 2 * 2 * LAYERS * (2 * HIDDEN * RANK // tensor + 2 * HIDDEN)


def test_adapters_gather_columns_both_ways_and_sum_outputs_and_input_gradients() -> None:
    between, stream = 2 * 2 * SEQUENCE * RANK, 2 * 2 * SEQUENCE * HIDDEN
    bare, found = (kinds(tuned("megatron", method=method, tensor=4, targets=targets).job.programs[0])
                   for method, targets in (("lora", ["head"]), ("adapter", ["projection", "mlp"])))
    head = Counter({("all_gather", between): 1, ("all_reduce", between): 1, ("all_reduce", stream): 1})
    more = Counter({key: found[key] - bare[key] for key in found | bare if found[key] != bare[key]})
    assert {key: more[key] + head[key] for key in more} == {
        ("all_gather", between): 2 * 2 * LAYERS, ("all_reduce", between): 0, ("all_reduce", stream): 2 * 2 * LAYERS}


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([2, 4, 8]), st.sampled_from(["bf16", "nf4"]), st.sampled_from(["none", "full", "selective"]),
       st.sampled_from([["query"], ["mlp"], ALL]))
def test_cut_adapters_are_steady(tensor: int, base: str, recompute: str, targets: list[str]) -> None:
    uses = [peak(tuned("megatron", base, "adapter", targets, recompute=recompute, tensor=t).job.programs[0])
            for t in (1, tensor)]
    assert all(use.steady for use in uses)
    assert uses[1].peak_allocated_bytes < uses[0].peak_allocated_bytes


def test_a_slice_of_quantised_weights_is_dequantised_where_it_is() -> None:
    program = tuned(base="nf4", method="qlora", tensor=4).job.programs[0]
    made = sorted({k.shape[0] for k in program.kernels if k.variant == "dequantise"})
    assert made == sorted({3 * HIDDEN * HIDDEN // 4, HIDDEN * HIDDEN // 4, HIDDEN * FFN // 4, VOCAB * HIDDEN // 4})


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_stage_without_anything_trained(strategy: str) -> None:
    """The embedding alone: its table is frozen, and the stage only passes on."""
    stages = tuned(pipeline=2, split=[0, LAYERS], strategy=strategy).job.programs
    assert states(stages[0]) == 0
    assert states(stages[1]) > 0
    assert all(peak(stage).steady for stage in stages)


@pytest.mark.parametrize("targets", [ALL, [*ALL, "head"]])
def test_scattered_tokens_meet_in_front_of_a_frozen_head(targets: list[str]) -> None:
    """Each of 4 ranks has its quarter of the vocabulary for all tokens, whether or not it holds all of them before."""
    apart, whole = (peak(tuned("megatron", targets=targets, tensor=4, sequence_parallel=scattered).job.programs[0])
                    for scattered in (True, False))
    quarter = 2 * SEQUENCE * VOCAB // 4
    assert whole.category_peaks["logits"] >= 4 * quarter  # in fp32
    assert apart.category_peaks["logits"] >= whole.category_peaks["logits"]
