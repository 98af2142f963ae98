"""Requests whose weights are not whole on the GPU: in host memory, on disks, or shared out over ranks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import api
from sim.errors import UserError
from sim.hardware import pageable_bps
from sim.parallel import lower
from sim.program import Kind
from sim.report.result import Result
from sim.report.terminal.render import as_text
from sim.scenario import resolve
from sim.scenario.fields.schema import Scenario

#: Blocks of 2 · 4 · 1024² + 2 · 2 · 1024 · 4096 = 25.2 MB in bf16.
SMALL = {"kind": "decoder", "layers": 4, "hidden": 1024, "heads": 8, "vocab": 8192, "positions": "rotary",
         "norm": "rmsnorm", "bias": False, "tied_embeddings": False}
BLOCK, TABLE, NORM = 2 * 12 * 1024**2, 2 * 8192 * 1024, 2 * 1024
WEIGHTS = 4 * (BLOCK + 2 * NORM) + 2 * TABLE + NORM
HOOKS = {"offload": {"parameters": "cpu"}}
ZERO = {"strategy": "zero3", "offload": {"parameters": "cpu"}}


def scenario(model: Any = None, gpus: int = 1, prompt: int = 64, generate: int = 5, batch: int = 1,
             precision: Any = "pure-bf16", framework: str = "pytorch", software: Any = None,
             topology: str = "dgx-a100-80g", **parallel: Any) -> Scenario:
    return resolve({
        "name": "test", "cluster": {"topology": topology, "gpus_per_node": gpus}, "model": model or SMALL,
        "training": {"precision": precision,
                     "mode": {"inference": {"prompt": prompt, "generate": generate, "batch": batch}}},
        "parallel": parallel,
        "software": {"year": 2026, "modules": "transformers", "framework": framework, **(software or {})}})


def predicted(*args: Any, **fields: Any) -> Result:
    return api.run(scenario(*args, **fields))


def served(result: Result) -> Any:
    assert result.inference is not None
    return result.inference


def sizes(result: Result, kind: Kind, section: int = 1) -> list[int]:
    """Bytes of the copies or collectives of a section, in order."""
    program = result.detail.lowered.job.programs[0]
    of = program.sections[section]
    table: Any = program.copies if kind == Kind.COPY else program.collectives
    return [table[payload].size_bytes for k, payload in zip(of.kind, of.payload, strict=True) if k == kind]


# ------------------------------------------------------------------------------------------------- accelerate's hooks
def test_hooks_copy_every_weight_for_every_token() -> None:
    run = predicted(**HOOKS)
    assert sum(sizes(run, Kind.COPY, 0)) == sum(sizes(run, Kind.COPY, 1)) == WEIGHTS
    staged = WEIGHTS / pageable_bps()
    assert staged < served(run).time_per_token_s < 1.3 * staged
    assert run.bound == "communication" and run.breakdown.offload > 0.8 * run.step_time_s
    assert "copies of weights from the host" in as_text(run)


def test_hooks_overlap_nothing() -> None:
    """Time of a long prompt is its time with whole weights and the copies."""
    whole, hooked = (served(predicted(prompt=2048, batch=16, **parallel)).prompt_time_s for parallel in ({}, HOOKS))
    assert hooked - whole == pytest.approx(WEIGHTS / pageable_bps(), rel=0.15)


def test_hooks_leave_one_module_on_the_gpu() -> None:
    run = predicted(**HOOKS)
    assert run.memory.use.category_peaks["parameters"] == TABLE  # the largest: embedding or head
    assert run.memory.host is not None and run.memory.host.by_category == {"parameters": WEIGHTS}
    eight = predicted(gpus=8, **HOOKS).memory.host
    assert eight is not None and eight.needed_bytes == 8 * WEIGHTS  # every process has its own


@pytest.mark.parametrize(("model", "first", "token"), [
    ({"preset": "t5-small"}, 136_459_776 + 181_947_904, 175_656_448),
    ({**SMALL, "ffn": 4096, "gated_mlp": True}, 167_790_592, 167_790_592)])
def test_hooks_copy_what_the_real_ones_do(model: Any, first: int, token: int) -> None:
    """accelerate 1.10.1's cpu_offload on transformers 4.56.2, its copies counted on the CPU. T5's encoder runs once;
    its table is copied for each of its three names."""
    run = predicted(model, **HOOKS)
    assert (sum(sizes(run, Kind.COPY, 0)), sum(sizes(run, Kind.COPY, 1))) == (first, token)
    assert run.memory.use.steady


# ------------------------------------------------------------------------------------------------- ZeRO-Inference
def test_zero_inference_is_bound_by_the_link() -> None:
    """13.5 GB of Llama-2-7B over PCIe gen4 for every token, from pinned memory."""
    run = predicted({"preset": "llama-2-7b"}, framework="deepspeed", topology="single-a100-80g-sxm", **ZERO)
    persistent = 65 * 4096 * 2  # norms, which are small and stay
    copied = 2 * 6_738_415_616 - persistent
    assert sum(sizes(run, Kind.COPY)) == copied
    rate = copied / served(run).time_per_token_s
    assert 0.85 * 24.6e9 < rate < 26e9
    memory = run.memory
    assert memory.use.at_peak["parameters"] == persistent and memory.use.steady
    assert memory.host is not None
    assert 2 * 6.738e9 < memory.host.needed_bytes < 2 * 2 * 6.738e9  # pinned in powers of two
    # the coordinator runs ahead until max_live_parameters, 10^9 elements, and one use more
    assert 2e9 < memory.use.category_peaks["gathered_parameters"] < 2e9 + 2 * 2 * 4096 * 11008 * 2 + 2 * 50e6
    hooked = predicted({"preset": "llama-2-7b"}, topology="single-a100-80g-sxm", **HOOKS)
    assert served(hooked).time_per_token_s > 3 * served(run).time_per_token_s


def test_disks_are_slower_than_memory_and_need_little_of_it() -> None:
    disk = predicted({"preset": "llama-2-7b"}, framework="deepspeed", strategy="zero3",
                     offload={"parameters": "nvme"})
    memory = predicted({"preset": "llama-2-7b"}, framework="deepspeed", **ZERO)
    assert served(disk).time_per_token_s > 1.2 * served(memory).time_per_token_s
    assert disk.memory.host is not None and disk.memory.host.needed_bytes < 3e9


def test_ranks_share_the_copies_of_zero_inference() -> None:
    run = predicted({"preset": "llama-2-7b"}, gpus=8, framework="deepspeed", **ZERO)
    copied, gathered = sum(sizes(run, Kind.COPY)), sum(sizes(run, Kind.COLLECTIVE))
    assert gathered == 2 * 6_738_415_616 - 65 * 4096 * 2
    assert copied == pytest.approx(gathered / 8, rel=1e-6)


# ------------------------------------------------------------------------------------------------- shards on the GPUs
@pytest.mark.parametrize(("framework", "strategy"), [("pytorch", "fsdp"), ("deepspeed", "zero3")])
def test_every_forward_gathers_what_is_not_whole(framework: str, strategy: str) -> None:
    run = predicted(gpus=8, framework=framework, strategy=strategy)
    whole = {"fsdp": 4 * (BLOCK + 2 * NORM), "zero3": 4 * BLOCK + 2 * TABLE}[strategy]  # the root stays; norms stay
    assert sum(sizes(run, Kind.COLLECTIVE, 0)) == sum(sizes(run, Kind.COLLECTIVE, 1)) == whole
    use = run.memory.use
    assert use.steady and not use.category_peaks["gradients"] and not use.category_peaks["optimizer_states"]
    assert use.at_peak["parameters"] == pytest.approx(WEIGHTS / 8, rel=0.01)
    assert {c.kind for c in run.detail.lowered.job.programs[0].collectives} == {"all_gather"}


@settings(max_examples=12, deadline=None)
@given(strategy=st.sampled_from(["fsdp", "zero3"]), batch=st.integers(1, 8), generate=st.integers(1, 12),
       tensor=st.sampled_from([1, 2]), precision=st.sampled_from(["pure-bf16", "fp32"]))
def test_sharded_weights_do_the_same_work_in_more_time(strategy: str, batch: int, generate: int, tensor: int,
                                                       precision: str) -> None:
    framework = "deepspeed" if strategy == "zero3" else "pytorch"
    asked: dict[str, Any] = {"gpus": 8, "batch": batch, "generate": generate, "tensor": tensor, "precision": precision,
                             "framework": framework}
    whole, shared = predicted(**asked), predicted(strategy=strategy, **asked)
    assert shared.memory.use.steady
    assert shared.model_flops == pytest.approx(whole.model_flops, rel=1e-12)
    assert shared.step_time_s > whole.step_time_s
    assert served(shared).kv_cache_bytes == served(whole).kv_cache_bytes
    assert shared.memory.use.at_peak["parameters"] < whole.memory.use.at_peak["parameters"]


def test_one_rank_shares_nothing() -> None:
    """ZeRO-3 of one rank on the GPU has nothing to gather, and is whole weights."""
    whole, alone = predicted(framework="deepspeed"), predicted(framework="deepspeed", strategy="zero3")
    assert not sizes(alone, Kind.COLLECTIVE) and not sizes(alone, Kind.COPY)
    assert alone.memory.use.at_peak["parameters"] == whole.memory.use.at_peak["parameters"]
    assert alone.step_time_s == pytest.approx(whole.step_time_s, rel=0.02)


def test_an_encoder_is_sharded_too() -> None:
    run = predicted({"preset": "bert-large"}, gpus=8, prompt=512, generate=0, batch=8, strategy="fsdp")
    assert run.memory.use.steady
    assert len(sizes(run, Kind.COLLECTIVE, 0)) == 24


@pytest.mark.parametrize(("fields", "field"), [
    ({"offload": {"parameters": "nvme"}}, "parallel.offload.parameters"),
    ({"offload": {"parameters": "paged"}}, "parallel.offload"),
    ({"offload": {"optimizer": "cpu"}}, "parallel.offload"),
    ({"framework": "deepspeed", **HOOKS}, "parallel.offload.parameters"),
    ({"framework": "megatron", "software": {"modules": "megatron"}, **HOOKS}, "parallel.offload.parameters"),
    ({"software": {"compile": True}, **HOOKS}, "parallel.offload.parameters"),
    ({"gpus": 2, "tensor": 2, **HOOKS}, "parallel.offload.parameters"),
    ({"gpus": 2, "pipeline": 2, **HOOKS}, "parallel.pipeline"),
    ({"gpus": 4, "strategy": "fsdp", "offload": {"parameters": "nvme"}}, "parallel.offload.parameters"),
    ({"gpus": 4, "strategy": "fsdp", "reshard_after_forward": False}, "parallel.reshard_after_forward"),
    ({"gpus": 4, "strategy": "fsdp", "software": {"fsdp": 1}}, "software.fsdp"),
    ({"gpus": 4, "strategy": "fsdp", "software": {"cuda_graphs": True}}, "software.cuda_graphs"),
    ({"gpus": 4, "strategy": "fsdp", "model": {"preset": "t5-small"}}, "model.kind"),
    ({"gpus": 4, "strategy": "zero1"}, "parallel.strategy"),
    ({"gpus": 4, "strategy": "zero3", "sharding_factor": 2, "framework": "deepspeed"}, "parallel.sharding_factor"),
])
def test_what_no_stack_does_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError) as raised:
        lower(scenario(**fields))
    assert field in [fault.field for fault in raised.value.faults]


@pytest.mark.parametrize("parallel", [HOOKS, {"gpus": 4, "strategy": "fsdp"},
                                      {"gpus": 4, "strategy": "zero3", "framework": "deepspeed"}])
def test_quantised_weights_stay_whole(parallel: dict[str, Any]) -> None:
    fields = ("compute", "gradients", "optimizer", "gather", "reduce")
    narrow = {**dict.fromkeys(fields, "bf16"), "parameters": "int8", "master": "none"}
    with pytest.raises(UserError, match=r"int8|unquantised"):
        lower(scenario(precision=narrow, **parallel))


def test_what_does_not_fit_is_told_of_the_host() -> None:
    run = predicted({"preset": "llama-2-70b"}, topology="single-a100-40g-sxm")
    assert not run.memory.fits
    assert {"parallel.offload.parameters": "cpu"} in [change.set for change in run.changes if change.fits]
    shared = predicted({"preset": "llama-2-70b"}, gpus=8)
    assert {"parallel.strategy": "fsdp"} in [change.set for change in shared.changes if change.fits]
