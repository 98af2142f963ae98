"""Bounds are bounds of what simulation gives; searches of real layouts agree with simulating all of them."""

from __future__ import annotations

import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sizing_once import Once

from sim.cli import main
from sim.errors import UserError
from sim.scenario import Scenario, resolve
from sim.sizing import Choice, Wish, counts, size
from sim.sizing.bounds.steps import Bounds, bounds
from sim.sizing.search.runner import simulated
from sim.sizing.space.base import alone, following
from sim.sizing.space.layouts import SCHEDULES, build_space, with_own
from sim.sizing.space.policies import POLICIES, policy
from sim.sizing.space.thinned import Own
from sim.sizing.words.size import layout_of

PLAIN: dict[str, Any] = {
    "name": "small", "cluster": {"topology": "dgx-a100-80g"}, "model": {"preset": "gpt2"},
    "training": {"micro_batch": 1, "global_batch": 16, "sequence": 1024}}


def scenario(**changes: Any) -> Scenario:
    return resolve({**PLAIN, **changes}, "small")


@pytest.mark.whole
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6), model=st.sampled_from(["gpt2", "llama-7b", "bert-large", "mixtral-8x7b"]),
       framework=st.sampled_from(["pytorch", "megatron", "deepspeed", "torchtitan"]), tensor=st.sampled_from([1, 2, 4]),
       context=st.sampled_from([1, 2]), pipeline=st.sampled_from([1, 2, 4]),
       topology=st.sampled_from(["dgx-a100-80g", "dgx-1v-32g", "p4d"]),
       parallel=st.sampled_from([{}, {"overlap": False}, {"overlap_p2p": True}, {"offload": {"activations": "cpu"}},
                                 {"offload": {"optimizer": "cpu"}}]),
       year=st.sampled_from([2021, 2023, 2025]), finetune=st.sampled_from([None, None, None, "lora"]))
@example(52199, "mixtral-8x7b", "megatron", 1, 1, 4, "dgx-a100-80g", {}, 2023, None)  # FSDP fits where ZeRO-1 does not
@example(1, "llama-7b", "pytorch", 1, 1, 1, "dgx-a100-80g", {}, 2023, None)  # FSDP 2 keeps first gradients as made
def test_bounds_never_exceed_what_is_simulated(seed: int, model: str, framework: str, tensor: int, context: int,
                                               pipeline: int, topology: str, parallel: dict[str, Any], year: int,
                                               finetune: str | None) -> None:
    training = {"micro_batch": 1, "global_batch": 32, "sequence": 512,
                **({} if finetune is None else {"finetune": {"method": finetune, "rank": 8}})}
    base = alone(scenario(model={"preset": model}, software={"framework": framework, "year": year},
                           training=training, cluster={"topology": topology},
                           parallel={"strategy": "ddp", **parallel}), None)
    choice = Choice([16], schedules=SCHEDULES, tensor=[tensor], context=[context], pipeline=[pipeline],
                    micro_batch=[1, 2, 4])
    try:
        space = build_space([base], choice)
    except UserError:
        return
    of, plain = bounds(space), following(base)
    coarse = Bounds(space)
    energy = of.energy_j(slice(None))
    for row in np.random.default_rng(seed).choice(len(space), 3):
        got = simulated(("", plain, space.sets(int(row)), 16))
        if got.outcome == "ok":
            assert of.memory_bytes[row] <= got.device_used_bytes
        if got.fits:
            assert of.time_s[row] <= got.step_time_s and coarse.time_s[row] <= got.step_time_s
            assert energy[row] <= got.step_energy_j
            # a bound worth having; it leaves out what experts that few ranks share send between nodes
            assert finetune or of.time_s[row] > (0.05 if model == "mixtral-8x7b" else 0.1) * got.step_time_s


@pytest.mark.whole
def test_search_agrees_with_simulating_everything(once: Once) -> None:
    choice = Choice([8], micro_batch=[1, 2], context=[1], recompute=["none", "full"], partial_recompute=False,
                    schedules=["1f1b", "interleaved", "zb-h1", "zb-2p", "zb-v"], tensor=[1, 2], pipeline=[1, 2],
                    virtual_stages=[1, 2])
    base = alone(scenario(), None)
    space, plain = build_space([base], choice), following(base)
    outcomes = [once(("", plain, space.sets(row), 8)) for row in range(len(space))]
    for objective in ("time", "cost", "gpus", "energy"):
        wish = Wish(objective)
        every = sorted((float(wish.value(o.step_time_s, o.gpus, None, o.step_energy_j)), row)
                       for row, o in enumerate(outcomes) if o.fits)
        found = size(scenario(), choice, wish, top=4)
        assert [row["set"] for row in found.best] == [space.sets(row) for _, row in every[:4]]
        assert found.gap == 0.0 and found.simulated < len(space)
        assert found.covered == len(space) == found.impossible + sum(found.pruned.values()) + found.simulated


def test_rows_are_distinct_and_partial_recomputation_is_per_stage() -> None:
    space = build_space([alone(scenario(), None)], Choice([8], schedules=SCHEDULES))
    texts = {json.dumps(space.sets(row), sort_keys=True) for row in range(len(space))}
    assert len(texts) == len(space)
    staged = space.columns["pipeline"] == 4
    most = int(space.columns["recompute"][staged].max())
    assert policy(most) == {"layers": 12 // 4 - 1} and policy(3) == "full" == POLICIES[3]


def test_a_row_that_fails_is_kept_and_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def failing(_: Any) -> Any:
        raise ValueError("ranks disagree")

    monkeypatch.setattr("sim.api.measure", failing)
    choice = Choice([8], micro_batch=[1], tensor=[1], context=[1], pipeline=[1], recompute=["none"],
                    partial_recompute=False, strategies=["ddp"])
    found = size(scenario(), choice, out=tmp_path / "runs.db")
    assert found.faults == 1 and not found.proven and found.first_fault is not None
    assert found.first_fault["reason"] == "ValueError: ranks disagree"
    assert found.first_fault["set"]["parallel.strategy"] == "ddp"
    kept = sqlite3.connect(tmp_path / "runs.db").execute("select key, outcome, reason from runs").fetchall()
    assert [row[1:] for row in kept] == [("fault", "ValueError: ranks disagree")]
    assert json.loads(kept[0][0].split(" ", 1)[1]) == found.first_fault["set"]


def test_whole_gradients_of_fsdp_accumulation_rule_layouts_out() -> None:
    """7B in fp32 gradients over 16 GPUs: shards are small, whole gradients kept over micro-steps are not."""
    kept = {"strategy": "fsdp", "reduce_every_micro_step": False}
    base = alone(scenario(model={"preset": "llama-7b"}, parallel=kept), None)
    choice = Choice([16], tensor=[1], context=[1], pipeline=[1], micro_batch=[1], recompute=["full"],
                    partial_recompute=False, strategies=["fsdp"])
    once = build_space([base], choice)
    again = base.model_copy(update={"training": base.training.model_copy(update={"global_batch": 32})})
    twice = build_space([again], choice)
    more = bounds(twice).memory_bytes - bounds(once).memory_bytes
    numel = 6.7e9
    assert (more > 1.9 * numel).all() and (more < 4.1 * numel).all()


def test_workers_change_nothing() -> None:
    choice = Choice([4, 8], micro_batch=[1, 2], tensor=[1, 2], context=[1], pipeline=[1], partial_recompute=False)
    four = scenario(cluster={"topology": "dgx-a100-80g", "gpus_per_node": 4})
    one, two = size(four, choice, top=3), size(four, choice, top=3, workers=2)
    assert one.best == two.best and one.front == two.front and one.simulated == two.simulated


def test_deadline_prunes_and_is_kept() -> None:
    choice = Choice([8], micro_batch=[1], tensor=[1], context=[1], pipeline=[1], partial_recompute=False)
    free = size(scenario(), choice, Wish(steps=1000))
    late = size(scenario(), choice, Wish(steps=1000, deadline_s=free.best[0]["run_s"] / 2))
    assert not late.best and late.pruned["deadline"] > 0


def test_killed_search_resumes_without_repeating(tmp_path: Path) -> None:
    file, out = tmp_path / "s.yaml", tmp_path / "runs.db"
    file.write_text(json.dumps({**PLAIN, "cluster": {"topology": "dgx-a100-80g", "gpus_per_node": 2}}))
    command = [sys.executable, "-m", "sim", "size", str(file), "--gpus", "2", "--top", "40", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}  # wherever the tests run
    child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    before = 0
    for _ in range(2000):
        time.sleep(0.05)
        try:  # read only: to open a file that is not there must not make it
            reader = sqlite3.connect(f"file:{out}?mode=ro", uri=True)
            before = reader.execute("select count(*) from runs").fetchone()[0]
        except sqlite3.Error:
            before = 0
        if before >= 8 or child.poll() is not None:
            break
    child.send_signal(signal.SIGKILL)
    child.wait()
    kept = sqlite3.connect(out).execute("select * from runs order by rowid").fetchall()
    assert len(kept) >= 8
    with pytest.raises(SystemExit) as refused:
        main(command[3:])
    assert refused.value.code == 2
    with pytest.raises(SystemExit) as done:
        main([*command[3:], "--resume", "--json", str(tmp_path / "found.json")])
    assert done.value.code == 0
    rows = sqlite3.connect(out).execute("select * from runs order by rowid").fetchall()
    assert rows[:len(kept)] == kept  # nothing lost, nothing simulated again
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["proven"] and found["simulated"] == len(rows)


def test_numbers_of_gpus() -> None:
    assert counts("8..64") == [8, 16, 32, 64] and counts("6, 24..40") == [6, 24, 32, 40]
    for wrong in ("", "a..b", "9..8", "0"):
        with pytest.raises(UserError):
            counts(wrong)


def test_compare_names_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, recompute in (("a", "none"), ("b", "full")):
        training = {**PLAIN["training"], "recompute": recompute}
        (tmp_path / f"{name}.yaml").write_text(json.dumps({**PLAIN, "name": name, "training": training}))
    with pytest.raises(SystemExit) as done:
        main(["compare", str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml"), "--json", "-"])
    assert done.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["differs"] == {"training.recompute": ["none", "full"]}
    total = sum(found["moved_s"][0].values())
    assert total == pytest.approx(found["step_time_s"][1] - found["step_time_s"][0], rel=0.05)
    assert max(found["moved_s"][0].values()) > 0 and not math.isnan(total)


def test_a_cluster_with_trouble_is_not_sized() -> None:
    troubled = {**PLAIN, "cluster": {**PLAIN["cluster"], "degraded": [{"link": "gpu", "index": 0, "share": 0.5}]}}
    with pytest.raises(UserError, match="alike"):
        size(resolve(troubled), Choice(counts("8")))


def proposed(framework: str, year: int, **parallel: Any) -> set[str]:
    of = scenario(software={"framework": framework, "year": year}, cluster={"topology": "dgx-a100-80g"},
                  parallel={"strategy": "ddp", **parallel})
    space = build_space([alone(of, None)], with_own(Choice([8], micro_batch=[1]), of))
    return {SCHEDULES[i] for i in space.columns["schedule"][space.columns["pipeline"] > 1]}


@pytest.mark.parametrize(("framework", "year", "schedules"), [
    ("megatron", 2024, {"1f1b", "interleaved"}), ("deepspeed", 2024, {"1f1b"}), ("nanotron", 2024, {"gpipe", "1f1b"}),
    ("composer", 2023, set()), ("torchtitan", 2025, {"gpipe", "1f1b", "interleaved", "zb-v"}),
    ("ideal", 2024, set(SCHEDULES))])
def test_only_schedules_that_the_stack_has_are_proposed(framework: str, year: int, schedules: set[str]) -> None:
    assert proposed(framework, year) == schedules


def test_a_schedule_that_the_scenario_runs_is_proposed_too() -> None:
    assert proposed("megatron", 2024, pipeline=2, schedule="zb-v") == {"1f1b", "interleaved", "zb-v"}
    asked = Choice([8], schedules=["zb-h1"])
    assert with_own(asked, scenario(software={"framework": "megatron"})) == replace(asked, own=Own())


@pytest.mark.parametrize("training", [{}, {"document": {"mean": 100, "spread": 1.0}}])
def test_bounds_hold_where_blocks_with_a_window_alternate_with_others(training: dict[str, Any], once: Once) -> None:
    """Stages and recomputed blocks are not alike: the first blocks of a pair are the quick ones."""
    of = scenario(model={"preset": "gpt2", "layers": 6, "window": 64, "full_every": 2},
                  training={**PLAIN["training"], **training})
    choice = Choice([8], micro_batch=[1], context=[1], tensor=[1, 2], strategies=["ddp", "fsdp"], schedules=["1f1b"])
    base = alone(of, None)
    space, plain = build_space([base], choice), following(base)
    bound, rows = bounds(space), np.random.default_rng(0).choice(len(space), 24, replace=False)
    for row in rows:
        got = once(("", plain, space.sets(int(row)), 8))
        assert bound.memory_bytes[row] <= got.device_used_bytes
        assert not got.fits or 0.1 * got.step_time_s < bound.time_s[row] <= got.step_time_s


@pytest.mark.parametrize(("training", "recompute", "software"), [
    ({"precision": "pure-bf16", "finetune": {"method": "lora", "rank": 8, "base": "bf16"}}, ["selective-op"], {}),
    ({"precision": "fp32", "finetune": {"method": "lora", "rank": 8, "base": "bf16"}}, ["none", "full"], {}),
    ({"precision": "fsdp-bf16", "chunked_loss": True}, ["none"], {"framework": "torchtitan", "modules": "plain"}),
    ({"precision": "pure-bf16", "finetune": {"method": "adapter", "rank": 8, "base": "bf16"}}, ["full"], {})])
def test_bounds_hold_beside_frozen_weights_and_of_chunks_of_a_cut_vocabulary(
    training: dict[str, Any], recompute: list[str], software: dict[str, Any], once: Once,
) -> None:
    of = scenario(software={"framework": "pytorch", "modules": "transformers", **software},
                  model={"kind": "decoder", "layers": 4, "hidden": 512, "heads": 8, "vocab": 32000, "gated_mlp": True,
                         "positions": "rotary", "norm": "rmsnorm", "bias": False, "tied_embeddings": False,
                         "moe": {"experts": 4, "top_k": 2} if "adapter" in str(training) else None},
                  training={"micro_batch": 1, "global_batch": 8, "sequence": 512, **training})
    choice = Choice([8], micro_batch=[1], context=[1], tensor=[1, 2], pipeline=[1], recompute=recompute,
                    partial_recompute=False)
    base = alone(of, None)
    space, plain = build_space([base], choice), following(base)
    bound = bounds(space)
    found = [(row, once(("", plain, space.sets(row), 8))) for row in range(0, len(space), max(1, len(space) // 6))]
    assert any(got.outcome == "ok" for _, got in found)
    for row, got in found:
        if got.outcome == "ok":
            assert bound.memory_bytes[row] <= got.device_used_bytes and bound.time_s[row] <= got.step_time_s


@pytest.mark.parametrize(("framework", "topology", "precision", "finetune"), [
    ("pytorch", "dgx-a100-80g", "pure-bf16", {"method": "qlora", "base": "nf4"}),
    ("deepspeed", "dgx-a100-80g", "mixed-bf16", {"method": "lora", "base": "bf16"}),
    ("megatron", "dgx-h100", "fp8", {"method": "lora", "base": "bf16"})])
def test_bounds_of_fine_tuning_count_what_is_frozen(framework: str, topology: str, precision: str,
                                                    finetune: dict[str, Any]) -> None:
    of = scenario(model={"preset": "llama-7b"}, cluster={"topology": topology}, software={"framework": framework},
                  training={"micro_batch": 1, "global_batch": 16, "sequence": 512, "precision": precision,
                            "finetune": {"rank": 8, "targets": ["query", "value"], **finetune}})
    choice = Choice([8], micro_batch=[1], context=[1], tensor=[1, 2], pipeline=[1, 2], schedules=["1f1b"],
                    recompute=["none", "full"], partial_recompute=False)
    base = alone(of, None)
    space, plain = build_space([base], choice), following(base)
    bound = bounds(space)
    for row in np.random.default_rng(1).choice(len(space), 6, replace=False):
        got = simulated(("", plain, space.sets(int(row)), 8))
        if got.outcome == "ok":
            assert 0.25 * got.device_used_bytes < bound.memory_bytes[row] <= got.device_used_bytes
        if got.fits:
            assert bound.time_s[row] <= got.step_time_s
    whole = [row for row in range(len(space)) if space.sets(row).get("parallel.strategy") == "ddp"
             and space.sets(row).get("parallel.tensor", 1) == space.sets(row).get("parallel.pipeline", 1) == 1]
    bits = 4 if finetune["base"] == "nf4" else 16
    assert whole and min(bound.memory_bytes[whole]) > 6.4e9 * bits / 8


def test_recomputation_by_product_is_tried_beside_frozen_weights_too() -> None:
    def policies(finetune: dict[str, Any]) -> set[Any]:
        of = scenario(model={"preset": "gpt2"}, training={
            "micro_batch": 1, "global_batch": 16, "sequence": 512, "precision": "pure-bf16", "finetune": finetune})
        space = build_space([alone(of, None)], Choice([8], partial_recompute=False))
        return {space.sets(row)["training.recompute"] for row in range(len(space))}

    every = {"none", "selective", "selective-op", "full"}
    assert policies({"method": "full"}) == policies({"method": "lora", "rank": 8}) == every


def _policies_tried(model: dict[str, Any], training: dict[str, Any], **software: Any) -> set[str]:
    base = alone(scenario(model=model, software={"year": 2025, **software}, training={**PLAIN["training"], **training}),
                 None)
    space = build_space([base], Choice([8], tensor=[1], pipeline=[1], partial_recompute=False))
    return {POLICIES[i] for i in np.unique(space.columns["recompute"])}


def test_modules_are_recomputed_by_name_where_a_model_and_its_code_have_them() -> None:
    plain, expansion, cheap, both = {"none", "selective", "selective-op", "full"}, "mla_up_proj", \
        "layernorm+moe_act", "layernorm+mla_up_proj+moe_act"
    for model, training, framework, tried in (
            ("deepseek-v3", {}, "megatron", {*plain, expansion, cheap, both}), ("deepseek-v3", {}, "pytorch", plain),
            ("mixtral-8x7b", {}, "megatron", {*plain, cheap}), ("llama-7b", {}, "megatron", plain),
            ("mixtral-8x7b", {"finetune": {"method": "lora", "rank": 8}}, "megatron", {*plain, cheap}),
            ("resnet-50", {"sequence": 1}, "pytorch", {"none", "full"})):
        assert _policies_tried({"preset": model}, training, framework=framework) == tried, (model, framework)


def test_a_policy_by_name_is_written_as_a_scenario_has_it() -> None:
    written = policy(POLICIES.index("layernorm+mla_up_proj+moe_act"))
    assert written == {"modules": ["layernorm", "mla_up_proj", "moe_act"]}
    assert layout_of({"training.recompute": written, "training.micro_batch": 1}).endswith(
        "layernorm+mla_up_proj+moe_act")
    assert policy(len(POLICIES)) == {"layers": 1}
    of = {"model": {"preset": "deepseek-v3"}, "software": {"framework": "megatron", "year": 2025}}
    assert resolve({**PLAIN, **of, "training": {**PLAIN["training"], "recompute": written}}, "").training.recompute


def _rows(base: Scenario, **choice: Any) -> Iterator[tuple[dict[str, Any], float, float]]:
    """Fields of every row with its bounds over what is simulated: of seconds (nan where it does not fit), of bytes."""
    space = build_space([base], Choice([16], partial_recompute=False, **choice))
    of, plain = bounds(space), following(base)
    for row in range(len(space)):
        got = simulated(("", plain, space.sets(row), 16))
        if got.outcome == "ok":
            yield space.sets(row), of.time_s[row] / got.step_time_s, of.memory_bytes[row] / got.device_used_bytes


def test_tokens_on_their_way_count_where_no_other_micro_batch_hides_them() -> None:
    """Megatron of 2026 in mxfp8 hides them in virtual stages alone: not behind FSDP, full recomputation or 1F1B."""
    base = alone(scenario(model={"preset": "deepseek-v2-lite"}, software={"framework": "megatron", "year": 2026},
                          training={"micro_batch": 1, "global_batch": 256, "sequence": 4096, "precision": "fp8"},
                          cluster={"topology": "hgx-b200"}), None)
    seen = {"hidden": 0, "shown": 0}
    for sets, seconds, _ in _rows(base, tensor=[1], context=[1], expert=[8], pipeline=[1, 2], micro_batch=[1],
                                  recompute=["none", "full"], strategies=["zero1", "fsdp"],
                                  schedules=["1f1b", "interleaved"], virtual_stages=[1, 3]):
        assert not seconds > 1.0, sets
        hidden = (sets["parallel.virtual_stages"] > 1 and sets["training.recompute"] == "none"
                  and sets["parallel.strategy"] == "zero1")
        seen["hidden" if hidden else "shown"] += 1
        if not hidden and sets["parallel.strategy"] == "zero1":
            assert seconds > 0.7, sets  # without them at most 0.66
    assert seen["hidden"] >= 1 and seen["shown"] >= 6


def test_autocasts_copies_of_weights_count_for_every_micro_batch_in_flight() -> None:
    base = alone(scenario(model={"preset": "llama-7b"}, software={"framework": "megatron", "year": 2024},
                          training={"micro_batch": 1, "global_batch": 64, "sequence": 1024, "precision": "amp-bf16"}),
                 None)
    least = {"fsdp": 0.75, "zero1": 0.9}
    for sets, _, held in _rows(base, tensor=[1], context=[1], pipeline=[4], micro_batch=[1], recompute=["none"],
                               strategies=["zero1", "fsdp"], schedules=["1f1b", "interleaved"],
                               virtual_stages=[1, 4]):
        assert least[sets["parallel.strategy"]] < held <= 1.0, sets
