"""Steps of LoRA and QLoRA by Hugging Face's own code on a PyTorch that thinks it has a GPU (README.md).

    DRIVER_LATE=1 LD_LIBRARY_PATH=VENV/driver PYTHONPATH=SITE VENV/bin/python tests/driver/fine_tuning.py JOB

SITE holds what `hugging_face.py` asks for, peft, accelerate, bitsandbytes and psutil; VENV/driver was made by
`build.py VENV SITE/bitsandbytes/libbitsandbytes_cuda121.so`. JOB is JSON, a line of tests/model/data/fine_tuning.yaml
without what came of it. Under FSDP 1 it is Answer.AI's fsdp_qlora (train.py, recalled): trained matrices are units of
their own, blocks are checkpointed inside theirs. Prints JSON: highest allocated and reserved bytes of four steps, and
the collectives of the last: kind, bytes, times.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from steps import begin
from torch import nn

_STEPS, _HALF = 4, torch.bfloat16
_TARGETS = {"qv": ["q_proj", "v_proj"],
            "all": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}
_CALLS: Counter[tuple[str, int]] = Counter()


def _counted() -> None:
    def call(name: str, made: Any, *args: Any, **kwargs: Any) -> Any:
        _CALLS[name, max(t.numel() * t.element_size() for t in args if isinstance(t, torch.Tensor))] += 1
        return made(*args, **kwargs)

    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        setattr(dist, name, functools.partial(call, name, getattr(dist, name)))


def _quantised(module: nn.Module, **said: Any) -> None:
    """Every linear layer but the head as bitsandbytes', its weight quantised on the device."""
    import bitsandbytes as bnb
    for name, child in module.named_children():
        _quantised(child, **said)
        if isinstance(child, nn.Linear) and name != "lm_head":
            layer = bnb.nn.Linear4bit(child.in_features, child.out_features, False, **said, device="meta")
            layer.weight = type(layer.weight)(torch.empty(child.weight.shape, dtype=_HALF), **layer.weight.__dict__)
            layer.weight = layer.weight.cuda(0)
            setattr(module, name, layer)


def _model(job: dict[str, Any]) -> Any:
    made = transformers.LlamaForCausalLM
    made._init_weights = lambda self, module: None
    torch.set_default_dtype(_HALF)
    with torch.device("cuda"):
        model = made._from_config(transformers.LlamaConfig(**job["config"], use_cache=False),
                                  attn_implementation="sdpa")
    if job["base"] != "bf16":
        storage = _HALF if job["strategy"] == "fsdp" else torch.uint8
        _quantised(model, compute_dtype=_HALF, quant_type="nf4", quant_storage=storage,
                   compress_statistics=job["base"] == "nf4-dq")
        model.is_loaded_in_4bit = model.is_quantized = True
    torch.set_default_dtype(torch.float32)
    said, full = {"use_reentrant": job["reentrant"]}, job["recompute"] == "full"
    if job["autocast"] and job["base"] != "bf16":
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=full,
                                                gradient_checkpointing_kwargs=said)
    elif full and job["strategy"] == "none":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=said)
    if full and job["reentrant"]:
        model.enable_input_require_grads()
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=job["rank"], lora_alpha=16,
                                             lora_dropout=job["dropout"], target_modules=_TARGETS[job["targets"]]))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to("cuda", torch.float32 if job["autocast"] else _HALF)
    return model.train() if job["strategy"] == "none" else _sharded(job, model).train()


def _sharded(job: dict[str, Any], model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )
    from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import _or_policy, lambda_auto_wrap_policy, transformer_auto_wrap_policy
    begin(job["world"])
    _counted()
    blocks = {type(m) for m in model.modules() if type(m).__name__.endswith("DecoderLayer")}
    trained = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: not list(m.children()) and (
        getattr(m, "weight", None) is not None and m.weight.requires_grad))
    whole = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=blocks)
    wrapped = FullyShardedDataParallel(
        model.cpu() if job["offload"] else model, device_id=0, limit_all_gathers=True,
        auto_wrap_policy=functools.partial(_or_policy, policies=[trained, whole]),
        cpu_offload=CPUOffload(offload_params=True) if job["offload"] else None,
        mixed_precision=MixedPrecision(_HALF, _HALF, _HALF))
    if job["recompute"] == "full":
        kind = CheckpointImpl.REENTRANT if job["reentrant"] else CheckpointImpl.NO_REENTRANT
        apply_activation_checkpointing(wrapped, check_fn=lambda m: type(m) in blocks, checkpoint_wrapper_fn=(
            functools.partial(checkpoint_wrapper, checkpoint_impl=kind)))
    return wrapped


def main(job: dict[str, Any]) -> dict[str, Any]:
    """What a job takes."""
    model = _model(job)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    torch.cuda.empty_cache()
    for _ in range(_STEPS):
        _CALLS.clear()
        torch.cuda.reset_peak_memory_stats()
        tokens = torch.randint(0, job["config"]["vocab_size"], (job["batch"], job["sequence"]), device="cuda")
        with torch.autocast("cuda", _HALF) if job["autocast"] else contextlib.nullcontext():
            loss = model(input_ids=tokens, labels=tokens.clone()).loss
        loss.backward()
        loss.item()  # as trainers do, every step: the host waits
        optimizer.step()
        optimizer.zero_grad()
        del loss
    stats = torch.cuda.memory_stats()
    return {"allocated": stats["allocated_bytes.all.peak"], "reserved": stats["reserved_bytes.all.peak"],
            "collectives": [[*call, times] for call, times in sorted(_CALLS.items())]}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)
