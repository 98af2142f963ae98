"""Ring attention's steps, what puts them together and what travels beside them, by hand."""

from __future__ import annotations

import pytest
from ring_slices import GROUPS, HEADS, TOKENS, WIDE, attention, scenario, told

from sim.parallel.model import context
from sim.parallel.model.calls import Calls
from sim.program import InlineCall
from sim.work import Kernel

QUERIES, KEYS = TOKENS * HEADS * WIDE, 2 * TOKENS * GROUPS * WIDE  # elements; KEYS with the values


def test_each_step_behind_the_first_is_all_queries_on_half_a_slice() -> None:
    shapes = [(k.shape[3:5], k.causal) for k in attention(scenario(4)).forward if k.op == "attention"]
    assert shapes == [((TOKENS, TOKENS), True), *[((TOKENS, TOKENS // 2), False)] * 3]
    backward = [(k.shape[3:5], k.causal) for k in attention(scenario(4)).backward if k.op == "attention"]
    assert backward == shapes[::-1]  # a slice's own keys come round last
    flops = {k.flops for k in attention(scenario(4)).forward if k.op == "attention"}
    assert flops == {4.0 * TOKENS**2 * HEADS * WIDE}


def test_a_window_and_an_encoder_have_equal_steps() -> None:
    for model in ({"window": 128}, {"kind": "encoder", "positions": "learned"}):
        made = [k for k in attention(scenario(2, **model)).forward if k.op == "attention"]
        assert made[0] == made[1]


def test_what_puts_steps_together_by_hand() -> None:
    """Outputs: one scaled (read, write), three added (two read, one written), 2 bytes an element."""
    operator = attention(scenario(4))
    assert told(operator.forward) == [("ring_copy", 4.0 * KEYS), ("ring_merge", 2.0 * (2 + 3 * 3) * QUERIES)]
    copied, added = 4.0, 6.0
    assert told(operator.backward) == [
        ("ring_copy", 4.0 * KEYS),
        ("ring_query_gradients", copied * QUERIES), ("ring_key_gradients", copied * KEYS / 2),
        *[("ring_query_gradients", added * QUERIES), ("ring_key_gradients", added * KEYS / 2)] * 2,
        ("ring_query_gradients", added * QUERIES), ("ring_key_gradients", added * KEYS)]
    assert told(attention(scenario(4, "ideal")).forward) == [] == told(attention(scenario(4, "ideal")).backward)


@pytest.mark.parametrize("slices", [2, 4])
def test_everything_travels_beside_a_step(slices: int) -> None:
    """Forward: keys and values beside all steps but the last. Backward: beside the first; with the gradients of the
    step before beside the next; gradients alone beside the last. Sums of them wait for what comes."""
    operator = attention(scenario(slices))
    assert operator.joint is not None and operator.joint.elements == KEYS
    calls = Calls(("context",))
    forward = context.around(calls, operator.joint, operator.forward, "forward")
    sent = [item for item in forward if isinstance(item, InlineCall)]
    assert [item.call.size_bytes for item in sent] == [2 * KEYS] * (slices - 1)
    assert [len(item.beside) for item in sent] == [1] * (slices - 1)
    backward = context.around(calls, operator.joint, operator.backward, "backward")
    sent = [item for item in backward if isinstance(item, InlineCall)]
    assert [item.call.size_bytes for item in sent] == [2 * KEYS, *[4 * KEYS] * (slices - 2), 2 * KEYS]
    assert all([k.op for k in item.beside] == ["attention", "elementwise"] for item in sent)
    names = [item.variant if isinstance(item, Kernel) else "send" for item in backward]
    assert names == ["ring_copy", *["send", "ring_key_gradients"] * slices]
