"""Groups of ranks and classes of ranks, counted by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.parallel.layout import Layout, equitable_classes, simulated_ranks


def test_shard_and_replica_groups_of_sixteen_ranks() -> None:
    layout = Layout({"data": 16}, ("data",))
    assert layout.group("data", 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert layout.group("data", 4, 4).tolist() == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]


def test_tensor_is_innermost() -> None:
    layout = Layout({"tensor": 2, "data": 3, "pipeline": 2}, ("tensor", "data", "pipeline"))
    assert layout.ranks == 12
    assert layout.group("tensor").tolist()[:2] == [[0, 1], [2, 3]]
    assert layout.group("data").tolist() == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    assert layout.group("pipeline").tolist()[0] == [0, 6]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.sampled_from(["tensor", "data", "pipeline"]))
def test_every_rank_is_in_exactly_one_group(t: int, d: int, p: int, dimension: str) -> None:
    layout = Layout({"tensor": t, "data": d, "pipeline": p}, ("tensor", "data", "pipeline"))
    group = layout.group(dimension)
    assert sorted(group.reshape(-1).tolist()) == list(range(t * d * p))
    assert group.shape[1] == layout.sizes[dimension]


def test_a_homogeneous_job_is_one_class() -> None:
    layout = Layout({"data": 64}, ("data",))
    groups = {"shard": layout.group("data", 8), "replicate": layout.group("data", 8, 8)}
    classes = equitable_classes(np.zeros(64, dtype=np.int64), groups)
    assert classes.tolist() == [0] * 64
    simulated, communicators = simulated_ranks(classes, groups)
    assert len(simulated) == 1 and [c.parties for c in communicators] == [1, 1]
    assert [c.ranks.shape for c in communicators] == [(8, 8), (8, 8)]


def test_a_slow_gpu_splits_off_its_shard_group_and_its_replicas() -> None:
    layout = Layout({"data": 64}, ("data",))
    groups = {"shard": layout.group("data", 8), "replicate": layout.group("data", 8, 8)}
    colours = np.zeros(64, dtype=np.int64)
    colours[0] = 1
    classes = equitable_classes(colours, groups)
    # the slow rank; its 7 shard mates; its 7 replicas; the 49 others
    assert sorted(np.bincount(classes).tolist()) == [1, 7, 7, 49]
    simulated, communicators = simulated_ranks(classes, groups, colours)
    assert [c.device for c in simulated] == [1, 0, 0, 0]
    assert sorted(c.parties for c in communicators) == [2, 2, 2, 2]
    assert sum(c.ranks.size for c in communicators) == 2 * 64


def test_unfolded_communicators_hold_one_instance_each() -> None:
    layout = Layout({"data": 8}, ("data",))
    groups = {"shard": layout.group("data", 4), "replicate": layout.group("data", 2, 4)}
    simulated, communicators = simulated_ranks(np.arange(8), groups)
    assert len(simulated) == 8 and len(communicators) == 2 + 4
    assert all(c.ranks.shape[0] == 1 and c.parties == c.size for c in communicators)
    assert simulated[5].communicators == (1, 2 + 1)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=16, max_size=16))
def test_classes_are_equitable(colours: list[int]) -> None:
    layout = Layout({"data": 16}, ("data",))
    groups = {"shard": layout.group("data", 4), "replicate": layout.group("data", 4, 4)}
    classes = equitable_classes(np.array(colours), groups)
    for ranks in groups.values():
        around: dict[int, set[tuple[int, ...]]] = {}
        for row in ranks:
            signature = tuple(sorted(classes[row].tolist()))
            for rank in row:
                around.setdefault(int(classes[rank]), set()).add(signature)
        assert all(len(signatures) == 1 for signatures in around.values())
    for members in range(int(classes.max()) + 1):
        assert len({colours[r] for r in np.flatnonzero(classes == members)}) == 1
