"""What a later room refuses is still shown with the user's file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

import sim
from sim.errors import UserError


def test_a_fault_of_the_lowering_has_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "tensor.yaml"
    path.write_text("name: tensor\ncluster: {topology: dgx-a100-80g}\nmodel: {preset: gpt2}\n"
                    "training: {micro_batch: 1, global_batch: 8, sequence: 128}\n"
                    "parallel:\n  strategy: zero3\n  pipeline: 2\n  overlap: true\n"
                    "software: {framework: deepspeed}\n")
    with pytest.raises(UserError) as caught:
        sim.run(path)
    fault = caught.value.faults[0]
    assert (fault.field, fault.line) == ("parallel.strategy", 6)
    assert fault.file.endswith("tensor.yaml")
