"""LoRA of encoders and encoder-decoders: against what peft's models allocate and compute, and counted by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sim.software.choice as stacks
from sim.errors import UserError
from sim.memory.ledger import peak
from sim.model.architecture import Architecture, Layer
from sim.model.eager import KINDS, layer_profile
from sim.parallel import lower
from sim.scenario import resolve
from sim.validation.cases.oracle import flops
from sim.validation.cases.oracle_memory import predicted

BERT = {"kind": "encoder", "gated_mlp": False, "positions": "learned", "norm": "layernorm", "bias": True,
        "tied_embeddings": True, "vocab": 30522, "max_positions": 512, "layers": 12, "hidden": 768, "heads": 12,
        "ffn": 3072, "dropout": 0.0}
T5 = {"kind": "encoder-decoder", "gated_mlp": False, "positions": "relative", "norm": "rmsnorm", "bias": False,
      "tied_embeddings": True, "vocab": 32128, "layers": 12, "decoder_layers": 12, "hidden": 768, "heads": 12,
      "head_dim": 64, "ffn": 3072, "dropout": 0.0}
BERT_LARGE = {**BERT, "layers": 24, "hidden": 1024, "heads": 16, "ffn": 4096}
GATED = {**T5, "gated_mlp": True, "activation": "gelu"}
T5_LARGE = {**T5, "layers": 24, "decoder_layers": 24, "hidden": 1024, "heads": 16, "ffn": 4096}
T5_3B = {**T5, "layers": 24, "decoder_layers": 24, "hidden": 1024, "heads": 32, "head_dim": 128, "ffn": 16384}
#: A decoder with T5's positions, which no module code is written down for.
RELATIVE = {"kind": "decoder", "positions": "relative", "norm": "rmsnorm", "bias": False, "layers": 2, "hidden": 256,
            "heads": 4, "ffn": 512, "vocab": 1000, "dropout": 0.0}
SMALL = {"BERT": {**BERT, "layers": 2, "hidden": 256, "heads": 4, "ffn": 512, "vocab": 1000},
         "T5": {**T5, "layers": 2, "decoder_layers": 2, "hidden": 256, "heads": 4, "ffn": 512, "vocab": 1000},
         "relative": RELATIVE}
QV, ALL = ["query", "value"], ["query", "key", "value", "projection", "mlp"]


def scenario(model: dict[str, Any], base: str = "bf16", targets: Any = QV, *, precision: str = "pure-bf16",
             batch: int = 4, sequence: int = 128, recompute: str = "none", attention: str = "flash", method: str = "",
             modules: str = "transformers", framework: str = "pytorch", gpus: int = 1, dropout: float = 0.0,
             decoder_sequence: int = 0, rank: int = 8, **parallel: Any) -> Any:
    lengths = {"sequence": sequence, **({"decoder_sequence": decoder_sequence} if decoder_sequence else {})}
    return resolve({
        "name": "test", "cluster": {"topology": "dgx-a100-80g", "nodes": 1, "gpus_per_node": gpus},
        "model": {**model, "dropout": dropout},
        "training": {"micro_batch": batch, "global_batch": batch * gpus, **lengths, "precision": precision,
                     "recompute": recompute, "attention": attention,
                     "finetune": {"method": method or ("qlora" if base[:3] in ("nf4", "int") else "lora"), "rank": rank,
                                  "targets": list(targets), "base": base}},
        "parallel": {"strategy": "none", **parallel},
        "software": {"framework": framework, "year": 2026, "modules": modules, "optimizer_kernel": "foreach"}})


def architecture(*args: Any, **options: Any) -> Architecture:
    return lower(scenario(*args, **options)).architecture


# -------------------------------------------------------------- peft 0.21.2 on PyTorch 2.13, transformers 5.23, no GPU
#: Base, targets, options; peak and what the middle block of each stack keeps. The models of tests/validation's oracle
#: (BertForMaskedLM; T5ForConditionalGeneration with as many tokens for the decoder, if nothing else is said) with
#: get_peft_model(LoraConfig(r=8, target_modules=r".*\.(query|value)" or r".*\.(q|v)"; all: BERT's
#: r".*\.encoder\..*\.(query|key|value|dense)", T5's r".*\.(q|k|v|o|wi|wo)"), autocast_adapter_dtype=False), second step
#: of AdamW on fake cuda tensors, checkpoint_wrapper around every block where full, the adapters fp32 where the base is
#: bf16 under autocast.
PEFT: list[tuple[dict[str, Any], str, list[str], dict[str, Any], int, list[int]]] = [
    (BERT, "bf16", QV, {}, 420567552, [8700928]),
    (BERT, "bf16", QV, {"attention": "eager"}, 428911104, [9461760]),
    (BERT, "bf16", ALL, {"lora_dropout": True}, 543939072, [18564096]),
    (BERT, "bf16", ALL, {"recompute": "full"}, 331786752, [786432]),
    (BERT, "fp32", QV, {"precision": "amp-bf16"}, 947930112, [11060224]),
    (BERT, "fp32", ALL, {"precision": "amp-bf16", "attention": "eager"}, 1075700736, [20504576]),
    (BERT, "fp32", ALL, {"precision": "amp-bf16", "recompute": "full", "lora_dropout": True}, 679572480, [1572864]),
    (BERT, "fp32", ALL, {"precision": "fp32"}, 948252160, [25297920]),
    (BERT, "bf16", QV, {"precision": "amp-bf16"}, 514663424, [11060224]),
    (BERT, "fp32", QV, {"precision": "amp-bf16", "dropout": 0.1, "lora_dropout": True}, 966018048, [12633088]),
    (BERT_LARGE, "fp32", ALL, {"precision": "amp-bf16", "batch": 8, "sequence": 512}, 7573128192, [176882688]),
    (T5, "bf16", QV, {}, 920686592, [12235776, 18571264]),
    (T5, "bf16", QV, {"decoder_sequence": 64}, 768030720, [12235776, 9978880]),
    (GATED, "bf16", QV, {}, 1411420160, [27964416, 34299904]),
    (GATED, "bf16", ALL, {}, 1525551104, [31937536, 38289408]),
    (GATED, "fp32", ALL, {"precision": "amp-bf16"}, 3091884544, [46093312, 54018048]),
    (T5, "bf16", QV, {"attention": "eager"}, 936673280, [12603392, 19699712]),
    (T5, "bf16", QV, {"lora_dropout": True}, 974950400, [13808640, 21716992]),
    (T5, "bf16", ALL, {}, 954699776, [13054976, 19406848]),
    (T5, "bf16", ALL, {"recompute": "full"}, 589541376, [786432, 786432]),
    (T5, "fp32", QV, {"precision": "amp-bf16"}, 1858292224, [11449344, 17784832]),
    (T5, "fp32", ALL, {"precision": "amp-bf16"}, 2043275776, [16987136, 24911872]),
    (T5, "fp32", ALL, {"precision": "amp-bf16", "attention": "eager"}, 2174081536, [20500480, 32331776]),
    (T5, "fp32", ALL, {"precision": "amp-bf16", "recompute": "full", "attention": "eager"}, 1189095936, [1572864,
     1572864]),
    (T5, "fp32", QV, {"precision": "fp32"}, 1651574784, [18150400, 27648000]),
    (T5, "fp32", ALL, {"precision": "fp32", "attention": "eager"}, 1812264960, [22122496, 34772992]),
    (T5, "fp32", QV, {"precision": "fp32", "recompute": "full", "lora_dropout": True}, 1144465408, [1572864, 1572864]),
    (T5, "bf16", QV, {"precision": "amp-bf16"}, 1021039104, [13022208, 20144128]),
    (T5, "bf16", QV, {"dropout": 0.1, "lora_dropout": True}, 1037078528, [16167936, 24469504]),
    (T5, "fp32", QV, {"precision": "amp-bf16", "dropout": 0.1, "lora_dropout": True}, 1947159040, [14595072, 22110208]),
    (T5_3B, "bf16", QV, {"batch": 8}, 10934338560, [83010560, 125122560]),
    (T5_3B, "fp32", QV, {"precision": "fp32", "batch": 1}, 12739009536, [20473856, 29937152]),
    (T5_LARGE, "bf16", ALL, {"batch": 2, "sequence": 512, "recompute": "full"}, 1865169920, [2097152, 2097152]),
]
#: Bytes of fp32 copies of frozen bf16 norms, which autocast makes (of 12 blocks and the head): no part of a prediction.
NORMS = 25 * 2 * 4 * 768


def blocks(model: Architecture) -> list[list[Layer]]:
    """Of every stack."""
    found: list[list[Layer]] = [[]]
    for layer in model.stack:
        if layer.kind == "bridge":
            found.append([])
        elif layer.kind == "block":
            found[-1].append(layer)
    return found


def kept(layer: Layer, recompute: str) -> int:
    return layer_profile(layer, recompute, True).forward.net[KINDS.index("activations")]


@pytest.mark.parametrize(("model", "base", "targets", "options", "allocated", "retained"), PEFT)
def test_memory_is_what_pytorch_allocates(
    model: dict[str, Any], base: str, targets: list[str], options: dict[str, Any], allocated: int, retained: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the byte, but for what is named above."""
    given, made = dict(options), stacks._stack
    dropped = given.pop("lora_dropout", False)
    monkeypatch.setattr(stacks, "_stack", lambda *key: replace(made(*key), adapter_dropout=dropped))
    asked = scenario(model, base, targets, **given)
    lowered = lower(asked)
    policy = str(asked.training.recompute)
    assert [kept(stack[len(stack) // 2], policy) for stack in blocks(lowered.architecture)] == retained
    norms = NORMS if model is BERT and base == "bf16" and "precision" in options else 0
    missing = allocated - predicted(lowered, policy, False)["peak_allocated_bytes"]
    longer = 8 * 4 * 64 if "decoder_sequence" in options else 0  # labels are counted as long as the encoder's tokens
    assert (0 <= missing <= 1.06 * norms) if norms else missing == -longer


#: FlopCounterMode on the same models: forward, backward with what is computed again, and trained parameters.
FLOPS: list[tuple[dict[str, Any], list[str], dict[str, Any], int, int, int]] = [
    (BERT, QV, {}, 114298454016, 116399800320, 294912),
    (BERT, ["mlp"], {}, 114751438848, 113788846080, 737280),
    (BERT, ALL, {"recompute": "full"}, 115355418624, 209255399424, 1327104),
    (T5, QV, {}, 236357419008, 244485980160, 884736),
    (T5, ["key"], {}, 235904434176, 243592593408, 442368),
    (T5, ["projection"], {}, 235904434176, 241378000896, 442368),
    (T5, ["mlp"], {}, 236961398784, 240478322688, 1474560),
    (T5, ALL, {"attention": "eager"}, 238773338112, 245681356800, 3244032),
    (T5, ALL, {"decoder_sequence": 64}, 171555422208, 177642405888, 3244032),
    (T5, QV, {"recompute": "full"}, 236357419008, 397594853376, 884736),
    (T5_3B, QV, {"batch": 1}, 750813970432, 774864109568, 5898240),
]


@pytest.mark.parametrize(("model", "targets", "options", "forward", "backward", "trained"), FLOPS)
def test_flops_are_what_pytorch_computes(model: dict[str, Any], targets: list[str], options: dict[str, Any],
                                         forward: int, backward: int, trained: int) -> None:
    """No product for a frozen weight, none for the first block's input: backward of two thirds of a full step's."""
    lowered = lower(scenario(model, "bf16", targets, **options))
    assert flops(lowered) == {"forward_flops": forward, "backward_flops_with_recompute": backward}
    assert lowered.architecture.parameters == trained


# ------------------------------------------------------------------------------------------------------------- by hand
def test_rank_16_on_query_and_value_of_flan_t5_xxl() -> None:
    """The counts peft prints in Hugging Face's example: trainable 18,874,368 of 11,154,206,720 (recalled)."""
    tuned = architecture({"preset": "flan-t5-xxl"}, rank=16)
    assert tuned.parameters == 18_874_368
    assert tuned.parameters + tuned.frozen_parameters == 11_154_206_720


def test_rank_8_on_query_and_value_of_t5_3b() -> None:
    """A of 8 x 1024 and B of 4096 x 8 beside q and v of 24 encoder, 24 decoder and 24 cross attentions."""
    tuned = architecture({"preset": "t5-3b"})
    assert tuned.parameters == 2 * 3 * 24 * 8 * (1024 + 4096)
    assert tuned.frozen_parameters == 2_851_598_336
    decoder = blocks(tuned)[1][1]
    assert [p.name for p in decoder.gradient_order] == [
        f"layer.{place}.{name}.{linear}.{half}" for place, name in ((1, "EncDecAttention"), (0, "SelfAttention"))
        for linear in "vq" for half in ("lora_B", "lora_A")]


@pytest.mark.parametrize("model", ["T5", "relative"])
@pytest.mark.parametrize("attention", ["flash", "eager"])
def test_the_bias_of_scores_has_no_gradient(model: str, attention: str) -> None:
    """Nor has the table it is looked up in; what forward does with it stays, and no kernel reduces it."""
    tuned = architecture(SMALL[model], attention=attention)
    kernels = [k for layer in tuned.stack for op in layer.operators for k in op.backward]
    assert not [k for k in kernels if k.op == "embedding" or "bias" in k.variant]
    copies = [k for layer in tuned.stack for op in layer.operators for k in op.forward if k.variant == "bias_copy"]
    assert bool(copies) == (attention == "flash")
    tables = [f for layer in tuned.stack for f in layer.frozen if "relative_attention_bias" in f.name]
    assert {f.shape for f in tables} == {(32, 4)}


@pytest.mark.parametrize("kind", ["BERT", "T5"])
def test_nothing_in_front_of_the_first_block_runs_backward(kind: str) -> None:
    tuned = architecture({**SMALL[kind]}, dropout=0.1)
    assert not [k for op in tuned.stack[0].operators for k in op.backward]
    first, other = (sum(k.op == "gemm" for op in blocks(tuned)[0][i].operators for k in op.backward) for i in (0, 1))
    assert other - first == 3 + 2  # of q, k and v, and of both A


@pytest.mark.parametrize(("modules", "stored"), [("transformers", {"bf16"}), ("plain", {"nf4"})])
def test_transformers_never_quantises_the_last_layer_of_t5(modules: str, stored: set[str]) -> None:
    """`_keep_in_fp32_modules = ["wo"]`: left as the norms are, whatever the base is; its product reads it as it is."""
    tuned = architecture(SMALL["T5"], "nf4", ALL, modules=modules)
    frozen = [f for stack in blocks(tuned) for layer in stack for f in layer.frozen]
    assert {f.dtype for f in frozen if f.name.endswith("wo.weight")} == stored
    assert {f.dtype for f in frozen if ".SelfAttention." in f.name and len(f.shape) > 1
            and "bias" not in f.name} == {"nf4"}
    down = next(op for op in blocks(tuned)[1][1].operators if op.name == "down")
    assert any(k.variant == "dequantise" for k in down.forward) == (modules == "plain")


def test_berts_head_is_quantised_but_for_the_table() -> None:
    head = architecture(SMALL["BERT"], "nf4").stack[-1]
    assert {f.name.split(".", 2)[2]: f.dtype for f in head.frozen if len(f.shape) > 1} == {
        "transform.dense.weight": "nf4"}


@given(st.sampled_from(sorted(SMALL)), st.sampled_from(["none", "ddp", "zero1", "zero2", "zero3", "fsdp"]),
       st.sampled_from(["bf16", "nf4", "nf4-dq", "int8"]), st.sampled_from(["none", "full"]),
       st.sampled_from(["pure-bf16", "mixed-bf16", "amp-bf16"]), st.sampled_from(["transformers", "plain", "megatron"]),
       st.lists(st.sampled_from([*ALL, "head"]), min_size=1, unique=True), st.sampled_from([0.0, 0.1]))
@settings(max_examples=60, deadline=None)
def test_memory_balances_under_every_strategy(model: str, strategy: str, base: str, recompute: str, precision: str,
                                              modules: str, targets: list[str], dropout: float) -> None:
    if base == "bf16" and precision == "mixed-bf16":
        precision = "pure-bf16"
    asked = scenario(SMALL[model], base, targets, gpus=1 if strategy == "none" else 4, strategy=strategy,
                     precision=precision, recompute=recompute, modules=modules, dropout=dropout)
    assert peak(lower(asked).job.programs[0]).steady


@pytest.mark.parametrize("base", ["nf4-dq", "int8"])
def test_autocast_casts_what_biased_attention_reads(base: str) -> None:
    """Products with quantised weights come back in fp32, the dtype of T5's norms there; the kernel reads, keeps and
    returns halves. So a stream of halves stays one, and each attention keeps q, k, v and out at two bytes."""
    asked = {"base": base, "precision": "amp-bf16", "framework": "megatron"}
    lowered = lower(scenario(SMALL["T5"], **asked))
    assert peak(lowered.job.programs[0]).steady
    tuned = architecture(SMALL["T5"], base, precision="amp-bf16", sequence=64)
    trace = layer_profile(blocks(tuned)[0][1], "none", True).trace
    made = [size for number, size in trace.forward if size and trace.made[number][0] == "attention"]
    assert made.count(4 * 64 * 256 * 2) == 4


def test_a_stage_in_front_of_the_first_block_is_steady() -> None:
    stages = lower(scenario(SMALL["BERT"], gpus=2, pipeline=2, split=[0, 2])).job.programs
    assert all(peak(stage).steady for stage in stages)


def test_adapters_behind_both_parts_of_an_encoders_blocks() -> None:
    """Houlsby et al., section 2.1: 2md + d + m a bottleneck, and every norm: two a block, one before, one behind."""
    tuned = architecture(SMALL["BERT"], "bf16", ["projection", "mlp"], method="adapter")
    assert tuned.parameters == 2 * 2 * (2 * 8 * 256 + 256 + 8) + 2 * 256 * (2 * 2 + 2)
    assert peak(lower(scenario(SMALL["BERT"], "bf16", ALL, method="adapter")).job.programs[0]).steady


@pytest.mark.parametrize(("model", "options", "said"), [
    (T5, {"method": "adapter", "precision": "fp32"}, "adapters of fp32 read bf16 activations"),
    (T5, {"precision": "fsdp-bf16"}, "no code is known that runs bf16 weights beside fp32 adapters")])
def test_what_is_not_simulated_is_refused(model: dict[str, Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        lower(scenario(model, "bf16", **options))


def test_a_fused_gate_keeps_gate_and_up_alone() -> None:
    """gelu_new spelled out keeps 12 bytes an element in bf16: pow's input, half of it, tanh, one more, the result and
    up; one kernel for it all keeps 4."""
    whole = lower(scenario(GATED)).architecture
    style = blocks(whole)[0][1].program
    assert style is not None
    fused = replace(style, style=replace(style.style, stack=replace(style.style.stack, fused_swiglu=True)))
    spelled, one = (layer_profile(replace(blocks(whole)[0][1], program=program), "none", True).forward.net[
        KINDS.index("activations")] for program in (style, fused))
    assert spelled - one == 8 * 4 * 128 * 3072
