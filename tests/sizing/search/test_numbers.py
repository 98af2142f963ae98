"""Numbers of GPUs that are asked for: a search under a time limit looks at each, and what came of none is told."""

from __future__ import annotations

from typing import Any

import pytest

from sim.scenario import resolve
from sim.sizing import Choice, size
from sim.sizing.words.size import lines

#: 13B on GPUs of 40 GB, which does not fit on one.
TIGHT: dict[str, Any] = {
    "name": "tight", "cluster": {"topology": "dgx-a100-40g"}, "model": {"preset": "llama-2-13b"},
    "training": {"micro_batch": 1, "global_batch": 64, "sequence": 2048, "recompute": "full", "precision": "fsdp-bf16"},
    "parallel": {"strategy": "fsdp"}, "software": {"framework": "pytorch", "year": 2025}}
AXES: dict[str, Any] = {"context": [1], "schedules": ["1f1b"], "virtual_stages": [1]}

pytestmark = pytest.mark.usefixtures("once")


def test_a_search_that_is_over_at_once_has_a_layout_that_fits_of_every_number() -> None:
    found = size(resolve(TIGHT), Choice([8, 16, 32], **AXES), seconds=0.0)
    assert not found.proven and {row["gpus"] for row in found.rows if row["fits"]} == {8, 16, 32}
    assert not found.without


def test_a_search_with_little_time_has_the_layout_of_the_best_on_every_number() -> None:
    choice = Choice([8, 16, 32], pipeline=[1], tensor=[1], micro_batch=[1, 2], **AXES)
    whole, found = size(resolve(TIGHT), choice), size(resolve(TIGHT), choice, seconds=3.0)
    for gpus in (8, 16, 32):
        best, of_all = (min(row["step_time_s"] for row in one.front if row["gpus"] == gpus) for one in (found, whole))
        assert best <= 1.1 * of_all


def test_numbers_that_came_to_nothing_are_told() -> None:
    found = size(resolve(TIGHT), Choice([1, 8, 12], pipeline=[1], micro_batch=[1], **AXES), top=1)
    assert {one.gpus: one.reason for one in found.without} == {1: "no layout fits", 12: "no layout is possible"}
    text = "\n".join(lines(found))
    assert "on 1 GPU: no layout fits\n" in text and "on 12 GPUs: no layout is possible\n" in text
    assert found.to_json()["without"][0] == {"cluster": "dgx-a100-40g", "gpus": 1, "reason": "no layout fits"}


def test_numbers_that_cannot_beat_fewer_are_told() -> None:
    """Two nodes with a slow network between them take longer than one."""
    slow = {**TIGHT, "cluster": {"topology": "p3dn"}, "model": {"preset": "gpt2"}, "software": {},
            "training": {"micro_batch": 1, "global_batch": 16, "sequence": 64, "precision": "amp-fp16"}}
    found = size(resolve(slow), Choice([8, 16], tensor=[1], pipeline=[1], micro_batch=[1], strategies=["ddp"], **AXES),
                 top=1)
    assert [row["gpus"] for row in found.front] == [8] and found.front_proven
    assert [(one.gpus, one.reason) for one in found.without] == [
        (16, "none was simulated: none can be on the front")]
