"""What no cluster can be: more than there is, nodes or GPUs that nothing joins, links that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator

from sim.scenario.checks.findings import Finding
from sim.scenario.fields.cluster import Intra
from sim.scenario.fields.schema import Scenario

#: Largest job that is taken for meant.
MAX_GPUS = 1_000_000
#: Kinds of nodes whose GPUs are joined by links of their own, not by PCIe alone.
_OWN_LINKS = ("nvswitch", "nvlink-mesh")
_INTRA = "cluster.topology.intra"


def cluster(written: Scenario, s: Scenario) -> Iterator[Finding]:
    """Everything about the cluster of a scenario."""
    cluster, topology = s.cluster, s.cluster.topology
    if cluster.gpus_per_node > topology.gpus_per_node:
        asked = f"{cluster.gpus_per_node} GPUs per node asked of '{topology.name}', which has {topology.gpus_per_node}"
        yield "cluster.gpus_per_node", asked, f"at most {topology.gpus_per_node}"
    if s.gpus > MAX_GPUS:
        yield (
            "cluster.nodes",
            f"{cluster.nodes:,} nodes of {cluster.gpus_per_node} are {s.gpus:,} GPUs, absurdly many: "
            f"at most {MAX_GPUS:,}",
            "",
        )
    if cluster.nodes > 1 and topology.inter.kind == "none" and cluster.inter_gbps_per_node is None:
        yield (
            "cluster.nodes",
            f"{cluster.nodes} nodes of '{topology.name}', which has no network between nodes",
            "give topology.inter, or use one node",
        )
    if cluster.gpus_per_node > 1 and topology.intra.kind == "none":
        yield (
            _INTRA,
            f"{cluster.gpus_per_node} GPUs per node but intra.kind is none",
            "write intra: {kind: pcie} or nvswitch",
        )
    said = written.cluster.topology.intra
    yield from _links(topology.intra, None if said is None else said.links_per_gpu, topology.gpus_per_node)


def _links(intra: Intra, per_gpu: int | None, gpus: int) -> Iterator[Finding]:
    """Links inside a node of `gpus`; `per_gpu` are those written."""
    matrix, pair = intra.matrix, intra.links_per_pair
    link = str(intra.link)
    own = link.startswith(("nvlink", "xgmi")) and link != "nvlink-c2c"  # which joins a GPU to its host
    if intra.kind in _OWN_LINKS and not own:
        yield f"{_INTRA}.link", f"kind {intra.kind} needs links of the GPUs' own, and link is {link}", (
            "write nvlink1 to nvlink5 or xgmi, or kind: pcie")
    elif intra.kind == "pcie" and (own or link == "none"):
        yield f"{_INTRA}.link", f"link {link} joins no GPUs of kind pcie", (
            "write gen3x16, gen4x16 or gen5x16, or kind: nvswitch or nvlink-mesh")
    elif intra.kind == "pcie" and intra.gen is not None and link not in ("nvlink-c2c", f"gen{intra.gen}x16"):
        yield f"{_INTRA}.gen", f"gen {intra.gen} and link {link} contradict each other", "keep one of the two"
    if matrix is not None:
        if len(matrix) != gpus or any(len(row) != gpus for row in matrix):
            yield f"{_INTRA}.matrix", (f"the link matrix is not {gpus} rows of {gpus}, one for each of the {gpus} GPUs "
                                       "of a node"), ""
        elif any(matrix[i][j] != matrix[j][i] or matrix[i][i] for i in range(gpus) for j in range(gpus)):
            yield f"{_INTRA}.matrix", "the link matrix must be symmetric with a zero diagonal", ""
    elif intra.kind == "nvlink-mesh" and gpus > 1 and not pair:
        yield _INTRA, f"{intra.links_per_gpu} links per GPU do not reach the {gpus - 1} other GPUs", (
            "give links_per_pair, or the matrix of links")
    elif intra.kind == "nvlink-mesh" and pair is not None and per_gpu is not None and pair * (gpus - 1) > per_gpu:
        yield f"{_INTRA}.links_per_pair", (
            f"{pair} links to each of {gpus - 1} other GPUs are {pair * (gpus - 1)}, and links_per_gpu is {per_gpu}"), (
            "keep one of the two, or give the matrix")
    switch = intra.gpus_per_switch
    if switch is not None and switch > gpus:
        yield f"{_INTRA}.gpus_per_switch", f"{switch} GPUs below one switch but only {gpus} in a node", ""
