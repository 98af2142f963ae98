"""Tensor, sequence, context, expert and pipeline parallelism: traffic by hand, bubbles, memory, coarsening."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import sim
from sim.api import machine_for
from sim.engine import Machine, longest_path, simulate
from sim.errors import UserError
from sim.memory.ledger import peak
from sim.parallel import lower
from sim.parallel.pipeline.bubble import bubble_time
from sim.parallel.pipeline.orders import Costs
from sim.program.expand import expand
from sim.report.numbers.traffic import traffic_totals
from sim.scenario import resolve

LAYERS, HIDDEN, SEQUENCE, VOCAB = 8, 512, 256, 1024


def scenario(framework: str = "megatron", year: int = 2022, nodes: int = 1, layers: int = LAYERS,
             precision: str = "pure-bf16", recompute: str = "none",
             micro_batches: int = 8, **parallel: Any) -> Any:
    """A small decoder on A100 nodes; `micro_batches` per replica."""
    model = {"kind": "decoder", "layers": layers, "hidden": HIDDEN, "heads": 8, "vocab": VOCAB, "positions": "rotary",
             "norm": "layernorm", "bias": True, "dropout": False, "max_positions": SEQUENCE, "tied_embeddings": False}
    model |= parallel.pop("model", {})
    cut = parallel.get("tensor", 1) * parallel.get("context", 1) * parallel.get("pipeline", 1)
    return resolve({
        "name": "cut", "cluster": {"topology": "dgx-a100-80g", "nodes": nodes}, "model": model,
        "training": {"micro_batch": 2, "global_batch": 2 * micro_batches * 8 * nodes // cut, "sequence": SEQUENCE,
                     "precision": precision, "optimizer": "adam", "attention": "eager", "recompute": recompute},
        "parallel": {"strategy": "ddp", **parallel},
        "software": {"framework": framework, "year": year, "modules": "megatron"}})


def totals(what: Any, rank_class: int = 0) -> Counter[tuple[str, str, int]]:
    """(phase, kind, bytes of one call) -> calls per step, without the bookkeeping of the norm (4 bytes)."""
    low = lower(what)
    found: Counter[tuple[str, str, int]] = Counter()
    for row in traffic_totals(low.job, rank_class):
        if row["bytes"] // row["count"] > 4:
            found[row["phase"], row["kind"], row["ranks"]] += row["count"]
    return found


def test_megatrons_four_all_reduces_a_layer() -> None:
    # f and g: two forward, two backward per layer and micro-batch; plus embedding (1), head input (1) and the loss (3).
    found = totals(scenario(tensor=8, micro_batches=4))
    assert found["forward", "all_reduce", 8] == 4 * (2 * LAYERS + 1 + 3)
    assert found["backward", "all_reduce", 8] == 4 * (2 * LAYERS + 1)


@pytest.mark.parametrize("framework", ["megatron", "pytorch"])
def test_transformer_engine_gathers_what_its_fp8_products_read(framework: str) -> None:
    """By hand: bytes of the sequence-parallel gathers; the embedding's and the head's stay in 16 bits."""
    what = scenario(framework, 2024, tensor=8, micro_batches=1, precision="fp8", sequence_parallel=True)
    low = lower(what.model_copy(update={"cluster": resolve({
        **what.model_dump(exclude_unset=True), "cluster": {"topology": "dgx-h100"}}).cluster}))
    sizes = Counter({size: sum(row["count"] for row in traffic_totals(low.job, 0) if row["kind"] == "all_gather"
                               and row["ranks"] == 8 and row["bytes"] // row["count"] == size)
                     for size in (2 * SEQUENCE * HIDDEN, 4 * SEQUENCE * HIDDEN)})
    wide = 3  # input and output's gradient of the head's product, gradient of the embedding
    # a block: two inputs forward, twice gathered by Megatron, and two gradients of outputs
    inside = LAYERS * (2 + 2 + (2 if framework == "megatron" else 0))
    if framework == "megatron":
        assert sizes == {2 * SEQUENCE * HIDDEN: inside, 4 * SEQUENCE * HIDDEN: wide}
    else:
        assert sizes[2 * SEQUENCE * HIDDEN] == 0 and sizes[4 * SEQUENCE * HIDDEN] >= inside


def test_full_recomputation_repeats_the_forward_all_reduces() -> None:
    found = totals(scenario(tensor=8, micro_batches=4, recompute="full"))
    assert found["backward", "all_reduce", 8] == 4 * (4 * LAYERS + 1)


def test_sequence_parallelism_gathers_and_scatters_instead() -> None:
    # forward per layer: two all-gathers, two reduce-scatters; backward the conjugates, and each input gathered again
    found = totals(scenario(tensor=8, sequence_parallel=True, micro_batches=4))
    assert found["forward", "all_gather", 8] == 4 * (2 * LAYERS + 1)
    assert found["forward", "reduce_scatter", 8] == 4 * (2 * LAYERS + 1)
    assert found["backward", "reduce_scatter", 8] == 4 * (2 * LAYERS + 1)
    assert found["backward", "all_gather", 8] == 4 * (4 * LAYERS + 2)


def test_slices_hold_their_share_of_the_parameters() -> None:
    def resident(**parallel: Any) -> int:
        program = lower(scenario(**parallel)).job.programs[0]
        return sum(program.tensors["parameters"])  # without the allocator's blocks
    whole, cut = resident(), resident(tensor=8)
    replicated = 2 * (LAYERS * (4 + 2) + 2) * HIDDEN  # norms, and the biases of products cut by rows, in bf16
    assert cut == (whole - replicated) / 8 + replicated


def test_stages_pass_one_micro_batch_of_the_stream_on() -> None:
    low = lower(scenario(pipeline=4, micro_batches=8))
    size = 2 * SEQUENCE * HIDDEN * 2
    for rank in range(4):
        rows = [r for r in traffic_totals(low.job, rank) if r["kind"] in ("send", "recv")]
        assert sum(r["count"] for r in rows) == 8 * 2 * (2 if 0 < rank < 3 else 1)
        assert all(r["bytes"] == r["count"] * size for r in rows)


def test_scatter_sends_a_tensor_ranks_share() -> None:
    low = lower(scenario(pipeline=2, tensor=4, pipeline_scatter=True))
    sent = [r for r in traffic_totals(low.job, 0) if r["kind"] == "send"]
    assert sent[0]["bytes"] == sent[0]["count"] * 2 * SEQUENCE * HIDDEN * 2 // 4


def test_a_tied_table_is_held_by_both_ends_and_its_gradients_added_up() -> None:
    low = lower(scenario(pipeline=4, model={"tied_embeddings": True}))
    tied = [[r for r in traffic_totals(low.job, rank) if r["ranks"] == 2 and r["kind"] == "all_reduce"
             and r["bytes"] >= VOCAB * HIDDEN * 2] for rank in range(4)]
    # the data-parallel group has two ranks too: one more call at the ends
    assert [len(rows) and sum(r["count"] for r in rows) for rows in (tied[0], tied[3])] == [
        sum(r["count"] for r in tied[1]) + 1] * 2


def test_context_passes_keys_and_values_round_the_ring() -> None:
    found = totals(scenario(context=4, micro_batches=4))
    assert found["forward", "send", 4] == 4 * LAYERS * 3
    assert found["backward", "send", 4] == 4 * LAYERS * 4  # keys and values, with gradients twice, gradients home


def test_context_gathers_keys_and_values_at_once() -> None:
    low = lower(scenario(context=4, context_exchange="all-gather", micro_batches=4))
    rows = [r for r in traffic_totals(low.job) if r["ranks"] == 4]
    found = {(r["phase"], r["kind"]): r["count"] for r in rows}
    assert found == {("forward", "all_gather"): 4 * LAYERS, ("backward", "all_gather"): 4 * LAYERS,
                     ("backward", "reduce_scatter"): 4 * LAYERS}
    # keys and values of the whole sequence of two sequences, eight heads of 64, bf16
    assert all(r["bytes"] == r["count"] * 2 * 2 * SEQUENCE * HIDDEN * 2 for r in rows)


@pytest.mark.parametrize("attention", ["eager", "flash"])
def test_context_does_as_much_and_keeps_its_share_however_keys_travel(attention: str) -> None:
    def run(context: int, exchange: str) -> tuple[float, float]:
        what = scenario(context=context, context_exchange=exchange, year=2024, model={"max_positions": 2048})
        training = what.training.model_copy(update={
            "attention": attention, "sequence": 2048, "decoder_sequence": 2048, "predicted_tokens": 2048})
        result = sim.run(what.model_copy(update={"training": training}))
        return result.hardware_flops / training.global_batch, result.memory.use.category_peaks["activations"]
    flops, kept = run(1, "ring")
    assert run(4, "all-gather") == pytest.approx((flops, kept / 4), rel=1e-3)
    work, left = run(4, "ring")
    assert work == pytest.approx(flops, rel=1e-3)
    if attention == "eager":
        assert left == pytest.approx(kept / 4, rel=1e-3)
    else:  # keys and values of the last slice for those of its own, and the last ring
        assert kept / 4 < left < kept / 4 + 2 * (3 * 2 + 4 + 1) * (2 * 2048 // 4) * HIDDEN


@pytest.mark.parametrize(("training", "match"), [
    ({"predicted_tokens": 254}, "does not divide predicted_tokens 254"),
    ({"sequence": 252, "predicted_tokens": 252, "decoder_sequence": 252}, "252 tokens does not divide into 8 parts")])
def test_slices_of_the_sequence_are_whole(training: dict[str, int], match: str) -> None:
    what = scenario(context=4)
    with pytest.raises(UserError, match=match):
        lower(what.model_copy(update={"training": what.training.model_copy(update=training)}))


def test_a_window_is_a_band_of_the_whole_sequence_however_it_is_cut() -> None:
    def flops(context: int) -> float:
        what = resolve({
            "name": "window", "cluster": {"topology": "dgx-a100-80g"},
            "model": {"kind": "decoder", "layers": 2, "hidden": HIDDEN, "heads": 8, "vocab": VOCAB, "window": 1024,
                      "positions": "rotary", "norm": "rmsnorm", "bias": False, "tied_embeddings": False},
            "training": {"micro_batch": 1, "global_batch": 8, "sequence": 2048, "precision": "pure-bf16"},
            "parallel": {"strategy": "ddp", "context": context}})
        result = sim.run(what)
        return result.hardware_flops / what.training.global_batch
    assert flops(4) == pytest.approx(flops(1), rel=0.01)


def test_tokens_travel_to_their_experts_and_back() -> None:
    moe = {"moe": {"experts": 8, "top_k": 2, "expert_ffn": 512, "shared_experts": 0, "every": 1, "first_dense": 0},
           "gated_mlp": True, "bias": False}
    low = lower(scenario(expert=4, micro_batches=4, model=moe))
    rows = [r for r in traffic_totals(low.job) if r["kind"] == "all_to_all"]
    assert {r["phase"]: r["count"] for r in rows} == {"forward": 4 * 2 * LAYERS, "backward": 4 * 2 * LAYERS}
    assert all(r["bytes"] == r["count"] * 2 * SEQUENCE * 2 * HIDDEN * 2 for r in rows)


def test_degrees_of_one_add_nothing() -> None:
    plain = sim.run(scenario())
    cut = sim.run(scenario(tensor=1, context=1, pipeline=1, expert=1))
    assert cut.step_time_s == plain.step_time_s
    assert cut.memory.use == plain.memory.use


SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-h2", 1), ("zb-1p", 1), ("zb-2p", 1),
             ("zb-v", 2), ("dualpipe", 2)]


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
def test_every_schedule_ends_where_it_began_and_does_all_the_work(schedule: str, virtual: int) -> None:
    whole = sim.run(scenario(layers=14, micro_batches=16))
    cut = sim.run(scenario(layers=14, pipeline=4, micro_batches=16, schedule=schedule, virtual_stages=virtual))
    assert all(stage.steady for stage in cut.memory.stages)
    per_sequence = whole.hardware_flops / whole.scenario.training.global_batch
    assert cut.hardware_flops / cut.scenario.training.global_batch == pytest.approx(per_sequence)
    job = cut.detail.lowered.job
    assert longest_path(job, cut.detail.machine) <= cut.step_time_s * (1 + 1e-9)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_of_equal_stages_is_the_closed_form(schedule: str) -> None:
    # no replicas, transfers, software, no embedding or head worth the name: p - 1 of m + p - 1 slots are empty; the
    # first backward, whose gradients are added to none, is a quarter shorter, and 1F1B has a stage wait for the next
    alike: dict[str, Any] = {"pipeline": 8, "micro_batches": 16, "layers": 16,
                             "model": {"hidden": 4096, "heads": 32, "vocab": 128}}
    low = lower(scenario("ideal", schedule=schedule, **alike))
    machine = machine_for(scenario("ideal", **alike), low).infinite()
    timeline = simulate(low.job, machine)
    columns = timeline.columns(1)
    busy = float((columns.end_s - columns.start_s)[columns.kind == 0].sum())
    step = bubble_time(schedule, 8, 1, 16, Costs(1.0, 1.0, 1.0)) / (16 * 3.0)
    assert timeline.step_time_s / busy - 1 == pytest.approx(step, rel=0.11)


def test_stages_hold_as_many_micro_batches_as_are_in_flight() -> None:
    result = sim.run(scenario(pipeline=4, micro_batches=16, layers=16, precision="megatron-bf16"))
    held = [stage.category_peaks["activations"] for stage in result.memory.stages]
    one = (held[1] - held[2])
    assert held[0] - held[1] == pytest.approx(one, rel=0.15)
    assert held == sorted(held, reverse=True)


def test_an_uneven_split_shows() -> None:
    even = sim.run(scenario(pipeline=4, layers=16, split=[4, 4, 4, 4], model={"hidden": 2048}))
    uneven = sim.run(scenario(pipeline=4, layers=16, split=[2, 2, 2, 10], model={"hidden": 2048}))
    assert uneven.step_time_s > 1.5 * even.step_time_s
    assert uneven.breakdown.pipeline_bubble < 0.3 * uneven.step_time_s


def test_what_is_cut_over_nodes_is_slower() -> None:
    inside = sim.run(scenario(nodes=4, tensor=8, pipeline=4))
    across = sim.run(scenario(nodes=4, tensor=8, pipeline=4, order=["pipeline", "tensor", "context", "expert", "data"]))
    assert across.step_time_s > inside.step_time_s


@pytest.mark.parametrize(("depth", "schedule", "virtual", "within"), [
    # exact where nothing overlaps; stages of one node pass tensors over the links of other ranks' collectives, most of
    # them where weights' gradients are computed apart
    (1, "1f1b", 1, 1e-9), (2, "1f1b", 1, 1e-9), (4, "gpipe", 1, 1e-9), (2, "interleaved", 2, 3e-4),
    (4, "zb-h1", 1, 3e-3)])
@pytest.mark.parametrize(("tensor", "sequence"), [(1, False), (2, False), (2, True), (4, False), (4, True)])
def test_coarsened_and_written_out_are_the_same(tensor: int, sequence: bool, depth: int, schedule: str, virtual: int,
                                                within: float) -> None:
    depth = min(depth, 8 // tensor)
    # what overlaps with other communication (gradients on their way) contends with it: not part of the claim
    changes: dict[str, Any] = {"tensor": tensor, "sequence_parallel": sequence, "overlap": False}
    if depth > 1:
        changes |= {"pipeline": depth, "schedule": schedule, "virtual_stages": virtual}
    for framework, year, recompute in (("ideal", 2022, "none"), ("ideal", 2019, "full"), ("megatron", 2019, "none"),
                                       ("megatron", 2022, "full")):
        what = scenario(framework, year, recompute=recompute, micro_batches=4, **changes)
        low = lower(what)
        written = expand(low.job)
        device, network = machine_for(what, low).devices, machine_for(what, low).network
        coarse = simulate(low.job, Machine(device, network, low.job, drain=False))
        fine = simulate(written, Machine(device, network, written, drain=False))
        assert fine.step_time_s == pytest.approx(coarse.step_time_s, rel=within), (framework, year, recompute)
        for number in range(len(low.job.classes)):
            assert traffic_totals(written, number) == traffic_totals(low.job, number)
        for one, other in zip(low.job.programs, written.programs, strict=True):
            assert peak(one).peak_allocated_bytes == peak(other).peak_allocated_bytes
