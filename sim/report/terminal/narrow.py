"""Tables on narrow terminals: numbers are never cut; space between columns, then heads and labels give way."""

from __future__ import annotations

from rich.cells import cell_len
from rich.table import Table

#: Space between columns, and what is left of it where that is too wide.
_WIDE, _CLOSE = 2, 1
#: A label is wrapped to this, or its widest, before columns stand closer.
_LABEL = 12


def fitted(table: Table, width: int, label: int = 0) -> Table:
    """The table with columns whose cells all are whole within `width`, but for those of column `label`, which wrap.

    Where even the cells are wider than that, the table is: a terminal then breaks its lines, which cuts no number.
    """
    cells = [max((cell_len(str(cell)) for cell in column.cells), default=0) for column in table.columns]
    heads = [cell_len(str(column.header)) for column in table.columns]
    between = len(cells) - 1
    if sum(map(max, zip(cells, heads, strict=True))) + _WIDE * between <= width:
        return table
    words = [max(map(cell_len, str(column.header).split() or [""])) for column in table.columns]
    others = [number for number in range(len(cells)) if number != label]
    least = min(cells[label], _LABEL)
    for space, widths in ((_WIDE, [max(pair) for pair in zip(cells, words, strict=True)]),
                          (_CLOSE, [max(pair) for pair in zip(cells, words, strict=True)]), (_CLOSE, cells)):
        room = width - sum(widths[number] for number in others) - space * between
        if room >= least:
            break
    table.padding = (0, space, 0, 0)
    for number, column in enumerate(table.columns):
        column.width = max(widths[number], 1) if number != label else max(1, min(max(room, 4), cells[label]))
        column.no_wrap, column.overflow = False, "fold"
    return table
