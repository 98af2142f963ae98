"""Profiles: inheritance, eras, sources, and how few figures are free."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

import sim.software
from sim.errors import UserError
from sim.scenario.fields.schema import Schedule
from sim.software import facts_of, profile_names, release, stack_for

PROFILES = Path(sim.software.__file__).parent / "profiles"
CONFIDENCE = {"documented", "recalled", "measured", "estimated", "inferred"}


def lines(profile: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    groups = [profile["facts"], *(era["facts"] for era in profile.get("eras", ()))]
    return [item for group in groups for item in group.items()]


def test_the_frameworks_of_the_specification_have_profiles() -> None:
    assert {"pytorch", "megatron", "deepspeed", "composer", "torchtitan", "nanotron", "ideal"} <= set(profile_names())


@pytest.mark.parametrize("name", profile_names())
def test_every_line_has_a_source_and_every_fact_a_unit(name: str) -> None:
    written = yaml.safe_load((PROFILES / f"{name}.yaml").read_text())
    known = facts_of("pytorch", 2024)
    for fact, line in lines(written):
        assert fact in known, f"{fact} exists in no parent"
        assert len(line["source"]) > 10
        assert line["confidence"] in CONFIDENCE
    assert all(fact.unit for fact in facts_of(name, 2024).values())


@pytest.mark.parametrize("name", profile_names())
@pytest.mark.parametrize("year", [2019, 2022, 2024, 2026])
def test_few_figures_are_free(name: str, year: int) -> None:
    """Eight numbers, and three choices (a name, a flag) that published steps or peaks gave."""
    free = [fact.value for fact in facts_of(name, year).values() if fact.free]
    chosen = sum(isinstance(value, bool | str) for value in free)
    assert len(free) - chosen <= 8 and chosen <= 3


@pytest.mark.parametrize("name", profile_names())
def test_eras_change_documented_facts_but_for_those_named_here(name: str) -> None:
    """Facts of a release that measurements gave: nine inferred, and the rate of the vendor's libraries by year."""
    free = [(name, fact) for era in yaml.safe_load((PROFILES / f"{name}.yaml").read_text()).get("eras", ())
            if not {"compile", "cuda_graphs"} & set(era["when"])
            for fact, line in era["facts"].items() if line["confidence"] not in ("documented", "recalled")]
    inferred = {"pytorch": ["attention_kernel", "frozen_apart", *3 * ["sums_kernel"]],
                "composer": ["early_stop", "metric_losses", "metric_losses"],
                "megatron": ["product_rate", "attention_kernel"],
                "deepspeed": ["coordinator_hides", "partition_checkpoints"]}
    assert sorted(free) == sorted((name, fact) for fact in inferred.get(name, []))


def test_a_profile_inherits_what_it_does_not_state() -> None:
    parent, child = stack_for("pytorch", 2024), stack_for("torchtitan", 2024)
    assert child.host_forward_s == parent.host_forward_s
    assert child.clip_gradients and not parent.clip_gradients


def test_a_child_s_fact_outlives_its_parent_s_era() -> None:
    assert stack_for("pytorch", 2024).optimizer_kernel == "foreach"
    assert stack_for("composer", 2024).optimizer_kernel == "loop"


def test_torch_releases_change_documented_behaviour() -> None:
    old, new = stack_for("pytorch", 2023, versions={"torch": "1.13.1"}), stack_for("pytorch", 2023)
    assert (old.optimizer_kernel, new.optimizer_kernel) == ("loop", "foreach")
    assert not new.early_stop
    assert stack_for("pytorch", 2023, versions={"torch": "2.1.0"}).early_stop
    assert stack_for("pytorch", 2026).attention_kernel == "flash2"


@pytest.mark.parametrize(("versions", "kernel", "loss", "fp32_stream", "early_stop"), [
    ({"composer": "0.11.1", "torch": "1.12.1", "flash_attn": "0.2.2"}, "flash1", "plain", True, False),
    ({"composer": "0.12.1", "torch": "1.13.1", "flash_attn": "0.2.8"}, "flash1", "plain", True, False),
    ({"composer": "0.13.3", "torch": "1.13.1", "flash_attn": "triton"}, "triton", "fused", False, False),
    ({"composer": "0.16.3", "torch": "2.0.1", "flash_attn": "triton"}, "triton", "fused", False, True),
    ({"composer": "0.17.2", "torch": "2.1.0", "flash_attn": "2.4.2"}, "flash2", "fused", False, True)])
def test_composer_s_releases(
    versions: dict[str, str], kernel: str, loss: str, fp32_stream: bool, early_stop: bool,
) -> None:
    stack = stack_for("composer", 2023, versions=versions)
    assert stack.attention_kernel == kernel
    assert stack.loss == loss
    assert stack.residual_dtype_follows_autocast is not fp32_stream
    assert stack.early_stop is early_stop


def test_ideal_has_no_host_costs() -> None:
    for compile_ in (False, True):
        stack = stack_for("ideal", 2026, compile_)
        costs = (stack.host_forward_s, stack.host_backward_s, stack.host_collective_s, stack.host_step_s)
        assert costs == (0, 0, 0, 0)
        assert not stack.step_sync


def test_switches() -> None:
    assert stack_for("pytorch", 2024, True).host_forward_s < stack_for("pytorch", 2024).host_forward_s
    assert stack_for("pytorch", 2024, cuda_graphs=True).host_forward_s == 0
    assert not stack_for("megatron", 2024, fused=False).fused_softmax


@pytest.mark.parametrize(("framework", "facts"), [
    ("pytorch", {"rmsnorm_kernel": False}), ("torchtitan", {"rmsnorm_kernel": False}),
    ("nanotron", {"fused_rmsnorm": False, "fused_rope": False}), ("composer", {"loss": "plain"}),
    ("megatron", {"fused_swiglu": False, "fused_rope": False, "fused_bias_gelu": False, "fused_permutation": False}),
])
def test_unfused_stacks_do_without_their_optional_kernels(framework: str, facts: dict[str, object]) -> None:
    fused, plain = (stack_for(framework, 2026, fused=fused) for fused in (True, False))
    assert {name: getattr(plain, name) for name in facts} == facts
    assert all(getattr(fused, name) != value for name, value in facts.items())


@pytest.mark.parametrize(("versions", "modules", "fused", "norm"), [
    ({"liger_kernel": "0.8"}, "transformers", True, "per_sm"),
    ({"liger_kernel": "0.3.1"}, "transformers", True, "two_pass"),
    ({}, "transformers", False, "two_pass"), ({"liger_kernel": "0.8"}, "plain", False, "two_pass"),
    ({"liger_kernel": "latest"}, "transformers", False, "two_pass"),  # no release: said as if nothing was
])
def test_liger_s_kernels_are_those_of_hugging_face_s_modules_that_name_it(
        versions: dict[str, str], modules: str, fused: bool, norm: str) -> None:
    for framework in ("pytorch", "deepspeed"):
        stack = stack_for(framework, 2026, versions=versions, modules=modules)
        assert {stack.fused_rmsnorm, stack.fused_rope, stack.fused_swiglu, stack.fused_in_place} == {fused}
        assert (stack.norm_kernel, stack.fused_models) == (norm, "rmsnorm" if fused else "every")


def test_a_release_by_year() -> None:
    assert [release("liger_kernel", year) for year in (2023, 2025, None)] == ["0.5", "0.6", "0.8"]


def test_an_unknown_framework_is_the_user_s_fault() -> None:
    with pytest.raises(UserError, match="did you mean 'megatron'"):
        stack_for("megatorn", 2024)


@pytest.mark.parametrize(("year", "told"), [(2021, "behind"), (2022, "behind"), (2023, "aligned"), (2026, "aligned")])
def test_megatron_reduces_behind_the_pipeline_until_2022(year: int, told: str) -> None:
    assert facts_of("megatron", year)["pipeline_reduction"].value == told


@pytest.mark.parametrize(("framework", "year", "told"), [("megatron", 2024, True), ("megatron", 2025, False),
                                                         ("torchtitan", 2024, False)])
def test_all_forwards_come_first_with_megatron_until_core_0_9(framework: str, year: int, told: bool) -> None:
    assert stack_for(framework, year).all_forwards_first is told


def test_pytorch_s_stages_alone_keep_tensors_of_every_micro_batch() -> None:
    kept = {name for name in profile_names() if stack_for(name, 2025).stage_tensors_kept}
    assert kept == {"pytorch", "composer", "torchtitan"}


@pytest.mark.parametrize(("framework", "year", "torch", "schedules"), [
    ("pytorch", 2023, "2.0", "gpipe"), ("pytorch", 2024, "2.3", "gpipe 1f1b"),
    ("pytorch", 2024, "2.4.1", "gpipe 1f1b interleaved"),
    ("pytorch", 2024, "2.5", "gpipe 1f1b interleaved zb-h1"),
    ("pytorch", 2025, "2.7", "gpipe 1f1b interleaved zb-h1 zb-v"), ("megatron", 2019, "1.2", ""),
    ("megatron", 2020, "1.6", "1f1b"), ("megatron", 2026, "2.12", "1f1b interleaved"), ("composer", 2026, "2.12", ""),
    ("torchtitan", 2024, "2.3", "gpipe 1f1b interleaved")])
def test_schedules_of_pipelines_by_release(framework: str, year: int, torch: str, schedules: str) -> None:
    assert stack_for(framework, year, versions={"torch": torch}).schedules == tuple(schedules.split())


def test_every_named_schedule_is_one_that_a_scenario_can_ask_for() -> None:
    for name in profile_names():
        for year in range(2018, 2027):
            assert set(stack_for(name, year).schedules) <= set(get_args(Schedule))
    assert set(stack_for("ideal").schedules) == set(get_args(Schedule))
