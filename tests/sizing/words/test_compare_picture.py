"""The picture of a comparison holds its labels and its legend whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.report.pictures import style as look
from sim.scenario import resolve
from sim.sizing.compare import compare
from sim.sizing.words.compare import write_picture

SMALL: dict[str, Any] = {"cluster": {"topology": "dgx-a100-80g"}, "model": {"preset": "gpt2", "layers": 2},
                         "training": {"micro_batch": 1, "global_batch": 8, "sequence": 128}}


@pytest.mark.parametrize("name", ["a", "Llama-3-8B fine-tuning on eight cards of the cellar's cluster, second try"])
def test_nothing_of_the_picture_lies_outside(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(look, "save", lambda made, path: kept.append(made))
    write_picture(tmp_path, compare([resolve({**SMALL, "name": f"{name} {number}"}) for number in (1, 2)]))
    (made,) = kept
    made.canvas.draw()
    boxes = [text.get_window_extent() for text in (*made.axes[0].get_yticklabels(), *made.legends[0].get_texts())]
    assert len(made.legends[0].get_texts()) > 2
    assert all(box.x0 >= 0 and box.x1 <= made.bbox.x1 and box.y0 >= 0 and box.y1 <= made.bbox.y1 for box in boxes)
    legend, axes = made.legends[0].get_window_extent(), made.axes[0].get_window_extent()
    assert legend.y0 >= axes.y1 - 1  # above the bars, not on them
