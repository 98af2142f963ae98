"""What tests/driver showed of PyTorch's own ways to allocate, each by itself."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest

from sim.parallel import lower
from sim.parallel.construction import sharded_by_unit
from sim.parallel.sharded.fsdp import GATHER, REDUCE
from sim.program import MemoryOp, Program
from sim.scenario import resolve

LAYERS, HIDDEN, VOCAB = 4, 1024, 8192


def program(strategy: dict[str, Any], torch: str, precision: Any, **software: Any) -> Program:
    return lower(resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": 1},
        "model": {"kind": "decoder", "layers": LAYERS, "hidden": HIDDEN, "heads": 8, "vocab": VOCAB, "bias": False,
                  "norm": "rmsnorm", "positions": "rotary", "dropout": False, "tied_embeddings": False},
        "training": {"micro_batch": 1, "global_batch": 8, "sequence": 512, "precision": precision},
        "parallel": strategy, "software": {"framework": "pytorch", "year": 2024, "versions": {"torch": torch},
                                           "optimizer_kernel": "foreach", **software}})).job.programs[0]


def operations(of: Program, name: str) -> list[MemoryOp]:
    return [op for section in of.sections for op in section.memory if op.tensor.startswith(name)]


def test_a_unit_is_whole_for_as_long_as_it_is_wrapped() -> None:
    assert sharded_by_unit([((4, 6), 12, 3), ((5,), 5, 1)]) == (
        (0, 4), (1, 6), (2, 12), (0, 0), (1, 0), (3, 3), (2, 0), (4, 5), (5, 5), (4, 0), (6, 1), (5, 0))


@pytest.mark.parametrize(("torch", "stream"), [("1.13", 0), ("2.0", GATHER), ("2.3", GATHER)])
def test_a_flat_gradient_is_made_where_the_views_were(torch: str, stream: int) -> None:
    found = operations(program({"strategy": "fsdp"}, torch, "fsdp-bf16", fsdp=1), "unsharded_gradient")
    assert found and {op.stream for op in found} == {stream}


@pytest.mark.parametrize(("torch", "recorded"), [("2.1", (REDUCE,)), ("2.2", ())])
def test_synchronous_collectives_record_their_stream_before_2_2(torch: str, recorded: tuple[int, ...]) -> None:
    precision = {"name": "fsdp-bf16", "reduce": "fp32"}
    found = operations(program({"strategy": "fsdp"}, torch, precision, fsdp=1), "cast_gradient")
    freed = {op.used_on for op in found if op.size_bytes < 0}
    assert freed == {recorded}


@pytest.mark.parametrize(("torch", "one"), [("1.11", False), ("1.12", True), ("2.3", True)])
def test_ddp_has_one_bucket_in_its_first_step(torch: str, one: bool) -> None:
    found = program({"strategy": "ddp"}, torch, "amp-bf16")
    buckets = found.tensors["gradient buckets"]
    assert len(buckets) > 1
    assert found.first == ({"gradient buckets": [ceil(sum(buckets) / 512) * 512]} if one else {})


def test_what_foreach_makes_for_a_moment_has_the_parameters_sizes() -> None:
    found = program({"strategy": "ddp"}, "2.3", "amp-bf16")
    made = found.tensors["optimizer temporaries"]
    table, block = 4 * VOCAB * HIDDEN, [4 * HIDDEN * n for n in (3 * HIDDEN, HIDDEN, 4 * HIDDEN, 4 * HIDDEN, 1, 1)]
    assert sorted(made) == sorted([table, table, 4 * HIDDEN, *(LAYERS * block)])


def test_fsdp_2_s_gathered_parameters_are_tensors_of_their_own() -> None:
    found = program({"strategy": "fsdp"}, "2.6", "fsdp-bf16", fsdp=2)
    (name,) = {op.tensor for op in operations(found, "gathered:block1")}
    rows = (3 * HIDDEN, HIDDEN, 4 * HIDDEN, 4 * HIDDEN, 1, 1)
    assert sorted(found.tensors[name]) == sorted(2 * HIDDEN * n for n in rows)
