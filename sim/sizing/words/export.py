"""Every simulated configuration as a flat table: CSV, and Parquet where pyarrow is installed."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sim.errors import Fault, UserError
from sim.report.whole_file import whole_file
from sim.sizing.words.layout import said


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with one column per field of its layout; a recomputation of the first k blocks is `layers:k`, of modules
    their names joined by +, and a precision without a name `custom`."""
    sets = {name: _plain(value) for name, value in row["set"].items()}
    return {**{name: value for name, value in row.items() if name != "set"}, **sets}


def _plain(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return f"layers:{value['layers']}" if "layers" in value else said(value)


def _table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Flat rows with the columns that any of them has; None where one has none."""
    table = [flat(row) for row in rows]
    names = dict.fromkeys(name for row in table for name in row)
    return [{name: row.get(name) for name in names} for row in table]


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows of `Sizing.rows`, one line each under a line of names; what there is not is empty.

    The file appears when it is whole: what was there before is kept until then.

    Raises:
        OSError: it cannot be written.
    """
    with whole_file(path) as part, part.open("w", encoding="utf-8", newline="") as file:
        table = _table(rows)
        writer = csv.DictWriter(file, list(table[0]) if table else ["cluster"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


def need_parquet() -> None:
    """Refuse before anything is computed.

    Raises:
        UserError: pyarrow is not installed.
    """
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise UserError(Fault("Parquet needs pyarrow, which is not installed", "--parquet",
                              hint="pip install 'drystep[parquet]', or use --csv")) from None


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """As `write_csv`, typed (zstd-compressed Parquet).

    Raises:
        UserError: pyarrow is not installed.
        OSError: it cannot be written.
    """
    need_parquet()
    import pyarrow
    from pyarrow import parquet

    with whole_file(path) as part:
        parquet.write_table(pyarrow.Table.from_pylist(_table(rows)), part, compression="zstd")
