"""`drystep kernel`, `collective` and `calibrate`, and the loop from a user's measurements to a scenario."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import sim
from sim.errors import UserError
from sim.hardware import Device, gpu
from sim.hardware.kernels.operators import product_kernel
from sim.network.figures import Figures

SCENARIO = """\
name: small
cluster: {topology: TOPOLOGY, nodes: 2}
model: {preset: gpt2-xl}
training: {micro_batch: 1, global_batch: 16, sequence: 1024, precision: fsdp-bf16}
parallel: {strategy: fsdp}
"""


def step_s(topology: str | Path) -> float:
    Path("scenario.yaml").write_text(SCENARIO.replace("TOPOLOGY", str(topology)))
    return sim.run("scenario.yaml").step_time_s


def products(name: str) -> str:
    """Timings of one GPU, in the columns of `calibrate --gemm`."""
    device = Device(gpu(name), sustained=False, gap_s=3e-4)
    lines = ["gpu,dtype,m,n,k,batch,time_us,source"]
    for m, n, k in itertools.product((512, 2048, 8192), (1024, 4096), (1024, 4096)):
        time = float(device.times([product_kernel(m, n, k, 1, "bf16")])[0])
        lines.append(f"mine,bf16,{m},{n},{k},1,{1e6 * time:.3f},loop")
    return "\n".join(lines) + "\n"


def test_kernel_prints_one_kernels_time(drystep: Any) -> None:
    code, out, _ = drystep("kernel", "H100-SXM5-80GB", "gemm", "4096,4096,4096", "--json")
    answer = json.loads(out)
    assert (code, answer["gpu"], answer["shape"]) == (0, "h100-80g-sxm", [1, 4096, 4096, 4096])
    assert 2 * 4096**3 / answer["time_us"] / 1e6 == pytest.approx(answer["tflops"])
    code, out, _ = drystep("kernel", "a100-80g-sxm", "softmax", "4096x4096", "--dtype", "fp16")
    assert code == 0
    assert "confidence" in out


def test_the_bytes_and_flops_of_a_kernel_are_those_of_its_definition(drystep: Any) -> None:
    """Adam reads p, g, m, v and writes p, m, v in fp32; attention's backward has 5 products where forward has 2."""
    adam = drystep("kernel", "a100-80g-sxm", "optimizer", "100000000", "--json").json
    assert adam["gb_s"] * adam["time_us"] * 1e3 == pytest.approx(7 * 4 * 1e8)
    shape = ("kernel", "a100-80g-sxm", "attention", "2,8,8,4096,4096,128", "--full", "--json")
    forward, backward = (drystep(*shape, *more).json for more in ((), ("--backward",)))
    flops = [one["tflops"] * one["time_us"] * 1e6 for one in (forward, backward)]
    assert flops == pytest.approx([4 * 2 * 8 * 4096**2 * 128, 10 * 2 * 8 * 4096**2 * 128])


def test_all_keys_cost_more_than_causal_ones(drystep: Any) -> None:
    shape = ("kernel", "a100-80g-sxm", "attention", "1,32,32,4096,4096,128", "--json")
    times = [json.loads(drystep(*shape, *more)[1])["time_us"] for more in ((), ("--full",), ("--full", "--backward"))]
    assert times[1] > 1.5 * times[0]
    assert times[2] > 2 * times[1]


def test_collective_prints_the_layout_of_nccl_tests(drystep: Any) -> None:
    asked = ("collective", "all_gather", "--topology", "dgx-h100", "--nodes", "2", "-b", "1K", "-e", "1M", "-f", "4")
    code, out, _ = drystep(*asked, "--dtype", "half")
    rows = [line.split() for line in out.splitlines() if not line.startswith("#")]
    assert code == 0
    assert [int(row[0]) for row in rows] == [1024 * 4**i for i in range(6)]
    assert rows[0][1:3] == [str(1024 // 2 // 16), "half"]
    code, out, _ = drystep(*asked, "--gpus-per-node", "4", "--json")
    assert (code, json.loads(out)["ranks"]) == (0, 8)


def test_the_head_of_a_collective_tells_the_sizes_asked_for(drystep: Any) -> None:
    """1 GiB, though the last size of a factor of eight is half of it, as nccl-tests does."""
    done = drystep("collective", "all_reduce", "--topology", "dgx-h100", "-b", "1M", "-e", "1G", "-f", "8")
    head = next(line for line in done.out.splitlines() if "minBytes" in line)
    assert head.endswith("minBytes 1048576 maxBytes 1073741824")


def test_an_interpreter_completes_the_verbs() -> None:
    assert {*sim.__all__} <= {*dir(sim)}


@pytest.mark.parametrize(("arguments", "message"), [
    ("kernel h10 gemm 1,2,3", "unknown GPU"), ("kernel none.yaml gemm 1,2,3", "no such file"),
    ("kernel h100-80g-sxm gemm 1,2", "wants the shape"), ("kernel h100-80g-sxm gem 1,2", "no operator"),
    ("kernel h100-80g-sxm gemm 1,2,99999999999999", "absurdly large"),
    ("kernel h100-80g-sxm gemm 1,2,3 --dtype bf61", "unknown type"),
    ("kernel h100-80g-sxm gem 1,2", "did you mean 'gemm'"),
    ("kernel h100-80g-sxm attention 1,8,3,64,64,64", "8 heads are no multiple of 3 kv_heads"),
    ("kernel h100-80g-sxm gemm 1,2,3 --backward", "--backward: an option of attention, not of gemm"),
    ("kernel h100-80g-sxm softmax 1,2 --layout nn", "--layout: an option of gemm, not of softmax"),
    ("collective all_reduc --topology dgx-h100", "did you mean 'all_reduce'"),
    ("collective all_reduce --topology dgx-h10", "--topology: there is no topology"),
    ("collective all_reduce --topology dgx-h100 -b 3Q", "is not a size"),
    ("collective all_reduce --topology dgx-h100 -b 2G -e 1K", "sizes must grow"),
    ("collective all_reduce --topology dgx-h100 -f 1.0000001", "more than 2000 sizes"),
    ("collective all_reduce --topology dgx-h100 -f nan", "sizes"),
    ("collective all_reduce --topology dgx-h100 --gpus-per-node 9", "8 GPUs"),
    ("calibrate --out o.yaml", "nothing to calibrate"),
    ("calibrate --nccl x --out o.yaml", "go together"),
    ("calibrate --nccl none --topology dgx-h100 --out o.yaml", "no such file"),
    ("calibrate --nccl cells.csv --topology dgx-h100 --out o.yaml", "no row"),
    ("calibrate --gemm . --gpu a100-80g-sxm --out o.yaml", "cannot read"),
    ("calibrate --gemm cells.csv --gpu a100-80g-sxm --out o.yaml", "cells.csv:2: the row has no 'source'"),
    ("calibrate --gemm zero.csv --gpu a100-80g-sxm --out o.yaml", "zero.csv:2: time_us is not a number above 0"),
    ("calibrate --gemm good.csv --gpu a100-80g-sxm --out none/o.yaml", "there is no directory"),
    ("calibrate --gemm good.csv --gpu a100-80g-sxm --out .", "is a directory"),
])
def test_wrong_input_is_named_and_exits_with_2(drystep: Any, arguments: str, message: str) -> None:
    head = "gpu,dtype,m,n,k,batch,time_us,source\n"
    Path("cells.csv").write_text(head + "x,bf16,1,2,3,1,4\n")
    Path("zero.csv").write_text(head + "x,bf16,1,2,3,1,nan,y\n")
    Path("good.csv").write_text(head)
    code, _, err = drystep(*arguments.split())
    assert code == 2
    assert message in err
    assert not Path("o.yaml").exists()


def test_a_cluster_measured_slower_predicts_longer_steps(drystep: Any, tmp_path: Path) -> None:
    """nccl-tests' text of a cluster with half the network -> topology -> scenario."""
    shares = {name: 0.5 * Figures()[name] for name in ("fabric_share.infiniband",)}
    base = yaml.safe_load((Path(__file__).parents[2] / "topologies" / "dgx-a100-80g.yaml").read_text())
    (tmp_path / "true.yaml").write_text(yaml.safe_dump({**base, "links": shares}))
    ranks = "".join(f"#  Rank {i} Group 0 Pid 1 on host{i // 8} device {i % 8} [0x07] A100\n" for i in range(16))
    log = ""
    for op in ("all_gather", "reduce_scatter"):
        code, table, _ = drystep("collective", op, "--topology", "true.yaml", "--nodes", "2", "-b", "1K", "-f", "4")
        assert code == 0
        log += ranks + table
    (tmp_path / "log.txt").write_text(log)
    code, out, _ = drystep("calibrate", "--nccl", "log.txt", "--topology", "dgx-a100-80g", "--out", "mine.yaml")
    assert code == 0
    assert "fabric_share.infiniband" in out
    nominal, true, mine = step_s("dgx-a100-80g"), step_s("true.yaml"), step_s("mine.yaml")
    assert true > 1.03 * nominal
    assert mine == pytest.approx(true, rel=0.02)


def test_a_gpu_measured_otherwise_changes_the_step(drystep: Any, tmp_path: Path) -> None:
    """Product timings of a slower card -> profile -> scenario, by a path relative to the topology's file."""
    (tmp_path / "below").mkdir()
    (tmp_path / "products.csv").write_text(products("a100-80g-pcie"))
    asked = ("calibrate", "--gemm", "products.csv", "--gpu", "a100-80g-sxm", "--out", "below/gpu.yaml")
    assert drystep(*asked)[0] == 0
    base = yaml.safe_load((Path(__file__).parents[2] / "topologies" / "dgx-a100-80g.yaml").read_text())
    (tmp_path / "below/mine.yaml").write_text(yaml.safe_dump({**base, "gpu": "gpu.yaml"}))
    Path("scenario.yaml").write_text(SCENARIO.replace("TOPOLOGY", "below/mine.yaml"))
    result = sim.run("scenario.yaml")
    assert result.gpu == "a100-80g-sxm-calibrated"
    described = result.scenario.cluster.topology.gpu
    assert isinstance(described, dict)
    assert described["like"] == "a100-80g-sxm"
    assert result.step_time_s != pytest.approx(step_s("dgx-a100-80g"), rel=1e-4)
    again = sim.run(sim.load("scenario.yaml"))
    assert again.scenario.cluster.topology.intra.link == "nvlink3"
    code, out, _ = drystep("kernel", "below/gpu.yaml", "gemm", "4096,4096,4096", "--json")
    assert (code, json.loads(out)["gpu"]) == (0, "a100-80g-sxm-calibrated")


BAD = """\
name: bad
cluster:
  nodes: 2
  topology:
    gpu: {like: a100-80g-sxm, kernel_figures: {gemm: {half: {etta: 1, fill_k: x}}}, memory_gibb: 3}
    gpus_per_node: 8
    intra: {kind: nvswitch}
    inter: {kind: fat-tree}
    links:
      link_share.nvlnk3: 0.5
      fabric_share.infiniband: -1
    degraded:
      - {link: nik, share: 0.5}
      - {link: nic, share: 2, indx: 1}
model: {preset: gpt2}
training: {micro_batch: 1, global_batch: 16, sequence: 1024}
"""


def test_faults_of_measured_figures_have_lines_and_nearest_names(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(BAD)
    with pytest.raises(UserError) as caught:
        sim.load(tmp_path / "bad.yaml")
    found = {fault.field.removeprefix("cluster.topology."): (fault.line, fault.hint) for fault in caught.value.faults}
    assert found["gpu.kernel_figures.gemm.half.etta"] == (5, "did you mean 'eta'?")
    assert found["gpu.kernel_figures.gemm.half.fill_k"][0] == 5
    assert found["gpu.memory_gibb"] == (5, "did you mean 'memory_gib'?")
    assert found["links.link_share.nvlnk3"] == (10, "did you mean 'link_share.nvlink3'?")
    assert found["links.fabric_share.infiniband"][0] == 11
    assert found["degraded.0.link"] == (13, "did you mean 'nic'?")
    assert found["degraded.1.indx"] == (14, "did you mean 'index'?")
    assert len(found) == 8


def test_a_degraded_card_slows_the_step(drystep: Any, tmp_path: Path) -> None:
    base = yaml.safe_load((Path(__file__).parents[2] / "topologies" / "dgx-a100-80g.yaml").read_text())
    entry = {"link": "nic", "share": 0.2, "index": 3}
    (tmp_path / "slow.yaml").write_text(yaml.safe_dump({**base, "degraded": [entry]}))
    assert step_s("slow.yaml") > step_s("dgx-a100-80g")
