"""Random jobs for the engine's property tests: a recipe first, so that one recipe can be written down in many ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from engine_fakes import NAME, kernel
from hypothesis import strategies as st

from sim.program import CollectiveCall, Communicator, Copy, Job, Program, ProgramBuilder, RankClass, SectionBuilder

STREAMS = ("compute", "second", "comm", "comm2", "copy")


@dataclass(frozen=True)
class Recipe:
    """One task: `seconds` per kernel (KERNELS), `size` (COLLECTIVE, COPY), `host_s` per kernel or call."""

    kind: str
    stream: int
    seconds: tuple[float, ...]
    size: int
    communicator: int
    host_s: float
    waits: tuple[int, ...]
    joins: tuple[int, ...]


# Durations that are not round numbers, so that events which have nothing to do with each other do not coincide; some
# shorter and some longer than what the host takes to launch a kernel.
SHORT = st.integers(1, 60).map(lambda n: n * 0.010123577 + 0.000137 * (n % 7))
DURATIONS = st.one_of(SHORT, st.integers(60, 400).map(lambda n: n * 0.010123577 + 0.000137 * (n % 7)))
HOST = st.one_of(st.just(0.0), SHORT.map(lambda s: 1.1307 * s), SHORT.map(lambda s: 0.1193 * s))


@st.composite
def recipes(draw: st.DrawFn, communicators: int = 2, second_stream: bool = True) -> tuple[Recipe, ...]:
    """Tasks of one section."""
    tasks: list[Recipe] = []
    for number in range(draw(st.integers(2, 9))):
        kind = draw(st.sampled_from(["kernels", "kernels", "collective", "collective", "copy", "host"]))
        waits = tuple(draw(st.lists(st.integers(0, number - 1), max_size=2))) if number else ()
        joins = tuple(sorted(draw(st.sets(st.integers(0, len(STREAMS) - 1), max_size=1))))
        seconds = tuple(draw(st.lists(DURATIONS, min_size=1, max_size=5))) if kind == "kernels" else ()
        stream = {"kernels": draw(st.sampled_from([0, 0, 1] if second_stream else [0])),
                  "collective": draw(st.sampled_from([2, 3])), "copy": 4, "host": -1}[kind]
        # A collective that starts in the very instant in which something unrelated starts or ends a kernel may or may
        # not wait for thread blocks, by a rounding error; so streams and communicators are kept incommensurable.
        seconds = tuple(s * 1.0371309 for s in seconds) if stream == 1 else seconds
        tasks.append(Recipe(kind, stream, seconds, draw(st.integers(1, 5)), draw(st.integers(0, communicators - 1)),
                            draw(HOST), waits, joins))
    return tuple(tasks)


def write(section: SectionBuilder, tasks: Sequence[Recipe], split: bool, drain_s: float) -> None:
    """Write a recipe down, each segment as one task or as one task per kernel."""
    builder = section.program
    last: list[int] = []  # number of the task that ends each recipe
    for task in tasks:
        waits = [last[w] for w in task.waits]
        if task.kind == "kernels":
            kernels = [kernel(s, drain_s * s) for s in task.seconds]
            for part in [[k] for k in kernels] if split else [kernels]:
                number = section.kernels(task.stream, builder.segment(part, [task.host_s] * len(part)), NAME, waits,
                                         task.joins)
        elif task.kind == "collective":
            kind = "all_gather" if task.size % 2 else "reduce_scatter"
            call = CollectiveCall(kind, 1009 * task.size + 97 * task.communicator, "bf16", task.communicator)
            number = section.collective(task.stream, call, task.host_s, NAME, waits, task.joins)
        elif task.kind == "copy":
            number = section.copy(task.stream, Copy("d2h", task.size), task.host_s, NAME, waits, task.joins)
        else:
            number = section.host(task.host_s, NAME, waits, task.joins)
        last.append(number)


def program(sections: Sequence[tuple[Sequence[Recipe], int]], *, split: bool = False, drain_s: float = 0.0,
            synchronise: bool = True, launch_queue: int = 1024, communicators: int = 2) -> Program:
    """Sections with their repeats, with or without a host that waits for everything at the end."""
    builder = ProgramBuilder(STREAMS, tuple(f"c{i}" for i in range(communicators)), launch_queue)
    for tasks, repeats in sections:
        section = builder.section("s")
        write(section, tasks, split, drain_s)
        builder.run(section, repeats)
    if synchronise:
        section = builder.section("end")
        section.host(0.03331, NAME, joins=range(len(STREAMS)))
        builder.run(section)
    return builder.build()


def job(programs: Sequence[Program], parties: int, communicators: int = 2) -> Job:
    """`parties` classes of one rank each; all take part in all communicators."""
    ranks = np.arange(parties, dtype=np.int64)
    classes = [RankClass(i, ranks[i:i + 1], min(i, len(programs) - 1), i, tuple(range(communicators)))
               for i in range(parties)]
    return Job(list(programs), classes, [Communicator(f"c{i}", ranks[None, :], parties) for i in range(communicators)],
               parties)
