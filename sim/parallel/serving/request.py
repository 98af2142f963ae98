"""Inference: a prompt at once, then one token after another, over tensor ranks and pipeline stages.

A step of the Program is one request of `batch` sequences per replica: a section for the prompt, then sections of one
token each that repeat. The cache grows with every token; the generation is cut into pieces of equal length and each is
simulated at the cache length of its middle, which is exact for costs that grow evenly with the length. CUDA graphs
replay tokens; prompts, whose lengths differ, are launched kernel by kernel (gpt-fast generate.py compiles with
"reduce-overhead" what decodes one token, and TensorRT-LLM 0.5 alike, recalled; vLLM 0.6.3 worker/model_runner.py,
`_use_captured_graph`: decode_only).

An encoder-decoder's prompt section is the encoder and the decoder's first token; a cache that grows is not there while
the encoder runs. An encoder alone has no other section, and graphs replay it, as batches of one shape ask for.

Pipeline stages work in sequence on a token. As many parts of the batch as there are stages are on their way at once
(Pope et al. 2022, arXiv 2211.05102, section 3, leaves it at that: latency is the sum of the stages); the chosen tokens
travel from the last stage back to the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from sim.hardware.outside import Outside
from sim.model.architecture import Architecture, Layer, Operator
from sim.model.inference.kinds import rank_of
from sim.model.inference.mixed import mixed_rank
from sim.model.inference.rank import Items, Rank, Sum
from sim.model.inference.weights import NARROW, Weights
from sim.model.scenario_style import style_of
from sim.model.style import Style
from sim.parallel.beside import beside as beside_tensors
from sim.parallel.beside import residents
from sim.parallel.layout import Layout, Ranks, simulated_ranks
from sim.parallel.pipeline.stages import positions, split_of
from sim.parallel.serving.flow import Life, life_of
from sim.parallel.serving.held import RECEIVE, SEND, held_of, serving_groups
from sim.parallel.step import COMPUTE
from sim.program import CollectiveCall, Communicator, InlineCall, Job, Label, RankClass, SectionBuilder
from sim.scenario.fields.schema import Inference, InferenceRun, Scenario
from sim.software import Stack, stack_of
from sim.work import DTYPE_BYTES, Kernel

#: Pieces of the generation, each simulated at one cache length.
PIECES = 8
_TOKEN_BYTES = 8  # a token's number
_CACHE, _ENCODED = "cache of keys and values", "encoder's output"


class Piece(NamedTuple):
    """Tokens of the generation that are simulated alike: how many, and tokens in the cache before each."""

    tokens: int
    cached: int


@dataclass(frozen=True)
class Serving:
    """A lowered inference run.

    Attributes:
        architecture: of a tensor slice and the prompts of one replica.
        pieces: of the generation, the prompt's own token apart.
        ends: number of the section that ends with the first token, and of the last one of each piece.
        cache_bytes: of the fullest rank at the end of the generation.
        crossing_bytes: what of it is of an encoder's output.
        outside: what a rank's GPU holds beside tensors.
        layers: names of those that each pipeline stage holds.
    """

    job: Job
    architecture: Architecture
    pieces: tuple[Piece, ...]
    ends: tuple[int, ...]
    cache_bytes: int
    crossing_bytes: int
    outside: Outside
    layers: tuple[tuple[str, ...], ...]


def run_of(scenario: Scenario) -> InferenceRun | None:
    """Sizes of the scenario's inference run, None if it trains."""
    mode = scenario.training.mode
    return mode.inference if isinstance(mode, Inference) else None


def pieces_of(prompt: int, generate: int) -> tuple[Piece, ...]:
    """The generation behind the prompt's own token in at most `PIECES` pieces of about equal length, each at the
    cache length of its middle."""
    steps = generate - 1
    if steps < 1:
        return ()
    count = min(PIECES, steps)
    cuts = [steps * i // count for i in range(count + 1)]
    return tuple(Piece(end - begin, prompt + (begin + end - 1) // 2)
                 for begin, end in pairwise(cuts))


def mean_piece(run: InferenceRun) -> tuple[Piece, ...]:
    """The same under continuous batching, where the answers beside it are of all lengths: one piece at the mean."""
    steps = run.generate - 1
    return (Piece(steps, run.prompt + steps // 2),) if steps else ()


def parts_of(batch: int, depth: int) -> list[int]:
    """Sequences of each part of a batch that is on its way by itself through so many pipeline stages."""
    count = min(depth, batch)
    return [batch // count + (i < batch % count) for i in range(count)]


def first_tokens(run: InferenceRun, scenario: Scenario) -> int:
    """Tokens per sequence of the forward that fills the cache: the prompt's, or the one with which a decoder begins
    that has an encoder to read the prompt."""
    return 1 if scenario.model.kind == "encoder-decoder" else run.prompt


def lower_inference(scenario: Scenario, stack: Stack) -> Serving:
    """Programs of all pipeline stages; the tensor ranks of a stage are alike, and so are the replicas."""
    run, parallel = run_of(scenario), scenario.parallel
    assert run is not None
    depth = parallel.pipeline
    sizes = {"tensor": parallel.tensor, "context": parallel.context, "data": scenario.data_parallel, "pipeline": depth}
    layout = Layout(sizes, tuple(d for d in parallel.order if d in sizes))
    own_slice, weights, architecture, own = cut_of(scenario, stack)
    life = life_of(run) if run.batching == "continuous" else None
    pieces = pieces_of(first_tokens(run, scenario), run.generate) if life is None else mean_piece(run)
    groups = serving_groups(scenario, layout)
    stages = [_Stage(scenario, stack, own_slice, weights, stage, mine, architecture, layout, groups)
              for stage, mine in enumerate(own)]
    for stage in stages:
        stage.write(pieces, life)
    beside = beside_tensors(scenario, stack, layout, groups, 2 * (depth > 1), [stage.builder for stage in stages])
    for stage in stages:
        stage.builder.resident += residents(beside)
    job = _job(stages, layout, groups)
    sections = max(len(program.sections) for program in job.programs)
    ends = (tuple(range(len(pieces))) if life is None else (len(life.opening) - 1,) * bool(pieces)) + (sections - 1,)
    return Serving(job, architecture, pieces, ends, max(stage.cache_bytes for stage in stages),
                   max(stage.crossing_bytes for stage in stages), beside,
                   tuple(tuple(architecture.names[i] for i in mine) for mine in own))


class Cut(NamedTuple):
    """A replica's model in pieces: a tensor slice as it reads prompts, how weights and cache are stored, the layers of
    the slice, and which of them each pipeline stage holds."""

    style: Style
    weights: Weights
    architecture: Architecture
    own: tuple[range, ...]


def cut_of(scenario: Scenario, stack: Stack) -> Cut:
    """How an inference run is cut."""
    run, precision = run_of(scenario), scenario.training.precision
    assert run is not None
    style = replace(style_of(scenario, stack, run.batch), window=scenario.model.window or 0, sequence=run.prompt)
    weights = Weights(precision.parameters if precision.parameters in NARROW else "",
                      stack.quantised_products == "fused", stack.kv_cache == "concatenated",
                      precision.compute == precision.parameters, "" if run.kv_cache == "same" else run.kv_cache,
                      stack.engine_products if run.batching == "continuous" else "expanding")
    architecture = rank_of(style, run.batch, first_tokens(run, scenario), 0, weights).architecture()
    placed = [[stage] for stage in range(scenario.parallel.pipeline)]
    counts = split_of(scenario, stack, len(architecture.stack) - 2, placed)
    return Cut(style, weights, architecture, tuple(own[0] for own in positions(architecture, counts, placed)))


class _Stage:
    """The program of one pipeline stage.

    Attributes:
        parts: sequences of each part of the batch that is on its way by itself.
        cache_bytes: of the stage's blocks at the end of the generation; crossing_bytes: what of it is of an encoder's
            output.
    """

    def __init__(self, scenario: Scenario, stack: Stack, own_slice: Style, weights: Weights, stage: int,
                 own: range, architecture: Architecture, layout: Layout, groups: dict[str, Ranks]) -> None:
        run = run_of(scenario)
        assert run is not None
        self.run, self.stack, self.slice, self.weights = run, stack, own_slice, weights
        self.first = first_tokens(run, scenario)
        self.behind_encoder = scenario.model.kind == "encoder-decoder"
        self.stage, self.own, self.depth = stage, own, scenario.parallel.pipeline
        self.tensor = scenario.parallel.tensor
        self.launching = stack_of(scenario.software.model_copy(update={"cuda_graphs": False}))
        self.graphs = scenario.software.cuda_graphs
        self.parts = parts_of(run.batch, self.depth)
        self.held = held_of(scenario, stack, architecture, layout, groups, self._segment)
        self.builder = self.held.builder
        self.cache_bytes = self.crossing_bytes = 0
        #: what lasts from the encoder's last norm to the end of the request
        self.made: list[tuple[str, int, str]] = []
        self._segments: dict[tuple[Rank, int, tuple[int, ...], tuple[Kernel, ...]], int | None] = {}

    def write(self, pieces: tuple[Piece, ...], life: Life | None) -> None:
        """All sections, under continuous batching those of one request's life, and what is held throughout."""
        self._hold(self._rank(self.run.batch, self.first, 0))
        if life is not None:
            self._live(life)
            return
        self._section("prompt", self._parts(self.first, 0), first=True, last=not pieces, repeats=1)
        for number, piece in enumerate(pieces):
            ends = number == len(pieces) - 1 and (self.depth > 1 or bool(self.made))
            name, ranks = f"token at {piece.cached} cached", self._parts(1, piece.cached)
            self._section(name, ranks, first=False, last=False, repeats=piece.tokens - ends)
            if ends:
                self._section(name + ", last", ranks, first=False, last=True, repeats=1)

    def _live(self, life: Life) -> None:
        """The iterations that a request sees, its own prompt's behind those it waits for."""
        every = (*life.opening, *life.answering)
        for number, one in enumerate(every):
            rank = mixed_rank(self.slice, self.weights, *one[1:])
            name = ("prompt" if number == len(life.opening) - 1 else "waiting" if number < len(life.opening) else
                    "tokens beside prompts" if one.prompts else "tokens")
            self._section(name, [rank], first=True, last=number == len(every) - 1, repeats=one.times)

    def _hold(self, final: Rank) -> None:
        """What is held throughout."""
        run = self.run
        layers = self._layers(final)
        self.held.hold(final, layers)
        if self.depth > 1 and self.stage == self.depth - 1:
            self.builder.resident.append(("tied matrix", round(final.shared_bytes(layers[-1])), "parameters"))
        # a decoder behind an encoder has its start token in the cache, and not its last
        fed = self.first + run.generate - self.behind_encoder
        self.cache_bytes = final.cache_bytes(fed, layers)
        self.crossing_bytes = final.crossing_bytes(layers)
        self.builder.resident.append(("tokens", run.batch * (run.prompt + run.generate) * _TOKEN_BYTES, "buffers"))
        if self.behind_encoder:
            self.made.append((_ENCODED, round(final.kept_bytes()), "activations"))
        if self.behind_encoder and self.weights.appended:
            tensors = enumerate(final.cache_tensors(fed, layers))
            self.made += [(f"{_CACHE} {number}", size, "kv_cache") for number, size in tensors]
        else:
            self.builder.resident.append((_CACHE, self.cache_bytes, "kv_cache"))

    def _section(self, name: str, ranks: list[Rank], *, first: bool, last: bool, repeats: int) -> None:
        """One forward of every part of the batch. `first`: no tokens are on their way back before it; `last`: its own
        are waited for."""
        if not repeats:
            return
        section = self.builder.section(name)
        layers = self._layers(ranks[0])
        encoder = 0 if ranks[0].cached else next((i + 1 for i, layer in enumerate(layers) if layer.kind == "bridge"), 0)
        if encoder:
            self._beside(section, ranks, slice(0, encoder), first)
            for made in self.made:
                section.allocate(*made)
        self._beside(section, ranks, slice(encoder, None), first)
        if last and self.depth > 1 and self.stage == 0:
            for rank in ranks:  # the request is over when its last token is back
                self._receive(section, rank)
        if self.stack.step_sync or last:
            # the loop looks at the token: has the sequence ended?
            streams = tuple(range(len(self.builder.streams))) if last else (COMPUTE,)
            section.host(0.0, Label("token", "forward", "read the token"), joins=streams)
        if last:
            for made in self.made:
                section.free(*made)
        self.builder.run(section, repeats)

    def _beside(self, section: SectionBuilder, ranks: list[Rank], some: slice, first: bool) -> None:
        """Every part of the batch through some of this stage's layers, with what they hold at once."""
        size = ranks[0].transient_bytes(self._layers(ranks[0])[some])
        section.allocate("transients", size, "activations")
        for rank in ranks:
            self._part(section, rank, first, some)
        section.free("transients", size, "activations")

    def _part(self, section: SectionBuilder, rank: Rank, first: bool, some: slice) -> None:
        """One part of the batch through some of this stage's layers."""
        waits: tuple[int, ...] = ()
        if self.stage > 0 or (self.depth > 1 and not first):
            waits = (self._receive(section, rank),)
        task = self.held.forward(section, rank, self.own[some], waits)
        if self.depth > 1:
            call = CollectiveCall("send", *self._message(rank, self.stage))
            section.collective(SEND, call, self._call_s(rank), Label("pipeline", "forward", "send"), waits=(task,))

    def _receive(self, section: SectionBuilder, rank: Rank) -> int:
        """What the stage before sends; the first stage has the chosen tokens from the last."""
        call = CollectiveCall("recv", *self._message(rank, (self.stage - 1) % self.depth))
        return section.collective(RECEIVE, call, self._call_s(rank), Label("pipeline", "forward", "receive"))

    def _message(self, rank: Rank, source: int) -> tuple[int, str, int]:
        """Bytes, dtype and communicator of what a stage passes on; the last one's goes to the first."""
        style, edge = rank.style, (self.tensor > 1) + source
        if source == self.depth - 1:
            return style.batch * _TOKEN_BYTES, "fp64", edge
        return round(style.tokens * style.hidden * DTYPE_BYTES[style.residual]), style.residual, edge

    def _parts(self, new: int, cached: int) -> list[Rank]:
        """A forward of so many new tokens of each sequence, part by part."""
        return [self._rank(part, new, cached) for part in self.parts]

    def _rank(self, batch: int, new: int, cached: int) -> Rank:
        return rank_of(self.slice, batch, new, cached, self.weights)

    def _layers(self, rank: Rank) -> tuple[Layer, ...]:
        stack = rank.architecture().stack
        return stack[self.own.start:self.own.stop]

    def _call_s(self, rank: Rank) -> float:
        """Host time of a collective's call; a graph replays it with the kernels."""
        return 0.0 if self.graphs and self._replayed(rank) else self.stack.host_collective_s

    def _replayed(self, rank: Rank) -> bool:
        """Whether graphs, if any, replay this forward: a token's, and an encoder's, which runs no other."""
        return rank.cached > 0 or rank.style.kind == "encoder"

    def _segment(self, rank: Rank, layer: Layer, operators: Sequence[Operator] = (),
                 before: tuple[Kernel, ...] = ()) -> int | None:
        """A layer's forward, or of some of its operators, behind other kernels; None where there is nothing to do.
        Equal layers share one."""
        key = (rank, id(layer), tuple(map(id, operators)), before)
        if key not in self._segments:
            items = (*before, *(rank.part(layer, operators) if operators else rank.forward(layer)))
            self._segments[key] = self._made(rank, items) if items else None
        return self._segments[key]

    def _made(self, rank: Rank, items: Items) -> int:
        stack = self.stack if self._replayed(rank) else self.launching
        made: list[Kernel | InlineCall] = []
        host: list[float] = []
        for item in items:
            if isinstance(item, Sum):
                size = round(item.elements * DTYPE_BYTES[item.dtype])
                tensor = self.builder.communicators.index("tensor")
                made.append(InlineCall(CollectiveCall(item.kind, size, item.dtype, tensor)))
                host.append(self._call_s(rank))
            else:
                made.append(item)
                host.append((stack.host_forward_s + stack.host_module_s) * item.launches)
        return self.builder.segment(made, host)


def _job(stages: list[_Stage], layout: Layout, groups: dict[str, Ranks]) -> Job:
    """All stages as one job: a class of ranks per stage."""
    depth = len(stages)
    if depth == 1:
        alike, shared = simulated_ranks(np.zeros(layout.ranks, dtype=np.int64), groups)
        return Job([stages[0].builder.build()], alike, shared, layout.ranks)
    stage_of = layout.coordinate("pipeline")
    edges = [Communicator("pipeline", layout.moved("pipeline", stage, (stage + 1) % depth), 2)
             for stage in range(depth)]
    communicators, classes = list(edges), []
    for number, stage in enumerate(stages):
        mine: tuple[int, ...] = ()
        if stage.tensor > 1:
            tensor = groups["tensor"]
            mine = (len(communicators),)
            communicators.append(Communicator("tensor", tensor[stage_of[tensor[:, 0]] == number], 1))
        takes = [edge if number in (edge, (edge + 1) % depth) else -1 for edge in range(len(edges))]
        members = np.flatnonzero(stage_of == number)
        classes.append(RankClass(int(members[0]), members, number, 0, (*mine, *takes)))
    return Job([stage.builder.build() for stage in stages], classes, communicators, layout.ranks)
