"""PyTorch's ring attention: what is gathered, merged and passed on, by hand."""

from __future__ import annotations

import pytest
from ring_slices import HEADS, TOKENS, WIDE, attention, scenario, told

from sim.model.architecture import Operator
from sim.parallel.model import context
from sim.parallel.model.calls import Calls
from sim.program import InlineCall
from sim.work import Kernel

QUERIES, KEYS = TOKENS * HEADS * WIDE, 2 * TOKENS * HEADS * WIDE  # elements; KEYS with the values


def rotated(slices: int, compiled: bool = False) -> Operator:
    """Attention of torchtitan, every head with keys of its own."""
    return attention(scenario(slices, "torchtitan", {
        "parallel.strategy": "fsdp", "training.precision": "pure-bf16", "software.compile": compiled}, kv_heads=HEADS))


def test_outputs_are_merged_in_fp32() -> None:
    """Cast (2 read, 4 written), two differences (8 and 4 each) and a product (4 and 4) a step; back to 16 bits."""
    one = ("ring_merge", (6 + 12 + 8 + 12) * QUERIES)
    assert told(rotated(4).forward) == [("ring_copy", 4.0 * KEYS), ("ring_widened", 6.0 * QUERIES), one, one, one,
                                          ("ring_narrowed", 6.0 * QUERIES)]
    compiled = told(rotated(4, compiled=True).forward)
    assert [moved for name, moved in compiled if name == "ring_merge"] == [10.0 * QUERIES] * 3  # 2 + 4 read, 4 written


def test_gradients_add_up_in_fp32() -> None:
    """Of queries: read 2 and 4, written 4, zeros before the first. Of keys and values: those of the early half added
    (10 an element of it), then both halves copied (8), and copied again to be sent (8)."""
    later = [("ring_query_gradients", 10.0 * QUERIES), ("ring_gradients_arrived", (5 + 8) * KEYS),
             ("ring_packed", 8.0 * KEYS)]
    assert told(rotated(4).backward) == [
        ("ring_copy", 4.0 * KEYS), ("ring_query_gradients", 14.0 * QUERIES), ("ring_key_gradients", 14.0 * KEYS),
        ("ring_packed", 8.0 * KEYS), *later, *later, *later, ("ring_gradients_home", 6.0 * KEYS),
        ("ring_narrowed", 6.0 * QUERIES)]


@pytest.mark.parametrize("slices", [2, 4])
def test_keys_come_at_once_and_gradients_go_round(slices: int) -> None:
    operator, calls = rotated(slices), Calls(("context",))
    assert operator.joint is not None and operator.joint.kind == "rotate"
    forward = context.around(calls, operator.joint, operator.forward, "forward")
    (gather,) = [item for item in forward if isinstance(item, InlineCall)]
    assert (gather.call.kind, gather.call.size_bytes) == ("all_gather", 2 * KEYS * slices)
    assert [k.op for k in gather.beside] == ["attention", "elementwise"] and gather.beside[0].causal
    backward = context.around(calls, operator.joint, operator.backward, "backward")
    first, *sent = [item for item in backward if isinstance(item, InlineCall)]
    assert first.call == gather.call
    assert [(item.call.kind, item.call.size_bytes) for item in sent] == [("send", 4 * KEYS)] * slices
    # the last one has nothing to hide behind, and what comes home waits for it
    assert [bool(item.beside) for item in sent] == [True] * (slices - 1) + [False]
    home = backward[-2]
    assert backward[-3] == sent[-1] and isinstance(home, Kernel) and home.variant == "ring_gradients_home"


def test_every_kernel_runs_once_in_order() -> None:
    operator, calls = rotated(4), Calls(("context",))
    assert operator.joint is not None
    for direction, kernels in (("forward", operator.forward), ("backward", operator.backward)):
        items = context.around(calls, operator.joint, kernels, direction)
        spread = [k for item in items for k in (item.beside if isinstance(item, InlineCall) else (item,))]
        assert tuple(spread) == kernels
