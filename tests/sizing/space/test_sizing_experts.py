"""Experts cut over tensor ranks or whole: the search tries both, and says which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sizing_once import Once

from sim.api import load
from sim.errors import UserError
from sim.scenario import Scenario, resolve
from sim.sizing import Choice, size
from sim.sizing.bounds.steps import bounds
from sim.sizing.search.nearby import own_row
from sim.sizing.space.base import alone, following
from sim.sizing.space.layouts import Space, build_space
from sim.sizing.space.only import only
from sim.sizing.words.rerun import command
from sim.sizing.words.size import layout_of

GPUS, TOP = 16, 8
SMALL: dict[str, Any] = {
    "name": "small", "cluster": {"topology": "dgx-h100", "nodes": 2}, "model": {"preset": "mixtral-8x7b", "layers": 4},
    "training": {"micro_batch": 1, "global_batch": 32, "sequence": 1024, "precision": "megatron-bf16"},
    "software": {"framework": "megatron", "year": 2025}}
CHOICE = Choice([GPUS], tensor=[1, 2, 4], context=[1], pipeline=[1, 2], micro_batch=[1], strategies=["zero1"],
                recompute=["none"], partial_recompute=False, virtual_stages=[1], schedules=["1f1b"])


def small(**parallel: Any) -> Scenario:
    return resolve({**SMALL, "parallel": {"strategy": "zero1", **parallel}}, "small")


def of_year(year: int) -> Scenario:
    return resolve({**SMALL, "software": {"framework": "megatron", "year": year}}, "small")


def _cuts(space: Space) -> set[tuple[int, int, int, bool]]:
    names = ("tensor", "expert", "expert_tensor", "sequence_parallel")
    return {(t, e, c, bool(s)) for t, e, c, s in zip(*(space.columns[name].tolist() for name in names), strict=True)}


def test_experts_are_cut_or_whole_wherever_they_can_be() -> None:
    found = _cuts(build_space([alone(of_year(2023), None)], CHOICE))
    assert {(2, 4, 2, False), (2, 4, 2, True), (2, 4, 1, True)} <= found
    assert (2, 4, 1, False) not in found  # tensor ranks with the same tokens
    assert _cuts(build_space([alone(small(), None)], CHOICE)) == {one for one in found if one[3] or one[0] == 1}
    assert (4, 8, 1, True) in found and (4, 8, 4, True) not in found  # four or two replicas do not divide by eight
    assert {c for t, e, c, _ in found if e == 1 or t == 1} == {1, 2, 4}
    assert all(c == t for t, e, c, _ in found if e == 1 or t == 1)


def test_slices_that_no_expert_has_are_no_layout() -> None:
    odd = resolve({**SMALL, "model": {**SMALL["model"], "moe": {"experts": 8, "top_k": 2, "expert_ffn": 1022}}}, "odd")
    found = _cuts(build_space([alone(odd, None)], CHOICE))
    assert {c for t, e, c, _ in found if t == 4} == {1} and {c for t, e, c, _ in found if t == 2 and e > 1} == {1, 2}


def test_only_one_way_may_be_asked_for() -> None:
    assert {c for *_, c, _ in _cuts(build_space([alone(small(), None)], only(CHOICE, ["expert_tensor=1"])))} == {1}
    dense = resolve({**SMALL, "model": {"preset": "gpt2"}}, "dense")  # nothing to choose
    assert not any("expert_tensor" in name for name in build_space([alone(dense, None)], CHOICE).sets(0))
    with pytest.raises(UserError, match="--only: no layout of this model"):
        build_space([alone(dense, None)], only(CHOICE, ["expert_tensor=2"]))
    asked = resolve({**SMALL, "training": {"mode": {"inference": {"prompt": 8, "generate": 8, "batch": 1}}}}, "asked")
    with pytest.raises(UserError, match=r"parallel\.expert_tensor is of training"):
        size(asked, Choice([8], expert_tensor=[1]))


def test_the_best_is_that_of_simulating_both_ways(once: Once) -> None:
    of = small()
    base = alone(of, None)
    space, plain = build_space([base], CHOICE), following(base)
    outcomes = [once(("", plain, space.sets(row), GPUS)) for row in range(len(space))]
    assert {one.outcome for one in outcomes} == {"ok"}
    below = bounds(space)
    for row, one in enumerate(outcomes):
        assert below.memory_bytes[row] <= one.device_used_bytes, space.sets(row)
        assert 0.6 * one.step_time_s < below.time_s[row] <= one.step_time_s or not one.fits, space.sets(row)
    every = sorted((one.step_time_s, row) for row, one in enumerate(outcomes) if one.fits)
    found = size(of, CHOICE, top=TOP)
    assert found.proven and [row["set"] for row in found.best] == [space.sets(row) for _, row in every[:TOP]]


def test_the_scenarios_own_way_is_told_and_found_again() -> None:
    ways = {slices: small(tensor=2, expert=4, sequence_parallel=True, expert_tensor=slices) for slices in (None, 1, 2)}
    space = build_space([alone(small(), None)], CHOICE)
    for slices, of in ways.items():
        row = own_row(space, of)
        assert row is not None and space.columns["expert_tensor"][row] == (slices or 2)
        assert layout_of(space.sets(row)).endswith(f"expert=4 expert_tensor={slices or 2}")


def test_a_file_that_asks_for_whole_experts_is_told_what_to_change(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("name: a\ncluster: {topology: dgx-h100, nodes: 2}\nmodel: {preset: mixtral-8x7b, layers: 4}\n"
                    "training: {micro_batch: 1, global_batch: 32, sequence: 1024, precision: megatron-bf16}\n"
                    "parallel: {strategy: zero1, tensor: 2, sequence_parallel: true, expert: 4, expert_tensor: 1}\n"
                    "software: {framework: megatron, year: 2025}\n", encoding="utf-8")
    base = alone(load(path).scenario, None)
    space, plain = build_space([base], CHOICE), following(base)
    for row in range(len(space)):
        sets = space.sets(row)
        said = command(str(path), [], resolve(plain, "", sets), sets, None)
        assert said is not None, sets
        own = space.columns["tensor"][row] == 2 and space.columns["expert"][row] == 4
        cut = own and space.columns["expert_tensor"][row] == 2
        assert ("parallel.expert_tensor=2" in said) == cut or not own, said
