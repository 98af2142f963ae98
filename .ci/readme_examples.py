"""Runs the examples of the README and of the guide: every ```sh block but those that install, which are CI's own steps.

    python .ci/readme_examples.py README.md scenarios/README.md

They run in a scratch folder that links to the checkout's .venv, scenarios and topologies, so that what they write stays
out of the checkout. Exits with 1 when an example fails or there is none.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)


def main(texts: list[Path]) -> int:
    """Run every block; the number of failures decides the exit code."""
    found = [BLOCK.findall(text.read_text(encoding="utf-8")) for text in texts]
    blocks = [block for of in found for block in of if "pip install" not in block]
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name in (".venv", "scenarios", "topologies"):
            (Path(scratch) / name).symlink_to(ROOT / name)
        for block in blocks:
            print(block.strip(), flush=True)
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", block], cwd=scratch, text=True,
                                  capture_output=True)
            if done.returncode:
                failed += 1
                print(done.stdout, done.stderr, f"-> exit {done.returncode}", sep="\n")
    print(f"{len(blocks)} examples, {failed} failed")
    return 1 if failed or not all(found) else 0


if __name__ == "__main__":
    sys.exit(main([Path(name) for name in sys.argv[1:]]))
