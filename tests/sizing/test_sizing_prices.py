"""Where prices come from, and what budget, deadline and objectives make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.catalog import names
from sim.cli import main
from sim.errors import UserError
from sim.scenario.load import resolve
from sim.sizing import Choice, Wish, size
from sim.sizing.prices import catalogue, given, prices_of
from sim.sizing.wish import priced
from sim.sizing.words.why import why_lines

SMALL: dict[str, Any] = {
    "name": "small", "cluster": {"topology": "dgx-a100-80g", "nodes": 1}, "model": {"preset": "gpt2"},
    "training": {"micro_batch": 1, "global_batch": 64, "sequence": 1024, "precision": "fsdp-bf16"},
    "parallel": {"strategy": "fsdp"}}
NARROW = {"tensor": [1], "context": [1], "pipeline": [1], "micro_batch": [4], "recompute": ["none"],
          "partial_recompute": False}

#: Searches of one space, over and over: what they simulate is shared.
pytestmark = pytest.mark.usefixtures("once")


def on(topology: str, **budget: Any) -> Any:
    return resolve({**SMALL, "cluster": {"topology": topology, "nodes": 1}, **({"budget": budget} if budget else {})})


def test_catalogue_is_whole() -> None:
    rented = [name for entry in catalogue().values() for name in entry["topologies"]]
    assert set(rented) <= set(names("topologies")) and len(rented) == len(set(rented))
    for entry in catalogue().values():
        assert 0.5 < entry["usd_per_gpu_hour"] < 20 and entry["source"] and entry["date"] and entry["confidence"]


def test_what_is_given_wins_over_the_scenario_the_topology_and_the_catalogue() -> None:
    assert prices_of([on("p3dn")], None)[0] == {"p3dn": 3.90}
    assert "recalled" in prices_of([on("p3dn")], None)[1]["p3dn"]
    assert prices_of([on("p4d")], None) == ({"p4d": 2.7447}, {"p4d": "its topology file"})
    assert prices_of([on("p4d", price_per_gpu_hour=1.5)], None) == ({"p4d": 1.5}, {"p4d": "the scenario"})
    assert prices_of([on("p4d", price_per_gpu_hour=1.5)], "2") == ({"p4d": 2.0}, {"p4d": "--price"})
    both = [on("p4d"), on("dgx-a100-80g")]
    assert prices_of(both, "dgx-a100-80g=nd-a100-v4")[0] == {"p4d": 2.7447, "dgx-a100-80g": 3.40}
    assert prices_of(both, None)[0] == {"p4d": 2.7447}


@pytest.mark.parametrize("text", ["x", "-1", "nan", "p4x", "p4d=", ""])
def test_no_price(text: str) -> None:
    with pytest.raises(UserError, match="price"):
        given(text)


def test_a_cluster_that_is_not_searched_has_no_price() -> None:
    with pytest.raises(UserError, match="no cluster 'p5'"):
        prices_of([on("p4d")], "p5=2")


def test_cost_is_time_by_gpus_by_price_and_the_cheaper_cluster_wins() -> None:
    found = size(resolve(SMALL), Choice([8], **NARROW), Wish("cost", steps=100.0), clusters=["p4d", "dgx-a100-80g"],
                 price="dgx-a100-80g=0.01")
    best = found.best[0]
    assert best["cluster"] == "dgx-a100-80g" and best["usd"] == pytest.approx(best["gpu_hours"] * 0.01)
    assert {row["cluster"] for row in found.best} == {"dgx-a100-80g", "p4d"}
    dear = next(row for row in found.best if row["cluster"] == "p4d")
    assert dear["usd"] == pytest.approx(dear["step_time_s"] * 100 / 3600 * 8 * 2.7447)


@pytest.mark.parametrize("objective", ["time", "cost", "gpus"])
def test_each_objective_and_each_limit_against_all_rows(objective: str) -> None:
    everything = size(resolve(SMALL), Choice([8, 16, 32], **NARROW), Wish("time", 100.0), top=10**6, price="2").best
    middle = sorted(row["run_s"] for row in everything)[len(everything) // 2]
    dollars = sorted(row["usd"] for row in everything)[len(everything) // 2]
    value = {"time": lambda r: r["run_s"], "cost": lambda r: r["usd"], "gpus": lambda r: (r["gpus"], r["run_s"])}
    for deadline_s, budget in ((None, None), (middle, None), (None, dollars), (middle, dollars)):
        allowed = [r for r in everything if (deadline_s is None or r["run_s"] <= deadline_s)
                   and (budget is None or r["usd"] <= budget)]
        found = size(resolve(SMALL), Choice([8, 16, 32], **NARROW), Wish(objective, 100.0, deadline_s, budget), top=1,
                     price="2")
        best = min(allowed, key=value[objective], default=None)
        assert [value[objective](r) for r in found.best] == ([] if best is None else [value[objective](best)])


def test_a_budget_without_any_price_is_wrong_input(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("name: s\ncluster: {topology: dgx-a100-80g, nodes: 1}\nmodel: {preset: gpt2}\n"
                    "training: {micro_batch: 1, global_batch: 64, sequence: 1024}\nbudget: {tokens: 1e9}\n")
    with pytest.raises(SystemExit) as left:
        main(["size", str(file), "--gpus", "8", "--budget", "100"])
    err = capfd.readouterr().err
    assert left.value.code == 2 and "--price" in err and "Traceback" not in err


def test_report_writes_the_front_and_the_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("name: s\ncluster: {topology: p3dn, nodes: 1, gpus_per_node: 2}\nmodel: {preset: gpt2}\n"
                    "training: {micro_batch: 1, global_batch: 4, sequence: 256}\nparallel: {strategy: ddp}\n")
    with pytest.raises(SystemExit) as left:
        main(["size", str(file), "--gpus", "2,4", "--seconds", "0.5", "--report", str(tmp_path / "out")])
    assert left.value.code == 0
    assert (tmp_path / "out/front.png").read_bytes()[:4] == b"\x89PNG"
    text = (tmp_path / "out/sizing.txt").read_text()
    assert text == capfd.readouterr().out and "3.9 USD per GPU-hour" in text and "why the best wins" in text


def test_a_cluster_without_a_price_is_named_once_whatever_is_varied_of_it() -> None:
    alike = [on("dgx-a100-80g")] * 3
    with pytest.raises(UserError) as caught:
        priced(Wish("cost"), [on("p4d"), *alike], None)
    assert str(caught.value).count("dgx-a100-80g") == 1
    with pytest.raises(UserError) as caught:
        prices_of(alike, "p5=2")
    assert str(caught.value).count("dgx-a100-80g") == 1


def test_the_price_of_a_gpu_hour_is_among_the_reasons_where_two_differ_in_it() -> None:
    found = size(resolve(SMALL), Choice([8], **NARROW, strategies=["ddp"]), Wish("cost", steps=100.0),
                 clusters=["p4d", "dgx-a100-80g"], price="dgx-a100-80g=1,p4d=2.5")
    second = found.why.runner_up
    assert second is not None and second.prices == pytest.approx((1.0, 2.5))
    assert second.usd == pytest.approx((found.best[0]["usd"], found.best[1]["usd"]))
    text = "\n".join(why_lines(found.why, lambda row: row["cluster"], found.wish.told))
    assert "price of a GPU-hour" in text and "1 -> 2.5 USD, cost" in text
    assert found.to_json()["why"]["runner_up"]["usd_per_gpu_hour"] == pytest.approx([1.0, 2.5])
    alike = size(resolve(SMALL), Choice([8], **NARROW), Wish("cost"), price="2").why
    assert "price of a GPU-hour" not in "\n".join(why_lines(alike, lambda row: row["cluster"], found.wish.told))
