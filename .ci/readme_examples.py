"""Runs the examples of the README and of the guide.

    python .ci/readme_examples.py README.md scenarios/README.md

Every ```sh block but those that install, which are CI's own steps; every ```yaml block (the first whole scenario is
my.yaml, a part of one is put in its place there); and the commands on my.yaml that stand in tables, but for searches,
which take as long as they are told to. They run in a scratch folder that links to the checkout's .venv, scenarios and
topologies, so that what they write stays out of the checkout. Exits with 1 when an example fails or a text has none.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"```(sh|yaml)\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"^\|.*`(drystep (?:run|compare|memory) my\.yaml.*?)` \|$", re.MULTILINE)


def examples(texts: list[str], scratch: Path) -> list[str]:
    """Shell commands, in order; the scenarios they take are written into the scratch folder."""
    found: list[str] = []
    whole: dict[str, object] = {}
    for text in texts:
        for number, (kind, block) in enumerate(BLOCK.findall(text)):
            if kind == "sh":
                found += [block] if "pip install" not in block else []
                continue
            held = yaml.safe_load(block)
            whole = whole or held
            name = "my.yaml" if held is whole else f"example{number}.yaml"
            written = held if {"name", "title"} & set(held) else whole | held
            (scratch / name).write_text(block if written is held else yaml.safe_dump(written), encoding="utf-8")
            found.append(f".venv/bin/drystep {'validate' if 'title' in held else 'run'} {name}")
        found += [f".venv/bin/{command}" for command in COMMAND.findall(text)]
    return found


def main(texts: list[Path]) -> int:
    """Run every example; the number of failures decides the exit code."""
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name in (".venv", "scenarios", "topologies"):
            (Path(scratch) / name).symlink_to(ROOT / name)
        read = [text.read_text(encoding="utf-8") for text in texts]
        blocks = examples(read, Path(scratch))
        for block in blocks:
            print(block.strip(), flush=True)
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", block], cwd=scratch, text=True,
                                  capture_output=True)
            if done.returncode:
                failed += 1
                print(done.stdout, done.stderr, f"-> exit {done.returncode}", sep="\n")
    print(f"{len(blocks)} examples, {failed} failed")
    return 1 if failed or not all(BLOCK.search(text) for text in read) else 0


if __name__ == "__main__":
    sys.exit(main([Path(name) for name in sys.argv[1:]]))
