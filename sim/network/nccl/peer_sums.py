"""Sums of tensors by kernels of an inference engine's own, which read their peers' memory over NVLink.

In one shot every GPU reads all others' tensors and adds them up; in two it sums a slice of them first and then reads
the other slices' sums. Source: vLLM 0.3.0 and 0.6.3 csrc/custom_all_reduce.cuh (one shot below 512 KiB on up to four
GPUs and 256 KiB on up to eight, always on two; two, four, six or eight GPUs) and custom_all_reduce.py (beyond 8 MiB
NCCL; 0.6.3 from there on); TensorRT-LLM customAllReduceKernels.cu, gpt-fast's ENABLE_INTRA_NODE_COMM alike (recalled).
"""

from __future__ import annotations

from collections.abc import Iterator

from sim.network.fabric.routes import ring_loads
from sim.network.nccl.candidate import Candidate
from sim.network.nccl.site import Site
from sim.network.nccl.tuner import Judgement

#: The largest tensor that is summed so, bytes, and the largest in one shot on up to so many GPUs.
MOST_BYTES = 8 << 20
_ONE_SHOT_BYTES = {2: MOST_BYTES, 4: (512 << 10) - 1, 8: (256 << 10) - 1}
#: Thread blocks of the kernel (vLLM: 36).
_BLOCKS = 36
_INFINITE = float("inf")
_GB = 1e9


def able(site: Site) -> bool:
    """Whether NVLink joins every GPU of the communicator with every other one, and they are two, four, six or eight."""
    few = site.place.size <= max(_ONE_SHOT_BYTES) and site.place.size % 2 == 0
    return (site.place.nodes == 1 and few and site.intra_link() == "nvlink"
            and (site.place.rings < 0 or site.place.rings >= site.place.size - 1))


def peer_sums(site: Site) -> Iterator[Candidate]:
    """Both ways, which an engine takes by size alone, whatever NCCL would.

    Either is a kernel that starts, waits for its peers' flags, loads from all of them at once and tells them so. In two
    shots the slices' sums then come from one peer after another, each a trip over the links there and back. What the
    blocks have in flight to one peer bounds what they read of it.
    """
    size, links = site.place.size, site.inside_bps()
    one_shot = next(most for ranks, most in _ONE_SHOT_BYTES.items() if size <= ranks)
    start_us, trip_us, peer_bps = site.own("peer_start_us"), site.own("peer_trip_us"), site.own("peer_gbps") * _GB
    all_bps, others = min(links, (size - 1) * peer_bps), size - 1.0
    for name, latency_us, volume, byte_s, hbm, order, most in (
            ("OneShot", start_us, others, others / all_bps, size + 1.0, 1.0, one_shot),
            ("TwoShot", start_us + others * trip_us, 2 * others / size,
             others / size * (1 / all_bps + 1 / min(links, peer_bps)), 4.0, 2.0, MOST_BYTES)):
        # chosen wherever it may be: NCCL's own estimates are all above a thousandth of a microsecond
        chosen = Judgement(order * 1e-4, _INFINITE, plateau=_INFINITE, plateau_bytes=most + 1.0)
        yield Candidate(name, "peers", chosen, latency_us * 1e-6, 0.0, 1.0, 1.0, _INFINITE, (), ring_loads(site.place),
                        volume, 1 / byte_s, _BLOCKS, hbm)
