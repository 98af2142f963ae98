"""NCCL's graph search in closed form: how many channels of which speed rings and trees get on a machine.

Source: NVIDIA/nccl 2.29.7 src/graph/search.cc (ncclTopoCompute, ncclTopoDupChannels) and src/graph/connect.cc
(ncclTopoPostset), restated for machines whose nodes are alike: it tries speeds from the fastest on, down to half of the
first that fits, and keeps the one whose channels carry most; channels of 25 GB/s and more are split in two, and every
channel then stands twice. So eight A100 get 6 x 40, which become 12 x 20 and 24 channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sim.catalog import table

#: What the search ends at: the next speed is tried if it is more than this of the first that fitted.
_LEAST = 0.49
#: Channels are split from this speed on, GB/s; from compute capability 9 on only where they are faster still or few.
_SPLIT, _SPLIT_NEW, _FEW = 25.0, 50.0, 4
#: Most channels before each stands twice (MAXCHANNELS 64 and 32 before 2.19, src/include/device.h).
_MOST = 32
#: Release from which the search tries the speeds of `speeds`, not those of an era.
_NEW_SPEEDS = (2, 18)
_SPLIT_ALONE = 45.0


@dataclass(frozen=True, slots=True)
class Graph:
    """Channels of a graph and the speed of each inside a node and between nodes, GB/s.

    `inside` is that of rings; trees of two nodes get `tree_inside`, as much more as the node has, up to twice.
    """

    channels: int
    inside: float
    between: float
    tree_inside: float


def era(name: str, version: tuple[int, ...]) -> Any:
    """A figure of the tuner of NCCL's release (`tuner.yaml`, `eras`): the last one said up to it, else the first."""
    rows = table("network/tuner.yaml")["eras"]
    return [row[name] for row in rows if name in row and (row is rows[0] or tuple(row["from"]) <= version)][-1]


@lru_cache(maxsize=64)
def speeds(capability: int, several: bool, version: tuple[int, ...]) -> tuple[float, ...]:
    """Speeds of a channel that the search tries, GB/s, fastest first.

    Args:
        capability: compute capability times ten; several: whether the communicator spans nodes; version: NCCL's.
    """
    where = "between" if several else "inside"
    if version < _NEW_SPEEDS:
        return tuple(era("speeds", version)[where])
    rows = table("network/tuner.yaml")["speeds"][where]
    return tuple(rows[max(least for least in rows if least <= capability)])


def search(tried: Sequence[float], inside: float, path: float, nics: int, nic: float, capability: int) -> Graph:
    """The graph of a group whose GPUs each have `inside` GB/s of links, at most `path` of them to one peer.

    Args:
        tried: speeds, fastest first.
        inside: infinite where a node holds one GPU.
        nics, nic: NICs of a node that the group reaches and the speed of each, GB/s; 0 on one node.
    """
    best, speed, first = 0, 0.0, 0.0
    for bw in tried:
        if bw > path or (nics and bw > nic):
            continue
        if first and bw / first <= _LEAST:
            break
        channels = min(_MOST, int(inside / bw + 1e-6) if inside < 1e6 else _MOST)
        if nics:
            channels = min(channels, nics * int(nic / bw + 1e-6))
        if channels and not first:
            first = bw
        if channels * bw > best * speed + 1e-6:
            best, speed = channels, bw
    if not best:
        best, speed = 1, min(tried[-1], path)
    between, split = speed, 1
    if speed >= _SPLIT and not (capability > 80 and speed < _SPLIT_NEW and best > _FEW):
        doubled = min(2 * best, _MOST)
        split = -(-doubled // best)
        best, speed, between = doubled, speed / split, between / split
    tree = speed
    for bw in reversed(tried):
        if tree < bw and tree < 2 * between and bw * best <= inside:
            tree = bw
    return Graph(best, speed, between, tree)


def compute_channels(graph: Graph, several: bool, capability: int) -> int:
    """Channels that large calls open: every one of the graph's twice, and again where few of Hopper's are fast."""
    channels = 2 * graph.channels
    if capability >= 90 and several and graph.inside > _SPLIT_ALONE and channels < 16:
        channels *= 2
    return channels
