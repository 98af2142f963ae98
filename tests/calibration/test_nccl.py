"""The collective and calibrate verbs: nccl-tests' text out and in, a cluster's own figures, the project's sweeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from sim.calibration.nccl.command import bus_factor, collective_command, network_for, sizes
from sim.calibration.nccl.figures import Parameters
from sim.calibration.nccl.left_out import without
from sim.calibration.nccl.own_cluster import calibrate_nccl
from sim.calibration.nccl.printed import parse
from sim.calibration.nccl.solver import weights
from sim.calibration.nccl.sweeps import load, summary, sweep_of
from sim.errors import UserError
from sim.measured.harness import Harness, harness_of, nccl_version
from sim.network.figures import Figures, catalogue

#: As nccl-tests 2.13 and 2.4 print it: both columns, #wrong or error, several programs in one file.
TEXT = """\
# nThread 1 nGpus 2 minBytes 8 maxBytes 33554432 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1
#
# Using devices
#  Rank  0 Group  0 Pid  71232 on     node7 device  0 [0x07] NVIDIA A100-SXM4-80GB
#  Rank  1 Group  0 Pid  71232 on     node7 device  1 [0x0f] NVIDIA A100-SXM4-80GB
NCCL version 2.18.5+cuda12.2
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           0             0     float     sum      -1     5.12    0.00    0.00      0     4.99    0.00    0.00      0
     1048576        262144     float     sum      -1    38.34   27.35   27.35      0    38.02   27.58   27.58      0
    33554432       8388608     float     sum      -1    201.2  166.77  166.77    N/A    200.0  167.77  167.77    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 123
#
mpirun -np 16 ./build/alltoall_perf -b 1M
# nThread: 1 nGpus: 1 minBytes: 1048576 maxBytes: 1048576 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
#   Rank  0 Pid   1 on    a device  0 [0x10] A100
#   Rank  1 Pid   2 on    b device  0 [0x10] A100
#                                                     out-of-place                       in-place
#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error
     1048576         16384   float            90.50   11.59   10.86  0e+00    89.47   11.72   10.99    N/A
"""


def test_reads_what_nccl_tests_prints() -> None:
    first, second = parse(TEXT)
    assert (first.op, first.ranks, first.nodes, first.processes) == ("all_reduce", 2, 1, "one")
    assert first.version == "2.18.5"
    assert first.rows == [(1048576, 38.34, 38.02), (33554432, 201.2, 200.0)]
    assert (second.op, second.ranks, second.nodes, second.processes) == ("all_to_all", 2, 2, "gpu")
    assert second.rows == [(1048576, 90.5, 89.47)]


@pytest.mark.parametrize(("text", "message"), [
    ("hello\n", "no row"), ("   1048576  262144  float  38.34  27.35  27.35\n", "does not tell its operation")])
def test_a_text_without_a_table_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(text, "x.txt")


def test_our_own_table_can_be_read_back() -> None:
    out, data = collective_command("all_reduce_perf", "dgx-h100", nodes=2, min_bytes=1024, max_bytes=1 << 20, factor=4)
    run = parse("# all_reduce_perf\n" + out)[0]
    assert [size for size, *_ in run.rows] == [1024, 4096, 16384, 65536, 262144, 1048576]
    assert [time for _, time, _ in run.rows] == pytest.approx([row["time_us"] for row in data["rows"]], abs=0.006)
    last = data["rows"][-1]
    assert last["busbw_gbps"] == pytest.approx(last["algbw_gbps"] * 30 / 16)
    assert last["algbw_gbps"] == pytest.approx((1 << 20) / last["time_us"] / 1e3)


def test_counts_and_factors_are_those_of_nccl_tests() -> None:
    _, data = collective_command("alltoall", "dgx-a100-80g", min_bytes=1 << 20, max_bytes=1 << 20, dtype="bf16")
    assert (data["op"], data["rows"][0]["count"]) == ("all_to_all", (1 << 20) // 2 // 8)
    assert [bus_factor(k, 4) for k in ("all_reduce", "all_gather", "broadcast")] == [1.5, 0.75, 1.0]
    assert sizes(8, 100, 3) == [8, 24, 72]


@pytest.mark.parametrize(("wrong", "message"), [
    ({"op": "allgahter"}, "unknown collective"), ({"topology": "dgx-h10"}, "no topology"), ({"nodes": 0}, "nodes"),
    ({"factor": 1.0}, "factor"), ({"min_bytes": 0}, "sizes"), ({"gpus_per_node": 9}, "8 GPUs"),
    ({"dtype": "fp23"}, "unknown type")])
def test_what_the_user_gets_wrong_is_named(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        collective_command(**{"op": "all_reduce", "topology": "dgx-h100", **wrong})  # type: ignore[arg-type]


def test_time_does_not_grow_with_the_machine() -> None:
    """A ring over 16,384 ranks is priced from as few links as one over 512."""
    links = []
    for nodes in (64, 2048):
        network = network_for("dgx-h100", nodes)
        ranks = np.arange(nodes * 8, dtype=np.int64).reshape(1, -1)
        links.append(network.coflow("all_gather", 1 << 30, ranks).links)
    assert links[1] == links[0] and len(links[0]) <= 8


def test_calibration_finds_a_slower_cluster(tmp_path: Path) -> None:
    """Tables of a machine whose NVLink reaches 80% of the catalogue's: that figure moves there, the others stay."""
    with open(Path(__file__).parents[2] / "topologies" / "dgx-a100-80g.yaml", encoding="utf-8") as file:
        mapping = yaml.safe_load(file)
    true = 0.8 * Figures()["link_share.nvlink3"]
    text, _ = collective_command("all_reduce", {**mapping, "links": {"link_share.nvlink3": true}}, min_bytes=1024)
    (tmp_path / "log.txt").write_text("# all_reduce_perf\n" + text, encoding="utf-8")
    before = dict(catalogue())
    result = calibrate_nccl(tmp_path / "log.txt", "dgx-a100-80g", tmp_path / "mine.yaml")
    assert result.links["link_share.nvlink3"] == pytest.approx(true, rel=0.03)
    assert result.tables[0]["after"] < 0.02 < result.tables[0]["before"]
    assert result.tables[0]["checked"] < 0.05
    assert catalogue() == before
    assert "log.txt" in (tmp_path / "mine.yaml").read_text(encoding="utf-8")
    again, _ = collective_command("all_reduce", tmp_path / "mine.yaml", min_bytes=1 << 28, max_bytes=1 << 28)
    assert again.splitlines()[6].split()[:1] == [str(1 << 28)]


@pytest.mark.parametrize(("topology", "nodes"), [("dgx-a100-80g", 1), ("dgx-1v-32g", 2), ("dgx-a100-80g", 2)])
def test_a_table_without_a_version_is_of_the_release_that_collective_predicts(topology: str, nodes: int,
                                                                              tmp_path: Path) -> None:
    """What `collective` prints is matched by the catalogue's figures, with nothing to fit."""
    text, _ = collective_command("all_reduce", topology, nodes, min_bytes=1024)
    (tmp_path / "log.txt").write_text("# all_reduce_perf\n" + text, encoding="utf-8")
    assert calibrate_nccl(tmp_path / "log.txt", topology).tables[0]["before"] < 1e-3


@pytest.mark.parametrize(("head", "version"), [
    ("# nccl-tests version 2.17.6 nccl-headers=22809 nccl-library=22703", "2.27.3"), ("# nccl-library=x", "")])
def test_the_library_named_in_the_head_of_a_table_is_its_version(head: str, version: str) -> None:
    table = TEXT[TEXT.index("# nThread: 1"):]
    assert [run.version for run in parse(f"# all_reduce_perf\n{head}\n{table}")] == [version]


def test_ranks_must_fit_the_topology(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(TEXT, encoding="utf-8")
    with pytest.raises(UserError, match="do not fit"):
        calibrate_nccl(tmp_path / "log.txt", "single-a100-80g-sxm")


def _table(op: str, nodes: int) -> str:
    text, _ = collective_command(op, "dgx-a100-80g", nodes, min_bytes=1 << 20, factor=4)
    return f"# {op}_perf\n{text}"


@pytest.mark.parametrize(("op", "nodes"), [("all_reduce", 1), ("all_reduce", 2), ("all_gather", 4)])
def test_ranks_follow_from_the_bandwidths_where_no_line_tells_them(op: str, nodes: int, tmp_path: Path) -> None:
    """2 (n - 1) / n and (n - 1) / n: 1.875 of an all-reduce are 16 ranks, not the topology's one node of 8."""
    (tmp_path / "log.txt").write_text(_table(op, nodes), encoding="utf-8")
    found = calibrate_nccl(tmp_path / "log.txt", "dgx-a100-80g").tables[0]
    assert (found["nodes"], found["gpus_per_node"]) == (nodes, 8)


@pytest.mark.parametrize(("op", "nodes"), [("broadcast", 2), ("all_reduce", 63)])
def test_a_table_that_does_not_tell_its_ranks_is_refused(op: str, nodes: int, tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(_table(op, nodes), encoding="utf-8")
    with pytest.raises(UserError, match=r"how many ranks it is of .keep the lines"):
        calibrate_nccl(tmp_path / "log.txt", "dgx-a100-80g")


@pytest.mark.parametrize(("links", "message"), [({"warp_us": 1.0}, "no figure"), ({"rendezvous.all": "x"}, "number")])
def test_a_clusters_own_figures_are_checked(links: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Figures(links)  # type: ignore[arg-type]


def test_harness_is_read_from_the_description() -> None:
    assert harness_of({"ranks": 8}) == Harness("one", "call")
    assert harness_of({"ranks": 16, "nodes": 2}) == Harness("gpu", "call")
    assert harness_of({"note": "run with mpirun"}).processes == "gpu"
    assert harness_of({"note": "one process, -g 8 (mpi build)"}).processes == "one"
    assert harness_of({"note": "kernel time only (no launch)"}).timing == "kernel"
    assert harness_of({"nccl": "2.10.3+cuda11.3"}).per_channel
    assert not harness_of({"nccl": "2.27.7"}, "ampere").per_channel
    assert harness_of({}, "ampere").per_channel and not harness_of({}, "hopper").per_channel
    assert harness_of({"harness": {"processes": "gpu", "per_channel": True}}) == Harness("gpu", "call", True)


def test_version_of_a_sweep_that_tells_none() -> None:
    assert nccl_version({"nccl": "2.10.3+cuda11.3"}) == "2.10.3+cuda11.3"
    assert nccl_version({}, "ampere") == nccl_version({"harness": {"per_channel": True}}, "hopper") == "2.8"
    assert nccl_version({}, "hopper") == ""


def test_a_site_is_left_out_of_its_own_prediction() -> None:
    """Three sites of H100 and H200: the error of one rises when it is not in the fit; the catalogue stays."""
    sweeps = [s for s in load() if s.site in ("smc-h100", "stas-h200", "simumax-hopper") and s.kind == "all_reduce"]
    before = dict(catalogue())
    errors = without("stas-h200", sweeps)
    assert catalogue() == before
    inside = next(s.error() for s in sweeps if s.site == "stas-h200")
    assert set(errors) == {"stas-h200-8gpu-allreduce"}
    assert inside < errors["stas-h200-8gpu-allreduce"] < 0.3


def test_a_single_process_launches_gpu_by_gpu() -> None:
    """8 GPUs of one process: 8 launches; a kernel's own duration and a process per GPU wait for none."""
    figures = Figures()
    floor = Harness("one", "call").floor_s("all_reduce", 8)
    assert floor == pytest.approx(8e-6 * figures["host_us.call"])
    peers = 56e-6 * figures["host_part_us.peer"]
    assert Harness("one", "call").floor_s("all_to_all", 8) == pytest.approx(floor + peers)
    old = Harness("one", "call", True).floor_s("all_to_all", 8)  # a channel for each of seven peers, on eight GPUs
    setup = figures["host_grouped_us.all"] + 7 * (figures["host_part_us.peer"] + figures["host_part_us.channel"])
    assert old == pytest.approx(8e-6 * setup)
    assert Harness("gpu", "call").floor_s("all_reduce", 8) == Harness("one", "kernel").floor_s("all_reduce", 8) == 0.0


def test_a_sweep_rests_only_on_the_figures_it_reads() -> None:
    """What a sweep reads is its own generation, link and fabric; no other figure moves its predictions."""
    sweep = next(s for s in load() if s.id == "polaris-a100-n2-nccl221-allreduce-env4")
    read = sweep.reads()
    assert {"fabric_us.slingshot", "hop_us.Simple", "step_us.nvlink.LL.ampere"} <= read
    assert not {"fabric_us.efa.ampere", "nvls_us.hopper", "host_us.call", "pcie_share.gen3x16"} & read
    parameters = Parameters(catalogue())
    moved = parameters.moved_by(read)
    shifts = np.zeros(len(parameters.names))
    shifts[[i for i in range(len(shifts)) if i not in moved]] = 0.5
    before, center = sweep.predict_us(), dict(catalogue())
    try:
        parameters.apply(shifts)
        sweep.refresh()
        assert sweep.predict_us() == pytest.approx(before)
    finally:
        catalogue().update(center)


def test_the_figures_fit_the_sweeps_they_came_from() -> None:
    """Median of sweeps' errors, in sample; a change of the model that spoils it must be seen."""
    sweeps = load()
    found = summary(s for s in sweeps if not s.series)
    assert found["one node"][0] == 32 and found["several nodes"][0] == 25
    assert found["one node"][1] < 0.055 and found["several nodes"][1] < 0.12
    assert found["several nodes"][2] < 0.20
    for series, count, median, high in (("aiconfigurator", 101, 0.09, 0.18), ("aiconfigurator-sums", 17, 0.055, 0.08),
                                        ("aiconfigurator-engines", 46, 0.07, 0.15)):
        number, middle, last = summary(s for s in sweeps if s.series == series)["one node"]
        assert number == count and middle < median and last < high


def test_alike_sites_of_one_source_weigh_as_the_root_of_their_number() -> None:
    """Four sites of a series of one sweep each weigh together as two sites of their own do."""
    entry = {"op": "all_reduce", "ranks": 2, "cluster": {"topology": "dgx-a100-80g", "gpus_per_node": 2},
             "rows": [[1 << 20, 30], [1 << 21, 45]]}
    alone = [sweep_of({**entry, "id": name, "site": name}) for name in "ab"]
    series = [sweep_of({**entry, "id": name, "site": name, "series": "one"}) for name in "cdef"]
    found = weights([*alone, *series])
    assert found[:4].sum() == pytest.approx(found[4:].sum()) == pytest.approx(2.0)


def test_events_around_a_call_add_its_launch() -> None:
    """What brackets every call adds the host's time to it; calls back to back wait for none on a thread per GPU."""
    figures, entry = Figures(), {
        "id": "x", "op": "all_reduce", "ranks": 8, "cluster": {"topology": "hgx-h200"}, "rows": [[1 << 15, 40]]}
    call, event = (sweep_of({**entry, "harness": {"processes": "gpu", "timing": timing}}).predict_us()[0]
                   for timing in ("call", "event"))
    assert event - call == pytest.approx(figures["host_event_us.call"])
    assert Harness("gpu", "event").adds_s(figures) == pytest.approx(figures["host_event_us.call"] * 1e-6)
    assert Harness("gpu", "call").adds_s(figures) == Harness("one", "event").floor_s("all_reduce", 8) == 0.0


def test_one_size_needs_no_factor() -> None:
    assert sizes(8, 8, 1.0) == [8] and sizes(8, 32, 2.0) == [8, 16, 32]
    with pytest.raises(UserError, match="above 1"):
        sizes(8, 32, 1.0)


def test_rows_no_larger_call_undercuts_are_fitted_where_noise_only_adds() -> None:
    """Waiting for late ranks adds to a row: 46 us at 10 KiB are some of it where 2 MiB take 30."""
    entry = {"id": "x", "op": "all_reduce", "ranks": 2, "cluster": {"topology": "dgx-a100-80g", "gpus_per_node": 2},
             "noisy_below": 1 << 21,
             "rows": [[512, 9], [2048, 10], [10240, 46], [1 << 20, 30], [1 << 21, 45], [1 << 22, 40]]}
    assert sweep_of(entry).fitted.tolist() == [False, False, False, False, True, True]
    assert sweep_of({**entry, "noise_waits": True}).fitted.tolist() == [False, True, False, True, True, True]


def test_machines_with_the_same_cards_tell_one_another_their_latency() -> None:
    """p3dn and p4d have EFA's first generation: what one shows moves the other, not p5."""
    parameters = Parameters()
    volta, ampere, hopper = (set(parameters.shifts_of(f"fabric_us.efa.{name}"))
                             for name in ("volta", "ampere", "hopper"))
    assert volta & ampere and not volta & hopper
    spreads = dict(zip(parameters.names, parameters.spreads, strict=True))
    assert spreads["fabric_us.efa.ampere"] < spreads["fabric_us.efa"] / 2


def _ranks(gpu: str, count: int = 8) -> str:
    return "".join(f"#  Rank {i:2d} Group  0 Pid 7 on n1 device {i:2d} [0x07] {gpu}\n" for i in range(count))


def test_several_files_are_fitted_together(tmp_path: Path) -> None:
    for op in ("all_reduce", "all_gather"):
        (tmp_path / f"{op}.txt").write_text(_ranks("NVIDIA A100-SXM4-80GB") + _table(op, 1), encoding="utf-8")
    found = calibrate_nccl([tmp_path / "all_reduce.txt", tmp_path / "all_gather.txt"], "dgx-a100-80g")
    assert [table["op"] for table in found.tables] == ["all_reduce", "all_gather"]
    assert found.warnings == []


@pytest.mark.parametrize(("gpu", "topology", "told"), [
    ("NVIDIA A100-SXM4-80GB", "dgx-a100-80g", False), ("A100", "dgx-a100-80g", False),
    ("NVIDIA A10", "dgx-a100-80g", True), ("NVIDIA H100 80GB HBM3", "dgx-a100-80g", True),
    ("", "dgx-a100-80g", False), ("AMD Instinct MI300X", "dgx-a100-80g", True)])
def test_a_table_of_other_gpus_is_told(gpu: str, topology: str, told: bool, tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(_ranks(gpu) + _table("all_reduce", 1), encoding="utf-8")
    warnings = calibrate_nccl(tmp_path / "log.txt", topology).warnings
    assert any("its ranks ran on" in text for text in warnings) == told


def test_rows_that_are_not_read_are_told(tmp_path: Path) -> None:
    """A line cut off, one without a time, one of wrong results, and a table of an operation that is not simulated."""
    head = "# all_reduce_perf\n" + _ranks("A100")
    rows = ("  67108864  16777216  float  sum  -1  600.1  111.8  195.7  0  599.0  112.0  196.0  3\n"
            "  134217728  33554432  float  sum  -1  N/A  N/A  N/A  N/A  N/A  N/A  N/A  N/A\n"
            "  268435456  67108864  float  sum\n")
    (tmp_path / "log.txt").write_text(head + rows + "# gather_perf\n" + _ranks("A100") + rows, encoding="utf-8")
    found = calibrate_nccl(tmp_path / "log.txt", "dgx-a100-80g")
    said = "\n".join(found.warnings)
    assert "lines 11, 12 of all_reduce not taken: no time in it" in said
    assert "line 10 of all_reduce, taken all the same, had wrong results" in said
    assert "a table of gather was not taken" in said
    assert "! " in found.text()
