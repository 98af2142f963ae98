"""`python -m sim.calibration.nccl_report [--quick]`: writes reports/collectives.md and its pictures, worst first.

Without `--quick` every site is left out in turn and predicted by a fit to the others (a minute on two cores); with
it, the errors of the last such run are shown.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sim.calibration.nccl import dispatch
from sim.calibration.nccl.left_out import left_out
from sim.calibration.nccl.sweeps import Sweep, load
from sim.network.figures import catalogue, origins

_FOLDER = Path(__file__).resolve().parents[2] / "reports"
#: Aims of the project: (median, 90th percentile) of sweeps' errors, and how much worse with the site left out.
_AIMS = {"one node": (0.06, 0.15), "several nodes": (0.12, 0.25)}
_LEFT_OUT = 1.3
_COMMAND = "python -m sim.calibration.nccl_report"


def _place(sweep: Sweep) -> str:
    return "one node" if sweep.nodes == 1 else "several nodes"


def _noisy(sweep: Sweep) -> bool:
    """Whether the source calls some of the sweep's rows noise."""
    return sweep.noisy_below > 0


def _figures(errors: Sequence[float]) -> str:
    return f"{100 * np.median(errors):.1f} % / {100 * np.percentile(errors, 90):.1f} %" if errors else "–"


def _table(sweeps: Sequence[Sweep], kept: dict[str, float]) -> list[str]:
    """Median and 90th percentile by place, against the aims."""
    lines = ["| sweeps | count | aim | in sample | without the host of the benchmark | without sweeps of noisy rows "
             "| site left out | aim |", "|---|---|---|---|---|---|---|---|"]
    for place, (median, high) in _AIMS.items():
        here = [s for s in sweeps if _place(s) == place]
        bare = [float(np.abs(s.predict_us(False) / s.measured_us - 1)[s.counted].mean()) for s in here]
        lines.append(
            f"| {place} | {len(here)} | {100 * median:.0f} % / {100 * high:.0f} % "
            f"| {_figures([s.error() for s in here])} "
            f"| {_figures(bare)} | {_figures([s.error() for s in here if not _noisy(s)])} "
            f"| {_figures([kept[s.id] for s in here if s.id in kept])} "
            f"| {130 * median:.1f} % / {130 * high:.1f} % |")
    return lines


def _sweep_table(sweeps: Sequence[Sweep], kept: dict[str, float]) -> list[str]:
    lines = ["| sweep | site | nodes | ranks | in sample | site left out | largest size | NCCL's choices |",
             "|---|---|---|---|---|---|---|---|"]
    for s in sorted(sweeps, key=lambda s: -s.error()):
        last = s.predict_us()[-1] / s.measured_us[-1] - 1
        outside = f"{100 * kept[s.id]:.1f} %" if s.id in kept else "–"
        lines.append(f"| {s.id} | {s.site} | {s.nodes} | {s.ranks} | {100 * s.error():.1f} % | {outside} | "
                     f"{100 * last:+.1f} % | {', '.join(dict.fromkeys(s.names()))} |")
    return lines


def _site_table(sweeps: Sequence[Sweep], kept: dict[str, float]) -> list[str]:
    """Mean error of each site's sweeps, and the figures that without it have only their prior or their family."""
    lines = ["| site | sweeps | in sample | site left out | figures that no other site determines |",
             "|---|---|---|---|---|"]
    rows = []
    for site in sorted({s.site for s in sweeps}):
        own = [s for s in sweeps if s.site == site]
        alone = [name for name, row in origins().items() if row["sites"] == [site]]
        outside = [kept[s.id] for s in own if s.id in kept]
        rows.append((float(np.mean(outside)) if outside else 0.0,
                     f"| {site} | {len(own)} | {100 * np.mean([s.error() for s in own]):.1f} % | "
                     f"{100 * np.mean(outside):.1f} % | {', '.join(alone) or '–'} |"
                     if outside else ""))
    return lines + [line for _, line in sorted(rows, reverse=True) if line]


def _figure_table() -> list[str]:
    values = catalogue()
    lines = ["| figure | value | unit | began at | its source | confidence | sites |", "|---|---|---|---|---|---|---|"]
    lines += [f"| {name} | {values[name]:.4g} | {row['unit']} | {row['prior']:g} | {row['source']} "
              f"| {row['confidence']} | {', '.join(row['sites'])} |" for name, row in origins().items()]
    return lines


def _residual_picture(sweeps: Sequence[Sweep], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(2, 1, figsize=(10, 8), sharex=True)
    for axis, place in zip(axes, _AIMS, strict=True):
        for s in (s for s in sweeps if _place(s) == place):
            error = 100 * (s.predict_us() / s.measured_us - 1)
            axis.plot(np.array(s.sizes)[s.counted], error[s.counted], lw=0.8, alpha=0.7,
                      color="0.7" if _noisy(s) else None)
        axis.axhline(0, color="black", lw=0.8)
        axis.set(xscale="log", ylim=(-100, 120), ylabel="predicted over measured − 1 (%)", title=f"Residuals, {place}")
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    axes[1].set_xlabel("message size (bytes); grey: sweeps whose source calls rows noise")
    fig.tight_layout()
    fig.savefig(path, dpi=90)
    plt.close(fig)


def _sweep_picture(sweeps: Sequence[Sweep], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter

    fig, axes = plt.subplots(4, 4, figsize=(15, 12))
    for axis, s in zip(axes.flat, sweeps, strict=False):
        axis.loglog(s.sizes, s.measured_us, "o", ms=3, label="measured")
        axis.loglog(s.sizes, s.predict_us(), "-" if len(s.sizes) > 1 else "x", lw=1.2, label="predicted")
        axis.set_title(f"{s.id}\n{100 * s.error():.1f} %", fontsize=8)
        axis.tick_params(which="both", labelsize=7)
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.3)
    for axis in list(axes.flat)[len(sweeps):]:
        axis.axis("off")
    axes.flat[0].legend(fontsize=7)
    fig.suptitle(f"{title}: time (us) over message size (bytes)")
    fig.tight_layout()
    fig.savefig(path, dpi=80)
    plt.close(fig)


def _bar_picture(sweeps: Sequence[Sweep], kept: dict[str, float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ordered = sorted(sweeps, key=lambda s: s.error())
    at = np.arange(len(ordered))
    fig, axis = plt.subplots(figsize=(9, 13))
    axis.barh(at, [100 * s.error() for s in ordered], color=["C0" if s.nodes == 1 else "C1" for s in ordered])
    axis.plot([100 * kept.get(s.id, np.nan) for s in ordered], at, "k|", ms=8, label="site left out")
    axis.set_yticks(at, [s.id for s in ordered], fontsize=7)
    axis.set(xlabel="mean absolute error of a sweep (%); blue one node, orange several", ylim=(-1, len(ordered)))
    axis.legend()
    axis.grid(axis="x", alpha=0.3)
    fig.tight_layout()
    fig.savefig(path, dpi=80)
    plt.close(fig)


_NOTES = """## What is in the model

NCCL's choice is made by NCCL's own estimates, which know nothing of the figures below: the tables and formulas of the
release a sweep was made with (`sim/network/tuner.yaml`, read in NCCL 2.29.7 and in the binaries of 2.4 to 2.27), the
channels and speeds of its graph search (`sim/network/nccl/search.py`). What the choice takes is another matter: base +
steps + what the pipeline adds + bytes over the slowest link, at the rate of the channels the call opens. Fitted
figures start at NCCL's constants or a datasheet and are shrunk towards them; members without data follow their family.
Families that describe NCCL itself are wide as a whole and narrow between members, so that a site left out gets them
from the others; what belongs to a fabric stays with the fabric.

* A call opens one channel per full 4 KiB and rank (LL rings), 5 KiB (LL128) or 32 KiB (Simple): NCCL's thread
  thresholds. In LL what the 512 threads of a channel take at once is within its steps, so time is flat until all
  channels are open: a channel then moves 3.7, 4.0, 6.6 GB/s on V100, A100, H100 (NCCL's limits: 3.3, 3.6, 5.9).
* A Simple ring passes chunks on in two slices: while one is awaited the other moves, so a step takes the longer of two
  slices' work and one slice with the hop's latency. Alone it follows vTrain's four tables of V100 within 0.4 %. It took
  the place of six figures (what a ring adds once slices are full, per generation; from which size; between nodes).
* Two A100 read from one another where other GPUs write (compute capability 8.0, `ncclTopoCheckP2p`): a step takes 10 us
  where it takes 3 on V100 and H100. One figure for reads, one for writes, none per generation.
* A ring of N nodes has N edges between nodes: a chunk of an all-reduce crosses 2 N times, of a gather N times (NCCL
  2.12 to 2.17 count 2 N, others 2 (N - 1), which is how they choose). Counted as 2 (N - 1) before, rings of two nodes
  had made fabrics look twice as slow as trees showed them.
* Before Hopper what arrives in Simple is flushed by a read of its own out of the GPU, which crosses no fabric: some 13
  us by libfabric; 4 by verbs are assumed.
* A tree passes whole chunks on (`candidate.Chunks`): the first pays a thread block's pass at each rank and a NIC's,
  twice where a node has two children, the rest follow behind it. How large they are is NCCL's: 512 KiB a channel from
  2.20 on, so that 256 Slingshot nodes take 2.3 ms longer than their bytes from 2 MiB on; halved where there are few up
  to 2.19 (compares in the binaries); 64 or 128 KiB a channel and head for NVLSTree. In LL a chunk waits between nodes
  until the proxy has looked through it, at NCCL's limit of LL by CPU. Took the place of three fitted ramps.
* The proxy beside a NIC passes the messages of its channels in turn; where a plugin passes them to libfabric, those
  beyond 8 KiB take a rendezvous. NCCL's own transports know none. Eight are on the way at once in LL; a slice of Simple
  takes two of a connection's eight slots, so there it is four, and a full chunk is two: a ring of two Slingshot nodes
  waits for 10 of 14 (gather) or 24 of 28, at least 250 and 600 us from 2 MiB on (measured 250 to 280, 560 to 760; with
  eight slots 160 and 310 were predicted). A root's ring passes a chunk once over an edge and waits for none.
* EFA's cards have generations: p3dn and p4d the first, p5 the second (EC2's pages, recalled). Fitted apart, p3dn gave
  60 us a hop and p4d 53, p5 29: the first two are one family, so that either tells the other. Where it begins (35) is
  the plugin's; how little the two may differ (`between` 0.07) was set with these values known, so what leaving p4d out
  gains by it is no blind figure.
* An all-to-all serves a node's peers at once, up to eight a channel (warps of one block, `sendrecv.h`), in one step;
  each peer has its share of the channels and receivers copy a last chunk of 512 KiB on each out of their buffers. The
  proxy passes messages to and from peers of other nodes one by one, beginning while the kernel starts.
* Slingshot's provider writes messages of up to 192 bytes into its command queue and copies them out of the GPU first
  (libfabric 2.1.0, `cxip_send_buf_init`): 13 us for each, on two nodes (4 peers) as on 256 (1020).
* AWS's plugin brings a tuner to p5 that counts with 20 us a hop (its default, recalled) where NCCL is told 75.
* A sender's kernel is through when its buffers (4 MiB a channel) hold what it sends; vidur timed that one: a send over
  an NVLink bridge "moves" 15 MB in 44 us, 339 GB/s over twelve links of 25. The rate of a lone send rests on NCCL's
  issue 1264 alone since.
* One channel is one thread block: 26.5, 24, 38.7, 70 GB/s in Simple on V100, A100, H100, B200, NCCL's own limits of a
  tree's channel. No sweep with NCCL's own number of channels reaches them (11, 10, 16 to 25, 23); with
  `nccl.channels` forced they decide, as do one link of a mesh and one NIC of a node.
* Small sends inside a node go in LL (16 KiB a peer); over a network LL has no buffers.
* Between two nodes a tree crosses once, as NVLSTree does.

## What it rests on, and where it is weak

* Priors without an independent source (`no prior figure`, `assumed` in `data/nccl_priors.yaml`: message_us,
  rendezvous, fabric_us outside EFA, exchange_share, p2p_net_us) were written down by people who had seen the
  sweeps, and how far a family as a whole may move was chosen with the left-out errors in sight. The left-out errors are
  therefore somewhat better than a blind fit would give. How far members differ from their family is estimated where
  two or more are determined (15 families), judged elsewhere.
* The 90th percentile on one node is set by vidur's sweeps, which have rows their source calls noise. Kernel durations
  below 2 MiB jump between 10 and 60 us (waits for late ranks), on the four A100-PCIe they stay at 60. None of it can be
  predicted; all of it counts in the table above. Waiting only adds, so rows that no larger call of a sweep undercuts
  (`noise_waits`) are fitted: 10, 16 and 25 us on 2, 4 and 8 A100 are the only ones that show a step of their LL inside
  a node. Without them any step between 0.7 and 1.4 us fits all others as well (loss 142.4 to 142.7), which is why
  vidur's own sweeps are worse left out than before (90th percentile on one node 22.8 to 25.6 %).
* What leaving a site out costs is mostly what only that site shows (table by site). Slingshot: 16 of the 25 sweeps of
  several nodes are Polaris, so the two figures for several nodes with the site left out say how good the priors of
  Slingshot are (6, 8, 0.7 and 0.8 against 8.0, 9.8, 0.56 and 0.75). EFA: three sites, of two generations of cards.
* Where errors lie, mean with sign / mean without, %, latency (up to 1.5 times a sweep's least time), between, and from
  70 % of its best rate on:

  | sweeps | in sample | site left out | reason |
  |---|---|---|---|
  | Polaris 2 nodes, first setting | +12/12, +1/15, +1/2 | +17/17, +3/20, -4/5 | Slingshot's hop; a tie at 4 MiB |
  | the same, second setting | -37/41, -39/40, -1/3 | -35/40, -41/41, -6/6 | software matching: in no topology |
  | Polaris all-to-all | +4/14, -15/20, -1/5 | -14/17, -32/32, -24/24 | exchange_share, p2p_net_us, copy_us |
  | Polaris 128, 256 nodes, gather | -1/4, -1/19, +13/13 | -26/26, -10/19, +4/4 | message_us |
  | Polaris 256 nodes, all-reduce | -17/26, -3/10, +1/2 | -17/26, -5/13, +1/2 | two settings, one model |
  | p4d | +8/10, -12/16, +1/4 | +19/19, -13/17, -2/4 | 16 to 128 MiB unexplained |
  | p3dn | +5/7, -34/34, -25/25 | -3/9, -37/37, -26/26 | NCCL 2.4's trees in Simple |
  | p5 2 nodes | +11/14, -9/13, -1/4 | +1/9, -14/15, -1/4 | its tuner; 16 to 64 MiB unexplained |
  | NDR | +1/5, +4/11, 0/1 | +12/17, +10/16, +1/2 | hops: EFA's and Slingshot's set them |
  | vidur | -13/34, -11/33, 0/9 | -21/42, -13/36, 0/10 | waits |
  | A100 all-reduce of 2021 | -4/6, +1/8, +4/6 | -3/9, +7/14, +6/7 | faster from 16 to 100 MiB than NCCL 2.18's |
  | V100 on one node | 0/2, 0/5, +2/3 | -10/12, -6/8, +7/7 | LL128 and NVLink 2 of Volta |
  | H100, H200, B200 on one node | +2/9, +4/8, -1/2 | +3/11, -1/13, -2/3 | |
* Simple rings over EFA are slower from 16 to 128 MiB than the model (p4d 30 to 40 %): nothing in NCCL's code says why.
  p4d's largest sizes show a ring where NCCL's search gives trees of two nodes twice the bandwidth; the sweep is
  predicted with `algorithm: Ring`, as if its command had said so (unknown).
* p5's sweeps bend at 128 KiB, where AWS's tuner is taken to go on with trees in LL up to 256 KiB: of that tuner only
  the latency it counts with is known, NCCL's formulas stand for its own.
  In LL from 8 to 64 KiB p5 takes 3.5 us more for each further channel, as Polaris' second setting does for each message
  of whichever channel; on InfiniBand nothing of it shows. Nothing read says what channels of a node share.
* p4d's LL takes 175 us while all but one of a ring's 16 chunks are empty and 262 when none is (8 KiB); the model knows
  the latter alone. Whether it ran LL at all is not known: AWS had users, later its plugin, set NCCL_PROTO=simple
  (recalled).
* Whose CPU a machine has decides LL's limit between nodes and is taken from the GPU's generation and the fabric.
* The host of a benchmark (one process driving eight GPUs, launches in groups) is a property of the sweep, applied to
  predictions that are compared with it and to nothing else. The column "without the host" shows what it is worth.
* Eight A100 at 32 to 64 MiB differ by 25 % between sites of the same machine (vTrain and ndv4 of 2021 faster, Azure and
  vidur slower): it may be NCCL's release; two sites on each side do not show which.
* Polaris was measured under two software settings which differ by 20 to 200 % below 1 MiB; the model knows one fabric.
  Its all-to-all on 256 nodes with the first setting is four times slower than with the second at 1 GiB; nothing in the
  topology tells. In a ring's LL every message beyond the first eight takes 7.9 us under both settings, on two nodes all
  of them under the second (software matching) and none under the first: likely messages that find no posted receive.
* Broadcasts and reductions of nccl-tests run into one another (a root does not wait), so their sweeps show no latency.
* Tried and not taken: LL128 over EFA on p5 (no gain); LL for small sends between nodes (all-to-all on Polaris 12 to 17
  %; NCCL does not do it); two microseconds of proxy for AMD hosts (several nodes, 90th percentile 23 to 27 %);
  rendezvous by fabric (left-out errors rise); an all-to-all between nodes as the longer of messages and bytes, not
  their sum (left-out errors of Polaris rise to 27 and 38 %); the first 4 KiB of a tree's chunk in LL within the hop
  (several nodes left out 18.7 to 19.3 %); LL's passes through the proxy as a fitted figure (p5's rows of above set it,
  NDR left out 10 and 15 to 19 and 31 %); channels in turn without a rendezvous (in sample 10 to 12 %); all-to-alls by
  messages of 128 KiB in the place of exchange_share (on two Polaris nodes 11.5 GB/s a NIC from 64 KiB a peer to 1 MiB,
  no break where a second message begins); what a stream leaves between kernels taken off kernel times (the fit keeps
  its prior of 1.5 us; of the one-node sites left out, a run that was not finished had the 90th percentile at 23.7
  instead of 25.6 %); one figure for the hop of p3dn and p4d instead of a family (the rest of 6 % goes into LL's
  steps).
* Rings of many nodes on InfiniBand rest on message_us.infiniband, which only sweeps of two and four nodes determine.
* Confidence is low wherever the table of figures names no site: RoCE, TCPX, Ethernet, Gen3 and Gen5 PCIe, xGMI,
  Blackwell between nodes.
"""


def main() -> None:
    """Write the report."""
    quick = "--quick" in sys.argv[1:]
    sweeps = load()
    _FOLDER.mkdir(exist_ok=True)
    store = _FOLDER / "collectives_left_out.json"
    if quick:
        kept: dict[str, float] = json.loads(store.read_text(encoding="utf-8")) if store.is_file() else {}
    else:
        kept = left_out(sorted({s.site for s in sweeps}))
        store.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    worst = sorted(sweeps, key=lambda s: -s.error())
    pictures = [f"collectives_{name}.png" for name in ("errors", "residuals", "worst", "rest")]
    files = [_FOLDER / name for name in pictures]
    _bar_picture(sweeps, kept, files[0])
    _residual_picture(sweeps, files[1])
    _sweep_picture(worst[:16], files[2], "The sixteen worst sweeps")
    _sweep_picture(worst[16::3][:16], files[3], "Every third of the rest")
    lines: list[str] = [
        "# Collectives: predicted against measured", "",
        f"Generated by `{_COMMAND}` from the 57 sweeps of "
        "`sim/calibration/data/collectives.yaml`. The error of a sweep is the mean of |predicted / measured − 1| over "
        "sizes of 1 KiB and more; tables give median / 90th percentile of sweeps.", "", *_table(sweeps, kept), "",
        *(f"![{name}]({name})" for name in pictures), "", "## Every sweep, worst first", "",
        *_sweep_table(sweeps, kept), "", "## By site", "",
        *_site_table(sweeps, kept), "", *dispatch.section(), _NOTES, "## Every figure", "", *_figure_table()]
    (_FOLDER / "collectives.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
