"""drystep: a discrete-event simulator of distributed training.

The Python API is the command line's verbs: `load`, `plan_memory`, `run`, `run_sweep`, `size`, `compare`, `validate`,
`diff`, `import_files`.
What is wrong with a scenario they raise as `UserError`, with every fault. They are imported when first used, so
`import sim` costs nothing. `.table()` of a result, a sweep or a comparison is a pandas DataFrame where pandas is
installed; `plot_breakdown`, `plot_memory`, `plot_sweep`, `plot_scaling` and `plot_comparison` draw on matplotlib axes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.api import load, plan_memory, run, run_sweep
    from sim.errors import UserError
    from sim.imports.read import import_files
    from sim.report.pictures.axes import plot_breakdown, plot_memory, plot_scaling, plot_sweep
    from sim.sizing import compare, size
    from sim.sizing.words.compare import plot_comparison
    from sim.traces.diff import diff
    from sim.validation import validate

__version__ = "0.1.0"
__all__ = ["UserError", "__version__", "compare", "diff", "import_files", "load", "plan_memory", "plot_breakdown",
           "plot_comparison", "plot_memory", "plot_scaling", "plot_sweep", "run", "run_sweep", "size", "validate"]


def __dir__() -> list[str]:
    """What is here and what comes when first used, so that an interpreter completes the verbs."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """The verbs, on first use (PEP 562)."""
    if name in ("load", "plan_memory", "run", "run_sweep"):
        from sim import api

        return getattr(api, name)
    if name in ("plot_breakdown", "plot_memory", "plot_scaling", "plot_sweep"):
        from sim.report.pictures import axes

        return getattr(axes, name)
    if name in ("size", "compare", "plot_comparison"):
        from sim import sizing

        return getattr(sizing, name)
    if name == "UserError":
        from sim.errors import UserError

        return UserError
    if name == "diff":
        from sim.traces.diff import diff

        return diff
    if name == "import_files":
        from sim.imports.read import import_files

        return import_files
    if name == "validate":
        from sim.validation import validate

        return validate
    raise AttributeError(f"module 'sim' has no attribute {name!r}")
