"""What PyTorch's allocator holds in jobs drawn by chance, as YAML on standard output (README.md).

    python tests/driver/record.py VENV KIND SEED COUNT    # KIND: one, ddp, fsdp, fsdp2
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

_HEADS = {8: (64, 96, 128), 12: (64, 96, 128), 16: (64, 80, 96, 128), 20: (64, 80, 96, 128), 25: (64, 80, 96, 128)}


def drawn(kind: str, random_: random.Random) -> dict[str, Any]:
    """A job."""
    def one(*of: Any) -> Any:
        return random_.choice(of)
    heads = one(*_HEADS)
    job = {"hidden": heads * one(*_HEADS[heads]), "layers": one(6, 12, 18, 24), "heads": heads,
           "vocab": one(32000, 50304), "batch": one(1, 2, 4, 8), "sequence": one(512, 1024, 2048),
           "recompute": one("none", "full"), "micro_steps": one(1, 1, 2), "optimizer_kernel": "foreach"}
    if kind == "one":
        return job | {"precision": one("fp32", "amp-bf16", "pure-bf16"),
                      "optimizer_kernel": one("foreach", "foreach", "fused", "loop")}
    if kind == "ddp":
        return job | {"precision": one("fp32", "amp-bf16", "pure-bf16"), "world": 8, "view": one(True, False)}
    return job | {"precision": "fsdp-bf16", "world": one(8, 16, 64), "reduce": one("bf16", "fp32"),
                  "reshard": one(True, True, False)}


def measured(venv: Path, kind: str, job: dict[str, Any]) -> list[list[int]] | None:
    """The steps, or None where the job takes more than the device has."""
    said = os.environ | {"LD_LIBRARY_PATH": str(venv / "driver"), "DRIVER_LATE": "1"}
    steps = Path(__file__).with_name("steps.py")
    run = subprocess.run([venv / "bin" / "python", steps, kind, json.dumps(job)], capture_output=True, text=True,
                         env=said, check=False)
    if run.returncode and "OutOfMemoryError" not in run.stderr:
        raise SystemExit(run.stderr[-2000:])
    return None if run.returncode else json.loads(run.stdout.splitlines()[-1])


def main(venv: Path, kind: str, seed: int, count: int) -> None:
    """Print `count` jobs, one a line."""
    random_ = random.Random(seed)
    while count:
        job = drawn(kind, random_)
        steps = measured(venv, kind, job)
        if steps is not None:
            last = {"allocated": steps[-1][0], "reserved": max(step[1] for step in steps)}
            print("- " + json.dumps({"kind": kind, **job, **last}), flush=True)
            count -= 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
