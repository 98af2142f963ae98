"""Training steps of a plain GPT by a PyTorch that thinks it has a GPU; run by `record.py` in the other environment.

Prints a JSON list, for each step: highest allocated bytes, highest reserved bytes, retries so far.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

STEPS = 4


class Block(nn.Module):
    """A block of GPT as its own code has it: one matrix for queries, keys and values, scaled_dot_product_attention."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, s, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(o.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """Embeddings, blocks, norm, head and loss."""

    def __init__(self, hidden: int, layers: int, heads: int, vocab: int, sequence: int, tied: bool) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, hidden), nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.ln_f, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), tokens.view(-1))


def recomputed(model: nn.Module) -> None:
    """Every block under a checkpoint, as code of one's own does it."""
    for block in model.blocks:  # type: ignore[union-attr]
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def wrapped(model: nn.Module) -> None:
    """The same by the wrapper that FSDP's examples use."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=lambda m: isinstance(m, Block))


def begin(world: int) -> None:
    """Rank 0 of so many; nobody else is there, and nobody is asked."""
    import torch.distributed.distributed_c10d as c10d
    import torch.nn.parallel.distributed as ddp
    c10d._store_based_barrier = lambda *_, **__: None
    ddp._verify_param_shape_across_processes = lambda *_, **__: None
    dist.init_process_group("nccl", rank=0, world_size=world, store=dist.HashStore())


def model_of(kind: str, w: dict[str, Any]) -> nn.Module:
    """The model on its device(s)."""
    shape = (w["hidden"], w["layers"], w["heads"], w["vocab"], w["sequence"])
    half = torch.bfloat16
    torch.set_default_dtype(half if w["precision"] == "pure-bf16" else torch.float32)
    if kind in ("one", "ddp"):
        with torch.device("cuda"):
            model: nn.Module = Gpt(*shape, tied=True)
        if w["recompute"] == "full":
            recomputed(model)
        if kind == "ddp":
            begin(w["world"])
            model = nn.parallel.DistributedDataParallel(model, device_ids=[0], broadcast_buffers=False,
                                                        gradient_as_bucket_view=w["view"])
        return model
    begin(w["world"])
    with torch.device("meta"):
        model = Gpt(*shape, tied=False)
    reduce = torch.float32 if w["reduce"] == "fp32" else half
    if kind == "fsdp":
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy
        strategy = ShardingStrategy.FULL_SHARD if w["reshard"] else ShardingStrategy.SHARD_GRAD_OP
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Block}), sharding_strategy=strategy, limit_all_gathers=True,
            mixed_precision=MixedPrecision(half, reduce, half), device_id=0,
            param_init_fn=lambda m: m.to_empty(device="cuda", recurse=False))
        if w["recompute"] == "full":
            wrapped(model)
        return model
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    if w["recompute"] == "full":
        wrapped(model)
    said = {"mesh": DeviceMesh("cuda", list(range(w["world"]))), "reshard_after_forward": w["reshard"],
            "mp_policy": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=reduce)}
    for block in model.blocks:
        fully_shard(block, **said)
    fully_shard(model, **said)
    return model.to_empty(device="cuda")


def main(kind: str, w: dict[str, Any]) -> list[tuple[int, int, int]]:
    """A few optimizer steps."""
    model = model_of(kind, w)
    kernel = w["optimizer_kernel"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=kernel == "foreach", fused=kernel == "fused")
    autocast, out = w["precision"] == "amp-bf16", []
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        for number in range(w["micro_steps"]):
            last = number == w["micro_steps"] - 1
            local: Callable[[], Any] = model.no_sync if kind == "ddp" and not last else contextlib.nullcontext
            tokens = torch.randint(0, w["vocab"], (w["batch"], w["sequence"]), device="cuda")
            with local():
                with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                    loss = model(tokens)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        stats = torch.cuda.memory_stats()
        out.append((stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"], stats["num_alloc_retries"]))
    return out


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))), flush=True)
    os._exit(0)  # NCCL's threads wait for nobody
