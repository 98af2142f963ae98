"""`python -m sim.validation.report`: writes reports/validation.md with its pictures, and the record of errors.

    python -m sim.validation.report [FILE ...] [--out reports] [--readme README.md] [--check] [--bounds FILE]
                                    [--workers N]

Without files: all shipped published cases; then the record of errors that ships with the package (`sim/report/
record.yaml`) and the README's accuracy table, between two comment lines, are rewritten too. `--check` writes nothing
and exits with 3 when a text or a picture is not current. `--bounds` also does what `sim.validation.regression` does, on
the same predictions, and exits with 3 when a figure is worse than its bound.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from sim.errors import UserError
from sim.validation import recalled, record, regression
from sim.validation.corrections import effects
from sim.validation.runner import WRONG_INPUT, Validation, published
from sim.validation.statistics import MEMORY_KEYS, worst
from sim.validation.words import pictures, table
from sim.validation.words.misses import LIMIT, misses

_COMMAND = "python -m sim.validation.report"
_HEAD = f"""# Predictions held against published measurements

Written by `{_COMMAND}`; do not edit. Every row of every source is predicted from the same catalogues and
profiles: no number exists per case, per model or per source. Errors are predicted / measured − 1; the columns mean,
median, p90 and worst are of its absolute value, bias is its signed mean. *cases* had the figure measured, *coverage* is
the share of them that could be expressed and predicted, and what could not is listed with its reason. Rows that the
case files mark as read off a plot, outlier, derived, average or bound are reported apart.
"""
_CORRECTED = ("source", "field", "as given", "as used", "figure", "rows", "mean error (bias) as given", "as used",
              "evidence, other than the measurements")
#: Worst cases listed.
_WORST = 25
_COMPARED = table.HEADLINE.index("compared")
_ACCURACY = re.compile(r"(<!-- accuracy:begin[^\n]*-->).*?(<!-- accuracy:end -->)", re.DOTALL)


def markdown(validation: Validation) -> str:
    """The report's text; the same validation gives the same text."""
    summary = validation.summary
    parts = [_HEAD.rstrip()]
    parts += _section("Step time", table.HEADLINE, table.headline(summary))
    parts += [f"\n![{said}]({name})" for name, said in pictures.PICTURES.items()]
    parts += _section(f"Missed by more than {LIMIT:.0%}, and why it is believed to be",
                      ("believed", "reason", "sources", "rows", "errors"), table.missed(misses(validation.records)))
    parts += _section("The worst, first", ("source", "case", "measured s", "predicted s", "error"),
                      [table.detail(r) for r in worst(validation.records, _WORST)])
    parts += _section("Values that were corrected, and what they change", _CORRECTED,
                      effects(validation.files, validation.records))
    parts += _section("Scaling ratios", table.HEADLINE, table.headline(summary, "ratio"))
    parts += _section("Memory", table.HEADLINE, table.headline(summary, "memory"))
    for key in MEMORY_KEYS:
        rows = [table.detail(r, key) for r in worst(validation.records, 5, key) if key != "peak_unknown_bytes"]
        parts += _section(f"Worst {key}", ("source", "case", "measured", "predicted", "error"), rows)
    parts += _section("Exact comparisons with PyTorch", ("source", "cases", "coverage", "values", "equal", "unequal"),
                      table.exact(summary))
    parts += _section("Memory, tensor by tensor against PyTorch", ("source", "bytes", *table.HEADLINE[2:]),
                      table.allocated(summary))
    parts += _section("Reported apart: step time", table.HEADLINE, table.marked(summary))
    parts += _section("Micro-measurements, per row", table.HEADLINE, table.micro(summary))
    oom = summary["overall"]["oom"]
    parts.append(f"\nOut-of-memory verdicts: {oom['right']} right, {oom['wrong']} wrong, "
                 f"{oom['not_compared']} not compared. *allocated* below is what PyTorch is predicted to; the GPU "
                 "holds the CUDA context and NCCL's buffers (1 to 3 GiB) beside it.\n")
    parts += _section("Wrong verdicts", table.VERDICTS, table.wrong_verdicts(validation.records))
    parts += _section("Not compared", ("source", "status", "reason", "cases"),
                      table.reasons_by_file(validation.records))
    return "\n".join(parts)


def _section(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    lines = [f"\n## {title}\n", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def readme_with(text: str, validation: Validation) -> str:
    """`text` with the table between the lines `<!-- accuracy:begin ... -->` and `<!-- accuracy:end -->` renewed."""
    rows = [row for row in table.headline(validation.summary) if row[_COMPARED] != "0"]
    lines = _section("", table.HEADLINE, rows)[1:]
    return _ACCURACY.sub(lambda found: "\n".join([found[1], *lines, found[2]]), text)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog=_COMMAND, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", help="case files; default: all shipped published cases")
    parser.add_argument("--out", type=Path, default=Path("reports"), help="folder of validation.md")
    parser.add_argument("--readme", type=Path, default=Path("README.md"), help="file with the accuracy table")
    parser.add_argument("--check", action="store_true", help="only say whether the texts are current")
    parser.add_argument("--bounds", type=Path, help="also hold the figures against this file")
    parser.add_argument("--workers", type=int)
    given = parser.parse_args(arguments)
    try:
        bounds = None if given.bounds is None else regression.load(given.bounds)
    except UserError as error:
        print(error, file=sys.stderr)
        return WRONG_INPUT
    validation = published(given.files, given.workers)
    if isinstance(validation, int):
        return validation
    worse = bounds is not None and regression.say(validation, bounds, whole=not given.files)
    texts = {given.out / "validation.md": markdown(validation) + "\n"}
    if given.readme.is_file():
        texts[given.readme] = readme_with(given.readme.read_text(encoding="utf-8"), validation)
    if not given.files:
        # no collected case is inference, so requests outside the collection stand for it
        asked = recalled.requests(given.workers).records
        own, told = ([one for one in asked if recalled.copied(one) == copied] for copied in (True, False))
        texts[record.PATH] = record.text(record.rows([*validation.records, *own]) + record.rows(told, recalled.MARK))
    stale = [path for path, text in texts.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    drawn = not pictures.points(validation.records) or pictures.current(given.out, validation.records)
    if given.check:
        behind = stale + ([] if drawn else [given.out / name for name in pictures.PICTURES])
        print("\n".join(f"{path}: not current; run {_COMMAND}" for path in behind) or "reports are current")
        return 3 if behind or worse else 0
    given.out.mkdir(parents=True, exist_ok=True)
    for path in stale:
        path.write_text(texts[path], encoding="utf-8")
    stale += [] if drawn else pictures.draw(given.out, validation.records)
    print(f"{len(validation.records)} cases; written: {', '.join(map(str, stale)) or 'nothing, all was current'}")
    return 3 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
