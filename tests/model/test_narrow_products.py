"""fp8 and narrower: what quantisation moves and keeps, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sim.errors import UserError
from sim.memory.ledger import peak
from sim.model.eager import KINDS, layer_profile
from sim.parallel import Lowered, lower
from sim.scenario import resolve

TOKENS, HIDDEN, FFN = 2048, 1024, 4096
#: Elements of the inputs of a block's products (qkv, projection, up, down), of their outputs, and of their weights.
INPUTS = TOKENS * (3 * HIDDEN + FFN)
#: torchtitan's queries, keys and values are layers of their own: uncompiled, each casts the input for itself.
APART = INPUTS + 2 * TOKENS * HIDDEN
OUTPUTS = TOKENS * (5 * HIDDEN + FFN)
WEIGHTS = 4 * HIDDEN**2 + 2 * HIDDEN * FFN


def lowered(compute: str, framework: str, year: int = 2024, topology: str = "hgx-b200", **changes: Any) -> Lowered:
    return lower(resolve({
        "name": "t", "cluster": {"topology": topology, "gpus_per_node": 1},
        "model": {"kind": "decoder", "layers": 2, "hidden": HIDDEN, "heads": 8, "ffn": FFN, "vocab": 1000,
                  "positions": "rotary", "bias": False},
        "training": {"micro_batch": 1, "global_batch": 1, "sequence": TOKENS, "precision": {
            "compute": compute, "parameters": "bf16", "master": "fp32", "gradients": "fp32", "optimizer": "fp32",
            "gather": "bf16", "reduce": "fp32"}},
        "parallel": {"strategy": "none"}, "software": {"framework": framework, "year": year, "modules": "plain"}},
        "t", changes))


def quantised(low: Lowered, backward: bool) -> float:
    """Bytes that a block's quantisation kernels move."""
    block = low.architecture.stack[1]
    kernels = [k for op in block.operators for k in (op.backward if backward else op.forward)]
    return sum(k.bytes for k in kernels if k.variant == "quantise")


def test_delayed_scaling_reads_once_and_writes_the_tensor_and_its_transpose() -> None:
    low = lowered("fp8", "composer")
    assert quantised(low, False) == (INPUTS + WEIGHTS) * (2 + 1 + 1)
    assert quantised(low, True) == OUTPUTS * 4


def test_dynamic_scaling_takes_a_pass_for_the_maximum_and_quantises_again_in_backward() -> None:
    low = lowered("fp8", "torchtitan")
    assert quantised(low, False) == (APART + WEIGHTS) * 6
    assert quantised(low, True) == (OUTPUTS + APART + WEIGHTS) * 6


def test_compiled_the_maximum_is_found_where_the_tensor_is_made() -> None:
    low = lowered("fp8", "torchtitan", **{"software.compile": True})
    stream, inner = TOKENS * HIDDEN, TOKENS * FFN
    # inputs of qkv and up, of the projection (in memory) and down; of weights both copies
    assert quantised(low, False) == stream * (3 + 3 + 5) + inner * 3 + WEIGHTS * (2 + 2 + 2)
    # gradients of values, and of keys and queries in fp32, of the projection, down and up; inputs of qkv, the
    # projection and up (a sum's norm is written and read twice), that of down beside up's gradient
    gradients = stream * (3 * 6 + 4 + 6) + inner * (2 * 2 + 1 + 2)
    assert quantised(low, True) == gradients + stream * (3 + 5 + 7)


def test_scales_per_block_need_no_pass_before() -> None:
    assert quantised(lowered("mxfp8", "torchtitan"), False) == (APART + WEIGHTS) * 4
    assert quantised(lowered("nvfp4", "torchtitan"), False) == (APART + WEIGHTS) * (2 + 2 + 1)


def test_cached_weights_are_quantised_once_per_step_and_stay() -> None:
    low = lowered("fp8", "megatron")
    assert quantised(low, False) == INPUTS * 4
    p = low.job.programs[0]
    assert ("fp8 weights", 2 * 2 * WEIGHTS, "parameters") in p.resident
    labels = [p.labels[label].name for label in p.sections[-1].label]
    assert labels.count("to fp8") == 1


def test_narrow_copies_take_the_place_of_inputs_or_stand_beside_nothing() -> None:
    def kept(low: Lowered) -> tuple[int, int]:
        net = layer_profile(low.architecture.stack[1], "none", True).forward.net
        return net[KINDS.index("activations")], net[KINDS.index("gathered_parameters")]
    half, narrow, torchao = (kept(lowered(*args)) for args in (("bf16", "composer"), ("fp8", "composer"),
                                                                ("fp8", "torchtitan")))
    assert narrow[1] == 2 * WEIGHTS and torchao[1] == 0 == half[1]
    # inputs of qkv, up and down are kept by nobody else; the projection's is attention's output, which attention keeps
    assert half[0] - narrow[0] == 2 * TOKENS * (2 * HIDDEN + FFN) - INPUTS
    assert torchao[0] == kept(lowered("bf16", "torchtitan"))[0]


def test_memory_balances() -> None:
    for framework in ("composer", "torchtitan", "megatron"):
        assert peak(lowered("fp8", framework).job.programs[0]).steady


@pytest.mark.parametrize("compute", ["fp8", "mxfp8", "nvfp4"])
def test_a_gpu_without_the_tensor_cores_is_refused(compute: str) -> None:
    with pytest.raises(UserError) as caught:
        lowered(compute, "pytorch", topology="dgx-a100-80g")
    assert "training.precision" in [f.field for f in caught.value.faults]


def test_weights_gathered_in_fp8_need_no_cast_and_no_autocast() -> None:
    """torchao's enable_fsdp_float8_all_gather: of the weights' quantisation nothing is left on the gathered side, and
    the module stays in bf16 as with gathers in bf16."""
    def sharded(gather: str) -> Lowered:
        return lower(resolve({
            "name": "t", "cluster": {"topology": "dgx-h100"},
            "model": {"kind": "decoder", "layers": 2, "hidden": HIDDEN, "heads": 8, "ffn": FFN, "vocab": 1000,
                      "positions": "rotary", "bias": False},
            "training": {"micro_batch": 1, "global_batch": 8, "sequence": TOKENS, "precision": {
                "compute": "fp8", "parameters": "fp32", "master": "none", "gradients": "fp32", "optimizer": "fp32",
                "gather": gather, "reduce": "fp32"}},
            "parallel": {"strategy": "fsdp"}, "software": {"framework": "torchtitan", "year": 2024}}))

    wide, narrow = sharded("bf16"), sharded("fp8")
    assert quantised(wide, False) - quantised(narrow, False) == WEIGHTS * 6
    assert quantised(wide, True) - quantised(narrow, True) == WEIGHTS * 6
    blocks = [low.architecture.stack[1] for low in (wide, narrow)]
    assert [[k.dtype for op in block.operators if op.name != "rotary" for k in op.forward]
            for block in blocks][1].count("fp32") == 0
    assert peak(narrow.job.programs[0]).steady


@pytest.mark.parametrize(("precision", "linear", "others"), [("tf32", "tf32", "tf32"), ("fp32", "fp32", "fp32"),
                                                             ("amp-bf16", "bf16", "bf16"), ("fp8", "fp8", "bf16")])
def test_tf32_is_a_flag_of_all_products_and_fp8_a_format_of_some(precision: str, linear: str, others: str) -> None:
    low = lower(resolve({
        "name": "t", "cluster": {"topology": "hgx-h100-3200", "gpus_per_node": 1},
        "model": {"kind": "decoder", "layers": 1, "hidden": HIDDEN, "heads": 8, "vocab": 1024},
        "training": {"micro_batch": 1, "global_batch": 1, "sequence": 256, "precision": precision,
                     "attention": "eager"},
        "parallel": {"strategy": "none"}, "software": {"framework": "pytorch", "year": 2024, "modules": "plain"}},
        "t", {}))
    _, block, head = low.architecture.stack
    products = {op.name: {k.dtype for k in (*op.forward, *op.backward) if k.op == "gemm"} for op in block.operators}
    assert products["up"] == {linear}
    assert {k.dtype for op in block.operators for k in (*op.forward, *op.backward)
            if k.op == "gemm" and k.category == "attention"} == {others}
    assert {k.dtype for op in head.operators for k in (*op.forward, *op.backward) if k.op == "gemm"} == {others}
