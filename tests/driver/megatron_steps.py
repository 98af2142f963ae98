"""Training steps of one rank of megatron-core by a PyTorch that thinks it has a GPU; run by `record.py`.

Megatron's own layers, DistributedDataParallel, optimizer and schedules; what it takes of apex is a stand-in
(`stand_ins.py`). Needs `--no-deps` wheels of megatron-core (0.6 to 0.8, before it asks for TransformerEngine) on the
path: MEGATRON=folder. Prints a JSON object: highest allocated and reserved bytes of the last step, and its collectives
in order (name, elements, dtype, ranks).
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from typing import Any

os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}
sys.path.insert(0, os.environ["MEGATRON"])
import torch
import torch.distributed as dist
from stand_ins import after, before

STEPS = 3
_CALLS = ("all_reduce", "broadcast", "_all_gather_base", "_reduce_scatter_base", "all_gather_into_tensor",
          "reduce_scatter_tensor")


class Nobody(dist.Store):
    """A store in which whatever is asked for is there, so that rank n of a job can run alone."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._known[key] = value if isinstance(value, bytes) else str(value).encode()

    def get(self, key: str) -> bytes:
        return self._known.get(key, bytes(128))

    def add(self, key: str, number: int) -> int:
        return number

    def delete_key(self, key: str) -> bool:
        return True

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return desired if isinstance(desired, bytes) else str(desired).encode()

    def wait(self, *_: Any) -> None: ...
    def set_timeout(self, *_: Any) -> None: ...
    def check(self, *_: Any) -> bool:
        return True


_STORE = Nobody()  # C++ does not keep what Python adds to it


def noted(name: str, own: Any, calls: list[Any]) -> Any:
    """A collective that is called and noted."""
    def call(*a: Any, **k: Any) -> Any:
        said = inspect.signature(own).bind(*a, **k).arguments
        tensors = [x for x in said.values() if isinstance(x, torch.Tensor)]
        group = dist.get_world_size(said.get("group"))
        calls.append((name, max(x.numel() for x in tensors), str(tensors[0].dtype)[6:], group))
        return own(*a, **k)
    return call


def begin(w: dict[str, Any], calls: list[Any]) -> Any:
    """The rank's groups; what is called on them is noted."""
    import torch.distributed.distributed_c10d as c10d
    c10d._store_based_barrier = lambda *_, **__: None
    made = dist.new_group
    dist.new_group = lambda *a, **k: made(*a, **{**k, "backend": "nccl"})  # gloo would look for its peers
    dist.init_process_group("nccl", rank=w["rank"], world_size=w["world"], store=_STORE)
    for name in _CALLS:
        setattr(dist, name, noted(name, getattr(dist, name), calls))
    from megatron.core import parallel_state
    parallel_state.initialize_model_parallel(w["tensor"], w["pipeline"], w["virtual"])
    return parallel_state


def configured(w: dict[str, Any]) -> Any:
    """Megatron's TransformerConfig."""
    from megatron.core.transformer.transformer_config import TransformerConfig
    half = torch.bfloat16 if w["precision"] == "bf16" else torch.float16
    recompute = {"none": {}, "selective": {"recompute_granularity": "selective"},
                 "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}}
    return TransformerConfig(
        num_layers=w["layers"], hidden_size=w["hidden"], num_attention_heads=w["heads"],
        tensor_model_parallel_size=w["tensor"], pipeline_model_parallel_size=w["pipeline"],
        virtual_pipeline_model_parallel_size=w["virtual"], sequence_parallel=w["sequence_parallel"],
        pipeline_dtype=half, params_dtype=half, bf16=half == torch.bfloat16, fp16=half == torch.float16,
        hidden_dropout=w["dropout"], attention_dropout=w["dropout"], gradient_accumulation_fusion=True,
        bias_activation_fusion=True, bias_dropout_fusion=True, masked_softmax_fusion=True, persist_layer_norm=True,
        deallocate_pipeline_outputs=True, batch_p2p_comm=True, perform_initialization=False,
        async_tensor_model_parallel_allreduce=w["tensor"] > 1 and not w["sequence_parallel"],
        **recompute[w["recompute"]])


def chunks_of(w: dict[str, Any], config: Any, state: Any) -> list[Any]:
    """The rank's chunks of the model, wrapped as Megatron-LM wraps them."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes as marked
    from megatron.core.transformer.module import Float16Module
    chunks = []
    for number in range(w["virtual"] or 1):
        if w["virtual"]:
            state.set_virtual_pipeline_model_parallel_rank(number)
        model = GPTModel(config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=w["vocab"],
                         max_sequence_length=w["sequence"], pre_process=state.is_pipeline_first_stage(),
                         post_process=state.is_pipeline_last_stage(), parallel_output=True,
                         share_embeddings_and_output_weights=True)
        model.model_type = ModelType.encoder_or_decoder
        for parameter in model.parameters():
            marked(parameter)
        model.cuda(0)
        ours = DistributedDataParallelConfig(
            grad_reduce_in_fp32=w["precision"] == "bf16", overlap_grad_reduce=True,
            use_distributed_optimizer=w["zero1"])
        chunks.append(DistributedDataParallel(config, ours, Float16Module(config, model), disable_bucketing=number > 0))
    if w["virtual"]:
        state.set_virtual_pipeline_model_parallel_rank(0)
    return chunks


def main(w: dict[str, Any]) -> dict[str, Any]:
    """A few optimizer steps."""
    before()
    torch.cuda.set_device(0)
    calls: list[Any] = []
    state = begin(w, calls)
    after()
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    model_parallel_cuda_manual_seed(1)
    config = configured(w)
    chunks = chunks_of(w, config, state)
    half = w["precision"]
    optimizer = get_megatron_optimizer(OptimizerConfig(
        optimizer="adam", lr=1e-4, bf16=half == "bf16", fp16=half == "fp16", params_dtype=config.params_dtype,
        use_distributed_optimizer=w["zero1"], clip_grad=1.0), chunks)
    config.no_sync_func = [c.no_sync for c in chunks] if len(chunks) > 1 else chunks[0].no_sync
    if w["pipeline"] > 1 and w["zero1"]:
        started = [c.start_grad_sync for c in chunks]
        config.grad_sync_func = started if len(chunks) > 1 else started[0]
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss

    def forward_step(_: Any, model: Any) -> Any:
        shape = (w["batch"], w["sequence"])
        tokens, positions, labels = (torch.empty(shape, dtype=torch.int64, device="cuda") for _ in range(3))
        out = model(tokens, positions, None, labels=labels)
        return out, lambda losses: (losses.float().mean(), {})

    for _ in range(STEPS):
        calls.clear()
        torch.cuda.reset_peak_memory_stats()
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=[None] * len(chunks), model=chunks,
            num_microbatches=w["micro_steps"], seq_length=w["sequence"], micro_batch_size=w["batch"],
            forward_only=False)
        optimizer.step()
        stats = torch.cuda.memory_stats()
    return {"allocated": stats["allocated_bytes.all.peak"], "reserved": stats["reserved_bytes.all.peak"],
            "collectives": calls}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)
