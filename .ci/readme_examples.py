"""Runs the README's marked examples: each ```sh block below a line `<!-- ci: run -->`.

    python .ci/readme_examples.py README.md

They run in a scratch folder that links to the checkout's scenarios and topologies, so that what they write stays out of
the checkout. Exits with 1 when an example fails or none is marked.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

BLOCK = re.compile(r"<!-- ci: run -->\s*\n```sh\n(.*?)```", re.DOTALL)


def main(readme: Path) -> int:
    """Run every marked block; the number of failures decides the exit code."""
    blocks = BLOCK.findall(readme.read_text(encoding="utf-8"))
    failed = 0
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("scenarios", "topologies"):
            (Path(scratch) / name).symlink_to(readme.resolve().parent / name)
        for block in blocks:
            print(block.strip(), flush=True)
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", block], cwd=scratch, text=True,
                                  capture_output=True, env={**os.environ, "PATH": path})
            if done.returncode:
                failed += 1
                print(done.stdout, done.stderr, f"-> exit {done.returncode}", sep="\n")
    print(f"{len(blocks)} README examples, {failed} failed")
    return 1 if failed or not blocks else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
