"""What-if sizing: which cluster, how many GPUs and which layout are best, over millions of configurations."""

from sim.sizing.compare import Comparison, compare
from sim.sizing.size import Sizing, size
from sim.sizing.space.layouts import Choice
from sim.sizing.wish import OBJECTIVES, Wish, counts
from sim.sizing.words.compare import plot_comparison
from sim.sizing.words.front_picture import plot_front

__all__ = ["OBJECTIVES", "Choice", "Comparison", "Sizing", "Wish", "compare", "counts", "plot_comparison", "plot_front",
           "size"]
