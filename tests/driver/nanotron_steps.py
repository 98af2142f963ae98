"""Training steps of one rank of nanotron by a PyTorch that thinks it has a GPU: its own trainer, model and optimizer.

    LD_LIBRARY_PATH=/tmp/torch/driver TRITON_LIBCUDA_PATH=/tmp/torch/driver LIBRARY_PATH=/tmp/torch/driver \
      DRIVER_LATE=1 PYTHONPATH=/tmp/n:/tmp/triton MEGATRON=x /tmp/torch/bin/python \
      tests/driver/nanotron_steps.py '{"rank": 0, "data": 4,
        "tensor": 2, "pipeline": 1, "engine": "1f1b", "tp_mode": "REDUCE_SCATTER", "tp_async": false, "zero": 1,
        "layers": 4, "hidden": 1024, "heads": 8, "kv_heads": 8, "ffn": 4096, "vocab": 32768, "tied": false, "batch": 1,
        "sequence": 1024, "micro_steps": 2}'

/tmp/n has nanotron 0.4, flash_attn 2.5.8 (its Python alone), einops, dacite, pyyaml, packaging, tqdm and safetensors
(`pip install --target --no-deps`); Triton makes the kernels of norms and rotary embeddings. flash_attn's CUDA extension
is a stand-in that allocates what `csrc/flash_attn/flash_api.cpp` does and launches as often. A rank's peers are nobody;
what a stage would be told of a tensor that comes is known here, behind as many reads as nanotron makes.

Prints a JSON object: highest allocated bytes of the last step, highest reserved of all, its collectives in order (name,
bytes, dtype, ranks, whether the host waits for it), and how often the host read a number off the device.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron_steps import Nobody

STEPS = 3
_STORE = Nobody()
#: Collectives, and the argument that is the whole buffer.
_CALLS = {"all_gather_into_tensor": "output_tensor", "all_gather": "tensor_list", "all_reduce": "tensor",
          "reduce_scatter_tensor": "input", "reduce_scatter": "input_list", "all_reduce_coalesced": "tensors",
          "send": "tensor", "recv": "tensor", "isend": "tensor", "irecv": "tensor", "broadcast": "tensor"}


def noted(name: str, calls: list[Any]) -> Callable[..., Any]:
    """A collective that is called and noted."""
    own = getattr(dist, name)

    def call(*given: Any, **named: Any) -> Any:
        said = inspect.signature(own).bind(*given, **named).arguments
        of = said[_CALLS[name]]
        tensors = of if isinstance(of, list) else [of]
        size = sum(one.numel() * one.element_size() for one in tensors)
        waits = name not in ("isend", "irecv") and not said.get("async_op", False)
        calls.append((name, size, str(tensors[0].dtype)[6:], dist.get_world_size(said.get("group")), waits))
        return own(*given, **named)
    return call


def attention() -> types.ModuleType:
    """flash_attn's CUDA extension: tensors of varlen_fwd and varlen_bwd, one launch and three."""
    made = types.ModuleType("flash_attn_2_cuda")

    def forward(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        batch, longest = rest[1].numel() - 1, rest[6]
        out = torch.empty_like(q)
        lse = torch.empty(batch, q.size(1), longest, dtype=torch.float32, device="cuda")
        state = torch.empty(2, dtype=torch.int64, device="cuda")
        _launch(state)
        return out, q, k, v, out, lse, None, state

    def backward(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dq: Any, dk: Any, dv: Any, *rest: Any) -> Any:
        batch, rows = rest[0].numel() - 1, -(-rest[3] // 128) * 128
        wide = 32 * -(-q.size(2) // 32)
        softmax = torch.empty(batch, q.size(1), rows, dtype=torch.float32, device="cuda")
        sums = torch.empty(q.size(0) + 128 * batch, q.size(1), wide, dtype=torch.float32, device="cuda")
        for one in (softmax, sums, dq):
            _launch(one)
        if k.size(1) != q.size(1):
            whole = [torch.empty(k.size(0), q.size(1), k.size(2), dtype=k.dtype, device="cuda") for _ in range(2)]
            for one, target in zip(whole, (dk, dv), strict=True):
                torch.sum(one.view(k.size(0), k.size(1), -1, k.size(2)), 2, out=target)
        return dq, dk, dv, softmax
    made.__dict__.update(varlen_fwd=forward, varlen_bwd=backward)
    return made


def _launch(x: torch.Tensor) -> None:
    x.view(-1)[:1].zero_()


def blind(found: dict[str, int]) -> None:
    """Nothing is decided by what a tensor holds, nobody is met, and reads of numbers are counted."""
    def counted(name: str, instead: Any) -> None:
        real = getattr(torch.Tensor, name)

        def read(tensor: torch.Tensor, *rest: Any) -> Any:
            number = real(tensor, *rest)
            if not tensor.is_cuda:
                return number
            found["reads"] += 1
            return instead
        setattr(torch.Tensor, name, read)
    counted("item", 1.0)
    counted("__bool__", True)
    counted("__index__", 1)
    synchronize = torch.cuda.synchronize

    def waited(*_: Any) -> None:
        found["synchronised"] += 1
        synchronize()
    torch.cuda.synchronize = waited
    dist.barrier = lambda *_, **__: None
    dist.all_gather_object = lambda out, one, group=None: out.__setitem__(slice(None), [one] * len(out))


def begin(w: dict[str, Any], calls: list[Any]) -> None:
    """The rank of the world, with groups of nobody."""
    import torch.distributed.distributed_c10d as c10d
    import torch.nn.parallel.distributed as ddp
    world = w["data"] * w["tensor"] * w["pipeline"]
    os.environ |= {"LOCAL_RANK": "0", "RANK": str(w["rank"]), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": "29512", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    c10d._store_based_barrier = lambda *_, **__: None
    ddp._verify_param_shape_across_processes = lambda *_, **__: None
    dist.init_process_group("nccl", rank=w["rank"], world_size=world, store=_STORE)
    for name in _CALLS:
        setattr(dist, name, noted(name, calls))


def told(w: dict[str, Any], blocks: bool) -> None:
    """What comes from another stage: hidden states and the mask in turn forward, gradients backward.

    The reads of `_recv_meta`: two sizes for the second message's slice and again where it is cut, dtype, whether it
    needs a gradient and is contiguous, sizes and strides where the tensor is made. A stage without blocks gets no mask.
    """
    from nanotron.parallel.pipeline_parallel import p2p, state
    coming: list[str] = []
    turns = itertools.cycle(("hidden", "mask") if blocks else ("hidden",))

    def activation(self: Any) -> Any:
        coming.append(next(turns))
        return self.p2p.recv_tensors(num_tensors=1, from_rank=self.from_rank)[0]

    def gradient(self: Any) -> Any:
        coming.append("hidden")
        return self.p2p.recv_tensors(num_tensors=1, from_rank=self.from_rank)[0]

    def meta(self: Any, from_rank: int, tag: int) -> Any:
        source = dist.get_global_rank(self.pg, from_rank)
        dist.recv(self.first_metadata, src=source, group=self.pg)
        split = w["tensor"] if w["tp_mode"] == "REDUCE_SCATTER" else 1
        hidden = coming.pop() == "hidden"
        shape = (w["sequence"] // split, w["batch"], w["hidden"]) if hidden else (w["batch"], w["sequence"])
        stride = (w["batch"] * w["hidden"], w["hidden"], 1) if hidden else (w["sequence"], 1)
        for one in list(self.first_metadata)[:6]:
            one.item()
        dist.recv(self.second_metadata[:2 * len(shape)], src=source, group=self.pg)
        for one in self.second_metadata[:2 * len(shape)]:
            one.item()
        size = 2 * stride[0] * shape[0] if hidden else stride[0] * shape[0]
        return p2p.P2PTensorMetaData(shape=shape, stride=stride, is_contiguous=True, untyped_storage_size=size,
                                     storage_offset=0, dtype=torch.bfloat16 if hidden else torch.bool,
                                     requires_grad=hidden)
    p2p.P2P._recv_meta = meta
    state.RecvActivation.__call__, state.RecvGrad.__call__ = activation, gradient


def untied() -> None:
    """nanotron.logging and nanotron.config import each other: the first goes first, told what it asks of it."""
    for name in ("nanotron.config", "nanotron.config.config"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].LoggingArgs = None
    import nanotron.logging  # noqa: F401
    for name in ("nanotron.config", "nanotron.config.config"):
        del sys.modules[name]


def config_of(w: dict[str, Any]) -> Any:
    """nanotron's Config."""
    from nanotron.config import (
        CheckpointsArgs,
        Config,
        GeneralArgs,
        LlamaConfig,
        LoggingArgs,
        LRSchedulerArgs,
        ModelArgs,
        OptimizerArgs,
        ParallelismArgs,
        RandomInit,
        TokenizerArgs,
        TokensArgs,
    )
    model = LlamaConfig(
        hidden_size=w["hidden"], intermediate_size=w["ffn"], num_hidden_layers=w["layers"], vocab_size=w["vocab"],
        num_attention_heads=w["heads"], num_key_value_heads=w["kv_heads"], tie_word_embeddings=w["tied"],
        max_position_embeddings=w["sequence"])
    rate = LRSchedulerArgs(learning_rate=1e-4, lr_warmup_steps=2, lr_warmup_style="linear", lr_decay_style="cosine",
                           min_decay_lr=1e-5)
    return Config(
        general=GeneralArgs(project="x"), tokenizer=TokenizerArgs("x"), logging=LoggingArgs(log_level="error"),
        checkpoints=CheckpointsArgs(checkpoints_path="/nowhere", checkpoint_interval=1000),
        parallelism=ParallelismArgs(dp=w["data"], pp=w["pipeline"], tp=w["tensor"], pp_engine=w["engine"],
                                    tp_mode=w["tp_mode"], tp_linear_async_communication=w["tp_async"]),
        model=ModelArgs(model_config=model, init_method=RandomInit(std=0.02), dtype="bfloat16"),
        tokens=TokensArgs(sequence_length=w["sequence"], train_steps=10, micro_batch_size=w["batch"],
                          batch_accumulation_per_replica=w["micro_steps"]),
        optimizer=OptimizerArgs(zero_stage=w["zero"], weight_decay=0.01, clip_grad=1.0, accumulate_grad_in_fp32=True,
                                adam_eps=1e-8, adam_beta1=0.9, adam_beta2=0.95, torch_adam_is_fused=True,
                                learning_rate_scheduler=rate))


def main(w: dict[str, Any]) -> dict[str, Any]:
    """A few optimizer steps."""
    sys.modules["flash_attn_2_cuda"] = attention()
    torch.cuda.set_device(0)
    calls: list[Any] = []
    found = {"reads": 0, "synchronised": 0}
    begin(w, calls)
    blind(found)
    untied()
    import nanotron.trainer as trainer
    import triton.runtime.autotuner as tuner
    tuner.do_bench = lambda launch, **_: (launch(), [1.0])[1] * 3  # without the 256 MB that tuning takes for a moment
    from nanotron.parallel.pipeline_parallel.tensor_pointer import TensorPointer
    trainer.get_config_from_file = lambda config, **_: config
    trainer.LoggerWriter = lambda **_: types.SimpleNamespace(add_scalars_from_list=lambda *_: None)
    made = trainer.DistributedTrainer(config_of(w))
    told(w, blocks=any(".decoder." in f".{name}" for name, _ in made.unwrapped_model.named_parameters()))
    first, last = made.unwrapped_model.input_pp_rank, made.unwrapped_model.output_pp_rank
    own = dist.get_rank(made.parallel_context.pp_pg)
    shape = (w["batch"], w["sequence"])

    def batches() -> Any:
        """As nanotron's collator and sanity_check_dataloader hand them over."""
        while True:
            ids, labels = (torch.ones(shape, dtype=torch.int64, device="cuda") if own == at else TensorPointer(at)
                           for at in (first, last))
            mask, label_mask = (torch.ones(shape, dtype=torch.bool, device="cuda") if own == at else TensorPointer(at)
                                for at in (first, last))
            yield {"input_ids": ids, "input_mask": mask, "label_ids": labels, "label_mask": label_mask}
    made.pipeline_engine = made.config.parallelism.pp_engine
    made.pipeline_engine.nb_microbatches = made.n_micro_batches_per_batch
    made.unwrapped_model.module_id_to_prefix = {
        id(module): f"{name}." for name, module in made.unwrapped_model.named_modules()}
    made.unwrapped_model.module_id_to_prefix[id(made.unwrapped_model)] = ""
    torch.cuda.empty_cache()
    made.iteration_start_time, data, reserved = 0.0, batches(), 0
    begun = 5  # before, every step logs memory, which resets its peak
    for made.iteration_step in range(begun, begun + STEPS):
        torch.cuda.reset_peak_memory_stats()
        calls.clear()
        found |= dict.fromkeys(found, 0)
        if (log := os.environ.get("DRIVER_LOG")) and made.iteration_step == begun + STEPS - 1:
            open(log, "w").close()
        outputs, loss = made.training_step(dataloader=data)
        stats = torch.cuda.memory_stats()
        made.train_step_logs(outputs=outputs, loss_avg=loss)
        reserved = max(reserved, stats["reserved_bytes.all.peak"])
    return {"allocated": stats["allocated_bytes.all.peak"], "reserved": reserved, "retries": stats["num_alloc_retries"],
            **found, "collectives": calls}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)  # NCCL's threads wait for nobody
