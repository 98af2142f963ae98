"""Results as tables for notebooks: a pandas DataFrame where pandas is installed, else a list of mappings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: A `pandas.DataFrame`, or a list of rows without pandas. Columns carry their units in their names (`_s`, `_bytes`).
Frame = Any


def as_table(rows: Sequence[Mapping[str, Any]]) -> Frame:
    """Rows as a DataFrame, or as they are where pandas is not installed."""
    try:
        import pandas
    except ImportError:
        return [dict(row) for row in rows]
    return pandas.DataFrame(list(rows))
