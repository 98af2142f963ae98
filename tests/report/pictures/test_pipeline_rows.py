"""What the picture of a pipeline is drawn from: every action of every stage once, in order, with its micro-batch."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import sim
from sim.report.folder import rounded, write_run
from sim.report.pictures.pipeline import Boxes, bubble_share, pipeline_digest
from sim.report.pictures.pipeline_rows import boxes_of
from sim.report.result import Result
from sim.scenario import resolve

MODEL = {"kind": "decoder", "layers": 8, "hidden": 512, "heads": 8, "vocab": 1024, "max_positions": 256,
         "positions": "learned", "norm": "layernorm", "bias": True, "tied_embeddings": False}


def run(year: int = 2023, **parallel: Any) -> Result:
    """4 stages and 8 micro-batches, 2 pipelines side by side."""
    return sim.run(resolve({
        "name": "pipeline", "cluster": {"topology": "dgx-a100-80g", "nodes": 1}, "model": MODEL,
        "training": {"micro_batch": 1, "global_batch": 16, "sequence": 256, "precision": "megatron-bf16"},
        "parallel": {"strategy": "ddp", "pipeline": 4, **parallel},
        "software": {"framework": "megatron", "year": year}}))


def boxes(result: Result) -> Boxes:
    found = boxes_of(result)
    assert found is not None
    return found


@pytest.mark.parametrize("parallel", [
    {}, {"schedule": "gpipe"}, {"schedule": "interleaved", "virtual_stages": 2}, {"schedule": "zb-h1"},
    {"strategy": "zero1", "year": 2025}, {"strategy": "zero1", "year": 2025, "schedule": "zb-v", "virtual_stages": 2},
    {"strategy": "zero1", "year": 2025, "schedule": "interleaved", "virtual_stages": 2}])
def test_every_action_is_a_box(parallel: dict[str, Any]) -> None:
    found = boxes(run(**parallel))
    kinds = "FBW" if "zb" in str(parallel) else "FB"
    counted = Counter(zip(found.stage.tolist(), found.kind.tolist(), found.chunk.tolist(), found.micro.tolist(),
                          strict=True))
    assert set(counted) == {(stage, kind, chunk, micro) for stage in range(4) for kind in kinds
                            for chunk in range(parallel.get("virtual_stages", 1)) for micro in range(8)}
    assert set(counted.values()) == {1}
    for stage in range(4):
        own = found.take(found.stage == stage)
        assert (own.start_s[1:] >= own.end_s[:-1] - 1e-12).all()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_micro_batch_flows_up_and_back(schedule: str) -> None:
    """Each forward begins after the one of the stage before has ended, each backward after that of the stage behind."""
    found = boxes(run(schedule=schedule))
    at = {(s, k, m): (b, e) for s, k, m, b, e in zip(
        found.stage.tolist(), found.kind.tolist(), found.micro.tolist(), found.start_s.tolist(), found.end_s.tolist(),
        strict=True)}
    for stage in range(3):
        for micro in range(8):
            assert at[stage + 1, "F", micro][0] >= at[stage, "F", micro][1]
            assert at[stage, "B", micro][0] >= at[stage + 1, "B", micro][1]


def test_no_pipeline_no_boxes() -> None:
    assert boxes_of(run(pipeline=1)) is None


def test_a_report_of_a_pipeline_has_its_picture(tmp_path: Path) -> None:
    result = run()
    assert tmp_path / "pipeline.png" in write_run(tmp_path, result, "text", {})
    digest = json.loads((tmp_path / "pictures.json").read_text())["pipeline.png"]
    assert digest == rounded(pipeline_digest(boxes(result), result.step_time_s))
    assert digest["boxes"] == 64
    assert 0 < digest["bubble_share"] == pytest.approx(bubble_share(boxes(result)))
