"""Rotary positions as complex numbers, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sim.model.eager import KINDS, layer_profile
from sim.model.eager.profile import profile as lru_profile
from sim.model.style import Style
from sim.parallel import Lowered, lower
from sim.scenario import resolve

TOKENS, HIDDEN, KV = 2048, 1024, 256
ELEMENTS = TOKENS * (HIDDEN + KV)


def lowered(framework: str = "torchtitan", **changes: Any) -> Lowered:
    return lower(resolve({
        "name": "t", "cluster": {"topology": "single-h100-80g-sxm"},
        "model": {"kind": "decoder", "layers": 2, "hidden": HIDDEN, "heads": 8, "kv_heads": 2, "ffn": 4096,
                  "vocab": 1000, "positions": "rotary", "norm": "rmsnorm", "bias": False, "gated_mlp": True},
        "training": {"micro_batch": 1, "global_batch": 1, "sequence": TOKENS, "precision": "pure-bf16"},
        "parallel": {"strategy": "none"}, "software": {"framework": framework, "year": 2025}}, "t", changes))


def passes(low: Lowered, backward: bool) -> list[tuple[float, bool, int]]:
    """Bytes an element of queries and keys, whether one element at a time is handled, and launches."""
    operator = next(op for op in low.architecture.stack[1].operators if op.name == "rotary")
    return [(k.bytes / ELEMENTS, k.kernel == "scalar", k.launches)
            for k in (operator.backward if backward else operator.forward)]


@pytest.mark.parametrize("backward", [False, True])
def test_widened_multiplied_and_narrowed_each_way(backward: bool) -> None:
    assert passes(lowered(), backward) == [(6, True, 2), (8, True, 2), (6, False, 2)]


@pytest.mark.parametrize("backward", [False, True])
def test_compiled_the_product_stays_a_kernel_of_atens(backward: bool) -> None:
    assert passes(lowered(**{"software.compile": True}), backward) == [(6, False, 2), (8, True, 2), (6, False, 2)]


def test_in_fp32_nothing_is_cast() -> None:
    assert passes(lowered(**{"training.precision": "fp32"}), False) == [(8, True, 2)]


@pytest.mark.parametrize(("framework", "changes"), [
    ("pytorch", {}), ("torchtitan", {"software.modules": "transformers"}), ("torchtitan", {"model.qk_norm": "head"})])
def test_other_modules_take_cos_and_sin(framework: str, changes: dict[str, Any]) -> None:
    assert passes(lowered(framework, **{"software.compile": True, **changes}), False) == [(4, False, 2)]


def test_no_fp32_copy_is_kept_for_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept() -> int:
        return layer_profile(lowered().architecture.stack[1], "none", True).forward.net[KINDS.index("activations")]
    as_complex = kept()
    monkeypatch.setattr(Style, "turns_complex", False)
    lru_profile.cache_clear()
    without = kept()
    lru_profile.cache_clear()  # of what stands under the wrong style
    assert as_complex == without
