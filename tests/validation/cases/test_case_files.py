"""Reading case files: what is kept, and that every fault names its file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.errors import UserError
from sim.validation.cases.files import Case, expand, read, selects

GOOD = """title: A source
source: {cite: somebody}
defaults:
  cluster: {topology: dgx-a100-80g, nodes: 1}
  training: {micro_batch: 1, precision: {compute: bf16, reduce: fp32}}
cases:
  - {id: a, set: {cluster.nodes: 2, training.micro_batch: 4}, measured: {step_time_s: 1.5, oom: false}}
  - {id: b, set: {training.precision: {compute: fp16}}, measured: {relative_to: a, ratio: 1.1}, quality: plot}
"""


def written(folder: Path, text: str, name: str = "cases.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def faults(folder: Path, text: str, name: str = "cases.yaml") -> list[str]:
    with pytest.raises(UserError) as caught:
        read(written(folder, text, name))
    return [str(f) for f in caught.value.faults]


def test_a_case_keeps_defaults_changes_and_lines(tmp_path: Path) -> None:
    first, second = read(written(tmp_path, GOOD)).cases
    assert first.given["cluster"] == {"topology": "dgx-a100-80g", "nodes": 1}
    assert first.given["name"] == "a"
    assert first.sets == {"cluster.nodes": 2, "training.micro_batch": 4}
    assert (first.line, second.line, second.quality) == (7, 8, "plot")


@pytest.mark.parametrize(("old", "new", "expected"), [
    ("step_time_s: 1.5", "step_time: 1.5", "cases.yaml:7: a.measured.step_time: unknown measurement"),
    ("step_time_s: 1.5", "step_time_s: -1.5", "must be a positive number, not -1.5"),
    ("step_time_s: 1.5", "step_time_s: .nan", "must be a positive number"),
    ("step_time_s: 1.5", "step_time_s: true", "must be a positive number"),
    ("oom: false", "oom: 0", "must be true or false"),
    ("quality: plot", "quality: plotted", "did you mean 'plot'"),
    ("relative_to: a", "relative_to: aa", "cases.yaml:8: b.measured.relative_to: no case 'aa'"),
    (", ratio: 1.1", "", "belong together"),
    ("id: b", "id: a", "cases.yaml:8: id: id 'a' stands on line 7 too"),
    ("set: {cluster.nodes: 2, training.micro_batch: 4}", "set: [1]", "cases.yaml:7: a.set:"),
    ("title: A source", "kind: oracle-flop", "did you mean 'oracle-flops'"),
    ("cases:", "cases: [", "is not valid YAML"),
    ("cases:", "title: Another\ncases:", "is not valid YAML: 'title' is given twice (first on line 1)"),
    ("oom: false", "step_time_s: 2", "cases.yaml:7: is not valid YAML: 'step_time_s' is given twice"),
    ("title: A source", "title: !!python/object:os.system x", "cases.yaml:1: is not valid YAML"),
])
def test_faults_name_file_line_and_field(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert any(expected in fault for fault in faults(tmp_path, GOOD.replace(old, new)))


def test_several_faults_are_reported_together(tmp_path: Path) -> None:
    found = faults(tmp_path, GOOD.replace("1.5", "-1").replace("quality: plot", "quality: no"))
    assert len(found) == 2


@pytest.mark.parametrize("text", ["", "[1, 2]", "cases: []", "cases: {a: 1}"])
def test_what_is_no_case_file_is_refused(tmp_path: Path, text: str) -> None:
    assert faults(tmp_path, text)


def test_unknown_paths_are_refused_together(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        expand([tmp_path / "nothing.yaml", "fsdp_papr"])
    assert len(caught.value.faults) == 2
    assert "fsdp_paper" in caught.value.faults[1].hint


def test_a_folder_means_its_files_and_none_twice(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    assert expand([tmp_path, path]) == [path]


def test_kernel_files_have_one_case_per_gpu_dtype_and_operator(tmp_path: Path) -> None:
    text = "gpu,dtype,op,rows,cols,time_us,source\nT4,fp32,ln,8,16,3.5,x\nT4,fp32,add,8,16,2,x\nT4,fp32,ln,9,16,4,x\n"
    cases = read(written(tmp_path, text, "k.csv")).cases
    assert [(c.id, len(c.rows)) for c in cases] == [("T4:fp32:ln", 2), ("T4:fp32:add", 1)]
    assert "k.csv:2" in faults(tmp_path, text.replace("3.5", "fast"), "k.csv")[0]
    assert "unknown header" in faults(tmp_path, text.replace("rows", "lines"), "k.csv")[0]


def test_sweeps_keep_their_rows(tmp_path: Path) -> None:
    text = ("kind: collectives\nsweeps:\n- {id: s, op: all_reduce, ranks: 8, cluster: dgx-a100-80g,\n"
            "   rows: [[1024, 20.5], [2048, 21]]}\n")
    (case,) = read(written(tmp_path, text)).cases
    assert case.rows == ({"bytes": 1024, "measured_us": 20.5}, {"bytes": 2048, "measured_us": 21.0})
    assert "rows" in faults(tmp_path, text.replace("20.5", "-1"))[0]


def test_selecting_by_part_or_glob() -> None:
    case = Case("f.yaml", "f.yaml", 1, "training", "mpt-7b-g8", {}, {})
    assert all(selects(p, case) for p in (None, "7b", "mpt-*", "f.yaml/*", "*g8"))
    assert not any(selects(p, case) for p in ("13b", "7b*", "g.yaml/*"))


def test_numbers_are_those_of_scenario_files(tmp_path: Path) -> None:
    text = GOOD.replace("step_time_s: 1.5", "step_time_s: 15e-1, peak_allocated_bytes: 5.2e10")
    assert read(written(tmp_path, text)).cases[0].measured == {
        "step_time_s": 1.5, "peak_allocated_bytes": 5.2e10, "oom": False}


SWEEPS = """kind: collectives
sweeps:
  - {id: s, op: all_reduce, ranks: 8, cluster: dgx-h100, rows: [[8, 20]]}
"""


@pytest.mark.parametrize("key", ["sweeps", "cases"])
def test_sweeps_may_be_called_cases(tmp_path: Path, key: str) -> None:
    (case,) = read(written(tmp_path, SWEEPS.replace("sweeps", key))).cases
    assert case.rows == ({"bytes": 8, "measured_us": 20.0},)


@pytest.mark.parametrize(("old", "new", "expected"), [
    ("ranks: 8", "ranks: 0", "from 1 on"), ("ranks: 8", "ranks: true", "from 1 on"),
    ("cluster: dgx-h100", "cluster: {nodes: 2}", "a mapping with 'topology'"),
    ("[[8, 20]]", "[[8, 0]]", "[bytes, time_us]"),
])
def test_a_sweep_that_cannot_be_is_a_fault(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert any(expected in fault and "cases.yaml:3" in fault for fault in faults(tmp_path, SWEEPS.replace(old, new)))


PRODUCTS = "\ufeffgpu,time_us,m,n,k,batch,dtype,comment\r\nA100-80GB,600,4096,4096,4096,1,bf16,mine\r\n"


def test_a_table_may_have_other_columns_in_any_order_and_no_source(tmp_path: Path) -> None:
    (case,) = read(written(tmp_path, PRODUCTS, "mine.csv")).cases
    assert case.id == "A100-80GB:bf16:gemm"
    assert case.rows[0] | {"m": 4096.0, "time_us": 600.0, "source": ""} == case.rows[0]


@pytest.mark.parametrize(("old", "new", "expected"), [
    (",600,", ",0,", "time_us is not a number above 0: '0'"), (",600,", ",nan,", "time_us is not a number"),
    (",4096,4096,4096,", ",0,4096,4096,", "m is not a whole number above 0"),
    (",4096,4096,4096,", ",4096,1.5,4096,", "n is not a whole number above 0"),
    (",1,bf16,mine", "", "the row has no 'dtype'"),
])
def test_a_row_that_no_kernel_can_have_is_a_fault(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert any(expected in fault and "mine.csv:2" in fault
               for fault in faults(tmp_path, PRODUCTS.replace(old, new), "mine.csv"))


def test_measurements_may_have_units(tmp_path: Path) -> None:
    (first, _) = read(written(tmp_path, GOOD.replace("step_time_s: 1.5", "step_time_s: 1500 ms, "
                                                     "peak_allocated_bytes: 31 GB, peak_reserved_bytes: 32 GiB"))).cases
    assert first.measured == {"step_time_s": 1.5, "peak_allocated_bytes": 31e9, "peak_reserved_bytes": 32 * 2**30,
                              "oom": False}
    wrong = faults(tmp_path, GOOD.replace("step_time_s: 1.5", "peak_allocated_bytes: 31 km"))[0]
    assert "cases.yaml:7: a.measured.peak_allocated_bytes: '31 km' has the unit 'km', which is not a size" in wrong


def test_a_folder_without_case_files_is_said(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("none", encoding="utf-8")
    with pytest.raises(UserError, match="the folder holds no case files"):
        expand([tmp_path])
