"""What is made on the way to a job's first step, and what of it the allocator keeps."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sim.memory.allocator import Allocator
from sim.memory.tensors import TensorReplay
from sim.parallel import lower
from sim.parallel.construction import Events, cloned_into_one, moved_into_one, remapped, stepped, widened
from sim.parallel.data.buckets import Bucket, fragments
from sim.program import Program
from sim.scenario import resolve

MIB = 2**20


def program(framework: str, strategy: str, year: int = 2025, precision: Any = None, **parallel: Any) -> Program:
    return lower(resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": 1},
        "model": {"kind": "decoder", "layers": 4, "hidden": 2048, "heads": 16, "vocab": 8192},
        "training": {"global_batch": 8, "micro_batch": 1, "sequence": 512, "optimizer": "adam",
                     "precision": precision or ("mixed-fp16" if framework == "deepspeed" else "megatron-bf16"),
                     "recompute": "full"},
        "parallel": {"strategy": strategy, **parallel},
        "software": {"framework": framework, "year": year}})).job.programs[0]


def left(events: Events) -> int:
    """Bytes that are there at the end."""
    live: dict[int, int] = {}
    for number, size in events:
        if size:
            assert number not in live
            live[number] = size
        else:
            del live[number]
    return sum(live.values())


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=8))
def test_one_tensor_is_left_of_all_parameters(sizes: list[int]) -> None:
    for make in (moved_into_one, cloned_into_one, remapped):
        assert left(make(sizes)) == sum(sizes)
    assert left(widened(sizes, [2 * size for size in sizes])) == 2 * sum(sizes)
    assert left(stepped(5, sizes)) == sum(sizes)


def test_parameters_that_went_to_the_host_leave_their_segments_behind() -> None:
    allocator = Allocator()
    live: dict[int, Any] = {}
    for number, size in moved_into_one([40 * MIB, 60 * MIB]):
        if size:
            live[number] = allocator.allocate(size)
        else:
            allocator.free(live.pop(number))
    assert (allocator.reserved, allocator.allocated) == (200 * MIB, 100 * MIB)
    assert sorted(block.size for block in allocator.cached()) == [40 * MIB, 60 * MIB]


def test_deepspeed_has_its_states_before_the_first_step_and_megatron_in_it() -> None:
    for framework, early in (("deepspeed", True), ("megatron", False)):
        one = program(framework, "zero1", year=2021 if framework == "deepspeed" else 2025)
        states = sum(size for _, size, category in one.resident if category == "optimizer_states")
        resident = sum(size for _, size, category in one.resident if category not in ("context", "optimizer_states"))
        allocator = Allocator()
        TensorReplay(one, allocator).construct()
        assert abs(allocator.asked - resident - early * states) < 10**5
        assert allocator.reserved > 1.1 * allocator.allocated  # what was made on the way is cached


def test_what_a_stack_does_not_flatten_is_made_as_it_stays() -> None:
    assert not program("megatron", "zero1", year=2022).construction
    assert not program("megatron", "ddp").construction
    assert set(program("megatron", "zero1").construction) == {"parameters"}


def test_deepspeed_s_releases_leave_less_and_less_behind() -> None:
    def made(year: int, strategy: str = "zero1") -> set[str]:
        return set(program("deepspeed", strategy, year).construction)

    assert made(2021) == made(2022) == {"parameters", "master_parameters", "optimizer_states"}
    assert made(2023) == {"master_parameters", "optimizer_states"}  # 0.9: the cache is emptied
    assert made(2024) == {"master_parameters"}                      # 0.14: no step before training
    assert made(2024, "ddp") == {"parameters", "master_parameters", "optimizer_states"}  # FP16_Optimizer as ever


def test_sums_beside_bf16_parameters_are_the_gradients_of_the_first_step() -> None:
    """BF16_Optimizer flattens on the device and steps with the sums it has: nothing of its size comes and goes."""
    wide = {"name": "mixed-bf16", "gradients": "fp32"}
    one = program("deepspeed", "zero1", 2022, precision=wide)
    sizes = [size for _, size in one.construction["optimizer_states"]]
    numel = sum(size for name, size, _ in one.resident if name == "parameters") // 2
    assert sizes and all(sizes) and sum(sizes) == 2 * 4 * numel // 8
    births = [size for _, size in one.construction["parameters"]]
    assert max(births) == births[len(births) // 2] == 2 * numel  # the flat tensor, while all others are there


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_pieces_of_the_first_rank_are_its_share_of_every_bucket(ranks: int, cuts: list[int]) -> None:
    from sim.model import build
    from sim.parallel.data.buckets import ready_order
    from sim.software import stack_for

    scenario = resolve({"name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": 1},
                        "model": {"kind": "decoder", "layers": 2, "hidden": 128, "heads": 2, "vocab": 512},
                        "training": {"global_batch": 8, "micro_batch": 1, "sequence": 64}})
    architecture = build(scenario, stack_for("megatron", 2025), 1)
    numels = [numel for _, _, numel in ready_order(architecture)]
    buckets, at = [], 0
    for cut in cuts:
        taken = numels[at:at + cut]
        buckets += [Bucket(sum(taken), 0, 0, parts=(tuple(taken),))] if taken else []
        at += cut
    if numels[at:]:
        buckets.append(Bucket(sum(numels[at:]), 0, 0, parts=(tuple(numels[at:]),)))
    pieces = fragments(buckets, ranks)
    assert sum(pieces) == sum(-(-bucket.numel // ranks) for bucket in buckets)
    assert all(piece > 0 for piece in pieces)
    if ranks == 1:
        assert pieces == numels


def test_tensor_ranks_share_what_recomputed_blocks_keep_under_zero_3() -> None:
    def kept(strategy: str, **parallel: Any) -> int:
        one = program("deepspeed", strategy, year=2021, **parallel)
        section = one.sections[0]
        blocks = [mark for mark in section.layers if mark.verb == "forward" and mark.position == 2]
        return sum(op.size_bytes for mark in blocks for op in section.memory[mark.start:mark.stop])

    whole = 512 * 2048 * 2
    assert kept("zero3") == whole
    assert kept("zero3", tensor=4, sequence_parallel=False) == whole // 4
    assert kept("zero1", tensor=4, sequence_parallel=False) == whole
