"""Layouts close to the best found: where bounds are loose, a better one is sooner found there than by their order.

A round of them changes one thing of the best each, and what is recomputed with it where need be, since every other cut
leaves other room: of every axis the row with the lowest bound that is left, and once one of an axis did not fit, of
those that hold less. Only when none of these can be better are two things changed at once. What no time sufficed to
bound is bounded when it is one thing away. (Local search beside best-first branch and bound, as mixed integer solvers'
neighbourhood heuristics do: Danna, Rothberg and Le Pape, Math. Programming 102(1), 2005.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.scenario import Scenario
from sim.sizing.search.best_first import ROUND, Aside, Found
from sim.sizing.search.ranking import Floats, Ranking
from sim.sizing.space.layouts import SCHEDULES, STRATEGIES, Space
from sim.sizing.space.policies import policy_index

Rows = npt.NDArray[np.int64]

#: What is changed at once: columns that have a meaning together; recomputation last, which changes with others too.
_AXES = (("cluster",), ("nodes",), ("tensor", "sequence_parallel"), ("context",), ("expert", "expert_tensor"),
         ("micro_batch",), ("pipeline", "virtual_stages", "schedule"), ("strategy", "sharding_factor"), ("recompute",))
#: How many things, of how many of the best.
_TURNS = ((1, 4), (2, 1))


class Nearby:
    """Rows worth a try out of turn; called with what a search has found so far."""

    def __init__(self, space: Space, ranking: Ranking) -> None:
        self.space, self.ranking = space, ranking
        self._known: dict[tuple[int, int], list[Rows]] = {}

    def __call__(self, found: Found) -> tuple[list[int], Floats | None]:
        """At most a round of rows near the best that may be better than it, none of them evaluated; and the bounds of
        all rows if some of them were made fine for it."""
        turns = ((row, changes) for changes, best in _TURNS for _, row in found.best[:best])
        tightened = False
        for row, changes in turns:
            if changes == 1:  # of two there are too many
                tightened |= self.ranking.bound_at(np.concatenate([[row], *self._apart(row, changes)]).astype(np.int64))
            rows = self._near(row, changes, found)
            while self.ranking.tighten_only(rows):
                tightened, rows = True, self._near(row, changes, found)
            if rows:
                return rows, self.ranking.values if tightened else None
        return [], self.ranking.values if tightened else None

    def _near(self, row: int, changes: int, found: Found) -> list[int]:
        """Rows that differ from `row` in so many things, each in others: those with the lowest bounds."""
        return sorted(self._lowest(row, changes, found), key=lambda one: (self.ranking.values[one], one))[:ROUND]

    def _lowest(self, row: int, changes: int, found: Found) -> Iterator[int]:
        for rows in self._apart(row, changes):
            values = self._roomier(rows, found)
            for one in rows[np.argsort(values, kind="stable")[:np.count_nonzero(values < found.best[0][0])]].tolist():
                if one not in found.values:
                    yield one
                    break

    def _roomier(self, rows: Rows, found: Found) -> Floats:
        """Bounds of rows, of those inf that hold at least what one of them did for which there was no room."""
        held = self.ranking.of.memory_bytes[rows]
        failed = [found.values.get(row) == np.inf for row in rows.tolist()]
        return np.where(held < held[failed].min(initial=np.inf), self.ranking.values[rows], np.inf)

    @cached_property
    def _columns(self) -> dict[str, npt.NDArray[np.integer[Any]]]:
        """The space's, with the copies of every shard in place of the sharding factor, and whether experts are whole in
        place of their slices: what shards over all ranks, or cuts over all tensor ranks, does so whatever else cuts the
        model."""
        columns = self.space.columns
        ranks = self.space.gpus // (columns["tensor"] * columns["pipeline"])
        copies = np.where(columns["sharding_factor"] > 1, ranks // columns["sharding_factor"], 0)
        return {**columns, "sharding_factor": copies, "expert_tensor": columns["expert_tensor"] < columns["tensor"]}

    def layout_on(self, row: int, mine: npt.NDArray[np.bool_]) -> Rows:
        """Of some rows those of the layout of one, whatever they recompute and on how many GPUs of which cluster."""
        alike = mine.copy()
        for name, column in self._columns.items():
            if name not in ("cluster", "nodes", "recompute"):
                alike &= column == column[row]
        return np.flatnonzero(alike)

    def _apart(self, row: int, changes: int) -> list[Rows]:
        """Rows that differ from `row` in so many things, and in what they recompute or not, those that differ in the
        same ones together."""
        if (row, changes) not in self._known:
            columns = self._columns
            differs = np.zeros(len(self.space), dtype=np.int32)
            for number, names in enumerate(_AXES):
                other = np.zeros(len(self.space), dtype=bool)
                for name in names:
                    other |= columns[name] != columns[name][row]
                differs |= np.where(other, np.int32(1 << number), np.int32(0))
            others = range(len(_AXES) - 1)
            sets = [1 << a | 1 << b for a in others for b in others[:a + 1] if (a == b) == (changes == 1)]
            again = np.int32(1 << len(others))
            found = [np.flatnonzero((differs & ~again) == one) for one in sets]
            found += [np.flatnonzero(differs == again)] if changes == 1 else []
            self._known[row, changes] = [rows for rows in found if len(rows)]
        return self._known[row, changes]


def within(near: Aside, mine: npt.NDArray[np.bool_]) -> Aside:
    """Of what is worth a try those rows that are among some."""
    def aside(found: Found) -> tuple[Sequence[int], Floats | None]:
        rows, values = near(found)
        return [row for row in rows if mine[row]], masked(values, mine)

    return aside


def masked(values: Floats | None, mine: npt.NDArray[np.bool_]) -> Floats | None:
    """Bounds of some rows, of all others inf; None if there are none anew."""
    return None if values is None else np.where(mine, values, np.inf)


def own_row(space: Space, scenario: Scenario) -> int | None:
    """The row that is the scenario's own layout, but for a split by hand; None if it is not among them."""
    parallel, training, staged = scenario.parallel, scenario.training, scenario.parallel.pipeline > 1
    kept = policy_index(training.recompute, -(-(scenario.model.layers + scenario.model.decoder_layers)
                                              // parallel.pipeline))
    mine = np.isin(space.columns["cluster"], [i for i, one in enumerate(space.clusters) if _same(one, scenario)])
    wanted = {"nodes": scenario.cluster.nodes, "tensor": parallel.tensor, "context": parallel.context,
              "sequence_parallel": parallel.sequence_parallel, "expert": parallel.expert,
              "expert_tensor": scenario.expert_tensor, "micro_batch": training.micro_batch,
              "pipeline": parallel.pipeline,
              "virtual_stages": parallel.virtual_stages if staged else 1,
              "schedule": SCHEDULES.index(parallel.schedule) if staged else 0,
              "sharding_factor": parallel.sharding_factor, "recompute": -1 if kept is None else kept}
    for name, value in wanted.items():
        mine &= space.columns[name] == int(value or 0)
    rows = {STRATEGIES[space.columns["strategy"][row]]: int(row) for row in np.flatnonzero(mine)}
    # a strategy that another row equals in effect is not repeated: ZeRO of what FSDP shards, anything of one rank
    names = [parallel.strategy, *(["fsdp"] if parallel.strategy in ("zero2", "zero3") else []), "none"]
    return next((rows[name] for name in names if name in rows), None)


def _same(one: Scenario, scenario: Scenario) -> bool:
    """Whether a base of the search is what a scenario runs on, in its precision, and keeps on the host what it keeps
    there."""
    return (one.cluster.topology == scenario.cluster.topology
            and one.training.precision == scenario.training.precision
            and one.cluster.gpus_per_node == scenario.cluster.gpus_per_node
            and one.parallel.offload == scenario.parallel.offload
            and one.parallel.overlap_p2p == scenario.parallel.overlap_p2p)
