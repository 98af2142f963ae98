"""The miniature of autograd against sizes counted by hand, and against what the operators say they keep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sim.model import build
from sim.model.eager import KINDS, layer_profile
from sim.model.eager.tensors import operations as op
from sim.model.eager.tensors.autograd import Boundary, Run, Tensor
from sim.model.eager.tensors.storage import ACTIVATIONS, GRADIENTS, WORKSPACE, Storage, rounded
from sim.scenario import resolve
from sim.software import stack_for

KIB = 1024


def started(elements: int = KIB, keep: bool = True, **options: Any) -> tuple[Run, Tensor, Boundary]:
    run, boundary = Run(options.pop("autocast", ""), keep, options.pop("early_stop", True)), Boundary()
    return run, run.tensor(elements, "fp32", boundary), boundary


def go_back(run: Run, out: Tensor) -> None:
    gradient = run.new(out.elements, out.dtype)
    assert out.sink is not None
    out.sink.receive(run, gradient)
    del gradient, out
    run.backward()


def test_the_allocator_rounds_to_512_bytes() -> None:
    assert [rounded(n, "fp32") for n in (1, 128, 129)] == [512, 512, 1024]


def test_storages_live_as_long_as_references() -> None:
    run = Run("", True, True)
    one = run.new(KIB, "fp32")
    two = Storage(run.memory, 512, WORKSPACE)
    assert run.memory.total == 4 * KIB + 512
    del two
    assert run.memory.total == 4 * KIB
    assert run.memory.top == 4 * KIB + 512
    one.hand_over()
    assert run.memory.total == 0


def test_a_linear_layer_by_hand() -> None:
    """16 rows of 64: x is kept; backward makes dx (4 KiB), dW (32 KiB) and db (512 B) beside dy (8 KiB)."""
    run, x, boundary = started(16 * 64)
    run.memory.mark()
    y = op.linear(run, x, 64, 128, True, dtype="fp32")
    del x
    assert run.memory.live[ACTIVATIONS] == (4 + 8) * KIB
    run.memory.mark()
    y.storage.hand_over()
    go_back(run, y)
    assert run.memory.top == (4 + 8 + 4 + 32) * KIB + 512
    assert boundary.gradient is not None
    assert run.memory.live[GRADIENTS] == 32 * KIB + 512
    assert run.memory.live[ACTIVATIONS] == 0


@pytest.mark.parametrize("slices", [1, 4])
def test_gathered_keys_and_values_live_as_long_as_the_kernel(slices: int) -> None:
    """q, k, v and the output are 4 KiB each, whole keys and values 16 KiB each: beside the output forward, and with
    their gradients beside dq, dk, dv backward; nothing of them is kept."""
    run, x, _ = started()
    parts = [op.to(run, op.clone(run, x), "fp32") for _ in range(3)]
    before = run.memory.total
    run.memory.mark()
    out = op.attention(run, parts[0], parts[1], parts[2], 16, gathered=slices)
    whole = 2 * 4 * slices * KIB if slices > 1 else 0
    assert run.memory.top == before + 4 * KIB + 3 * 512 + whole
    assert run.memory.total == before + 4 * KIB + 3 * 512
    del x, parts
    out.storage.hand_over()
    run.memory.mark()
    held = run.memory.total
    go_back(run, out)
    assert run.memory.top == held + (4 + 3 * 4) * KIB + 2 * whole


@pytest.mark.parametrize("slices", [1, 4])
def test_gathered_keys_of_a_spelled_out_product(slices: int) -> None:
    """q and k are 4 KiB each, whole keys 16 KiB: beside the scores forward, with their gradient backward."""
    run, x, _ = started()
    q, k = (op.to(run, op.clone(run, x), "fp32") for _ in range(2))
    before = run.memory.total
    run.memory.mark()
    scores = op.matmul(run, q, k, 512, slices)
    whole = 4 * slices * KIB if slices > 1 else 0
    assert (run.memory.top, run.memory.total) == (before + 2 * KIB + whole, before + 2 * KIB)
    del x, q, k
    scores.storage.hand_over()
    run.memory.mark()
    held = run.memory.total
    go_back(run, scores)
    assert run.memory.top == held + (2 + 2 * 4) * KIB + 2 * whole


@pytest.mark.parametrize("slices", [1, 4])
def test_gathered_rows_and_their_gradient_stay_until_the_weights_gradient_is_there(slices: int) -> None:
    """A slice of x is 4 KiB, whole 16 KiB; the output's gradient has twice that, the weight's 32 KiB. Megatron's
    total_input, grad_input and sub_grad_input are all there when grad_weight comes."""
    run, x, _ = started()
    y = op.linear(run, op.clone(run, op.to(run, x, "fp32")), 64, 128, False, dtype="fp32", gathered=slices)
    del x
    y.storage.hand_over()
    run.memory.mark()
    held = run.memory.total
    go_back(run, y)
    gathered = 2 * 4 * slices * KIB if slices > 1 else 0
    assert run.memory.top == held + 2 * 4 * slices * KIB + gathered + 4 * KIB + 32 * KIB


def test_autocast_keeps_half_copies_and_drops_the_cache() -> None:
    run, x, boundary = started(16 * 64, autocast="bf16")
    y = op.linear(run, x, 64, 128, True, dtype="fp32")
    copies = KINDS.index("gathered_parameters")
    assert run.memory.live[copies] == 16 * KIB + 512
    run.cache.clear()
    assert run.memory.live[copies] == 16 * KIB  # the bias' copy is not saved
    go_back(run, y)
    assert run.memory.live[copies] == 0
    assert run.memory.live[GRADIENTS] == 32 * KIB + 512
    del boundary


def test_gradients_meet_in_place() -> None:
    """x + gelu(x): two gradients of x, of which one remains."""
    run, x, boundary = started()
    y = op.add(run, x, op.unary(run, x, saves_input=True))
    del x
    y.storage.hand_over()
    go_back(run, y)
    assert boundary.gradient is not None
    assert run.memory.total == 4 * KIB


def test_a_checkpoint_keeps_its_input_and_makes_the_rest_again() -> None:
    def twice(run: Run, x: Tensor) -> Tensor:
        return op.unary(run, op.unary(run, x, saves_output=True), saves_output=True)

    run, x, boundary = started()
    y = run.checkpoint(twice, x)
    del x
    assert run.memory.live[ACTIVATIONS] == 2 * 4 * KIB  # input and output
    y.storage.hand_over()
    run.memory.mark()
    go_back(run, y)
    # the input, both outputs again; dy, dx of the last
    assert run.memory.top == 5 * 4 * KIB
    del y
    assert boundary.gradient is not None
    assert run.memory.total == 4 * KIB


def test_early_stop_skips_what_follows_the_last_saved_tensor() -> None:
    tops = []
    for early_stop in (True, False):
        run, x, boundary = started(early_stop=early_stop)
        y = run.checkpoint(lambda run, x: op.scale(run, op.scale(run, op.unary(run, x, saves_input=True))), x)
        del x
        run.memory.mark()
        go_back(run, y)
        tops.append(run.memory.top)
        del y, boundary
    assert tops[0] < tops[1]


SHAPES: list[dict[str, Any]] = [
    {"kind": "decoder", "layers": 2, "hidden": 128, "heads": 4, "vocab": 512},
    {"kind": "decoder", "layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "vocab": 512, "gated_mlp": True,
     "positions": "rotary", "norm": "rmsnorm", "bias": False, "tied_embeddings": False},
    {"kind": "encoder", "layers": 2, "hidden": 128, "heads": 4, "vocab": 512},
    {"kind": "encoder-decoder", "layers": 2, "hidden": 128, "heads": 4, "vocab": 512, "norm": "rmsnorm", "bias": False},
]


@pytest.mark.parametrize("model", SHAPES, ids=["gpt", "llama", "bert", "t5"])
@pytest.mark.parametrize("precision", ["fp32", "amp-bf16", "pure-bf16"])
@pytest.mark.parametrize("modules", ["plain", "transformers"])
@pytest.mark.parametrize("attention", ["flash", "eager"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_blocks_keep_what_their_operators_say(model: dict[str, Any], precision: str, modules: str, attention: str,
                                              dropout: float) -> None:
    """Two descriptions of one layer: its kernels' saved tensors and its module code."""
    if model["kind"] != "decoder" and modules == "plain":
        pytest.skip("BERT and T5 are Hugging Face's code")
    if model.get("kv_heads") and modules == "plain":
        pytest.skip("plain modules have no grouped heads")
    scenario = resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": 1, "gpus_per_node": 1},
        "model": {**model, "dropout": dropout}, "parallel": {"strategy": "none"},
        "training": {"micro_batch": 2, "global_batch": 2, "sequence": 64, "precision": precision,
                     "attention": attention}})
    stack = stack_for("pytorch", 2026, False, {}, modules)
    for layer in dict.fromkeys(build(scenario, stack, 2).stack):
        if layer.kind != "block":
            continue
        profile = layer_profile(layer, "none", True)
        said = sum(rounded(t.elements, t.dtype) for t in layer.saved)
        assert profile.forward.net[ACTIVATIONS] == said
        assert profile.backward.net[GRADIENTS] == sum(
            rounded(p.numel, "fp32" if precision != "pure-bf16" else "bf16") for p in layer.parameters)


def test_a_layer_without_module_code_is_estimated() -> None:
    scenario = resolve({
        "name": "x", "cluster": {"topology": "dgx-a100-80g", "nodes": 1, "gpus_per_node": 1}, "model": SHAPES[0],
        "parallel": {"strategy": "none"}, "training": {"micro_batch": 2, "global_batch": 2, "sequence": 64}})
    layer = build(scenario, stack_for("pytorch", 2026), 2).stack[1]
    for policy in ("none", "full"):
        exact, rough = (layer_profile(one, policy, True) for one in (layer, replace(layer, program=None)))
        assert rough.forward.net[ACTIVATIONS] == exact.forward.net[ACTIVATIONS]
        assert 0.5 < sum(rough.backward.peak) / sum(exact.backward.peak) < 2


def mixed_product(run: Run, x: Tensor) -> Tensor:
    """A product of a half and a wide tensor that both come of x, as in GELU under autocast."""
    return op.mul(run, op.to(run, x, "bf16"), op.scale(run, x))


@pytest.mark.parametrize(("checkpointed", "highest"), [(False, 20), (True, 22)])
def test_the_engine_casts_a_gradient_when_a_checkpoint_has_let_go_of_what_it_brought_back(
    checkpointed: bool, highest: int,
) -> None:
    """In KiB: saved 2 and 4, dy 4, two wide gradients of 4, then the half input's cast of 2 beside them: 20. A
    checkpoint has x besides (4), but nothing saved any more when the engine casts: 22, not 24."""
    run, x, boundary = started()
    out = run.checkpoint(mixed_product, x) if checkpointed else mixed_product(run, x)
    out.storage.hand_over()
    del x
    assert run.memory.live[ACTIVATIONS] == (4 if checkpointed else 2 + 4) * KIB
    run.memory.mark()
    go_back(run, out)
    assert run.memory.top == highest * KIB
    assert boundary.gradient is not None


def gpt(modules: str, attention: str, **training: Any) -> Any:
    """Forward of a checkpointed GPT block (4096 positions of 256, 4 heads): what it has at most beside its input."""
    scenario = resolve({
        "name": "x", "cluster": {"topology": "single-a100-80g-sxm"},
        "model": {"kind": "decoder", "gated_mlp": False, "positions": "learned", "norm": "layernorm", "bias": True,
                  "tied_embeddings": True, "layers": 2, "hidden": 256, "heads": 4, "ffn": 1024, "vocab": 512,
                  "max_positions": 4096, "dropout": training.pop("dropout", 0.0)},
        "training": {"micro_batch": 1, "global_batch": 1, "sequence": 4096, "precision": "fp32", "recompute": "full",
                     "attention": attention, **training},
        "software": {"framework": "pytorch", "year": 2026, "modules": modules}})
    stack = stack_for("pytorch", 2026, False, {}, modules)
    return layer_profile(build(scenario, stack, 1).stack[1], "full", True).forward


MIB = KIB * KIB


def test_a_checkpointed_block_of_one_function_has_queries_and_attentions_output_to_its_end() -> None:
    """4096 x 256 fp32 are 4 MiB. Plain, at GELU: x, qkv 12, attention's output 4, the sum 4, up 16 and its GELU 16; x
    itself is the layer's input. Nobody has the norms' outputs."""
    peak = gpt("plain", "flash")
    assert (peak.operator, sum(peak.peak)) == ("activation", (12 + 4 + 4 + 16 + 16) * MIB)


def test_masked_scores_last_until_dropout_has_run() -> None:
    """Scores of 4 x 4096 x 4096 fp32 are 256 MiB: masked, softmax's, dropout's and its mask of a quarter; the tril of
    16 MiB; qkv."""
    peak = gpt("plain", "eager", dropout=0.1)
    assert (peak.operator, sum(peak.peak)) == ("attention", (3 * 256 + 64 + 16 + 12) * MIB)


def test_hugging_faces_gelu_has_four_tensors_at_once() -> None:
    """x, its half, the power, and what is made of it (16 MiB each); beside them attention's output, which GPT2Block has
    in a variable, the sum, and the norm's output (4 each)."""
    peak = gpt("transformers", "flash")
    assert (peak.operator, sum(peak.peak)) == ("activation", (4 * 16 + 3 * 4) * MIB)
