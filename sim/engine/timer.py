"""The timer that all actors of the engine are, and how long an instant is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from simpy import Environment, Event
from simpy.events import NORMAL

_NEVER = math.inf
#: What happens within this many seconds happens at once: above the rounding of a clock that shows minutes, and so short
#: that nothing else falls into it by chance.
INSTANT_S = 1e-11


class Timer(Event):
    """A SimPy event that can be armed again and again; subclasses say in `elapsed` what happens when it goes off.

    SimPy cannot take back a scheduled event and drops an event's callbacks once it has fired. So the timer puts its
    callback back each time, and recognises firings that are no longer meant by their time: only the firing at `armed`
    counts. When the due time moves later nothing is scheduled until the early firing comes; it then arms again.
    """

    def __init__(self, env: Environment) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None
        self._calls: list[Callable[[Any], None]] = [self._fired]
        self.callbacks = self._calls
        self.due = _NEVER
        self.armed = _NEVER
        self.firings = 0

    def arm(self, time: float, now: float) -> None:
        """Go off at `time` (now, if that has passed), and not at any time said before."""
        delay = time - now if time > now else 0.0
        self.due = due = now + delay
        if due < self.armed:
            self.armed = due
            self.env.schedule(self, NORMAL, delay)

    def _fired(self, _: Event) -> None:
        self.callbacks = self._calls
        self.firings += 1
        now = self.env.now
        if now != self.armed:
            return
        self.armed = _NEVER
        if self.due > now:
            if self.due != _NEVER:
                self.arm(self.due, now)
            return
        self.due = _NEVER
        self.elapsed(now)

    def elapsed(self, now: float) -> None:
        """The time armed for has come."""
        raise NotImplementedError
