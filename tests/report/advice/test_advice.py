"""What makes a job fit: candidates that help, in the order of their cost."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import sim
from sim.api import Trial
from sim.report.advice.candidates import candidates
from sim.report.advice.combined import fewest_blocks, together
from sim.report.advice.largest import GPU_ALONE
from sim.report.advice.trials import Change, Trials
from sim.report.result import Result
from sim.report.terminal.changes import changes_lines
from sim.report.terminal.render import render
from sim.report.units import size
from sim.scenario import Scenario, resolve
from sim.scenario.change import Changed
from sim.scenario.dump import dump


def job(**changes: Any) -> Result:
    sets = {"training.micro_batch": 16, **changes}
    return sim.run(resolve({
        "name": "large", "cluster": {"topology": "dgx-a100-80g", "nodes": 1},
        "model": {"kind": "decoder", "layers": 24, "hidden": 2048, "heads": 16, "vocab": 50304},
        "training": {"global_batch": 8 * 64, "sequence": 2048, "precision": "amp-bf16", "attention": "eager"},
        "parallel": {"strategy": "ddp"}}, "large", sets))


def test_a_job_that_fits_needs_no_advice() -> None:
    assert job(**{"training.micro_batch": 1}).changes == []


def test_tensor_ranks_of_a_mixture_cut_the_sequence() -> None:
    """Megatron trains it in no other way from 2024 on; a dense model is cut as it was before."""
    for preset, year, cut in (("mixtral-8x7b", 2025, True), ("mixtral-8x7b", 2023, None), ("llama-2-7b", 2025, None)):
        of = resolve({"name": "x", "cluster": {"topology": "dgx-h100"}, "model": {"preset": preset}, "training": {
            "micro_batch": 8, "global_batch": 64, "sequence": 4096, "precision": "megatron-bf16"},
            "parallel": {"strategy": "zero1"}, "software": {"framework": "megatron", "year": year}}, "")
        wider = [one.set for one in candidates(of) if one.group == "tensor"]
        assert wider and all(sets.get("parallel.sequence_parallel") is cut for sets in wider)


def test_changes_that_help_come_cheapest_first() -> None:
    result = job()
    assert not result.memory.fits
    changes = result.changes
    fitting = [change for change in changes if change.fits]
    assert fitting
    costs = [c.gpu_time for c in fitting if c.gpu_time is not None]
    assert len(costs) == len(fitting)
    assert costs == sorted(costs)
    assert all(not c.fits for c in changes[len(fitting):])
    assert all(change.headroom_bytes > result.memory.headroom_bytes for change in changes)
    assert {"training.recompute", "training.micro_batch"} <= {field for c in changes for field in c.set}
    assert result.to_json()["memory"]["changes"][0] == fitting[0].to_json()


def test_a_change_does_what_it_says() -> None:
    change = next(c for c in job().changes if "training.micro_batch" in c.set)
    again = job(**change.set)
    assert again.memory.headroom_bytes == change.headroom_bytes
    assert again.step_time_s == change.step_time_s


@pytest.mark.whole
@pytest.mark.parametrize(("strategy", "written"), [
    ("ddp", {}), ("zero1", {}), ("fsdp", {"parallel.context": 2}),
    ("zero3", {"training.global_batch": None, "training.micro_steps": 4})])
def test_every_change_is_what_the_command_line_makes_of_it(strategy: str, written: dict[str, Any]) -> None:
    """Also where a default follows from what is changed: FSDP's gradients are reduced in every micro-step."""
    sets = {"parallel.strategy": strategy, "model.layers": 32, "model.hidden": 4096, "model.heads": 32, **written}
    changes = job(**sets).changes
    assert {change.fits for change in changes} == {True, False}
    for change in changes:
        again = job(**(sets | change.set))
        assert (again.memory.fits, again.memory.missing_bytes) == (change.fits, change.missing_bytes)
        headroom = again.memory.headroom_bytes if again.memory.fits_device else -again.memory.missing_bytes
        assert (headroom, again.scenario.gpus) == (change.headroom_bytes, change.gpus)
        assert change.step_time_s in (None, again.step_time_s)


@pytest.mark.whole
def test_a_large_model_under_ddp_is_sharded_in_half_precision_and_recomputed() -> None:
    """13B on 16 A100-40GB: 8 tensor ranks and offload made it fit too, at ten times the step."""
    result = sim.run(resolve({
        "name": "13b", "cluster": {"topology": "p4d", "nodes": 2}, "model": {"preset": "llama-2-13b"},
        "training": {"micro_batch": 4, "global_batch": 512, "sequence": 4096}, "parallel": {"strategy": "ddp"}}))
    best = result.changes[0]
    assert best.fits and best.count == 2 and (best.slowdown or 9.0) < 1.3
    blocks = best.set.pop("training.recompute")
    assert best.set == {"parallel.strategy": "fsdp", "training.precision": "fsdp-bf16"} and 30 < blocks["layers"] < 40
    whole = {**best.set, "training.recompute": "full"}
    assert next(c for c in result.changes if c.set == whole).slowdown == pytest.approx(best.slowdown, rel=0.05)
    screen = io.StringIO()
    Console(file=screen, width=200).print(*changes_lines(result.changes), sep="\n")
    assert "--set parallel.strategy=fsdp --set training.precision=fsdp-bf16" in screen.getvalue()


def test_a_framework_with_16_bit_parameters_of_its_own_is_advised_to_have_them() -> None:
    """Megatron under the default precision keeps a copy of the weights for every micro-batch in flight."""
    result = sim.run(resolve({
        "name": "70b", "cluster": {"topology": "dgx-h100", "nodes": 16}, "model": {"preset": "llama-2-70b"},
        "training": {"micro_batch": 1, "global_batch": 512, "sequence": 4096},
        "parallel": {"strategy": "zero1", "tensor": 8, "pipeline": 2}, "software": {"framework": "megatron"}}))
    assert any("megatron-bf16" in text for text in result.warnings)
    (own,) = [one for one in result.changes if one.set == {"training.precision": "megatron-bf16"}]
    assert own.fits and own.count == 1 and (own.slowdown or 9.0) < 1.0


def offloaded(**sets: Any) -> Result:
    return sim.run(resolve({
        "name": "small host", "cluster": {"topology": "dgx-2", "gpus_per_node": 1},
        "model": {"preset": "gpt3-1.3b"},
        "training": {"micro_batch": 1, "global_batch": 1, "sequence": 1024, "precision": "mixed-fp16"},
        "parallel": {"strategy": "zero2", "offload": {"optimizer": "cpu"}},
        "software": {"framework": "deepspeed", "year": 2024}}, "small", sets))


def test_a_host_that_is_too_small_is_what_is_advised_about() -> None:
    result = offloaded(**{"cluster.topology.host.memory": "12 GB"})
    assert result.memory.fits_device and not result.memory.fits
    assert result.changes and all(change.missing_bytes == 0 for change in result.changes)
    (disks,) = (change for change in result.changes if "NVMe" in change.what)
    assert disks.fits and disks.set == {"parallel.strategy": "zero3", "parallel.offload.optimizer": "nvme"}
    batch, sequence = result.largest
    assert batch.value > 1 and batch.ends == GPU_ALONE and sequence.value == 2048  # its learned positions
    to = Console(file=io.StringIO(), width=200)
    render(result, to)
    text = to.file.getvalue()  # type: ignore[attr-defined]
    lacks = size(result.memory.host_missing_bytes)
    assert f"fits the GPU but not the host, which lacks {lacks}" in text and "by the GPU's memory alone" in text
    assert "bound by copies to the host and its optimizer" in text


def test_what_the_allocator_wastes_is_no_part_of_what_is_too_much() -> None:
    result = job(**{"training.micro_batch": 16})
    memory = result.memory
    assert memory.missing_bytes == memory.use.peak_allocated_bytes - memory.limit_bytes > 0
    assert memory.missing_bytes + memory.reserved.fragmentation_bytes == -memory.headroom_bytes
    closest = [change for change in result.changes if not change.fits]
    assert closest == sorted(closest, key=lambda change: change.missing_bytes)
    (line,) = changes_lines([replace(closest[0], missing_bytes=3 * 2**30)])
    assert "3 GiB too much" in str(line)
    (line,) = changes_lines([replace(closest[0], missing_bytes=0, host_missing_bytes=2**30)])
    assert "with which the host of a node lacks 1 GiB" in str(line)


def test_a_line_of_options_ends_where_an_option_does() -> None:
    sets = {f"training.field_{number}": 12345 for number in range(6)}
    lines = [str(line)[4:] for line in changes_lines([Change(sets, "much", True, 1, 8, 1.0, 1.0, 1.0)])[2:]]
    assert len(lines) > 1 and all(line.startswith("--set ") and len(line) <= 80 for line in lines)
    assert " ".join(lines).split() == [word for field in sets for word in ("--set", f"{field}=12345")]


def test_what_only_a_search_would_find_says_so() -> None:
    change = Change({}, "8 stages", True, 1, 8, 1.0, 2.0, 2.0)
    assert "drystep size" in str(changes_lines([change])[-1])
    assert "ways to serve" in str(changes_lines([change], request=True)[-1])
    assert "drystep size" not in str(changes_lines([replace(change, gpu_time=1.1)])[-1])
    assert "drystep size" in str(changes_lines([replace(change, fits=False)])[0])
    assert "neither alone nor up to three at once" in str(changes_lines([replace(change, fits=False)])[0])


def gpt2(**changes: Any) -> Result:
    return sim.run(resolve({
        "name": "gpt2", "cluster": {"topology": "single-t4"}, "model": {"preset": "gpt2"},
        "training": {"micro_batch": 16, "global_batch": 64, "sequence": 1024, "precision": "amp-fp16"}}, "", changes))


def test_of_a_group_the_mildest_with_room_stands_beside_one_without() -> None:
    """On a GPU that tensors of eight sequences fit and what the allocator caches for them does not, four are told
    of too."""
    eight = gpt2(**{"training.micro_batch": 8}).memory
    filled = eight.device_used_bytes - eight.fragmentation_bytes // 2
    small = {"cluster.topology.gpu": {"like": "t4", "usable_memory_gib": filled / 2**30}}
    sizes = {change.set["training.micro_batch"]: change for change in gpt2(**small).changes
             if change.fits and "training.micro_batch" in change.set and change.count == 1}
    assert set(sizes) == {8, 4}
    assert not sizes[8].roomy and sizes[8].headroom_bytes == 0
    assert sizes[4].roomy and sizes[4].headroom_bytes > 0


def test_words_say_what_takes_the_rest() -> None:
    """An allocator whose cache fills the GPU does not run short for that; pages of unified memory give way."""
    def line(filled: str, headroom_bytes: int = 0) -> str:
        change = Change({}, "8 stages", True, headroom_bytes, 8, 1.0, 1.0, 1.0, filled=filled)
        return str(changes_lines([change])[1])

    assert "short" not in line("cache") and "allocator's cache takes what is left" in line("cache")
    assert "short" not in line("pages") and "unified memory" in line("pages")
    assert "runs short" in line("short") and "may run short" in line("short", 2**20)
    assert line("", 2**30) == "  8 stages: 1 GiB free, step +0%"


def test_the_cheapest_with_room_is_told_and_nothing_tighter_behind_it() -> None:
    def told(*changes: Change) -> str:
        return "\n".join(str(line) for line in changes_lines(changes))

    def change(what: str, gpu_time: float, filled: str = "") -> Change:
        return Change({}, what, True, 0 if filled else 2**30, 8, 1.0, 1.0, gpu_time, filled=filled)

    tight = [change(f"change {number}", 1.0 + number / 10, "cache") for number in range(7)]
    text = told(*tight, change("one with room", 1.9), change("a tighter one", 1.95, "short"))
    assert "one with room: 1 GiB free" in text and "change 3" in text and "change 4" not in text
    assert "a tighter one" not in text and "and 4 more, dearer ones or such that leave nothing free" in text
    text = told(change("one with room", 0.9), *tight)
    assert "change" not in text and "and 7 more" in text


def test_what_a_request_costs_is_told_by_the_token() -> None:
    """A quarter of the sequences take half as long, twice as long each; and tensor ranks that take replicas' GPUs."""
    def served(**changes: Any) -> Result:
        return sim.run(resolve({
            "name": "served", "cluster": {"topology": "pcie-8x-rtx4090", "gpus_per_node": 2},
            "model": {"preset": "llama-3-8b"}, "training": {
                "precision": "pure-bf16", "mode": {"inference": {"prompt": 1024, "generate": 64, "batch": 64}}},
            "parallel": {"strategy": "ddp"}, "software": {"year": 2024, "compile": True}}, "", changes))

    result = served()
    fitting = [change for change in result.changes if change.fits]
    by_fields = {tuple(change.set): change for change in fitting}
    for fields, replicas in ((("training.mode.inference.batch",), 2), (("parallel.tensor",), 1)):
        change = by_fields[fields]
        again = served(**change.set)
        run = again.scenario.training.mode.inference  # type: ignore[union-attr]
        assert change.step_time_s == again.step_time_s and again.scenario.data_parallel == replicas
        per_token = again.step_time_s / (replicas * run.batch) / (result.step_time_s / (2 * 64))
        assert change.gpu_time == pytest.approx(per_token)
    assert (by_fields["training.mode.inference.batch",].gpu_time or 0.0) > 1.0
    assert [c.gpu_time for c in fitting] == sorted(c.gpu_time or 0.0 for c in fitting)
    text = "\n".join(str(line) for line in changes_lines(result.changes, request=True))
    assert "request -" in text and "GPU time of a token +" in text


def test_every_change_is_lowered_once_and_only_what_fits_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    result = job()
    lowered: list[Scenario] = []
    simulated: list[Scenario] = []

    class Counted(Trial):
        def __init__(self, scenario: Scenario) -> None:
            lowered.append(scenario)
            super().__init__(scenario)

        def step_time_s(self) -> float:
            simulated.append(self.scenario)
            assert self.memory.fits
            return super().step_time_s()

    monkeypatch.setattr("sim.api.Trial", Counted)
    monkeypatch.setattr("sim.beside.processors", lambda: 1)  # what other processes simulate is not counted here
    changes = result.changes
    assert len(simulated) == sum(change.fits for change in changes)
    assert all(one != other for i, one in enumerate(lowered) for other in lowered[:i])
    before = len(lowered)
    assert result.largest
    assert all(one != result.scenario for one in lowered[before:])


@pytest.mark.whole
@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
def test_simulated_side_by_side_the_advice_is_the_same() -> None:
    code = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from sim import beside
from sim.report.advice import trials
from test_advice import job
result, found = job(), []
for count, trials._LONG_S in ((1, 0.3), (2, 0.0)):
    beside.processors = lambda: count
    found.append(json.dumps([change.to_json() for change in result.advisor()]))
print(found[0] == found[1], len(found[0]) > 500)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_candidates_are_real_changes() -> None:
    for changes in ({}, {"parallel.strategy": "fsdp", "parallel.sharding_factor": 4}, {"parallel.strategy": "zero1"}):
        scenario = job(**changes).scenario
        for _, what, sets in candidates(scenario):
            same = []
            for path, value in sets.items():
                level: Any = scenario
                for name in path.split("."):
                    level = getattr(level, name)
                same.append(level == value)
            assert what and sets and not all(same), what
            assert not any(one for path, one in zip(sets, same, strict=True) if not path.startswith("parallel.")), sets


def test_a_node_is_filled_before_another_is_asked_for() -> None:
    part = resolve({"name": "part", "cluster": {"topology": "dgx-h100", "gpus_per_node": 2},
                    "model": {"preset": "llama-2-13b"}, "training": {"micro_batch": 1, "global_batch": 64,
                                                                     "sequence": 2048, "precision": "fsdp-bf16"},
                    "parallel": {"strategy": "fsdp"}})
    more = {one.what: {name: value for name, value in one.set.items() if name.startswith("cluster")}
            for one in candidates(part) if one.group == "nodes"}
    assert more["4 GPUs instead of 2"] == {"cluster.gpus_per_node": 4}
    assert more["8 GPUs instead of 2"] == {"cluster.gpus_per_node": 8}
    assert all(sets == {"cluster.gpus_per_node": 8, "cluster.nodes": int(what.split()[3])}
               for what, sets in more.items() if " nodes " in what)
    whole = part.model_copy(update={"cluster": part.cluster.model_copy(update={"gpus_per_node": 8})})
    assert [one.set["cluster.nodes"] for one in candidates(whole) if one.group == "nodes"][:1] == [2]


def test_one_sequence_is_no_sequences() -> None:
    scenario = resolve({
        "name": "x", "cluster": {"topology": "single-h100-80g-sxm"}, "model": {"preset": "llama-2-7b"},
        "training": {"precision": "pure-bf16", "mode": {"inference": {"prompt": 64, "generate": 4, "batch": 4}}}})
    assert [one.what for one in candidates(scenario) if one.group == "batch"] == [
        "2 sequences at once instead of 4", "1 sequence at once instead of 4"]


def test_fewer_bits_than_fp8_are_multiplied_in_16() -> None:
    """Products in fp8 go with weights in fp8: the change to 4 bits says both, and lowers."""
    scenario = resolve({
        "name": "x", "cluster": {"topology": "single-h100-80g-sxm"}, "model": {"preset": "llama-2-7b"},
        "training": {"micro_batch": 1, "micro_steps": 1, "sequence": 128,
                     "precision": {"name": "fp8", "parameters": "fp8"},
                     "mode": {"inference": {"prompt": 64, "generate": 4, "batch": 1}}}})
    (sets,) = [one.set for one in candidates(scenario) if one.group == "weights"]
    assert sets["training.precision.parameters"] == "int4" and sets["training.precision.compute"] == "bf16"
    assert sim.run(resolve(dump(scenario), "x", sets)).memory.fits


def test_what_says_nothing_beside_another_is_no_part_of_several() -> None:
    """FSDP is part of FSDP with its parameters in host memory: the two at once are the latter."""
    scenario, tried = job(**{"training.micro_batch": 1}).scenario, []

    def changed(sets: Any) -> Any:
        tried.append(dict(sets))
        return Changed(scenario, sets)

    class Short:
        memory = SimpleNamespace(use=SimpleNamespace(peak_allocated_bytes=1), fits=False, missing_bytes=1,
                                 host_missing_bytes=0)

        def work_s(self) -> float:
            return 1.0

    trials = Trials(changed, lambda _: Short(), 1.0, scenario)  # type: ignore[arg-type, return-value]
    fsdp, offload, half = {"strategy": "fsdp"}, {"offload": "cpu"}, {"precision": "fsdp-bf16"}
    singles = [trials.one((str(len(sets)) + str(place), sets)) for place, sets in
               enumerate((fsdp, {**fsdp, **offload}, half))]
    tried.clear()
    together([one for one in singles if one is not None], trials)
    assert tried == [{**fsdp, **half}, {**fsdp, **offload, **half}]


@pytest.mark.whole
def test_where_no_single_change_suffices_two_at_once_do() -> None:
    result = job(**{"training.micro_batch": 32, "model.layers": 96, "training.sequence": 4096})
    assert not result.memory.fits
    fitting = [change for change in result.changes if change.fits]
    assert fitting
    assert {change.count for change in fitting} == {2, 3}  # two alone are dear
    assert all(" and " in change.what and change.step_time_s for change in fitting)
    assert [c.gpu_time for c in fitting] == sorted(c.gpu_time or 0.0 for c in fitting)
    here = [change for change in fitting if not change.more_gpus]
    roomy = min(c.gpu_time or 0.0 for c in here if c.roomy)
    assert all(c.roomy or (c.gpu_time or 0.0) < roomy for c in here), "dearer without room than with it"


@pytest.mark.whole
def test_pairs_are_the_cheapest_not_the_mildest() -> None:
    """13B on 32 A100-40GB: gathers in bf16 cost nothing and recomputation a quarter of compute; eight tensor ranks in
    place of the latter fit more closely and cost a third more."""
    result = sim.run(resolve({
        "name": "13b", "cluster": {"topology": "dgx-a100-40g", "nodes": 4}, "model": {"preset": "llama-2-13b"},
        "training": {"micro_batch": 2, "global_batch": 256, "sequence": 4096}, "parallel": {"strategy": "fsdp"}}))
    fewest, whole, cut, *_ = [change for change in result.changes if not change.more_gpus]
    assert whole.set == {"training.recompute": "full", "training.precision": "fsdp-bf16"}
    assert set(fewest.set) == set(whole.set) and 0 < fewest.set["training.recompute"]["layers"] < 40
    assert cut.set == {"parallel.tensor": 8, "training.precision": "fsdp-bf16"} and cut.headroom_bytes > 0
    assert (fewest.gpu_time or 9.0) < (whole.gpu_time or 9.0) < 1.1 < 1.3 < (cut.gpu_time or 0.0)
    assert "full recomputation of" in fewest.what and " and gathers in bf16" in fewest.what


@pytest.mark.whole
def test_three_changes_where_two_leave_no_room() -> None:
    """13B with eight sequences on eight A100-40GB: two changes that fit make the allocator run short all the time."""
    result = sim.run(resolve({
        "name": "13b", "cluster": {"topology": "dgx-a100-40g"}, "model": {"preset": "llama-2-13b"},
        "training": {"micro_batch": 8, "global_batch": 64, "sequence": 4096}, "parallel": {"strategy": "fsdp"}}))
    best = result.changes[0]
    assert best.count == 3 and best.fits and not best.more_gpus and (best.slowdown or 9.0) < 1.4
    assert best.set == {"training.recompute": "full", "training.precision": "fsdp-bf16", "training.micro_batch": 1}
    assert not [c for c in result.changes if c.fits and c.count == 2], "five times the step, without room"
    again = sim.run(resolve(dump(result.scenario), "13b", best.set))
    assert again.memory.fits and again.step_time_s == best.step_time_s
    assert "no single change makes it fit; three at once would" in str(changes_lines(result.changes)[0])


@pytest.mark.whole
def test_beside_another_change_as_few_nodes_as_suffice_are_asked_for() -> None:
    """70B on eight H100: alone eight times the nodes do not suffice; with full recomputation fewer do."""
    result = sim.run(resolve({
        "name": "70b", "cluster": {"topology": "dgx-h100"}, "model": {"preset": "llama-3-70b"},
        "training": {"micro_batch": 1, "global_batch": 64, "sequence": 4096, "precision": "fsdp-bf16"},
        "parallel": {"strategy": "fsdp"}}))
    on_more = [change for change in result.changes if change.fits and change.more_gpus]
    nodes = {change.set["cluster.nodes"] for change in on_more}
    assert 8 in nodes and min(nodes) < 8
    assert any(change.fits and not change.more_gpus for change in result.changes)


@pytest.mark.whole
def test_what_keeps_the_gpus_stands_before_what_needs_more() -> None:
    """7B on four consumer cards: states in host memory, or more nodes."""
    result = sim.run(resolve({
        "name": "7b", "cluster": {"topology": "pcie-8x-rtx4090", "gpus_per_node": 4}, "model": {"preset": "llama-2-7b"},
        "training": {"micro_batch": 1, "global_batch": 64, "sequence": 2048}, "parallel": {"strategy": "ddp"}}))
    fitting = [change for change in result.changes if change.fits]
    (here,) = [change for change in fitting if not change.more_gpus]
    assert here.count == 1 and here.set == {
        "parallel.strategy": "fsdp", "training.precision": "fsdp-bf16", "parallel.offload.parameters": "cpu",
        "parallel.offload.optimizer": "cpu"}
    assert all(change.gpus > 4 for change in fitting if change.more_gpus)
    screen = io.StringIO()
    Console(file=screen, width=200).print(*changes_lines(result.changes), sep="\n")
    text = screen.getvalue()
    assert text.index("it would fit with") < text.index(here.what) < text.index("on more GPUs it would fit with")
    without = [change for change in result.changes if change.more_gpus]
    assert "nothing that was tried makes it fit on as many GPUs" in str(changes_lines(without)[0])


def test_under_sharding_half_gathers_and_reductions_of_every_micro_step_are_tried() -> None:
    scenario = job(**{"parallel.strategy": "fsdp", "parallel.reduce_every_micro_step": False,
                      "training.micro_batch": 4}).scenario
    sets = {group: given for group, _, given in candidates(scenario)}
    assert sets["gathers"] == {"training.precision": "fsdp-bf16"}
    assert sets["reduction"] == {"parallel.reduce_every_micro_step": True}


def test_the_fewest_blocks_leave_the_allocator_at_rest() -> None:
    """13B on 40 GB: with 9 of 40 blocks recomputed the tensors fit but the allocator gives back and takes again, which
    costs more than recomputing everything; the next one costs what it recomputes."""
    def large(**sets: Any) -> Result:
        return sim.run(resolve({
            "name": "13B", "cluster": {"topology": "p4d", "nodes": 8}, "model": {"preset": "llama-2-13b"},
            "training": {"micro_batch": 1, "global_batch": 64, "sequence": 4096, "precision": "fsdp-bf16"},
            "parallel": {"strategy": "fsdp"}, "software": {"framework": "pytorch", "year": 2025}}, "13B", sets))

    change = next(c for c in large().changes if isinstance(c.set.get("training.recompute"), dict))
    count = change.set["training.recompute"]["layers"]
    assert change.fits and not large(**{"training.recompute": {"layers": count}}).memory.short
    fewer = large(**{"training.recompute": {"layers": count - 1}})
    assert not fewer.memory.fits or fewer.memory.short
    full = next(c for c in large().changes if c.set.get("training.recompute") == "full")
    assert change.gpu_time is not None and full.gpu_time is not None and change.gpu_time < full.gpu_time


def test_of_a_pipeline_blocks_are_counted_on_each_rank() -> None:
    """`training.recompute.layers` is of each rank (Megatron's --recompute-num-layers of each of its chunks)."""
    def asked(**parallel: Any) -> list[tuple[str, int]]:
        tries: list[tuple[str, int]] = []

        def tried(what: str, sets: Any) -> None:
            tries.append((what, sets["training.recompute"]["layers"]))

        fewest_blocks(job(**{"training.micro_batch": 1, **parallel}).scenario, tried)
        return tries

    assert asked()[0] == ("full recomputation of 12 of 24 blocks", 12)
    ranks = asked(**{"parallel.pipeline": 4, "parallel.strategy": "ddp", "software.framework": "megatron"})
    assert ranks[0] == ("full recomputation of 6 of each pipeline rank's blocks", 6)
    assert max(count for _, count in ranks) < 2 * 24 // 4


def test_lora_without_room_is_told_of_qlora_and_of_what_leaves_room() -> None:
    """Full recomputation alone only just fits; a frozen base in 4 bits frees what it takes away when what stays in 16
    bits is left in them."""
    def predicted(**changes: Any) -> Result:
        return sim.run(resolve({
            "name": "lora", "cluster": {"topology": "single-rtx4090"}, "model": {"preset": "llama-3-8b"},
            "training": {"micro_batch": 2, "global_batch": 16, "sequence": 2048, "precision": "amp-bf16", "finetune": {
                "method": "lora", "rank": 16, "base": "bf16", "targets": "all-linear"}},
            "software": {"framework": "pytorch", "year": 2025, "modules": "transformers"}}, "lora", changes))

    fitting = [change for change in predicted().changes if change.fits]
    assert any(c.count == 1 for c in fitting) and all(c.headroom_bytes <= 0 for c in fitting if c.count == 1)
    best = fitting[0]
    assert best.headroom_bytes > 0 and best.set["training.finetune.base"] == "nf4"
    with_it = predicted(**best.set)
    assert with_it.memory.fits and with_it.memory.headroom_bytes == best.headroom_bytes
    assert with_it.step_time_s == pytest.approx(best.step_time_s)


def test_what_trains_few_weights_is_told_where_nothing_else_fits() -> None:
    """7B in full on a GPU of 24 GB: its states alone are 114 GB."""
    def predicted(**changes: Any) -> Result:
        return sim.run(resolve({
            "name": "7b", "cluster": {"topology": "single-rtx4090"}, "model": {"preset": "qwen2.5-7b"},
            "training": {"micro_batch": 4, "global_batch": 64, "sequence": 2048},
            "software": {"year": 2025, "modules": "transformers"}}, "", changes))

    lora, qlora = (change for change in predicted().changes if change.fits)
    assert (lora.set["training.finetune.method"], qlora.set["training.finetune.method"]) == ("lora", "qlora")
    assert lora.what.startswith("LoRA of rank 16 instead of training all weights") and "frozen weights" in qlora.what
    for change in (lora, qlora):
        again = predicted(**change.set)
        assert again.memory.roomy and again.step_time_s == change.step_time_s
    assert not [c for c in job().changes if "training.finetune.method" in c.set], "others make that one fit"


def test_few_weights_under_fsdp_are_told_where_no_gpu_holds_the_frozen_ones() -> None:
    """32B over two cards of 24 GB, as answer.ai's FSDP-QLoRA: 16 GB of weights in 4 bits, half of them on each."""
    def predicted(**changes: Any) -> Result:
        return sim.run(resolve({
            "name": "32b", "cluster": {"topology": "pcie-8x-rtx3090", "gpus_per_node": 2},
            "model": {"preset": "qwen2.5-32b"}, "training": {"micro_batch": 1, "global_batch": 16, "sequence": 1024,
                                                            "recompute": "full"},
            "software": {"year": 2025, "modules": "transformers"}}, "", changes))

    (best, *_) = (change for change in predicted().changes if change.fits and not change.more_gpus)
    assert best.set["training.finetune.method"] == "qlora" and best.set["parallel.strategy"] == "fsdp"
    assert predicted(**best.set).memory.roomy


@pytest.mark.whole
def test_two_lesser_changes_stand_beside_a_dear_one() -> None:
    def predicted(**changes: Any) -> Result:
        return sim.run(resolve({
            "name": "dear", "cluster": {"topology": "dgx-a100-40g", "nodes": 1}, "model": {"preset": "llama-3-8b"},
            "training": {"micro_batch": 2, "global_batch": 16, "sequence": 4096}, "parallel": {"strategy": "fsdp"},
            "software": {"year": 2024}}, "dear", changes))

    fitting = [change for change in predicted().changes if change.fits]
    alone = [c for c in fitting if c.count == 1]
    assert alone and min(c.gpu_time or 0.0 for c in alone) > 1.3, "full recomputation leaves the allocator short"
    assert fitting[0].count == 2
    for both in (c for c in fitting if c.count == 2):
        as_roomy = [a for a in alone if a.headroom_bytes > 0 or both.headroom_bytes <= 0]
        assert all((both.gpu_time or 0.0) < (a.gpu_time or 0.0) for a in as_roomy)
    both = predicted(**fitting[0].set)
    assert both.memory.fits and both.step_time_s == fitting[0].step_time_s
    text = "\n".join(str(line) for line in changes_lines(fitting))
    assert "it would fit with" in text and "no single change" not in text
