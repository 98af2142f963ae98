"""Encoders, encoder-decoders, experts and tables against what real PyTorch does, and by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import UserError
from sim.model import Architecture, Layer, build
from sim.model.eager import KINDS, layer_profile
from sim.scenario import resolve
from sim.software import stack_for

DATA = Path(__file__).parent / "data"
T5 = {"kind": "encoder-decoder", "layers": 2, "decoder_layers": 3, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 1000,
      "activation": "relu", "norm": "rmsnorm", "bias": False}
BERT = {"kind": "encoder", "layers": 2, "hidden": 64, "heads": 4, "vocab": 1000, "max_positions": 128}
MIXTURE = {"kind": "decoder", "layers": 4, "hidden": 64, "heads": 4, "ffn": 96, "vocab": 1000, "gated_mlp": True,
           "positions": "rotary", "norm": "rmsnorm", "bias": False, "tied_embeddings": False,
           "moe": {"experts": 8, "top_k": 2, "expert_ffn": 32}}


def cases(name: str) -> list[Any]:
    rows = yaml.safe_load((DATA / f"{name}.yaml").read_text())["cases"]
    return [pytest.param(row, id=row["id"]) for row in rows]


def made(model: dict[str, Any], modules: str = "plain", **training: Any) -> Architecture:
    fields = {"micro_batch": 2, "sequence": 128, "precision": "pure-bf16"} | training
    scenario = resolve({"name": "small", "cluster": {"topology": "single-a100-80g-sxm"}, "model": model,
                        "training": fields | {"global_batch": fields["micro_batch"]},
                        "software": {"framework": "pytorch", "year": 2026, "modules": modules}})
    return build(scenario, stack_for("pytorch", 2026, modules=modules), scenario.training.micro_batch)


def of_row(row: dict[str, Any]) -> Architecture:
    return made(row["model"], row["modules"], **row["training"])


def kept(layer: Layer) -> int:
    """Bytes a layer keeps, every tensor in 512-byte blocks as the tracker counts them."""
    return sum(math.ceil(t.size_bytes / 512) * 512 for t in layer.saved)


@pytest.mark.parametrize("row", cases("kinds_retained"))
def test_blocks_keep_what_autograd_keeps(row: dict[str, Any]) -> None:
    architecture, measured = of_row(row), row["measured"]
    blocks = [layer for layer in architecture.stack if layer.kind == "block"]
    stacks = [blocks[i:i + 4] for i in range(0, len(blocks), 4)]
    assert architecture.parameters == measured["parameters"]
    assert [kept(stack[2]) for stack in stacks] == measured["middle_blocks"]
    if "first_blocks" in measured:
        assert [kept(stack[0]) for stack in stacks] == measured["first_blocks"]


@pytest.mark.parametrize("row", cases("experts_flops"))
def test_flops_of_experts_equal_pytorchs(row: dict[str, Any]) -> None:
    architecture, measured = of_row(row), row["measured"]
    assert architecture.parameters == measured["parameters"]
    assert architecture.forward_flops == measured["forward_flops"]
    assert architecture.backward_flops == measured["backward_flops_with_recompute"]


@pytest.mark.parametrize(("preset", "parameters"), [
    # as loaded by Hugging Face; what a preset leaves out is in its source's line of models.yaml
    ("bert-base", 109_514_298), ("bert-large", 335_174_458), ("t5-small", 60_506_624), ("t5-base", 222_903_552),
    ("t5-large", 737_668_096), ("t5-3b", 2_851_598_336), ("t5-11b", 11_307_321_344), ("mixtral-8x7b", 46_702_792_704),
    ("deepseek-v3", 671_026_404_352), ("mistral-7b", 7_241_732_096), ("gemma-2b", 2_506_172_416),
    ("gemma-7b", 8_537_680_896), ("phi-3-mini", 3_821_079_552), ("qwen2.5-7b", 7_615_616_512),
    ("qwen3-8b", 8_190_735_360), ("phi-2", 2_779_683_840 - 51_200), ("resnet-50", 25_557_032),
    ("llama-3.2-3b", 3_212_749_824), ("mixtral-8x22b", 140_620_634_112), ("deepseek-v2", 235_741_434_880),
    ("deepseek-v2-lite", 15_706_484_224), ("mistral-nemo-12b", 12_247_782_400), ("mistral-small-24b", 23_572_403_200),
    ("phi-4", 14_659_507_200), ("olmo-2-7b", 7_298_617_344),
    ("gemma-2-2b", 2_614_341_888), ("gemma-2-9b", 9_241_705_984),
    ("gemma-2-27b", 27_227_128_320), ("gemma-3-1b", 999_885_952),
    ("qwen2.5-1.5b", 1_543_714_304), ("qwen2.5-3b", 3_085_938_688),
    ("qwen2.5-14b", 14_770_033_664), ("qwen2.5-32b", 32_763_876_352),
    ("qwen3-0.6b", 596_049_920), ("qwen3-1.7b", 1_720_574_976),
    ("qwen3-4b", 4_022_468_096), ("qwen3-14b", 14_768_307_200),
    ("qwen3-32b", 32_762_123_264), ("qwen3-30b-a3b", 30_532_122_624),
    ("qwen3-235b-a22b", 235_093_634_560),
])
def test_presets_have_the_parameters_of_the_published_models(preset: str, parameters: int) -> None:
    sequence = {} if preset == "resnet-50" else {"sequence": 128}
    scenario = resolve({"name": "x", "cluster": {"topology": "single-a100-80g-sxm"}, "model": {"preset": preset},
                        "training": {"micro_batch": 1, "global_batch": 1} | sequence})
    assert build(scenario, stack_for("pytorch"), 1).parameters == parameters


@pytest.mark.parametrize(("preset", "parameters"), [  # as papers print them; of models that see, without that part
    ("kimi-k2", 1.03e12), ("llama-4-scout", 108e9), ("llama-4-maverick", 400e9), ("gpt-oss-20b", 20.91e9),
    ("gpt-oss-120b", 116.83e9), ("gemma-3-4b", 0.675e9 + 3.209e9), ("gemma-3-12b", 1.012e9 + 10.759e9),
    ("gemma-3-27b", 1.416e9 + 25.6e9),
])
def test_presets_have_the_parameters_that_are_printed(preset: str, parameters: float) -> None:
    scenario = resolve({"name": "x", "cluster": {"topology": "single-a100-80g-sxm"}, "model": {"preset": preset},
                        "training": {"micro_batch": 1, "global_batch": 1, "sequence": 128}})
    assert build(scenario, stack_for("pytorch"), 1).parameters == pytest.approx(parameters, rel=0.005)


# ------------------------------------------------------------------------------------------------ encoder-decoders
@pytest.mark.parametrize("modules", ["plain", "transformers", "megatron"])
def test_an_encoder_decoder_is_two_rows_of_blocks_with_a_bridge(modules: str) -> None:
    architecture = made(T5, modules)
    assert architecture.names == ("embedding", "encoder0", "encoder1", "bridge", "decoder0", "decoder1", "decoder2",
                                  "head")
    assert architecture.block_numbers == (0, 1, 2, 0, 3, 4, 5, 0)
    bare, table, encoder = 4 * 64**2 + 2 * 64 * 128 + 2 * 64, 32 * 4, 1000 * 64
    decoder = bare + 4 * 64**2 + 64
    assert [layer.numel for layer in architecture.stack] == [
        encoder, bare + table, bare, 64, decoder + table, decoder, decoder, 64]
    assert architecture.stack[5].operators is architecture.stack[6].operators
    assert [layer.program.layer for layer in architecture.stack if layer.program is not None] == [
        "embedding", "first block", "last block", "bridge", "first block", "block", "last block", "head"]


def test_gradients_of_what_all_blocks_read_begin_with_the_last() -> None:
    """The decoder's: those of the biases of 4 heads and of the encoder's output are there when its last block is done:
    2 x 128 tokens of 64 and 4 x 64 x 64 pairs, of 2 bytes. The block before has no more than it found."""
    stack = made(T5, "transformers", sequence=128, decoder_sequence=64).stack
    before, last = (layer_profile(stack[place], "none", True).backward.net for place in (5, 6))
    workspace = KINDS.index("workspace")
    assert last[workspace] - before[workspace] == 2 * 128 * 64 * 2 + 4 * 64 * 64 * 2


def test_every_parameter_has_one_gradient() -> None:
    for model in (T5, T5 | {"tied_embeddings": False}, BERT, MIXTURE):
        for modules in ("plain", "transformers"):
            for layer in made(model, modules).stack:
                assert sorted(p.name for p in layer.gradient_order) == sorted(p.name for p in layer.parameters)


def test_cross_attention_reads_the_encoder_s_tokens() -> None:
    def cross(sequence: int, decoder_sequence: int) -> Any:
        block = made(T5, sequence=sequence, decoder_sequence=decoder_sequence).stack[4]
        return [op for op in block.operators if op.name == "attention"][1].forward[-1]
    kernel = cross(256, 64)
    assert kernel.shape == (2, 4, 4, 64, 256, 16)
    assert kernel.flops == 4 * 2 * 64 * 256 * 64
    assert cross(64, 64).flops == kernel.flops / 4


def test_a_bias_of_the_scores_takes_the_efficient_kernel_which_skips_nothing() -> None:
    for layer in made(T5).stack:
        for op in layer.operators:
            for k in (*op.forward, *op.backward):
                assert k.op != "attention" or (k.kernel, k.causal) == ("efficient", False)


@given(batch=st.integers(1, 4), sequence=st.sampled_from([64, 128, 512]), decoder=st.sampled_from([64, 128, 256]))
@settings(max_examples=25, deadline=None)
def test_flops_of_an_encoder_decoder_by_formula(batch: int, sequence: int, decoder: int) -> None:
    architecture = made(T5, micro_batch=batch, sequence=sequence, decoder_sequence=decoder)
    square, mlp = 64 * 64, 2 * 64 * 128
    products = 2 * batch * (2 * sequence * (4 * square + mlp) + 3 * decoder * (6 * square + mlp)
                            + 3 * sequence * 2 * square + decoder * 64 * 1000)
    scores = 4 * 64 * batch * (2 * sequence**2 + 3 * decoder**2 + 3 * decoder * sequence)
    assert architecture.forward_flops == products + scores


# ------------------------------------------------------------------------------------------------ encoders
def test_predicted_tokens_shrink_the_head_only() -> None:
    every, few = made(BERT), made(BERT, predicted_tokens=20)
    assert every.stack[:-1] == few.stack[:-1]
    head = 2 * 2 * (64 * 64 + 64 * 1000)
    assert every.forward_flops - few.forward_flops == head * (128 - 20)


def test_an_encoder_attends_both_ways_and_is_post_norm() -> None:
    block = made(BERT).stack[1]
    assert [op.name for op in block.operators][-1] == "norm2"
    assert block.operators[-1].recomputed  # its statistics are kept, so early stop comes after it
    assert not any(k.causal for op in block.operators for k in op.forward)


# ------------------------------------------------------------------------------------------------ experts
def test_flops_follow_the_routed_tokens_and_parameters_the_experts() -> None:
    two, four = made(MIXTURE), made(MIXTURE | {"moe": {"experts": 8, "top_k": 4, "expert_ffn": 32}})
    assert two.parameters == four.parameters
    tokens, one_expert = 2 * 128, 3 * 64 * 32
    assert four.forward_flops - two.forward_flops == 4 * 2 * tokens * 2 * one_expert
    more = made(MIXTURE | {"moe": {"experts": 16, "top_k": 2, "expert_ffn": 32}})
    assert more.parameters - two.parameters == 4 * 8 * (one_expert + 64)
    assert more.forward_flops - two.forward_flops == 4 * 2 * tokens * 8 * 64  # the router's columns


def test_a_few_tokens_never_make_more_work_than_is_routed() -> None:
    architecture = made(MIXTURE, micro_batch=1, sequence=3)
    up = next(op for op in architecture.stack[1].operators if op.name == "up")
    assert sum(k.flops for k in up.forward) == 2 * (3 * 2) * 2 * 64 * 32


def test_rows_differ_from_expert_to_expert_unless_each_is_padded_to_its_capacity() -> None:
    """A weight gradient sums over more or fewer rows, in tiles of its own size."""
    def differing(**moe: Any) -> set[str]:
        found = made(MIXTURE | {"moe": {"experts": 8, "top_k": 2, "expert_ffn": 32, **moe}})
        experts = [op for op in found.stack[1].operators if op.name in ("up", "down")]
        return {k.variant for op in experts for k in (*op.forward, *op.backward) if k.kernel == "uneven"}
    assert differing() == differing(capacity=1.25, padded=False) == {"tn", "nn"}
    assert differing(capacity=1.25) == set()


def test_one_block_of_every_so_many_is_a_mixture_after_the_dense_ones() -> None:
    moe = {"experts": 8, "top_k": 2, "expert_ffn": 32, "every": 2, "first_dense": 2}
    stack = made(MIXTURE | {"layers": 6, "moe": moe}).stack[1:-1]
    mixtures = [any(op.name == "router" for op in layer.operators) for layer in stack]
    assert mixtures == [False, False, False, True, False, True]


def test_shared_experts_see_every_token() -> None:
    shared = made(MIXTURE | {"moe": {"experts": 8, "top_k": 2, "expert_ffn": 32, "shared_experts": 2}})
    routed = made(MIXTURE)
    assert shared.parameters - routed.parameters == 4 * 3 * 64 * 64
    assert shared.forward_flops - routed.forward_flops == 4 * 2 * 256 * 3 * 64 * 64


# ------------------------------------------------------------------------------------------------ tables
TABLE = """name,parameters,forward_flops,activation_bytes,output_bytes
stem,152,2304,256,128
pool,0,0,0,32
fc,90,160,0,40
"""


def table(tmp_path: Path, **training: Any) -> Architecture:
    (tmp_path / "layers.csv").write_text(TABLE)
    fields: dict[str, Any] = {"micro_batch": 3, "sequence": 1, "precision": "fp32"} | training
    return made({"kind": "layers", "table": str(tmp_path / "layers.csv")}, **fields)


def test_a_table_s_rows_become_layers_with_their_sizes(tmp_path: Path) -> None:
    architecture = table(tmp_path)
    assert architecture.names == ("stem", "pool", "fc")
    assert [layer.kind for layer in architecture.stack] == ["embedding", "block", "head"]
    assert [layer.numel for layer in architecture.stack] == [152, 0, 90]
    assert architecture.forward_flops == 3 * (2304 + 160)
    assert architecture.backward_flops == 3 * (2304 + 2 * 160)  # the first row's input needs no gradient
    assert [kept(layer) // 512 for layer in architecture.stack] == [2, 0, 0]


def test_shapes_of_implicit_products_come_out_of_the_sizes(tmp_path: Path) -> None:
    def shape(number: int) -> tuple[int, ...]:
        kernels = table(tmp_path).stack[number].operators[0].forward
        return next(k.shape for k in kernels if k.op == "gemm")
    assert shape(0) == (1, 3 * 8, 4, 40)  # 8 positions of 4 channels, each a sum over 36, padded to 40
    assert shape(2) == (1, 3, 10, 8)


def test_resnet_50_s_convolutions_are_recognised() -> None:
    stack = made({"preset": "resnet-50"}, micro_batch=2, sequence=1, precision="amp-fp16").stack
    shapes = {name: next((k.shape for op in layer.operators for k in op.forward if k.op == "gemm"), None)
              for name, layer in zip(made({"preset": "resnet-50"}, sequence=1).names, stack, strict=True)}
    assert shapes["conv1"] == (1, 2 * 112 * 112, 64, 152)
    assert shapes["layer1.0.conv2"] == (1, 2 * 56 * 56, 64, 576)
    assert shapes["layer4.2.conv3"] == (1, 2 * 7 * 7, 2048, 512)
    assert shapes["fc"] == (1, 2, 1000, 2048)
    assert shapes["maxpool"] is None


def test_a_table_s_memory_follows_the_compute_dtype(tmp_path: Path) -> None:
    full, half = table(tmp_path), table(tmp_path, precision="pure-bf16")
    assert half.stack[0].saved[0].size_bytes * 2 == full.stack[0].saved[0].size_bytes == 3 * 256


def test_a_table_that_is_gone_says_so(tmp_path: Path) -> None:
    scenario = resolve({"name": "x", "cluster": {"topology": "single-a100-80g-sxm"}, "model": {"preset": "resnet-50"},
                        "training": {"micro_batch": 1, "global_batch": 1}})
    gone = scenario.model_copy(update={"model": scenario.model.model_copy(update={"table": str(tmp_path / "no.csv")})})
    with pytest.raises(UserError, match=r"no\.csv"):
        build(gone, stack_for("pytorch"), 1)
