"""Files that appear when they are whole: a full disk or Ctrl-C leaves what was there before, no half of a new one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Where to write in place of `path`, which it becomes at the end. Devices and pipes are written themselves, and so
    is a file in a folder that takes no other.

    Raises:
        OSError: it cannot be written; named as the user named it.
    """
    target = Path(path).resolve()  # of a link, what it leads to
    if (target.exists() and not target.is_file()) or not os.access(target.parent, os.W_OK):
        yield Path(path)
        return
    part = target.with_name(f".{target.name}.part")
    try:
        yield part
        os.replace(part, target)
    except OSError as error:
        if error.filename == str(part):
            error.filename = str(path)
        raise
    finally:
        part.unlink(missing_ok=True)
