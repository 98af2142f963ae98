"""Presets by the names that models have on Hugging Face's hub."""

from __future__ import annotations

import pytest

from sim.scenario.named.hub import preset_of


@pytest.mark.parametrize(("name", "preset"), [
    ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"), ("meta-llama/Llama-3.1-70B", "llama-3.1-70b"),
    ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.3-70b"), ("NousResearch/Llama-2-7b-chat-hf", "llama-2-7b"),
    ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b"), ("Qwen/Qwen2-7B", "qwen2.5-7b"), ("google-t5/t5-base", "t5-base"),
    ("mistralai/Mistral-7B-Instruct-v0.2", "mistral-7b"), ("google/gemma-2-9b-it", "gemma-2-9b"),
    ("casperhansen/llama-3-70b-fp16", "llama-3-70b"), ("bert-base", "bert-base"), ("openai-community/gpt2/", "gpt2"),
    ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini"), ("nobody/llama-9-8b", None),
    ("deepseek-ai/DeepSeek-R1", "deepseek-v3"), ("google/vit-huge", None), ("", None), ("base", None),
])
def test_names_of_the_hub(name: str, preset: str | None) -> None:
    assert preset_of(name) == preset
