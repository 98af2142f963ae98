"""One execution of a section by one rank: what the actors of the engine write on, and what is left of it in the end."""

from __future__ import annotations

from collections.abc import Callable

from sim.engine.plan import SectionPlan

#: Time of what has not happened yet (simulated time begins at 0).
UNKNOWN = -1.0


class Run:
    """One execution of a section by one rank, column by column; times in seconds of the simulation's clock.

    Attributes:
        entry: (step, entry of the schedule, repeat) it is.
        issue: when the host began to issue the task (a HOST task: when it got there).
        start: when the device, or the HOST task's own work, began. end: when it ended.
        starved: seconds between start and end in which a segment waited for the host to launch kernels.
        pending: what each task still waits for (see `sim.engine.host`). left: tasks not yet ended.
        arrive: whom to tell that this rank has reached a collective (issued at, now), until it has.
        followers: tasks of later runs that wait for a task of this one.
        shift_s: to be added to all times (repeats that were skipped before it). copies, delta_s: the repeats skipped
            right after it, each `delta_s` later than the one before.
    """

    __slots__ = ("arrive", "copies", "delta_s", "end", "entry", "followers", "issue", "left", "pending", "plan",
                 "section", "shift_s", "start", "starved")

    def __init__(self, section: int, plan: SectionPlan, entry: tuple[int, int, int]) -> None:
        size = plan.size
        self.section = section
        self.plan = plan
        self.entry = entry
        self.issue = [UNKNOWN] * size
        self.start = [UNKNOWN] * size
        self.end = [UNKNOWN] * size
        self.starved = [0.0] * size
        self.pending = plan.pending.copy()
        self.left = size
        self.arrive: dict[int, Callable[[float, float], None]] = {}
        self.followers: dict[int, list[tuple[Run, int]]] | None = None
        self.shift_s = 0.0
        self.copies = 0
        self.delta_s = 0.0

    def moved(self, step: int, by_s: float) -> Run:
        """This run, which is over, as another step's that much later; it shares the times."""
        other = Run.__new__(Run)
        other.section, other.plan, other.entry = self.section, self.plan, (step, *self.entry[1:])
        other.issue, other.start, other.end, other.starved = self.issue, self.start, self.end, self.starved
        other.pending, other.left, other.arrive, other.followers = self.pending, 0, self.arrive, None
        other.shift_s, other.copies, other.delta_s = self.shift_s + by_s, self.copies, self.delta_s
        return other
