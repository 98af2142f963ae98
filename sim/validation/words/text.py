"""A validation on the terminal, and the progress bar while it runs. rich is imported when used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sim.validation.runner import Progress, Validation
from sim.validation.statistics import worst
from sim.validation.words import table

if TYPE_CHECKING:
    from rich.console import Console

_EXACT = ("source", "cases", "coverage", "values", "equal", "unequal")
_WORST = ("source", "case", "measured s", "predicted s", "error")
#: Reasons shown before the rest is only counted.
_REASONS = 12

#: Columns of the tables where nobody says how wide the page is.
_PIPE_WIDTH = 120


def render(validation: Validation, console: Console) -> None:
    """Print the tables: errors per source, rows reported apart, exact comparisons, the ten worst, what is missing."""
    widen(console)
    summary = validation.summary
    print_table(console, "Step time, |predicted / measured − 1|", table.HEADLINE, table.headline(summary))
    print_table(console, "Memory", table.HEADLINE, table.headline(summary, "memory"))
    print_table(console, "Scaling ratios", table.HEADLINE, table.headline(summary, "ratio"))
    print_table(console, "Reported apart (plot readings, outliers, bounds …), step time", table.HEADLINE,
           table.marked(summary))
    print_table(console, "Micro-measurements, per row", table.HEADLINE, table.micro(summary))
    print_table(console, "Exact against PyTorch", _EXACT, table.exact(summary))
    print_table(console, "The ten worst", _WORST, [table.detail(r) for r in worst(validation.records)])
    unequal = [(r["id"], r["reason"]) for r in validation.records if r["status"] == "ok" and r.get("reason")]
    print_table(console, "Not equal", ("case", "first difference"), unequal[:10])
    missing = table.reasons(validation.records)
    named = [(*row, table.such_as(validation.records, *row[:2])) for row in missing[:_REASONS]]
    print_table(console, "Not compared", ("status", "reason", "cases", "such as"), named)
    if len(missing) > _REASONS:
        console.print(f"… and {sum(int(m[2]) for m in missing[_REASONS:])} cases for other reasons (see --json)")
    oom = summary["overall"]["oom"]
    console.print(f"Out-of-memory verdicts: {oom['right']} right, {oom['wrong']} wrong, "
                  f"{oom['not_compared']} not compared")
    print_table(console, "Wrong verdicts", table.VERDICTS, table.wrong_verdicts(validation.records)[:_REASONS])
    if validation.interrupted:
        console.print("[bold]Interrupted[/bold]: cases that had not run are counted as failed")


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


def widen(console: Console) -> None:
    """A file or a pipe has no width of its own, and 80 columns break the tables."""
    if not console.is_terminal:
        console.width = max(console.width, _PIPE_WIDTH)


def print_table(console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a titled table and a blank line behind it; nothing where there are no rows."""
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
