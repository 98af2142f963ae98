"""The claims: each says what is claimed, why it holds or not, and what is predicted; the written texts are current."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from sim import api
from sim.errors import UserError
from sim.report.numbers.breakdown import leaves
from sim.scenario import load_scenario, resolve
from sim.scenario.dump import dump
from sim.scenario.fields.claim import Claim, Figure
from sim.validation import claims

ROOT = Path(__file__).resolve().parents[2]
FILES = claims.claim_files()


@cache
def checked(path: Path) -> claims.Checked:
    return claims.check(path)


def test_every_topic_has_its_claims() -> None:
    names = {path.stem for path in FILES}
    for start in ("t5-", "states-", "weights-", "zero-", "fsdp-", "recompute-", "flash-", "activations-", "batch-",
                  "gradient-accumulation", "small-batch", "kernels-and-context", "data-loading"):
        assert any(name.startswith(start) for name in names), start


@pytest.mark.whole
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_claim_is_complete_and_its_bounds_hold(path: Path) -> None:
    claim = load_scenario(path).scenario.claim
    assert claim is not None
    assert claim.text and claim.source and claim.why
    one = checked(path)
    assert one.bounds > 0
    assert not one.broken, "\n".join(map(str, one.broken))
    for name in claim.figures:
        assert "{" + name + "}" in claim.why, f"figure {name} is never quoted"
    assert "{" not in one.why


@pytest.mark.whole
def test_the_texts_are_current() -> None:
    every = [checked(path) for path in FILES]
    command = "run python -m sim.validation.claims"
    assert (ROOT / "reports/claims.md").read_text(encoding="utf-8") == claims.markdown(every), command
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == claims.readme_with(readme, every), command
    assert all(f"scenarios/claims/{path.name}" in readme for path in FILES)


POINTS = [({"a": 1}, {"x": {"y": 2.0, "z": 1.0}, "step_time_s": 4.0, "breakdown_s": {}}),
          ({"a": 2}, {"x": {"y": 6.0, "z": 1.0}, "step_time_s": 5.0, "breakdown_s": {}})]


@pytest.mark.parametrize(("figure", "expected"), [
    (Figure(fields=["step_time_s"], at={"a": 2}), 5.0),
    (Figure(fields=["x.y", "x.z"], at={"a": 2}), 7.0),
    (Figure(fields=["x"], at={"a": 2}), 7.0),
    (Figure(fields=["x.y"], at={"a": 2}, relative_to={"a": 1}), 3.0),
    (Figure(fields=["x.z"], at={"a": 2}, share_of=["step_time_s"]), 0.2),
    (Figure(fields=["step_time_s"], at={"a": 1}, per=8.0), 0.5),
    (Figure(fields=["breakdown_s.exposed_communication"], at={"a": 1}), 0.0),
])
def test_a_figure_is_read_off_the_points(figure: Figure, expected: float) -> None:
    assert claims.value(figure, POINTS) == pytest.approx(expected)


@pytest.mark.parametrize("figure", [
    Figure(fields=["step_time_s"]), Figure(fields=["step_time_s"], at={"a": 3}), Figure(fields=["x.w"], at={"a": 1}),
])
def test_a_figure_that_is_not_there_is_named(figure: Figure) -> None:
    claim = Claim(text="t", verdict="holds", why="is {it}", figures={"it": figure})
    with pytest.raises(UserError, match=r"claim\.figures\.it"):
        claims.quoted(claim, POINTS)


def test_reasons_that_quote_an_unknown_figure_are_refused() -> None:
    with pytest.raises(UserError, match="there is no figure 'thta'"):
        claims.quoted(Claim(text="t", verdict="holds", why="{thta}"), POINTS)


@pytest.mark.parametrize(("number", "unit", "text"), [
    (1.6e10, "GB", "16 GB"), (31.43e9, "GB", "31.4 GB"), (1.32, "change", "+32%"), (0.79, "change", "−21%"),
    (0.947, "%", "94.7%"), (3.954, "x", "3.95×"), (1234.0, "TFLOP/s", "1,234 TFLOP/s"), (999.7, "number", "1,000"),
])
def test_numbers_are_written_with_their_unit(number: float, unit: str, text: str) -> None:
    assert claims.written(number, unit) == text


def test_a_scenario_without_a_claim_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "plain.yaml"
    file.write_text("name: plain\ncluster: {topology: single-a100-80g-sxm}\nmodel: {preset: gpt2}\n"
                    "training: {micro_batch: 1, micro_steps: 1, sequence: 128}\n", encoding="utf-8")
    with pytest.raises(UserError, match="needs 'claim'"):
        claims.check(file)


def test_the_table_lands_between_the_two_lines_of_the_readme() -> None:
    text = "a\n<!-- claims:begin (x) -->\nold\n<!-- claims:end -->\nz\n"
    new = claims.readme_with(text, [])
    assert "old" not in new and new.startswith("a\n<!-- claims:begin (x) -->\n| claim") and new.endswith("-->\nz\n")


def test_slow_storage_bounds_the_step_and_fast_storage_costs_nothing() -> None:
    """Reading ahead, the slower of reading and training sets the pace: 8 samples of 1 GB at 1 GB/s take 8 s."""
    plain = {"name": "loading", "cluster": {"topology": "dgx-a100-80g"}, "model": {"preset": "gpt2"},
             "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128}}
    fast = api.run(resolve(plain))
    sets = {"training.sample_bytes": "1 GB", "cluster.topology.host.storage": "1 GB/s"}
    slow = api.run(resolve(plain, sets=sets))
    assert fast.data_loading.waiting_s == 0.0
    assert slow.step_time_s == pytest.approx(8.0)
    assert slow.bound == "host"
    assert leaves(slow.to_json()["breakdown_s"]) == pytest.approx(8.0)
    assert slow.to_json()["data_loading"]["needed_bytes_per_second"] == pytest.approx(8e9 / fast.step_time_s)
    assert slow.slowdown == pytest.approx(1.0)
    quick = api.run(resolve(plain, sets=sets | {"cluster.topology.host.storage": "1e9 GB/s"}))
    assert quick.step_time_s == fast.step_time_s


@pytest.mark.parametrize(("given", "batch"), [
    ({"micro_steps": 3}, 2 * 8 * 3), ({"global_batch": 32}, 32),
])
def test_micro_steps_tell_the_batch_of_any_cluster(given: dict[str, int], batch: int) -> None:
    training = {"micro_batch": 2, "sequence": 128, **given}
    scenario = resolve({"name": "batch", "cluster": {"topology": "dgx-a100-80g"}, "model": {"preset": "gpt2"},
                        "training": training})
    assert scenario.training.global_batch == batch
    assert resolve(dump(scenario)) == scenario


@pytest.mark.parametrize(("given", "message"), [
    ({}, "'global_batch' is required"), ({"micro_steps": 1, "global_batch": 8}, "both tell the batch"),
])
def test_the_batch_is_told_once(given: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve({"name": "batch", "cluster": {"topology": "dgx-a100-80g"}, "model": {"preset": "gpt2"},
                 "training": {"micro_batch": 1, "sequence": 128, **given}})
