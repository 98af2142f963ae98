"""Files of Hugging Face's tools and DeepSpeed's for the tests, and what reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sim.imports.draft import Draft, Imported
from sim.imports.hugging.files import read_hf

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816,
         "num_hidden_layers": 8, "num_attention_heads": 16, "vocab_size": 32000, "max_position_embeddings": 4096}
ON = ("cluster.topology=dgx-a100-80g", "training.sequence=2048")
BATCH = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
ZERO_1 = """compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 1
  zero3_init_flag: false
  zero_stage: 1
distributed_type: DEEPSPEED
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
mixed_precision: 'bf16'
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
COMMON = ZERO_1.partition("machine_rank")[2].replace(": 0\n", "machine_rank: 0\n", 1)
#: The real files of trl 1.16, trl/accelerate_configs.
MULTI_GPU = """compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
gpu_ids: all
""" + COMMON
SINGLE = MULTI_GPU.replace("MULTI_GPU", '"NO"')
ZERO_2 = ZERO_1.replace("  gradient_accumulation_steps: 1\n", "  offload_optimizer_device: none\n"
                                                              "  offload_param_device: none\n").replace(
    "zero_stage: 1", "zero_stage: 2")
ZERO_3 = ZERO_2.replace("zero3_init_flag: false", "zero3_init_flag: true\n  zero3_save_16bit_model: true").replace(
    "zero_stage: 2", "zero_stage: 3")
FSDP_1 = """compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: FULL_SHARD
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
  fsdp_version: 1
""" + COMMON
FSDP_2 = """# Requires accelerate 1.7.0 or higher
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_version: 2
""" + COMMON
TRL_FILES = {"multi_gpu": MULTI_GPU, "single_gpu": SINGLE, "fsdp1": FSDP_1, "fsdp2": FSDP_2, "zero1": ZERO_1,
             "zero2": ZERO_2, "zero3": ZERO_3}

Read = Callable[..., Imported]


def reader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Writes files of these contents (text, or data for JSON), reads them and finishes the scenario."""
    monkeypatch.chdir(folder)

    def run(*contents: Any, by: Callable[..., None] = read_hf, sets: tuple[str, ...] = ON,
            beside: dict[str, Any] | None = None) -> Imported:
        names = []
        for number, content in enumerate(contents):
            text = isinstance(content, str)
            name = f"file{number}.{'yaml' if text else 'json'}"
            Path(name).write_text(content if text else json.dumps(content, indent=1), encoding="utf-8")
            names.append(name)
        for name, content in (beside or {}).items():
            Path(name).write_text(json.dumps(content, indent=1), encoding="utf-8")
        draft = Draft("", sets)
        by(names, draft)
        return draft.finish()

    return run


def at(found: Imported, path: str) -> Any:
    """A field as the scenario file has it, None without one."""
    here: Any = found.data
    for part in path.split("."):
        here = here.get(part) if isinstance(here, dict) else None
    return here


def fields(found: Imported, *paths: str) -> list[Any]:
    return [at(found, path) for path in paths]


def config(dtype: str | None = None, **more: Any) -> dict[str, Any]:
    return {**LLAMA, **({"torch_dtype": dtype} if dtype else {}), **more}
