"""compare: every moved term adds up to the change of the step, and has what stands behind it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import sim
from sim.calibration.nccl.sweeps import topology_mapping
from sim.cli import main
from sim.network.figures import catalogue
from sim.scenario.load import resolve
from sim.sizing import Comparison, compare
from sim.sizing.words.compare import lines

PLAIN: dict[str, Any] = {
    "name": "plain", "cluster": {"topology": "dgx-a100-80g", "nodes": 2}, "model": {"preset": "gpt3-1.3b"},
    "training": {"micro_batch": 4, "global_batch": 64, "sequence": 1024}, "parallel": {"strategy": "ddp"}}


def against(**changes: Any) -> Comparison:
    other = {**PLAIN, "name": "other", **{k: {**PLAIN[k], **v} for k, v in changes.items()}}
    return compare([sim.run(resolve(PLAIN)), sim.run(resolve(other))])


@pytest.mark.parametrize("changes", [
    {"training": {"recompute": "full"}}, {"parallel": {"strategy": "fsdp"}}, {"cluster": {"inter_gbps_per_node": 100}},
    {"parallel": {"pipeline": 2}}, {"training": {"sequence": 512}}], ids=str)
def test_moved_terms_sum_to_the_change(changes: dict[str, Any]) -> None:
    found = against(**changes)
    change = found.step_time_s[1] - found.step_time_s[0]
    assert sum(seconds for _, seconds in found.moved[0]) == pytest.approx(change, abs=1e-9)
    assert sum(v[0] for v in found.terms.values()) == pytest.approx(found.step_time_s[0])
    assert abs(found.moved[0][0][1]) == max(abs(s) for _, s in found.moved[0])


def test_full_recomputation_is_more_work_at_the_same_pace() -> None:
    found = against(training={"recompute": "full"})
    reason = found.why[0]["compute.gemm"]
    work = float(reason.split("work per GPU x")[1].split(",")[0])
    # blocks are forwarded again, but for their last product (a third of a block's), whose output nothing needs: PyTorch
    # stops there. Head and embedding (8% of the work) are not: 1 + 0.92 / 3 * 2 / 3
    assert work == pytest.approx(1.204, abs=0.015)
    assert dict(found.memory_moved[0])["activations"] < 0
    assert found.differs == {"training.recompute": ["none", "full"]}


def test_what_collectives_cost_kernels_and_warnings_are_told() -> None:
    asked = {**PLAIN, "parallel": {"strategy": "fsdp"}, "cluster": {"topology": "dgx-h100", "nodes": 2},
             "training": {**PLAIN["training"], "precision": "fsdp-bf16"}}
    slower = {**asked, "cluster": {**asked["cluster"], "inter_gbps_per_node": 200}}
    results = [sim.run(resolve(one)) for one in (asked, slower)]
    results[1].warnings = ["memory: nearly full"]
    found = compare(results)
    assert found.contention_s == [r.breakdown.contention for r in results]
    text = list(lines(found))
    held = next(line for line in text if "kernels beside collectives" in line)
    assert "the SMs and memory bandwidth that these hold cost" in held
    assert text[-1] == "! memory: nearly full (inter gbps per node 200)"
    found.contention_s[1] = 1e-12  # what is left of sums that come to nothing
    assert any(line.endswith(" -> 0") for line in lines(found) if "kernels beside collectives" in line)
    assert not any("kernels beside collectives" in line for line in lines(compare([results[0], results[0]])))


def test_what_bounds_a_run_is_told_as_its_own_report_tells_it() -> None:
    asked = {"name": "t", "cluster": {"topology": "single-a100-40g-sxm"}, "model": {"preset": "gpt3-1.3b"},
             "training": {"micro_batch": 1, "global_batch": 1, "sequence": 512, "precision": "mixed-fp16"},
             "parallel": {"strategy": "zero2", "offload": {"optimizer": "cpu"}}, "software": {"framework": "deepspeed"}}
    found = compare([sim.run(resolve(asked))])
    assert found.bound == ["communication"] and "bound by copies to the host and its optimizer" in next(lines(found))


def test_a_model_without_attention_is_compared_with_one_that_has_it() -> None:
    layers = {"name": "layers", "cluster": {"topology": "dgx-a100-80g"}, "model": {"preset": "resnet-50"},
              "training": {"micro_batch": 8, "micro_steps": 1}, "parallel": {"strategy": "ddp"}}
    results = [sim.run(resolve(one)) for one in (PLAIN, layers)]
    assert compare(results).why[0]["compute.attention"] == "none of it any more"
    assert compare(results[::-1]).why[0]["compute.attention"] == "new"


def test_fields_that_only_follow_from_others_are_not_told() -> None:
    pipelined = against(parallel={"pipeline": 2})
    assert "parallel.reshard_after_forward" not in pipelined.differs and "parallel.pipeline" in pipelined.differs
    machine = {"cluster": {"topology": "hgx-h20", "nodes": 2, "inter_gbps_per_node": 200}}
    named = compare([sim.run(resolve(PLAIN)), sim.run(resolve(PLAIN | machine))]).names[1]
    assert "topology hgx-h20" in named and "nvme" not in named  # what comes with a machine its name tells


def test_slower_links_are_more_on_the_wire_and_less_hidden() -> None:
    found = against(cluster={"inter_gbps_per_node": 50})
    reason = found.why[0]["exposed_communication.all_reduce.data"]
    units = {"s": 1.0, "ms": 1e-3}
    before, after = (float(value) * units[unit] for value, unit in (
        said.split() for said in reason.split("wire ")[1].split(",")[0].split(" -> ")))
    assert "e+" not in reason  # seconds are no thousands of milliseconds
    assert after > 4 * before and "16 ranks" in reason


def test_sharding_explains_the_optimizer_and_new_collectives() -> None:
    why = against(parallel={"strategy": "fsdp"}).why[0]
    assert "optimizer states of a GPU" in why["compute.optimizer"]
    assert why["exposed_communication.all_gather.shard"].startswith("new: ")


def test_the_command_tells_the_reasons_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, recompute in (("a", "none"), ("b", "full")):
        training = {**PLAIN["training"], "recompute": recompute}
        (tmp_path / f"{name}.yaml").write_text(json.dumps({**PLAIN, "name": name, "training": training}))
    with pytest.raises(SystemExit) as done:
        main(["compare", str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml"), "--report", str(tmp_path / "out")])
    assert done.value.code == 0
    said = capsys.readouterr().out
    assert "work per GPU x1.2" in said and "training.recompute: none | full" in said and "memory: activations -" in said
    assert (tmp_path / "out" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out" / "comparison.txt").read_text() == said


def test_a_budget_is_compared_in_days_and_money() -> None:
    found = compare([sim.run(resolve({
        **PLAIN, "name": name, "cluster": {"topology": "dgx-a100-80g", "nodes": nodes},
        "budget": {"tokens": 1e10, "price_per_gpu_hour": 2}})) for name, nodes in (("a", 2), ("b", 1))])
    text = "\n".join(lines(found))
    first, second = found.to_json()["budget"]
    assert first["days"] < second["days"]
    assert f"a  {24 * first['days']:.3g} h · {first['gpu_hours']:,.0f} GPU-hours · {first['cost']:,.0f} USD" in text
    assert "the whole run" not in "\n".join(lines(against()))


def test_runs_that_are_alike_differ_in_nothing() -> None:
    same = sim.run(resolve(PLAIN))
    other = sim.run(resolve({**PLAIN, "name": "by another name", "expect": {"mfu": {"min": 0.1}}}))
    found = compare([same, other])
    assert found.moved == [[]] and found.differs == {} and found.scaling == [1.0, 1.0]
    assert any("memory: the same" in line for line in lines(found))


def test_figures_of_links_are_measured_or_the_catalogues() -> None:
    """`drystep calibrate` writes some of them into a topology; of others the catalogue's are in force."""
    measured = {**topology_mapping("dgx-a100-80g"), "links": {"base_us.LL.ampere": 5.25, "base_us.Simple.ampere": 8.0}}
    runs = [sim.run(resolve({"name": "one", "cluster": {"topology": topology, "gpus_per_node": 2},
                             "model": {"preset": "gpt2", "layers": 2}, "parallel": {"strategy": "ddp"},
                             "training": {"micro_batch": 1, "global_batch": 2, "sequence": 128}}))
            for topology in ("dgx-a100-80g", measured)]
    found = compare(runs)
    assert found.names == ["one (links as in the catalogue)",
                           "one (links as measured: base_us.LL.ampere 5.25 and more)"]
    assert found.differs == {f"cluster.topology.links.{name}": [catalogue()[name], value]
                             for name, value in measured["links"].items()}


def test_names_say_what_is_not_set() -> None:
    from sim.sizing.compare import _names

    assert _names(["a", "a"], {"cluster.inter_gbps_per_node": [None, 100.0], "training.recompute": ["none", "full"]}) \
        == ["a (inter gbps per node not set, recompute none)", "a (inter gbps per node 100, recompute full)"]
    assert _names(["a", "b"], {"training.recompute": ["none", "full"]}) == ["a", "b"]


def test_a_word_and_a_mapping_of_one_field_are_told_as_one() -> None:
    from sim.sizing.compare import _names

    assert _names(["a", "a", "a"], {"training.micro_batch": [1, 2, 2], "training.recompute.layers": [14, None, None],
                                    "training.recompute": [None, "full", None]}) \
        == ["a (micro batch 1, recompute layers 14)", "a (micro batch 2, recompute full)",
            "a (micro batch 2, recompute not set)"]


def test_a_run_that_does_not_fit_is_told_apart() -> None:
    large = {"model": {"preset": "gpt3-13b"}}
    found = against(**large)
    assert found.fits == [True, False] and found.to_json()["fits"] == [True, False]
    first, second, note, *_ = lines(found)
    assert "DOES NOT FIT" in second and "DOES NOT FIT" not in first and "drystep memory" in note
    assert "does not fit" not in "\n".join(lines(against(training={"recompute": "full"}))).lower()


def test_work_is_that_of_the_terms_own_kernels() -> None:
    """Half the sequence is half the products and a quarter of attention's pairs of queries and keys."""
    why = against(training={"sequence": 512}).why[0]
    assert why["compute.gemm"].startswith("work per GPU x0.5, pace x")
    assert why["compute.attention"].startswith("work per GPU x0.25, pace x")


def test_images_and_tokens_have_no_ratio() -> None:
    images = {"name": "images", "cluster": {"topology": "dgx-a100-80g"}, "model": {"preset": "resnet-50"},
              "training": {"micro_batch": 64, "global_batch": 512, "precision": "amp-fp16"},
              "parallel": {"strategy": "ddp"}}
    found = compare([sim.run(resolve(one)) for one in (PLAIN, images)])
    assert found.scaling == [1.0, None] and [of for _, of in found.rates] == ["tokens/s", "samples/s"]
    text = list(lines(found))
    assert text[0].endswith(" tokens/s/GPU") and text[1].endswith(" samples/s/GPU")
    assert "compute.memory_bound" not in found.why[0]  # so many tokens are no samples


def test_runs_on_two_machines_are_called_by_them_and_told_apart() -> None:
    machines = ("p4d", "dgx-a100-40g", "dgx-a100-40g", "dgx-a100-40g")
    batches, views = (64, 64, 64, 128), (False, False, True, True)
    found = compare([sim.run(resolve({**PLAIN, "cluster": {"topology": machine},
                                      "training": {**PLAIN["training"], "global_batch": batch},
                                      "parallel": {"strategy": "ddp", "gradient_as_bucket_view": view}}))
                     for machine, batch, view in zip(machines, batches, views, strict=True)])
    assert found.names[0] == "plain (topology p4d, global batch 64, gradient as bucket view false)"
    assert len(set(found.names)) == 4 and found.names[3].endswith("view true)")
    assert any("gradient_as_bucket_view: false | false | true | true" in line for line in lines(found))
