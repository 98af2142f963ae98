"""Configs of Hugging Face's families beside the numbers of parameters that their checkpoints have.

Counts: the model cards' or safetensors indices' totals (recalled); biases and norms that a scenario cannot tell apart
are a thousandth of them at most.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sim.errors import UserError
from sim.model import build
from sim.scenario import Scenario, resolve
from sim.software import stack_for

#: By family: a small config, and how many parameters transformers 5.24.0 makes of it (on meta tensors).
SMALL: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "small_configs.json").read_text())
#: Name of the checkpoint: its parameters and its config, without what no field here follows from.
CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "dsv2lite": (15_706_484_224,
        {"model_type": "deepseek_v2", "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
         "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
         "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64,
         "n_shared_experts": 2, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers":
         27, "num_key_value_heads": 16, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim":
         64, "tie_word_embeddings": False, "topk_group": 1, "v_head_dim": 128, "vocab_size": 102400}),
    # embedding, head, a dense block, 45 of experts; its module for a further token (3.7e9) is not among them
    "glm-4.5-air": (106_852_000_000,
        {"model_type": "glm4_moe", "attention_bias": True, "first_k_dense_replace": 1, "head_dim": 128,
         "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 131072,
         "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
         "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8,
         "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "tie_word_embeddings": False, "topk_group": 1,
         "use_qk_norm": False, "vocab_size": 151552}),
    "gpt-oss-20b": (20_914_757_184,
        {"model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
         "hidden_size": 2880, "intermediate_size": 2880, "max_position_embeddings": 131072, "num_attention_heads": 64,
         "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "sliding_window": 128,
         "tie_word_embeddings": False, "vocab_size": 201088}),
    "command-r7b": (8_028_033_024,
        {"model_type": "cohere2", "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size":
         14336, "max_position_embeddings": 8192, "num_attention_heads": 32, "num_hidden_layers": 32,
         "num_key_value_heads": 8, "sliding_window": 4096, "sliding_window_pattern": 4, "vocab_size": 256000}),
    "llama-4-scout-text": (107_769_861_120,
        {"model_type": "llama4_text", "attention_chunk_size": 8192, "head_dim": 128, "hidden_act": "silu",
         "hidden_size": 5120, "interleave_moe_layer_step": 1, "intermediate_size": 8192, "intermediate_size_mlp":
         16384, "max_position_embeddings": 10485760, "num_attention_heads": 40, "num_experts_per_tok": 1,
         "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 16, "tie_word_embeddings": False,
         "vocab_size": 202048}),
    "qwen3-30b-a3b": (30_532_122_624,
        {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu",
         "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
         "mlp_only_layers": [], "moe_intermediate_size": 768, "num_attention_heads": 32, "num_experts": 128,
         "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "sliding_window":
         None, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936}),
    "qwen15-moe-a2.7b": (14_315_784_192,
        {"model_type": "qwen2_moe", "decoder_sparse_step": 1, "hidden_act": "silu", "hidden_size": 2048,
         "intermediate_size": 5632, "max_position_embeddings": 8192, "moe_intermediate_size": 1408,
         "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24,
         "num_key_value_heads": 16, "shared_expert_intermediate_size": 5632, "sliding_window": 32768,
         "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936}),
    "falcon-7b": (6_921_720_704,
        {"model_type": "falcon", "alibi": False, "bias": False, "hidden_size": 4544, "multi_query": True,
         "new_decoder_architecture": False, "num_attention_heads": 71, "num_hidden_layers": 32,
         "parallel_attn": True, "vocab_size": 65024}),
    "starcoder2-7b": (7_173_923_840,
        {"model_type": "starcoder2", "hidden_act": "gelu_pytorch_tanh", "hidden_size": 4608,
         "intermediate_size": 18432, "max_position_embeddings": 16384, "num_attention_heads": 36,
         "num_hidden_layers": 32, "num_key_value_heads": 4, "sliding_window": 4096, "use_bias": True,
         "vocab_size": 49152, "mlp_type": "default"}),
    "starcoder": (15_517_456_384,
        {"model_type": "gpt_bigcode", "activation_function": "gelu_pytorch_tanh", "n_embd": 6144, "n_head": 48,
         "n_inner": 24576, "n_layer": 40, "n_positions": 8192, "multi_query": True, "vocab_size": 49152}),
    "olmo-7b": (6_888_095_744,
        {"model_type": "olmo", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
         "max_position_embeddings": 2048, "num_attention_heads": 32, "num_hidden_layers": 32,
         "num_key_value_heads": 32, "tie_word_embeddings": False, "vocab_size": 50304}),
    "olmo2-7b": (7_298_617_344,
        {"model_type": "olmo2", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
         "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
         "num_key_value_heads": 32, "tie_word_embeddings": False, "vocab_size": 100352}),
    "bloom-7b1": (7_069_016_064,
        {"model_type": "bloom", "n_embed": 4096, "hidden_size": 4096, "n_layer": 30, "num_attention_heads":
         32, "n_head": 32, "vocab_size": 250880}),
    "opt-6.7b": (6_658_473_984,
        {"model_type": "opt", "activation_function": "relu", "ffn_dim": 16384, "hidden_size": 4096,
         "max_position_embeddings": 2048, "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size":
         50272, "word_embed_proj_dim": 4096}),
    "cohere-r": (34_980_831_232,
        {"model_type": "cohere", "hidden_act": "silu", "hidden_size": 8192, "intermediate_size": 22528,
         "max_position_embeddings": 8192, "num_attention_heads": 64, "num_hidden_layers": 40,
         "num_key_value_heads": 64, "vocab_size": 256000}),
    "gemma3-1b": (999_885_952,
        {"model_type": "gemma3_text", "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
         "hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768,
         "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "sliding_window": 512,
         "vocab_size": 262144}),
    "mpt-7b": (6_649_286_656,
        {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "expansion_ratio": 4,
         "max_seq_len": 2048, "no_bias": True, "vocab_size": 50432, "attn_config": {"alibi": True}}),
    "stablelm-3b": (2_795_443_200,
        {"model_type": "stablelm", "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 6912,
         "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
         "num_key_value_heads": 32, "tie_word_embeddings": False, "vocab_size": 50304}),
    "gptj-6b": (6_050_882_784,
        {"model_type": "gptj", "activation_function": "gelu_new", "n_embd": 4096, "n_head": 16, "n_inner":
         None, "n_layer": 28, "n_positions": 2048, "tie_word_embeddings": False, "vocab_size": 50400}),
    "roberta": (124_697_433,
        {"model_type": "roberta", "hidden_act": "gelu", "hidden_size": 768, "intermediate_size": 3072,
         "max_position_embeddings": 514, "num_attention_heads": 12, "num_hidden_layers": 12, "vocab_size":
         50265}),
    "dbrx": (131_596_523_520,
        {"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32768,
         "vocab_size": 100352, "attn_config": {"kv_n_heads": 8, "clip_qkv": 8}, "ffn_config":
         {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}}),
    "glm-4-9b": (9_399_951_360,
        {"model_type": "chatglm", "add_qkv_bias": True, "add_bias_linear": False, "ffn_hidden_size": 13696,
         "hidden_size": 4096, "kv_channels": 128, "multi_query_attention": True, "multi_query_group_num": 2,
         "num_attention_heads": 32, "num_layers": 40, "padded_vocab_size": 151552, "rmsnorm": True,
         "seq_length": 131072, "tie_word_embeddings": False}),
    "chatglm3-6b": (6_243_584_000,
        {"model_type": "chatglm", "add_qkv_bias": True, "add_bias_linear": False, "ffn_hidden_size": 13696,
         "hidden_size": 4096, "kv_channels": 128, "multi_query_attention": True, "multi_query_group_num": 2,
         "num_attention_heads": 32, "num_layers": 28, "padded_vocab_size": 65024, "rmsnorm": True,
         "seq_length": 8192, "tie_word_embeddings": False}),
    "baichuan2-13b": (13_896_668_160,
        {"model_type": "baichuan", "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 13696,
         "model_max_length": 4096, "num_attention_heads": 40, "num_hidden_layers": 40, "tie_word_embeddings":
         False, "vocab_size": 125696}),
    "baichuan2-7b": (7_505_973_248,
        {"model_type": "baichuan", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
         "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
         "tie_word_embeddings": False, "vocab_size": 125696}),
    "internlm2-7b": (7_737_708_544,
        {"model_type": "internlm2", "bias": False, "hidden_act": "silu", "hidden_size": 4096,
         "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
         "num_hidden_layers": 32, "num_key_value_heads": 8, "tie_word_embeddings": False, "vocab_size":
         92544}),
}


def read(config: dict[str, Any], folder: Path) -> Scenario:
    (folder / "config.json").write_text(json.dumps(config))
    return resolve({"name": "read", "cluster": {"topology": "single-h200"}, "model": {"hf": "config.json"},
                    "training": {"micro_batch": 1, "global_batch": 1, "sequence": 512}}, "read", base=folder)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_has_the_parameters_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    count, config = CONFIGS[name]
    scenario = read(config, tmp_path)
    built = build(scenario, stack_for(scenario.software.framework, scenario.software.year), 1)
    assert built.parameters == pytest.approx(count, rel=2e-3)


@pytest.mark.parametrize("family", SMALL)
def test_a_small_config_has_the_parameters_that_transformers_gives_it(family: str, tmp_path: Path) -> None:
    scenario = read(SMALL[family]["config"], tmp_path)
    built = build(scenario, stack_for(scenario.software.framework, scenario.software.year), 1)
    assert built.parameters == pytest.approx(SMALL[family]["parameters"], rel=3e-4)  # biases of a head or router alone


@pytest.mark.parametrize(("name", "change", "words"), [
    ("qwen15-moe-a2.7b", {"mlp_only_layers": [3]}, "mlp_only_layers: blocks without experts"),
    ("qwen15-moe-a2.7b", {"shared_expert_intermediate_size": 5000}, "a shared expert of 5000 beside experts of 1408"),
    ("qwen15-moe-a2.7b", {"moe_intermediate_size": 0}, "moe_intermediate_size: experts of no width"),
    ("opt-6.7b", {"word_embed_proj_dim": 512}, "word_embed_proj_dim: embeddings of another width"),
    ("starcoder2-7b", {"mlp_type": "gated"}, "mlp_type: a gated MLP"),
    ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list: linear attention"),
    ("seed_oss", {"attention_out_bias": True}, "attention_out_bias: a bias of the output alone"),
    ("ernie4_5_moe", {"moe_layer_end_index": 3}, "moe_layer_end_index: blocks without experts behind")])
def test_what_cannot_be_said_is_refused(name: str, change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as found:
        read({**(CONFIGS[name][1] if name in CONFIGS else SMALL[name]["config"]), **change}, tmp_path)
    assert words in str(found.value) and "in place of hf" in str(found.value)


@pytest.mark.parametrize(("name", "change", "words"), [
    ("minimax_m2", {"attn_type_list": 5}, "attn_type_list: linear attention cannot"),
    ("minimax_m2", {"attn_type_list": [[1]]}, "attn_type_list: linear attention cannot"),
    ("dbrx", {"attn_config": 5}, "attn_config: expected an object, not 5"),
    ("exaone4", {"sliding_window_pattern": [1]}, "sliding_window_pattern: expected a whole number")])
def test_values_of_another_type_are_faults_at_their_key(name: str, change: dict[str, Any], words: str,
                                                        tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(f"config.json:1: {words}")):
        read({**(CONFIGS[name][1] if name in CONFIGS else SMALL[name]["config"]), **change}, tmp_path)


def test_falcons_differ_in_their_heads_of_keys(tmp_path: Path) -> None:
    small = CONFIGS["falcon-7b"][1]
    large = {**small, "hidden_size": 8192, "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8,
             "new_decoder_architecture": True}
    assert read(small, tmp_path).model.kv_heads == 1
    assert read(large, tmp_path).model.kv_heads == 8


@pytest.mark.parametrize(("shared", "fields"), [(True, (1, "parts", "gelu")), (False, (48, "heads", "gelu"))])
def test_gpt_bigcode_is_not_gpt_2s_code(shared: bool, fields: tuple[int, str, str], tmp_path: Path) -> None:
    """A linear layer of its own layout, and PyTorch's GELU where the config names that."""
    model = read({**CONFIGS["starcoder"][1], "multi_query": shared}, tmp_path).model
    assert (model.kv_heads, model.fused_qkv, model.activation) == fields
