"""Which blocks of Hugging Face's models attend to a window, read off their configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import UserError
from sim.model import build
from sim.scenario import Scenario, resolve
from sim.scenario.hf.families import read_config
from sim.scenario.hf.windows import _pattern
from sim.software import stack_for

SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000,
         "intermediate_size": 512, "max_position_embeddings": 8192, "hidden_act": "silu"}
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def read(folder: Path, family: str, layers: int, **given: Any) -> Scenario:
    config = {"model_type": family, "num_hidden_layers": layers, **SIZES, **given}
    (folder / "config.json").write_text(json.dumps(config))
    return resolve({"name": "t", "cluster": {"topology": "single-h100-80g-sxm"}, "model": {"hf": "config.json"},
                    "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 8192}}, base=folder)


def windows(scenario: Scenario) -> list[int]:
    """Of every block, 0 = it attends to all tokens."""
    stack = build(scenario, stack_for("megatron", 2025), 1).stack
    return [layer.window for layer in stack if layer.kind == "block"]


@pytest.mark.parametrize(("family", "layers", "given", "expected"), [
    ("gemma2", 4, {}, [4096, 0, 4096, 0]), ("gemma2", 3, {"sliding_window": None}, [0, 0, 0]),
    ("gemma3_text", 7, {"sliding_window": 1024}, [1024] * 5 + [0, 1024]),
    ("gemma3_text", 4, {"sliding_window": 512, "sliding_window_pattern": 3}, [512, 512, 0, 512]),
    ("gpt_oss", 4, {"num_local_experts": 8}, [128, 0, 128, 0]), ("cohere2", 5, {}, [4096] * 3 + [0, 4096]),
    ("olmo3", 5, {}, [4096] * 3 + [0, 4096]),
    ("qwen2", 4, {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, [0, 64, 64, 64]),
    ("qwen2", 4, {"use_sliding_window": True, "sliding_window": 64}, [0] * 4),
    ("qwen3", 2, {"sliding_window": 64, "max_window_layers": 1}, [0, 0]),
    ("qwen3", 3, {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, [64] * 3),
    ("qwen2", 3, {"use_sliding_window": True, "sliding_window": 64, "layer_types": [FULL, SLIDING, FULL]}, [0, 64, 0]),
    ("qwen2_moe", 4, {"use_sliding_window": True, "sliding_window": 64, "num_experts": 4, "num_experts_per_tok": 2,
                      "moe_intermediate_size": 64}, [64, 0, 64, 0]),
    ("mistral", 2, {"sliding_window": 64}, [64, 64]), ("mistral", 2, {"sliding_window": None}, [0, 0]),
    ("mistral", 2, {"sliding_window": 64, "layer_types": [SLIDING, FULL]}, [64, 0]),
    ("llama4_text", 5, {"attention_chunk_size": 1024}, [1024] * 3 + [0, 1024]),
    ("llama4_text", 4, {"attention_chunk_size": 1024, "no_rope_layers": [1, 0, 1, 0]}, [1024, 0, 1024, 0]),
])
def test_blocks_attend_as_transformers_has_it(family: str, layers: int, given: dict[str, Any], expected: list[int],
                                              tmp_path: Path) -> None:
    found = read(tmp_path, family, layers, **given)
    assert windows(found) == expected
    assert found.model.chunked_window == (family == "llama4_text")


def test_llama_4_has_a_shared_expert_and_wider_dense_blocks(tmp_path: Path) -> None:
    model = read(tmp_path, "llama4_text", 4, interleave_moe_layer_step=2, intermediate_size_mlp=1024).model
    assert model.moe is not None
    assert (model.ffn, model.moe.expert_ffn, model.moe.shared_experts, model.moe.every) == (1024, 512, 1, 2)


@pytest.mark.parametrize("kinds", [[SLIDING, SLIDING, FULL, FULL], [SLIDING, CHUNKED, FULL, SLIDING],
                                   [SLIDING, "linear_attention", FULL, SLIDING], [SLIDING, FULL]])
def test_an_order_that_no_field_says_is_refused(kinds: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="order of blocks with and without a window"):
        read(tmp_path, "gemma2", 4, layer_types=kinds)


@given(st.lists(st.sampled_from([FULL, SLIDING]), min_size=1, max_size=12))
def test_a_pattern_says_the_row_it_was_read_off(kinds: list[str]) -> None:
    found = _pattern(kinds, 64)
    if not found:
        assert found is None or set(kinds) == {FULL}
        return
    first, every = found.get("first_full", 0), found.get("full_every", 0)
    assert kinds == [FULL if i < first or (every and (i + 1 - first) % every == 0) else SLIDING
                     for i in range(len(kinds))]


@pytest.mark.parametrize(("model", "said"), [
    ({"full_every": 2}, "the model has none"), ({"chunked_window": True}, "the model has none"),
    ({"window": 64, "first_full": 9}, "more than layers 4"), ({"window": 64, "full_every": 1}, "full_every"),
    ({"window": 64, "full_every": 2, "kind": "encoder"}, "is for kind decoder"),
    ({"window": 64, "kind": "encoder"}, "sliding-window attention is for kind decoder"),
    ({"moe": {"experts": 4, "top_k": 1}, "kind": "encoder-decoder"}, "a mixture of experts is for kind decoder"),
    ({"parallel_block": True, "kind": "encoder"}, "side by side is for kind decoder")])
def test_windows_that_cannot_be_are_named(model: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        resolve({"name": "t", "cluster": {"topology": "single-h100-80g-sxm"},
                 "model": {"kind": "decoder", "layers": 4, "hidden": 64, "heads": 2, "vocab": 100, **model},
                 "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128}})



def test_a_config_that_sees_points_to_its_language_model(tmp_path: Path) -> None:
    inner = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
             "sliding_window": 1024}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": inner}), encoding="utf-8")
    with pytest.raises(UserError) as error:
        read_config(tmp_path, "config.json")
    assert "text_config" in error.value.faults[0].hint and "gemma3_text" in error.value.faults[0].hint
    (tmp_path / "text.json").write_text(json.dumps(inner), encoding="utf-8")
    fields = read_config(tmp_path, "text.json")
    assert (fields["heads"], fields["kv_heads"], fields["head_dim"], fields["vocab"]) == (8, 4, 256, 262_208)
    assert fields["hidden"] == 2560 and fields["window"] == 1024 and fields["full_every"] == 6


def test_null_undoes_what_a_preset_says() -> None:
    def model(**fields: Any) -> Any:
        return resolve({"name": "n", "cluster": {"topology": "dgx-h100"}, "model": {"preset": "gemma-2-9b", **fields},
                        "training": {"micro_batch": 1, "global_batch": 8, "sequence": 1024,
                                     "precision": "pure-bf16"}}).model
    assert model().window and model(window=None, full_every=None).window is None
    assert model(layers=None).layers == model().layers  # a size that every model has is left out, as anywhere
