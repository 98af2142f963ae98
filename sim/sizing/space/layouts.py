"""The space of a search: every layout of a model on every number of GPUs of every cluster, as columns.

Options without effect are not repeated: a schedule has no meaning without stages, sequence parallelism none without
tensor ranks, k recomputed blocks on stages of k blocks are full recomputation, and ZeRO-3 is FSDP over all ranks where
one code does both. Nor is every value of long axes tried (`thinned`). Stages and chunks may differ by a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.errors import Fault, UserError
from sim.parallel.sharded.secondary import neighbours
from sim.parallel.support.check import spreads_experts
from sim.parallel.support.context import even_contexts
from sim.parallel.support.further import NOT_BESIDE_FURTHER
from sim.parallel.support.muon import cuts, strategies
from sim.parallel.support.zeropp import able
from sim.scenario import Scenario
from sim.scenario.fields.schema import TWO_CHUNKS
from sim.sizing.space.base import refused_strategies
from sim.sizing.space.experts import spreads
from sim.sizing.space.policies import POLICIES, policy, possible
from sim.sizing.space.thinned import Own, chunks, contexts, micro_batches, numbers, own_of
from sim.sizing.space.variants import part_of_a_node, told_of
from sim.sizing.wish import Request
from sim.software import Stack, stack_of

Ints = npt.NDArray[np.int32]

#: Columns of a space, in order; `cluster`, `schedule`, `strategy` and `recompute` index the names of their choices.
COLUMNS = ("cluster", "nodes", "tensor", "sequence_parallel", "context", "expert", "expert_tensor", "micro_batch",
           "pipeline", "virtual_stages", "schedule", "strategy", "sharding_factor", "recompute")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-1p", "zb-2p", "zb-v", "dualpipe")
STRATEGIES = ("none", "ddp", "zero1", "zero2", "zero3", "fsdp")
#: Strategies that run under any pipeline, and those that shard the parameters of its stages (`sim.parallel.support`).
_PIPELINED, _SHARDED = ("none", "ddp", "zero1"), ("zero2", "zero3", "fsdp")


@dataclass(frozen=True)
class Choice:
    """What may vary. An axis left empty takes every value that is possible.

    Attributes:
        gpus: numbers of GPUs, whole nodes or parts of one.
        strategies, schedules: names; schedules left empty are those that the stack has (`with_own`).
        recompute: policies; `partial_recompute`: whether the first k blocks are tried, for so many k (`thinned`).
        tensor, context, expert, expert_tensor, pipeline, virtual_stages, micro_batch: values.
        precision: names of those to try beside the scenario's own (`sim.sizing.space.precisions`).
        batch, weights, kv_cache: of requests (`sim.sizing.space.requests`).
        own: what the scenario has of the axes of which not every value is tried.
    """

    gpus: Sequence[int]
    strategies: Sequence[str] = ()
    schedules: Sequence[str] = ()
    recompute: Sequence[str] = POLICIES
    partial_recompute: bool = True
    tensor: Sequence[int] = ()
    context: Sequence[int] = ()
    expert: Sequence[int] = ()
    expert_tensor: Sequence[int] = ()
    pipeline: Sequence[int] = ()
    virtual_stages: Sequence[int] = ()
    micro_batch: Sequence[int] = ()
    precision: Sequence[str] = ()
    batch: Sequence[int] = ()
    weights: Sequence[str] = ()
    kv_cache: Sequence[str] = ()
    own: Own | None = None


def with_own(choice: Choice, scenario: Scenario) -> Choice:
    """A choice that leaves schedules open, with those of the scenario's stack and that of its own pipeline: who writes
    another runs a fork that has it. And with what else is the scenario's own, unless that is known."""
    own = [scenario.parallel.schedule] if scenario.parallel.pipeline > 1 else []
    return replace(choice, schedules=choice.schedules or tuple(dict.fromkeys([*_stack(scenario).schedules, *own])),
                   own=choice.own or own_of(scenario))


@dataclass
class Space:
    """Rows of configurations; each row is one that no other row equals in effect.

    Attributes:
        clusters: scenario of each cluster, resolved, at one node.
        columns: name to integers, each of shape (rows,).
        raw: configurations as they can be written, for which the rows stand; stepped: whether not every micro-batch
            that divides is among them.
        by_precision: whether rows say their precision, of which clusters may have several.
    """

    clusters: list[Scenario]
    columns: dict[str, Ints] = field(default_factory=dict)
    raw: int = 0
    stepped: bool = False
    by_precision: bool = False

    def __len__(self) -> int:
        return len(self.columns["cluster"])

    def add(self, row: int, recompute: Sequence[int], micro_batch: int | None = None) -> list[int]:
        """Rows like one, but for what they recompute, and their micro-batch where one is given; their numbers."""
        before, count = len(self), len(recompute)
        new: dict[str, Sequence[int]] = {name: [int(column[row])] * count for name, column in self.columns.items()}
        new |= {"recompute": recompute} | ({} if micro_batch is None else {"micro_batch": [micro_batch] * count})
        self.columns = {name: np.concatenate((column, new[name]), dtype=column.dtype, casting="same_kind")
                        for name, column in self.columns.items()}
        self.__dict__.pop("gpus", None)
        return list(range(before, before + count))

    @property
    def batches(self) -> list[int]:
        """Of requests, those that are tried."""
        return []

    def request(self, rows: Any, prompt_s: Any, token_s: Any) -> Request | None:
        """What rows ask of a wish beside a step; None: they train."""
        return None

    @cached_property
    def gpus(self) -> npt.NDArray[np.int64]:
        """GPUs of every row."""
        return self.columns["nodes"] * per_node(self.clusters)[self.columns["cluster"]]

    @property
    def schedules(self) -> list[str]:
        """Schedules of the pipelines that are among the rows."""
        return [SCHEDULES[i] for i in np.unique(self.columns["schedule"][self.columns["pipeline"] > 1])]

    @cached_property
    def told(self) -> list[dict[str, Any]]:
        """Fields by which each cluster's scenario is told from its variants."""
        return told_of(self.clusters, self.by_precision)

    @cached_property
    def _resharded(self) -> str:
        """The strategy that the base's `reshard_after_forward: n` is of: second shards are ZeRO-3's."""
        return "zero3" if _stack(self.clusters[0]).gradient_path == "ipg" else "fsdp"

    def sets(self, row: int) -> dict[str, Any]:
        """A row as dotted fields of its cluster's scenario."""
        v = {name: int(column[row]) for name, column in self.columns.items()}
        strategy, staged = STRATEGIES[v["strategy"]], v["pipeline"] > 1
        slices = {} if self.clusters[0].model.moe is None else {  # said where it has a meaning
            "parallel.expert_tensor": v["expert_tensor"] if v["expert"] > 1 < v["tensor"] else None}
        sets: dict[str, Any] = {
            "cluster.nodes": v["nodes"], "training.micro_batch": v["micro_batch"],
            "training.recompute": policy(v["recompute"]), "parallel.strategy": strategy,
            "parallel.sharding_factor": v["sharding_factor"], "parallel.tensor": v["tensor"],
            "parallel.sequence_parallel": bool(v["sequence_parallel"]), "parallel.context": v["context"],
            "parallel.expert": v["expert"], **slices, "parallel.pipeline": v["pipeline"],
            "parallel.virtual_stages": v["virtual_stages"],
            "parallel.schedule": SCHEDULES[v["schedule"]] if staged else "1f1b",
        }
        sets |= self.told[v["cluster"]]
        if staged and strategy in _SHARDED:  # whole from the first micro-batch to the last, as torchtitan has it
            sets["parallel.reshard_after_forward"] = False
        elif near := neighbours(self.clusters[v["cluster"]].parallel.reshard_after_forward):
            fits = strategy == self._resharded and v["sharding_factor"] % near == 0 and v["expert"] == 1
            sets["parallel.reshard_after_forward"] = near if fits else True
        return sets


def per_node(clusters: Sequence[Scenario]) -> npt.NDArray[np.int64]:
    """GPUs of a node of each cluster."""
    return np.array([s.cluster.gpus_per_node for s in clusters], dtype=np.int64)


def with_parts(bases: Sequence[Scenario], choice: Choice) -> list[Scenario]:
    """The bases, and each cut to its node's first GPUs for every number of GPUs that fills no node."""
    return [*bases, *(base.model_copy(update={"cluster": base.cluster.model_copy(update={"gpus_per_node": gpus})})
                      for base in bases for gpus in choice.gpus if gpus < base.cluster.gpus_per_node)]


def build_space(clusters: Sequence[Scenario], choice: Choice,
                narrowed: Callable[[Scenario, Choice], Choice | None] = lambda _, choice: choice) -> Space:
    """Every configuration of `choice` on `clusters`.

    Args:
        narrowed: the part of the choice that one of `clusters` can have; None if nothing.

    Raises:
        UserError: none is possible.
    """
    heads: list[tuple[int, ...]] = []
    parts: list[Ints] = []
    raw, stepped, choice = 0, False, with_own(choice, clusters[0])
    for number, scenario in enumerate(clusters):
        mine = narrowed(scenario, choice)
        for gpus in choice.gpus if mine is not None else ():
            whole = scenario.cluster.gpus_per_node
            if mine is None or gpus % whole or (gpus > whole and part_of_a_node(scenario, clusters)):
                continue
            for head, rows, said, alike in _of_count(number, scenario, gpus // whole, mine):
                heads.append(head)
                parts.append(rows)
                raw, stepped = raw + said * alike, stepped or alike > 1
    if not parts:
        raise UserError(_nothing(clusters, choice))
    counts = [rows.shape[1] for rows in parts]
    fixed = np.array(heads, dtype=np.int32)
    columns = {name: np.repeat(fixed[:, i], counts) for i, name in enumerate(COLUMNS[:fixed.shape[1]])}
    columns |= {name: np.concatenate([rows[i] for rows in parts]) for i, name in enumerate(COLUMNS[fixed.shape[1]:])}
    return Space(list(clusters), columns, raw, stepped, bool(choice.precision))


def not_whole(clusters: Sequence[Scenario], choice: Choice) -> Fault | None:
    """What is wrong where no number of GPUs asked for is whole nodes, or part of one."""
    if not all(gpus % one.cluster.gpus_per_node for gpus in choice.gpus for one in clusters):
        return None
    nodes = sorted({one.cluster.gpus_per_node for one in clusters if not part_of_a_node(one, clusters)})
    return Fault(f"{' or '.join(map(str, choice.gpus))} GPUs are neither part of a node nor whole nodes of "
                 f"{' or '.join(map(str, nodes))}", "--gpus", hint=f"give a multiple of {nodes[0]}")


def _nothing(clusters: Sequence[Scenario], choice: Choice) -> Fault:
    """Why no layout is possible: no cluster has whole nodes of that many GPUs, or nothing divides them."""
    if (uneven := not_whole(clusters, choice)) is not None:
        return uneven
    narrow = any((choice.strategies, choice.tensor, choice.context, choice.expert, choice.expert_tensor,
                  choice.pipeline, choice.virtual_stages, choice.micro_batch)) or choice.recompute != POLICIES
    return Fault(f"no layout of this model{' that --only leaves' if narrow else ''} divides the GPUs and the global "
                 "batch", "--only" if narrow else "--gpus",
                 hint=f"give other numbers of GPUs, or another global_batch{', or other values of --only' * narrow}")


def _of_count(number: int, scenario: Scenario, nodes: int,
              choice: Choice) -> Iterator[tuple[tuple[int, ...], Ints, int, int]]:
    """Blocks of rows: fixed columns, (strategy, sharding factor, recompute) of each row, how many configurations they
    stand for with this micro-batch, and how many micro-batches this one does."""
    gpus, model, batch = nodes * scenario.cluster.gpus_per_node, scenario.model, scenario.training.global_batch
    assert batch is not None
    blocks = model.layers + model.decoder_layers
    same, ipg = _same_sharding(scenario), _stack(scenario).gradient_path == "ipg"
    states = scenario.parallel.offload.optimizer in ("cpu", "nvme")  # of shards, which one rank has none of
    stack, refused = _stack(scenario), refused_strategies(scenario, STRATEGIES)
    choice = replace(choice, recompute=tuple(name for name in choice.recompute if possible(name, scenario, stack)))
    for tensor, context, pipeline in _degrees(scenario, gpus, choice):
        replicas = gpus // (tensor * context * pipeline)
        if batch % replicas or (states and replicas * context == 1):
            continue
        share = batch // replicas
        spread = spreads(scenario, stack.experts_scattered, tensor, replicas * context, choice.expert,
                         choice.expert_tensor)
        sequences = (0, 1) if tensor > 1 and model.kind == "decoder" and \
            scenario.training.sequence % (tensor * context) == 0 else (0,)
        plain = {two: _data_parallel(replicas * context, replicas, pipeline, blocks, choice, same, [
            name for name in _strategies(scenario, pipeline, two, same)
            if name not in refused and able(scenario, stack, name, tensor)])
            for two in (False, True)}
        ways = {one.expert: {two: _spread(*rows, one.expert, ipg) for two, rows in plain.items()} for one in spread}
        for micro, alike, virtual, schedule, chunked in _orders(share, pipeline, blocks, choice):
            for expert, slices, own_tokens in spread:
                rows, said = ways[expert][SCHEDULES[schedule] == "dualpipe"]
                if not rows.shape[1]:
                    continue
                for sequence in (s for s in sequences if s or not own_tokens):
                    yield ((number, nodes, tensor, sequence, context, expert, slices, micro, pipeline, virtual,
                            schedule), rows, said * chunked, alike)


def _orders(share: int, pipeline: int, blocks: int, choice: Choice) -> list[tuple[int, int, int, int, int]]:
    """Micro-batches that are tried of a replica's `share` of sequences, and how many each stands for, with each way of
    `_schedules` to order them; the smallest first."""
    able: dict[tuple[int, int, int], list[int]] = {}
    for micro in divisors(share):
        for way in _schedules(pipeline, share // micro, blocks, choice):
            able.setdefault(way, []).append(micro)
    return sorted(((micro, alike, *way) for way, micros in able.items()
                   for micro, alike in micro_batches(micros, choice.own or Own(), choice.micro_batch)),
                  key=lambda one: one[0])


def ordered(schedule: str, pipeline: int, micro_steps: int) -> bool:
    """Whether a schedule can order so many micro-batches."""
    if schedule == "interleaved":
        return micro_steps % pipeline == 0
    return schedule not in TWO_CHUNKS or schedule == "zb-v" or (
        pipeline % 2 == 0 and micro_steps % 2 == 0 and micro_steps >= 2 * pipeline)


def _spread(rows: Ints, said: int, expert: int, ipg: bool) -> tuple[Ints, int]:
    """Of ways of data parallelism those among whose ranks experts can be spread, and how many can be written."""
    if expert == 1:
        return rows, said
    able = [spreads_experts(STRATEGIES[index], factor, expert, ipg) for index, factor in rows[:2].T.tolist()]
    return np.ascontiguousarray(rows[:, able]), said - rows.shape[1] + sum(able)


def _degrees(scenario: Scenario, gpus: int, choice: Choice) -> Iterator[tuple[int, int, int]]:
    """Tensor, context and pipeline degrees that the model and the GPUs allow."""
    model, sequence = scenario.model, scenario.training.sequence
    wide, deep = cuts(scenario, _stack(scenario))
    plain = model.kind == "layers" or not wide
    cut = not scenario.training.optimizer_in_backward and deep  # in backward, which no pipeline has
    widths = [t for t in divisors(gpus) if _in(t, choice.tensor) and (t == 1 or (not plain and not (
        model.heads % t or model.ffn % t or (model.kv_heads % t and t % model.kv_heads))))]
    degrees = [c for c in divisors(gpus) if c == 1 or (model.kind == "decoder" and sequence % c == 0)]
    shared = contexts(degrees, sequence, choice.own or Own(), choice.context)
    depths = [p for p in divisors(gpus) if _in(p, choice.pipeline) and (p == 1 or (
        cut and model.kind in ("decoder", "encoder") and p <= model.layers + 2))]
    stack = _stack(scenario)
    asks = scenario.parallel.context_exchange == "all-to-all" or scenario.training.packed
    for t in widths:
        for c in shared if not asks else [c for c in shared if even_contexts(scenario, stack, t, c)]:
            for p in depths:
                if gpus % (t * c * p) == 0:
                    yield t, c, p


def _schedules(pipeline: int, micro_steps: int, blocks: int, choice: Choice) -> Iterator[tuple[int, int, int]]:
    """Chunks and schedule of a pipeline that can order this many micro-batches, and how many numbers of chunks these
    stand for."""
    if pipeline == 1:
        yield 1, 0, 1
        return
    for index, name in enumerate(SCHEDULES):
        if name not in choice.schedules or not ordered(name, pipeline, micro_steps):
            continue
        if name == "interleaved":
            yield from ((count, index, alike) for count, alike in chunks(
                blocks, pipeline, choice.own or Own(), choice.virtual_stages))
        elif name in TWO_CHUNKS:
            if 2 * pipeline <= blocks + 2 and _in(2, choice.virtual_stages):
                yield 2, index, 1
        elif _in(1, choice.virtual_stages):
            yield 1, index, 1


def _policies(blocks: int, pipeline: int, choice: Choice) -> tuple[list[int], int]:
    """Recomputation: named policies, and the first k blocks of each pipeline rank below all of them; and how many more
    can be written: for other k, or the same as full recomputation."""
    found = [POLICIES.index(name) for name in choice.recompute]
    if not choice.partial_recompute:
        return found, 0
    most = -(-blocks // pipeline)
    tried = numbers(most, choice.own or Own())
    return found + [len(POLICIES) + k - 1 for k in tried], blocks - len(tried)


def _stack(scenario: Scenario) -> Stack:
    return stack_of(scenario.software)


def _same_sharding(scenario: Scenario) -> bool:
    """Whether ZeRO-3 is FSDP over all ranks in this stack, program for program (`sim.parallel.lower.shards`).

    Adafactor's states alone differ, where FSDP 2 keeps the shape of matrices.
    """
    return _stack(scenario).gradient_path != "ipg" and scenario.training.optimizer != "adafactor"


def _strategies(scenario: Scenario, pipeline: int, held_twice: bool, same: bool) -> tuple[str, ...]:
    """Strategies that a pipeline's stages allow. ZeRO-2 keeps gathered parameters, which is what FSDP does there.

    Args:
        held_twice: two ranks hold every stage (dualpipe).
        same: ZeRO-2 and 3 are FSDP over all ranks.
    """
    known: tuple[str, ...] = STRATEGIES if pipeline == 1 else (*_PIPELINED, "fsdp") if same else _PIPELINED
    if pipeline > 1 and (held_twice or scenario.model.tied_embeddings):
        known = _PIPELINED
    if scenario.model.mtp_layers:
        known = tuple(name for name in known if name not in NOT_BESIDE_FURTHER)
    return strategies(scenario, _stack(scenario), known)


def _data_parallel(ranks: int, replicas: int, pipeline: int, blocks: int, choice: Choice,
                   same: bool, allowed: Sequence[str]) -> tuple[Ints, int]:
    """(strategy, sharding factor, recompute) of every way to keep the states of `ranks` equal ranks, shape (3, rows),
    and how many can be written.

    Args:
        same: ZeRO-3 is FSDP over all ranks.
    """
    pairs: list[tuple[int, int]] = []
    merged = 0
    for index, name in enumerate(STRATEGIES):
        if (choice.strategies and name not in choice.strategies) or name not in allowed:
            continue
        if name == "none" or ranks == 1:
            if name == "none" and ranks == 1 and replicas == 1:
                pairs.append((index, 1))
        elif name == "zero3" and same and _in("fsdp", choice.strategies):
            merged += 1
        elif name == "fsdp":
            pairs += [(index, factor) for factor in divisors(ranks) if factor > 1]
        else:
            pairs.append((index, 1 if name == "ddp" else ranks))
    if not pairs and ranks == 1:
        pairs.append((STRATEGIES.index("none"), 1))
    policies, more = _policies(blocks, pipeline, choice)
    said = (len(pairs) + merged) * (len(policies) + more) * (
        max(1, len(choice.schedules)) if pipeline == 1 else 1)
    columns = np.repeat(np.array(pairs, dtype=np.int32).reshape(-1, 2), len(policies), axis=0).T
    last = np.tile(np.array(policies, dtype=np.int32), len(pairs))
    return np.ascontiguousarray(np.concatenate((columns, last[None, :]))), said


def _in(value: Any, allowed: Sequence[Any]) -> bool:
    return not allowed or value in allowed


def divisors(whole: int) -> list[int]:
    """Ascending."""
    return [d for d in range(1, whole + 1) if whole % d == 0]
