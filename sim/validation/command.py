"""What `drystep validate` does once its arguments are parsed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from sim.validation.runner import validate

#: Exit code after Ctrl-C, as shells give it (128 + SIGINT).
INTERRUPTED = 130


def validate_command(cases: Sequence[str], json_out: str | None = None, select: str | None = None,
                     workers: int | None = None) -> int:
    """Validate, print the tables (or the JSON alone where `json_out` is "-"), write the JSON; returns the exit code.

    Raises:
        UserError: bad case files, pattern or worker count.
        OSError: the JSON cannot be written.
    """
    from rich.console import Console

    from sim.validation.text import progress_bar, render

    with progress_bar() as progress:
        validation = validate(cases, select=select, workers=workers, progress=progress)
    text = "" if json_out is None else json.dumps(validation.to_json(), indent=1) + "\n"
    if json_out == "-":
        sys.stdout.write(text)
    else:
        if json_out is not None:
            Path(json_out).write_text(text, encoding="utf-8")
        out = Console()
        if not out.is_terminal:  # a file or a pipe has no width of its own; 80 columns break the tables
            out.width = 120
        render(validation, out)
    return INTERRUPTED if validation.interrupted else 0
