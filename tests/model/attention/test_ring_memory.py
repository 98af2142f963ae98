"""What ring attention holds, saves and makes, by hand: keys and values, steps' outputs, gradients on their way.

Sizes in bytes of half precision: Q of a slice's queries, P of its keys and values together, ROWS of its log-sum-exps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ring_slices import GROUPS, HEADS, TOKENS, WIDE, attention, scenario, stack_of

from sim.model import build
from sim.model.architecture import Layer, Operator
from sim.model.eager import layer_profile
from sim.model.eager.attention.ring import ring
from sim.model.eager.estimate import estimate
from sim.model.eager.profile import Profile
from sim.model.eager.tensors.autograd import Boundary, Run
from sim.model.eager.tensors.storage import Storage
from sim.model.scenario_style import style_of
from sim.model.style import Style
from sim.scenario import Scenario
from sim.software import stack_for

Q, P, ROWS, STATE = 2 * TOKENS * HEADS * WIDE, 2 * 2 * TOKENS * GROUPS * WIDE, 4 * TOKENS * HEADS, 512


def style(slices: int, framework: str, **model: Any) -> Style:
    of = scenario(slices, framework, **model)
    return style_of(of, stack_of(of), 1)


def played(of: Style, pair: int = P) -> tuple[int, int, int, int]:
    """Bytes beside queries, keys and values: highest in forward, kept behind it (without the keys and values that came
    in, where nothing holds them), highest in backward beside the output's gradient, left behind it."""
    run, boundary = Run("", False, True), Boundary()
    query = run.tensor(Q // 2, "bf16", boundary)
    key, value = (run.tensor(pair // 4, "bf16", boundary) for _ in range(2))
    start = run.memory.total
    run.memory.mark()
    out = ring(run, of, query, key, value, TOKENS * HEADS, sums=False)
    forward = run.memory.top - start
    start -= query.storage.size + key.storage.size + value.storage.size
    del query, key, value
    kept = run.memory.total - start
    gradient: Storage | None = run.new(Q // 2, "bf16")
    start = run.memory.total
    run.memory.mark()
    assert out.sink is not None and gradient is not None
    out.sink.receive(run, gradient)
    gradient = None
    boundary.gradient = run.new(1, "fp32")  # gradients are not this test's: drop what comes
    run.nodes[-1].sinks = (_Left(run), _Left(run), _Left(run))
    left = run.nodes[-1].sinks
    run.backward()
    return forward, kept, run.memory.top - start, sum({id(s): s.size for one in left for s in one.got}.values())


class _Left:
    """Keeps what it is given."""

    def __init__(self, run: Run) -> None:
        self.run, self.got = run, list[Storage]()

    def receive(self, run: Run, gradient: Storage) -> None:
        self.got.append(gradient)


@pytest.mark.parametrize("slices", [2, 4])
def test_transformer_engine_by_hand(slices: int) -> None:
    forward, kept, backward, left = played(style(slices, "megatron"))
    buffers, outputs = slices * P, slices * (Q + ROWS)
    assert forward == buffers + outputs + Q + ROWS + slices * STATE
    assert kept == Q + P + Q + ROWS + slices * STATE  # of keys and values the last to come, not those that came in
    assert backward == Q + 4 * P + Q + P + STATE  # dq; two buffers; the last step's own
    assert left == Q + 2 * P  # views of a buffer that holds keys and values too


def test_steps_on_half_a_slice_make_half_of_its_gradients() -> None:
    """Without a mask every step makes all of them."""
    whole = style(2, "pytorch", kind="encoder", positions="learned")
    assert played(whole)[2] - played(style(2, "pytorch"))[2] == P // 2


@pytest.mark.parametrize("slices", [2, 4])
def test_pytorch_by_hand(slices: int) -> None:
    """Forward: all slices, a step's output and four fp32 ones (the sum, the step's, their product, the new sum).
    Backward, in the second step: all slices, what was packed, fp32 queries' gradients, three fp32 pairs (so far, sent,
    coming), the first step's gradients until the second's, on half a slice, are there."""
    forward, kept, backward, left = played(style(slices, "pytorch"))
    assert forward == slices * P + Q + 4 * 2 * Q
    assert kept == Q + P + Q + ROWS + 2 * STATE
    assert backward == slices * P + P + 2 * Q + 3 * 2 * P + Q + P + Q + P // 2 + STATE
    assert left == Q + P


def test_the_least_of_a_ring_by_hand() -> None:
    """Liu et al. 2023, section 3: keys and values at hand and those that come in."""
    forward, kept, backward, left = played(style(4, "ideal"))
    assert forward == P + Q + ROWS + 2 * STATE
    assert kept == Q + P + Q + ROWS + 2 * STATE
    assert backward == 2 * P + Q + P + STATE
    assert left == Q + P


@pytest.mark.parametrize("framework", ["megatron", "pytorch", "ideal"])
@pytest.mark.parametrize("slices", [2, 4, 8])
def test_what_operators_say_of_buffers_is_what_they_come_to(framework: str, slices: int) -> None:
    said = attention(scenario(slices, framework))
    assert said.joint is not None
    pair = 2 * said.joint.elements  # grouped heads are expanded first where the stack does so
    forward, _, backward, _ = played(style(slices, framework), pair)
    saved = Q + ROWS + (pair if framework == "megatron" else 0)
    assert said.buffers[0] == pytest.approx(forward - saved, rel=0.01)
    assert said.buffers[1] == pytest.approx(backward - Q - pair, rel=0.01)


def block(of: Scenario, year: int = 2025) -> Layer:
    stack = stack_for("megatron", year, modules=of.software.modules)
    return next(layer for layer in build(of, stack, 1).stack if layer.kind == "block")


@pytest.mark.parametrize(("year", "held"), [(2023, Q + P // 2), (2025, 0)])
def test_a_block_keeps_no_projection_of_keys_and_values_round_a_ring(year: int, held: int) -> None:
    """Behind the ring nothing reads what the projection made (queries, keys and values in one tensor) or the rotated
    keys: queries and the last slice's keys and values are kept in their place. Without a ring values held it, until
    they were copied."""
    alone, ring = (layer_profile(block(scenario(slices, "megatron"), year), "none", False) for slices in (1, 2))
    assert sum(alone.forward.net) - sum(ring.forward.net) == held - 1 * STATE + STATE


def test_layers_that_are_not_written_down_count_their_buffers() -> None:
    one = block(scenario(8, "megatron"))
    bare = Layer(one.kind, tuple(_bare(op) for op in one.operators), one.input, one.parameters)
    with_, without = (estimate(layer, "none", True) for layer in (one, bare))
    assert sum(with_.forward.peak) - sum(without.forward.peak) == 7 * P + 8 * (Q + ROWS)
    assert born(with_) - born(without) == 4 * P + Q
    assert sum(with_.forward.net) == sum(without.forward.net)


def born(of: Profile) -> int:
    """Bytes made in backward."""
    return sum(size for _, size in of.trace.backward)


def _bare(op: Operator) -> Operator:
    return replace(op, buffers=(0, 0))
