"""Multi-token prediction: parameters as published, and FLOPs, bytes and collectives counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
from replayed_steps import asked_twice

from sim.api import run
from sim.errors import UserError
from sim.memory.ledger import peak
from sim.model.architecture import Architecture, Layer
from sim.model.eager import layer_profile
from sim.parallel import lower
from sim.scenario import Scenario, resolve

TOKENS, HIDDEN, VOCAB, BLOCKS = 512, 512, 2048, 4


def asked(further: int = 1, nodes: int = 1, **more: Any) -> Scenario:
    model = {"layers": BLOCKS, "hidden": HIDDEN, "heads": 8, "vocab": VOCAB, "ffn": 1024, "gated_mlp": True,
             "norm": "rmsnorm", "bias": False, "positions": "rotary", "tied_embeddings": False,
             "mtp_layers": further, **more.pop("model", {})}
    training = {"micro_batch": 1, "micro_steps": 8, "sequence": TOKENS, "precision": "megatron-bf16",
                **more.pop("training", {})}
    return resolve({
        "name": "further", "cluster": {"topology": "dgx-h100", "nodes": nodes}, "model": model, "training": training,
        "parallel": {"strategy": "zero1", **more.pop("parallel", {})},
        "software": {"framework": "megatron", "year": 2025, **more.pop("software", {})}})


def model(further: int, **more: Any) -> Architecture:
    return lower(asked(further, **more)).architecture


def kept(layer: Layer, policy: str = "none") -> int:
    return sum(layer_profile(layer, policy, keep_gradients=False).forward.net)


def test_deepseek_v3_has_as_many_parameters_as_its_authors_say() -> None:
    """11.5 billion of its own beside embedding and head (README of deepseek-ai/DeepSeek-V3)."""
    preset = {"model": {"preset": "deepseek-v3"}, "training": {"sequence": 4096}}
    found = [resolve({
        "name": "v3", "cluster": {"topology": "dgx-h100", "nodes": 32},
        "model": {**preset["model"], "mtp_layers": further},
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 4096, "precision": "megatron-bf16"},
        "parallel": {"strategy": "zero1", "expert": 64}, "software": {"framework": "megatron", "year": 2025},
    }) for further in (0, 1)]
    plain, more = (lower(one).architecture.parameters for one in found)
    assert 11.5e9 < more - plain < 11.65e9


def test_flops_are_a_block_a_projection_and_a_head_more() -> None:
    plain, one, two = (model(further) for further in (0, 1, 2))
    block, products = plain.stack[1], 2 * TOKENS * (2 * HIDDEN * HIDDEN + HIDDEN * VOCAB)
    assert one.forward_flops - plain.forward_flops == block.forward_flops + products
    assert two.forward_flops - one.forward_flops == block.forward_flops + products
    assert one.backward_flops - plain.backward_flops == block.backward_flops + 2 * products
    norms = 3 * HIDDEN
    assert two.parameters - one.parameters == one.parameters - plain.parameters == (
        plain.stack[1].numel + 2 * HIDDEN * HIDDEN + norms)


def test_what_is_kept_for_backward() -> None:
    plain, one = (model(further).stack for further in (0, 1))
    stream, row = 2 * TOKENS * HIDDEN, 4 * TOKENS
    loss = kept(plain[-1]) - stream - row - 512  # what it returns is not kept
    # the token's embedding, three norms' sums, what the projection reads and makes; the block; its norm's output
    inside = stream + 3 * row + 2 * stream + stream + kept(one[1]) + stream
    assert kept(one[-1]) - kept(plain[-1]) == inside + loss
    # recomputed in full, a checkpoint keeps the hidden state, which the head does as well, and the embedding
    assert kept(one[-1], "full") - kept(plain[-1]) == stream + stream + loss


def test_full_recomputation_runs_all_but_the_lookup_again() -> None:
    plain, again = run(asked()), run(asked(training={"recompute": "full"}))
    block = model(1).stack[1].forward_flops
    projected = block + 2 * TOKENS * 2 * HIDDEN * HIDDEN
    steps, replicas = 8, 8
    assert again.hardware_flops - plain.hardware_flops == pytest.approx(
        steps * replicas * (BLOCKS * block + projected))
    some = run(asked(training={"recompute": {"layers": BLOCKS}}))
    assert again.hardware_flops - some.hardware_flops == pytest.approx(steps * replicas * projected)


def test_stages_far_from_the_embedding_have_a_copy_of_it() -> None:
    """Its gradient and the embedding's are added up once a step; on one stage autograd does so."""
    def added(further: int, **parallel: Any) -> list[float]:
        program = lower(asked(further, parallel=parallel)).job.programs[-1]
        if "embedding" not in program.communicators:
            return []
        number = program.communicators.index("embedding")
        return [call.size_bytes for call in (program.collectives[row] for row in program.calls())
                if call.communicator == number]

    assert added(1, pipeline=4) == [4 * VOCAB * HIDDEN]
    assert added(0, pipeline=4) == added(1) == added(1, pipeline=2, schedule="zb-v") == []
    rows = [peak(lower(asked(1, parallel={"pipeline": 4})).job.programs[-1]).phases["after_init"]["gradients"],
            peak(lower(asked(0, parallel={"pipeline": 4})).job.programs[-1]).phases["after_init"]["gradients"]]
    own = model(1).parameters - model(0).parameters
    assert rows[0] - rows[1] == 4 * (own + VOCAB * HIDDEN)


@pytest.mark.parametrize("parallel", [{}, {"tensor": 2}, {"tensor": 2, "sequence_parallel": True}, {"pipeline": 4},
                                      {"pipeline": 2, "schedule": "zb-v"}, {"context": 2}])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("further", [1, 2, 3])
def test_nothing_is_left_of_a_step(parallel: dict[str, Any], recompute: str, further: int) -> None:
    job = lower(asked(further, parallel=parallel, training={"recompute": recompute})).job
    for program in job.programs:
        use = peak(program)
        assert use.steady
        assert asked_twice(program).top_asked == pytest.approx(use.peak_allocated_bytes, rel=0.01)


@pytest.mark.parametrize(("more", "words"), [
    ({"model": {"tied_embeddings": True}}, "head has a matrix of its own"),
    ({"software": {"modules": "transformers"}}, "transformers modules predict no further tokens"),
    ({"parallel": {"strategy": "fsdp"}, "software": {"framework": "megatron"}}, "beside strategy fsdp"),
    ({"training": {"finetune": {"method": "lora", "rank": 8, "targets": ["query"]}}}, "weights that are frozen"),
])
def test_what_is_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        lower(asked(1, **more))


def test_inference_leaves_them_out() -> None:
    mode = {"mode": {"inference": {"prompt": 128, "generate": 16, "batch": 1}}, "precision": "pure-bf16"}
    one, plain = (run(asked(further, training=mode, parallel={"strategy": "none", "tensor": 8}))
                  for further in (1, 0))
    assert one.step_time_s == plain.step_time_s
