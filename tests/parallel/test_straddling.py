"""Groups that straddle nodes without a pipeline: ranks that lie differently are classes of their own, and collectives
that cut layers share NICs and PCIe with other traffic. Folded jobs are held against all ranks simulated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sim.api import machine_for
from sim.engine import Machine, simulate
from sim.errors import UserError
from sim.parallel import Lowered, lower
from sim.parallel.lower import layout_of
from sim.parallel.places import aligned
from sim.scenario import Scenario, resolve

#: Whole nodes whose GPUs are joined unevenly (a mesh of NVLink, NICs below some PCIe switches) are one class all the
#: same, at the pace of the pair that lies worst; in truth groups then drift apart and meet others' traffic elsewhere.
#: The most seen in 10,000 drawn layouts is 3.9% (four nodes of PCIe switches, experts' shards of two beside replicas).
UNEVEN = 0.05
ORDERS = (["tensor", "context", "expert", "data", "pipeline"], ["tensor", "data", "context", "expert", "pipeline"],
          ["data", "tensor", "context", "expert", "pipeline"])
STACKS = (("ddp", "pytorch"), ("fsdp", "pytorch"), ("zero1", "megatron"), ("ddp", "megatron"), ("fsdp", "megatron"),
          ("zero2", "deepspeed"), ("zero3", "deepspeed"))
UNEVEN_NODES = ("dgx-1v-32g", "pcie-8x-a100-40g-pcie")


def job(topology: str = "dgx-a100-80g", nodes: int = 3, per_node: int = 4, strategy: str = "zero1",
        framework: str = "megatron", hidden: int = 384, micro_steps: int = 1, year: int = 2023,
        **parallel: Any) -> Scenario:
    """A decoder of two blocks; every degree up to 8 divides its heads and its sequence."""
    cut = parallel.get("tensor", 1) * parallel.get("context", 1)
    model: dict[str, Any] = {"kind": "decoder", "layers": 2, "hidden": hidden, "heads": 24, "ffn": 4 * hidden,
                             "vocab": 4096, "tied_embeddings": False}
    if parallel.get("expert", 1) > 1:
        model["moe"] = {"experts": 2 * parallel["expert"], "top_k": 2}
    return resolve({
        "name": "straddling", "cluster": {"topology": topology, "nodes": nodes, "gpus_per_node": per_node},
        "model": model, "software": {"framework": framework, "year": year},
        "training": {"micro_batch": 1, "global_batch": micro_steps * nodes * per_node // cut, "sequence": 384,
                     "precision": "amp-bf16" if framework == "pytorch" else "megatron-bf16"},
        "parallel": {"strategy": strategy, **parallel}})


def step_s(of: Scenario, low: Lowered) -> float:
    return simulate(low.job, machine_for(of, low)).step_time_s


def folded_and_whole(of: Scenario) -> tuple[float, float]:
    return step_s(of, lower(of)), step_s(of, lower(of, fold=False))


@st.composite
def layouts(draw: st.DrawFn) -> Scenario:
    topology = draw(st.sampled_from(("dgx-a100-80g", "p4d", "dgx-2", "perlmutter", *UNEVEN_NODES)))
    most = {"dgx-2": 16, "perlmutter": 4}.get(topology, 8)
    per_node = draw(st.sampled_from([n for n in (2, 3, 4, 6, 8, 12) if n <= most]))
    nodes = draw(st.sampled_from([n for n in (2, 3, 4, 5, 6) if n * per_node <= 36]))
    ranks = nodes * per_node
    tensor = draw(st.sampled_from([d for d in (1, 2, 3, 4, 6, 8) if ranks % d == 0]))
    context = draw(st.sampled_from([d for d in (1, 1, 2, 3, 4, 6) if ranks // tensor % d == 0]))
    strategy, framework = draw(st.sampled_from(STACKS))
    parallel: dict[str, Any] = {"tensor": tensor, "context": context, "order": draw(st.sampled_from(ORDERS)),
                                "overlap": draw(st.booleans())}
    parts = [d for d in range(1, ranks + 1) if ranks // tensor % d == 0]
    if strategy == "fsdp":
        parallel["sharding_factor"] = draw(st.sampled_from(parts))
    expert = draw(st.sampled_from([1, *(d for d in parts if d <= 6)]))
    if expert > 1:
        parallel["expert"] = expert
    try:
        return job(topology, nodes, per_node, strategy, framework, draw(st.sampled_from([384, 1536])),
                   draw(st.integers(1, 2)), draw(st.sampled_from([2021, 2024])), **parallel)
    except UserError:
        assume(False)
        raise


def uneven(of: Scenario) -> bool:
    """Of p4d, whose GPUs share NICs by twos, a part: three replicas in a row take one and a half pairs."""
    part = of.cluster.topology.name == "p4d" and of.cluster.gpus_per_node % 4 != 0
    return part or of.cluster.topology.name in UNEVEN_NODES


@settings(max_examples=50, deadline=None)
@given(layouts())
def test_folded_jobs_of_any_layout_take_as_long_as_all_ranks(of: Scenario) -> None:
    try:
        folded, whole = folded_and_whole(of)
    except UserError:
        assume(False)
    assert folded == pytest.approx(whole, rel=UNEVEN if uneven(of) and aligned(of, layout_of(of)) else 1e-6)


@pytest.mark.parametrize(("cluster", "parallel", "classes"), [
    # {0 1 2} | {3, 4 5} | {6 7, 8} | {9 10 11}: ranks of whole groups, the one that is alone, the two that are not
    ((3, 4), {"tensor": 3}, 3),
    # {0..7} | {8..11, 12..15} | {16..23}: of a whole group four share the node with the half group
    ((2, 12), {"topology": "dgx-2", "tensor": 8}, 3),
    # shards of 3 on nodes of 4, replicas across them
    ((3, 4), {"strategy": "fsdp", "framework": "pytorch", "sharding_factor": 3}, 3),
    # 4 parts of a sequence on nodes of 6
    ((2, 6), {"context": 4}, 2),
    # experts over replicas that are no neighbours (tensor ranks lie between): {0 1 2} | {3, 12 13} | {14 15, 24} | ...
    ((3, 12), {"topology": "dgx-2", "strategy": "fsdp", "sharding_factor": 12, "tensor": 3, "context": 3, "expert": 3,
               "order": ORDERS[2], "overlap": False, "year": 2021}, 3),
    ((3, 6), {"tensor": 3, "context": 3, "expert": 3, "order": ORDERS[2], "year": 2024}, 2),
], ids=str)
def test_ranks_that_lie_differently_are_classes(cluster: tuple[int, int], parallel: dict[str, Any],
                                                classes: int) -> None:
    of = job(nodes=cluster[0], per_node=cluster[1], hidden=1536, **parallel)
    low = lower(of)
    assert not aligned(of, layout_of(of))
    assert len(low.job.classes) >= classes
    members = np.sort(np.concatenate([one.members for one in low.job.classes]))
    np.testing.assert_array_equal(members, np.arange(of.gpus))
    folded, whole = folded_and_whole(of)
    assert folded == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("parallel", [{"tensor": 4}, {"tensor": 2, "context": 2}, {"strategy": "ddp"},
                                      {"strategy": "fsdp", "framework": "pytorch", "sharding_factor": 4}], ids=str)
def test_layouts_of_whole_nodes_stay_one_class_of_chains(parallel: dict[str, Any]) -> None:
    low = lower(job(nodes=2, **parallel))
    assert len(low.job.classes) == 1
    assert bool(low.job.programs[0].inlines) == any(name in parallel for name in ("tensor", "context"))


def test_what_cuts_layers_across_nodes_shares_their_nics_with_gradients() -> None:
    """Context groups of one rank a node, beside DDP's buckets: both want the NICs, so neither is alone."""
    order = {"context": 2, "order": ORDERS[1], "strategy": "ddp", "framework": "pytorch"}
    of = job(nodes=2, per_node=8, hidden=1536, **order)
    low = lower(of)
    assert len(low.job.classes) == 1 and not low.job.programs[0].inlines
    shared = machine_for(of, low)
    alone = Machine(shared.devices, shared.network, low.job, contention=False)
    assert simulate(low.job, shared).step_time_s > 1.02 * simulate(low.job, alone).step_time_s
    assert step_s(of, low) == pytest.approx(step_s(of, lower(of, fold=False)), rel=1e-6)
