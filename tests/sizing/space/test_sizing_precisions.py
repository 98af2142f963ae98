"""Precisions as an axis of the search: which are tried where, bounds of each, and the answer of separate searches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sizing_once import Once

import sim
from sim.cli import main
from sim.errors import UserError
from sim.scenario import Scenario, resolve
from sim.scenario.fields.precisions import PRECISIONS
from sim.sizing import Choice, Sizing, Wish, size
from sim.sizing.bounds.steps import Bounds, bounds
from sim.sizing.space.base import alone, following
from sim.sizing.space.layouts import STRATEGIES, build_space
from sim.sizing.space.precisions import clusters_of, twin, with_precisions

PLAIN: dict[str, Any] = {
    "name": "small", "cluster": {"topology": "dgx-h100"}, "model": {"preset": "gpt2", "layers": 4},
    "training": {"micro_batch": 1, "global_batch": 16, "sequence": 512, "precision": "megatron-bf16"},
    "software": {"framework": "megatron", "year": 2024}}
CHOICE = Choice([8], context=[1], tensor=[1, 2], pipeline=[1, 2], micro_batch=[1, 2], recompute=["none", "full"],
                partial_recompute=False, schedules=["1f1b"], precision=["fp8", "pure-bf16"])
CUSTOM = {"compute": "fp8", "parameters": "fp32", "master": "none", "gradients": "fp32", "optimizer": "fp32",
          "gather": "bf16", "reduce": "fp32"}


def scenario(**changes: Any) -> Scenario:
    return resolve({**PLAIN, **changes}, "small")


def trained(precision: Any, **changes: Any) -> dict[str, Any]:
    return {"training": {**PLAIN["training"], **({} if precision is None else {"precision": precision}), **changes}}


def names(of: Scenario, topologies: Sequence[str | None], asked: Sequence[str]) -> list[tuple[str, str]]:
    return [(one.cluster.topology.name, one.training.precision.name)
            for one in with_precisions(of, topologies, replace(CHOICE, precision=asked))[0]]


# ------------------------------------------------------------------------------------------------ which are tried where
def test_the_scenarios_own_is_tried_first_and_no_precision_twice() -> None:
    assert names(scenario(), [None], ["fp8", "megatron-bf16", "fp8"]) == [
        ("dgx-h100", "megatron-bf16"), ("dgx-h100", "fp8")]
    found, untried = with_precisions(scenario(), [None], replace(CHOICE, precision=["mixed-fp16", "megatron-fp16"]))
    assert [one.training.precision.name for one in found] == ["megatron-bf16", "mixed-fp16"]
    assert [tuple(one) for one in untried] == [("megatron-fp16", "", "has the dtypes of mixed-fp16")]
    assert names(scenario(**trained({**CUSTOM})), [None], ["fp8"]) == [("dgx-h100", "custom"), ("dgx-h100", "fp8")]
    same = scenario(**trained(dict(PRECISIONS["fp8"])))  # by its dtypes
    assert names(same, [None], ["fp8"]) == [("dgx-h100", "custom")]


def test_a_cluster_without_a_precision_is_left_out_for_it_and_that_is_said() -> None:
    found, untried = with_precisions(scenario(), ["p4d", "dgx-h100"], CHOICE)
    assert [(one.cluster.topology.name, one.training.precision.name) for one in found] == [
        ("p4d", "megatron-bf16"), ("p4d", "pure-bf16"), ("dgx-h100", "megatron-bf16"), ("dgx-h100", "fp8"),
        ("dgx-h100", "pure-bf16")]
    (one,) = untried
    assert (one.precision, one.cluster) == ("fp8", "p4d") and "no tensor cores for fp8" in one.why
    own, left = with_precisions(scenario(**trained("fp8")), ["p4d", "dgx-h100"],
                                replace(CHOICE, precision=["megatron-bf16"]))  # the scenario's own too
    assert [one.cluster.topology.name for one in own] == ["p4d", "dgx-h100", "dgx-h100"]
    assert own[0].training.precision.name == "megatron-bf16" and [one.precision for one in left] == ["fp8"]


@pytest.mark.parametrize(("asked", "topology", "changes", "said"), [
    (["fp9"], None, {}, "'fp9' is no precision (did you mean 'fp8'?)"),
    (["bf16"], None, {}, "(one of amp-bf16, fsdp-bf16, mixed-bf16, megatron-bf16, pure-bf16)"),
    ([""], None, {}, "one of fp32, tf32"), (["quite-else"], None, {}, "one of fp32, tf32"),
    (["fp8", "nvfp4"], None, {}, "nvfp4 cannot be tried: h100-80g-sxm has no tensor cores for nvfp4"),
    (["fp8"], "p4d", {}, "fp8 cannot be tried: a100-40g-sxm has no tensor cores"),
    (["amp-fp16"], None, {**trained("megatron-bf16", optimizer="muon"),
                          "software": {"framework": "megatron", "year": 2026}},
     "amp-fp16 cannot be tried: Megatron refuses Muon in fp16")])
def test_what_is_no_precision_or_nowhere_to_be_had_is_refused(asked: list[str], topology: str | None,
                                                              changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as told:
        size(scenario(**changes), replace(CHOICE, precision=asked), clusters=[topology] if topology else [])
    assert {one.field for one in told.value.faults} == {"--precision"} and said in str(told.value)


def test_what_no_precision_mends_is_told_of_the_scenario(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(json.dumps({**PLAIN, **trained("megatron-bf16", chunked_loss=True)}), encoding="utf-8")
    wrong = {**PLAIN, "model": {"preset": "bert-large"}, **trained("megatron-bf16", chunked_loss=True)}
    path.write_text(json.dumps(wrong), encoding="utf-8")
    with pytest.raises(UserError) as told:
        size(path, CHOICE)
    assert [(one.field, one.file) for one in told.value.faults] == [("training.chunked_loss", str(path))]


def test_requests_have_no_precisions_to_try(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(json.dumps({**PLAIN, "training": {"mode": {"inference": {"prompt": 8, "generate": 8, "batch": 1}},
                                                      "micro_batch": 1, "sequence": 512}}), encoding="utf-8")
    with pytest.raises(SystemExit) as left:
        main(["size", str(path), "--gpus", "1", "--precision", "fp8"])
    err = capsys.readouterr().err
    assert left.value.code == 2 and err.startswith("--precision: ") and "--weights" in err
    for axis in ("precision=fp8", "training.precision"):
        with pytest.raises(SystemExit) as left:
            main(["size", str(path), "--gpus", "1", "--only", axis])
        assert left.value.code == 2 and "--precision NAME" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------- rows and bounds
def test_a_row_says_its_precision_where_one_is_asked_for_and_not_else() -> None:
    bases, _ = with_precisions(scenario(), [None], CHOICE)
    space = build_space(bases, CHOICE)
    assert list(clusters_of(space)) == ["megatron-bf16", "fp8", "pure-bf16"]
    assert {space.sets(row)["training.precision"] for row in range(len(space))} == set(clusters_of(space))
    assert [twin(space, 0, name) for name in clusters_of(space)] == [0, 1, 2]
    of_own = scenario(**trained(CUSTOM))
    told = build_space(with_precisions(of_own, [None], CHOICE)[0], CHOICE).sets(0)["training.precision"]
    assert resolve({**PLAIN, **trained(told)}).training.precision == of_own.training.precision
    plain = replace(CHOICE, precision=[])
    alone_space = build_space([alone(scenario(), None)], plain)
    assert not any("precision" in name for name in alone_space.sets(0)) and not clusters_of(alone_space)


def test_what_follows_from_a_precision_follows_it() -> None:
    """Megatron of 2024 overlaps tensor ranks by its user buffers in 8 bits; LoRA's frozen weights are stored as the
    parameters."""
    base, of_fp8, _ = with_precisions(scenario(), [None], CHOICE)[0]
    assert not base.parallel.async_tensor and of_fp8.parallel.async_tensor
    lora = scenario(**trained("amp-bf16", finetune={"method": "lora"}), software={"framework": "pytorch", "year": 2024})
    bases, _ = with_precisions(lora, [None], replace(CHOICE, precision=["pure-bf16"]))
    assert [one.training.finetune.base for one in bases] == ["fp32", "bf16"]


SMALL = [("llama-7b", "megatron", 2024, ["megatron-bf16", "fp8"]),
         ("gpt2", "pytorch", 2025, ["amp-bf16", "fsdp-bf16"]),
         ("mixtral-8x7b", "megatron", 2025, ["pure-bf16", "fp8"]),
         ("llama-7b", "deepspeed", 2023, ["fp32", "mixed-fp16"]),
         ("bert-large", "torchtitan", 2025, ["fsdp-fp16", "fp8"])]


@pytest.mark.parametrize(("model", "framework", "year", "asked"), SMALL)
def test_bounds_of_each_precision_stay_below_what_is_simulated(model: str, framework: str, year: int,
                                                               asked: list[str], once: Once) -> None:
    """Random rows of both; and a bound of one is none of the other's: where they differ, so do the bounds."""
    of = scenario(model={"preset": model, "layers": 2}, software={"framework": framework, "year": year},
                  **trained(asked[0], micro_batch=1, global_batch=32))
    choice = Choice([16], context=[1], tensor=[1, 2], pipeline=[1, 2], micro_batch=[1, 2], precision=asked[1:])
    space = build_space(with_precisions(of, [None], choice)[0], choice)
    below, coarse, plain = bounds(space), Bounds(space), [following(one) for one in space.clusters]
    held, kinds = 0, clusters_of(space)
    assert list(kinds) == asked
    some = np.random.default_rng(year).choice(len(space) // 2, 6, replace=False)
    for row in [*some.tolist(), *(some + len(space) // 2).tolist()]:
        one = once(("", plain[space.columns["cluster"][row]], space.sets(row), 16))
        if one.outcome != "ok" or not one.fits:
            continue
        held += 1
        assert below.memory_bytes[row] <= one.device_used_bytes, space.sets(row)
        assert below.time_s[row] <= one.step_time_s and coarse.time_s[row] <= one.step_time_s, space.sets(row)
        assert below.energy_j(np.array([row]))[0] <= one.step_energy_j
    assert held >= 6
    times = [below.time_s[np.isin(space.columns["cluster"], numbers)] for numbers in kinds.values()]
    assert len(times[0]) == len(times[1]) and (times[0] != times[1]).mean() > 0.9


# --------------------------------------------------------------------------------------------------------------- search
def separate(of: Scenario, choice: Choice, wish: Wish, precisions: Sequence[str], top: int) -> dict[str, Sizing]:
    return {name: size(resolve({**PLAIN, **trained(name)}, of.name), replace(choice, precision=[]), wish, top=top)
            for name in precisions}


def told(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "set": {name: value for name, value in row["set"].items() if name != "training.precision"}}


@pytest.mark.parametrize("wish", [Wish(), Wish("energy"), Wish("gpus"), Wish("cost")], ids=lambda one: one.objective)
def test_a_search_over_precisions_is_the_better_of_separate_ones(wish: Wish, once: Once) -> None:
    names, top = ["megatron-bf16", "fp8", "pure-bf16"], 6
    choice = replace(CHOICE, gpus=[4, 8], tensor=[1], micro_batch=[1], partial_recompute=True)
    each = separate(scenario(), choice, wish, names, top)
    found = size(scenario(), choice, wish, top=top)
    assert found.proven and all(one.proven for one in each.values())
    value = {"time": "step_time_s", "energy": "step_energy_j", "cost": "cost", "gpus": "gpus"}[wish.objective]
    merged = sorted((row for one in each.values() for row in one.best),
                    key=lambda row: (row[value], row["step_time_s"]))
    assert told(found.best[0]) == told(merged[0])
    assert [one["precision"] for one in found.precisions] == names
    for one in found.precisions:
        assert one["proven"] and told(one["best"]) == told(each[one["precision"]].best[0])
        assert one["best"]["set"]["training.precision"] == one["precision"]
        assert one["own"] == (one["precision"] == "megatron-bf16")
    assert found.covered == sum(one.covered for one in each.values())
    assert found.covered == found.impossible + sum(found.pruned.values()) + found.simulated


def test_every_row_of_the_table_is_that_of_separate_searches(once: Once) -> None:
    names, top = ["megatron-bf16", "mixed-bf16"], 8
    each = separate(scenario(), CHOICE, Wish(), names, top)
    found = size(scenario(), replace(CHOICE, precision=names[1:]), top=top)
    merged = sorted(({**row, "set": {**row["set"], "training.precision": name}} for name, one in each.items()
                     for row in one.best), key=lambda row: row["step_time_s"])[:top]
    assert len({row["set"]["training.precision"] for row in merged}) > 1
    assert [row["step_time_s"] for row in found.best] == [row["step_time_s"] for row in merged]
    by_name = {json.dumps(row["set"], sort_keys=True) for row in merged}
    assert {json.dumps(row["set"], sort_keys=True) for row in found.best} == by_name
    fronts = [row for one in each.values() for row in one.front]
    assert found.front_proven and min(row["step_time_s"] for row in fronts) == found.front[0]["step_time_s"]


def test_the_layout_of_the_best_is_told_in_every_precision(once: Once) -> None:
    found = size(scenario(), CHOICE, top=2)
    best = found.best[0]
    for one in found.precisions:
        same = sim.run(resolve({**PLAIN}, "", {**best["set"], "training.precision": one["precision"]}))
        alike = one["with_the_best_layout"]
        assert alike["fits"] and alike["outcome"] == "ok"
        assert alike["step_time_s"] == pytest.approx(same.step_time_s, rel=1e-12)
        assert alike["device_used_bytes"] == same.memory.device_used_bytes
        back = sim.run(resolve({**PLAIN}, "", {**one["best"]["set"],
                                               "training.precision": best["set"]["training.precision"]}))
        assert one["its_layout_in_the_best_precision"]["step_time_s"] == pytest.approx(back.step_time_s, rel=1e-12)


def test_where_nothing_fits_in_a_precision_that_is_said() -> None:
    """2.6B parameters on one GPU of 40 GB: 18 bytes of each are 43 GiB in Megatron's way, 8 of pure bf16's are 19."""
    of = scenario(cluster={"topology": "p4d", "gpus_per_node": 1}, **trained("megatron-bf16", global_batch=2),
                  model={"layers": 32, "hidden": 2560, "heads": 32, "vocab": 50304})
    found = size(of, Choice([1], recompute=["full"], partial_recompute=False, micro_batch=[1],
                            precision=["pure-bf16"]))
    own, pure = found.precisions
    assert own["best"] is None and own["proven"] and own["own"] and not own["with_the_best_layout"]["fits"]
    assert pure["best"] == found.best[0] and found.proven


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_a_search_that_ends_early_has_a_figure_of_every_precision(seconds: float) -> None:
    found = size(scenario(), replace(CHOICE, micro_batch=(), recompute=("none", "full", "selective")), seconds=seconds)
    assert [one["precision"] for one in found.precisions] == ["megatron-bf16", "fp8", "pure-bf16"]
    assert all(one["best"] is not None and one["with_the_best_layout"] is not None for one in found.precisions)
    best = min(one["best"]["step_time_s"] for one in found.precisions)
    assert found.best[0]["step_time_s"] == best  # nothing told of is better than the best
    sets = [json.dumps(row["set"], sort_keys=True) for row in found.best]
    assert len(sets) == len(set(sets))


def test_a_row_that_fails_leaves_its_precision_unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = sim.api.measure

    def failing(one: Scenario) -> Any:
        if one.training.precision.name == "fp8" and one.parallel.strategy == "zero1":
            raise ValueError("ranks disagree")
        return measure(one)

    monkeypatch.setattr("sim.api.measure", failing)
    found = size(scenario(), replace(CHOICE, tensor=[1], pipeline=[1], micro_batch=[1], recompute=["none"]))
    assert found.faults and not found.proven
    assert {one["precision"]: one["proven"] for one in found.precisions} == {
        "megatron-bf16": True, "fp8": False, "pure-bf16": True}


def test_offload_and_parts_of_nodes_are_varied_in_every_precision(once: Once) -> None:
    of = scenario(software={"framework": "pytorch", "year": 2024})
    choice = Choice([4, 8], tensor=[1], context=[1], pipeline=[1], micro_batch=[1], recompute=["none"],
                    partial_recompute=False, strategies=["fsdp"], precision=["fsdp-bf16"])
    found = size(of, choice, offload=["none", "states"], top=40)
    seen = {(row["gpus"], row["set"]["parallel.offload.optimizer"], row["set"]["training.precision"])
            for row in found.rows}
    assert seen == {(gpus, place, name) for gpus in (4, 8) for place in ("none", "cpu")
                    for name in ("megatron-bf16", "fsdp-bf16")}
    assert all(one["with_the_best_layout"]["fits"] for one in found.precisions)


# -------------------------------------------------------------------------------------------------- store, rerun, words
def test_a_store_keeps_precisions_apart_and_goes_on_with_them_alone(tmp_path: Path, once: Once) -> None:
    out = tmp_path / "runs.db"
    first = size(scenario(), CHOICE, out=out)
    again = size(scenario(), CHOICE, out=out, resume=True)
    assert again.best == first.best and again.precisions == first.precisions
    with pytest.raises(UserError, match="another scenario"):
        size(scenario(), replace(CHOICE, precision=[]), out=out, resume=True)
    older = tmp_path / "plain.db"
    plain = size(scenario(), replace(CHOICE, precision=[]), out=older)
    assert size(scenario(), replace(CHOICE, precision=[]), out=older, resume=True).best == plain.best
    with pytest.raises(UserError, match="another scenario"):
        size(scenario(), CHOICE, out=older, resume=True)


def test_strategies_are_those_of_a_precision() -> None:
    """ZeRO++ of the file leaves ZeRO-3 alone; beside it a named precision, which quantises nothing, has all."""
    of = resolve({"name": "a", "cluster": {"topology": "p4d", "nodes": 2}, "model": {"preset": "gpt2", "layers": 4},
                  "training": {"micro_batch": 1, "global_batch": 32, "sequence": 256, "precision": {
                      **PRECISIONS["mixed-fp16"], "gather": "int8"}},
                  "parallel": {"strategy": "zero3"}, "software": {"framework": "deepspeed", "year": 2025}}, "")
    choice = Choice([16], tensor=[1], context=[1], pipeline=[1], micro_batch=[1], recompute=["none"],
                    partial_recompute=False, precision=["mixed-fp16"])
    space = build_space(with_precisions(of, [None], choice)[0], choice)
    kinds = [{STRATEGIES[space.columns["strategy"][row]] for row in np.flatnonzero(space.columns["cluster"] == number)}
             for number in range(2)]
    assert kinds[0] == {"zero3"} and {"zero1", "zero3"} <= kinds[1]
    found = size(of, choice)
    assert found.proven and [one["precision"] for one in found.precisions] == ["custom", "mixed-fp16"]
