"""Sweeps, bounds, `--set`, the JSON Schema, YAML's scalars and resistance to nonsense."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.errors import UserError
from sim.scenario import Scenario, load_scenario
from sim.scenario.fields.asked_stack import Software
from sim.scenario.fields.model import Model
from sim.scenario.fields.schema import Parallel, Training
from sim.scenario.json_schema import json_schema
from sim.scenario.load import load_document
from sim.scenario.text.document import parse_document

BASE = """\
name: base
cluster: {topology: dgx-a100-80g, nodes: 2}
model: {preset: llama-2-7b}
training: {micro_batch: 2, global_batch: 64, sequence: 4096}
parallel: {strategy: fsdp}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    return path


def test_sweep_gives_the_product_and_says_why_points_are_skipped(tmp_path: Path) -> None:
    loaded = load_scenario(
        written(tmp_path, BASE + "sweep:\n  cluster.nodes: [1, 3]\n  parallel.sharding_factor: [8, full]\n")
    )
    got = list(loaded.points())
    assert [chosen for chosen, _ in got] == [
        {"cluster.nodes": n, "parallel.sharding_factor": f} for n in (1, 3) for f in (8, "full")
    ]
    assert isinstance(got[0][1], Scenario) and got[0][1].gpus == 8
    assert isinstance(got[2][1], str) and "global_batch 64 does not divide over 24" in got[2][1]
    assert loaded.scenario.gpus == 16 and list(loaded.sweep) == ["cluster.nodes", "parallel.sharding_factor"]


def test_sweep_goes_inside_names(tmp_path: Path) -> None:
    text = (
        BASE
        + "sweep:\n  cluster.topology.inter.gbps_per_nic: [100, 25 GB/s]\n  training.precision: [fp32, fsdp-bf16]\n"
    )
    points = [s for _, s in load_scenario(written(tmp_path, text)).points()]
    seen = [
        (s.cluster.topology.inter.gbps_per_nic, s.training.precision.name) for s in points if isinstance(s, Scenario)
    ]
    assert seen == [(100, "fp32"), (100, "fsdp-bf16"), (200, "fp32"), (200, "fsdp-bf16")]


def test_base_may_leave_to_the_sweep_what_it_varies(tmp_path: Path) -> None:
    text = BASE.replace("micro_batch: 2, ", "").replace("nodes: 2", "nodes: 3") + (
        "sweep: {training.micro_batch: [4, 2], cluster.nodes: [5, 4]}\n"
    )
    loaded = load_scenario(written(tmp_path, text))
    assert (loaded.scenario.training.micro_batch, loaded.scenario.cluster.nodes) == (2, 4)


def test_too_large_a_sweep_is_refused(tmp_path: Path) -> None:
    axis = list(range(1, 401))
    text = BASE + f"sweep: {{training.micro_batch: {axis}, cluster.nodes: {axis}}}\n"
    with pytest.raises(UserError, match=r"400 · 400 = 160,000 points, more than 100,000"):
        load_scenario(written(tmp_path, text))


def test_set_overrides_whole_values_and_single_fields(tmp_path: Path) -> None:
    path = written(tmp_path, BASE)
    s = load_scenario(
        path,
        [
            "parallel.sharding_factor=8",
            "training.precision=fsdp-bf16",
            "training.precision.reduce=fp32",
            "cluster.topology.intra.links_per_gpu=6",
            "parallel.prefetch.limit=none",
            "name=a b",
            "training.recompute.layers=4",
            "cluster={topology: dgx-h100}",
        ],
    ).scenario
    assert (s.parallel.sharding_factor, s.training.precision.reduce, s.training.precision.compute) == (
        8,
        "fp32",
        "bf16",
    )
    assert (s.cluster.nodes, s.cluster.topology.gpu, s.name, s.parallel.prefetch.limit) == (
        1,
        "h100-80g-sxm",
        "a b",
        None,
    )
    assert getattr(s.training.recompute, "layers", None) == 4
    swept = load_scenario(path, ["sweep.cluster.nodes=[1, 2]"])
    assert [s.gpus for _, s in swept.points() if isinstance(s, Scenario)] == [8, 16]


def test_expect_reads_every_form(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text(BASE)
    text = (
        BASE
        + """\
sweep: {cluster.nodes: [1, 2]}
expect:
  step_time_s: {value: 1.2, within: 5%}
  mfu: {min: 0.4, max: 0.6}
  bound: compute
  memory.fits: true
  slowdown: {relative_to: other.yaml, ratio: 1.07, within: 2%}
  tokens_per_second:
    - {at: {cluster.nodes: 2}, relative_to: {cluster.nodes: 1}, ratio: 1.9, within: 0.1}
    - {at: {cluster.nodes: 1}, min: 3}
"""
    )
    bounds = load_scenario(written(tmp_path, text)).expect
    by_field = {b.field: b for b in bounds}
    assert (by_field["step_time_s"].value, by_field["step_time_s"].within, by_field["step_time_s"].line) == (
        1.2,
        0.05,
        8,
    )
    assert (by_field["mfu"].low, by_field["mfu"].high, by_field["bound"].value) == (0.4, 0.6, "compute")
    assert by_field["memory.fits"].value is True
    assert by_field["slowdown"].relative_to == tmp_path / "other.yaml" and by_field["slowdown"].ratio == 1.07
    pair = [b for b in bounds if b.field == "tokens_per_second"]
    assert (pair[0].at, pair[0].relative_to, pair[0].within, pair[1].low) == (
        {"cluster.nodes": 2},
        {"cluster.nodes": 1},
        0.1,
        3,
    )


def test_plain_scalars_follow_yaml_1_2() -> None:
    text = (
        "a: 1.4e12\nb: 1e3\nc: yes\nd: on\ne: 12:30\nf: 0o17\ng: 0x1F\nh: 010\ni: ~\nj: 2024-01-01\nk: 1_000\nl: '7'\n"
        "m: .5\nn: 1.\no: +3\np: True\nq: n\nr: =\n"
    )
    assert parse_document(text, "t", Path(".")).data == {
        "a": 1.4e12,
        "b": 1000.0,
        "c": "yes",
        "d": "on",
        "e": "12:30",
        "f": 15,
        "g": 31,
        "h": 10,
        "i": None,
        "j": "2024-01-01",
        "k": "1_000",
        "l": "7",
        "m": 0.5,
        "n": 1.0,
        "o": 3,
        "p": True,
        "q": "n",
        "r": "=",
    }


def test_places_are_lines_of_keys_and_items() -> None:
    places = parse_document("a:\n  b: 1\n  c:\n    - x\n    - {y: 2}\n", "t", Path(".")).places
    assert {path: line for path, (_, line) in places.items()} == {
        "": 1,
        "a": 1,
        "a.b": 2,
        "a.c": 3,
        "a.c.0": 4,
        "a.c.1": 5,
        "a.c.1.y": 5,
    }


def test_aliases_repeat_values(tmp_path: Path) -> None:
    text = BASE.replace("nodes: 2}", "nodes: &n 2}") + "sweep: {cluster.nodes: [*n, 1]}\n"
    assert load_scenario(written(tmp_path, text)).sweep == {"cluster.nodes": [2, 1]}


def test_schema_describes_what_may_be_written() -> None:
    schema = json.loads(json.dumps(json_schema()))
    tables = schema["$defs"]
    assert schema["required"] == ["name", "cluster", "model", "training"] and schema["additionalProperties"] is False
    assert "llama-2-7b" in tables["Model"]["properties"]["preset"]["enum"]
    assert "dgx-a100-80g" in tables["Cluster"]["properties"]["topology"]["anyOf"][0]["enum"]
    assert "fsdp-bf16" in tables["Training"]["properties"]["precision"]["anyOf"][0]["enum"]
    assert any(choice.get("type") == "string" for choice in tables["Host"]["properties"]["memory"]["anyOf"])
    assert {"const": "full"} in tables["Parallel"]["properties"]["sharding_factor"]["anyOf"]
    references = re.findall(r'"#/\$defs/(\w+)"', json.dumps(schema))
    assert references and set(references) <= set(tables)
    assert "null" not in json.dumps(schema)
    for name, model in (("Training", Training), ("Parallel", Parallel), ("Model", Model), ("Software", Software)):
        assert set(tables[name]["properties"]) == set(model.model_fields)


WORDS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 10**12),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        [
            "full",
            "none",
            "80 GB",
            "5 s",
            "fsdp",
            "dgx-h100",
            "*x",
            "[",
            "{a: 1}",
            "!!set {}",
            "&a b",
            "1e400",
            "-",
            "|",
            "'",
        ]
    ),
    st.lists(st.integers(0, 9), max_size=3),
    st.dictionaries(st.sampled_from(["layers", "x", "memory", "limit"]), st.integers(), max_size=2),
)
LEAVES = [
    ("cluster", "topology"),
    ("cluster", "nodes"),
    ("cluster", "gpus_per_node"),
    ("cluster", "gpu"),
    ("cluster",),
    ("model",),
    ("model", "preset"),
    ("model", "hf"),
    ("model", "heads"),
    ("model", "moe"),
    ("model", "table"),
    ("model", "kind"),
    ("training",),
    ("training", "micro_batch"),
    ("training", "global_batch"),
    ("training", "precision"),
    ("training", "recompute"),
    ("training", "mode"),
    ("training", "finetune"),
    ("parallel",),
    ("parallel", "tensor"),
    ("parallel", "pipeline"),
    ("parallel", "split"),
    ("parallel", "prefetch"),
    ("parallel", "sharding_factor"),
    ("parallel", "wrap"),
    ("parallel", "expert"),
    ("parallel", "order"),
    ("parallel", "offload"),
    ("parallel", "virtual_stages"),
    ("software",),
    ("software", "versions"),
    ("software", "year"),
    ("budget",),
    ("sweep",),
    ("expect",),
    ("name",),
    ("parallel", "schedule"),
    ("parallel", "context"),
    ("sweep", "cluster.nodes"),
    ("sweep", "model"),
    ("sweep", "cluster.topology"),
    ("expect", "mfu"),
    ("expect", "memory.fits"),
]


def load_text(text: str) -> None:
    try:
        loaded = load_document(parse_document(text, "fuzz.yaml", Path("/nonexistent")))
        for _ in loaded.points():
            pass
    except UserError as error:
        assert error.faults and all(f.message for f in error.faults)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(LEAVES), WORDS), min_size=1, max_size=3))
def test_mutated_values_never_raise_anything_but_user_errors(changes: list[tuple[tuple[str, ...], Any]]) -> None:
    data = yaml.safe_load(BASE)
    for path, value in changes:
        here = data
        for part in path[:-1]:
            if not isinstance(here.get(part), dict):
                here[part] = {}
            here = here[part]
        here[path[-1]] = value
    load_text(yaml.safe_dump(data))


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, len(BASE)), st.integers(0, 6), st.text(alphabet="\t\n :-[]{}&*!|>'\"%@`#,?ab0.e\x00é", max_size=6)
)
def test_mutated_text_never_raises_anything_but_user_errors(at: int, removed: int, added: str) -> None:
    try:
        document = parse_document(BASE[:at] + added + BASE[at + removed :], "fuzz.yaml", Path("/nonexistent"))
        load_document(document)
    except UserError as error:
        assert error.faults
