"""Words and conditions as they stand in a script, for what is told of them."""

from __future__ import annotations

import re

from sim.imports.script.grammar import Body, Simple
from sim.imports.script.lexer import Raw


def written(raw: Raw | None) -> str:
    """A word as it stands in the script."""
    text = quote = ""
    for piece in raw.pieces if raw is not None else ():
        if piece.quote != quote:
            text += quote + piece.quote
            quote = piece.quote
        text += piece.text
    return text + quote


def list_written(body: Body) -> str:
    """Commands one after the other, as a condition has them."""
    parts: list[str] = []
    for item in body:
        parts += [item.join] if parts else []
        parts += ["!"] if item.negated else []
        words = item.node.words if isinstance(item.node, Simple) else []
        counts = len(words) > 1 and words[0].plain == "(("
        parts += ["((", "".join(piece.text for piece in words[1].pieces), "))"] if counts else [
            written(raw) for raw in words] or ["(...)"]
    return clipped(" ".join(parts))


def clipped(text: str) -> str:
    """One line of it, without its end where it is long."""
    text = re.sub(r"\s+", " ", text).strip()
    return text if len(text) <= 60 else f"{text[:57]}..."
