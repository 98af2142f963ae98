"""Offload by hand: what is copied, what waits for what, what the host holds, and what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sim
from sim.errors import UserError
from sim.memory.ledger import peak
from sim.parallel import lower
from sim.program import Kind, Program
from sim.scenario import resolve
from sim.scenario.dump import dump

MODEL = {"kind": "decoder", "layers": 4, "hidden": 256, "heads": 4, "vocab": 1000, "max_positions": 128,
         "positions": "learned", "norm": "layernorm", "bias": True, "tied_embeddings": True}
CPU = {"parameters": "cpu", "optimizer": "cpu"}


def scenario(strategy: str, offload: dict[str, str], *, gpus: int = 8, steps: int = 1, framework: str = "deepspeed",
             precision: str = "mixed-fp16", year: int = 2025, **training: Any) -> Any:
    return resolve({
        "name": "test", "cluster": {"topology": "dgx-2", "gpus_per_node": gpus}, "model": MODEL,
        "training": {"micro_batch": 2, "global_batch": 2 * gpus * steps, "sequence": 128, "precision": precision,
                     "optimizer": "adam", **training},
        "parallel": {"strategy": strategy, "offload": offload}, "software": {"framework": framework, "year": year}})


def fsdp(offload: dict[str, str], **more: Any) -> Any:
    return scenario("fsdp", offload, **{"framework": "pytorch", "precision": "fsdp-fp16"} | more)


def program(s: Any) -> Program:
    return lower(s).job.programs[0]


def copied(p: Program) -> Counter[str]:
    """Bytes of a step by direction."""
    total: Counter[str] = Counter()
    for number in p.section_runs():
        section = p.sections[number]
        for kind, payload in zip(section.kind, section.payload, strict=True):
            if kind == Kind.COPY:
                total[p.copies[payload].direction] += p.copies[payload].size_bytes
    return total


def parameters(s: Any) -> int:
    return lower(s).architecture.parameters


def held(p: Program) -> Counter[str]:
    total: Counter[str] = Counter()
    for name, size, _ in p.host_resident:
        total[name.split(":")[0]] += size
    return total


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_zero_offload_moves_fp32_gradients_down_and_parameters_up(strategy: str) -> None:
    s = scenario(strategy, {"optimizer": "cpu"})
    share, p = parameters(s) / 8, program(s)
    assert copied(p) == {"d2h": pytest.approx(4 * share, abs=16), "h2d": pytest.approx(4 * share, abs=16)}
    kept = {"logits"} if strategy == "zero1" else set()  # by the pipeline engine, which ZeRO-2 does not run in
    assert {category for _, _, category in p.resident} == {"parameters", "buffers", "workspace", "context"} | kept
    assert held(p)["master_parameters"] == pytest.approx(4 * share, abs=8)
    assert held(p)["optimizer_states"] == pytest.approx(8 * share, abs=8)


def test_accumulated_gradients_go_up_again_in_every_later_micro_step() -> None:
    s = scenario("zero2", {"optimizer": "cpu"}, steps=3)
    share = parameters(s) / 8
    assert copied(program(s))["d2h"] == pytest.approx(3 * 2 * share, abs=64)
    assert copied(program(s))["h2d"] == pytest.approx((2 * 2 + 4) * share, abs=64)


def test_zero_3_fetches_its_partition_before_every_gather() -> None:
    s = scenario("zero3", CPU)
    p = program(s)
    gathers = sum(p.collectives[payload].size_bytes for number in p.section_runs() for kind, payload in zip(
        p.sections[number].kind, p.sections[number].payload, strict=True)
        if kind == Kind.COLLECTIVE and p.collectives[payload].kind == "all_gather")
    assert copied(p) == {"h2d": pytest.approx(gathers / 8, abs=64), "d2h": pytest.approx(2 * parameters(s) / 8, abs=64)}
    section = p.sections[0]
    for task, kind in enumerate(section.kind):
        if kind == Kind.COLLECTIVE and p.collectives[section.payload[task]].kind == "all_gather":
            assert [section.kind[w] for w in section.waits[task]] == [Kind.COPY]


@pytest.mark.parametrize("version", [1, 2])
def test_fsdp_fetches_full_precision_shards_and_sends_gradients_back(version: int) -> None:
    s = resolve(dump(fsdp(CPU)), "test", {"software.fsdp": version})
    low = lower(s)
    p, blocks = low.job.programs[0], sum(layer.numel for layer in low.architecture.stack if layer.kind == "block")
    root = low.architecture.parameters - blocks
    up = 4 * (2 * blocks + root) / 8  # blocks for forward and for backward, the root once
    assert copied(p)["d2h"] == pytest.approx(4 * low.architecture.parameters / 8, rel=1e-3)
    assert copied(p)["h2d"] == pytest.approx(up, rel=1e-3)
    assert not {"parameters", "optimizer_states", "gradients"} & {category for _, _, category in p.resident}
    assert held(p)["optimizer_states"] == pytest.approx(8 * low.architecture.parameters / 8, rel=1e-3)
    powers = [size for name, size, _ in p.host_resident if name.startswith("parameters")]
    assert all(size & (size - 1) == 0 for size in powers), "pinned blocks are powers of two"


def test_the_optimizer_on_the_cpu_takes_its_bytes_through_host_memory() -> None:
    s = scenario("zero2", {"optimizer": "cpu"}, gpus=1)
    low = lower(s)
    p = low.job.programs[0]
    section = p.sections[-1]
    task = next(t for t, label in enumerate(section.label) if p.labels[label].name == "adam on the CPU")
    # DeepSpeed: 28 B of fused Adam, 2 of the half copy, and clipping reads gradients and scales them (4 + 8)
    assert section.host_s[task] == pytest.approx((28 + 2 + 12) * low.architecture.parameters / (0.47 * 256e9))
    assert p.streams.index("d2h") in section.joins[task]


@pytest.mark.parametrize(("year", "kernel", "bytes_", "share"), [
    (2025, "fused", 28, 0.47), (2025, "foreach", 88, 0.24), (2023, "fused", 88, 0.24)])
def test_pytorch_fuses_adam_on_the_cpu_where_it_is_asked_to(year: int, kernel: str, bytes_: int, share: float) -> None:
    p = program(resolve(dump(fsdp(CPU, year=year)), "", {"software.optimizer_kernel": kernel}))
    section = p.sections[-1]
    task = next(t for t, label in enumerate(section.label) if p.labels[label].name.endswith("on the CPU"))
    numel = held(p)["optimizer_states"] / 8
    rate_bps = min(share * 256e9 / 8, 12e9)  # torchrun leaves a rank one thread
    assert section.host_s[task] == pytest.approx(bytes_ * numel / rate_bps, rel=0.02)


def test_states_on_disks_are_read_and_written_back() -> None:
    s = scenario("zero3", {"parameters": "nvme", "optimizer": "nvme"})
    share, moved = parameters(s) / 8, copied(program(s))
    assert moved["nvme_write"] == pytest.approx((4 + 12) * share, rel=0.01)
    assert moved["nvme_read"] == pytest.approx(16 * share + moved["h2d"], rel=0.01)


def test_gradients_are_added_up_in_host_memory_and_written_to_disks_once() -> None:
    s = scenario("zero3", {"parameters": "none", "optimizer": "nvme"}, steps=3)
    share, moved = parameters(s) / 8, copied(program(s))
    assert moved["nvme_write"] == pytest.approx((4 + 12) * share, rel=0.01)
    assert moved["d2h"] == pytest.approx((3 * 2 + 4) * share, rel=0.01)  # every micro-step's, and once as floats


@pytest.mark.parametrize("year", [2022, 2025])
def test_saved_tensors_go_and_come_back(year: int) -> None:
    kept, away = (program(fsdp(CPU | {"activations": place}, year=year)) for place in ("none", "cpu"))
    each = 128 * 2 * 256 * 2
    moved = copied(away) - copied(kept)
    assert moved["d2h"] == moved["h2d"] > 4 * 10 * each, "every block keeps tens of bytes per element"
    assert peak(away).highest["forward"] < peak(kept).highest["forward"]
    assert peak(away).steady


def test_a_block_s_copy_back_runs_while_the_block_behind_computes() -> None:
    p = program(fsdp(CPU | {"activations": "cpu"}))
    section = p.sections[0]
    names = [(p.labels[label].layer, p.labels[label].phase, p.labels[label].name) for label in section.label]
    fetched = names.index(("block1", "backward", "saved tensors h2d"))
    assert fetched < names.index(("block2", "backward", "block")) < names.index(("block1", "backward", "block"))


@pytest.mark.parametrize(("strategy", "offload", "more", "field"), [
    ("fsdp", {"optimizer": "cpu"}, {"framework": "pytorch"}, "parallel.offload"),
    ("fsdp", {"parameters": "nvme", "optimizer": "nvme"}, {"framework": "pytorch"}, "parallel.offload"),
    ("ddp", {"optimizer": "cpu"}, {"framework": "pytorch"}, "parallel.offload.optimizer"),
    ("zero2", CPU, {}, "parallel.offload.parameters"),
    ("zero3", {"parameters": "cpu"}, {}, "parallel.offload.optimizer"),
])
def test_places_a_framework_does_not_have_are_refused(
    strategy: str, offload: dict[str, str], more: dict[str, Any], field: str,
) -> None:
    with pytest.raises(UserError) as caught:
        lower(scenario(strategy, offload, **more))
    assert field in [f.field for f in caught.value.faults]


@pytest.mark.parametrize(("strategy", "offload", "optimizer", "field"), [
    ("zero1", {"optimizer": "nvme"}, "adamw", "parallel.offload.optimizer"),
    ("zero2", {"optimizer": "nvme"}, "adamw", "parallel.offload.optimizer"),
    ("zero2", {"optimizer": "cpu"}, "adafactor", "training.optimizer"),
    ("zero3", CPU, "adamw-8bit", "training.optimizer")])
def test_deepspeed_has_no_such_optimizer_outside(
    strategy: str, offload: dict[str, str], optimizer: str, field: str,
) -> None:
    s = resolve(dump(scenario(strategy, offload)), "test", {
        "training.optimizer": optimizer, "software.optimizer_kernel": "loop"})
    with pytest.raises(UserError) as caught:
        lower(s)
    assert [fault.field for fault in caught.value.faults] == [field]


@pytest.mark.parametrize(("year", "whole"), [(2021, False), (2024, True)])
def test_pinned_blocks_are_powers_of_two_from_torch_2_on(year: int, whole: bool) -> None:
    s = resolve(dump(scenario("zero2", {"optimizer": "cpu"})), "test", {"software.year": year})
    (size,) = (size for name, size, _ in program(s).host_resident if name == "gradients")
    assert (size & (size - 1) == 0) is whole
    assert whole or size == pytest.approx(4 * parameters(s) / 8, abs=8)


@pytest.mark.parametrize(("strategy", "steps", "batches"), [("zero1", 1, 1), ("zero1", 2, 2), ("zero1", 5, 2),
                                                            ("zero2", 5, 0)])
def test_a_pipeline_of_one_holds_the_logits_of_as_many_batches_as_it_has_buffers(
    strategy: str, steps: int, batches: int,
) -> None:
    s = scenario(strategy, {}, steps=steps)
    held_bytes = sum(size for name, size, _ in program(s).resident if name == "stage outputs")
    low = lower(s).architecture
    assert held_bytes == batches * low.batch * low.sequence * s.model.vocab * 4


def test_a_host_that_is_too_small_is_a_verdict() -> None:
    s = resolve(dump(scenario("zero3", CPU)), "test", {"cluster.topology.host.memory": "1 MB"})
    memory = sim.run(s).memory
    assert memory.headroom_bytes > 0 and not memory.fits
    assert memory.host is not None and memory.host.needed_bytes > memory.host.capacity_bytes == 1_000_000
    assert memory.host_missing_bytes == memory.host.needed_bytes - 1_000_000 and memory.missing_bytes == 0


@settings(max_examples=25)
@given(strategy=st.sampled_from(["zero1", "zero2", "zero3"]), gpus=st.sampled_from([1, 2, 16]),
       place=st.sampled_from(["cpu", "nvme"]), activations=st.booleans(), steps=st.integers(1, 3))
def test_memory_balances_and_offload_never_needs_more_of_the_gpu(
    strategy: str, gpus: int, place: str, activations: bool, steps: int,
) -> None:
    place = place if strategy == "zero3" else "cpu"
    offload = {"optimizer": place} | ({"parameters": place} if strategy == "zero3" else {})
    offload |= {"activations": "cpu"} if activations else {}
    with_it, without = (peak(program(scenario(strategy, o, gpus=gpus, steps=steps))) for o in (offload, {}))
    assert with_it.steady and without.steady
    states = ("parameters", "master_parameters", "optimizer_states")
    assert sum(with_it.category_peaks[c] for c in states) <= sum(without.category_peaks[c] for c in states)


def test_saved_tensors_take_host_memory() -> None:
    """With full recomputation a block keeps its input alone: tokens x width in 16 bits."""
    s = scenario("zero3", {"optimizer": "none", "activations": "cpu"}, steps=2, recompute="full")
    model, tokens = s.model, 2 * 128
    held = {name: size for name, size, _ in program(s).host_resident}
    assert held == {"saved tensors": model.layers * tokens * model.hidden * 2}
    small = resolve(dump(s), "test", {"cluster.topology.host.memory": f"{8 * held['saved tensors'] - 1} B"})
    memory = sim.run(small).memory
    assert memory.host is not None and memory.fits_device and not memory.fits and memory.host_missing_bytes == 1
