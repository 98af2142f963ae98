"""What PyTorch's allocator holds in jobs drawn by chance, as YAML on standard output (README.md).

    python tests/driver/record.py VENV KIND SEED COUNT    # KIND: one, ddp, fsdp, fsdp2, megatron (megatron_steps.py)
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
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


def drawn_rank(random_: random.Random) -> dict[str, Any]:
    """A job of Megatron's, and the rank of it that runs."""
    def one(*of: Any) -> Any:
        return random_.choice(of)
    tensor, pipeline, data = one(1, 2, 4), one(1, 1, 2, 4), one(1, 2, 4)
    virtual = one(None, 2) if pipeline > 1 else None
    heads = one(16, 32)
    return {"hidden": heads * one(64, 96, 128), "heads": heads, "layers": pipeline * (virtual or 1) * one(2, 3, 4),
            "vocab": one(32768, 51200), "batch": one(1, 2, 4), "sequence": one(1024, 2048),
            "recompute": one("none", "none", "selective", "full"), "dropout": one(0.0, 0.1),
            "precision": one("bf16", "fp16"),
            "tensor": tensor, "pipeline": pipeline, "virtual": virtual, "world": tensor * pipeline * data,
            "rank": tensor * data * random_.randrange(pipeline), "sequence_parallel": tensor > 1 and one(True, False),
            "micro_steps": pipeline * one(1, 2, 3), "zero1": data > 1 and one(True, True, False)}


def measured(venv: Path, kind: str, job: dict[str, Any]) -> Any:
    """The steps, or what Megatron's say of the last; None where the job takes more than the device has."""
    said = os.environ | {"LD_LIBRARY_PATH": str(venv / "driver"), "DRIVER_LATE": "1"}
    script, *kinds = ("megatron_steps.py",) if kind == "megatron" else ("steps.py", kind)
    run = subprocess.run([venv / "bin" / "python", Path(__file__).with_name(script), *kinds, json.dumps(job)],
                         capture_output=True, text=True, env=said, check=False)
    if run.returncode and "OutOfMemoryError" not in run.stderr:
        raise SystemExit(run.stderr[-2000:])
    return None if run.returncode else json.loads(run.stdout.splitlines()[-1])


def main(venv: Path, kind: str, seed: int, count: int) -> None:
    """Print `count` jobs, one a line."""
    random_ = random.Random(seed)
    while count:
        job = drawn_rank(random_) if kind == "megatron" else drawn(kind, random_)
        steps = measured(venv, kind, job)
        if steps is not None:
            last = summed(steps) if kind == "megatron" else {"allocated": steps[-1][0],
                                                             "reserved": max(step[1] for step in steps)}
            print("- " + json.dumps({"kind": kind, **job, **last}), flush=True)
            count -= 1


def summed(last: dict[str, Any]) -> dict[str, Any]:
    """Megatron's last step, its collectives over several ranks counted: [name, elements, dtype, ranks, times]."""
    calls = Counter(tuple(call) for call in last["collectives"] if call[-1] > 1)
    return last | {"collectives": [[*call, times] for call, times in calls.items()]}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
