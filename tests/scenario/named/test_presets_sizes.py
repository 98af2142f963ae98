"""Presets against the parameter counts their authors or model cards publish; Hugging Face configs against presets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.scenario import Scenario, resolve
from sim.scenario.named.layer_table import read_table
from sim.scenario.named.presets import preset, preset_names, preset_source


def resolved(model: dict[str, Any], base: Path | str = ".") -> Scenario:
    return resolve(
        {
            "name": "t",
            "cluster": {"topology": "single-h100-80g-sxm"},
            "model": model,
            "training": {"micro_batch": 1, "global_batch": 1, "sequence": 512},
        },
        base=base,
    )


def parameters(m: Any) -> int:
    """Closed form, written out independently of the model room."""
    bias, norm = int(m.bias), m.hidden * (2 if m.norm == "layernorm" and m.bias else 1)
    width, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    if m.mla:
        a = m.mla
        qk = a.nope_dim + a.rope_dim
        attention = (
            (m.hidden * a.q_rank + a.q_rank + a.q_rank * m.heads * qk if a.q_rank else m.hidden * m.heads * qk)
            + m.hidden * (a.kv_rank + a.rope_dim)
            + a.kv_rank
            + a.kv_rank * m.heads * (a.nope_dim + a.value_dim)
            + m.heads * a.value_dim * m.hidden
        )
    else:
        attention = m.hidden * (2 * width + 2 * kv) + bias * (width + 2 * kv + m.hidden)
    matrices = 3 if m.gated_mlp else 2

    def mlp(inner: int) -> int:
        return matrices * m.hidden * inner + bias * (inner * (matrices - 1) + m.hidden)

    dense = m.layers
    total = m.layers * (attention + (norm if m.preset == "palm-540b" else 2 * norm))
    if m.moe:
        dense = m.layers - len(range(m.moe.first_dense + m.moe.every - 1, m.layers, m.moe.every))
        experts = (m.moe.experts + m.moe.shared_experts) * mlp(m.moe.expert_ffn) + m.hidden * m.moe.experts
        total += (m.layers - dense) * experts
    total += dense * mlp(m.ffn)
    if m.kind == "encoder-decoder":
        total += m.decoder_layers * (2 * attention + mlp(m.ffn) + 3 * norm) + norm + 2 * 32 * m.heads
    positions = m.max_positions * m.hidden if m.positions == "learned" else 0
    return total + norm + positions + m.vocab * m.hidden * (1 if m.tied_embeddings else 2)


#: Model cards and papers; exact where the count is printed to the last digit.
EXACT = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "mixtral-8x7b": 46_702_792_704,
    "mistral-7b": 7_241_732_096,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "phi-3-mini": 3_821_079_552,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "flan-t5-small": 76_961_152,
    "flan-t5-base": 247_577_856,
    "flan-t5-large": 783_150_080,
    "flan-t5-xl": 2_849_757_184,
    "flan-t5-xxl": 11_135_332_352,
    "t0-3b": 2_849_757_184,
    "mt5-small": 300_176_768,
    "mt5-base": 582_401_280,
    "mt5-large": 1_229_581_312,
    "mt5-xl": 3_742_619_648,
    "mt5-xxl": 12_921_057_280,
    "mt0-xxl": 12_921_057_280,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.3-70b": 70_553_706_496,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
    "yi-6b": 6_061_035_520,
    "yi-34b": 34_388_917_248,
    "internlm2-7b": 7_737_708_544,
    "internlm2-20b": 19_861_149_696,
    "granite-3-8b": 8_170_848_256,
    "deepseek-llm-7b": 6_910_365_696,
    "deepseek-coder-33b": 33_342_991_360,
    "ministral-8b": 8_019_808_256,
    "mistral-large-123b": 122_610_069_504,
    "phi-3-medium": 13_960_238_080,
    "dbrx": 131_596_523_520,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
    "opt-125m": 125_239_296,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
}
#: To 1%: rounded in the source, or with a pooler, token types or a norm that the closed form lacks.
ROUNDED = {
    "llama-3.2-3b": 3_212_749_824,
    "mixtral-8x22b": 140_620_634_112,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    "kimi-k2": 1.03e12,
    "llama-4-scout": 108e9,
    "llama-4-maverick": 400e9,
    "gpt-oss-20b": 20.91e9,
    "gpt-oss-120b": 116.83e9,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3.884e9,
    "gemma-3-12b": 11.771e9,
    "gemma-3-27b": 27.016e9,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "phi-4": 14_659_507_200,
    "olmo-2-7b": 7_298_617_344,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "phi-2": 2_779_683_840,
    "gpt3-125m": 0.125e9,
    "gpt3-350m": 0.356e9,
    "gpt3-760m": 0.76e9,
    "gpt3-1.3b": 1.314e9,
    "gpt3-2.7b": 2.65e9,
    "gpt3-6.7b": 6.66e9,
    "gpt3-13b": 12.85e9,
    "gpt3-175b": 174.6e9,
    "megatron-1.2b": 1.215e9,
    "megatron-2.5b": 2.49e9,
    "megatron-4.2b": 4.195e9,
    "megatron-8.3b": 8.315e9,
    "megatron-18b": 18.4e9,
    "megatron-22b": 22.07e9,
    "megatron-39b": 39.1e9,
    "megatron-145b": 145.6e9,
    "megatron-310b": 310.1e9,
    "megatron-530b": 529.6e9,
    "megatron-1t": 1008e9,
    "mpt-125m": 125.3e6,
    "mpt-350m": 355.9e6,
    "mpt-760m": 760e6,
    "mpt-1b": 1.315e9,
    "mpt-3b": 2.65e9,
    "mpt-7b": 6.66e9,
    "mpt-13b": 12.85e9,
    "mpt-30b": 29.98e9,
    "mpt-70b": 64.9e9,
    "deepseek-v3": 671e9,
    "t5-611m": 611.8e6,
    "t5-2.28b": 2280.6e6,
    "bert-base": 109.5e6,
    "bert-large": 335.1e6,
    "bloom-176b": 176.25e9,
    "opt-175b": 174.6e9,
    "mt-nlg-530b": 530e9,
    "palm-540b": 540.35e9,
    "gpt-neox-20b": 20.55e9,
    "deepseek-llm-67b": 67.4e9,
    "seed-oss-36b": 36_151_104_512,
    "qwen3-coder-480b-a35b": 480_154_875_392,
    "glm-4.5": 355e9,
    "glm-4.5-air": 106e9,
    "minimax-m2": 229e9,
    "grok-1": 314e9,
    "phi-3.5-moe": 41_873_153_344,
    "olmoe-1b-7b": 6_919_161_856,
    "opt-66b": 65.72e9,
    "bloom-560m": 559_214_592,
    "bloom-1b1": 1_065_314_304,
    "bloom-1b7": 1_722_408_960,
    "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064,
}


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_its_published_size(name: str) -> None:
    m = resolved({"preset": name}).model
    assert preset_source(name)
    if name == "resnet-50":
        rows = read_table(Path(m.table or ""), "resnet-50")
        assert sum(r.parameters for r in rows) == 25_557_032 and m.layers == len(rows)  # torchvision's count
        assert sum(r.forward_flops for r in rows) == pytest.approx(2 * 4.089e9, rel=1e-3)  # 4.09 GMAC
    elif name in EXACT:
        assert parameters(m) == EXACT[name]
    else:
        assert parameters(m) == pytest.approx(ROUNDED[name], rel=0.012)


def test_mpt_presets_follow_llm_foundrys_formula() -> None:
    for name in (n for n in preset_names() if n.startswith("mpt-")):
        m = resolved({"preset": name}).model
        d, layers = m.hidden, m.layers
        assert parameters(m) == layers * (12 * d * d + 13 * d) + m.vocab * d + m.max_positions * d + 2 * d
        assert (m.vocab, m.ffn, m.tied_embeddings, m.dropout) == (50368, 4 * d, True, 0.0)


def test_spec_names_are_all_there() -> None:
    wanted = (
        "gpt2 gpt2-medium gpt2-large gpt2-xl gpt3-{125m,350m,760m,1.3b,2.7b,6.7b,13b,175b} "
        "megatron-{1.2b,2.5b,4.2b,8.3b,18b,22b,39b,145b,310b,530b,1t} mpt-{125m,350m,760m,1b,3b,7b,13b,30b,70b} "
        "llama-{7b,13b,33b,65b} llama-2-{7b,13b,70b} llama-3-{8b,70b,405b} mixtral-8x7b deepseek-v3 "
        "t5-{611m,2.28b,11b,small,base,large,3b} bert-{base,large} bloom-176b opt-175b mt-nlg-530b palm-540b "
        "gpt-neox-20b resnet-50"
    )
    for word in wanted.split():
        head, _, sizes = word.partition("{")
        for size in sizes.rstrip("}").split(","):
            assert preset(head + size) is not None, head + size


def test_fields_beside_a_preset_override_it() -> None:
    m = resolved({"preset": "llama-2-7b", "layers": 3, "kv_heads": 4}).model
    assert (m.layers, m.kv_heads, m.hidden, m.preset) == (3, 4, 4096, "llama-2-7b")
    moe = resolved({"preset": "deepseek-v3", "moe": {"top_k": 4}}).model.moe
    assert moe is not None and (moe.top_k, moe.experts, moe.expert_ffn) == (4, 256, 2048)


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
}
CONFIGS = {
    "llama-2-7b": LLAMA,
    "llama-3-8b": {
        **LLAMA,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
    "mixtral-8x7b": {
        **LLAMA,
        "model_type": "mixtral",
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "vocab_size": 50257,
        "n_positions": 1024,
        "activation_function": "gelu_new",
        "n_inner": None,
    },
    "gpt-neox-20b": {
        **LLAMA,
        "model_type": "gpt_neox",
        "num_hidden_layers": 44,
        "hidden_size": 6144,
        "num_attention_heads": 64,
        "intermediate_size": 24576,
        "vocab_size": 50432,
        "hidden_act": "gelu_fast",
        "max_position_embeddings": 2048,
    },
    "bert-large": {
        **LLAMA,
        "model_type": "bert",
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "vocab_size": 30522,
        "intermediate_size": 4096,
        "max_position_embeddings": 512,
        "hidden_act": "gelu",
    },
    "t5-11b": {
        "model_type": "t5",
        "d_model": 1024,
        "d_kv": 128,
        "d_ff": 65536,
        "num_layers": 24,
        "num_heads": 128,
        "vocab_size": 32128,
        "n_positions": 512,
    },
    "deepseek-v3": {
        **LLAMA,
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "vocab_size": 129280,
        "num_attention_heads": 128,
        "intermediate_size": 18432,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "num_key_value_heads": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
    },
    "kimi-k2": {
        **LLAMA,
        "model_type": "kimi_k2",
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "vocab_size": 163840,
        "num_attention_heads": 64,
        "intermediate_size": 18432,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "num_key_value_heads": 64,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 384,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
    },
    "mt5-small": {
        "model_type": "mt5",
        "num_layers": 8,
        "num_decoder_layers": 8,
        "d_model": 512,
        "vocab_size": 250112,
        "num_heads": 6,
        "d_kv": 64,
        "d_ff": 1024,
    },
    "starcoder2-3b": {
        "model_type": "starcoder2",
        "num_hidden_layers": 30,
        "hidden_size": 3072,
        "vocab_size": 49152,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "intermediate_size": 12288,
        "max_position_embeddings": 16384,
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
        "sliding_window": 4096,
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_hugging_face_config_reads_as_the_preset(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    read = resolved({"hf": "config.json"}, tmp_path).model
    known = resolved({"preset": name}).model
    assert read.model_copy(update={"hf": None, "preset": name}) == known


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({**LLAMA, "model_type": "mistral", "sliding_window": 4096}, {"window": 4096, "gated_mlp": True}),
        (
            {**LLAMA, "model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False},
            {"window": None, "bias": False},
        ),
        (
            {**LLAMA, "model_type": "gemma", "head_dim": 256, "hidden_act": "gelu_pytorch_tanh"},
            {"head_dim": 256, "activation": "gelu", "tied_embeddings": True, "gated_mlp": True, "norm": "rmsnorm-fp32",
             "block_norms": "input"},
        ),
        ({**LLAMA, "model_type": "qwen3"}, {"qk_norm": "head", "norm": "rmsnorm", "block_norms": "input"}),
        (
            {**LLAMA, "model_type": "olmo2"},
            {"qk_norm": "whole", "norm": "rmsnorm-fp32", "block_norms": "output"},
        ),
        (
            {**LLAMA, "model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh", "final_logit_softcapping": None},
            {"block_norms": "both", "qk_norm": None, "score_softcap": True, "logit_softcap": False},
        ),
        (
            {**LLAMA, "model_type": "gemma3_text", "hidden_act": "gelu_pytorch_tanh"},
            {"block_norms": "both", "qk_norm": "head", "score_softcap": False, "norm": "rmsnorm-fp32"},
        ),
        ({**LLAMA, "model_type": "stablelm", "qk_layernorm": True}, {"qk_norm": "head", "norm": "layernorm"}),
        (
            {**LLAMA, "model_type": "phi", "hidden_act": "gelu_new"},
            {"parallel_block": True, "norm": "layernorm", "bias": True},
        ),
    ],
)
def test_hugging_face_families(config: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    m = resolved({"hf": "."}, tmp_path).model
    assert {name: getattr(m, name) for name in expected} == expected
