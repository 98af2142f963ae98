"""What the picture of a step shows, as numbers: rows of bars, where communication is exposed, what to look at closely.

The rows are those of the critical rank, repeats written out. A bar is a task; its key says what colour it gets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sim.engine import SectionRun
from sim.memory.curve import host_spans
from sim.program import ON_CPU, Kind, Program
from sim.report.numbers.behind import launch_s
from sim.report.numbers.breakdown import COMPUTE_STREAM, across, between_stages
from sim.report.numbers.exposure import Spans
from sim.report.numbers.inside import Inside
from sim.report.pictures.timeline_waits import waits_of
from sim.report.result import Result
from sim.scenario import Scenario

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Keys of what is no phase and no collective.
EXPOSED, BUBBLE, LATE = "exposed communication", "pipeline bubble", "waiting for the host"
COPY, OTHER = "host-device copy", "other"
_PHASES = ("forward", "backward", "optimizer")
#: A close look shows about so many layers.
_CLOSE_LAYERS = 9
#: Backward's part of the time of a layer, which has two products where forward has one.
_BACKWARD_SHARE = 2 / 3
#: Share of exposed communication from which a stretch is shown for it.
WORTH_A_LOOK = 0.02
#: Micro-steps whose communication differs by less than this share count as alike.
_ALIKE = 0.05


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars of one row: seconds, the number of their key and of their text, and the share of their time that is work.

    Every array has shape (bars,); a bar of share below 1 waited inside for the host to launch its kernels.
    """

    start_s: Floats
    end_s: Floats
    key: Ints
    text: Ints
    share: Floats

    def within(self, start_s: float, end_s: float) -> Bars:
        """The bars that reach into a window."""
        seen = (self.end_s > start_s) & (self.start_s < end_s) & (self.end_s > self.start_s)
        return self.take(np.flatnonzero(seen))

    def take(self, rows: Ints) -> Bars:
        """Some of the bars."""
        return Bars(self.start_s[rows], self.end_s[rows], self.key[rows], self.text[rows], self.share[rows])

    def merged(self, gap_s: float, narrow_s: float, dense: bool = False) -> Bars:
        """Neighbours of one key that are narrow and less than `gap_s` apart, drawn as one; its text is dropped.

        Args:
            dense: gaps between them count as no work.
        """
        if len(self.key) < 2:
            return self
        bars = self.take(np.argsort(self.start_s, kind="stable"))
        narrow = bars.end_s - bars.start_s < narrow_s
        joined = ((bars.key[1:] == bars.key[:-1]) & (bars.start_s[1:] - bars.end_s[:-1] < gap_s)
                  & narrow[1:] & narrow[:-1])
        first = np.flatnonzero(np.concatenate(([True], ~joined)))
        last = np.append(first[1:], len(joined) + 1) - 1
        seconds = bars.end_s - bars.start_s
        ends = np.maximum.reduceat(bars.end_s, first)
        length = ends - bars.start_s[first] if dense else np.add.reduceat(seconds, first)
        work = np.minimum(1.0, np.add.reduceat(seconds * bars.share, first) / np.maximum(length, 1e-30))
        return Bars(bars.start_s[first], ends, bars.key[first],
                    np.where(first == last, bars.text[first], -1), work)

    def shares(self, edges_s: Floats) -> Floats:
        """The share of each stretch between neighbouring edges that bars, none over another, are at work."""
        order = np.argsort(self.start_s, kind="stable")
        knots = np.column_stack((self.start_s, self.end_s))[order].ravel()
        done = np.cumsum(((self.end_s - self.start_s) * self.share)[order])
        reached = np.interp(edges_s, knots, np.repeat(np.append(0.0, done), 2)[1:-1])
        return np.asarray(np.diff(reached) / np.diff(edges_s), dtype=np.float64)


@dataclass(slots=True)
class Rows:
    """The picture's contents.

    Attributes:
        names: of the rows, host first, then compute, then the streams of communication.
        bars: one per row.
        keys, texts: what the numbers in `Bars.key` and `Bars.text` mean (text -1: none).
        exposed: stretches in which the rank waits for communication, shape (n, 2) seconds.
        bubbles: stretches in which it waits for another stage.
        late: stretches in which it waits for the host.
        micro_steps: start and end of the compute of every micro-step, or stretch of a pipeline's schedule, shape (m, 2)
            seconds.
        counted: how many there are, in words ("" for a single one); piece: what one of them is called.
        closest: the micro-step worth a look; of a pipeline the one in the middle, where its schedule is steady.
        step_time_s: length of the axis.
    """

    names: list[str]
    bars: list[Bars]
    keys: list[str]
    texts: list[str]
    exposed: Floats
    bubbles: Floats
    late: Floats
    micro_steps: Floats
    counted: str
    piece: str
    closest: int
    step_time_s: float

    def exposed_s(self, start_s: float, end_s: float) -> float:
        """Seconds of exposed communication in a window."""
        return float(np.clip(np.minimum(self.exposed[:, 1], end_s) - np.maximum(self.exposed[:, 0], start_s), 0.0,
                             None).sum())


@dataclass(slots=True)
class _Collected:
    """Columns of all tasks, in host order; a list entry per run."""

    kind: list[Ints] = field(default_factory=list)
    stream: list[Ints] = field(default_factory=list)
    key: list[Ints] = field(default_factory=list)
    text: list[Ints] = field(default_factory=list)
    phase: list[Ints] = field(default_factory=list)
    between: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    start_s: list[Floats] = field(default_factory=list)
    end_s: list[Floats] = field(default_factory=list)
    issue_s: list[Floats] = field(default_factory=list)
    launch_s: list[Floats] = field(default_factory=list)
    took_s: list[Floats] = field(default_factory=list)
    outside: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    starved_s: list[Floats] = field(default_factory=list)
    host_s: list[tuple[Floats, Floats]] = field(default_factory=list)


@dataclass(slots=True)
class _Fixed:
    """What all runs of a section share."""

    kind: Ints
    stream: Ints
    key: Ints
    text: Ints
    phase: Ints
    between: npt.NDArray[np.bool_]
    outside: npt.NDArray[np.bool_]
    host_s: Floats
    launch_s: Floats


@dataclass(slots=True)
class _Chained:
    """Collectives inside of tasks of kernels, by communicator: begin, end, exposed from and to, key and text."""

    bars: dict[int, list[tuple[Floats, Floats, Floats, Floats, Ints, Ints]]] = field(default_factory=dict)

    def add(self, program: Program, inside: Inside, fixed: _Fixed, run: SectionRun, keys: dict[str, int]) -> None:
        """One run of a section."""
        parts = inside.of(run.section).collectives
        if not len(parts.row):
            return
        calls = [program.collectives[program.inlines[-1 - row].collective] for row in parts.row.tolist()]
        on = np.array([call.communicator for call in calls])
        key = np.array([keys.setdefault(call.kind, len(keys)) for call in calls])
        columns = (*parts.placed(run), key, fixed.text[parts.task])
        for number in sorted(set(on.tolist())):
            begin, over, shown, end, key_of, text = (column[on == number] for column in columns)
            self.bars.setdefault(number, []).append((begin, over, shown, end, key_of, text))

    def row(self, communicator: int) -> Bars:
        """A row of the picture."""
        begin, end, _, _, key, text = (np.concatenate(column) for column in zip(*self.bars[communicator], strict=True))
        return Bars(begin, end, key, text, np.ones(len(begin)))

    def spans(self) -> Spans:
        """Where any of them is exposed."""
        every = [(shown, end) for runs in self.bars.values() for _, _, shown, end, _, _ in runs]
        start, end = (np.concatenate([np.zeros(0), *column]) for column in (zip(*every, strict=True) if every else
                                                                            ((), ())))
        return Spans(start, end, np.zeros(len(start), dtype=np.int64), 1)


def rows_of(result: Result) -> Rows:
    """Read the rows of the critical rank off a result."""
    detail = result.detail
    job = detail.lowered.job
    program = job.programs[job.classes[detail.critical].program]
    groups = across(detail.machine, detail.critical)
    keys: dict[str, int] = {}
    texts: dict[str, int] = {}
    known: dict[int, _Fixed] = {}
    all_runs = _Collected()
    inside, chained = Inside(detail.machine, detail.critical), _Chained()
    micro_steps: list[tuple[float, float, float]] = []
    for run in steady(detail.timeline.classes[detail.critical], result.step_time_s):
        if run.section not in known:
            known[run.section] = _fixed(program, run.section, keys, texts, groups)
        fixed = known[run.section]
        for one in run:
            _collect(all_runs, program, fixed, one)
            chained.add(program, inside, fixed, one, keys)
            micro_steps += _micro_step(program, fixed, one, keys)
    columns = {name: np.concatenate(getattr(all_runs, name)) for name in
               ("kind", "stream", "key", "text", "phase", "between", "outside", "start_s", "end_s", "issue_s",
                "launch_s", "took_s", "starved_s")}
    names, bars = _streams(program, columns, list(keys))
    names.insert(0, "host")
    bars.insert(0, _host(all_runs, columns))
    for number, name in enumerate(program.communicators):
        if number in chained.bars:
            names.insert(2, name)
            bars.insert(2, chained.row(number))
    exposed, bubbles, waits = waits_of(columns, chained.spans(), result.step_time_s)
    for name, spans in ((EXPOSED, exposed), (BUBBLE, bubbles), (LATE, waits)):
        bars[1] = _joined(bars[1], spans, keys.setdefault(name, len(keys)))
    within = [m for m in micro_steps if m[0] < result.step_time_s]
    windows = np.array([m[:2] for m in within]).reshape(-1, 2)
    return Rows(names, bars, list(keys), list(texts), exposed, bubbles, waits, windows,
                *counted(result.scenario, len(windows)),
                len(within) // 2 if result.scenario.parallel.pipeline > 1 and len(within) > 1 else
                _closest([m[2] for m in within]), result.step_time_s)


def whole(scenario: Scenario) -> str:
    """What is simulated: a step of training, or a request."""
    return "step" if scenario.training.mode == "train" else "request"


def counted(scenario: Scenario, windows: int) -> tuple[str, str]:
    """What a step's windows are, in words: how many ("" for one), and the name of one of them.

    A pipeline rank's sections are no micro-steps: a section may hold several actions of its schedule, or one.
    """
    if scenario.training.mode != "train":  # the prompt gives the first token, each piece behind it another
        tokens = scenario.training.mode.inference.generate
        if not tokens:
            return "", "pass"
        return f"{tokens} tokens", (
            "stretch" if scenario.parallel.pipeline > 1 else "token")
    if scenario.parallel.pipeline > 1:
        return f"{scenario.micro_steps} micro-batches", "stretch"
    return (f"{windows} micro-steps" if windows > 1 else ""), "micro-step"


def steady(runs: Sequence[SectionRun], step_time_s: float) -> Iterator[SectionRun]:
    """The runs of a step, and those of the next whose host or communication begins before this one ends."""
    yield from runs
    for run in runs:
        if len(run.issue_s) and min(float(run.issue_s.min()), float(run.start_s.min())) < 0:
            yield SectionRun(run.section, run.issue_s + step_time_s, run.start_s + step_time_s,
                             run.end_s + step_time_s, run.starved_s)


def close_look(rows: Rows, start_s: float, end_s: float) -> tuple[str, tuple[float, float]] | None:
    """A stretch of about nine layers of compute inside a window, and what it shows: where most communication is
    exposed, else where forward turns into backward, or in a pipeline the other way round. None if the window has hardly
    more layers than that, or is all of one kind."""
    compute = rows.bars[1].within(start_s, end_s)
    phases = np.array([rows.keys.index(p) if p in rows.keys else -1 for p in _PHASES])
    layers = compute.take(np.flatnonzero(np.isin(compute.key, phases) & (compute.text >= 0)))
    layers = layers.take(np.argsort(layers.start_s, kind="stable"))
    count = len(np.unique(layers.text))
    if count < 2 * _CLOSE_LAYERS:
        return None
    length = _CLOSE_LAYERS * _BACKWARD_SHARE * (end_s - start_s) / count
    starts = np.clip(layers.start_s - length / 20, start_s, end_s - length)
    waiting = np.array([rows.exposed_s(s, s + length) for s in starts])
    if waiting.max(initial=0.0) > length * WORTH_A_LOOK:
        begin = float(starts[int(np.argmax(waiting > 0.98 * waiting.max()))])
        return "where most communication is exposed", (begin, begin + length)
    changes = np.flatnonzero(np.concatenate(([True], np.diff(layers.text * len(rows.keys) + layers.key) != 0)))
    phase = layers.key[changes]
    for (before, after), said in ((phases[:2], "forward turns into backward"),
                                  (phases[1::-1], "backward turns into forward")):
        turns = np.flatnonzero((phase[:-1] == before) & (phase[1:] == after)) + 1
        if len(turns):
            first, last = max(int(turns[0]) - 4, 0), min(int(turns[0]) + 6, len(changes) - 1)
            return said, (float(layers.start_s[changes[first]]), float(layers.start_s[changes[last]]))
    return None


def _fixed(program: Program, number: int, keys: dict[str, int], texts: dict[str, int],
           groups: Collection[str]) -> _Fixed:
    section = program.sections[number]
    names, shown, phases, between, outside = [], [], [], [], []
    for kind, payload, label in zip(section.kind, section.payload, section.label, strict=True):
        layer, phase, told = program.labels[label]
        outside.append(kind == Kind.HOST and told.endswith(ON_CPU))
        phase = phase if phase in _PHASES else OTHER
        if kind == Kind.COLLECTIVE:
            name = program.collectives[payload].kind
        elif kind == Kind.COPY:
            name = COPY
        else:
            name = phase
        call = program.collectives[payload] if kind == Kind.COLLECTIVE else None
        between.append(call is not None and between_stages(
            (call.kind, program.communicators[call.communicator]), groups))
        phases.append(keys.setdefault(phase, len(keys)))
        names.append(keys.setdefault(name, len(keys)))
        shown.append(texts.setdefault(layer, len(texts)))
    kinds = np.array(section.kind, dtype=np.int64)
    return _Fixed(kinds, np.array(section.stream, dtype=np.int64),
                  np.array(names, dtype=np.int64), np.array(shown, dtype=np.int64),
                  np.array(phases, dtype=np.int64), np.array(between, dtype=bool), np.array(outside, dtype=bool),
                  np.array(section.host_s, dtype=np.float64),
                  launch_s(program, kinds, np.array(section.payload, dtype=np.int64)))


def _collect(to: _Collected, program: Program, fixed: _Fixed, run: SectionRun) -> None:
    to.kind.append(fixed.kind)
    to.stream.append(fixed.stream)
    to.key.append(fixed.key)
    to.text.append(fixed.text)
    to.phase.append(fixed.phase)
    to.between.append(fixed.between)
    to.start_s.append(run.start_s)
    to.end_s.append(run.end_s)
    to.issue_s.append(run.issue_s)
    to.launch_s.append(fixed.launch_s)
    to.took_s.append(fixed.host_s)
    to.outside.append(fixed.outside)
    to.starved_s.append(run.starved_s)
    if len(fixed.kind):
        to.host_s.append(host_spans(program.sections[run.section], run))


def _micro_step(program: Program, fixed: _Fixed, run: SectionRun,
                keys: dict[str, int]) -> list[tuple[float, float, float]]:
    """(start, end, seconds of communication) of a run that trains; nothing of others."""
    on = (fixed.kind == Kind.KERNELS) & (fixed.stream == COMPUTE_STREAM)
    trains = on & np.isin(fixed.key, [keys[p] for p in ("forward", "backward") if p in keys])
    if not trains.any():
        return []
    moving = fixed.kind == Kind.COLLECTIVE
    return [(float(run.start_s[trains].min()), float(run.end_s[on].max()),
             float((run.end_s - run.start_s)[moving].sum()))]


def _closest(communication: Sequence[float]) -> int:
    """The micro-step with most communication; of those that are alike the second, which is the steady one."""
    if not communication:
        return -1
    alike = [i for i, s in enumerate(communication) if s >= (1 - _ALIKE) * max(communication)]
    return alike[min(1, len(alike) - 1)]


def _streams(program: Program, columns: dict[str, npt.NDArray[np.generic]],
             keys: Sequence[str]) -> tuple[list[str], list[Bars]]:
    """Streams as rows; those to other stages that are told alike (one for each chunk of a rank) share a row."""
    shown: dict[str, Ints] = {}
    lasts = np.asarray(columns["end_s"], dtype=np.float64) > np.asarray(columns["start_s"], dtype=np.float64)
    for number, name in enumerate(program.streams):
        rows = np.flatnonzero((columns["stream"] == number) & (columns["kind"] != Kind.HOST))
        if number == COMPUTE_STREAM or lasts[rows].any():
            told = name if program.streams.count(name) == 1 else _told(columns, rows, keys)
            shown[told] = np.sort(np.concatenate((shown[told], rows))) if told in shown else rows
    return list(shown), [_bars(columns, rows, columns["start_s"], columns["end_s"], columns["starved_s"])
                         for rows in shown.values()]


def _told(columns: dict[str, npt.NDArray[np.generic]], rows: Ints, keys: Sequence[str]) -> str:
    """Name of one of several streams of a name, those to other stages: what goes over it, and in which phase."""
    parts = [" and ".join(keys[number] for number in sorted({int(n) for n in columns[name][rows]}))
             for name in ("key", "phase")]
    return ", ".join(parts)


def _host(collected: _Collected, columns: dict[str, npt.NDArray[np.generic]]) -> Bars:
    start = np.concatenate([s for s, _ in collected.host_s])
    end = np.concatenate([e for _, e in collected.host_s])
    issued = np.add(*(np.asarray(columns[name], dtype=np.float64) for name in ("issue_s", "took_s")))
    busy = np.where(columns["kind"] == Kind.HOST, end, np.minimum(issued, end))
    issues = {**columns, "key": columns["phase"]}  # the host's row tells how far ahead it is, not what it sends
    return _bars(issues, np.arange(len(start)), start, busy, np.zeros(len(start)))


def _bars(columns: dict[str, npt.NDArray[np.generic]], rows: Ints, start_s: npt.NDArray[np.generic],
          end_s: npt.NDArray[np.generic], starved_s: npt.NDArray[np.generic]) -> Bars:
    start, end = np.asarray(start_s, dtype=np.float64)[rows], np.asarray(end_s, dtype=np.float64)[rows]
    idle = np.asarray(starved_s, dtype=np.float64)[rows] / np.maximum(end - start, 1e-30)
    return Bars(start, end, np.asarray(columns["key"], dtype=np.int64)[rows],
                np.asarray(columns["text"], dtype=np.int64)[rows], np.clip(1.0 - idle, 0.0, 1.0))


def _joined(bars: Bars, spans: Floats, key: int) -> Bars:
    count = len(spans)
    return Bars(np.concatenate((bars.start_s, spans[:, 0])), np.concatenate((bars.end_s, spans[:, 1])),
                np.concatenate((bars.key, np.full(count, key))), np.concatenate((bars.text, np.full(count, -1))),
                np.concatenate((bars.share, np.ones(count))))
