"""LoRA in fp32 beside 16-bit weights without autocast, and under FSDP, against PyTorch and by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

import sim.software.choice as stacks
from sim.api import run
from sim.errors import UserError
from sim.memory.ledger import peak
from sim.model import build
from sim.parallel import lower
from sim.scenario import resolve
from sim.scenario.fields.precisions import PRECISIONS
from sim.software import stack_for, stack_of
from sim.validation.cases.oracle_memory import predicted

LLAMA = {"kind": "decoder", "gated_mlp": True, "activation": "silu", "positions": "rotary", "norm": "rmsnorm",
         "bias": False, "tied_embeddings": False, "layers": 4, "hidden": 1024, "heads": 16, "kv_heads": 8,
         "ffn": 4096, "vocab": 512, "dropout": 0.0}
QV, ALL = ["query", "value"], ["query", "key", "value", "projection", "mlp"]
TOKENS, HIDDEN, RANK = 1024, 1024, 8


def scenario(targets: list[str] = QV, precision: Any = "fp32", *, base: str = "bf16", dropout: float = 0.0,
             recompute: str = "none", method: str = "lora", modules: str = "transformers", ranks: int = 1,
             framework: str = "pytorch", fsdp: int = 2, compiled: bool = False, rest: str | None = None,
             **parallel: Any) -> Any:
    tuned = {"method": method, "rank": RANK, "targets": targets, "base": base, "unquantised": rest,
             **({"dropout": dropout} if method == "lora" else {})}
    return resolve({
        "name": "t", "cluster": {"topology": "dgx-a100-80g", "nodes": 1, "gpus_per_node": ranks}, "model": LLAMA,
        "training": {"micro_batch": 2, "micro_steps": 1, "sequence": 512, "precision": precision,
                     "recompute": recompute, "finetune": tuned},
        "parallel": {"strategy": "none", **parallel},
        "software": {"framework": framework, "year": 2026, "modules": modules, "optimizer_kernel": "foreach",
                     "compile": compiled, **({"fsdp": fsdp} if parallel.get("strategy") == "fsdp" else {})}})


def measured(asked: Any, monkeypatch: pytest.MonkeyPatch, *, sharded: bool = False) -> dict[str, Any]:
    made = stacks._stack
    monkeypatch.setattr(stacks, "_stack", lambda *key: replace(made(*key), tuning_upcast=False, cuda_kernels=False))
    return predicted(lower(asked), str(asked.training.recompute), sharded)


# -------------------------------------------------------------- peft 0.21.2 on PyTorch 2.13, transformers 5.23, no GPU
#: Targets, dropout, recomputation; what a block keeps, peaks of forward and backward. LoRA of rank 8 in fp32 beside
#: bf16 weights, no autocast (without recomputation PyTorch's backward is 2 MiB higher: the first block's input).
ORACLE = [(QV, 0.0, "none", 48374784, 341847040, 371204096 - 2097152),
          (ALL, 0.1, "none", 92578816, 551103488, 534323200 - 2097152),
          (QV, 0.0, "full", 2097152, 167222272, 232375296),
          (ALL, 0.1, "full", 2097152, 203856896, 277562368)]


@pytest.mark.parametrize(("targets", "dropout", "recompute", "retained", "forward", "backward"), ORACLE)
def test_memory_is_what_pytorch_allocates(
    targets: list[str], dropout: float, recompute: str, retained: int, forward: int, backward: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the byte: a fp32 copy of every branch's input is kept, and lives as a variable while the branch runs."""
    got = measured(scenario(targets, dropout=dropout, recompute=recompute), monkeypatch)
    phases = got["phase_peaks"]
    assert (got["block_retained"], phases["forward"], phases["backward"]) == (retained, forward, backward)


#: FSDP 2 over 8 ranks, blocks recomputed: MixedPrecisionPolicy(bf16, bf16), (bf16, fp32), none.
SHARDED = [("fsdp-bf16", 121363968, 178034176), ({**PRECISIONS["fsdp-bf16"], "reduce": "fp32"}, 121363968, 178034176),
           ("fp32", 121536000, 184473088)]


@pytest.mark.parametrize(("precision", "forward", "backward"), SHARDED)
def test_memory_under_fsdp_is_what_pytorch_allocates(
    precision: Any, forward: int, backward: int, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the byte: adapters are kept in fp32 and seen as they are gathered; frozen weights are as they are stored."""
    asked = scenario(QV, precision, recompute="full", ranks=8, strategy="fsdp")
    phases = measured(asked, monkeypatch, sharded=True)["phase_peaks"]
    assert (phases["after_init"], phases["forward"], phases["backward"], phases["optim"]) == (
        16070144, forward, backward, 16299520)


def test_frozen_weights_are_gathered_as_they_are_stored() -> None:
    """12.6 million bf16 weights of a block in 2 bytes, 28,672 of adapters in 4, or in 2 under a policy."""
    block = HIDDEN * (2 * 1024 + 2 * 512 + 3 * 4096) + 2 * HIDDEN
    for precision, width in (("fp32", 4), ("fsdp-bf16", 2)):
        program = lower(scenario(QV, precision, ranks=8, strategy="fsdp")).job.programs[0]
        adapters = RANK * (HIDDEN + 1024) + RANK * (HIDDEN + 512)
        sizes = {round(call.size_bytes) for call in program.collectives if call.kind == "all_gather"}
        assert 2 * block + width * adapters in sizes


@pytest.mark.parametrize("fsdp", [1, 2])
def test_both_fsdps_balance(fsdp: int) -> None:
    for precision in ("fsdp-bf16", "fp32"):
        asked = scenario(QV, precision, ranks=4, strategy="fsdp", fsdp=fsdp)
        assert peak(lower(asked).job.programs[0]).steady


# --------------------------------------------------------------------------------------------------- kernels, by hand
def kernels(asked: Any) -> Counter[str]:
    """Launches in a block's forward and backward, of element-wise kernels of a branch."""
    block = build(asked, stack_of(asked.software), 2).stack[1]
    found: Counter[str] = Counter()
    for op in block.operators:
        for kernel in (*op.forward, *op.backward):
            if kernel.variant.startswith("lora"):
                found[kernel.variant] += kernel.launches
    return found


def test_every_cast_around_a_branch_is_counted() -> None:
    """Of two targets: x.to(fp32), scale, sum, .to(bf16); backward casts the gradients of the sum, the base and the
    input, scales, and adds."""
    assert kernels(scenario(QV)) == {
        "lora_input_cast": 2, "lora_scale": 2, "lora_add": 2, "lora_sum_cast": 2, "lora_sum_gradient_cast": 2,
        "lora_base_gradient_cast": 2, "lora_scale_backward": 2, "lora_input_gradient_cast": 2, "lora_gradient_sum": 2}
    assert kernels(scenario(QV, "pure-bf16")) == {
        "lora_scale": 2, "lora_add": 2, "lora_scale_backward": 2, "lora_gradient_sum": 2}
    assert not [name for name in kernels(scenario(QV, compiled=True)) if "cast" in name]


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", "fp32"), ("tf32", "tf32")])
def test_branches_are_multiplied_in_their_own_dtype(precision: str, dtype: str) -> None:
    block = build(scenario(QV, precision), stack_for("pytorch", 2026, modules="transformers"), 2).stack[1]
    products = [k for op in block.operators for k in (*op.forward, *op.backward) if k.op == "gemm"]
    thin = [k for k in products if RANK in k.shape[1:]]
    assert len(thin) == 2 * 6 and {k.dtype for k in thin} == {dtype}
    assert {k.dtype for k in products if RANK not in k.shape[1:]} == {"bf16"}
    # A: rows x 1,024 by 1,024 x 8 in 4 bytes
    assert thin[0].bytes == 4 * (TOKENS * HIDDEN + HIDDEN * RANK + TOKENS * RANK)


def test_utilization_is_of_the_frozen_weights_products() -> None:
    asked = scenario(QV)
    assert asked.training.matrix_dtype == "bf16" and asked.training.attention == "flash"
    assert scenario(QV, base="fp32").training.matrix_dtype == "fp32"
    assert run(asked).peak_flops_per_gpu == 312e12


# ----------------------------------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(("options", "said"), [
    ({"modules": "plain"}, "PyTorch refuses without autocast"),
    ({"method": "adapter"}, "PyTorch refuses without autocast"),
    ({"base": "fp32", "precision": "pure-bf16"}, "no code is known"),
    ({"base": "fp16", "precision": "fsdp-bf16", "strategy": "fsdp", "ranks": 4}, "no code is known"),
    ({"precision": "fsdp-bf16"}, "no code is known"),
    ({"method": "qlora", "base": "nf4", "rest": "bf16"}, "no code is known"),
    ({"method": "qlora", "base": "nf4", "rest": "fp32", "precision": "pure-bf16"}, "no code is known"),
])
def test_what_no_code_runs_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        lower(scenario(QV, **{"precision": "fp32", **options}))
    field = "unquantised" if "rest" in options else "base"
    assert caught.value.faults[0].field == f"training.finetune.{field}"
