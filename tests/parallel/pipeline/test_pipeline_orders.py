"""Orders of the pipeline schedules: complete, free of deadlock, within their memory, as short as their closed forms."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sim.errors import UserError
from sim.parallel import lower
from sim.parallel.pipeline.actions import SCHEDULES, Action, Chunk, Costs, batches_of, places, split
from sim.parallel.pipeline.bubble import activations, bubble_fraction, bubble_time, bubble_together
from sim.parallel.pipeline.evaluate import evaluate, in_flight, span, step_time
from sim.parallel.pipeline.orders import order, placement, predecessor, successor
from sim.parallel.pipeline.stages import blocks_per_stage
from sim.parallel.pipeline.zero_bubble import overlapped
from sim.scenario import resolve
from sim.scenario.fields.schema import TWO_CHUNKS

#: Where ranks agree before the next step, a step lasts from the first action to the last; else steps slide.
SYNCHRONOUS = ("gpipe", "1f1b", "interleaved")
UNIT = Costs()


def chunks_of(schedule: str, wanted: int = 2) -> int:
    return 2 if schedule in TWO_CHUNKS else wanted if schedule == "interleaved" else 1


def read(text: str) -> list[Action]:
    """"F0.1" is the forward of micro-batch 1 in chunk 0."""
    return [Action(word[0], int(word[1:].split(".")[0]), int(word.split(".")[1])) for word in text.split()]


def of_rank(cost: Costs, chunks: int) -> Costs:
    """Costs of one chunk where a rank has `chunks`."""
    return Costs(cost.forward / chunks, cost.backward / chunks, cost.weight / chunks, cost.transfer)


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, int, int, int]:
    schedule = draw(st.sampled_from(SCHEDULES))
    pipeline = draw(st.integers(1, 9))
    virtual = chunks_of(schedule, draw(st.integers(1, 4)))
    micro_batches = draw(st.integers(1, 40))
    if schedule == "interleaved":
        micro_batches = pipeline * draw(st.integers(1, 5))
    if schedule == "dualpipe":
        pipeline = 2 * draw(st.integers(1, 5))
        micro_batches = 2 * pipeline + 2 * draw(st.integers(0, 10))
    return schedule, pipeline, virtual, micro_batches


COSTS = st.builds(Costs, *[st.sampled_from((0.5, 0.9, 1.0, 1.3, 2.0))] * 3, st.sampled_from((0.0, 0.05, 0.7)))


@given(cases(), COSTS, st.sampled_from((0.3, 0.9, 1.0)))
@settings(max_examples=60)
def test_every_action_once_in_an_order_that_ends_within_the_memory(case: tuple[str, int, int, int], costs: Costs,
                                                                   kept: float) -> None:
    schedule, _, virtual, micro_batches = case
    orders = order(*case, costs, kept)
    kinds = "FBW" if split(schedule) else "FB"
    wanted = {Action(kind, chunk, micro) for kind in kinds for chunk in range(virtual)
              for micro in range(batches_of(schedule, micro_batches))}
    for rank, actions in enumerate(orders):
        assert len(actions) == len(wanted)
        assert set(actions) == wanted
        assert in_flight(actions, kept) <= activations(*case, rank, kept) + 1e-6
    work = micro_batches * virtual * (costs.forward + costs.backward + costs.weight)
    if schedule == "dualpipe":
        work /= 2
    assert step_time(orders, places(*case[:3]), costs) >= work - 1e-6


@given(cases(), COSTS)
@settings(max_examples=40)
def test_a_result_is_used_only_after_it_exists(case: tuple[str, int, int, int], costs: Costs) -> None:
    orders, where = order(*case, costs), places(*case[:3])
    ends = evaluate(orders, where, costs)
    at = {(rank, *action): end for rank, actions in enumerate(orders)
          for action, end in zip(actions, ends[rank], strict=True)}
    whole = 0.0 if split(case[0]) else costs.weight
    for (rank, kind, chunk, micro), end in at.items():
        if kind == "F":
            before = predecessor(where, rank, chunk)
            begin = end - costs.forward
        elif kind == "B":
            before = successor(where, rank, chunk)
            begin = end - costs.backward - whole
            assert begin >= at[rank, "F", chunk, micro] - 1e-6
        else:
            assert end - costs.weight >= at[rank, "B", chunk, micro] - 1e-6
            continue
        if before is not None:
            hop = costs.transfer if before.rank != rank else 0.0
            assert begin >= at[before.rank, kind, before.chunk, micro] + hop - 1e-6


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("pipeline", "micro_batches"), [(2, 4), (4, 8), (4, 32), (8, 16), (8, 64), (16, 48)])
def test_uniform_stages_wait_as_long_as_the_closed_form_says(schedule: str, pipeline: int, micro_batches: int) -> None:
    chunks = chunks_of(schedule)
    costs = of_rank(UNIT, 1 if schedule == "dualpipe" else chunks)
    orders, where = order(schedule, pipeline, chunks, micro_batches, costs), places(schedule, pipeline, chunks)
    measured = (step_time if schedule in SYNCHRONOUS else span)(orders, where, costs) - 3 * micro_batches
    assert measured == pytest.approx(bubble_time(schedule, pipeline, chunks, micro_batches))


@pytest.mark.parametrize("costs", [Costs(1.0, 1.0, 0.5), Costs(1.0, 1.2, 0.7), Costs(1.3, 1.0, 0.9)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"])
def test_closed_forms_with_unequal_costs(schedule: str, costs: Costs) -> None:
    for pipeline, micro_batches in ((4, 12), (8, 32)):
        chunks = chunks_of(schedule, 4)
        own = of_rank(costs, chunks)
        orders, where = order(schedule, pipeline, chunks, micro_batches, own), places(schedule, pipeline, chunks)
        measured = (step_time if schedule in SYNCHRONOUS else span)(orders, where, own)
        work = micro_batches * sum(costs[:3])
        assert measured - work == pytest.approx(bubble_time(schedule, pipeline, chunks, micro_batches, costs))


def test_few_micro_batches_leave_zero_bubble_schedules_as_their_appendix_says() -> None:
    """m <= p: 1F1B (m + p - 1)(f + b + w), ZB (m + p - 1)(f + b) + w (arXiv 2401.10241, appendix H)."""
    costs = Costs(1.0, 1.1, 0.6)
    for micro_batches in (1, 3, 8):
        work = micro_batches * 2.7
        for schedule in ("zb-h1", "zb-h2", "zb-1p", "zb-2p"):
            took = span(order(schedule, 8, 1, micro_batches, costs), places(schedule, 8, 1), costs)
            assert took == pytest.approx((micro_batches + 7) * 2.1 + 0.6), schedule
        assert work + bubble_time("1f1b", 8, 1, micro_batches, costs) == pytest.approx((micro_batches + 7) * 2.7)


def test_orders_written_by_hand() -> None:
    assert order("gpipe", 2, 1, 2)[0] == read("F0.0 F0.1 B0.1 B0.0")
    assert order("1f1b", 3, 1, 3) == [read("F0.0 F0.1 F0.2 B0.0 B0.1 B0.2"), read("F0.0 F0.1 B0.0 F0.2 B0.1 B0.2"),
                                      read("F0.0 B0.0 F0.1 B0.1 F0.2 B0.2")]
    # Megatron-LM until core 0.9: as many micro-batches as stages are all warm-up.
    assert order("interleaved", 2, 2, 2) == [
        read("F0.0 F0.1 F1.0 F1.1 B1.0 B1.1 B0.0 B0.1"), read("F0.0 F0.1 F1.0 F1.1 B1.0 B1.1 B0.0 B0.1")]
    # PyTorch, and Megatron-LM since core 0.10: the last rank holds one forward of the last chunk.
    assert order("interleaved", 2, 2, 2, all_first=False) == [
        read("F0.0 F0.1 F1.0 F1.1 B1.0 B1.1 B0.0 B0.1"), read("F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 B0.0 B0.1")]
    assert order("zb-h1", 2, 1, 3) == [read("F0.0 F0.1 B0.0 W0.0 F0.2 B0.1 W0.1 B0.2 W0.2"),
                                       read("F0.0 B0.0 F0.1 B0.1 W0.0 F0.2 B0.2 W0.1 W0.2")]
    # PyTorch's ScheduleZBVZeroBubble, 2 ranks, 3 micro-batches; stages 3 and 2 are chunk 1 of ranks 0 and 1.
    assert order("zb-v", 2, 2, 3) == [
        read("F0.0 F0.1 F0.2 F1.0 B1.0 W1.0 F1.1 B1.1 W1.1 B0.0 W0.0 F1.2 B1.2 W1.2 B0.1 W0.1 B0.2 W0.2"),
        read("F0.0 F1.0 F0.1 F1.1 B1.0 W1.0 F0.2 B0.0 W0.0 F1.2 B1.1 W1.1 B0.1 B1.2 B0.2 W0.1 W1.2 W0.2")]


def test_where_stages_are_and_what_is_around_them() -> None:
    assert placement("1f1b", 3, 1) == [[0], [1], [2]]
    assert placement("interleaved", 2, 3) == [[0, 2, 4], [1, 3, 5]]
    assert placement("zb-v", 3, 2) == [[0, 5], [1, 4], [2, 3]]
    assert placement("dualpipe", 4, 2) == [[0, 3], [1, 2], [2, 1], [3, 0]]
    ring = places("interleaved", 2, 3)
    assert predecessor(ring, 0, 0) is None
    assert predecessor(ring, 0, 1) == Chunk(1, 0)
    assert successor(ring, 1, 2) is None
    turn = places("zb-v", 3, 2)
    assert successor(turn, 2, 0) == Chunk(2, 1)
    assert predecessor(turn, 0, 1) == Chunk(1, 1)
    both = places("dualpipe", 4, 2)
    assert successor(both, 0, 0) == Chunk(1, 0)
    assert successor(both, 3, 1) == Chunk(2, 1)
    assert predecessor(both, 3, 1) is None
    assert successor(both, 0, 1) is None


@pytest.mark.parametrize(("schedule", "rank", "expected"), [
    ("gpipe", 0, 16), ("1f1b", 0, 4), ("1f1b", 3, 1), ("interleaved", 0, 11), ("interleaved", 3, 5), ("zb-h1", 0, 4),
    ("zb-h1", 3, 4), ("zb-h2", 0, 7), ("zb-h2", 2, 7), ("zb-v", 1, 8), ("dualpipe", 0, 5), ("dualpipe", 2, 5)])
def test_memory_of_the_schedules(schedule: str, rank: int, expected: int) -> None:
    chunks = chunks_of(schedule)
    assert in_flight(order(schedule, 4, chunks, 16)[rank]) == expected
    assert activations(schedule, 4, chunks, 16, rank) == expected


def test_dualpipe_pairs_both_directions() -> None:
    """Where a pair takes the time of both and passes nothing on before, the bubble is (p/2 - 1)(F&B + B - 3W)."""
    for pipeline in (4, 8, 16):
        orders = order("dualpipe", pipeline, 2, 2 * pipeline + 8)
        assert orders[-1] == [a._replace(chunk=1 - a.chunk) for a in orders[0]]
        where = places("dualpipe", pipeline, 2)
        end = max(ends[-1] for ends in evaluate(orders, where, UNIT, [overlapped(actions) for actions in orders]))
        assert end - 3 * (2 * pipeline + 8) == pytest.approx(bubble_together(pipeline))


#: Times of forward, backward, weights and a transfer in ms, and M_W / M_B = 32 / (34 + 5as/h): Qi et al. 2023
#: (arXiv 2401.10241), table 6 and section 3.1.
PROFILED = {"1.5B": (8, Costs(18.522, 18.086, 9.337, 0.601), 32 / (34 + 5 * 24 * 1024 / 2304)),
            "6.2B": (8, Costs(29.718, 29.444, 19.927, 0.527), 32 / (34 + 5 * 32 * 1024 / 4096)),
            "14.6B": (16, Costs(11.347, 11.248, 8.132, 0.577), 32 / (34 + 5 * 40 * 1024 / 5120))}


@pytest.mark.parametrize("model", PROFILED)
def test_the_searched_schedules_rank_as_published(model: str) -> None:
    """2p < h2 < 1p <= h1 < 1f1b, with twice the memory almost no bubble, and both within their memory."""
    pipeline, costs, kept = PROFILED[model]
    micro_batches = 4 * pipeline
    work = micro_batches * sum(costs[:3])
    where = places("1f1b", pipeline, 1)
    made = {s: order(s, pipeline, 1, micro_batches, costs, kept) for s in ("1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p")}
    waits = {s: 1 - work / (step_time if s == "1f1b" else span)(orders, where, costs) for s, orders in made.items()}
    assert waits["zb-2p"] < waits["zb-h2"] < waits["zb-1p"] <= waits["zb-h1"] + 1e-12 < waits["1f1b"]
    assert waits["zb-2p"] < 0.01
    for schedule, limit in (("zb-1p", pipeline), ("zb-2p", 2 * pipeline)):
        assert max(in_flight(actions, kept) for actions in made[schedule]) <= limit + 1e-6


@given(st.integers(2, 6), st.integers(1, 30), COSTS, st.sampled_from((0.3, 0.6, 1.0)))
@settings(max_examples=25)
def test_the_search_never_falls_behind_the_hand_made_schedules(pipeline: int, micro_batches: int, costs: Costs,
                                                               kept: float) -> None:
    assume(micro_batches <= 3 * pipeline)  # beyond, the ways are compared on fewer
    where = places("1f1b", pipeline, 1)
    for searched, made in (("zb-1p", "zb-h1"), ("zb-2p", "zb-h2")):
        found = order(searched, pipeline, 1, micro_batches, costs, kept)
        assert span(found, where, costs) <= span(order(made, pipeline, 1, micro_batches), where, costs) + 1e-6


def test_fractions() -> None:
    assert bubble_fraction("1f1b", 4, 1, 12) == pytest.approx(3 / 15)
    assert bubble_fraction("interleaved", 4, 3, 12) == pytest.approx(1 / 13)
    assert bubble_fraction("zb-h2", 4, 1, 12) == 0.0
    assert bubble_fraction("1f1b", 1, 1, 12) == 0.0


@pytest.mark.parametrize(("case", "says"), [
    (("1f2b", 4, 1, 8), "did you mean '1f1b'"), (("zb-v", 4, 1, 8), "2 chunks per rank"),
    (("1f1b", 4, 2, 8), "one chunk"),
    (("interleaved", 4, 2, 6), "does not divide 6"), (("dualpipe", 3, 2, 8), "even number of ranks"),
    (("dualpipe", 4, 2, 6), "at least twice"), (("gpipe", 2, 1, 0), "1 or more micro-batches"),
    (("interleaved", 2, 0, 4), "1 or more chunks"), (("gpipe", 0, 1, 4), "1 or more stages")])
def test_what_schedules_need_is_said(case: tuple[str, int, int, int], says: str) -> None:
    with pytest.raises(UserError) as raised:
        order(*case)
    assert says in str(raised.value)


def test_orders_that_block_each_other_are_found() -> None:
    """The second rank wants micro-batch 1 first, which the first sends only after 0 has come back."""
    orders = [read("F0.0 B0.0 F0.1 B0.1"), read("F0.1 B0.1 F0.0 B0.0")]
    with pytest.raises(ValueError, match="waits for ever"):
        evaluate(orders, places("1f1b", 2, 1), UNIT)
    with pytest.raises(ValueError, match=r"rank 0 waits for ever at .*'W'"):
        evaluate([read("F0.0 W0.0 B0.0")], places("zb-h1", 1, 1), UNIT)


def test_a_block_per_stage_leaves_embedding_and_head_stages_of_their_own() -> None:
    """126 blocks on 128 stages (Llama 3, arXiv 2407.21783, section 3.3.2); with 127 stages only the head is alone."""
    assert blocks_per_stage(126, [[rank] for rank in range(128)], None) == [0, *[1] * 126, 0]
    assert blocks_per_stage(126, [[rank] for rank in range(127)], None) == [*[1] * 126, 0]
    assert blocks_per_stage(126, [[rank] for rank in range(128)], None, 1, 1) == [0, *[1] * 126, 0]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_a_rank_without_a_layer_is_refused(strategy: str) -> None:
    scenario = resolve({
        "name": "empty rank", "cluster": {"topology": "dgx-h100", "gpus_per_node": 4},
        "model": {"kind": "decoder", "layers": 4, "hidden": 64, "heads": 4, "vocab": 256, "tied_embeddings": False},
        "training": {"micro_batch": 1, "global_batch": 8, "sequence": 64},
        "parallel": {"strategy": strategy, "pipeline": 4, "split": [2, 0, 0, 2]}})
    with pytest.raises(UserError, match="pipeline rank 1 holds no block") as caught:
        lower(scenario)
    assert caught.value.faults[0].field == "parallel.split"


@pytest.mark.parametrize(("blocks", "stages", "embedding", "head", "split"), [
    (12, 4, 12, 0, [0, 4, 4, 4]), (8, 8, 10, 0, [0, 1, 1, 1, 1, 1, 1, 2]), (8, 4, 1, 1, [2, 3, 2, 1])])
def test_slots_that_one_stage_has_not_are_taken_of_those_that_have_most(blocks: int, stages: int, embedding: int,
                                                                        head: int, split: list[int]) -> None:
    found = blocks_per_stage(blocks, [[rank] for rank in range(stages)], None, embedding, head)
    assert sum(found) == blocks and min(found) >= 0 and found == split
