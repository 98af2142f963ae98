"""A fit on the terminal. rich is imported when used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.validation.fit import report
from sim.validation.fit.fit import Fit
from sim.validation.words.text import print_table, widen

if TYPE_CHECKING:
    from rich.console import Console


def render_fit(fit: Fit, console: Console) -> None:
    """Print a fit: figures, errors by source, what to take from it."""
    widen(console)
    print_table(console, "Free figures", report.FIGURES, report.figure_rows(fit))
    print_table(console, "Step time, mean |predicted / measured − 1|", *report.error_table(fit, brief=True))
    console.print(report.verdict(fit), soft_wrap=True)
