"""What-if sizing: which cluster, how many GPUs and which layout are best, over millions of configurations."""

from sim.sizing.compare import Comparison, compare
from sim.sizing.compare_text import plot_comparison
from sim.sizing.front_picture import plot_front
from sim.sizing.size import Sizing, size
from sim.sizing.space import Choice
from sim.sizing.wish import OBJECTIVES, Wish, counts

__all__ = ["OBJECTIVES", "Choice", "Comparison", "Sizing", "Wish", "compare", "counts", "plot_comparison", "plot_front",
           "size"]
