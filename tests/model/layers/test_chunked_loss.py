"""The loss in chunks: Liger Kernel's way (the same products, a fraction of the logits) and torchtune's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from sim.errors import UserError
from sim.memory.ledger import peak
from sim.model import build
from sim.model.architecture import Joint
from sim.model.eager import chunked
from sim.model.eager.tensors.autograd import Boundary, Run
from sim.model.layers.chunked import chunk_rows, output_chunks
from sim.parallel import Lowered, lower
from sim.parallel.model.calls import Calls
from sim.parallel.model.joints import Joints
from sim.program import InlineCall
from sim.scenario import resolve
from sim.software import stack_of
from sim.validation.cases.oracle_memory import predicted


def lowered(chunked: bool, precision: str = "pure-bf16", tied: bool = False, modules: str = "transformers",
            compiled: bool = False, finetune: dict[str, Any] | None = None, micro: int = 4, **model: Any) -> Lowered:
    return lower(resolve({
        "name": "t", "cluster": {"topology": "dgx-a100-80g", "gpus_per_node": 1},
        "model": {"kind": "decoder", "layers": 2, "hidden": 512, "heads": 8, "vocab": 32000, "positions": "rotary",
                  "tied_embeddings": tied} | model,
        "training": {"micro_batch": micro, "global_batch": micro, "sequence": 1024, "precision": precision,
                     "recompute": "full", "chunked_loss": chunked} | ({"finetune": finetune} if finetune else {}),
        "software": {"framework": "pytorch", "year": 2025, "modules": modules, "compile": compiled}}))


@pytest.mark.parametrize(("rows", "hidden", "vocab", "chunk"), [
    (4096, 512, 32000, 128),  # 32000 / 512 = 62.5 -> 63 parts of 66 rows -> 128
    (8192, 4096, 128256, 256),  # 31.3 -> 32 parts of 256
    (100, 4096, 1000, 100),  # never more than there are
])
def test_rows_of_a_chunk(rows: int, hidden: int, vocab: int, chunk: int) -> None:
    assert chunk_rows(rows, hidden, vocab) == chunk


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", ["pure-bf16", "amp-bf16"])
def test_the_same_flops_and_far_fewer_logits(precision: str, tied: bool) -> None:
    whole, chunked = lowered(False, precision, tied), lowered(True, precision, tied)
    assert chunked.architecture.parameters == whole.architecture.parameters
    flops = [low.architecture.forward_flops + low.architecture.backward_flops for low in (whole, chunked)]
    assert flops[0] == pytest.approx(flops[1])
    high, low = peak(whole.job.programs[0]), peak(chunked.job.programs[0])
    assert low.steady and high.category_peaks["logits"] > 2 * 4096 * 32000 * 2
    assert low.category_peaks["logits"] <= 128 * 32000 * 4
    assert low.peak_allocated_bytes < high.peak_allocated_bytes


def test_gradients_of_input_and_weight_wait_from_forward_to_backward() -> None:
    whole, chunked = (peak(lowered(c).job.programs[0]).phases["end_of_forward"] for c in (False, True))
    assert chunked["workspace"] - whole["workspace"] == 2 * (4096 * 512 + 32000 * 512)


def test_an_encoder_has_no_chunked_loss() -> None:
    with pytest.raises(UserError) as caught:
        lowered(True, kind="encoder", positions="learned")
    assert caught.value.faults[0].field == "training.chunked_loss"


def test_torchtune_makes_eight_chunks_the_last_smaller() -> None:
    assert output_chunks(4096) == [512] * 8
    assert output_chunks(1001) == [126] * 7 + [119]


@pytest.mark.parametrize("tied", [False, True])
def test_torchtune_keeps_the_logits_and_widens_a_chunk(tied: bool) -> None:
    """By hand: 4,096 rows of 32,000 logits. Compiled, they stay in bf16 until backward has put their gradients in
    their place (beside two numbers a row); eager, the log-softmax of all stays in fp32, made from logits of 2 bytes
    and a chunk in fp32."""
    compiled, eager = (lowered(True, tied=tied, modules="plain", compiled=c) for c in (True, False))
    logits = 4096 * 32000
    assert peak(compiled.job.programs[0]).category_peaks["logits"] == pytest.approx(2 * logits, rel=2e-4)
    assert peak(eager.job.programs[0]).category_peaks["logits"] == pytest.approx(6 * logits + 4 * logits // 8, rel=1e-4)
    whole = lowered(False, tied=tied, modules="plain", compiled=True)
    flops = [low.architecture.forward_flops + low.architecture.backward_flops for low in (whole, compiled)]
    assert flops[0] == pytest.approx(flops[1])
    assert peak(compiled.job.programs[0]).steady


@pytest.mark.parametrize(("precision", "modules", "compiled", "per_logit"), [
    ("amp-bf16", "plain", True, 2 + 2), ("pure-bf16", "transformers", True, 2 + 2),  # the logits, and their gradient
    ("pure-bf16", "transformers", False, 4 + 4 + 4),  # wide: log-softmax, its gradient, that of the logits
    ("pure-bf16", "plain", True, 2 + 2 + 2), ("pure-bf16", "plain", False, 2 + 2 + 2),  # nothing is widened
])
def test_a_compiled_loss_keeps_no_wide_copy(precision: str, modules: str, compiled: bool, per_logit: int) -> None:
    """A widened loss is one kernel each way when compiled, in time as in memory: of a row its maximum and the
    logarithm of its sum stay."""
    low = lowered(False, precision, modules=modules, compiled=compiled)
    logits, rows = 4096 * 32000, 4096
    found = peak(low.job.programs[0]).category_peaks["logits"]
    assert found == pytest.approx(per_logit * logits, rel=0.01)
    loss = low.architecture.stack[-1].operators[-1]
    widened = compiled and per_logit == 4
    assert sum(k.bytes for k in (*loss.forward, *loss.backward)) == pytest.approx(
        3 * 2 * logits if widened else {"plain": 14, "transformers": 40}[modules] * logits)
    assert sum(tensor.size_bytes for tensor in loss.saved) == (
        2 * logits + 8 * rows if widened else (2 if modules == "plain" else 4) * logits)


@pytest.mark.parametrize("modules", ["plain", "transformers"])
def test_a_frozen_head_makes_no_weight_gradient(modules: str) -> None:
    lora = {"method": "lora", "rank": 8, "targets": ["query", "value"], "base": "bf16"}
    frozen, trained = lowered(True, modules=modules, finetune=lora), lowered(True, modules=modules)
    head = [low.architecture.stack[-1].operators[-1] for low in (frozen, trained)]
    products = [[k.variant for k in (*op.forward, *op.backward) if k.op == "gemm"] for op in head]
    assert products[0] == [variant for variant in products[1] if variant != "nt"]
    assert peak(frozen.job.programs[0]).steady


@pytest.mark.parametrize(("modules", "precision", "said"), [
    ("transformers", "pure-bf16", "never be trained"), ("plain", "amp-bf16", "no autocast")])
def test_a_head_that_is_trained_beside_takes_torchtunes_modules(modules: str, precision: str, said: str) -> None:
    base = "fp32" if precision == "amp-bf16" else "bf16"
    with pytest.raises(UserError, match=said):
        lowered(True, precision, modules=modules,
                finetune={"method": "lora", "rank": 8, "targets": ["query", "head"], "base": base})


#: torchtune 0.6.1's LoRALinear and CEWithChunkedOutputLoss behind four frozen blocks of GPT, PyTorch 2.13 on fake
#: tensors: sequences, tokens, dropout, peak of forward (without the embedding's output, which the script alone keeps).
LORA_HEAD = [(2, 512, 0.0, 538415616), (1, 1024, 0.0, 539193856), (2, 512, 0.1, 539202048), (1, 1024, 0.1, 539980288)]


@pytest.mark.parametrize(("batch", "sequence", "dropout", "forward"), LORA_HEAD)
def test_chunks_pass_the_branch_of_a_head(batch: int, sequence: int, dropout: float, forward: int) -> None:
    """Within 10 KB of PyTorch: of several sequences a chunk is copied before A reads it, of one it is a view."""
    asked = resolve({
        "name": "t", "cluster": {"topology": "dgx-a100-80g", "gpus_per_node": 1},
        "model": {"kind": "decoder", "gated_mlp": False, "positions": "learned", "norm": "layernorm", "bias": True,
                  "tied_embeddings": True, "layers": 4, "hidden": 768, "heads": 12, "ffn": 3072, "vocab": 50304,
                  "max_positions": sequence, "dropout": 0.0},
        "training": {"micro_batch": batch, "global_batch": batch, "sequence": sequence, "precision": "pure-bf16",
                     "chunked_loss": True, "finetune": {"method": "lora", "rank": 8, "targets": ["head"],
                                                        "base": "bf16", "dropout": dropout}},
        "software": {"framework": "pytorch", "year": 2026, "modules": "plain", "optimizer_kernel": "foreach"}})
    low = lower(asked)
    assert predicted(low, "none", False)["phase_peaks"]["forward"] == pytest.approx(forward, abs=16 * 1024)
    assert peak(low.job.programs[0]).steady


@pytest.mark.parametrize(("rows", "copies"), [(1, 0), (4, 2)])
def test_kernels_of_a_head_with_lora_in_chunks(rows: int, copies: int) -> None:
    """By hand, of 8 chunks: three products forward, five backward (the frozen head's own weight has no gradient), seven
    sums of each matrix' gradient, and copies of a chunk where there are several sequences."""
    low = lowered(True, modules="plain", micro=rows,
                  finetune={"method": "lora", "rank": 8, "targets": ["head"], "base": "bf16", "dropout": 0.0})
    loss = low.architecture.stack[-1].operators[-1]
    forward, backward = ([k.variant for k in way if k.op == "gemm"] for way in (loss.forward, loss.backward))
    assert Counter(forward) == {"tn": 3 * 8}
    assert Counter(backward) == {"nn": 3 * 8, "nt": 2 * 8}
    assert sum(k.launches for k in loss.backward if k.variant == "chunk_gradient_add") == 2 * 7
    assert sum(k.launches for k in loss.forward if k.variant == "chunk_copy") == copies * 8
    assert {p.name.rsplit(".", 1)[-1]: p.shape for p in loss.parameters} == {"lora_A": (8, 512), "lora_B": (32000, 8)}


# ----------------------------------------------------------------------------------- a vocabulary that ranks share, T5
def titan(tensor: int = 4, batch: int = 2, sequence: int = 512, *, framework: str = "torchtitan",
          modules: str = "plain", chunked: bool = True, finetune: dict[str, Any] | None = None, **parallel: Any) -> Any:
    return resolve({
        "name": "t", "cluster": {"topology": "dgx-a100-80g", "nodes": 1, "gpus_per_node": tensor},
        "model": {"kind": "decoder", "gated_mlp": True, "activation": "silu", "positions": "rotary", "norm": "rmsnorm",
                  "bias": False, "tied_embeddings": False, "layers": 2, "hidden": 1024, "heads": 16, "ffn": 4096,
                  "vocab": 128000},
        "training": {"micro_batch": batch, "global_batch": batch, "sequence": sequence, "precision": "pure-bf16",
                     "chunked_loss": chunked} | ({"finetune": finetune} if finetune else {}),
        "parallel": {"strategy": "none", "tensor": tensor, **parallel},
        "software": {"framework": framework, "year": 2026, "modules": modules}})


#: torchtitan 0.3.0's ChunkedLossWrapper over _LossParallelCrossEntropy on one of 4 ranks (32,000 of 128,000 logits of
#: 1,024 tokens of width 1,024 in bf16), PyTorch 2.13 on fake tensors: sequences, tokens, highest point above what was
#: there (with labels' few kilobytes), and what is left: the head's gradient and that of its input.
CUT = [(2, 512, 154019328), (1, 1024, 151913984)]


@pytest.mark.parametrize(("batch", "sequence", "highest"), CUT)
def test_chunks_of_a_slice_of_the_vocabulary_are_what_pytorch_allocates(
    batch: int, sequence: int, highest: int,
) -> None:
    asked = titan(batch=batch, sequence=sequence)
    program = build(asked, stack_of(asked.software), batch).stack[-1].program
    assert program is not None
    run = Run("", keep_gradients=True, early_stop=False)
    inputs = [run.tensor(batch * sequence * 1024, "bf16", Boundary())]
    start = run.memory.total
    run.memory.mark()
    chunked.loss(run, program.style, inputs, batch * sequence)
    assert run.memory.top - start == pytest.approx(highest, abs=16 * 1024)


@pytest.mark.parametrize("scattered", [False, True])
def test_slices_meet_three_times_a_chunk_and_once_for_the_input(scattered: bool) -> None:
    """By hand: the largest logit, the sum of exponentials and the label's of 128 tokens, 8 times; the gradient of the
    input of all chunks at once. No product but those of the whole loss, and an eighth of the logits."""
    whole, chunks = (lower(titan(chunked=c, sequence_parallel=scattered)) for c in (False, True))
    made, of_whole = build(titan(), stack_of(titan().software), 2).stack[-1], whole.architecture.stack[-1]
    entry, loss = made.operators[-2:]
    assert loss.joint == Joint("vocabulary_loss", 1024, "fp32", times=8) and entry.joint is not None
    assert entry.joint.kind == "column" and entry.joint.elements == 1024 * 1024
    gemms = [k for k in loss.forward if k.op == "gemm"]
    assert 4 * sum(k.flops for k in gemms) == of_whole.forward_flops + of_whole.backward_flops
    adds = [k for k in loss.forward if k.variant == "chunk_weight_gradient_add"]
    assert len(adds) == 7 and adds[0].bytes == 3 * 2 * 32000 * 1024
    peaks = [peak(low.job.programs[0]) for low in (whole, chunks)]
    assert all(one.steady for one in peaks)
    assert peaks[1].category_peaks["logits"] <= peaks[0].category_peaks["logits"] / 6
    joints = Joints(Calls(("tensor",)), scattered, hides=False, pipelined=False, keeps=False)
    calls = Counter(item.call.kind for op in (entry, loss) for item in (*joints.forward(op), *joints.backward(op))
                    if isinstance(item, InlineCall))
    assert calls == ({"all_reduce": 24, "reduce_scatter": 1, "all_gather": 1} if scattered else {"all_reduce": 25})


def test_torchtune_gathers_the_logits_of_every_chunk() -> None:
    """torchtune 0.6.1's chunked_output and CEWithChunkedOutputLoss over ColwiseParallel(output_layouts=Replicate()), 4
    ranks, PyTorch 2.13 on fake tensors: 854,070,784 bytes at most (labels' few kilobytes in), 526,390,272 from forward
    to backward. Eight gathers forward, eight sums of a chunk's input gradient backward."""
    asked = titan(batch=1, sequence=1024, framework="pytorch")
    layer = build(asked, stack_of(asked.software), 1).stack[-1]
    assert layer.program is not None and peak(lower(asked).job.programs[0]).steady
    run = Run("", keep_gradients=True, early_stop=False)
    inputs = [run.tensor(1024 * 1024, "bf16", Boundary())]
    run.memory.mark()
    kept = chunked.loss(run, layer.program.style, inputs, 1024)
    assert kept.sink is not None
    assert run.memory.top == pytest.approx(854070784, abs=16 * 1024)
    assert run.memory.total == pytest.approx(526390272, abs=16 * 1024)
    joints = Joints(Calls(("tensor",)), sequence=False, hides=False, pipelined=False, keeps=False)
    calls = Counter((item.call.kind, item.call.size_bytes) for op in layer.operators
                    for item in (*joints.forward(op), *joints.backward(op)) if isinstance(item, InlineCall))
    assert calls == {("all_gather", 2 * 128 * 128000): 8, ("all_reduce", 2 * 128 * 1024): 8}


@pytest.mark.parametrize(("options", "field"), [
    ({"framework": "pytorch", "sequence_parallel": True}, "parallel.sequence_parallel"),
    ({"modules": "transformers"}, "training.chunked_loss"),
    ({"framework": "megatron", "modules": "megatron"}, "training.chunked_loss"),
    ({"finetune": {"method": "lora", "rank": 8, "targets": ["head"], "base": "bf16"}}, "training.finetune.targets")])
def test_a_cut_vocabulary_has_chunks_where_code_has_them(options: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError) as caught:
        lower(titan(**options))
    assert [fault.field for fault in caught.value.faults] == [field]


def test_a_frozen_head_in_chunks_of_a_cut_vocabulary_has_no_gradient() -> None:
    lora = {"method": "lora", "rank": 8, "targets": ["query"], "base": "bf16"}
    program = lower(titan(finetune=lora)).job.programs[0]
    assert peak(program).steady
    loss = build(titan(finetune=lora), stack_of(titan().software), 2).stack[-1].operators[-1]
    assert not [k for k in loss.forward if k.variant in ("nt", "chunk_weight_gradient_add")]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("modules", ["transformers", "plain"])
def test_an_encoder_decoder_takes_its_loss_in_chunks(modules: str, tied: bool) -> None:
    """The decoder's tokens reach the head of T5: the same products, and the logits of a chunk, or all in 2 bytes."""
    t5 = {"kind": "encoder-decoder", "decoder_layers": 2, "positions": "relative", "norm": "rmsnorm", "bias": False}
    whole, chunks = (lowered(c, tied=tied, modules=modules, **t5) for c in (False, True))
    flops = [low.architecture.forward_flops + low.architecture.backward_flops for low in (whole, chunks)]
    assert flops[0] == pytest.approx(flops[1])
    used = peak(chunks.job.programs[0])
    logits = 4096 * 32000
    assert used.steady
    assert used.category_peaks["logits"] == pytest.approx(
        2 * 128 * 32000 if modules == "transformers" else 6 * logits + 4 * logits // 8, rel=1e-4)
    scaled = [op.name for op in chunks.architecture.stack[-1].operators]
    assert ("head_scale" in scaled) == tied
