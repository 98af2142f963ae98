"""How many views of every rank's piece ZeRO-3's host takes around its calls; a view takes `Stack.host_view_s`.

Source: deepspeed 0.3.16 to 0.5.10 (blocking) and 0.6.7 to 0.16.9 (streamed) runtime/zero/partition_parameters.py,
runtime/comm/coalesced_collectives.py; the loops of 0.6.7 to 0.16.9 were timed on a driver that does nothing
(tests/driver).
"""

from __future__ import annotations

#: Host time of a rank's piece of a parameter, in views. Of a small one under the blocking coordinator: two narrowed,
#: one flattened. Of one of several that one call brings: one narrowed, then record_stream(current_stream()), as long as
#: two (AllGatherCoalescedHandle.wait; 2.3 and 4.1 us).
VIEWS_OF_A_PIECE = 3


def gather_views(parameters: int, blocking: bool) -> int:
    """Of an all-gather of some parameters: a streamed one narrows once a rank, and takes nothing of a single one."""
    if blocking:
        return 1
    return 0 if parameters == 1 else 1 + VIEWS_OF_A_PIECE * parameters


def reduction_views(gradients: int, blocking: bool) -> int:
    """Of a reduce-scatter of some gradients: `torch.chunk` of what is sent and a slice of each; where several come, the
    slice is put into a list, as long as another (reduce_scatter_coalesced; 5.6 to 6 us a rank of calls that bring one
    to three gradients by turns)."""
    if blocking:
        return 2
    return 1 if gradients == 1 else 1 + 2 * gradients
