"""What is said of `attention: sdpa` where it is no flash kernel, and of attention that is counted in full."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sim.api import run
from sim.report.terminal.head import described
from sim.report.warned.asked import in_vain
from sim.report.warned.attention import third_in_vain
from sim.scenario import Scenario, resolve


def said(gpu: str, precision: str, attention: str = "sdpa", document: int | None = None, **model: Any) -> list[str]:
    return [text for text in in_vain(resolve({
        "name": "x", "cluster": {"topology": f"single-{gpu}"},
        "model": {"preset": "llama-3-8b", "layers": 2, **model},
        "training": {"micro_batch": 1, "global_batch": 1, "sequence": 8192, "precision": precision,
                     "attention": attention, "document": document},
        "software": {"framework": "pytorch", "year": 2026, "modules": "transformers"}}))
        if text.startswith("attention")]


@pytest.mark.parametrize(("gpu", "precision", "model", "words"), [
    ("a100-80g-sxm", "pure-bf16", {"window": 4096}, "the window of 4096 tokens as a mask of 134 MB: the memory-eff"),
    ("h100-80g-sxm", "pure-bf16", {"window": 4096}, "as a mask of 134 MB: cuDNN's kernel runs"),
    ("v100-32g-sxm", "pure-fp16", {}, r"materialises the scores \(8.59 GB a block\).*this GPU has no flash kernel"),
    ("v100-32g-sxm", "pure-fp16", {"kv_heads": 32}, "memory-efficient kernel: this GPU has no flash kernel"),
    ("a100-80g-sxm", "fp32", {}, "materialises the scores.*fp32, and heads of keys that are shared"),
    ("a100-80g-sxm", "fp32", {"kv_heads": 32}, "memory-efficient kernel: fp32 has no flash kernel"),
    ("a100-80g-sxm", "pure-bf16", {"head_dim": 320}, "memory-efficient kernel: heads of 320 elements"),
    ("a100-80g-sxm", "pure-bf16", {"kv_heads": 1, "fused_qkv": "groups"},
     r"causality \(Falcon's.*no fused kernel takes it, the scores are mat"),
])
def test_what_runs_instead_is_said(gpu: str, precision: str, model: dict[str, Any], words: str) -> None:
    (text,) = said(gpu, precision, **model)
    assert re.search(words, text), text


def test_flash_kernels_need_no_word() -> None:
    assert said("a100-80g-sxm", "pure-bf16") == said("h100-80g-sxm", "pure-bf16") == []
    assert said("a100-80g-sxm", "pure-bf16", "flash", window=4096) == []


@pytest.mark.parametrize(("attention", "precision", "words"), [
    ("sdpa", "pure-bf16", "gets documents as a mask of 134 MB: the memory-efficient kernel runs and skips nothing"),
    ("eager", "pure-bf16", "document changes neither time nor FLOPs"), ("flash", "fp32", "document changes neither"),
    ("flash", "pure-bf16", "")])
def test_documents_that_save_nothing_are_said(attention: str, precision: str, words: str) -> None:
    found = said("a100-80g-sxm", precision, attention, document=500)
    assert len(found) == bool(words) and all(words in text for text in found)
    assert not [text for text in said("a100-80g-sxm", precision, attention, document=8192) if "document" in text]


@pytest.mark.parametrize(("document", "told"), [(512, True), (4096, True), (8000, False), (None, False)])
def test_what_utilization_counts_of_documents_is_said(document: int | None, told: bool) -> None:
    """A tool that counts whole sequences says what the same step without documents would have, by its FLOPs."""
    def made(document: int | None) -> Scenario:
        return resolve({
            "name": "x", "cluster": {"topology": "dgx-h100", "gpus_per_node": 1},
            "model": {"kind": "decoder", "layers": 2, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 1024,
                      "bias": False, "tied_embeddings": False},
            "training": {"micro_batch": 1, "global_batch": 1, "sequence": 8192, "precision": "pure-bf16",
                         "attention": "flash", "document": document}})
    result, whole = run(made(document)), run(made(None))
    found = [text for text in result.warnings if "within documents" in text]
    assert len(found) == told
    assert not found or f"MFU is {100 * result.mfu * whole.model_flops / result.model_flops:.1f}%" in found[0]


@pytest.mark.parametrize(("document", "words"), [
    (500, "sequences of 8,192 tokens in documents of 500 per step"), (None, "sequences of 8,192 tokens per step"),
    ({"mean": 500, "spread": 1.0}, "in documents of 500 (a mean token's has 1,000) per step")])
def test_the_head_tells_documents(document: Any, words: str) -> None:
    of = resolve({"name": "x", "cluster": {"topology": "dgx-h100"}, "model": {"preset": "llama-3-8b"},
                  "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 8192, "document": document},
                  "parallel": {"strategy": "fsdp"}})
    assert words in " ".join(str(line) for line in described(of, "h100"))


@pytest.mark.parametrize(("sequence", "told"), [(2048, False), (16384, True)])
def test_attention_counted_in_full_is_said_where_it_is_much_of_the_step(sequence: int, told: bool) -> None:
    result = run(resolve({
        "name": "x", "cluster": {"topology": "dgx-h100", "gpus_per_node": 1},
        "model": {"kind": "decoder", "layers": 2, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 1024,
                  "bias": False, "tied_embeddings": False},
        "training": {"micro_batch": 1, "global_batch": 1, "sequence": sequence, "precision": "pure-bf16",
                     "attention": "flash"}}))
    # of a token and block: 12 h² products at 6 FLOPs, and 14 s h of attention, half of them causal; a head of 1024 rows
    linear, attention = 6 * (2 * 12 * 1024**2 + 1024**2), 2 * 14 * sequence * 1024
    real = 100 * result.mfu * (1 - attention / 2 / (linear + attention))
    found = [text for text in result.warnings if text.startswith("mfu:")]
    assert (len(found) == 1) == told
    assert not found or f"MFU is {real:.1f}%" in found[0]


@pytest.mark.parametrize(("topology", "framework", "attention", "release", "said"), [
    ("dgx-h100", "pytorch", "flash", "3.0", ""), ("dgx-h100", "pytorch", "flash", "2.8", ""),
    ("dgx-h100", "pytorch", "sdpa", "3.0", "training.attention is sdpa, not flash"),
    ("dgx-h100", "torchtitan", "flash", "3.0", "torchtitan is predicted to call its own kernels"),
    ("dgx-a100-80g", "pytorch", "flash", "3.0", "Hopper's; a100-80g-sxm runs FlashAttention-2's")])
def test_flash_attention_3_is_said_to_change_nothing_where_it_does_not_run(
        topology: str, framework: str, attention: str, release: str, said: str) -> None:
    told = third_in_vain(resolve({
        "name": "x", "cluster": {"topology": topology}, "model": {"preset": "gpt2"},
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128, "attention": attention},
        "software": {"framework": framework, "year": 2025, "versions": {"flash_attn": release}}}))
    assert len(told) == bool(said) and all(said in text for text in told)
