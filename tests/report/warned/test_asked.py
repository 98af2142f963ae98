"""What is asked for in words and not done is said."""

from __future__ import annotations

from typing import Any

import pytest

from sim.network import Topology
from sim.report.warned.asked import (
    accumulation_in_vain,
    algorithm_in_vain,
    autocast_alone,
    both_directions,
    budget_in_vain,
    determinism,
    direct_over_sockets,
    fused_bias_in_vain,
    kernels_in_vain,
    links_in_vain,
    links_of_other_cards,
    overlap_in_vain,
    peer_sums_in_vain,
    prefetch_in_vain,
    protocol_in_vain,
    same_tokens,
    schedule_of_another,
    takes_turns,
    versions_in_vain,
    with_sparsity,
)
from sim.scenario import Scenario, resolve
from sim.software import stack_of


def scenario(year: int, **parallel: Any) -> Scenario:
    return resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": 1, "gpus_per_node": 4},
        "model": {"kind": "decoder", "layers": 4, "hidden": 256, "heads": 8, "vocab": 1024},
        "training": {"micro_batch": 1, "global_batch": 8, "sequence": 128},
        "parallel": {"strategy": "ddp", "pipeline": 2, **parallel},
        "software": {"framework": "megatron", "year": year}})


def test_a_deterministic_megatron_is_asked_for_its_algorithm_and_nothing_else_is() -> None:
    def asks(mode: Any = "train", **software: Any) -> Scenario:
        return resolve({
            "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": 1, "gpus_per_node": 4},
            "model": {"kind": "decoder", "layers": 4, "hidden": 256, "heads": 8, "vocab": 1024},
            "training": {"micro_batch": 1, "global_batch": 4, "sequence": 128, "mode": mode},
            "software": {"framework": "megatron", "year": 2025, **software}})

    def said(mode: Any = "train", **software: Any) -> list[str]:
        return determinism(asks(mode, **software))
    assert said() == []
    (asked,) = said(deterministic=True)
    assert "NCCL_ALGO" in asked
    assert said(deterministic=True, nccl={"algorithm": "tree"}) == []
    assert said(deterministic=True, framework="pytorch") == []
    (early,) = said(deterministic=True, framework="deepspeed", year=2021)
    assert "from torch 2.2 on" in early
    (apart,) = accumulation_in_vain(asks(framework="pytorch", fused_accumulation=False))
    assert "pytorch of 2025" in apart
    assert accumulation_in_vain(asks(fused_accumulation=False)) == accumulation_in_vain(asks()) == []
    (nothing,) = said({"inference": {"prompt": 64, "generate": 8, "batch": 1}}, deterministic=True)
    assert "inference are not simulated" in nothing


@pytest.mark.parametrize(("tensor", "versions", "said"), [
    (6, {}, ""), (6, {"tensorrt_llm": "1.2"}, "no such kernel for 6 GPUs"), (3, {}, "no such kernel for 3 GPUs"),
    (3, {"sglang": "0.5.14"}, ""), (1, {"tensorrt_llm": "1.2"}, "")])
def test_an_engine_has_kernels_for_so_many_gpus(tensor: int, versions: dict[str, str], said: str) -> None:
    found = peer_sums_in_vain(resolve({
        "name": "x", "cluster": {"topology": "dgx-h100", "nodes": 1, "gpus_per_node": tensor},
        "model": {"kind": "decoder", "layers": 4, "hidden": 1536, "heads": 12, "vocab": 1536},
        "training": {"micro_batch": 1, "sequence": 128, "mode": {"inference": {
            "prompt": 64, "generate": 8, "batch": 1, "all_reduce": "peers"}}},
        "parallel": {"tensor": tensor}, "software": {"year": 2026, "versions": versions}}))
    assert (said in found[0]) if said else not found


def test_an_overlap_that_megatron_of_2021_has_not_is_said_to_change_nothing() -> None:
    (said,) = overlap_in_vain(scenario(2021, overlap=True))
    assert "megatron of 2021" in said and "when its pipeline has ended" in said


@pytest.mark.parametrize("other", [
    scenario(2021), scenario(2021, overlap=False), scenario(2024, overlap=True),
    scenario(2021, overlap=True, pipeline=1), scenario(2021, overlap=True, pipeline=4)])
def test_what_is_not_asked_or_done_is_no_news(other: Scenario) -> None:
    assert overlap_in_vain(other) == []


@pytest.mark.parametrize(("version", "prefetch", "said"), [
    (2, {"backward": "post"}, "backward post changes"), (2, {"limit": 1}, "limit 1 changes"),
    (2, {"backward": "post", "limit": 5}, "backward post and limit 5 change "), (2, {"limit": "none"}, ""),
    (2, {"backward": "none", "forward": True}, ""), (1, {"backward": "post", "limit": 1}, "")])
def test_settings_of_fsdp_1_are_said_to_change_nothing_in_fsdp_2(
        version: int, prefetch: dict[str, Any], said: str) -> None:
    told = prefetch_in_vain(resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g"}, "model": {"preset": "gpt2"},
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128},
        "parallel": {"strategy": "fsdp", "prefetch": prefetch}, "software": {"fsdp": version}}))
    assert [said in text for text in told] == ([True] if said else [])


@pytest.mark.parametrize(("versions", "said"), [
    ({"flash-attn": "1.0"}, ["versions of flash-attn change nothing", "did you mean 'flash_attn'"]),
    ({"torch": "nightly"}, ["versions.torch 'nightly' is no release: that of 2023 is taken, and what only"]),
    ({"torch": "2.1.0+cu121", "flash_attn": "triton"}, []), ({"megatron": "0.5"}, ["and else by the year"])])
def test_versions_that_say_nothing_are_named(versions: dict[str, str], said: list[str]) -> None:
    asked = resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g"}, "model": {"preset": "gpt2"},
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128},
        "software": {"year": 2023, "versions": versions}})
    told = versions_in_vain(asked)
    assert len(told) == bool(said) and all(part in text for text in told for part in said)
    if said:
        assert stack_of(asked.software) == stack_of(asked.software.model_copy(update={"versions": {}}))


@pytest.mark.parametrize(("model", "modules", "release", "said"), [
    ("llama-3.1-8b", "transformers", "0.8", ""), ("llama-3.1-8b", "plain", "0.8", "software.modules: transformers"),
    ("gpt2", "transformers", "0.8", "RMSNorm alone"), ("t5-base", "transformers", "0.8", "RMSNorm alone"),
    ("gpt2", "transformers", "newest", "")])
def test_liger_s_kernels_are_said_to_change_nothing_where_no_module_has_them(
        model: str, modules: str, release: str, said: str) -> None:
    told = kernels_in_vain(resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g"}, "model": {"preset": model},
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128},
        "software": {"modules": modules, "versions": {"liger_kernel": release}}}))
    assert len(told) == bool(said) and all(said in text for text in told)


@pytest.mark.parametrize(("topology", "nodes", "algorithm", "said"), [
    ("dgx-a100-80g", 2, "nvls", "needs NVSwitches of Hopper"), ("dgx-h100", 2, "collnet", "is not simulated"),
    ("dgx-h100", 1, "nvls-tree", "and several nodes"), ("dgx-h100", 1, "nvls", ""), ("dgx-h100", 2, "nvls-tree", ""),
    ("dgx-a100-80g", 2, "tree", ""), ("dgx-a100-80g", 2, None, "")])
def test_an_algorithm_that_no_machine_of_the_cluster_runs_is_said_to_change_nothing(
        topology: str, nodes: int, algorithm: str | None, said: str) -> None:
    told = algorithm_in_vain(resolve({
        "name": "x", "cluster": {"topology": topology, "nodes": nodes}, "model": {"preset": "gpt2"},
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128},
        "software": {"nccl": {"algorithm": algorithm}}}))
    assert [said in text for text in told] == ([True] if said else [])


@pytest.mark.parametrize(("framework", "year", "overlap", "said"), [
    ("deepspeed", 2023, True, True), ("deepspeed", 2023, False, False), ("deepspeed", 2021, True, False),
    ("pytorch", 2023, True, False)])
def test_zero3_that_hides_nothing_is_said_to_take_turns(framework: str, year: int, overlap: bool, said: bool) -> None:
    told = takes_turns(resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g"}, "model": {"preset": "gpt2"},
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128},
        "parallel": {"strategy": "zero3", "overlap": overlap}, "software": {"framework": framework, "year": year}}))
    assert ["takes turns" in text for text in told] == ([True] if said else [])


def test_a_schedule_that_the_release_has_not_is_said_to_be_a_fork_s() -> None:
    (said,) = schedule_of_another(scenario(2024, schedule="zb-v"))
    assert said == ("software: megatron of 2024 has no schedule zb-v (it has 1f1b, interleaved): "
                    "the step is that of a fork which has it")
    (said,) = schedule_of_another(scenario(2019))
    assert "(nor any other)" in said


@pytest.mark.parametrize(("preset", "framework", "year", "parallel", "said"), [
    ("mixtral-8x7b", "megatron", 2025, {"tensor": 2}, True), ("mixtral-8x7b", "megatron", 2023, {"tensor": 2}, False),
    ("mixtral-8x7b", "megatron", 2025, {"tensor": 2, "sequence_parallel": True}, False),
    ("mixtral-8x7b", "megatron", 2025, {"expert": 4}, False), ("llama-2-7b", "megatron", 2025, {"tensor": 2}, False),
    ("mixtral-8x7b", "pytorch", 2025, {"tensor": 2, "strategy": "ddp"}, False)])
def test_a_mixture_on_tensor_ranks_with_the_same_tokens_is_a_fork_s(
        preset: str, framework: str, year: int, parallel: dict[str, Any], said: bool) -> None:
    """moe_layer.py raises in training from megatron-core 0.7.0 on (2024)."""
    told = same_tokens(resolve({
        "name": "x", "cluster": {"topology": "dgx-h100"}, "model": {"preset": preset, "layers": 2},
        "training": {"micro_batch": 1, "global_batch": 8, "sequence": 1024, "precision": "megatron-bf16"},
        "parallel": {"strategy": "zero1", **parallel}, "software": {"framework": framework, "year": year}}))
    assert ["mixtures over tensor ranks" in text for text in told] == ([True] if said else [])


@pytest.mark.parametrize("other", [scenario(2024), scenario(2024, virtual_stages=2), scenario(2019, pipeline=1)])
def test_a_schedule_of_the_release_is_no_news(other: Scenario) -> None:
    assert schedule_of_another(other) == []


@pytest.mark.parametrize(("framework", "strategy", "precision", "said"), [
    ("pytorch", "fsdp", "amp-bf16", "fsdp-bf16"), ("pytorch", "fsdp", "amp-fp16", "fsdp-fp16"),
    ("pytorch", "fsdp", "fsdp-bf16", ""), ("pytorch", "fsdp", "fp32", ""), ("pytorch", "fsdp", "pure-bf16", ""),
    ("pytorch", "ddp", "amp-bf16", ""), ("megatron", "zero1", "amp-bf16", "megatron-bf16"),
    ("megatron", "ddp", "megatron-bf16", ""), ("nanotron", "zero1", "amp-fp16", "megatron-fp16"),
    ("deepspeed", "zero2", "amp-bf16", "mixed-bf16"), ("deepspeed", "zero2", "fp32", "")])
def test_autocast_alone_is_told_what_most_runs_have(framework: str, strategy: str, precision: str, said: str) -> None:
    told = autocast_alone(resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": 1}, "model": {"preset": "gpt2"},
        "training": {"micro_batch": 1, "global_batch": 8, "sequence": 128, "precision": precision},
        "parallel": {"strategy": strategy}, "software": {"framework": framework}}))
    assert len(told) == bool(said) and all(precision in one and said in one for one in told)


def on(intra: dict[str, Any], inter: dict[str, Any], nodes: int) -> Scenario:
    return resolve({
        "name": "x", "cluster": {"nodes": nodes, "topology": {"gpu": "a100-40g-sxm", "gpus_per_node": 4, "intra": intra,
                                                              "inter": {"kind": "fat-tree", **inter}}},
        "model": {"preset": "gpt2"}, "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128}})


@pytest.mark.parametrize(("intra", "inter", "nodes", "said"), [
    ({"kind": "nvswitch"}, {}, 2, []), ({"kind": "pcie", "peer_copies": False}, {}, 2, []),
    ({"kind": "nvlink-mesh", "links_per_pair": 4}, {"kind": "dragonfly"}, 2, []),
    ({"kind": "nvswitch", "links_per_pair": 4}, {}, 2, ["intra.links_per_pair changes nothing in a node of kind"]),
    ({"kind": "nvswitch", "links_per_pair": 4, "peer_copies": True}, {}, 2,
     ["intra.links_per_pair and peer_copies change nothing"]),
    ({"kind": "nvswitch"}, {"kind": "torus"}, 2, ["hops of a torus are not simulated"]),
    ({"kind": "nvswitch"}, {"kind": "ring"}, 1, [])])
def test_links_that_nothing_goes_by_are_named(intra: dict[str, Any], inter: dict[str, Any], nodes: int,
                                              said: list[str]) -> None:
    told = links_in_vain(on(intra, inter, nodes))
    assert len(told) == len(said) and all(part in text for part, text in zip(said, told, strict=True))


@pytest.mark.parametrize(("topology", "protocol", "said"), [
    ("pcie-8x-a100-40g-pcie", "ll128", 1), ("pcie-8x-a100-40g-pcie", "ll", 0), ("dgx-a100-80g", "ll128", 0)])
def test_a_protocol_that_needs_nvlink_is_named_where_there_is_none(topology: str, protocol: str, said: int) -> None:
    asked = resolve({
        "name": "x", "cluster": {"topology": topology}, "model": {"preset": "gpt2"},
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128},
        "software": {"nccl": {"protocol": protocol}}})
    assert len(protocol_in_vain(asked)) == said


@pytest.mark.parametrize(("budget", "mode", "said"), [
    ({"deadline": "5 days"}, {}, "without tokens"), ({"tokens": 1e9}, {}, ""),
    ({"tokens": 1e9}, {"mode": {"inference": {"prompt": 8, "generate": 2, "batch": 1}}}, "a run of training")])
def test_a_budget_that_says_nothing_is_named(budget: dict[str, Any], mode: dict[str, Any], said: str) -> None:
    told = budget_in_vain(resolve({
        "name": "x", "cluster": {"topology": "single-a100-80g-sxm"}, "model": {"preset": "gpt2"}, "budget": budget,
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128, **mode}}))
    assert (said in told[0]) if said else not told


@pytest.mark.parametrize(("model", "software", "attention", "told"), [
    ({"preset": "t5-large"}, {"modules": "transformers", "year": 2024}, "flash", True),
    ({"preset": "t5-large"}, {"modules": "transformers", "year": 2024}, "eager", False),
    ({"preset": "t5-large"}, {"modules": "transformers", "year": 2024, "versions": {"transformers": "5.0"}}, "flash",
     False),
    ({"preset": "t5-large"}, {"modules": "plain", "year": 2024}, "flash", False),
    ({"preset": "llama-2-7b"}, {"modules": "transformers", "year": 2024}, "flash", False),
])
def test_t5_without_fused_attention_is_told(model: dict[str, Any], software: dict[str, Any], attention: str,
                                            told: bool) -> None:
    asked = resolve({
        "name": "x", "cluster": {"topology": "single-a100-80g-sxm"}, "model": model,
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128, "attention": attention},
        "software": {"framework": "pytorch", **software}})
    assert any("no fused attention" in text for text in fused_bias_in_vain(asked)) is told


@pytest.mark.parametrize(("speed", "told"), [("900 GB/s", True), ("450 GB/s", False), ("600 GB/s", False)])
def test_links_at_twice_their_speed_are_most_likely_both_directions(speed: str, told: bool) -> None:
    found = both_directions(resolve({
        "name": "t", "cluster": {"topology": "dgx-h100", "intra_gbps_per_gpu": speed}, "model": {"preset": "gpt2"},
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128}, "parallel": {"strategy": "ddp"}}))
    assert bool(found) == told
    if told:
        assert "7200 Gb/s (900 GB/s) is twice what dgx-h100 has" in found[0] and "(3600 is its own)" in found[0]


@pytest.mark.parametrize(("tflops", "told"), [
    ({"bf16": 1979}, "tflops of bf16 are twice those of h100-80g-sxm"), ({"bf16": 989, "fp8": 1979}, ""),
    ({"bf16": 148}, ""), ({"bf16": 989, "fp8": 3958}, "(1979 dense)")])
def test_products_at_twice_their_rate_are_most_likely_those_with_sparsity(tflops: dict[str, float], told: str) -> None:
    found = with_sparsity(resolve({
        "name": "t", "cluster": {"topology": "dgx-h100", "gpu": {"tflops": tflops}}, "model": {"preset": "gpt2"},
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128}, "parallel": {"strategy": "ddp"}}))
    assert [told in text for text in found] == ([True] if told else [])


def on_fabric(fabric: str, **inter: Any) -> Scenario:
    return resolve({
        "name": "t", "cluster": {"nodes": 2, "topology": {
            "gpu": "h100-80g-sxm", "gpus_per_node": 8,
            "intra": {"kind": "nvswitch", "link": "nvlink4", "links_per_gpu": 18},
            "inter": {"kind": "fat-tree", "fabric": fabric, "nics_per_node": 8, "gbps_per_nic": 400, **inter}}},
        "model": {"preset": "gpt2"}, "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128},
        "parallel": {"strategy": "ddp"}})


@pytest.mark.parametrize(("fabric", "direct"), [
    ("infiniband", True), ("roce", True), ("efa", True), ("ethernet", False), ("omni-path", False)])
def test_whether_cards_read_gpu_memory_is_the_fabrics_where_a_topology_says_nothing(fabric: str, direct: bool) -> None:
    plain = on_fabric(fabric)
    assert Topology.from_mapping(plain.cluster.template()).inter.rdma is direct
    assert not direct_over_sockets(plain)
    for told in (True, False):
        asked = on_fabric(fabric, gpu_direct_rdma=told)
        assert Topology.from_mapping(asked.cluster.template()).inter.rdma is told
        assert bool(direct_over_sockets(asked)) is (told and not direct)


@pytest.mark.parametrize(("gpu", "intra", "said"), [
    ("h100-80g-sxm", None, "joined by PCIe alone, though h100-80g-sxm has links of its own"),
    ("h100-80g-sxm", {"kind": "nvswitch"}, ""), ("h100-80g-pcie", None, ""), ("l40s", {"kind": "pcie"}, ""),
    ("l40s", {"kind": "nvswitch", "link": "nvlink4"}, "l40s has no NVLink, and inline joins GPUs by nvlink4"),
    ("h100-80g-pcie", {"kind": "nvswitch"}, "has NVLink between two cards at most"),
    ("a100-80g-pcie", {"kind": "nvlink-mesh"}, ""),
    ({"like": "h200", "name": "mine"}, {"kind": "pcie"}, "though h200 has")])
def test_links_that_a_card_does_not_have_are_told_and_those_it_has(gpu: Any, intra: Any, said: str) -> None:
    node = {"gpu": gpu, "gpus_per_node": 8, **({"intra": intra} if intra else {})}
    found = links_of_other_cards(resolve({
        "name": "t", "cluster": {"topology": node}, "model": {"preset": "gpt2"},
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128}, "parallel": {"strategy": "ddp"}}))
    assert bool(found) == bool(said)
    assert not said or said in found[0]
