"""What the space of requests holds: layouts, replicas, formats, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.errors import UserError
from sim.scenario import Scenario, resolve
from sim.sizing import Choice, Wish, size
from sim.sizing.space.layouts import with_parts
from sim.sizing.space.requests import BATCHES, ServedSpace, build_served, own_served, served_bases

ENGINE: dict[str, Any] = {"year": 2024, "compile": True, "cuda_graphs": True}


def scenario(**changes: Any) -> Scenario:
    training = {"micro_batch": 1, "sequence": 512, "precision": "pure-bf16",
                "mode": {"inference": {"prompt": 64, "generate": 8, "batch": 5}}} | changes.pop("training", {})
    small = {"name": "small", "cluster": {"topology": "dgx-h100"}, "model": {"preset": "llama-3-8b", "layers": 4},
             "training": training, "software": ENGINE}
    return resolve(small | changes, "small")


def space_of(one: Scenario, choice: Choice, replicas: bool = False, clusters: tuple[str | None, ...] = (None,),
             offload: tuple[str, ...] = ()) -> ServedSpace:
    return build_served(with_parts(served_bases(one, clusters, choice, offload), choice), choice, replicas)


def cuts(space: ServedSpace) -> set[tuple[int, int, int, int]]:
    return {(int(gpus), *(int(space.columns[name][row]) for name in ("tensor", "pipeline")), space.replicas(row))
            for row, gpus in enumerate(space.gpus)}


def test_more_replicas_are_rows_only_where_tokens_per_second_are_asked_for() -> None:
    choice = Choice([1, 2, 4])
    alone = {(1, 1, 1, 1), (2, 2, 1, 1), (2, 1, 2, 1), (4, 4, 1, 1), (4, 2, 2, 1), (4, 1, 4, 1)}
    assert cuts(space_of(scenario(), choice)) == alone
    several = {(2, 1, 1, 2), (4, 1, 1, 4), (4, 2, 1, 2), (4, 1, 2, 2)}
    space = space_of(scenario(), choice, True)
    assert cuts(space) == alone | several
    row = next(row for row in range(len(space)) if space.replicas(row) == 4 and space.columns["batch"][row] == 5)
    assert space.tokens[row] == 4 * 5 * 8
    assert cuts(space_of(scenario(), Choice([4]))) == {one for one in alone | several if one[0] == 4}


def test_replicas_count_in_tokens_and_cost() -> None:
    """Eight copies on one GPU each make eight times the tokens of one, at its cost (but for the slowest of eight)."""
    choice = Choice([1, 8], batch=[4], tensor=[1], pipeline=[1])
    rows = {row["gpus"]: row for row in size(scenario(), choice, Wish("throughput"), top=2).best}
    assert rows[8]["replicas"] == 8 and rows[1]["replicas"] == 1
    assert rows[8]["tokens_per_second"] == pytest.approx(8 * rows[1]["tokens_per_second"], rel=0.03)
    assert rows[8]["cost"] == pytest.approx(rows[1]["cost"], rel=0.03)
    assert rows[1]["cost"] == pytest.approx(1e6 / rows[1]["tokens_per_second"] / 3600)


def test_batches_are_the_scenarios_own_and_steps_of_a_half() -> None:
    assert space_of(scenario(), Choice([1])).batches == sorted({*BATCHES, 5})
    assert space_of(scenario(), Choice([1], batch=[7])).batches == [7]


@pytest.mark.parametrize(("name", "stored", "compute"), [
    ("bf16", "bf16", "bf16"), ("fp16", "fp16", "fp16"), ("int4", "int4", "bf16"), ("fp8", "fp8", "bf16"),
    ("fp8-products", "fp8", "fp8"), ("int8-products", "int8", "int8")])
def test_what_a_name_of_weights_means(name: str, stored: str, compute: str) -> None:
    """Of a scenario whose products are in fp8 the activations go on in 16 bits."""
    for precision in ("pure-bf16", {"name": "fp8", "parameters": "fp8"}):
        (base,) = served_bases(scenario(training={"precision": precision}), (None,), Choice([1], weights=[name]), ())
        assert (base.training.precision.parameters, base.training.precision.compute) == (stored, compute)


def test_a_cluster_without_the_tensor_cores_has_no_rows_of_their_products() -> None:
    choice = Choice([1], batch=[1], weights=["bf16", "fp8-products"])
    space = space_of(scenario(), choice, clusters=("dgx-h100", "dgx-a100-40g"))
    kinds = space.kinds()
    assert kinds["weights fp8-products"].sum() == 1 and (kinds["weights fp8-products"] & kinds["dgx-h100"]).sum() == 1
    with pytest.raises(UserError, match="has no tensor cores for fp8"):
        space_of(scenario(), Choice([1], weights=["fp8-products"]), clusters=("dgx-a100-40g",))


def test_weights_are_shared_out_or_outside_where_a_framework_does_it() -> None:
    eager = {"year": 2024, "fsdp": 2}
    sharded = {(one.parallel.strategy, one.parallel.sharding_factor, one.parallel.tensor)
               for one in space_of(scenario(software=eager), Choice([4], pipeline=[1])).layouts}
    assert {("fsdp", 2, 1), ("fsdp", 4, 1), ("ddp", 1, 1)} <= sharded
    assert all(one.parallel.strategy == "ddp" for one in space_of(scenario(), Choice([4])).layouts)  # in graphs
    space = space_of(scenario(software={"framework": "deepspeed", "year": 2024}), Choice([1, 4], batch=[1]),
                     offload=("none", "parameters"))
    kinds = space.kinds()
    assert {space.sets(row)["parallel.strategy"] for row in np.flatnonzero(kinds["weights outside"])} == {"zero3"}
    assert {int(space.gpus[row]) for row in np.flatnonzero(kinds["weights outside"])} == {1, 4}  # ZeRO-Inference


def test_experts_are_whole_on_tensor_ranks_or_cut() -> None:
    one = scenario(model={"preset": "mixtral-8x7b", "layers": 2})
    space = space_of(one, Choice([4], batch=[1], pipeline=[1]))
    assert {(int(t), int(e)) for t, e in zip(space.columns["tensor"], space.columns["expert"], strict=True)} >= {
        (4, 1), (4, 4)}
    assert space.kinds()["whole experts"].sum() == (space.columns["expert"] > 1).sum()


def test_the_scenarios_own_layout_is_found() -> None:
    one = scenario(parallel={"tensor": 4}, cluster={"topology": "dgx-h100", "gpus_per_node": 4})
    space = space_of(one, Choice([2, 4], weights=["bf16", "int4"]), clusters=(None, "dgx-a100-40g"))
    row = own_served(space, one)
    assert row is not None and space.sets(row)["parallel.tensor"] == 4
    assert space.sets(row)["training.precision.parameters"] == "bf16" and space.columns["batch"][row] == 5
    assert own_served(space_of(one, Choice([2, 4], weights=["int4"])), one) is None
    sharded = scenario(parallel={"strategy": "zero3"}, software={"framework": "deepspeed", "year": 2024})
    row = own_served(space := space_of(sharded, Choice([4, 8])), sharded)
    assert row is not None and space.sets(row)["parallel.strategy"] == "zero3" and space.gpus[row] == 8


@pytest.mark.parametrize(("choice", "wish", "said"), [
    (Choice([8], context=[2]), Wish("cost"), r"parallel\.context is of training"),
    (Choice([8], recompute=["none"]), Wish("cost"), r"training\.recompute is of training"),
    (Choice([8], strategies=["zero1"]), Wish("cost"), "strategy zero1 is of training"),
    (Choice([8]), Wish("cost", budget=5.0), "a deadline and a budget bound a training run"),
    (Choice([8], weights=["int9"]), Wish("cost"), r"'int9' is not one of bf16.*did you mean 'int8'"),
    (Choice([8], kv_cache=["int4"]), Wish("cost"), "'int4' is not one of same, fp8, int8"),
    (Choice([12]), Wish("cost"), r"12 GPUs are neither part of a node nor whole nodes of 8.*multiple of 8"),
    (Choice([3], tensor=[2]), Wish("cost"), "no layout of this model that --only leaves divides the GPUs")])
def test_what_a_request_cannot_be_asked(choice: Choice, wish: Wish, said: str) -> None:
    with pytest.raises(UserError, match=said):
        size(scenario(), choice, wish)


@pytest.mark.parametrize(("choice", "wish", "said"), [
    (Choice([8], batch=[1]), Wish(), "--only training.mode.inference.batch: this is for inference"),
    (Choice([8], weights=["int8"]), Wish(), "--weights: this is for inference"),
    (Choice([8], kv_cache=["fp8"]), Wish(), "--kv-cache: this is for inference"),
    (Choice([8]), Wish(latency_s=1.0), "--latency: this is for inference"),
    (Choice([8]), Wish(first_token_s=1.0), "--first-token: this is for inference"),
    (Choice([8]), Wish(throughput=1.0), "--throughput: this is for inference"),
    (Choice([8]), Wish("latency"), "latency is of inference, and this scenario trains.*time, cost, gpus, energy")])
def test_what_a_step_cannot_be_asked(choice: Choice, wish: Wish, said: str) -> None:
    step = {"name": "s", "cluster": {"topology": "dgx-h100"}, "model": {"preset": "gpt2"},
            "training": {"micro_batch": 1, "global_batch": 16, "sequence": 128}}
    with pytest.raises(UserError, match=said):
        size(resolve(step, "s"), choice, wish)


def test_an_encoder_has_no_tokens_behind_the_first() -> None:
    one = scenario(model={"preset": "bert-large", "layers": 2},
                   training={"mode": {"inference": {"prompt": 64, "batch": 5}}})
    with pytest.raises(UserError, match="latency is of the tokens behind the first, and generate is 0"):
        size(one, Choice([1]), Wish("latency"))
    found = size(one, Choice([1, 2], batch=[1, 8]), Wish("time"))
    assert found.proven and found.front_proven and found.best[0]["time_per_token_s"] == 0
    assert found.best[0]["step_time_s"] == min(row["step_time_s"] for row in found.rows)
