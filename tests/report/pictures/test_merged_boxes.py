"""Forwards and backwards that run as one are still counted and drawn one by one."""

from __future__ import annotations

from collections import Counter

import sim
from sim.program import Label
from sim.report.pictures.pipeline_rows import MicroBatches, boxes_of, merges
from sim.scenario import resolve


def result(overlap: str) -> sim.Result:
    return sim.run(resolve({
        "name": "merged", "cluster": {"topology": "dgx-a100-80g", "nodes": 1, "gpus_per_node": 4},
        "model": {"kind": "decoder", "layers": 4, "hidden": 256, "heads": 8, "vocab": 512, "tied_embeddings": False,
                  "positions": "rotary", "max_positions": 256, "moe": {"experts": 4, "top_k": 1, "expert_ffn": 256}},
        "training": {"micro_batch": 1, "global_batch": 16, "sequence": 256, "precision": "megatron-bf16"},
        "parallel": {"strategy": "zero1", "pipeline": 2, "expert": 2, "schedule": "interleaved", "virtual_stages": 2,
                     "overlap_experts": overlap},
        "software": {"framework": "megatron", "year": 2025}}))


def test_every_action_has_a_box() -> None:
    plain, merged = result("none"), result("batches")
    assert not merges(plain) and merges(merged)
    for one in (plain, merged):
        boxes = boxes_of(one)
        assert boxes is not None
        actions = Counter(zip(boxes.stage.tolist(), boxes.kind.tolist(), boxes.chunk.tolist(), boxes.micro.tolist(),
                              strict=True))
        assert len(actions) == 2 * 2 * 2 * 8 and set(actions.values()) == {1}
        for stage in range(boxes.stages):
            own = boxes.take(boxes.stage == stage)
            assert (own.start_s[1:] >= own.end_s[:-1] - 1e-12).all()


def test_micro_batches_of_merged_actions_count_both() -> None:
    counted = MicroBatches("interleaved", 4)
    assert counted.of(Label("chunk1", "forward", "forward")) == 0
    assert counted.of(Label("chunk1+0", "backward", "forward and backward")) == 0
    assert counted.of(Label("chunk1", "forward", "forward")) == 2
    assert counted.of(Label("chunk0", "backward", "backward")) == 1


def test_an_action_in_which_the_host_reads_is_one() -> None:
    counted = MicroBatches("interleaved", 4)
    action, more = Label("chunk1", "forward", "forward"), Label("chunk1", "forward", "forward, on")
    assert [counted.of(label) for label in (action, more, more, action, more)] == [0, 0, 0, 1, 1]
