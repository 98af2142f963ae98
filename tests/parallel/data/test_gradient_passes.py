"""Passes over gradients behind and around their reduction, by hand: bytes of kernels in the sections of a step."""

from __future__ import annotations

from typing import Any

import pytest

from sim.parallel import lower
from sim.parallel.lower import Lowered
from sim.program import Kind
from sim.report.numbers.traffic import traffic_totals
from sim.scenario import resolve


def lowered(framework: str = "megatron", year: int = 2022, precision: str | dict[str, str] = "megatron-fp16",
            micro_steps: int = 2, strategy: str = "ddp", optimizer: str = "adam", **parallel: Any) -> Lowered:
    nodes = 2 if strategy != "none" else 1
    ranks = 8 * nodes if strategy != "none" else 1
    cluster = {"topology": "dgx-a100-80g", "nodes": nodes} | ({"gpus_per_node": 1} if strategy == "none" else {})
    return lower(resolve({
        "name": "x", "cluster": cluster,
        "model": {"kind": "decoder", "layers": 2, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 32768,
                  "positions": "learned", "max_positions": 1024, "tied_embeddings": False},
        "training": {"micro_batch": 1, "global_batch": micro_steps * ranks, "sequence": 1024, "precision": precision,
                     "optimizer": optimizer},
        "parallel": {"strategy": strategy, **parallel}, "software": {"framework": framework, "year": year}}))


def own(found: Lowered, name: str) -> list[float]:
    """Bytes per parameter of the kernels called `name`, section by section of the schedule."""
    program = found.job.programs[0]
    numbers = {number for number, kernel in enumerate(program.kernels) if kernel.variant == name}
    sums = []
    for section, _ in program.schedule:
        part = program.sections[section]
        ids = [kernel for task, kind in enumerate(part.kind) if kind == Kind.KERNELS
               for kernel in program.segments[part.payload[task]].kernels]
        sums.append(sum(program.kernels[k].bytes for k in ids if k in numbers) / found.architecture.parameters)
    return sums


def launches(found: Lowered, name: str) -> list[int]:
    """Launches of the kernels called `name`, section by section of the schedule."""
    program = found.job.programs[0]
    return [sum(program.kernels[k].launches for task, kind in enumerate(program.sections[section].kind)
                if kind == Kind.KERNELS for k in program.segments[program.sections[section].payload[task]].kernels
                if program.kernels[k].variant == name) for section, _ in program.schedule]


def test_megatron_s_buffers_are_divided_before_they_are_reduced_and_zeroed_after_the_step() -> None:
    """fp16: read and written once (4 bytes) in the micro-step that reduces, written once (2) behind the optimizer."""
    found = lowered()
    assert own(found, "prepared bucket") == pytest.approx([0, 4, 0])
    assert own(found, "zero") == pytest.approx([0, 0, 2])


def test_ddp_s_hook_casts_buckets_that_stay_as_they_are() -> None:
    """bf16_compress_hook: the fp32 bucket is read and its cast written (4 + 2), divided in place (2 + 2); the sum is
    copied back (2 + 4), and with the rest of the buckets into the gradients (4 + 4)."""
    plain, hooked = (lowered("pytorch", 2024, {"name": "amp-bf16", "reduce": wire}, 1) for wire in ("fp32", "bf16"))
    assert own(plain, "prepared bucket")[:1] == pytest.approx([0])
    assert own(hooked, "prepared bucket")[:1] == pytest.approx([10])
    assert own(hooked, "bucket copy-out")[:1] == pytest.approx([own(plain, "bucket copy-out")[0] + 6])
    assert own(hooked, "gradient")[:1] == pytest.approx(own(plain, "gradient")[:1])
    totals = [[row for row in traffic_totals(found.job) if row["kind"] == "all_reduce"] for found in (plain, hooked)]
    assert totals[0][0]["count"] == totals[1][0]["count"]
    assert totals[0][0]["bytes"] == 2 * totals[1][0]["bytes"]
    assert plain.job.programs[0].tensors["gradient buckets"] == hooked.job.programs[0].tensors["gradient buckets"]


def test_collectives_that_average_need_no_division() -> None:
    assert own(lowered(year=2024, precision="megatron-bf16"), "prepared bucket") == pytest.approx([0, 0, 0])
    assert own(lowered(year=2023, precision="megatron-bf16"), "prepared bucket") == pytest.approx([0, 8, 0])


def test_a_buffer_of_halves_is_added_to_from_the_first_micro_step_on() -> None:
    """Read twice, written once, in both; from 2023 on the products of layers add for themselves, which leaves eight
    norms' and biases' tensors a block and the last norm's two: 26 kB and 4 kB of 1,024 wide layers."""
    assert own(lowered(), "gradient")[:2] == pytest.approx([6, 6])
    later = lowered(year=2023)
    assert launches(later, "gradient") == [18, 18, 0]
    vectors = 2 * (4 + 3 + 1 + 4 + 1) * 1024 + 2 * 1024
    assert own(later, "gradient")[:2] == pytest.approx([6 * vectors / later.architecture.parameters] * 2)


def test_before_buffers_gradients_are_flattened_behind_backward_or_reduced_by_pytorch() -> None:
    apart, beside = (lowered(year=2020, overlap=overlap) for overlap in (False, True))
    assert own(apart, "prepared bucket") == pytest.approx([0, 8, 0])  # copied into one tensor, which is divided
    assert own(apart, "bucket copy-out") == pytest.approx([0, 4, 0])
    assert sum(own(apart, "zero")) == sum(own(beside, "zero")) == 0
    calls = [[row["count"] for row in traffic_totals(found.job) if row["kind"] == "all_reduce"
              and row["bytes"] > 2**20] for found in (apart, beside)]
    assert calls[0] == [1]
    assert sum(calls[1]) > 1


def test_sums_of_master_gradients_are_made_in_every_micro_step() -> None:
    """apex O2: 2 read and 4 written, then 4 read beside; no copy is left for the optimizer. torch.amp's successors add
    halves and copy them before the step."""
    old, new = (lowered("pytorch", year, "mixed-fp16", 3, "none") for year in (2020, 2021))
    assert own(old, "gradient")[:2] == pytest.approx([6, 10])
    assert own(new, "gradient")[:2] == pytest.approx([0, 6])


@pytest.mark.parametrize(("year", "copied"), [(2020, 0), (2021, 6)])
def test_what_was_summed_wide_is_not_copied_again(year: int, copied: int) -> None:
    found = lowered("pytorch", year, "mixed-fp16", 3, "none")
    program = found.job.programs[0]
    names = [kernel for kernel in program.kernels if kernel.op == "optimizer" and kernel.variant == "loop"
             and kernel.bytes == 6 * found.architecture.parameters and kernel.dtype == "fp32"]
    assert bool(names) == bool(copied)


@pytest.mark.parametrize("overlap", [False, True])
def test_ddp_adds_and_copies_gradients_tensor_by_tensor(overlap: bool) -> None:
    """Two blocks of twelve tensors, two embeddings, the last norm's two, and the head: 29. Later gradients are added;
    under no_sync the hooks do nothing, and those that are reduced are copied into their bucket and out of it: however
    buckets cut the backward."""
    found = lowered("pytorch", 2024, "amp-bf16", overlap=overlap)
    assert sum(len(layer.parameters) for layer in found.architecture.stack) == 29
    assert launches(found, "gradient") == [0, 29, 0]
    assert launches(found, "bucket copy-in") == [0, 29, 0]
    assert launches(found, "bucket copy-out") == [0, 29, 0]
    assert own(found, "bucket copy-in") == pytest.approx([0, 8, 0])


@pytest.mark.parametrize(("year", "prepared"), [(2022, 4), (2024, 8)])
def test_zero_2_divides_its_buckets_and_adds_only_what_a_rank_keeps(year: int, prepared: int) -> None:
    """Gradients go with their reduction, so each micro-step's fill the buckets, are divided there and, where slices are
    not reduced one by one, flattened once more; a sixteenth is added to. Traced on DeepSpeed 0.19.8, fake processes:
    copy_ tensor by tensor, div_, cat, and add_ of the part from the second micro-step on."""
    found = lowered("deepspeed", year, "mixed-fp16", 3, "zero2")
    assert [repeats for _, repeats in found.job.programs[0].schedule] == [1, 2, 1]
    assert own(found, "bucket copy-in") == pytest.approx([4, 4, 0])
    assert own(found, "prepared bucket") == pytest.approx([prepared, prepared, 0])
    assert own(found, "gradient") == pytest.approx([0, 6 / 16, 0], rel=1e-5)


@pytest.mark.parametrize(("year", "overlap", "copied"), [
    (2022, True, 12), (2022, False, 12), (2024, True, 0), (2024, False, 0)])
def test_zero_1_fills_zero_2_s_buckets_from_2024_on(year: int, overlap: bool, copied: int) -> None:
    """In the last micro-step alone, beside its backward if that is asked for; before, it flattened behind it."""
    found = lowered("deepspeed", year, "mixed-fp16", 3, "zero1", overlap=overlap, bucket_mb=32)
    assert own(found, "gradient")[:3] == pytest.approx([0, 6, 6])
    assert own(found, "bucket copy-out")[2] == pytest.approx(copied, abs=1e-6)
    assert own(found, "bucket copy-in") == pytest.approx([0, 0, 0 if copied else 4, 0])
    assert own(found, "prepared bucket") == pytest.approx([0, 0, 0 if copied else 8, 0])
    program = found.job.programs[0]
    last = program.sections[program.schedule[2][0]]
    reduced = [task for task, kind in enumerate(last.kind) if kind == Kind.COLLECTIVE]
    embedding = [task for task, kind in enumerate(last.kind) if kind == Kind.KERNELS
                 and program.labels[last.label[task]].layer == "embedding"]
    assert (reduced[0] < embedding[-1]) is (overlap and not copied)


@pytest.mark.parametrize("overlap", [False, True])
def test_deepspeed_without_zero_reduces_large_buckets_behind_backward(overlap: bool) -> None:
    """Flattened (read and written), divided in place, copied back: twelve bytes; buckets of half a billion elements,
    whatever is asked for."""
    found = lowered("deepspeed", 2024, "mixed-fp16", overlap=overlap, bucket_mb=50)
    assert own(found, "bucket copy-in") == pytest.approx([0, 0, 0])
    assert own(found, "bucket copy-out") == pytest.approx([0, 12, 0])
    calls = [row for row in traffic_totals(found.job) if row["bytes"] > 2**20]
    assert [(row["kind"], row["count"]) for row in calls] == [("all_reduce", 1)]
    assert calls[0]["bytes"] == 2 * found.architecture.parameters
