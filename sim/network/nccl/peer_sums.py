"""Sums of tensors by kernels of an inference engine's own, over NVLink peer memory: nine ways to do it.

Read, or pushed, in one shot: every GPU gets all others' tensors and adds them up. In two shots it sums a slice of them
and the slices' sums go round. Which way serves how many bytes on how many GPUs: `network/sums.yaml`. Sources of the
kernels: vLLM 0.3.0 to 0.24.0 csrc/custom_all_reduce.cuh and symm_mem.py; SGLang 0.5.14
jit_kernel/csrc/distributed/custom_all_reduce_{push,pull}.cuh; FlashInfer 0.6.12 trtllm_allreduce_fusion.cuh and
trtllm_mnnvl_allreduce.cuh, which are TensorRT-LLM's; gpt-fast's ENABLE_INTRA_NODE_COMM alike (recalled).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sim.catalog import table
from sim.network.fabric.routes import Loads, multicast_loads, ring_loads
from sim.network.fabric.topology import Topology
from sim.network.nccl.candidate import Candidate
from sim.network.nccl.site import Site
from sim.network.nccl.tuner import Judgement

#: Thread blocks of the kernels (vLLM: 36, of 512 threads each). Others have as many as there are SMs; counted as these,
#: since nothing runs beside them.
_BLOCKS = 36
#: Trips a rank waits for beyond one shot's: the fence behind the sums it wrote to all peers and the flags after it;
#: where the kernel itself copies the tensor into the engine's buffer and out again, as many for the barrier between
#: and one through its own memory (their number was settled with the sweeps seen).
_SPREAD_TRIPS, _STAGED_TRIPS = 2, 5
#: Bytes through a GPU's memory per byte of a tensor that is copied into a buffer and out of it again.
_COPIES = 4.0
_INFINITE = float("inf")
_GB = 1e9


@dataclass(frozen=True, slots=True)
class _Way:
    """Start, us; link time, s per byte of the call; bytes over each link and through each memory per byte of it."""

    us: float
    byte_s: float
    volume: float
    hbm: float


def by_ranks(kernel: str, topology: Topology) -> Mapping[int, Mapping[str, int]]:
    """By number of GPUs the most bytes of every way of a table of `network/sums.yaml`, in its order."""
    rows, tray = table("network/sums.yaml")[kernel], topology.intra.tray
    found: Mapping[int, Mapping[str, int]] = rows.get(topology.generation, rows["other"])
    if tray:
        found = {n: ways for n, ways in found.items() if n <= tray} | rows.get("trays", {})
    return found


def _bounds(site: Site) -> Mapping[str, int]:
    """The most bytes of every way that the engine has for as many GPUs; none where NCCL serves."""
    found = by_ranks(site.peer_sums, site.topology).get(site.place.size, {})
    if found and not site.topology.multicasts:  # torch's symmetric memory asks for it, whichever way it then takes
        return {way: most for way, most in found.items() if not way.startswith("Copied")}
    return found


def able(site: Site) -> bool:
    """Whether NVLink joins every GPU of the communicator with every other one, and the engine sums over so many."""
    return (site.place.nodes == 1 and site.intra_link() == "nvlink" and bool(_bounds(site))
            and (site.place.rings < 0 or site.place.rings >= site.place.size - 1))


def peer_sums(site: Site) -> Iterator[Candidate]:
    """The ways an engine takes by size alone, whatever NCCL would."""
    ways = {**_read(site), **_pushed(site), **_switched(site), **_copied(site)}
    loads = ring_loads(site.place)
    for order, (name, most) in enumerate(_bounds(site).items(), 1):
        # chosen wherever it may be: NCCL's own estimates are all above a thousandth of a microsecond
        chosen = Judgement(order * 1e-5, _INFINITE, plateau=_INFINITE, plateau_bytes=most + 1.0)
        yield _candidate(name, ways[name], chosen, _multicast(site) if name == "CopiedMulticast" else loads)


def _candidate(name: str, way: _Way, chosen: Judgement, loads: Loads) -> Candidate:
    return Candidate(name, "peers", chosen, way.us * 1e-6, 0.0, 1.0, 1.0, _INFINITE, (), loads, way.volume,
                     1 / way.byte_s, _BLOCKS, way.hbm)


def _multicast(site: Site) -> Loads:
    return multicast_loads(site.place, 0.0, _BLOCKS)


def _reading_bps(site: Site) -> float:
    """What a GPU reads of all its peers at once: what blocks have in flight to each of them bounds it."""
    return min(site.inside_bps(), (site.place.size - 1) * site.own("peer_gbps") * _GB)


def _read(site: Site) -> dict[str, _Way]:
    """A kernel that starts, waits for its peers' flags, loads from all of them at once and tells them so.

    In vLLM's two shots the slices' sums then come from one peer after another, each a trip over the links there and
    back; in SGLang's a rank spreads its slice's sum to all peers as it makes it, and waits until they have it.
    """
    n, link, others = site.place.size, site.inside_bps(), site.place.size - 1.0
    start_us, trip_us, read_bps = site.own("peer_start_us"), site.own("peer_trip_us"), _reading_bps(site)
    one_by_one = min(link, site.own("peer_gbps") * _GB)
    return {
        "OneShot": _Way(start_us, others / read_bps, others, n + 1.0),
        "TwoShot": _Way(start_us + others * trip_us, others / n * (1 / read_bps + 1 / one_by_one), 2 * others / n, 4.0),
        "WideOneShot": _Way(start_us, others / link, others, n + 1.0),
        "SpreadTwoShot": _Way(start_us + _SPREAD_TRIPS * trip_us, others / n * (1 / link + 1 / _pushing_bps(site)),
                              2 * others / n, 4.0)}


def _pushing_bps(site: Site) -> float:
    return site.inside_bps() * site.own("push_share")


def _pushed(site: Site) -> dict[str, _Way]:
    """A kernel that writes its tensor into all peers' buffers, one after another, and looks at its own until there are
    numbers everywhere (Lamport's way: empty is a number that no tensor holds): no flags, one trip over the links."""
    n, others = site.place.size, site.place.size - 1.0
    start_us = site.own("push_start_us") + others * site.own("push_peer_us")
    return {"PushedOneShot": _Way(start_us, others / _pushing_bps(site), others, n + 1.0)}


def _switched(site: Site) -> dict[str, _Way]:
    """The same by stores to a multicast address, which the switch spreads, the rank's own included: in one shot of all
    tensors, in two of the slices' sums, behind a first trip of the slices to those who sum them."""
    n, link, start_us = site.place.size, site.inside_bps(), site.own("push_start_us")
    return {"SwitchedOneShot": _Way(start_us, n / link, float(n), n + 1.0),
            "SwitchedTwoShot": _Way(start_us + site.own("peer_trip_us") / 2, (2 - 1 / n) / link, 2 - 1 / n, 4.0)}


def _copied(site: Site) -> dict[str, _Way]:
    """Two shots over a buffer of the engine's, into which tensors are copied and out of which sums are: by the kernel
    that sums (TensorRT-LLM), or by copies before and after it (torch's symmetric memory under vLLM).

    By multicast the switch adds up what a rank reads of its slice and spreads what it writes, as NVLink SHARP does.
    """
    n, others, link = site.place.size, site.place.size - 1.0, site.inside_bps()
    start_us, trip_us = site.own("peer_start_us"), site.own("peer_trip_us")
    copied_s = _COPIES / (site.own("staged_gbps") * _GB)
    spread_s = others / n / _pushing_bps(site)
    between_us = start_us + _SPREAD_TRIPS * trip_us + 2 * site.own("staged_us")
    found = {
        "StagedTwoShot": _Way(start_us + _STAGED_TRIPS * trip_us, others / n / link + spread_s + copied_s,
                              2 * others / n, 4.0 + _COPIES),
        "CopiedTwoShot": _Way(between_us, others / n / _reading_bps(site) + spread_s + copied_s, 2 * others / n,
                              4.0 + _COPIES)}
    if site.topology.multicasts:
        switched_s = (1 + 1 / n) / (link * site.own("nvls_share"))
        found["CopiedMulticast"] = _Way(between_us, switched_s + copied_s, 1.0, 2.0 + 2.0 / n + _COPIES)
    return found
