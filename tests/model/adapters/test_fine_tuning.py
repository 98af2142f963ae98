"""Fine-tuning against sizes counted by hand and against what PyTorch itself allocates."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sim.software.choice as stacks
from sim.errors import UserError
from sim.model import build, optimizer_state_bytes
from sim.model.architecture import Architecture
from sim.model.eager import KINDS, layer_profile
from sim.model.tuning import Frozen, stored, stored_width
from sim.parallel import lower
from sim.scenario import resolve
from sim.software import stack_for
from sim.validation.cases.oracle_memory import predicted

GPT = {"kind": "decoder", "gated_mlp": False, "positions": "learned", "norm": "layernorm", "bias": True,
       "tied_embeddings": True, "layers": 12, "hidden": 768, "heads": 12, "ffn": 3072, "vocab": 50304,
       "max_positions": 512, "dropout": 0.0}
LLAMA = {"kind": "decoder", "gated_mlp": True, "activation": "silu", "positions": "rotary", "norm": "rmsnorm",
         "bias": False, "tied_embeddings": True, "layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192,
         "vocab": 128256, "dropout": 0.0}
LINEARS = ["query", "key", "value", "projection", "mlp"]


def scenario(model: dict[str, Any], base: str = "bf16", targets: Any = ("query", "value"), *,
             precision: str = "pure-bf16", batch: int = 2, sequence: int = 512, recompute: str = "none",
             rank: int = 8, method: str = "", modules: str = "plain", framework: str = "pytorch",
             rest: str | None = None, versions: dict[str, str] | None = None, **parallel: Any) -> Any:
    return resolve({
        "name": "test", "cluster": {"topology": "dgx-a100-80g", "nodes": 1, "gpus_per_node": parallel.pop("gpus", 1)},
        "model": model,
        "training": {"micro_batch": batch, "global_batch": batch * parallel.pop("ranks", 1), "sequence": sequence,
                     "precision": precision, "recompute": recompute, "attention": "flash",
                     "finetune": {"method": method or ("qlora" if base[:3] in ("nf4", "int") else "lora"), "rank": rank,
                                  "targets": list(targets), "base": base, "unquantised": rest}},
        "parallel": {"strategy": "none", **parallel},
        "software": {"framework": framework, "year": 2026, "modules": modules, "optimizer_kernel": "foreach",
                     "versions": versions or {}}})


def architecture(model: dict[str, Any], *args: Any, modules: str = "plain", **options: Any) -> Architecture:
    given_scenario = scenario(model, *args, modules=modules, **options)
    return build(given_scenario, stack_for("pytorch", 2026, modules=modules), given_scenario.training.micro_batch)


# ----------------------------------------------------------------------------------------------------- how it is stored
def test_bits_of_quantised_weights() -> None:
    """QLoRA, section 3: fp32 constants of blocks of 64 take 0.5 bit a weight, double quantisation 0.127 bit."""
    numel = 4096 * 4096
    assert sum(stored(numel, 4096, "nf4")) * 8 == 4.5 * numel
    assert sum(stored(numel, 4096, "nf4-dq")) * 8 / numel == pytest.approx(4.127, abs=5e-4)
    assert stored(numel, 4096, "int8") == (numel, 4 * 4096)
    assert stored(numel, 4096, "bf16") == (2 * numel,)
    assert stored_width("nf4") == 0.5625


@given(st.integers(1, 10**7), st.integers(1, 4096))
@settings(max_examples=30, deadline=None)
def test_storage_falls_with_the_bits(numel: int, rows: int) -> None:
    sizes = [sum(stored(numel * 64 * 256, rows, dtype)) for dtype in ("fp32", "bf16", "int8", "nf4", "nf4-dq")]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("rest", "width"), [(None, 4), ("fp32", 4), ("bf16", 2)])
def test_what_a_quantised_base_leaves_has_a_dtype_of_its_own(rest: str | None, width: int) -> None:
    """Beside fp32 adapters: peft's prepare_model_for_kbit_training makes it fp32, axolotl and LLaMA-Factory do not."""
    tuned = architecture({**LLAMA, "tied_embeddings": False}, "nf4", precision="amp-bf16", modules="transformers",
                         rest=rest)
    embedding, head = (next(f for f in layer.frozen if f.numel == 128256 * 2048)
                       for layer in (tuned.stack[0], tuned.stack[-1]))
    assert embedding.size_bytes == head.size_bytes == width * 128256 * 2048
    copies = [k for op in tuned.stack[-1].operators for k in op.forward if k.variant == "weight_cast"]
    assert len(copies) == (width == 4)  # autocast's copy of the head's weight


# ------------------------------------------------------------------------------------------------------ what is trained
def test_rank_8_on_query_and_value_of_llama_2_7b() -> None:
    """The parameters LoRA's paper counts: 2 matrices x 2 x rank x hidden x layers."""
    tuned = architecture({"preset": "llama-2-7b"}, modules="transformers")
    assert tuned.parameters == 2 * 2 * 8 * 4096 * 32
    assert tuned.frozen_parameters == 6_738_415_616
    names = [p.name for p in tuned.stack[1].parameters]
    assert sorted(names) == ["self_attn.q_proj.lora_A", "self_attn.q_proj.lora_B", "self_attn.v_proj.lora_A",
                             "self_attn.v_proj.lora_B"]
    assert tuned.stack[1].gradient_order[0].name == "self_attn.v_proj.lora_B"


def test_a_fused_projection_has_one_pair_of_matrices_for_its_parts() -> None:
    block = architecture(GPT).stack[1]
    assert {p.name: p.shape for p in block.parameters} == {"qkv.lora_A": (16, 768), "qkv.lora_B": (1536, 8)}


def test_an_adapter_sits_behind_each_sublayer_and_norms_are_trained() -> None:
    """Houlsby et al., section 2.1: 2md + d + m a bottleneck, 2d a norm."""
    block = architecture(GPT, "bf16", ("projection", "mlp"), method="adapter", rank=64).stack[1]
    assert block.numel == 2 * (2 * 64 * 768 + 768 + 64) + 2 * 2 * 768


def test_frozen_weights_are_not_multiplied_for_their_gradient() -> None:
    """Forward and the data gradient remain; LoRA's own products are three times their forward."""
    tuned = architecture(GPT).stack[1]
    tokens, hidden = 1024, 768
    linears = 2.0 * tokens * 12 * hidden**2
    scores = 4.0 * 2 * 512 * 512 * hidden
    branch = 2.0 * tokens * (hidden * 16 + 8 * 1536)
    assert tuned.forward_flops == linears + scores + branch
    assert tuned.backward_flops == linears + 2.5 * scores + 2 * branch


def test_products_with_quantised_weights_are_preceded_by_their_dequantisation() -> None:
    block = architecture(LLAMA, "nf4", modules="transformers").stack[1]
    forward = [k for op in block.operators for k in op.forward]
    backward = [k for op in block.operators for k in op.backward]
    for kernels in (forward, backward):
        made = [k for k in kernels if k.variant == "dequantise"]
        assert len(made) == 7
        assert sum(k.shape[0] for k in made) == 2048 * (2 * 2048 + 2 * 512 + 3 * 8192)
        assert made[0].bytes == made[0].shape[0] * (0.5625 + 2)
    assert not [k for k in block.operators[-2].backward if k.variant == "nt"]


# -------------------------------------------------------------------------- PyTorch 2.13 on fake tensors (tests/README)
#: Peak and what a block keeps: modules written as peft, loralib and bitsandbytes write them, under a memory tracker.
ORACLE = [
    (GPT, "bf16", ["query", "value"], {}, 814241792, 21332992),
    (GPT, "nf4", ["query", "value"], {}, 692148224, 21332992),
    (GPT, "bf16", LINEARS, {"recompute": "full"}, 585687040, 1572864),
    (GPT, "fp32", ["query", "value"], {"precision": "amp-bf16"}, 1552133632, 24478720),
    (LLAMA, "bf16", ["query", "value"], {"modules": "transformers"}, 5494315008, 90350592),
    (LLAMA, "nf4-dq", LINEARS, {"modules": "transformers"}, 4883429376, 140764160),
    (LLAMA, "nf4", LINEARS, {"modules": "transformers", "recompute": "full", "batch": 1, "sequence": 2048}, 4410243072,
     8388608),
    (LLAMA, "nf4", LINEARS, {"modules": "transformers", "recompute": "full", "batch": 1, "sequence": 1024,
                             "precision": "amp-bf16"}, 3910440960, 8388608),
]


@pytest.mark.parametrize(("model", "base", "targets", "options", "peak", "retained"), ORACLE)
def test_memory_is_what_pytorch_allocates(
    model: dict[str, Any], base: str, targets: list[str], options: dict[str, Any], peak: int, retained: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block keeps the same bytes; the peak is within 0.5% (the first block keeps less: its input is a constant).

    These modules take the loss of all logits at once and as they are, where the frameworks of fine-tuning make them
    fp32 and LitGPT takes the loss in chunks.
    """
    made = stacks._stack
    monkeypatch.setattr(stacks, "_stack", lambda *key: replace(made(*key), tuning_upcast=False, tuning_chunk=0))
    asked = scenario(model, base, targets, **options)
    got = predicted(lower(asked), str(asked.training.recompute), False)
    assert got["block_retained"] == retained
    assert got["peak_allocated_bytes"] == pytest.approx(peak, rel=5e-3 if asked.training.recompute == "none" else 5e-5)


def test_a_frozen_layer_keeps_nothing_but_its_branch() -> None:
    """Without targets in the block, a plain block keeps norms' inputs, attention's tensors and GELU's input."""
    block = architecture(GPT, targets=("head",)).stack[1]
    kept = layer_profile(block, "none", True).forward.net[KINDS.index("activations")]
    tokens, hidden = 1024, 768
    # norm1's input is the block's; qkv 3h, attention 1h, residual1 1h, up 4h, output 1h (2 bytes each); statistics
    assert kept == tokens * hidden * 2 * (3 + 1 + 1 + 4 + 1) + 4 * tokens * 4 + tokens * 12 * 4 + 2 * 512


# ------------------------------------------------------------------------------------------------- what is communicated
def traffic(asked: Any) -> Counter[str]:
    program, total = lower(asked).job.programs[0], Counter[str]()
    for call in program.collectives:
        total[call.kind] += call.size_bytes
    return total


def test_ddp_reduces_the_adapters_only() -> None:
    asked = scenario({"preset": "llama-2-7b"}, gpus=8, ranks=8, strategy="ddp", modules="transformers")
    assert traffic(asked) == {"all_reduce": 2 * 2 * 2 * 8 * 4096 * 32}


def test_fsdp_gathers_packed_weights_and_reduces_adapters() -> None:
    asked = scenario(LLAMA, "nf4", gpus=8, ranks=8, strategy="fsdp", modules="transformers")
    program = lower(asked).job.programs[0]
    block = architecture(LLAMA, "nf4", modules="transformers").stack[1]
    weights = 2048 * (2 * 2048 + 2 * 512 + 3 * 8192)
    packed = weights // 2 + 2 * 2 * 2048 + 2 * block.numel
    gathers = {c.size_bytes for c in program.collectives if c.kind == "all_gather"}
    reductions = {c.size_bytes for c in program.collectives if c.kind == "reduce_scatter"}
    assert packed in gathers
    assert reductions == {2 * block.numel}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_zero3_gathers_packed_weights_by_sub_module(recompute: str) -> None:
    """Every packed matrix comes for forward and for backward; adapters, norms and gradients stay small."""
    model = {**LLAMA, "layers": 4}
    asked = scenario(model, "nf4", gpus=8, ranks=8, strategy="zero3", modules="transformers", recompute=recompute,
                     framework="deepspeed")
    program = lower(asked).job.programs[0]
    block = architecture(model, "nf4", modules="transformers").stack[1]
    matrices = [f for f in block.frozen if f.numel > 10**6]
    assert len(matrices) == 7
    calls = traffic(asked)
    table = 2 * 2048 * 128256  # embedding; the head has a matrix of its own
    whole = 4 * sum(f.pieces[0] for f in matrices) + 2 * table
    assert whole <= calls["all_gather"] <= 2.01 * whole
    assert max(c.size_bytes for c in program.collectives if c.kind == "all_gather") < 2 * table
    assert calls["reduce_scatter"] == 2 * 4 * block.numel


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_constants_of_quantised_weights_are_whole_on_every_gpu(strategy: str, offloaded: bool) -> None:
    """bitsandbytes keeps them in an attribute of the weight: an fp32 number for every 64 of its elements, which
    torchao's tensors, as torchtune has them, split with it."""
    places = {"parameters": "cpu", "optimizer": "cpu", "activations": "none"} if offloaded else {}
    held = {}
    for name, said in (("bitsandbytes", {}), ("torchao", {"torchtune": "0.5"})):
        if strategy == "zero3" and said:
            continue
        asked = scenario(LLAMA, "nf4", gpus=8, ranks=8, strategy=strategy, modules="plain" if said else "transformers",
                         framework="deepspeed" if strategy == "zero3" else "pytorch", offload=places, versions=said)
        resident = lower(asked).job.programs[0].resident
        held[name] = sum(size for name, size, _ in resident if name == "constants of frozen parameters")
    assert held["bitsandbytes"] == 4 * LLAMA["layers"] * 2048 * (2 * 2048 + 2 * 512 + 3 * 8192) // 64
    assert not held.get("torchao")


@given(st.sampled_from(["none", "ddp", "zero1", "zero2", "zero3", "fsdp"]),
       st.sampled_from(["bf16", "nf4", "nf4-dq", "int8"]),
       st.sampled_from(["pure-bf16", "mixed-bf16", "megatron-bf16"]))
@settings(max_examples=25, deadline=None)
def test_memory_balances_under_every_strategy(strategy: str, base: str, precision: str) -> None:
    from sim.memory.ledger import peak

    gpus = 1 if strategy == "none" else 4
    asked = scenario({**LLAMA, "layers": 2}, base, gpus=gpus, ranks=gpus, strategy=strategy, precision=precision)
    assert peak(lower(asked).job.programs[0]).steady


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "fsdp"])
@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_only_what_is_trained_has_a_master_copy(strategy: str, base: str) -> None:
    """As Hugging Face's Trainer runs LoRA on DeepSpeed: 4 bytes more a weight, fp32 states."""
    from sim.memory.ledger import peak

    small, held = {**LLAMA, "layers": 2}, {}
    for precision in ("pure-bf16", "mixed-bf16"):
        lowered = lower(scenario(small, base, precision=precision, gpus=4, ranks=4, strategy=strategy))
        held[precision] = peak(lowered.job.programs[0]).at_peak
    trained = lowered.architecture.parameters
    shards = 1 if strategy == "ddp" else 4
    master = held["mixed-bf16"]["master_parameters"]
    assert held["pure-bf16"]["master_parameters"] == 0
    assert master == pytest.approx(4 * trained / shards, rel=0.01)
    assert held["mixed-bf16"]["optimizer_states"] == pytest.approx(2 * master, rel=0.01)
    assert held["mixed-bf16"]["parameters"] == held["pure-bf16"]["parameters"]


@pytest.mark.parametrize(("model", "base", "precision", "said"), [
    (LLAMA, "bf16", "fp32", "PyTorch refuses without autocast")])
def test_fine_tuning_that_is_not_simulated_is_refused(
    model: dict[str, Any], base: str, precision: str, said: str,
) -> None:
    with pytest.raises(UserError, match=said):
        lower(scenario(model, base, precision=precision))


# ----------------------------------------------------------------------------------------------------------- optimizers
def test_eight_bit_states() -> None:
    """Bytes and an fp32 absmax per 256; fp32 below 4,096 elements and in embeddings; two tables of 1 KiB."""
    tensors = [((4096, 4096), False), ((4095,), False), ((1000, 100), True)]
    assert optimizer_state_bytes(tensors, None, "adamw-8bit") == (
        2 * (4096**2 + 4096**2 // 64) + 8 * 4095 + 8 * 100_000 + 2048)


@pytest.mark.parametrize(("dtype", "expected"), [("fp32", 40864), ("bf16", 20432)])
def test_adafactor_keeps_rows_and_columns(dtype: str, expected: int) -> None:
    """torch.optim.Adafactor on fake tensors: 40,960 and 20,480 bytes in blocks of 512."""
    from types import SimpleNamespace

    shapes = [((1024, 2048), False), ((4096, 1024), False), ((1000,), False), ((512, 512), False)]
    precision = SimpleNamespace(optimizer=dtype)
    assert optimizer_state_bytes(shapes, precision, "adafactor") == expected
    flat = optimizer_state_bytes(shapes, precision, "adafactor", flat=True)
    assert flat == (1024 * 2048 + 4096 * 1024 + 1000 + 512 * 512) * (4 if dtype == "fp32" else 2)


def test_frozen_tensors_know_their_pieces() -> None:
    assert Frozen("w", (64, 256), "nf4-dq").pieces == (8192, 256, 4, 4)
