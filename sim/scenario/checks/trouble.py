"""Trouble that cannot be: GPUs and nodes the cluster does not have."""

from __future__ import annotations

from collections.abc import Iterator

from sim.errors import nearest
from sim.scenario.fields.schema import Scenario
from sim.scenario.named.gpus import canonical_gpu, gpu_facts, gpu_names


def trouble(written: Scenario, s: Scenario) -> Iterator[tuple[str, str, str]]:
    """Findings (dotted field, message, hint) about `cluster.slow_gpus`, `other_gpus` and `clock_spread`."""
    del written
    cluster, taken = s.cluster, set()
    yield from _links_once(s)
    for i, slow in enumerate(cluster.slow_gpus or ()):
        field = f"cluster.slow_gpus.{i}"
        if slow.gpu >= s.gpus:
            yield (f"{field}.gpu", f"GPU {slow.gpu} does not exist: the job has {s.gpus}, counted from 0",
                   f"at most {s.gpus - 1}")
        elif slow.gpu in taken:
            yield f"{field}.gpu", f"GPU {slow.gpu} is named twice", "say what is slow about it in one entry"
        taken.add(slow.gpu)
    other_nodes: set[int] = set()
    for i, other in enumerate(cluster.other_gpus or ()):
        nodes = set(range(other.first_node, min(other.first_node + other.nodes, cluster.nodes)))
        field = f"cluster.other_gpus.{i}"
        if canonical_gpu(other.gpu) is None:
            yield (f"{field}.gpu", f"unknown GPU '{other.gpu[:40]}'",
                   nearest(other.gpu, gpu_names()) or "see 'drystep list gpus'")
        elif _amd(other.gpu) != _amd(_own(s)):
            yield (f"{field}.gpu", f"{other.gpu} beside {_own(s)}: no collective library joins GPUs of two vendors",
                   "name one that runs the same, NCCL or RCCL")
        if other.first_node + other.nodes > cluster.nodes:
            yield (f"{field}.nodes", f"nodes {other.first_node} to {other.first_node + other.nodes - 1} have other "
                   f"GPUs, but the last of {cluster.nodes} nodes is {cluster.nodes - 1}", "")
        elif both := sorted(nodes & other_nodes):
            yield f"{field}.first_node", f"node {both[0]} has other GPUs already", "name each node once"
        other_nodes |= nodes
    if s.training.mode != "train":
        for name in ("slow_gpus", "other_gpus", "clock_spread"):
            if getattr(cluster, name):
                yield (f"cluster.{name}", "inference on GPUs that differ is understood but not simulated yet",
                       "remove it")


def _links_once(s: Scenario) -> Iterator[tuple[str, str, str]]:
    seen = set()
    for i, one in enumerate(s.cluster.degraded or ()):
        if (one.link, one.index) in seen:
            yield (f"cluster.degraded.{i}", f"{one.link} link {one.index} is named twice",
                   "say in one entry what is left of it")
        seen.add((one.link, one.index))


def _own(s: Scenario) -> str:
    gpu = s.cluster.topology.gpu
    return gpu if isinstance(gpu, str) else str(gpu["like"])


def _amd(gpu: str) -> bool:
    return str(gpu_facts(str(canonical_gpu(gpu)))["compute_capability"]).startswith("gfx")
