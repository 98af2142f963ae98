"""Runs the README's examples: every ```sh block but those that install, which CI's own steps are.

    python .ci/readme_examples.py README.md

They run in a scratch folder that links to the checkout's .venv, scenarios and topologies, so that what they write stays
out of the checkout. Exits with 1 when an example fails or there is none.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)


def main(readme: Path) -> int:
    """Run every block; the number of failures decides the exit code."""
    blocks = [b for b in BLOCK.findall(readme.read_text(encoding="utf-8")) if "pip install" not in b]
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name in (".venv", "scenarios", "topologies"):
            (Path(scratch) / name).symlink_to(readme.resolve().parent / name)
        for block in blocks:
            print(block.strip(), flush=True)
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", block], cwd=scratch, text=True,
                                  capture_output=True)
            if done.returncode:
                failed += 1
                print(done.stdout, done.stderr, f"-> exit {done.returncode}", sep="\n")
    print(f"{len(blocks)} README examples, {failed} failed")
    return 1 if failed or not blocks else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
