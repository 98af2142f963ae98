"""Training steps of Hugging Face's own modules by a PyTorch that thinks it has a GPU (README.md).

    DRIVER_LATE=1 LD_LIBRARY_PATH=VENV/driver PYTHONPATH=SITE VENV/bin/python tests/driver/hugging_face.py JOB

SITE holds transformers and what it needs (pip install --target SITE --no-deps transformers==4.46.3 tokenizers==0.20.3
huggingface_hub==0.30.2 safetensors regex pyyaml requests tqdm packaging idna charset-normalizer urllib3 certifi).
JOB is JSON, a line of tests/model/data/hugging_face.yaml without what came of it. Prints JSON: highest allocated and
reserved bytes, and what ATen's operators (but for products and attention) read and write each way: in a block (three
blocks less two), and in the rest.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

#: Views, products and attention.
_LEFT_OUT = frozenset((
    "view", "_unsafe_view", "transpose", "t", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "detach",
    "alias", "as_strided", "split", "split_with_sizes", "unbind", "mm", "addmm", "bmm", "baddbmm",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"))
#: Operators that read next to nothing of their largest input.
_PICKING = ("nll_loss_forward", "nll_loss_backward", "embedding")
_STEPS, _HALF = 4, torch.bfloat16


def _bytes(tensor: Any) -> int:
    """Of what is behind it in memory: a dimension that is expanded counts once."""
    size = tensor.element_size()
    for length, stride in zip(tensor.size(), tensor.stride(), strict=True):
        size *= length if stride else 1
    return size


class Traced(TorchDispatchMode):
    """Sums up bytes that operators read and write, by way."""

    def __init__(self) -> None:
        super().__init__()
        self.way, self.moved = "forward", Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if name not in _LEFT_OUT:
            read, written = (
                sum(_bytes(t) for t in tree_flatten(some)[0] if isinstance(t, torch.Tensor) and t.is_cuda)
                for some in ((args[name == "copy_":], kwargs), out))
            if name in _PICKING:
                read = 0
            elif name == "slice_backward":  # zeros, and the gradient copied into them
                written *= 2
            elif name == "_softmax_backward_data":  # and in front of it the product of both inputs (SoftMax.cu)
                written *= 4
            self.moved[self.way] += (read + written) * (not name.startswith("empty"))
        return out


def _model(job: dict[str, Any], layers: int) -> Any:
    family = job["family"]
    config = getattr(transformers, f"{family}Config")(**job["config"], **{job["layers"]: layers}, use_cache=False)
    made = getattr(transformers, job["head"])
    made._init_weights = lambda self, module: None
    torch.set_default_dtype(_HALF if job["precision"] == "pure-bf16" else torch.float32)
    with torch.device("cuda"):
        model = made._from_config(config, attn_implementation=job["attention"])
    torch.set_default_dtype(torch.float32)
    if job["recompute"] == "full":
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    return model.train()


def _step(job: dict[str, Any], model: Any, between: Callable[[], None]) -> None:
    tokens = torch.randint(0, job["config"]["vocab_size"], (job["batch"], job["sequence"]), device="cuda")
    with torch.autocast("cuda", _HALF, enabled=job["precision"] == "amp-bf16"):
        loss = model(input_ids=tokens, labels=tokens).loss
    between()
    loss.backward()


def main(job: dict[str, Any]) -> dict[str, Any]:
    """What a job takes."""
    model = _model(job, job["blocks"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(_STEPS):
        torch.cuda.reset_peak_memory_stats()
        _step(job, model, lambda: None)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    stats = torch.cuda.memory_stats()
    del model, optimizer
    moved = []
    for layers in (2, 3):
        model = _model(job, layers)
        with Traced() as traced:
            _step(job, model, lambda: setattr(traced, "way", "backward"))
        moved.append(traced.moved)
    two, three = moved
    return {"allocated": stats["allocated_bytes.all.peak"], "reserved": stats["reserved_bytes.all.peak"],
            "block": {way: three[way] - two[way] for way in three},
            "rest": {way: 3 * two[way] - 2 * three[way] for way in three}}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)
