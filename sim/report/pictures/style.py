"""How the pictures look: one palette that colour-blind readers can tell apart, sizes for a README, reproducible files.

Colours are Okabe and Ito's ("Color Universal Design", 2008) and tints of them. Computing is blue, communication is
green, orange or purple, what waits is vermilion. matplotlib is imported when a picture is drawn, not before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

#: Inches; at 900 pixels in a README an inch is 100 of them. Files have twice that for fine screens.
WIDTH, DOTS_PER_INCH = 9.0, 200

VERMILION, BLUE, SKY, GREEN = "#D55E00", "#0072B2", "#56B4E9", "#009E73"
ORANGE, PURPLE, YELLOW, BLACK = "#E69F00", "#CC79A7", "#F0E442", "#222222"
GREY, PALE = "#999999", "#DDDDDD"
#: Lines of a plot, in order, with a marker each, so that colour is never alone.
LINES = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, BLACK, SKY, GREY)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

#: Bars of the timeline.
BARS: Mapping[str, str] = {
    "forward": "#A6D3EF", "backward": BLUE, "optimizer": "#1B2A49", "other": PALE,
    "all_gather": GREEN, "reduce_scatter": ORANGE, "all_reduce": PURPLE, "all_to_all": "#8C6D00", "send": "#7A5195",
    "recv": "#B79BC9", "broadcast": "#66C2A5", "reduce": "#B35806",
    "host-device copy": "#8C564B", "exposed communication": VERMILION, "pipeline bubble": "#F0DCE6",
    "waiting for the host": YELLOW,
}
#: Categories of memory from the bottom of the stack to its top: what stays first, what comes and goes above it.
MEMORY: Mapping[str, str] = {
    "context": "#777777", "parameters": "#1B2A49", "master_parameters": "#4B6A9B", "optimizer_states": BLUE,
    "kv_cache": VERMILION, "buffers": "#A0522D", "gradients": ORANGE, "gathered_parameters": GREEN,
    "activations": "#A6D3EF", "logits": PURPLE, "workspace": YELLOW, "fragmentation": PALE,
}

#: What the host issues, below the stack of memory: greys, which no category has next to it.
RIBBON: Mapping[str, str] = {"forward": "#E6E6E6", "backward": "#BDBDBD", "optimizer": "#7F7F7F"}

_SETTINGS: Any = {
    "font.family": "DejaVu Sans", "font.size": 9.0, "axes.titlesize": 9.5, "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#666666", "axes.labelcolor": BLACK,
    "text.color": BLACK, "xtick.color": "#444444", "ytick.color": "#444444", "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5, "legend.fontsize": 8.5, "legend.frameon": False, "axes.titlepad": 5.0,
    "hatch.linewidth": 0.6, "figure.facecolor": "white", "savefig.facecolor": "white",
}


@contextmanager
def style() -> Iterator[None]:
    """The settings of every picture, whatever the user's matplotlibrc says."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def figure(height: float) -> Figure:
    """An empty figure of README width that belongs to no window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(WIDTH, height), dpi=DOTS_PER_INCH)
    FigureCanvasAgg(made)
    return made


def save(made: Figure, path: Path, stamp: str = "") -> None:
    """Write a PNG that holds nothing but the picture, and `stamp` where one is given: no date, no version.

    Raises:
        OSError: the file cannot be written.
    """
    said = {"Comment": stamp} if stamp else {}
    made.savefig(path, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None, **said})


def heading(made: Figure, title: str, subtitle: str) -> None:
    """Title and one line below it, at the left edge; what is wider than the figure ends in an ellipsis."""
    height = made.get_size_inches()[1]
    _fit(made.text(0.012, 1 - 0.08 / height, title, fontsize=11.5, fontweight="bold", va="top"))
    _fit(made.text(0.012, 1 - 0.32 / height, subtitle, fontsize=9, color="#444444", va="top"))


def _fit(line: Text) -> None:
    """Shorten a line of text that ends beyond its figure's right edge."""
    figure, whole = line.get_figure(), line.get_text()
    assert figure is not None, "the text stands in a figure"
    right = 0.988 * figure.bbox.x1
    kept = len(whole)
    while kept > 1 and (end := line.get_window_extent().x1) > right:
        kept = min(kept - 1, int(kept * right / end))
        line.set_text(whole[:kept].rstrip(" ,;:") + "…")


def key(made: Figure, colours: Sequence[tuple[str, str]], bottom: float = 0.0) -> None:
    """A legend of coloured boxes in rows at the figure's bottom edge."""
    from matplotlib.patches import Patch

    boxes = [Patch(facecolor=colour, edgecolor="none", label=name) for name, colour in colours]
    columns = len(boxes) if len(boxes) < 6 else (len(boxes) + 1) // 2
    made.legend(handles=boxes, loc="lower center", ncols=columns, bbox_to_anchor=(0.5, bottom),
                handlelength=1.2, handleheight=0.9, columnspacing=1.6, handletextpad=0.5, borderaxespad=0.3)


def quiet(ax: Axes) -> None:
    """Axes that only carry rows: no frame but the bottom."""
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)


def legible(colour: str) -> str:
    """Black or white, whichever reads better on `colour` (relative luminance, WCAG 2)."""
    red, green, blue = (int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5))
    return BLACK if 0.2126 * red ** 2.2 + 0.7152 * green ** 2.2 + 0.0722 * blue ** 2.2 > 0.3 else "white"


def scale(span_s: float) -> tuple[str, float]:
    """Unit of a time axis that is `span_s` long, and what to multiply seconds by. Panels that show parts of one step
    share the whole's, so that times can be found again from one to the next."""
    return ("s", 1.0) if span_s >= 2 else ("ms", 1e3) if span_s >= 2e-3 else ("µs", 1e6)
