"""A layout that fits of every family, without touching the best."""

from pathlib import Path

import numpy as np
import pytest

from sim import sizing
from sim.api import load
from sim.sizing.search import round_out as module
from sim.sizing.space.families import FAMILIES

_SCENARIO = """\
name: families
cluster: {topology: dgx-a100-40g, nodes: 1}
model: {preset: llama-2-7b}
training: {micro_batch: 1, global_batch: 64, sequence: 4096, precision: fsdp-bf16}
parallel: {strategy: fsdp}
software: {framework: pytorch, year: 2024}
"""


@pytest.mark.whole
def test_every_family_with_room_shows_one_that_fits(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(_SCENARIO, encoding="utf-8")
    choice = sizing.Choice((8,), context=(1,), schedules=("1f1b",), micro_batch=(1,))
    found = sizing.size(load(path), choice, top=1)
    shown = {one.name: one for one in found.why.families}
    assert set(shown) <= set(FAMILIES) and {"FSDP", "tensor", "pipeline", "tensor + pipeline"} <= set(shown)
    for name, one in shown.items():
        assert one.best is not None or one.holds_best or one.ruled_out == one.covered, name
        if one.best is not None:
            assert one.best["step_time_s"] >= found.best[0]["step_time_s"]
    several = [row["step_time_s"] for row in found.rows if row["fits"]]
    assert found.proven and found.best[0]["step_time_s"] == min(several)


class _Bounds:
    memory_bytes = np.array([30, 20, 10, 30]) * 2.0**30
    capacity_bytes = np.full(4, 31 * 2.0**30)


class _Wish:
    margin_bytes = 0.0


class _Ranking:
    """Four rows, bounds rising; the lower a row's memory, the likelier it fits."""

    of, wish = _Bounds(), _Wish()
    values = np.array([1.0, 2.0, 3.0, np.inf])

    def tighten(self, rows: list[int]) -> None:
        return None


class _Runner:
    def __init__(self, fitting: int) -> None:
        self.rows: dict[int, bool] = {}
        self.fitting, self.asked = fitting, []  # type: ignore[var-annotated]

    def values(self, rows: list[int]) -> list[float]:
        self.asked.append(rows)
        self.rows.update((row, row == self.fitting) for row in rows)
        return [1.0 if row == self.fitting else np.inf for row in rows]


def test_rows_come_by_bound_and_then_by_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROWS", 1)
    for fitting, asked in ((0, [[0]]), (2, [[0], [1], [2]]), (3, [[0], [1], [2]])):
        runner = _Runner(fitting)
        module.first_fitting(_Ranking(), runner, np.arange(4), lambda: False)  # type: ignore[arg-type]
        assert runner.asked == asked, "a row whose bound is infinite is never simulated"
    idle = _Runner(0)
    module.first_fitting(_Ranking(), idle, np.arange(4), lambda: True)  # type: ignore[arg-type]
    assert idle.asked == []
