"""What is understood but not simulated, as an error that names its field."""

from __future__ import annotations

from collections.abc import Mapping

from sim.errors import Fault


def unknown(asked: Mapping[str, object]) -> list[Fault]:
    """One error for every field that asks for something, in words, that is not simulated."""
    return [Fault(f"{what} is understood but not simulated yet in this version", field, hint="remove it, or see "
                  "reports/limits.md") for field, what in asked.items() if what]
