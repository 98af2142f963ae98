"""What the engine asks about time, answered once: the Machine is a set of memos over devices and network.

The event loop never calls a kernel or a collective model twice with the same question. It asks for

* a `Profile`: the prefix sums of a segment's kernel times in one *contention state* (SMs and memory bandwidth taken),
* a `Flow`: one distinct collective of one communicator, as the network sees it,
* the `Shares` of a set of active flows: everyone's rate, and with it the contention state of every class of ranks,

and after the first time each answer is one dictionary or list look-up.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sim.engine.plan import SectionPlan, compile_programs
from sim.program import Job, Kind, Program, RankClass

if TYPE_CHECKING:
    from sim.hardware import Device
    from sim.network import Coflow, Network


class Profile:
    """A segment in one contention state; kernel j runs for `elapsed[j + 1] - elapsed[j]` seconds.

    A kernel starts when the one before has ended and the host has launched it, so with the host's launches at
    issue + launched[j] the end of kernel j obeys end[j] = max(end[j - 1], issue + launched[j]) + time[j]. Unrolled,

        end[j] = elapsed[j + 1] + max(begin, issue + max over i <= j of delay[i]),   delay[i] = launched[i] - elapsed[i]

    which is why `delay` and its suffix maxima are kept: they answer "when does the segment end" without a loop.

    Attributes:
        elapsed: seconds of kernel time before kernel j, length n + 1 (the last entry is the total).
        delay: see above, length n.
        late: late[j] = max(delay[j:]), length n + 1, the last -inf (nothing left to launch).
        elapsed_column, delay_column: elapsed and delay as arrays, for questions about many kernels at once.
        total_s: all kernels, without waiting for the host.
        first_launch_s: when the first kernel is launched, after the host has begun to issue the segment.
    """

    __slots__ = ("delay", "delay_column", "elapsed", "elapsed_column", "first_launch_s", "late", "total_s")

    def __init__(self, times_s: npt.NDArray[np.float64], host_s: Sequence[float]) -> None:
        elapsed = np.concatenate(([0.0], np.cumsum(times_s)))
        launched = np.cumsum(np.asarray(host_s, dtype=np.float64))
        delay = launched - elapsed[:-1]
        late = np.maximum.accumulate(delay[::-1])[::-1]
        self.elapsed_column = elapsed
        self.delay_column = delay
        self.elapsed: list[float] = elapsed.tolist()
        self.delay: list[float] = delay.tolist()
        self.late: list[float] = [*late.tolist(), -math.inf]
        self.total_s: float = self.elapsed[-1]
        self.first_launch_s: float = float(launched[0]) if len(launched) else 0.0


@dataclass(frozen=True, slots=True)
class Flow:
    """One distinct collective of one communicator.

    Attributes:
        number: index into `Machine.flows`; the engine's name for it.
        communicator: index into `Job.communicators`.
        classes: simulated classes that take part.
        latency_s, size_bytes, channels: as in the network's Coflow.
        hbm_bytes_per_byte: device-memory traffic on each rank per byte of size_bytes.
        alone_bps: rate with no other flow on its links.
        coflow: the network's description, None on a network of infinite speed.
    """

    number: int
    communicator: int
    classes: tuple[int, ...]
    latency_s: float
    size_bytes: float
    channels: int
    hbm_bytes_per_byte: float
    alone_bps: float
    coflow: Coflow | None

    @property
    def alone_s(self) -> float:
        """Seconds when nothing contends."""
        return self.seconds(self.alone_bps)

    def seconds(self, rate_bps: float) -> float:
        """Seconds at one rate from beginning to end."""
        return self.latency_s + (self.size_bytes / rate_bps if self.size_bytes else 0.0)


@dataclass(frozen=True, slots=True)
class Shares:
    """What a set of active flows means: (flow number, rate) of each, and the classes of ranks they involve."""

    rates_bps: tuple[tuple[int, float], ...]
    classes: tuple[int, ...]


class Machine:
    """Devices and a network, as seen by one job.

    Args:
        devices: hardware kinds, indexed by `RankClass.device`.
        network: None is a network of infinite speed (a collective still waits for its ranks and its order).
        job: what will run; its sections are compiled here.
        drain: whether a collective that starts while a kernel runs waits for thread blocks to drain.
        contention: False = no flow slows another or any kernel, and nothing drains.
    """

    def __init__(self, devices: Sequence[Device], network: Network | None, job: Job, *, drain: bool = True,
                 contention: bool = True) -> None:
        self.devices = devices
        self.job = job
        #: (SMs taken, memory bandwidth taken in bytes/s) of each contention state; state 0 = nothing taken.
        self.states: list[tuple[int, float]] = [(0, 0.0)]
        self._state_numbers: dict[tuple[int, float], int] = {(0, 0.0): 0}
        self._tables: dict[tuple[tuple[int, int, tuple[float, ...]], int], list[Profile | None]] = {}
        self._kernel_s: dict[tuple[int, int, tuple[int, float]], npt.NDArray[np.float64]] = {}
        self._drains: dict[tuple[int, int], list[list[float] | None]] = {}
        self._copies: dict[tuple[int, int], list[float]] = {}
        self.plans: list[list[SectionPlan]] = compile_programs(job.programs)
        self._parties = self._members()
        self._connect(network, drain, contention)

    def _connect(self, network: Network | None, drain: bool, contention: bool) -> None:
        """Set what depends on the network; compute times and compiled sections do not."""
        job = self.job
        self.network = network
        self.contention = contention and network is not None
        self.drain = drain and self.contention
        self.flows: list[Flow] = []
        self.known_shares: dict[tuple[int, ...], Shares] = {}
        self._flow_numbers: dict[tuple[int, str, int, str], int] = {}
        #: For each class and each collective of its program, the number of its flow; -1 where it takes no part.
        self.class_flows = [self._flows_of(c) for c in job.classes]
        #: Rates of the flows of one inline collective, by program and collective; filled as they are asked for.
        self._lockstep: dict[tuple[int, int], dict[int, float]] = {}
        #: What a class's segments take depends on these alone: program, device and its inline collectives' seconds.
        self._variants = [(c.program, c.device, self._inline_s(number)) for number, c in enumerate(job.classes)]
        self.known_states: dict[tuple[tuple[int, float], ...], int] = {}
        self.known_near: dict[int, frozenset[int]] = {}
        self._by_link: dict[object, list[int]] | None = None

    def _flows_of(self, c: RankClass) -> list[int]:
        program = self.job.programs[c.program]
        used = program.calls()
        return [self.flow(c.communicators[call.communicator], call.kind, call.size_bytes, call.dtype)
                if number in used else -1 for number, call in enumerate(program.collectives)]

    def infinite(self) -> Machine:
        """The same devices and job on a network of infinite speed; what is known of kernels is shared."""
        other = copy.copy(self)
        other._connect(None, drain=False, contention=False)
        return other

    def _members(self) -> list[tuple[int, ...]]:
        """Classes that take part in each communicator."""
        members: list[list[int]] = [[] for _ in self.job.communicators]
        for number, c in enumerate(self.job.classes):
            for communicator in dict.fromkeys(n for n in c.communicators if n >= 0):
                members[communicator].append(number)
        return [tuple(m) for m in members]

    # -- compute ------------------------------------------------------------------------------------------------------

    def table(self, class_number: int, state: int) -> list[Profile | None]:
        """Profiles of a class's segments in one contention state, filled by `profile` as they are asked for."""
        key = (self._variants[class_number], state)
        found = self._tables.get(key)
        if found is None:
            found = self._tables[key] = [None] * len(self._program(class_number).segments)
        return found

    def profile(self, class_number: int, state: int, segment: int) -> Profile:
        """Prefix sums of `segment` in contention state `state`, memoised."""
        table = self.table(class_number, state)
        found = table[segment]
        if found is None:
            row = self._program(class_number).segments[segment]
            times = self._row_times(class_number, state)[np.asarray(row.kernels, dtype=np.intp)]
            found = table[segment] = Profile(times, row.host_s)
        return found

    def _program(self, class_number: int) -> Program:
        return self.job.programs[self.job.classes[class_number].program]

    def _kernel_times(self, program: int, device: int, taken: tuple[int, float]) -> npt.NDArray[np.float64]:
        """Seconds of every distinct kernel of a program in one state: one call of the device model per state."""
        key = (id(self.job.programs[program].kernels), device, taken)
        found = self._kernel_s.get(key)
        if found is None:
            kernels = self.job.programs[program].kernels
            times = self.devices[device].times(kernels, *taken) if kernels else np.zeros(0)
            found = self._kernel_s[key] = np.asarray(times, dtype=np.float64)
        return found

    def kernel_s(self, class_number: int) -> npt.NDArray[np.float64]:
        """Seconds of every distinct kernel of a class's program, nothing in its way."""
        c = self.job.classes[class_number]
        return self._kernel_times(c.program, c.device, (0, 0.0))

    def _row_times(self, class_number: int, state: int) -> npt.NDArray[np.float64]:
        """Seconds of every row a segment of the class may name (see `Program.by_row`), in one state."""
        c = self.job.classes[class_number]
        times = self._kernel_times(c.program, c.device, self.states[state])
        inline_s = self._variants[class_number][2]
        return np.concatenate((times, inline_s[::-1])) if inline_s else times

    def _inline_s(self, class_number: int) -> tuple[float, ...]:
        """Seconds of each inline collective: its own, or those of the kernels beside it where they take longer.

        While both run the kernels go at the pace the collective leaves them, then at their own.
        """
        c = self.job.classes[class_number]
        program = self.job.programs[c.program]
        out = []
        for inline in program.inlines:
            number = self.class_flows[class_number][inline.collective]
            if number < 0:
                out.append(0.0)
                continue
            flow = self.flows[number]
            rate_bps = self._lockstep_bps(c.program, inline.collective)[number]
            seconds = flow.seconds(rate_bps)
            if inline.beside:
                taken = (flow.channels, _memory_traffic_bps(flow, rate_bps)) if self.contention else (0, 0.0)
                rows = np.asarray(inline.beside, dtype=np.intp)
                slow = float(self._kernel_times(c.program, c.device, taken)[rows].sum())
                free = float(self._kernel_times(c.program, c.device, (0, 0.0))[rows].sum())
                seconds = seconds + (slow - seconds) * free / slow if slow > seconds else seconds
            out.append(seconds)
        return tuple(out)

    def lockstep_s(self, class_number: int) -> list[float]:
        """Seconds of each collective of a class's program without kernels beside it, 0 of what stands in no segment."""
        c, flows = self.job.classes[class_number], self.class_flows[class_number]
        inside = {inline.collective for inline in self._program(class_number).inlines}
        return [self.flows[number].seconds(self._lockstep_bps(c.program, collective)[number])
                if number >= 0 and collective in inside else 0.0 for collective, number in enumerate(flows)]

    def _lockstep_bps(self, program: int, collective: int) -> dict[int, float]:
        """Rate of each flow of an inline collective, memoised. One flow counts all instances of its communicator; those
        of ranks told apart (a slow GPU, a run without folding) are flows of their own and meet at the same time."""
        found = self._lockstep.get((program, collective))
        if found is None:
            classes = zip(self.class_flows, self.job.classes, strict=True)
            own = {numbers[collective] for numbers, c in classes if c.program == program} - {-1}
            flows = [self.flows[number] for number in sorted(own)]
            shared = self.network is not None and len(flows) > 1
            rates = self._fair_share(flows) if shared else [flow.alone_bps for flow in flows]
            found = self._lockstep[program, collective] = dict(zip((f.number for f in flows), rates, strict=True))
        return found

    def drains_s(self, class_number: int, segment: int) -> list[float]:
        """Mean wait for a free SM while each row of a segment runs, memoised; an inline collective holds few."""
        c = self.job.classes[class_number]
        key = (c.program, c.device)
        table = self._drains.get(key)
        program = self.job.programs[c.program]
        if table is None:
            table = self._drains[key] = [None] * len(program.segments)
        found = table[segment]
        if found is None:
            of = self.devices[c.device].drain_s
            rows = program.segments[segment].kernels
            wait_s = {row: float(of(program.kernels[row])) if row >= 0 else 0.0 for row in set(rows)}
            found = table[segment] = [wait_s[row] for row in rows]
        return found

    def copies_s(self, program: int, device: int) -> list[float]:
        """Seconds of each distinct host-device copy of a program."""
        key = (program, device)
        found = self._copies.get(key)
        if found is None:
            copy_s = self.devices[device].copy_s
            found = self._copies[key] = [
                float(copy_s(c.direction, c.size_bytes)) for c in self.job.programs[program].copies]
        return found

    # -- network ------------------------------------------------------------------------------------------------------

    def flow(self, communicator: int, kind: str, size_bytes: int, dtype: str) -> int:
        """Number of the flow of this collective; a receive is the same flow as its send."""
        key = (communicator, "send" if kind == "recv" else kind, size_bytes, dtype)
        found = self._flow_numbers.get(key)
        if found is None:
            found = self._flow_numbers[key] = len(self.flows)
            self.flows.append(self._new_flow(found, *key))
        return found

    def _new_flow(self, number: int, communicator: int, kind: str, size_bytes: int, dtype: str) -> Flow:
        classes = self._parties[communicator]
        if self.network is None:
            return Flow(number, communicator, classes, 0.0, 0.0, 0, 0.0, math.inf, None)
        coflow = self.network.coflow(kind, size_bytes, self.job.communicators[communicator].ranks, dtype)
        alone_bps = coflow.cap_bps
        for link, load in zip(coflow.links, coflow.loads, strict=True):
            if load > 0:
                alone_bps = min(alone_bps, self.network.capacity(link) / load)
        if coflow.size_bytes > 0 and not alone_bps > 0:
            raise ValueError(f"{kind} of {size_bytes} bytes on communicator "
                             f"{self.job.communicators[communicator].name!r} has no bandwidth")
        return Flow(number, communicator, classes, coflow.latency_s, coflow.size_bytes, coflow.channels,
                    coflow.hbm_bytes_per_byte, alone_bps, coflow)

    def near(self, flow: int) -> frozenset[int]:
        """Flows that share a link with `flow`: only they can change its rate."""
        found = self.known_near.get(flow)
        if found is None:
            if self._by_link is None:
                self._by_link = {}
                for other in self.flows:
                    for link in _links(other):
                        self._by_link.setdefault(link, []).append(other.number)
            found = frozenset(n for link in _links(self.flows[flow]) for n in self._by_link[link]) - {flow}
            self.known_near[flow] = found
        return found

    def shares(self, key: tuple[int, ...]) -> Shares:
        """Rates while exactly the flows `key` (ascending numbers) are active among those that share links with them,
        memoised."""
        found = self.known_shares.get(key)
        if found is None:
            flows = [self.flows[number] for number in key]
            alone = tuple(flow.alone_bps for flow in flows)
            rates = alone if len(flows) < 2 or not self.contention else tuple(self._fair_share(flows))
            classes = tuple(dict.fromkeys(c for flow in flows for c in flow.classes))
            found = self.known_shares[key] = Shares(tuple(zip(key, rates, strict=True)), classes)
        return found

    def state(self, active: Sequence[tuple[int, float]]) -> int:
        """Contention state of a class that takes part in the active flows (number, rate), ascending."""
        if not self.contention:
            return 0
        key = tuple(active)
        found = self.known_states.get(key)
        if found is None:
            sms, hbm_bps = 0, 0.0
            for number, rate in key:
                flow = self.flows[number]
                sms, hbm_bps = sms + flow.channels, hbm_bps + _memory_traffic_bps(flow, rate)
            found = self.known_states[key] = self._state((sms, hbm_bps))
        return found

    def _fair_share(self, flows: list[Flow]) -> list[float]:
        from sim.network import fair_share  # not needed by a job whose collectives never overlap

        assert self.network is not None
        return [float(r) for r in fair_share([f.coflow for f in flows if f.coflow is not None], self.network.capacity)]

    def _state(self, taken: tuple[int, float]) -> int:
        found = self._state_numbers.get(taken)
        if found is None:
            found = self._state_numbers[taken] = len(self.states)
            self.states.append(taken)
        return found

    # -- without contention -------------------------------------------------------------------------------------------

    def alone_s(self, class_number: int) -> list[npt.NDArray[np.float64]]:
        """Contention-free seconds of every task, one array per section of the class's program.

        KERNELS: the sum of kernel times, without waits for the host; HOST: its own work.
        """
        c = self.job.classes[class_number]
        copies_s = self.copies_s(c.program, c.device)
        flows = self.class_flows[class_number]
        out = []
        for plan in self.plans[c.program]:
            seconds = [
                self.profile(class_number, 0, payload).total_s if kind == Kind.KERNELS
                else self.flows[flows[payload]].alone_s if kind == Kind.COLLECTIVE
                else copies_s[payload] if kind == Kind.COPY else host_s
                for kind, payload, host_s in zip(plan.kind, plan.payload, plan.host_s, strict=True)]
            out.append(np.array(seconds, dtype=np.float64))
        return out


def _links(flow: Flow) -> Sequence[object]:
    return () if flow.coflow is None else flow.coflow.links


def _memory_traffic_bps(flow: Flow, rate_bps: float) -> float:
    """Mean memory bandwidth a flow takes: its bytes over its whole duration, latency included.

    The latency of a ring or tree is spread over its steps, so the traffic is too; the plain rate would charge
    bytes that never move while a small collective spends its time on latency.
    """
    if not flow.size_bytes or not flow.hbm_bytes_per_byte:
        return 0.0
    return flow.hbm_bytes_per_byte * flow.size_bytes / (flow.latency_s + flow.size_bytes / rate_bps)
