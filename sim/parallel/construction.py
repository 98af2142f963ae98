"""Tensors that exist only while a job's model and optimizer are made: what they leave behind is cached segments.

PyTorch's allocator keeps what is freed, so that a copy made and dropped before the first step decides where later
tensors find room and how much is reserved. Allocated bytes never see it: the steps' own highest point lies above.
"""

from __future__ import annotations

from collections.abc import Sequence

Events = tuple[tuple[int, int], ...]
#: as `Trace` has them: (number, bytes) where a tensor is born, (number, 0) where it goes

#: How a stack stores parameters (`Stack.parameter_storage`).
APART, FLATTENED, REMAPPED = "apart", "flattened", "remapped"


def moved_into_one(sizes: Sequence[int]) -> Events:
    """Parameters that leave for the host one by one and come back as one flat tensor.

    Source: DeepSpeed runtime/zero/stage_1_and_2.py (stage2.py before 0.5.3), `move_to_cpu(self.fp16_groups[i])`, then
    `flatten_dense_tensors_aligned(...).cuda()`; from 0.8 on the cache is emptied in between, which leaves nothing.

    Args:
        sizes: bytes of each parameter.
    """
    return (*_made(sizes, 1), *_freed(len(sizes), 1), (0, sum(sizes)))


def cloned_into_one(sizes: Sequence[int]) -> Events:
    """Parameters that are cloned and flattened on the device.

    Source: DeepSpeed runtime/fp16/fused_optimizer.py, `_flatten_dense_tensors([p.clone().detach() for p in ...])`, of
    which the model's parameters become views.
    """
    count = len(sizes)
    return (*_made(sizes, 1), *_made(sizes, 1 + count), (0, sum(sizes)), *_freed(count, 1 + count), *_freed(count, 1))


def remapped(sizes: Sequence[int]) -> Events:
    """Parameters that become views of one buffer, which is there before the first of them goes.

    Source: megatron/core/distributed/param_and_grad_buffer.py, `param_data`, with the distributed optimizer; deepspeed
    0.6.7 to 0.14.4 runtime/bf16_optimizer.py, `_update_storage_to_flattened_tensor`.
    """
    return (*_made(sizes, 1), (0, sum(sizes)), *_freed(len(sizes), 1))


def sharded_by_unit(units: Sequence[tuple[Sequence[int], int, int]]) -> Events:
    """Parameters that are whole on the device for as long as their unit is wrapped: each of them, then the unit's flat
    parameter, of which a shard is copied.

    Source: torch 2.3.1 FullyShardedDataParallel with a `device_id` or a `param_init_fn`, run on a driver that does
    nothing (distributed/fsdp/_init_utils.py, _flat_param.py: flatten_tensors, shard).

    Args:
        units: bytes of each unit's parameters, of its flat parameter and of this rank's shard, in order of wrapping.
    """
    events: list[tuple[int, int]] = []
    number = 0
    for sizes, flat, shard in units:
        count = len(sizes)
        events += [*_made(sizes, number), (number + count, flat), *_freed(count, number)]
        events += [(number + count + 1, shard), (number + count, 0)]
        number += count + 2
    return tuple(events)


def widened(narrow: Sequence[int], wide: Sequence[int]) -> Events:
    """Master parameters, each from a narrow copy that then goes: `.clone().float()`.

    Source: DeepSpeed stage_1_and_2.py and fused_optimizer.py; Megatron-LM optimizer.py, `main_param` as a clone, and
    distrib_optimizer.py, `shard_model_param.clone().float()`.
    """
    events: list[tuple[int, int]] = []
    for number, (half, whole) in enumerate(zip(narrow, wide, strict=True)):
        events += [(2 * number, half), (2 * number + 1, whole), (2 * number, 0)]
    return tuple(events)


def stepped(gradients: int, states: Sequence[int]) -> Events:
    """Optimizer states made by a step with zero gradients before training.

    Source: DeepSpeed `initialize_optimizer_states` of all its optimizers (`Stack.states_made_first`).

    Args:
        gradients: bytes of the zero gradients, 0 where there are gradients anyway.
        states: bytes of each state.
    """
    return ((0, gradients), *_made(states, 1), (0, 0)) if gradients else _made(states, 1)


def _made(sizes: Sequence[int], first: int) -> Events:
    return tuple((first + i, size) for i, size in enumerate(sizes))


def _freed(count: int, first: int) -> Events:
    return tuple((first + i, 0) for i in range(count))
