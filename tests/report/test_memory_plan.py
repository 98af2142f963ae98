"""Memory alone: the same figures as a run's, per stage, with rules of thumb beside them."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from report_scenarios import small

import sim
from sim.memory.ledger import allocated_bytes
from sim.memory.reserved import Reserved
from sim.report.memory_plan import MemoryPlan
from sim.report.terminal.memory import render_memory
from sim.report.terminal.render import console
from sim.report.thumb import RULES, rules_of_thumb
from sim.report.units import size as in_units
from sim.scenario import resolve

PIPELINE: dict[str, Any] = {
    "software.framework": "megatron", "parallel.strategy": "zero1", "parallel.pipeline": 4, "parallel.tensor": 1,
    "training.precision": "megatron-bf16"}


scenario = partial(small, 1024, 1, "amp-bf16", "ddp")


def printed(plan: MemoryPlan, width: int = 110) -> str:
    buffer = io.StringIO()
    render_memory(plan, console(buffer, width))
    return buffer.getvalue()


@pytest.mark.parametrize("changes", [{}, PIPELINE, {"parallel.strategy": "fsdp", "training.precision": "fsdp-bf16"}],
                         ids=["ddp", "pipeline", "fsdp"])
def test_the_plan_says_what_a_run_says(changes: dict[str, Any]) -> None:
    plan, result = sim.plan_memory(scenario(**changes)), sim.run(scenario(**changes))
    assert plan.memory.to_json() == result.memory.to_json()
    assert plan.gpu == result.gpu
    assert plan.to_json()["memory"]["fits"]


def test_every_stage_has_its_layers_and_its_own_memory() -> None:
    plan = sim.plan_memory(scenario(**PIPELINE))
    assert [stage.name for stage in plan.stages] == ["stage 0", "stage 1", "stage 2", "stage 3"]
    assert plan.stages[0].layers == ("embedding", "block0", "block1")
    assert plan.stages[3].layers == ("block6", "block7", "head")
    assert sum(stage.ranks for stage in plan.stages) == 8
    peaks = [stage.memory.use.peak_allocated_bytes for stage in plan.stages]
    assert peaks[1] > peaks[2]  # one micro-batch more in flight (1F1B)
    assert plan.fullest.memory is plan.memory
    lines = printed(plan)
    assert "GiB at the peak" in lines
    assert "stage 2: block4 to block5 (2 ranks)" in lines
    rows = plan.to_json()["stages"]
    assert [row["peak_allocated_bytes"] for row in rows] == peaks


def test_of_very_many_stages_only_the_ends_have_a_row_unless_asked_for() -> None:
    plan = sim.plan_memory(scenario(**PIPELINE | {
        "model.layers": 18, "parallel.pipeline": 18, "cluster.nodes": 9, "model.hidden": 256, "model.vocab": 512,
        "training.global_batch": 4}))

    def rows(every_stage: bool) -> list[int]:
        buffer = io.StringIO()
        render_memory(plan, console(buffer, 100), every_stage)
        lines = buffer.getvalue().splitlines()
        begin = next(n for n, line in enumerate(lines) if line.startswith("stage  allocated"))
        table = lines[begin + 1:lines.index("", begin)]
        assert ("…" in [line.strip() for line in table]) is not every_stage
        assert any("--stages" in line for line in lines) is not every_stage
        assert any(line.startswith("stage 9: block9 ") for line in lines) is every_stage
        return [int(line.split()[0]) for line in table if "…" not in line]

    assert rows(False) == [0, 1, 2, 3, 14, 15, 16, 17]
    assert rows(True) == list(range(18))


def test_the_report_names_what_matters_at_any_width() -> None:
    plan = sim.plan_memory(scenario())
    for width in (60, 80, 120):
        assert max(len(line) for line in printed(plan, width).splitlines()) <= width
    text = printed(plan)
    for words in ("fits", "after init", "end of forward", "optimizer step", "at the peak", "allocated", "reserved",
                  "CUDA context", "NCCL buffers", "device", "free", "largest micro-batch", "longest sequence",
                  "rules of thumb"):
        assert words in text, words


def test_categories_sum_up_to_what_is_allocated_and_on_the_device() -> None:
    memory = sim.plan_memory(scenario()).memory
    assert allocated_bytes(memory.at_peak) == memory.use.peak_allocated_bytes
    assert sum(memory.at_peak.values()) == memory.device_used_bytes
    assert memory.device_used_bytes + memory.headroom_bytes == memory.capacity_bytes
    assert memory.outside is not None
    assert memory.outside.context_bytes + memory.outside.nccl_bytes == memory.at_peak["context"]
    assert memory.at_peak["workspace"] >= memory.outside.workspace_bytes == 2 * (8192 + 128) * 1024


def test_whether_it_fits_needs_no_replay() -> None:
    for size in (1, 8, 64, 256):
        memory = sim.plan_memory(scenario(**{"training.micro_batch": size, "training.global_batch": 8 * size})).memory
        assert memory.fits_device == (memory.reserved.retries is not None)


def test_what_is_left_needs_no_replay_near_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that runs short costs seconds for each of many changes that advice tries; only its retries need one."""
    peak = sim.plan_memory(scenario()).memory
    tight = replace(peak, capacity_bytes=peak.capacity_bytes - peak.headroom_bytes - 2**20)
    monkeypatch.setattr("sim.memory.reserved.under_pressure", lambda *_: pytest.fail("replayed with a limit"))
    assert tight.fits_device and tight.headroom_bytes == 0
    assert tight.fragmentation_bytes == peak.fragmentation_bytes - 2**20


def test_a_replay_made_elsewhere_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advice has changes simulated in processes of their own, which hand the allocator's answer back."""
    memory = sim.plan_memory(scenario()).memory
    memory = replace(memory, capacity_bytes=memory.capacity_bytes - memory.headroom_bytes - 2**20)
    assert not memory.known
    monkeypatch.setattr("sim.memory.reserved.under_pressure", lambda *_: pytest.fail("replayed again"))
    memory.remember({"reserved": Reserved(7, 2.0, 2.0**30)})
    assert memory.short and memory.reserved == Reserved(7, 2.0, 2.0**30)


# ------------------------------------------------------------------------------------------------------ rules of thumb
def test_rules_are_bytes_per_parameter_shared_over_those_who_hold_the_model() -> None:
    plan = sim.plan_memory(scenario())
    rules = {rule.rule.bytes_per_parameter: rule for rule in plan.rules}
    assert list(rules) == [4, 16, 18, 20, 24] == [rule.bytes_per_parameter for rule in RULES]
    assert rules[16].whole_bytes == rules[16].per_gpu_bytes == 16 * plan.parameters
    assert rules[16].off == pytest.approx(plan.memory.device_used_bytes / (16 * plan.parameters))
    sharded = sim.plan_memory(scenario(**{"parallel.strategy": "fsdp", "training.precision": "fsdp-bf16"}))
    assert sharded.rules[1].per_gpu_bytes == 16 * sharded.parameters / 8
    cut = sim.plan_memory(scenario(**PIPELINE))
    assert cut.rules[1].per_gpu_bytes == 16 * cut.parameters / (4 * 2)


def test_adam_with_autocast_has_the_sixteen_bytes() -> None:
    plan = sim.plan_memory(scenario())
    assert "model states take up to 16 B here (weights 4, gradients 4, optimizer states 8)" in plan.rules[1].why
    assert "it leaves out" in plan.rules[1].why


@pytest.mark.parametrize(("changes", "rule", "words"), [
    (PIPELINE, 1, "on each of the 2 GPUs that split the optimizer"),
    (PIPELINE, 2, "the right one for these dtypes"),
    ({}, 2, "meant for 16-bit weights"),
    ({"training.optimizer": "adamw-8bit"}, 1, "the optimizer is adamw-8bit"),
    ({"training.finetune": {"method": "lora"}, "training.precision": "pure-bf16"}, 1, "trains few of the parameters"),
    ({"training.finetune": {"method": "lora", "base": "bf16"}, "training.precision": "amp-bf16",
      "software.modules": "transformers"}, 2, "here weights are fp32 where they are trained and bf16 where not"),
    ({"training.mode": {"inference": {"prompt": 8, "generate": 8, "batch": 1}}}, 1, "no gradients and no optimizer"),
    ({}, 4, "grow with tokens"),
    ({}, 0, "weights are 4 B here"),
])
def test_why_a_rule_differs(changes: dict[str, Any], rule: int, words: str) -> None:
    plan = sim.plan_memory(scenario(**changes))
    assert words in rules_of_thumb(plan.scenario, plan.parameters, plan.memory)[rule].why


def test_parameters_of_a_request_are_the_whole_model_s() -> None:
    mode = {"inference": {"prompt": 8, "generate": 8, "batch": 1}}
    one = sim.plan_memory(scenario(**{"training.mode": mode})).parameters
    assert sim.plan_memory(scenario(**{"training.mode": mode, "parallel.tensor": 4})).parameters == one
    assert one == pytest.approx(sim.plan_memory(scenario()).parameters)


def test_a_cache_that_fills_the_gpu_is_no_need() -> None:
    """13B in fp32 shards of 8 on 40 GB: the optimizer's temporaries come when the cache still holds what backward gave
    back. What is needed and what is merely cached are told apart, and together they are the GPU."""
    plan = sim.plan_memory(resolve({
        "name": "13b", "cluster": {"topology": "p4d", "nodes": 4}, "model": {"preset": "llama-2-13b"},
        "training": {"micro_batch": 1, "global_batch": 128, "sequence": 4096, "precision": "fsdp-bf16",
                     "recompute": "full"},
        "parallel": {"strategy": "fsdp", "sharding_factor": 8}, "software": {"framework": "pytorch", "year": 2025}}))
    memory, gib = plan.memory, 2**30
    assert memory.fits and memory.headroom_bytes == 0
    cached = memory.reserved.fragmentation_bytes
    assert 2 * gib < cached == memory.capacity_bytes - memory.use.peak_allocated_bytes - memory.use.at_peak["context"]
    lines = " ".join(printed(plan).split())
    needed = memory.capacity_bytes - cached
    assert f"fits: {needed / gib:.3g} GiB are needed, and the allocator's cache takes the other" in lines
    assert f"cache has filled the GPU: {in_units(cached)} of it hold no tensor at the peak" in lines
    assert "0.0%" not in lines and "nothing to spare" not in lines
