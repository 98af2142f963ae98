"""Documents inside a sequence: which stacks and exchanges over context ranks take them, and which searches try them."""

from __future__ import annotations

from typing import Any

import pytest

from sim.errors import UserError
from sim.parallel import lower
from sim.scenario import Scenario, resolve
from sim.sizing import Choice
from sim.sizing.space.base import alone
from sim.sizing.space.layouts import build_space

HALF = {"precision": "pure-bf16"}


def scenario(framework: str, exchange: str = "ring", context: int = 4, document: Any = 512, year: int = 2025,
             model: dict[str, Any] | None = None, modules: str = "", **training: Any) -> Scenario:
    own = {} if framework == "megatron" else HALF
    return resolve({
        "name": "t", "cluster": {"topology": "dgx-h100"},
        "model": {"layers": 2, "hidden": 256, "heads": 8, "kv_heads": 8, "vocab": 1000, "positions": "rotary",
                  **(model or {})},
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 4096, "attention": "flash", "document": document,
                     **own, **training},
        "parallel": {"strategy": "ddp", "context": context, "context_exchange": exchange},
        "software": {"framework": framework, "year": year, **({"modules": modules} if modules else {})}})


@pytest.mark.parametrize(("framework", "exchange"), [
    ("megatron", "ring"), ("torchtitan", "all-gather"), ("pytorch", "all-gather"), ("pytorch", "all-to-all"),
    ("deepspeed", "all-to-all"), ("ideal", "ring"), ("ideal", "all-gather"), ("ideal", "all-to-all")])
def test_exchanges_that_take_documents(framework: str, exchange: str) -> None:
    assert lower(scenario(framework, exchange)).job


@pytest.mark.parametrize(("of", "words"), [
    ({"framework": "torchtitan"}, "torchtitan has no attention within documents over context ranks by a ring"),
    ({"framework": "megatron", "exchange": "all-gather"}, "by gathered keys and values"),
    ({"framework": "megatron", "exchange": "all-to-all"}, "by an exchange of heads"),
    ({"framework": "ideal", "attention": "eager"}, "simulated with flash kernels alone"),
    ({"framework": "pytorch", "exchange": "all-gather", "attention": "sdpa", "modules": "transformers"},
     "which take no mask"),
    ({"framework": "megatron", "document": 7}, "an early and a late part of every document"),
    ({"framework": "composer", "context": 1, "year": 2023}, "knows no documents"),
])
def test_what_takes_no_documents_is_refused(of: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        lower(scenario(**of))
    assert len(caught.value.faults) == 1


@pytest.mark.parametrize("model", [{"kind": "encoder"}, {"kind": "encoder-decoder"}, {"positions": "relative"}])
def test_models_whose_attention_keeps_to_no_documents(model: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="attention within documents is for decoders"):
        scenario("pytorch", context=1, model=model)


def test_documents_as_long_as_the_sequence_ask_for_nothing() -> None:
    for of in (scenario("torchtitan", document=4096), scenario("composer", context=1, document=4096, year=2023)):
        assert lower(of).job


@pytest.mark.parametrize(("framework", "exchange", "contexts"), [
    ("torchtitan", "all-gather", {1, 2, 4, 8}), ("torchtitan", "ring", {1}), ("megatron", "ring", {1, 2, 4, 8})])
def test_a_search_tries_what_takes_documents(framework: str, exchange: str, contexts: set[int]) -> None:
    of = scenario(framework, exchange, context=1)
    space = build_space([alone(of, None)], Choice([8], micro_batch=[1], strategies=["ddp"], tensor=[1], pipeline=[1]))
    assert set(space.columns["context"].tolist()) == contexts
