"""A model given as a table of layers (kind `layers`): ResNet-50 and anything that is no transformer."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

from sim.errors import Fault, UserError, closest
from sim.scenario.text.document import read_text

COLUMNS = ("name", "parameters", "forward_flops", "activation_bytes", "output_bytes")
MAX_ROWS = 10_000


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer, sizes per sample.

    Attributes:
        name: shown in reports.
        parameters: trainable parameters.
        forward_flops: FLOPs of the forward pass, 2 per multiply-add.
        activation_bytes: kept from forward to backward, at 4 bytes per element.
        output_bytes: handed to the next layer, at 4 bytes per element.
    """

    name: str
    parameters: int
    forward_flops: float
    activation_bytes: float
    output_bytes: float


def read_table(path: Path, shown: str) -> tuple[LayerRow, ...]:
    """Read the CSV of a model of kind `layers`. Raises UserError with every row that is wrong."""
    lines = list(csv.reader(read_text(path, shown).splitlines()))
    header = [cell.strip() for cell in lines[0]] if lines else []
    faults = [
        Fault(
            f"the table has no column '{name}'",
            file=shown,
            line=1,
            hint=" or ".join(f"is it the column '{other}'?" for other in closest(name, header)[:1]),
        )
        for name in COLUMNS
        if name not in header
    ]
    if faults:
        raise UserError(faults)
    rows: list[LayerRow] = []
    for number, cells in enumerate(lines[1:], 2):
        if any(cell.strip() for cell in cells):
            rows.append(_row(header, cells, shown, number, faults))
    if not rows:
        faults.append(Fault("the table has no layers", file=shown, line=1, hint="add a row for each layer"))
    if len(rows) > MAX_ROWS:
        faults.append(Fault(f"the table has {len(rows):,} layers, more than {MAX_ROWS:,}", file=shown))
    if faults:
        raise UserError(faults)
    return tuple(rows)


def _row(header: list[str], cells: list[str], shown: str, line: int, faults: list[Fault]) -> LayerRow:
    by_name = dict(zip(header, cells, strict=False))
    numbers: list[float] = []
    for column in COLUMNS[1:]:
        text = by_name.get(column, "").strip()
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not 0 <= number < 1e18:
            faults.append(
                Fault(
                    f"'{text[:40]}' is not a size",
                    field=column,
                    file=shown,
                    line=line,
                    hint="write a number, 0 or more",
                )
            )
            number = 0.0
        numbers.append(number)
    return LayerRow(by_name.get("name", "").strip(), int(numbers[0]), *numbers[1:])
