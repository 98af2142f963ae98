"""Which kernel of attention an engine of inference calls, by its release."""

from __future__ import annotations

import pytest

from sim.software import stack_for


@pytest.mark.parametrize(("versions", "kernel"), [
    ({}, "flash2"), ({"vllm": "0.6"}, "flash2"), ({"vllm": "0.11"}, "trtllm"), ({"sglang": "0.4.5"}, "flash2"),
    ({"sglang": "0.5.2"}, "trtllm"), ({"tensorrt_llm": "0.12"}, "flash2"), ({"tensorrt_llm": "1.1"}, "trtllm")])
def test_engines_of_2025_bring_their_own(versions: dict[str, str], kernel: str) -> None:
    assert stack_for("pytorch", 2025, versions=versions).attention_kernel == kernel
