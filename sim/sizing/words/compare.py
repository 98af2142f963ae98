"""A comparison in words and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from sim.report.lengths import length
from sim.report.units import figure
from sim.report.units import seconds as seconds_of_run
from sim.report.warned.together import together
from sim.report.words import term as said
from sim.report.words import written
from sim.sizing.compare import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Terms and categories told of each run, and the least share of the step or of memory that is worth a line.
_MOST, _LEAST = 8, 0.002
#: Share of the step below which what else moved is rounding.
_NOTHING = 1e-5
_GIB = 2.0**30
#: Characters of a line of a run's name beside its bar.
_LABEL_CHARACTERS = 34


def lines(found: Comparison) -> Iterator[str]:
    """The comparison for a terminal: the runs, what moved in each and why, what they differ in."""
    widest = max(map(len, found.names))
    for i, name in enumerate(found.names):
        yield (f"{name:{widest}}  {_figures(found, i)} on {found.gpus[i]:,} GPU{'s' * (found.gpus[i] > 1)}, bound by "
               f"{found.bound_by[i]}, {_throughput(found, i)}"
               + ("" if found.fits[i] else "; DOES NOT FIT in memory"))
    if not all(found.fits):
        yield "the step of what does not fit is what it would take; 'drystep memory' says what would make it fit"
    yield from _lengths(found)
    for i in range(1, len(found.names)):
        change = found.whole_s[i] - found.whole_s[0]
        yield ""
        percent = 100 * change / found.whole_s[0]
        yield f"{found.names[i]} against {found.names[0]}: {change_of(found, change)} ({percent:+.1f}%)"
        yield from moved_lines(found, i)
    yield ""
    yield "fields that differ:" if found.differs else "no field differs"
    for path, values in found.differs.items():
        yield f"  {path}: {' | '.join(map(_plain, values))}"
    for warning in together(list(zip(_apart(found.names), found.warnings, strict=True))):
        yield f"! {warning}"


def _lengths(found: Comparison) -> Iterator[str]:
    """How long each run takes and what it costs, where a budget says of how many tokens."""
    if any(found.budgets):
        yield ""
        yield "the whole run"
        widest = max(map(len, found.names))
        for name, budget in zip(found.names, found.budgets, strict=True):
            yield f"  {name:{widest}}  {' · '.join(length(budget)) if budget else 'no budget.tokens'}"


def _figures(found: Comparison, i: int) -> str:
    """The main figures of a run."""
    if not found.served:
        return f"{found.step_time_s[i]:.4g} s"
    one = found.served[i]
    if not one.time_per_token_s:
        return f"{seconds_of_run(found.step_time_s[i])} a request, {one.tokens_per_second:,.4g} tokens/s"
    return (f"{seconds_of_run(one.time_per_token_s)} a token, {seconds_of_run(one.prompt_time_s)} to the first, "
            f"{one.tokens_per_second:,.4g} tokens/s")


def _throughput(found: Comparison, i: int) -> str:
    """Throughput of a run against the first's; by itself where they do not count the same."""
    share = found.scaling[i]
    if share is None or None in found.scaling:
        value, of = found.rates[i]
        return f"{figure(value)} {of}/GPU"
    return f"{100 * share:.1f}% of the first's throughput per GPU"


def change_of(found: Comparison, change_s: float) -> str:
    """A change of what the terms sum to."""
    return f"{seconds_of(change_s)} of GPU time a token" if found.served else seconds_of(change_s)


def _plain(value: object) -> str:
    """A value as the scenario would write it."""
    return written(value, "–")


def moved_lines(found: Comparison, i: int) -> Iterator[str]:
    """What moved in run `i` (1 or later) against the first, each with what stands behind it, and its memory."""
    moved = found.moved[i - 1]
    shown = [m for m in moved if abs(m[1]) > _LEAST * found.whole_s[0]][:_MOST]
    for term, seconds in shown:
        reason = found.why[i - 1].get(term, "")
        yield f"  {words(term):42} {seconds_of(seconds):>11}" + (f"   {reason}" if reason else "")
    rest = sum(seconds for _, seconds in moved) - sum(seconds for _, seconds in shown)
    if abs(rest) > _NOTHING * found.whole_s[0]:
        yield f"  {'everything else':42} {seconds_of(rest):>11}"
    yield from _held_up(found, i)
    parts = [f"{name.replace('_', ' ')} {_gib(size)}" for name, size in found.memory_moved[i - 1]
             if abs(size) > _LEAST * sum(values[0] for values in found.memory.values())][:_MOST]
    yield f"  memory: {', '.join(parts) or 'the same'}"


def _apart(names: Sequence[str]) -> list[str]:
    """What tells runs of one name apart, without the name: "nodes 24" of "my run (nodes 24)"."""
    head = f"{names[0].partition(' (')[0]} ("
    if not all(name.startswith(head) and name.endswith(")") for name in names):
        return list(names)
    return [name.removeprefix(head).removesuffix(")") for name in names]


def _held_up(found: Comparison, i: int) -> Iterator[str]:
    """What of the kernels' terms moved because collectives hold SMs and memory bandwidth for longer, or shorter: behind
    a slower network matrix products are slower too."""
    before, after = found.contention_s[0], found.contention_s[i]
    if abs(after - before) > _LEAST * found.whole_s[0]:
        was, now = (cost if cost > _NOTHING * found.whole_s[0] else 0.0 for cost in (before, after))
        yield (f"  {'of these, kernels beside collectives':42} {seconds_of(after - before):>11}   the SMs and memory "
               f"bandwidth that these hold cost {seconds_of_run(was)} -> {seconds_of_run(now)}")


def plot_comparison(found: Comparison, ax: Axes | None = None) -> Axes:
    """Where the step of each run goes, bars side by side.

    Args:
        ax: where to draw; None makes a figure.
    """
    from sim.report.pictures.axes import stacked

    bars: list[dict[str, float]] = [{} for _ in found.names]
    for term, values in found.terms.items():
        head, _, rest = term.partition(".")
        name = rest if head == "compute" else head.replace("_", " ")
        for bar, seconds in zip(bars, values, strict=True):
            bar[name] = bar.get(name, 0.0) + seconds
    return stacked(found.names, bars, ax)


def write_picture(folder: Path, found: Comparison) -> Path:
    """comparison.png in a folder, made if it does not exist.

    Raises:
        OSError: the folder or the file cannot be written.
    """
    from sim.report.pictures import style as look

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "comparison.png"
    with look.style():
        names = [fill(name, _LABEL_CHARACTERS) for name in found.names]
        bar = max(0.45, 0.16 * max(name.count("\n") + 2 for name in names))
        height = 1.6 + bar * len(names)
        made = look.figure(height)
        look.heading(made, "Where the GPU time of a token goes" if found.served else "Where the step goes",
                     f"{len(names)} runs side by side")
        ax = plot_comparison(found, made.add_axes((0.5, 0.5 / height, 0.47, (height - 1.6) / height)))
        labels = ax.set_yticklabels(names)
        widest = max(label.get_window_extent().width for label in labels) / made.bbox.width
        ax.set_position((0.03 + widest, 0.5 / height, 0.94 - widest, (height - 1.6) / height))
        own = ax.get_legend()
        if own is not None:  # from the figure's edge on: beside long names there is no room for it
            own.remove()
        made.legend(*ax.get_legend_handles_labels(), ncols=4, loc="upper left", frameon=False, fontsize=8,
                    bbox_to_anchor=(0.003, 1 - 0.52 / height), handlelength=1.2)
        look.save(made, path)
    return path


def words(term: str) -> str:
    """A term of the breakdown as one says it."""
    parts = term.split(".")
    if parts[0] == "exposed_communication":
        return f"exposed {parts[1].replace('_', '-')} ({', '.join(parts[2:])})"
    return said(parts[-1])


def seconds_of(value: float) -> str:
    """A change of time, signed."""
    return f"{value:+.3f} s" if abs(value) >= 0.9995 else f"{1e3 * value:+.3g} ms"


def _gib(size: float) -> str:
    return f"{figure(size / _GIB, '+')} GiB"
