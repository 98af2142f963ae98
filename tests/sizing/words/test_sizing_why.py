"""Why the best wins, the families beside it, and the Pareto front."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.scenario.load import resolve
from sim.sizing import Choice, Sizing, Wish, size
from sim.sizing.search.front import pareto
from sim.sizing.search.why import families
from sim.sizing.space.families import FAMILIES, families_of
from sim.sizing.space.layouts import build_space
from sim.sizing.words.why import why_lines

SMALL: dict[str, Any] = {
    "name": "small", "cluster": {"topology": "dgx-a100-80g", "nodes": 1}, "model": {"preset": "gpt2"},
    "training": {"micro_batch": 1, "global_batch": 64, "sequence": 1024, "precision": "fsdp-bf16"},
    "parallel": {"strategy": "fsdp"}}
NARROW = {"tensor": [1, 2], "context": [1], "pipeline": [1, 2], "virtual_stages": [1], "schedules": ["1f1b"],
          "micro_batch": [4], "recompute": ["none"], "partial_recompute": False}


@pytest.fixture(scope="module")
def found() -> Sizing:
    return size(resolve(SMALL), Choice([8, 16], **NARROW))


def test_terms_against_the_runner_up_sum_to_the_difference(found: Sizing) -> None:
    second = found.why.runner_up
    assert second is not None and second.row["set"] == found.best[1]["set"]
    change = found.best[1]["step_time_s"] - found.best[0]["step_time_s"]
    assert sum(s for _, s in second.found.moved[0]) == pytest.approx(change, abs=1e-9)
    assert second.margin_bytes[0] - second.margin_bytes[1] == \
        found.best[1]["device_used_bytes"] - found.best[0]["device_used_bytes"]


def test_what_recomputes_otherwise_alone_is_not_held_against_the_best() -> None:
    axes: dict[str, Any] = {**NARROW, "tensor": [1, 4], "pipeline": [1], "strategies": ["ddp"],
                            "recompute": ["none", "selective", "full"]}
    found = size(resolve(SMALL), Choice([8], **axes), top=10**6)
    second, own = found.why.runner_up, found.best[0]["set"]
    assert second is not None
    between = [row for row in found.best if row["step_time_s"] < second.row["step_time_s"]][1:]
    assert found.why.between == between and between
    assert all({**row["set"], "training.recompute": own["training.recompute"]} == own for row in between)
    assert {**second.row["set"], "training.recompute": own["training.recompute"]} != own
    text = "\n".join(why_lines(found.why, lambda row: str(row["set"]["training.recompute"]), found.wish.told))
    assert f"the next layout ({second.row['set']['training.recompute']})" in text
    assert f"(between them {len(between)} with the best's layout" in text
    alike = size(resolve(SMALL), Choice([8], **{**axes, "tensor": [1]}), top=10**6)
    assert alike.why.runner_up is not None and alike.why.runner_up.row == alike.best[1] and not alike.why.between


def test_families_cover_the_space_and_are_told(found: Sizing) -> None:
    assert sum(one.covered for one in found.why.families) == found.covered
    assert sum(one.simulated for one in found.why.families) == found.simulated
    assert [one.holds_best for one in found.why.families].count(True) == 1
    text = "\n".join(why_lines(found.why, lambda row: str(row["gpus"]), found.wish.told))
    assert "why the best wins" in text and "memory left free" in text
    assert all(f"  {one.name} " in text for one in found.why.families)
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["why"]["runner_up"]["row"] == found.best[1]


def test_the_front_is_what_exhaustive_search_finds(found: Sizing) -> None:
    everything = size(resolve(SMALL), Choice([8, 16], **NARROW), top=10**6)
    assert everything.simulated == everything.covered and found.front_proven
    fastest = {n: min(r["step_time_s"] for r in everything.best if r["gpus"] == n) for n in (8, 16)}
    of_count = {n: [row for row in found.front if row["gpus"] == n] for n in (8, 16)}
    assert {n: rows[0]["step_time_s"] for n, rows in of_count.items()} == fastest and fastest[16] < fastest[8]
    for rows in of_count.values():  # slower ones take less energy
        assert all(slow["energy_kwh"] < fast["energy_kwh"] for fast, slow in pairwise(rows))


def test_a_family_is_the_first_cut_of_a_layout() -> None:
    space = build_space([resolve(SMALL)], Choice([8], **{**NARROW, "context": [1, 2], "tensor": [1, 2, 4]}))
    for row, number in enumerate(families_of(space)):
        sets = space.sets(row)
        cut = [n for n in ("tensor", "pipeline", "context") if sets[f"parallel.{n}"] > 1]
        kept = {"fsdp": "FSDP", "ddp": "DDP", "none": "DDP"}.get(sets["parallel.strategy"], "ZeRO")
        both = cut[:2] == ["tensor", "pipeline"]
        assert FAMILIES[number] == ("tensor + pipeline" if both else cut[0] if cut else kept), sets


def test_a_family_without_asimulated_row_says_why() -> None:
    space = build_space([resolve(SMALL)], Choice([8], **{**NARROW, "tensor": [1], "pipeline": [1]}))
    index = families_of(space)
    bounds = np.where(index == FAMILIES.index("FSDP"), np.inf, 2.0)
    zero = int(np.flatnonzero(index == FAMILIES.index("ZeRO"))[0])
    by_name = {one.name: one for one in families(space, bounds, {zero: 3.0}, lambda row: {"row": row}, zero)}
    assert by_name["FSDP"].best is None and by_name["FSDP"].ruled_out == by_name["FSDP"].covered
    assert by_name["DDP"].simulated == 0 and by_name["DDP"].nearest == 2.0
    assert by_name["ZeRO"].holds_best and by_name["ZeRO"].best is None
    from sim.sizing.search.why import Why

    text = "\n".join(why_lines(Why(families=list(by_name.values())), str, Wish().told))
    assert "ruled out by memory" in text and "none can be below 2 s a step" in text


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5)), max_size=40))
def test_front_is_the_rows_nothing_beats(rows: list[tuple[int, int, int]]) -> None:
    table = [{"step_time_s": a, "gpus": b, "cost": c, "energy_kwh": 1.0} for a, b, c in rows]
    front = {rows[i] for i in pareto(table)}
    beaten = {r for r in rows if any(o != r and all(x <= y for x, y in zip(o, r, strict=True)) for o in rows)}
    assert front == set(rows) - beaten and len(pareto(table)) == len(front)


def test_nothing_that_fits_leaves_families_without_a_winner() -> None:
    found = size(resolve(SMALL), Choice([8], **NARROW), Wish(deadline_s=1e-9))
    assert not found.best and found.why.runner_up is None and not found.front
    assert math.isfinite(found.gap) and all(not one.holds_best for one in found.why.families)
