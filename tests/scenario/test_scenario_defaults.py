"""Every default of the spec's paragraph, the arithmetic of the layout, and dumping."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import UserError
from sim.report.fields import field_rows
from sim.scenario import Scenario, resolve
from sim.scenario.dump import dump
from sim.scenario.fields.precisions import PRECISIONS

MINIMAL: dict[str, Any] = {
    "name": "m",
    "cluster": {"topology": "dgx-a100-80g"},
    "model": {"preset": "llama-2-7b"},
    "training": {"micro_batch": 2, "global_batch": 64, "sequence": 2048},
}


def made(**sets: Any) -> Scenario:
    return resolve(MINIMAL, sets={name.replace("__", "."): value for name, value in sets.items()})


def test_defaults_are_those_that_list_fields_tells() -> None:
    says = {row["field"]: row["meaning"].rpartition("none given = ")[2] for row in field_rows()}
    plain, alone, megatron = made(), made(cluster__gpus_per_node=1), made(software__framework="megatron")
    bert = resolve({**MINIMAL, "model": {"preset": "bert-large"}, "training": {**MINIMAL["training"], "sequence": 128}})
    chunks = made(parallel__pipeline=2, parallel__virtual_stages=2)
    assert says["parallel.strategy"] == f"{plain.parallel.strategy}, on one GPU {alone.parallel.strategy}"
    assert says["parallel.order"] == ", ".join(plain.parallel.order)
    assert says["parallel.schedule"] == (f"{plain.parallel.schedule}, with virtual_stages {chunks.parallel.schedule}")
    assert says["parallel.sharding_factor"] == "full" and made(parallel__strategy="fsdp").parallel.sharding_factor == 8
    assert says["software.year"] == str(plain.software.year)
    assert says["software.modules"] == (f"{megatron.software.modules} under megatron and deepspeed, "
                                        f"{bert.software.modules} of pytorch's encoders, else {plain.software.modules}")


def test_defaults_of_the_paragraph() -> None:
    s = made()
    t, p, w = s.training, s.parallel, s.software
    assert (t.precision.name, t.optimizer, t.recompute, t.attention, t.mode) == (
        "amp-bf16",
        "adamw",
        "none",
        "flash",
        "train",
    )
    assert (s.model.dropout, t.decoder_sequence, t.predicted_tokens) == (0.0, 2048, 2048)
    assert (p.strategy, p.sharding_factor, p.wrap, p.reshard_after_forward) == ("ddp", 1, "block", True)
    assert (p.prefetch.forward, p.prefetch.backward, p.prefetch.limit) == (False, "pre", 2)
    assert (p.bucket_mb, p.gradient_as_bucket_view, p.reduce_every_micro_step, p.overlap) == (25.0, False, False, True)
    assert (p.schedule, p.virtual_stages, p.order) == ("1f1b", 1, ["tensor", "context", "expert", "data", "pipeline"])
    assert (w.framework, w.fsdp, w.compile, w.fused, w.cuda_graphs, w.versions) == (
        "pytorch",
        2,
        False,
        True,
        False,
        {},
    )
    assert (t.finetune.method, t.finetune.rank, s.budget, s.sweep, s.expect) == ("full", 0, None, {}, {})


def test_adafactor_is_a_loop_over_tensors_whatever_the_framework() -> None:
    for framework, usual in (("pytorch", "foreach"), ("deepspeed", "fused"), ("torchtitan", "fused")):
        software = {"framework": framework, "year": 2024}
        assert made(software=software).software.optimizer_kernel == usual
        assert made(software=software, training__optimizer="adafactor").software.optimizer_kernel == "loop"
    with pytest.raises(UserError, match="no library has a fused Adafactor"):
        made(training__optimizer="adafactor", software={"optimizer_kernel": "fused"})


def test_encoders_of_pytorch_have_the_modules_of_transformers() -> None:
    encoder = {"preset": "bert-large", "max_positions": 2048}
    assert made(model=encoder).software.modules == "transformers"
    assert made(model=encoder, software={"framework": "megatron"}).software.modules == "megatron"
    assert made(model=encoder, software={"modules": "plain"}).software.modules == "plain"
    assert made().software.modules == "plain"


def test_one_gpu_has_no_strategy_and_volta_no_bf16() -> None:
    s = made(cluster={"topology": "single-v100-32g-sxm"})
    assert (s.parallel.strategy, s.training.precision.name, s.training.attention) == ("none", "amp-fp16", "eager")
    own = made(cluster={"topology": "single-v100-32g-sxm", "gpu": {"tflops": {"bf16": 100}}})
    assert own.training.precision.name == "amp-bf16"


def test_flash_needs_half_precision() -> None:
    assert made(training__precision="fp32").training.attention == "eager"
    assert made(training__precision="fp8").training.attention == "flash"
    assert made(training__precision="fp32", training__attention="flash").training.attention == "flash"


@pytest.mark.parametrize(
    ("strategy", "factor", "every"),
    [("ddp", 1, False), ("zero1", 8, False), ("zero2", 8, True), ("zero3", 8, True), ("fsdp", 8, True)],
)
def test_sharding_and_reduction_follow_the_strategy(strategy: str, factor: int, every: bool) -> None:
    p = made(parallel__strategy=strategy).parallel
    assert (p.sharding_factor, p.reduce_every_micro_step) == (factor, every)


def test_layout_arithmetic() -> None:
    s = made(
        cluster__nodes=4,
        parallel={"strategy": "fsdp", "tensor": 2, "context": 2, "pipeline": 2},
        training__micro_batch=3,
    )
    assert (s.gpus, s.data_parallel, s.parallel.sharding_factor) == (32, 4, 8)
    assert (s.micro_steps, s.last_micro_batch) == (6, 1)  # 64 / 4 = 16 sequences: five micro-steps of 3 and one of 1
    assert made().last_micro_batch == 2


def test_virtual_stages_choose_the_schedule() -> None:
    assert made(parallel={"pipeline": 2, "virtual_stages": 4}).parallel.schedule == "interleaved"
    assert made(parallel={"pipeline": 2, "schedule": "zb-v"}).parallel.virtual_stages == 2


@pytest.mark.parametrize(
    ("software", "fsdp", "modules", "kernel", "connections"),
    [
        ({"year": 2024}, 1, "plain", "foreach", 8),
        ({"year": 2025}, 2, "plain", "foreach", 8),
        ({"year": 2021}, 1, "plain", "loop", 8),
        ({"framework": "megatron", "year": 2021}, 1, "megatron", "fused", 1),
        ({"framework": "ideal"}, 2, "plain", "fused", 8),
        ({"framework": "composer", "year": 2023}, 1, "plain", "loop", 8),
        ({"fsdp": 1, "modules": "transformers"}, 1, "transformers", "foreach", 8),
    ],
)
def test_software_defaults(software: dict[str, Any], fsdp: int, modules: str, kernel: str, connections: int) -> None:
    w = made(software=software).software
    assert (w.fsdp, w.modules, w.optimizer_kernel, w.max_connections) == (fsdp, modules, kernel, connections)


def test_model_defaults() -> None:
    m = made(model={"layers": 2, "hidden": 512, "heads": 8, "vocab": 1000}).model
    assert (m.kind, m.kv_heads, m.head_dim, m.ffn, m.activation, m.max_positions) == (
        "decoder",
        8,
        64,
        2048,
        "gelu",
        2048,
    )
    assert (
        made(
            model={"layers": 2, "hidden": 512, "heads": 8, "vocab": 9, "dropout": True, "gated_mlp": True}
        ).model.dropout
        == 0.1
    )
    t5 = made(model={"preset": "t5-small"}, training__decoder_sequence=128)
    assert (t5.model.decoder_layers, t5.training.predicted_tokens) == (6, 128)


#: AdamW bytes per parameter: the last column of the spec's table.
ADAMW = {
    "fp32": 16,
    "tf32": 16,
    "amp-fp16": 16,
    "amp-bf16": 16,
    "fsdp-bf16": 16,
    "fsdp-fp16": 16,
    "mixed-fp16": 16,
    "mixed-bf16": 16,
    "megatron-bf16": 18,
    "megatron-fp16": 16,
    "pure-bf16": 8,
    "pure-fp16": 8,
    "fp8": 18,
    "mxfp8": 18,
    "nvfp4": 18,
}


def test_a_request_needs_no_batch_and_no_sequence() -> None:
    mode = {"inference": {"prompt": 100, "generate": 28, "batch": 4}}
    plain = {"name": "asks", "cluster": {"topology": "single-a100-80g-sxm"}, "model": {"preset": "gpt2"}}
    found = resolve({**plain, "training": {"mode": mode}})
    assert (found.training.micro_batch, found.micro_steps, found.training.sequence) == (1, 1, 128)
    own = resolve({**plain, "training": {"mode": mode, "micro_batch": 2, "global_batch": 8, "sequence": 64}}).training
    assert (own.micro_batch, own.global_batch, own.sequence) == (2, 8, 64)
    with pytest.raises(UserError, match="micro_batch"):
        resolve({**plain, "training": {"mode": "train"}})


def test_a_named_precision_may_be_changed_in_single_dtypes() -> None:
    own = made(training__precision={"name": "pure-bf16", "parameters": "int4"}).training.precision
    assert own.model_dump() == {"name": "custom", **PRECISIONS["pure-bf16"], "parameters": "int4"}
    same = made(training__precision={"name": "amp-bf16", "compute": "bf16"}).training.precision
    assert same.model_dump() == {"name": "amp-bf16", **PRECISIONS["amp-bf16"]}


def test_precisions_match_the_table() -> None:
    size = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "none": 0}
    assert set(ADAMW) == set(PRECISIONS)
    for name, row in PRECISIONS.items():
        assert (
            size[row["parameters"]] + size[row["master"]] + size[row["gradients"]] + 2 * size[row["optimizer"]]
            == ADAMW[name]
        )
        assert made(training__precision=name).training.precision.name == name
    custom = made(training__precision={**PRECISIONS["fsdp-bf16"], "reduce": "fp32"}).training.precision
    assert (custom.name, custom.gather, custom.reduce) == ("custom", "bf16", "fp32")


def test_units() -> None:
    s = made(
        budget={"deadline": "30 days", "mtbf_per_gpu": "50000 h", "checkpoint_every": "1 h", "tokens": 1.4e12},
        parallel__bucket_mb="50 MiB",
        cluster={
            "topology": {
                "gpu": "t4",
                "gpus_per_node": 8,
                "host": {"memory": "64 GiB", "nvme_read": "200 Gb/s", "nvme_write": "2.5e3 MB/s"},
            }
        },
    )
    assert s.budget is not None
    assert (s.budget.deadline, s.budget.mtbf_per_gpu, s.budget.checkpoint_every) == (2_592_000, 180_000_000, 3600)
    host = s.cluster.topology.host
    assert (host.memory, host.nvme_read, host.nvme_write, s.parallel.bucket_mb) == (64 * 2**30, 25e9, 2.5e9, 50)


def test_rare_unit_prefixes_go_to_quantiphy() -> None:
    gpu = {"like": "t4", "memory": "0.5 EiB", "power_limit_w": "400000 mW"}
    figures = made(cluster={"topology": {"gpu": gpu, "gpus_per_node": 1}}).cluster.gpu
    assert figures is not None and figures.memory == 2.0**59 and figures.power_limit_w == pytest.approx(400)


@settings(max_examples=40, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "parallel.strategy": st.sampled_from(["ddp", "zero1", "zero3", "fsdp"]),
            "training.precision": st.sampled_from(list(PRECISIONS)),
            "parallel.prefetch.limit": st.sampled_from(["none", 1, 5]),
            "training.recompute": st.sampled_from(["full", {"layers": 2}]),
            "model.preset": st.sampled_from(["llama-2-7b", "t5-11b", "deepseek-v3", "gpt3-175b", "resnet-50"]),
            "software.framework": st.sampled_from(["megatron", "composer", "ideal"]),
            "cluster.nodes": st.sampled_from([1, 2, 4]),
            "training.finetune": st.sampled_from(
                [{"method": "lora"}, {"method": "qlora", "targets": "all"}, {"method": "full"}]
            ),
        }
    )
)
def test_a_dump_reads_back_as_the_same_scenario(sets: dict[str, Any]) -> None:
    s = resolve(MINIMAL, sets=sets)
    again = resolve(dump(s))
    assert again == s and dump(again) == dump(s)


@pytest.mark.parametrize("stored", ["fp8", "mxfp8", "nvfp4", "int4", "fp64"])
def test_a_dump_reads_back_whatever_weights_are_stored_in(stored: str) -> None:
    s = made(training__precision={"name": "pure-bf16", "parameters": stored})
    assert resolve(dump(s)) == s


@pytest.mark.parametrize("sets", [
    {"cluster.topology": {"gpu": "a40", "gpus_per_node": 8, "intra": {"kind": "nvlink-mesh", "links_per_pair": 1}}},
    {"cluster.topology": {"gpu": "gh200", "gpus_per_node": 4, "intra": {"kind": "pcie"}}},  # joined by its host's link
    {"parallel.schedule": "zb-v"}])  # of no stages, so no two chunks on one
def test_a_dump_reads_back_where_a_default_follows_from_another(sets: dict[str, Any]) -> None:
    s = resolve(MINIMAL, sets={**sets, "cluster.nodes": 1})
    assert resolve(dump(s)) == s


@pytest.mark.parametrize(("gpus", "below"), [(2, None), (4, None), (6, 3), (7, None), (8, 4)])
def test_many_gpus_over_pcie_are_on_two_cpus(gpus: int, below: int | None) -> None:
    node = {"gpu": "a40", "gpus_per_node": gpus, "intra": {"kind": "pcie"}}
    s = resolve(MINIMAL, sets={"cluster.topology": node, "cluster.nodes": 1, "training.global_batch": 4 * gpus})
    assert s.cluster.topology.intra.gpus_per_switch == below
    assert resolve(dump(s)) == s
    plain = resolve(MINIMAL, sets={"cluster.topology": {**node, "intra": {"kind": "pcie", "gpus_per_switch": 1}},
                                   "cluster.nodes": 1, "training.global_batch": 4 * gpus})
    assert plain.cluster.topology.intra.gpus_per_switch == 1


@pytest.mark.parametrize(("bridged", "below"), [(True, 4), (False, 2)])
def test_bridged_pairs_over_pcie_are_on_two_cpus(bridged: bool, below: int) -> None:
    """What goes from pair to pair crosses PCIe; of a mesh that joins all only what is copied to the host does."""
    matrix = [[int(i != j and (i // 2 == j // 2 or not bridged)) for j in range(8)] for i in range(8)]
    node = {"gpu": "a100-80g-pcie", "gpus_per_node": 8, "intra": {"kind": "nvlink-mesh", "matrix": matrix}}
    s = resolve(MINIMAL, sets={"cluster.topology": node, "cluster.nodes": 1, "training.global_batch": 32})
    assert s.cluster.topology.intra.gpus_per_switch == below


@pytest.mark.parametrize(("gpu", "gpus", "kind", "below"), [
    ("a100-80g-sxm", 8, "nvswitch", 2), ("v100-32g-sxm3", 16, "nvswitch", 4), ("a100-40g-sxm", 6, "nvswitch", None),
    ("a100-40g-sxm", 4, "nvlink-mesh", None), ("h100-80g-sxm", 8, "nvswitch", None),
    ("mi300x", 8, "nvlink-mesh", None)])
def test_gpus_joined_by_nvlink_share_four_uplinks_up_to_pcie_gen_4(gpu: str, gpus: int, kind: str,
                                                                   below: int | None) -> None:
    mesh = {"links_per_pair": 1} if kind == "nvlink-mesh" else {}
    node = {"gpu": gpu, "gpus_per_node": gpus, "intra": {"kind": kind, **mesh}}
    s = resolve(MINIMAL, sets={"cluster.topology": node, "cluster.nodes": 1, "training.global_batch": 4 * gpus})
    assert s.cluster.topology.intra.gpus_per_switch == below
    assert resolve(dump(s)) == s
    newer = resolve(MINIMAL, sets={"cluster.topology": {**node, "host": {"pcie": "gen5x16"}}, "cluster.nodes": 1,
                                   "training.global_batch": 4 * gpus})
    assert newer.cluster.topology.intra.gpus_per_switch is None


@pytest.mark.parametrize(("gpu", "link", "memory"), [
    ("gh200", None, 4 * 512e9), ({"like": "gh200", "memory": "144 GB"}, None, 4 * 512e9), ("gh200", "gen5x16", None),
    ("gb200", None, None), ("h100-80g-sxm", None, None)])
def test_a_superchip_of_one_gpu_has_a_grace_to_itself(gpu: Any, link: str | None, memory: float | None) -> None:
    node: dict[str, Any] = {"gpu": gpu, "gpus_per_node": 4, "intra": {"kind": "nvlink-mesh", "links_per_pair": 6}}
    s = resolve(MINIMAL, sets={"cluster.topology": node | {"host": {"pcie": link}}, "cluster.nodes": 1})
    assert s.cluster.topology.host.memory_bandwidth == memory


def test_links_of_a_mesh_follow_from_those_of_a_pair() -> None:
    mesh = {"gpu": "a100-80g-sxm", "gpus_per_node": 4, "intra": {"kind": "nvlink-mesh", "links_per_pair": 2}}
    intra = resolve(MINIMAL, sets={"cluster.topology": mesh, "cluster.nodes": 1}).cluster.topology.intra
    assert (intra.links_per_pair, intra.links_per_gpu) == (2, 6)


def test_lora_without_figures_is_pefts() -> None:
    """Rank 8 on query and value (Hugging Face PEFT, LoraConfig.r; Hu et al. 2021, arXiv 2106.09685, section 4.2)."""
    tuned = made(**{"training.finetune": {"method": "lora"}}).training.finetune
    assert (tuned.rank, tuned.targets) == (8, ["query", "value"])


@pytest.mark.parametrize(("preset", "run", "sequences"), [
    ("bert-base", {"prompt": 100}, (100, 100)), ("t5-small", {"prompt": 100, "generate": 28}, (100, 28)),
    ("gpt2", {"prompt": 100, "generate": 28}, (128, 128))])
def test_a_request_says_what_each_kind_reads(preset: str, run: dict[str, int], sequences: tuple[int, int]) -> None:
    found = resolve({"name": "t", "cluster": {"topology": "single-a100-80g-sxm"}, "model": {"preset": preset},
                     "training": {"mode": {"inference": {"batch": 4} | run}}}).training
    assert (found.sequence, found.decoder_sequence) == sequences
    assert found.mode.inference.generate == run.get("generate", 0)


@pytest.mark.parametrize(("preset", "generate", "allowed"), [("bert-base", 1, False), ("bert-base", 0, True),
                                                             ("t5-small", 0, False), ("gpt2", 0, False)])
def test_only_an_encoder_generates_nothing(preset: str, generate: int, allowed: bool) -> None:
    asked = {"name": "t", "cluster": {"topology": "single-a100-80g-sxm"}, "model": {"preset": preset},
             "training": {"mode": {"inference": {"prompt": 8, "generate": generate, "batch": 4}}}}
    if allowed:
        assert resolve(asked).training.mode.inference.generate == 0
        return
    with pytest.raises(UserError) as raised:
        resolve(asked)
    assert [fault.field for fault in raised.value.faults] == ["training.mode.inference.generate"]


@pytest.mark.parametrize("framework", ["pytorch", "composer", "megatron", "deepspeed", "torchtitan", "nanotron",
                                       "ideal"])
def test_every_year_that_can_be_asked_for_has_defaults(framework: str) -> None:
    """Years before a table's first have that one's."""
    cut = MINIMAL | {"cluster": {"topology": "dgx-a100-80g", "nodes": 2},
                     "parallel": {"strategy": "zero1", "tensor": 2, "pipeline": 2}}
    found = {year: resolve(cut, sets={"software.framework": framework, "software.year": year})
             for year in range(2016, 2041)}
    assert found[2016].parallel.pipeline_scatter == found[2018].parallel.pipeline_scatter
    assert found[2016].parallel.async_tensor == found[2017].parallel.async_tensor is False
