"""Training steps of the GPT of `steps.py` by DeepSpeed's own code; run like it, with DeepSpeed on PYTHONPATH.

Prints a JSON object: highest allocated bytes of the last step, highest reserved bytes of all, and of the last step the
collectives by kind: how many, and their bytes. What would be compiled (FusedAdam, DeepSpeedCPUAdam) is a stand-in that
does nothing; numbers read on the host are none.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import steps
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

_STEPS = 3
#: Collectives, and which argument is the whole buffer: its place and its name.
_CALLS = {"all_gather_into_tensor": (0, "output_tensor"), "all_gather": (0, "tensor_list"), "all_reduce": (0, "tensor"),
          "reduce_scatter_tensor": (1, "input"), "reduce": (0, "tensor")}
_KINDS = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}


def watched(calls: dict[str, tuple[int, str]], note: Callable[[str, list[torch.Tensor], Any], None]) -> None:
    """`note` hears of every call: its name, the whole buffer as a list and the group."""
    def wrapped(name: str, place: int, argument: str) -> Callable[..., Any]:
        real = getattr(dist, name)

        def call(*given: Any, **named: Any) -> Any:
            of = given[place] if len(given) > place else named[argument]
            note(name, of if isinstance(of, list) else [of], named.get("group"))
            return real(*given, **named)
        return call
    for name, (place, argument) in calls.items():
        call = wrapped(name, place, argument)
        setattr(dist, name, call)
        setattr(c10d, name, call)


def size_of(tensors: list[torch.Tensor]) -> int:
    """Bytes of all of them."""
    return sum(one.numel() * one.element_size() for one in tensors)


def logged() -> list[tuple[str, int]]:
    """The list into which kind and bytes of every collective go."""
    found: list[tuple[str, int]] = []
    watched(_CALLS, lambda name, of, _: found.append((_KINDS.get(name, name), size_of(of))))
    return found


def blind() -> None:
    """Nothing is decided by what a tensor holds, and nobody is asked for objects or met at a barrier."""
    def nothing(tensor: torch.Tensor, read: Callable[[torch.Tensor], Any], instead: Any) -> Any:
        number = read(tensor)
        return instead if tensor.is_cuda else number
    item, true = torch.Tensor.item, torch.Tensor.__bool__
    torch.Tensor.item = lambda tensor: nothing(tensor, item, 0)
    torch.Tensor.__bool__ = lambda tensor: nothing(tensor, true, False)
    dist.barrier = lambda *_, **__: None
    dist.all_gather_object = lambda out, one, group=None: out.__setitem__(slice(None), [one] * len(out))
    dist.broadcast_object_list = lambda *_, **__: None


def stand_ins() -> None:
    """In place of compiled optimizers."""
    import deepspeed.runtime.utils as utils
    from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder
    names = ("multi_tensor_adam", "create_adam", "destroy_adam", "adam_update", "adam_update_copy")
    made = type("Built", (), {name: staticmethod(lambda *_: 0) for name in names})
    for builder in (CPUAdamBuilder, FusedAdamBuilder):
        builder.load = lambda *_, **__: made
    utils.sqrt = lambda number: abs(number) ** 0.5


def main(w: dict[str, Any]) -> dict[str, Any]:
    """A few optimizer steps."""
    os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": str(w["world"]), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": "29511"}
    steps.begin(w["world"])
    calls = logged()
    blind()
    import deepspeed
    stand_ins()
    config = {"train_micro_batch_size_per_gpu": w["batch"], "gradient_accumulation_steps": w["micro_steps"],
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "zero_optimization": w["zero"],
              w["precision"]: {"enabled": True}}
    built: Any = contextlib.nullcontext()
    if w.get("init"):
        deepspeed.init_distributed(dist_backend="nccl")
        built = deepspeed.zero.Init(config_dict_or_path=config)
    with built:
        model = steps.Gpt(w["hidden"], w["layers"], w["heads"], w["vocab"], w["sequence"], tied=False)
    if w["recompute"] == "full":
        steps.Gpt.forward = recomputed
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config,
                                  dist_init_required=False)[0]
    reserved = 0
    for _ in range(w.get("steps", _STEPS)):
        torch.cuda.reset_peak_memory_stats()
        calls.clear()
        for _ in range(w["micro_steps"]):
            engine.backward(engine(torch.randint(0, w["vocab"], (w["batch"], w["sequence"]), device="cuda")))
            engine.step()
        stats = torch.cuda.memory_stats()
        reserved = max(reserved, stats["reserved_bytes.all.peak"])
    of = {kind: [size for one, size in calls if one == kind] for kind, _ in calls}
    return {"allocated": stats["allocated_bytes.all.peak"], "reserved": reserved,
            "calls": {kind: [len(sizes), sum(sizes)] for kind, sizes in sorted(of.items())}}


def recomputed(self: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Every block under DeepSpeed's checkpoint."""
    import deepspeed
    x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1), device=tokens.device))
    for block in self.blocks:
        x = deepspeed.checkpointing.checkpoint(block, x)
    logits = self.head(self.ln_f(x))
    return torch.nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), tokens.view(-1))


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)  # NCCL's threads wait for nobody
