"""Whose kernels sum small tensors, by the engine that `versions` names and its release."""

from __future__ import annotations

import pytest

from sim.catalog import table
from sim.software import stack_for


@pytest.mark.parametrize(("versions", "kernel"), [
    ({}, "vllm"), ({"vllm": "0.11"}, "vllm"), ({"vllm": "0.18.0"}, "vllm_symmetric"),
    ({"vllm": "0.11", "flashinfer": "0.4"}, "vllm_fused"), ({"vllm": "0.18.0", "flashinfer": "0.6"}, "vllm_fused"),
    ({"vllm": "0.24.0"}, "vllm_fused_symmetric"), ({"flashinfer": "0.6"}, "vllm"),
    ({"sglang": "0.5.10"}, "vllm"), ({"sglang": "0.5.14"}, "sglang"),
    ({"tensorrt_llm": "1.2.0rc5"}, "trtllm"), ({"tensorrt_llm": "1.3.0rc10"}, "trtllm_large")])
def test_an_engine_s_release_decides(versions: dict[str, str], kernel: str) -> None:
    assert stack_for("pytorch", 2026, versions=versions).sums_kernel == kernel
    assert kernel in table("network/sums.yaml")


def test_a_year_alone_names_no_engine() -> None:
    assert {stack_for("pytorch", year).sums_kernel for year in range(2022, 2027)} == {"vllm"}
