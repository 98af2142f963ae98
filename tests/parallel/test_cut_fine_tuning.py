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
          batch: int = 2, recompute: str = "none", **parallel: Any) -> Lowered:
    cut = parallel.get("tensor", 1) * parallel.get("pipeline", 1)
    return lower(resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": 1},
        "model": {"kind": "decoder", "layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "ffn": FFN, "vocab": VOCAB,
                  "gated_mlp": True, "norm": "rmsnorm", "positions": "rotary", "bias": False, "dropout": False,
                  "tied_embeddings": False},
        "training": {"micro_batch": batch, "global_batch": batch * 4 * 8 // cut, "sequence": SEQUENCE,
                     "precision": "pure-bf16", "optimizer": "adamw", "recompute": recompute,
                     "finetune": {"method": method, "rank": RANK, "base": base, "targets": targets or ALL}},
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


@pytest.mark.parametrize("more", [
    {"tensor": 2, "base": "nf4"}, {"tensor": 2, "method": "adapter"}, {"tensor": 2, "sequence_parallel": True}])
def test_what_is_not_simulated_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="finetune"):
        tuned(**more)
