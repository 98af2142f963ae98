"""Activations cut along the sequence that are copied on their way between tensor ranks, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sim.model import build
from sim.model.architecture import Operator
from sim.model.eager import KINDS, layer_profile
from sim.model.eager.profile import profile
from sim.model.style import Style
from sim.parallel.model.joints import joints
from sim.program import InlineCall
from sim.scenario import Scenario, resolve
from sim.software import stack_for
from sim.work import Kernel

TOKENS, HIDDEN, FFN, PARTS = 2048, 1024, 4096, 4


def job(framework: str = "torchtitan", sequences: int = 2, **changes: Any) -> Scenario:
    return resolve({
        "name": "x", "cluster": {"topology": "dgx-h100", "gpus_per_node": PARTS},
        "model": {"kind": "decoder", "layers": 2, "hidden": HIDDEN, "heads": 16, "ffn": FFN, "vocab": 32768,
                  "positions": "rotary", "norm": "rmsnorm", "gated_mlp": True, "bias": False, "dropout": False,
                  "tied_embeddings": False},
        "training": {"micro_batch": sequences, "global_batch": sequences, "sequence": TOKENS, "attention": "flash",
                     "precision": "pure-bf16"},
        "parallel": {"strategy": "none", "tensor": PARTS, "sequence_parallel": True},
        "software": {"framework": framework, "year": 2025}}, "t", changes)


def met(scenario: Scenario) -> tuple[Any, dict[str, Operator]]:
    software = scenario.software
    stack = stack_for(software.framework, software.year, software.compile, dict(software.versions),
                      "megatron" if software.framework == "megatron" else "plain")
    sequences = scenario.training.micro_batch
    block = next(layer for layer in build(scenario, stack, sequences).stack if layer.kind == "block")
    made = joints(stack, ("data", "tensor"), sequence=True, pipelined=scenario.parallel.async_tensor, parts=PARTS,
                  sms=132, sequences=sequences)
    return made, {op.name: op for op in block.operators}


def along(items: Any) -> list[Any]:
    """Collectives, copies with their bytes an element of the whole, and sums of gradients, in order."""
    found = []
    for item in items:
        if isinstance(item, InlineCall):
            found.append(item.call.kind)
        elif item.variant == "sequence_cat":
            found.append(item.bytes / item.shape[0])
        elif item.variant == "input_gradient_sum":
            found.append("sum")
    return found


def test_a_cat_stands_behind_each_gather_and_in_front_of_each_scatter() -> None:
    made, block = met(job())
    assert along(made.forward(block["up"])) == ["all_gather", 4.0]
    assert along(made.forward(block["down"])) == [4.0, "reduce_scatter"]
    assert along(made.backward(block["down"])) == ["all_gather", 4.0]
    assert along(made.backward(block["up"])) == ["sum", 4.0, "reduce_scatter"]


def test_compiled_the_sum_of_gradients_is_written_in_pieces() -> None:
    made, block = met(job(**{"software.compile": True}))
    assert along(made.backward(block["up"])) == ["sum", "reduce_scatter"]
    assert along(made.forward(block["down"])) == [4.0, "reduce_scatter"]  # a product's output is not


@pytest.mark.parametrize(("torch", "behind"), [("2.6", [4.0]), ("2.14", [])])
def test_one_gathered_sequence_is_in_one_piece_as_it_comes(torch: str, behind: list[float]) -> None:
    made, block = met(job(sequences=1, **{"software.versions": {"torch": torch}}))
    assert along(made.forward(block["up"])) == ["all_gather", *behind]
    assert along(made.forward(block["down"])) == [4.0, "reduce_scatter"]


@pytest.mark.parametrize(("framework", "changes"), [("megatron", {}), ("torchtitan", {"parallel.async_tensor": True})])
def test_nothing_is_copied_where_the_sequence_comes_first_or_pieces_travel(framework: str, changes: Any) -> None:
    made, block = met(job(framework, **changes))
    items = [i for op in ("up", "down") for way in (made.forward, made.backward) for i in way(block[op])]
    assert not [i for i in items if isinstance(i, Kernel) and i.variant == "sequence_cat"]


def test_a_copy_of_the_whole_stands_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward ends with the second scatter, whose copy is beside the product's output; nothing of it is kept."""
    def forward() -> tuple[int, int]:
        profile.cache_clear()
        made = layer_profile(build(job(), stack_for("torchtitan", 2025), 2).stack[1], "none", True).forward
        at = KINDS.index("activations")
        return made.peak[at], made.net[at]
    copied = forward()
    monkeypatch.setattr(Style, "copies", "none")
    alone = forward()
    profile.cache_clear()
    assert copied[1] == alone[1]
    assert copied[0] - alone[0] == 2 * 2 * TOKENS * HIDDEN
