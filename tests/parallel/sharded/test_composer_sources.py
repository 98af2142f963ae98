"""What Composer, MPT and FSDP 1 do between kernels: reads of the host, copies before a reduction, kept outputs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.memory.ledger import peak
from sim.parallel import lower
from sim.parallel.sharded.units import pieces
from sim.program import Kind, Program, Section
from sim.scenario import Scenario, resolve
from sim.software import stack_for

LAYERS, BATCH, SEQUENCE, VOCAB = 3, 2, 256, 1024


def scenario(composer: str, torch: str, flash: str = "triton", framework: str = "composer", **changes: Any) -> Scenario:
    versions = {"torch": torch, "composer": composer, "flash_attn": flash}
    return resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": 1},
        "model": {"kind": "decoder", "layers": LAYERS, "hidden": 512, "heads": 8, "vocab": VOCAB,
                  "tied_embeddings": True},
        "training": {"global_batch": 32, "micro_batch": BATCH, "sequence": SEQUENCE, "precision": "amp-bf16",
                     "attention": "flash"},
        "parallel": {"strategy": "fsdp", "reduce_every_micro_step": True},
        "software": {"framework": framework, "fsdp": 1, "year": 2023, "versions": versions}}, "x", changes)


def program(given_: Scenario) -> Program:
    return lower(given_).job.programs[0]


def hosts(program_: Program, section: Section, name: str) -> list[float]:
    return [host_s for kind, host_s, label in zip(section.kind, section.host_s, section.label, strict=True)
            if kind == int(Kind.HOST) and program_.labels[label].name == name]


@pytest.mark.parametrize(("composer", "flash", "reads"), [
    ("0.12.1", "0.2.8", 2), ("0.13.3", "triton", 0), ("0.17.2", "2.4.2", 6), ("0.19.0", "2.5.0", 0)])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_host_reads_in_every_layer_that_looks_for_its_rows(
    composer: str, flash: str, reads: int, recompute: str,
) -> None:
    made = program(scenario(composer, "2.1.0", flash, **{"training.recompute": recompute}))
    stack = stack_for("composer", 2023, versions={"torch": "2.1.0", "composer": composer, "flash_attn": flash})
    found = hosts(made, made.sections[0], "read")
    assert len(found) == (LAYERS * (1 + (recompute == "full")) if reads else 0)
    for host_s in found:
        least = reads * stack.host_read_s
        assert least < host_s < least + reads / 2 * 15 * stack.host_forward_s


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_cut_layer_runs_the_same_kernels(recompute: str) -> None:
    """unpad's kernels beside, attention apart and known differ in where the host waits only."""
    counts = []
    for composer in ("0.17.2", "0.19.0"):
        made = program(scenario(composer, "2.1.0", "2.4.2", **{"training.recompute": recompute}))
        section = made.sections[0]
        counts.append(Counter(
            row for kind, payload in zip(section.kind, section.payload, strict=True) if kind == int(Kind.KERNELS)
            for row in (made.kernels[k] for k in made.segments[payload].kernels)))
    assert counts[0] == counts[1]


def test_an_mpt_forward_reads_its_mask() -> None:
    new = program(scenario("0.13.3", "1.13.1"))
    assert len(hosts(new, new.sections[0], "fetch")) == 1
    old = program(scenario("0.12.1", "1.13.1", "0.2.8"))
    assert not hosts(old, old.sections[0], "fetch")


@pytest.mark.parametrize(("composer", "calls"), [("0.11.1", 4), ("0.13.3", 12)])
def test_numbers_of_all_ranks_are_read_one_by_one(composer: str, calls: int) -> None:
    """Loss, samples, time, FLOPs; and a barrier and a gather for each of two metrics' two states."""
    made = program(scenario(composer, "1.13.1", "0.2.8"))
    found = hosts(made, made.sections[-1], "numbers of all ranks")
    stack = stack_for("composer", 2023, versions={"composer": composer})
    assert len(found) == calls
    apiece_s = 8 * (stack.host_forward_s + stack.host_backward_s)
    assert sum(found) == pytest.approx(calls * stack.host_read_s + (calls - 4) // 2 * apiece_s)
    plain = program(scenario(composer, "1.13.1", framework="pytorch"))
    assert not hosts(plain, plain.sections[-1], "numbers of all ranks")


def buffers(made: Program, name: str) -> list[int]:
    return [op.size_bytes for section in made.sections for op in section.memory if op.tensor.startswith(name)]


@pytest.mark.parametrize(("torch", "padded"), [("1.13.1", True), ("2.0.1", False)])
def test_gradients_are_copied_once_more_before_torch_2(torch: str, padded: bool) -> None:
    made = program(scenario("0.13.3", torch))
    found = buffers(made, "padded_gradient")
    units = LAYERS + 1
    assert len(found) == (2 * units * len(made.sections[:-1]) if padded else 0)
    assert sum(found) == 0
    if padded:
        assert max(found) % (2 * 8) == 0  # bf16, of eight equal shares


def test_shards_are_copied_where_a_dtype_is_asked_for() -> None:
    """Composer 0.11 asks for fp32, 0.12 for none, 0.13 for bf16."""
    assert [bool(buffers(program(scenario(composer, "1.12.1", "0.2.8", **{"training.precision.gather": gather})),
                         "gathered_shard")) for composer, gather in
            (("0.11.1", "fp32"), ("0.12.1", "fp32"), ("0.13.3", "bf16"))] == [True, False, True]


@pytest.mark.parametrize(("composer", "metrics"), [("0.12.1", 2), ("0.13.3", 1)])
def test_outputs_stay_until_the_next_are_there(composer: str, metrics: int) -> None:
    """Each metric has log-softmax in halves and its copy in fp32."""
    logits = 2 * BATCH * SEQUENCE * VOCAB
    made = program(scenario(composer, "1.13.1", "0.2.8"))
    found = buffers(made, "model outputs")
    assert set(found) == {logits, -logits}
    assert sum(found) == 0
    assert sum(size for size in buffers(made, "metric") if size > 0) == 3 * logits * metrics * len(made.sections[:-1])
    assert not buffers(program(scenario(composer, "1.13.1", framework="pytorch")), "model outputs")


def test_attention_that_packs_holds_its_output_twice() -> None:
    """The kernel keeps its own output, the projection the padded one."""
    packed, triton = (peak(program(scenario("0.17.2", "2.1.0", flash))).peak_allocated_bytes
                      for flash in ("2.4.2", "triton"))
    assert packed - triton >= (LAYERS - 1) * BATCH * SEQUENCE * 512 * 2  # the peak is in the last block's backward


def test_the_optimizer_reads_its_step_from_0_16_on() -> None:
    old, new = (program(scenario(composer, "2.0.1")) for composer in ("0.13.3", "0.16.3"))
    assert not hosts(old, old.sections[-1], "numbers read")
    (found,) = hosts(new, new.sections[-1], "numbers read")
    stack = stack_for("composer", 2023, versions={"composer": "0.16.3"})
    tensors = found / (2 * (stack.host_read_s + stack.host_forward_s))
    assert tensors == pytest.approx(round(tensors)) and round(tensors) >= LAYERS + 1


def test_pieces_by_hand() -> None:
    assert pieces((10, 10, 10, 10), 4).tolist() == [1, 1, 1, 1]
    assert pieces((1, 1, 38), 4).tolist() == [3, 1, 1, 1]
    assert pieces((3, 3), 4).tolist() == [1, 2, 1, 0]  # shares of two, the last is padding


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 9))
def test_pieces_are_those_an_element_by_element_count_finds(numels: list[int], factor: int) -> None:
    owner = np.repeat(np.arange(len(numels)), numels)
    share = -(-len(owner) // factor)
    expected = [len(set(owner[rank * share:(rank + 1) * share].tolist())) for rank in range(factor)]
    assert pieces(tuple(numels), factor).tolist() == expected
