"""Case files that users write, away from the checkout: paths beside the file, names of other people, new machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.validation import validate

TOPOLOGY = """name: my-boxes
gpu: NVIDIA L40S
gpus_per_node: 4
intra: {kind: pcie, gen: 4, gpus_per_switch: 2}
inter: {kind: fat-tree, fabric: roce, nics_per_node: 1, gbps_per_nic: 100}
"""
CASES = """title: Mine
defaults:
  cluster: {topology: boxes/mine.yaml, nodes: 2}
  model: {layers: 4, hidden: 1024, heads: 16, vocab: 32000}
  training: {micro_batch: 2, global_batch: 64, sequence: 512}
  parallel: {strategy: fsdp}
cases:
  - {id: a, measured: {step_time_s: 1.0}}
  - {id: layers, set: {model: {kind: layers, table: boxes/layers.csv}, parallel.strategy: ddp}, measured: {oom: false}}
  - {id: unknown, set: {cluster: {topology: nowhere}}, measured: {step_time_s: 1.0}}
"""
SWEEPS = """kind: collectives
cases:
  - {id: own, op: AllReduce, ranks: 8, dtype: bfloat16, cluster: {topology: boxes/mine.yaml}, rows: [[1048576, 500]]}
  - {id: inline, op: alltoall, ranks: 8, rows: [[1048576, 500]], cluster: {nodes: 2, topology: {gpu: B200,
     gpus_per_node: 4, intra: {kind: nvswitch}, inter: {kind: fat-tree, fabric: roce, nics_per_node: 4}}}}
  - {id: alone, op: all_gather, ranks: 16, cluster: single-a100-80g-sxm, rows: [[1048576, 500]]}
  - {id: operation, op: frobnicate, ranks: 8, cluster: dgx-h100, rows: [[1048576, 500]]}
  - {id: dtype, op: broadcast, dtype: quad, ranks: 8, cluster: dgx-h100, rows: [[1048576, 500]]}
"""
KERNELS = """gpu,dtype,m,n,k,batch,time_us
RTX 4090,float16,4096,4096,4096,1,900
AMD Instinct MI300X,bfloat16,4096,4096,4096,1,300
H21,bf16,4096,4096,4096,1,900
b200,fp4,4096,4096,4096,1,60
"""
ROWS = """gpu,dtype,op,rows,cols,time_us
B200,bf16,Layer_Norm,8192,1024,20
B200,bf16,frobnicate,8192,1024,20
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of a user; commands run elsewhere."""
    (tmp_path / "boxes").mkdir()
    (tmp_path / "boxes" / "mine.yaml").write_text(TOPOLOGY)
    (tmp_path / "boxes" / "layers.csv").write_text(
        "name,parameters,forward_flops,activation_bytes,output_bytes\na,1000000,2e9,1e6,1e6\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path


def statuses(folder: Path, name: str, text: str) -> dict[str, str]:
    (folder / name).write_text(text)
    return {record["id"]: record["status"] for record in validate([folder / name], workers=1).records}


def test_paths_are_relative_to_the_case_file(folder: Path) -> None:
    assert statuses(folder, "cases.yaml", CASES) == {"a": "ok", "layers": "ok", "unknown": "unsupported"}


def test_sweeps_on_clusters_nobody_has_seen(folder: Path) -> None:
    assert statuses(folder, "sweeps.yaml", SWEEPS) == {
        "own": "ok", "inline": "ok", "alone": "unsupported", "operation": "unsupported", "dtype": "unsupported"}


def test_kernel_tables_with_other_peoples_names(folder: Path) -> None:
    assert statuses(folder, "kernels.csv", KERNELS) == {
        "RTX 4090:float16:gemm": "ok", "AMD Instinct MI300X:bfloat16:gemm": "ok", "H21:bf16:gemm": "unsupported",
        "b200:fp4:gemm": "unsupported"}
    assert statuses(folder, "rows.csv", ROWS) == {
        "B200:bf16:Layer_Norm": "ok", "B200:bf16:frobnicate": "unsupported"}
