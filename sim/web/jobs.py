"""Predictions under way: each in a thread of its own, so that the page can ask how far it is and stop it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sim.errors import UserError
from sim.web.desk import Desk, Dropped, Watch
from sim.web.faults import faults_of

#: Ended predictions whose answer can still be fetched.
_KEPT = 50


@dataclass
class Job:
    """One prediction that was asked for.

    Attributes:
        number: counted from 1.
        watch: how far it is, and whether it is to stop.
        ended: set when `answer` is there.
        answer: the entry, the faults, or what went wrong; code: its HTTP status.
    """

    number: int
    watch: Watch = field(default_factory=Watch)
    ended: threading.Event = field(default_factory=threading.Event)
    answer: dict[str, Any] = field(default_factory=dict)
    code: int = 200


class Jobs:
    """What the desk was asked for: it makes one prediction at a time, the others wait for their turn.

    Attributes:
        desk: what predicts.
    """

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self._jobs: dict[int, Job] = {}
        self._count = 0
        self._changing = threading.Lock()

    def start(self, text: str, sets: Sequence[str]) -> Job:
        """Begin a prediction and return at once."""
        with self._changing:
            self._count += 1
            job = self._jobs[self._count] = Job(self._count)
            for old in [number for number, one in self._jobs.items() if one.ended.is_set()][:-_KEPT]:
                del self._jobs[old]
        threading.Thread(target=self._work, args=(job, text, sets), daemon=True).start()
        return job

    def find(self, number: int) -> Job:
        """A prediction by its number. Raises KeyError where it is not known, or no longer."""
        return self._jobs[number]

    def state(self, job: Job) -> dict[str, Any]:
        """How far a prediction is; one that waits says what it waits for."""
        said = {**job.watch.to_json(), "ended": job.ended.is_set()}
        if job.watch.state == "waiting":
            with self._changing:
                others = [one for one in self._jobs.values() if one.watch.state != "waiting" and not one.ended.is_set()]
            said["other"] = {"job": others[0].number, **others[0].watch.to_json()} if others else None
        return said

    def close(self) -> None:
        """Stop what can be stopped; nothing is written after this."""
        with self._changing:
            for job in self._jobs.values():
                job.watch.stop()
        self.desk.close()

    def _work(self, job: Job, text: str, sets: Sequence[str]) -> None:
        try:
            job.answer = {"entry": self.desk.predict(text, sets, job.watch).to_json()}
        except UserError as error:
            job.answer, job.code = {"faults": faults_of(error, sets)}, 422
        except Dropped:
            job.answer = {"dropped": True}
        except Exception as error:  # the page says it, whatever it is
            job.answer, job.code = {"error": told(error)}, 500
        finally:
            job.ended.set()


def told(error: Exception) -> str:
    """One line of an exception that nobody expected, which goes to the terminal too."""
    lines = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
    print(f"drystep ui: {said}", file=sys.stderr)
    return said
