"""LoRA beside frozen weights that are multiplied in fp8, counted by hand (TransformerEngine, Megatron-Bridge)."""

from __future__ import annotations

from typing import Any

import pytest

from sim.errors import UserError
from sim.memory.ledger import peak
from sim.model import build
from sim.model.architecture import Operator
from sim.model.eager import KINDS, layer_profile
from sim.parallel import Lowered, lower
from sim.scenario import resolve
from sim.work import Kernel

HIDDEN, FFN, LAYERS, HEADS, VOCAB, SEQUENCE, RANK = 512, 1536, 2, 8, 4096, 256, 8
TOKENS = 2 * SEQUENCE
QKV, BOTH = 3 * HIDDEN, 2 * FFN
BLOCK = HIDDEN * (QKV + HIDDEN + BOTH + FFN)  # the four matrices of a block


def tuned(precision: Any = "fp8", targets: tuple[str, ...] = ("query", "key", "value"), *, base: str = "bf16",
          method: str = "lora", framework: str = "megatron", year: int = 2024, strategy: str = "ddp",
          **parallel: Any) -> Lowered:
    return lower(asked(precision, targets, base, method, framework, year, strategy, **parallel))


def asked(precision: Any = "fp8", targets: tuple[str, ...] = ("query", "key", "value"), base: str = "bf16",
          method: str = "lora", framework: str = "megatron", year: int = 2024, strategy: str = "ddp",
          **parallel: Any) -> Any:
    cut = parallel.get("tensor", 1)
    finetune = {"finetune": {"method": method, "rank": RANK, "base": base, "targets": list(targets)}} if method else {}
    return resolve({
        "name": "x", "cluster": {"topology": "dgx-h100", "nodes": 1},
        "model": {"kind": "decoder", "layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "ffn": FFN, "vocab": VOCAB,
                  "gated_mlp": True, "norm": "rmsnorm", "positions": "rotary", "bias": False, "dropout": False,
                  "tied_embeddings": False},
        "training": {"micro_batch": 2, "global_batch": 2 * 8 // cut, "sequence": SEQUENCE, "precision": precision,
                     "optimizer": "adamw", "recompute": "none", **finetune},
        "parallel": {"strategy": strategy, "sequence_parallel": cut > 1, **parallel},
        "software": {"framework": framework, "year": year}})


def operator(lowered: Lowered, name: str, cut: Any = None) -> Operator:
    """Of the whole model, or of a rank's slice of the scenario `cut`."""
    held = lowered.architecture if cut is None else build(cut, lowered.stack, 2)
    [found] = [op for op in held.stack[1].operators if op.name == name]
    return found


def quantised(kernels: tuple[Kernel, ...]) -> list[tuple[int, float]]:
    """Elements of each tensor that is quantised, and bytes read and written per element."""
    return [(k.shape[0], k.bytes / k.shape[0]) for k in kernels if k.variant == "quantise"]


def test_operands_are_quantised_along_one_dimension() -> None:
    """2 bytes are read; an operand of a trained product is written twice (but for what a norm writes in fp8
    itself), of a frozen one once. Weights of 2024 are kept in fp8 from step to step."""
    whole, frozen = operator(tuned(method=""), "up"), operator(tuned(), "up")
    assert quantised(whole.forward) == []
    assert quantised(operator(tuned(method=""), "down").forward) == [(TOKENS * FFN, 2 + 2)]
    assert quantised(whole.backward) == [(TOKENS * BOTH, 2 + 2)]
    assert quantised(frozen.forward) == [(TOKENS * HIDDEN, 2 + 1)]
    assert quantised(frozen.backward) == [(TOKENS * BOTH, 2 + 1)]
    assert [k.dtype for k in frozen.forward if k.op == "gemm"] == ["fp8"]
    assert [k.variant for k in frozen.backward if k.op == "gemm"] == ["nn"]


def test_a_weight_quantised_in_every_forward_keeps_both_dimensions() -> None:
    """Under FSDP weights come and go: behind the input's one copy stand the weight's two."""
    frozen = operator(tuned(framework="composer", strategy="fsdp", precision="fp8"), "down")
    assert quantised(frozen.forward) == [(TOKENS * FFN, 2 + 1), (FFN * HIDDEN, 2 + 2)]


def test_branches_are_multiplied_in_16_bits() -> None:
    kernels = [k for k in operator(tuned(), "qkv").forward if k.op == "gemm"]
    assert [(k.dtype, k.shape[2:]) for k in kernels] == [
        ("fp8", (QKV, HIDDEN)), ("bf16", (RANK, HIDDEN)), ("bf16", (QKV, RANK))]


@pytest.mark.parametrize("year", [2023, 2024])
def test_frozen_weights_take_what_is_stored_of_them(year: int) -> None:
    """Since 2024 parameters are fp8, as they are and transposed: 2 bytes; before, beside the 2 of bf16. What is not a
    matrix of a block stays in bf16: the embedding, the head, two norms a block and the last."""
    held = peak(tuned(year=year).job.programs[0])
    assert held.steady
    branch = LAYERS * RANK * (HIDDEN + QKV)
    rest = 2 * VOCAB * HIDDEN + (2 * LAYERS + 1) * HIDDEN
    copies = 2 if year == 2024 else 4
    assert held.at_peak["parameters"] == pytest.approx(copies * LAYERS * BLOCK + 2 * (rest + branch), rel=2e-3)


def test_a_frozen_product_keeps_no_input() -> None:
    """A branch keeps its own in 16 bits; without one nothing of the product's operands is kept."""
    def kept(lowered: Lowered) -> int:
        return layer_profile(lowered.architecture.stack[1], "none", True).forward.net[KINDS.index("activations")]
    trained, beside = kept(tuned(method="")), kept(tuned(targets=("head",)))
    # fp8 inputs of the four products; the norms keep theirs either way
    assert trained - beside == TOKENS * (HIDDEN + HIDDEN + HIDDEN + FFN)


def test_what_a_branch_reads_is_gathered_in_16_bits() -> None:
    """LayerNormLinear gathers in high precision where the gathered output is asked for, and quantises the whole."""
    cut = asked(tensor=2, strategy="zero1")
    read, other = (operator(lower(cut), name, cut) for name in ("qkv", "up"))
    assert read.joint is not None and other.joint is not None
    assert (read.joint.gathered, other.joint.gathered) == ("", "fp8")
    assert quantised(read.forward) == [(TOKENS * HIDDEN, 3)]
    assert quantised(other.forward) == [(TOKENS * HIDDEN // 2, 3)]
    assert not [k for op in (read, other) for k in op.backward if k.variant == "transpose"]


@pytest.mark.parametrize(("options", "said"), [
    ({"framework": "torchtitan", "strategy": "fsdp"}, "torchao"), ({"base": "nf4", "method": "qlora"}, "nf4 weights")])
def test_what_is_not_simulated_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        tuned(**options)
