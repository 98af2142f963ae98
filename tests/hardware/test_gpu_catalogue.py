"""The GPU catalogue: complete, sourced, findable under every spelling; bad names and figures are refused."""

from __future__ import annotations

import pytest

from sim.catalog import table
from sim.errors import UserError
from sim.hardware.gpu import canonical_gpu, gpu, gpu_names

SPEC_NAMES = [
    "v100-16g-sxm", "v100-32g-sxm", "v100-16g-pcie", "v100-32g-pcie", "a100-40g-sxm", "a100-80g-sxm", "a100-40g-pcie",
    "a100-80g-pcie", "a10g", "t4", "l4", "l40s", "h100-80g-sxm", "h100-80g-pcie", "h800", "h200", "b200", "gb200",
    "mi250x", "mi300x", "rtx3090", "rtx4090",
]
#: Beyond the specification: variants that published machines have.
VARIANTS = ["v100-32g-sxm3", "v100-32g-sxm3-450w"]
#: And cards that engineers have, by their siblings' kernels.
SIBLINGS = ["a800-80g-sxm", "h100-94g-nvl", "h20", "gh200", "b300", "a10", "a40", "rtx-a6000", "l40", "rtx-6000-ada",
            "mi325x", "gb300", "rtx5090", "rtx-pro-6000", "a100-64g-sxm", "rtx2080ti", "rtx3060", "rtx3070", "rtx3080",
            "rtx3080ti", "rtx4060ti", "rtx4070", "rtx4070ti-super", "rtx4080", "rtx4080-super",
            "rtx5070ti", "rtx5080", "rtx-a4000", "rtx-a5000", "rtx-5000-ada"]


def test_every_gpu_of_the_scenario_specification_is_there() -> None:
    assert sorted(gpu_names()) == sorted(SPEC_NAMES + VARIANTS + SIBLINGS)


@pytest.mark.parametrize("name", SPEC_NAMES + VARIANTS + SIBLINGS)
def test_figures_are_sane_and_sourced(name: str) -> None:
    card = gpu(name)
    catalogue = table("hardware/gpus.yaml")
    assert 0.9 < card.usable_memory_bytes / card.memory_bytes <= 1.0
    assert card.sources and set(card.sources) <= set(catalogue["sources"])
    assert card.confidence in ("high", "medium", "low")
    assert card.pcie in catalogue["copies"]
    assert card.kernels in table("hardware/kernels.yaml")["families"]
    assert card.tflops["fp16"] >= card.tflops["fp32"]
    for figure in card.unverified:
        assert figure.split(".")[0] in catalogue["gpus"][name]


def test_old_tensor_cores_have_no_bf16() -> None:
    for name in SPEC_NAMES:
        assert gpu(name).supports("bf16") == (not name.startswith(("v100", "t4")))
    assert gpu("t4").arithmetic("bf16") == "fp32"
    assert gpu("a100-80g-sxm").arithmetic("nf4") == "bf16"


@pytest.mark.parametrize(("spelling", "name"), [
    ("V100-SXM2 (DGX-1)", "v100-16g-sxm"), ("A100-80GB", "a100-80g-sxm"), ("A100-PCIe-40GB", "a100-40g-pcie"),
    ("H100-SXM-80GB", "h100-80g-sxm"), ("H100-80GB", "h100-80g-sxm"), ("B200-SXM", "b200"), ("T4", "t4"), ("L4", "l4"),
    ("V100-PCIe-32GB", "v100-32g-pcie"), ("A100-PCIe-80GB", "a100-80g-pcie"), ("a100-sxm4-80gb", "a100-80g-sxm"),
])
def test_spellings_of_vendors_and_of_the_measurements(spelling: str, name: str) -> None:
    assert canonical_gpu(spelling) == name


def test_aliases_point_at_gpus() -> None:
    assert set(table("hardware/gpus.yaml")["aliases"].values()) <= set(gpu_names())


def test_an_unknown_gpu_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'a100-80g-sxm'"):
        gpu("a100-80g-smx")


def test_overrides_change_single_figures() -> None:
    base = gpu("a100-80g-sxm")
    varied = gpu("a100-80g-sxm", {"memory": 2 * base.memory_bytes, "memory_bandwidth": 3e12, "tflops": {"bf16": 400},
                                  "power_limit_w": None})
    assert varied.usable_memory_bytes == pytest.approx(2 * base.usable_memory_bytes)
    assert varied.memory_bandwidth_bps == 3e12
    assert varied.peak_flops("bf16") == 400e12
    assert varied.peak_flops("fp16") == base.peak_flops("fp16")
    assert varied.power_limit_w == base.power_limit_w


def test_an_inline_gpu_is_like_another_and_refuses_what_it_does_not_know() -> None:
    inline = gpu({"name": "mine", "like": "h100", "sms": 100, "memory_gib": 96})
    assert (inline.name, inline.sms, inline.usable_memory_bytes) == ("mine", 100, 96 * 2**30)
    assert inline.memory_bandwidth_bps == gpu("h100").memory_bandwidth_bps
    with pytest.raises(UserError, match="no such field of a GPU: 'smz'"):
        gpu({"like": "h100", "smz": 3})
    with pytest.raises(UserError, match="an inline GPU needs"):
        gpu({"sms": 3})
    with pytest.raises(UserError, match="no such GPU figure"):
        gpu("h100", {"sms": 3})


def test_figures_of_a_profile_leave_the_others_of_its_card_as_they_are() -> None:
    """The A100 of 80 GB has figures of its own for memory; a fit of products alone must not move these."""
    base = gpu("a100-80g-sxm")
    fitted = gpu({"like": "a100-80g-sxm", "kernel_figures": {"gemm": {"half": {"eta": 0.7}}}})
    assert base.kernel_figures["memory"] and fitted.kernel_figures["memory"] == base.kernel_figures["memory"]
    assert fitted.kernel_figures["gemm"]["half"]["eta"] == 0.7
