"""Products that torch.compile pads, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sim import api
from sim.model.padded import evened
from sim.parallel import Lowered, lower
from sim.scenario import resolve
from sim.work import Kernel

TOKENS, HIDDEN = 4096, 768
ODD, EVEN = 50257, 50264


def lowered(vocab: int = ODD, *, precision: str = "amp-bf16", **changes: Any) -> Lowered:
    return lower(resolve(scenario(vocab, precision), "t", {"software.compile": True, **changes}))


def scenario(vocab: int, precision: str = "amp-bf16") -> dict[str, Any]:
    return {"name": "t", "cluster": {"topology": "single-a100-80g-sxm"},
            "model": {"kind": "decoder", "layers": 2, "hidden": HIDDEN, "heads": 12, "vocab": vocab,
                      "tied_embeddings": True},
            "training": {"micro_batch": 4, "global_batch": 4, "sequence": TOKENS // 4, "precision": precision},
            "parallel": {"strategy": "none"}, "software": {"framework": "pytorch", "year": 2024, "modules": "plain"}}


def head(low: Lowered, backward: bool) -> list[Kernel]:
    operator = next(op for op in low.architecture.stack[-1].operators if op.name == "logits")
    return list(operator.backward if backward else operator.forward)


def moved(kernels: list[Kernel]) -> dict[str, float]:
    return {k.variant: k.bytes for k in kernels if k.variant.endswith("padding")}


def test_products_of_an_odd_vocabulary_run_in_even_shapes_and_count_what_is_asked_for() -> None:
    odd = lowered()
    products = [k for k in (*head(odd, False), *head(odd, True)) if k.op == "gemm"]
    assert [k.shape for k in products] == [(1, TOKENS, EVEN, HIDDEN), (1, TOKENS, HIDDEN, EVEN),
                                           (1, EVEN, HIDDEN, TOKENS)]
    assert {k.flops for k in products} == {2.0 * TOKENS * ODD * HIDDEN}


def test_each_way_a_weight_is_copied_and_the_gradient_is_written_twice() -> None:
    odd, weight = lowered(), ODD * HIDDEN
    assert moved(head(odd, False)) == {"weight_padding": 2 * weight}  # autocast's cast writes once more
    assert moved(head(odd, True)) == {"weight_padding": 4 * weight, "gradient_padding": 2 * TOKENS * ODD}
    assert moved(head(lowered(precision="pure-bf16"), False)) == {"weight_padding": 4 * weight}


def test_a_gradient_from_outside_is_read_and_written_twice() -> None:
    """torchtitan of 2024 compiles its blocks, not its loss; an odd inner width is within them."""
    made = moved(head(lowered(**{"software.framework": "torchtitan"}), True))
    assert made["gradient_padding"] == 6 * TOKENS * ODD


def test_an_odd_input_is_written_twice() -> None:
    low = lowered(EVEN, **{"model.ffn": 3071})
    (down,) = [op for op in low.architecture.stack[1].operators if op.name == "down"]
    assert moved(list(down.forward))["input_padding"] == 2 * TOKENS * 3071
    assert "gradient_padding" not in moved(list(down.backward))


@pytest.mark.parametrize("changes", [{"software.compile": False}, {"software.versions": {"torch": "2.0"}},
                                     {"training.sequence": 32, "training.micro_batch": 1, "training.global_batch": 1}])
def test_eager_products_old_releases_and_few_rows_stay_as_they_are(changes: dict[str, Any]) -> None:
    low = lowered(**changes)
    kernels = [*head(low, False), *head(low, True)]
    assert not moved(kernels)
    assert all(ODD in k.shape for k in kernels if k.op == "gemm")


def test_even_sizes_are_left_alone() -> None:
    low = lowered(EVEN)
    assert not moved([*head(low, False), *head(low, True)])


@pytest.mark.parametrize(("size", "dtype", "even"), [(50257, "bf16", 50264), (50257, "tf32", 50260), (8, "fp16", 8),
                                                     (1, "bf16", 1), (9, "fp32", 12)])
def test_sizes_are_rounded_to_16_bytes(size: int, dtype: str, even: int) -> None:
    assert evened(size, dtype) == even


def test_compiled_an_odd_vocabulary_costs_little_and_is_not_warned_of() -> None:
    steps = {}
    for vocab in (ODD, EVEN):
        for compiled in (False, True):
            result = api.run(resolve(scenario(vocab), "t", {"software.compile": compiled}))
            steps[vocab, compiled] = result.step_time_s
            assert any("no multiple of" in text for text in result.warnings) == (vocab == ODD and not compiled)
    assert 1.0 < steps[ODD, True] / steps[EVEN, True] < 1.06
    assert steps[ODD, False] / steps[EVEN, False] > 1.2
