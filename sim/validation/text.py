"""A validation on the terminal, and the progress bar while it runs. rich is imported when used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sim.validation import table
from sim.validation.runner import Progress, Validation
from sim.validation.statistics import worst

if TYPE_CHECKING:
    from rich.console import Console

    from sim.validation.fit import Fit

_EXACT = ("source", "cases", "coverage", "values", "equal", "unequal")
_WORST = ("source", "case", "measured s", "predicted s", "error")
#: Reasons shown before the rest is only counted.
_REASONS = 12

#: Columns of the tables where nobody says how wide the page is.
_PIPE_WIDTH = 120


def render(validation: Validation, console: Console) -> None:
    """Print the tables: errors per source, rows reported apart, exact comparisons, the ten worst, what is missing."""
    if not console.is_terminal:  # a file or a pipe has no width of its own; 80 columns break the tables
        console.width = max(console.width, _PIPE_WIDTH)
    summary = validation.summary
    _print(console, "Step time, |predicted / measured − 1|", table.HEADLINE, table.headline(summary))
    _print(console, "Memory", table.HEADLINE, table.headline(summary, "memory"))
    _print(console, "Scaling ratios", table.HEADLINE, table.headline(summary, "ratio"))
    _print(console, "Reported apart (plot readings, outliers, bounds …), step time", table.HEADLINE,
           table.marked(summary))
    _print(console, "Micro-measurements, per row", table.HEADLINE, table.micro(summary))
    _print(console, "Exact against PyTorch", _EXACT, table.exact(summary))
    _print(console, "The ten worst", _WORST, [table.detail(r) for r in worst(validation.records)])
    unequal = [(r["id"], r["reason"]) for r in validation.records if r["status"] == "ok" and r.get("reason")]
    _print(console, "Not equal", ("case", "first difference"), unequal[:10])
    missing = table.reasons(validation.records)
    _print(console, "Not compared", ("status", "reason", "cases"), missing[:_REASONS])
    if len(missing) > _REASONS:
        console.print(f"… and {sum(int(m[2]) for m in missing[_REASONS:])} cases for other reasons (see --json)")
    oom = summary["overall"]["oom"]
    console.print(f"Out-of-memory verdicts: {oom['right']} right, {oom['wrong']} wrong, "
                  f"{oom['not_compared']} not compared")
    _print(console, "Wrong verdicts", table.VERDICTS, table.wrong_verdicts(validation.records)[:_REASONS])
    if validation.interrupted:
        console.print("[bold]Interrupted[/bold]: cases that had not run are counted as failed")


def render_fit(fit: Fit, console: Console) -> None:
    """Print a fit: figures, errors by source, what to take from it."""
    from sim.validation import fit_report

    if not console.is_terminal:
        console.width = max(console.width, _PIPE_WIDTH)
    _print(console, "Free figures", fit_report.FIGURES, fit_report.figure_rows(fit))
    _print(console, "Step time, mean |predicted / measured − 1|", *fit_report.error_table(fit, brief=True))
    console.print(fit_report.verdict(fit), soft_wrap=True)


@contextmanager
def progress_bar(what: str = "validating") -> Iterator[Progress | None]:
    """A bar on standard error where that is a terminal, else None; feed it to `validate(progress=...)`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print(console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table

    if not rows:
        return
    printed = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for place, name in enumerate(header):
        text = place == 0 or name in ("case", "reason", "first difference")
        printed.add_column(name, justify="left" if text else "right", overflow="fold", no_wrap=place == 0)
    for row in rows:
        printed.add_row(*row, style="bold" if row[0] == "all" else "")
    console.print(printed)
    console.print()
