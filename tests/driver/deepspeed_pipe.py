"""Training steps of one rank of DeepSpeed's PipelineModule, the GPT of `steps.py` as its layers, or with tensor ranks
megatron-core's; run like `deepspeed_steps.py` (its job has `pipeline`, `tensor`, `rank`, `world` and `tied` beside).
Ranks are by stage, then replica, then tensor rank.

Prints a JSON object: highest allocated bytes of the last step, highest reserved bytes of all, and of the last step the
collectives and transfers in order as (kind, bytes, ranks of the group or the peer).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

import steps
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from deepspeed_steps import blind, size_of, stand_ins, watched
from megatron_steps import Nobody
from stand_ins import after, before

_STEPS = 3
_CALLS = {"all_gather_into_tensor": (0, "output_tensor"), "all_gather": (0, "tensor_list"), "all_reduce": (0, "tensor"),
          "reduce_scatter_tensor": (1, "input"), "reduce": (0, "tensor"), "broadcast": (0, "tensor")}
_STORE = Nobody()


def begin(w: dict[str, Any]) -> list[Any]:
    """The rank of a job in which nobody else is; the list of what it calls."""
    os.environ |= {"LOCAL_RANK": "0", "RANK": str(w["rank"]), "WORLD_SIZE": str(w["world"]), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": "29511"}
    c10d._store_based_barrier = lambda *_, **__: None
    made = dist.new_group
    dist.new_group = lambda *a, **k: made(*a, **{**k, "backend": "nccl"})
    dist.init_process_group("nccl", rank=w["rank"], world_size=w["world"], store=_STORE)
    calls: list[Any] = []

    watched(_CALLS, lambda name, of, group: calls.append(
        (name, size_of(of), str(of[0].dtype)[6:], dist.get_world_size(group))))

    def passed(name: str) -> Any:
        def call(tensor: torch.Tensor, *peer: Any, **named: Any) -> None:
            peer = peer[0] if peer else named.get("src", named.get("dst"))
            calls.append((name, tensor.numel() * tensor.element_size(), str(tensor.dtype)[6:], peer))
        return call
    dist.send, dist.recv = passed("send"), passed("recv")
    return calls


class Embedding(torch.nn.Module):
    """Tokens and positions."""

    def __init__(self, hidden: int, vocab: int, sequence: int) -> None:
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(vocab, hidden), torch.nn.Embedding(sequence, hidden)

    @property
    def weight(self) -> torch.Tensor:
        """What the head shares."""
        return self.wte.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.wte(tokens) + self.wpe(torch.arange(tokens.size(1), device=tokens.device))


class ParallelTransformerLayerPipe(steps.Block):
    """The name by which DeepSpeed knows what to recompute."""


def layers_of(w: dict[str, Any]) -> list[Any]:
    """The model as a list of layers."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec
    shape = (w["hidden"], w["vocab"], w["sequence"])
    blocks = [LayerSpec(ParallelTransformerLayerPipe, w["hidden"], w["heads"]) for _ in range(w["layers"])]
    norm = LayerSpec(torch.nn.LayerNorm, w["hidden"])
    if w["tied"]:
        def logits(own: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, own.weight)
        spec = {"tied_weight_attr": "weight"}
        return [TiedLayerSpec("embed", Embedding, *shape, **spec), *blocks, norm,
                TiedLayerSpec("embed", Embedding, *shape, forward_fn=logits, **spec)]
    return [LayerSpec(Embedding, *shape), *blocks, norm,
            LayerSpec(torch.nn.Linear, w["hidden"], w["vocab"], bias=False)]


def cut_layers(w: dict[str, Any]) -> list[Any]:
    """megatron-core's layers as Megatron-DeepSpeed's GPTModelPipe has them (recalled): tied tables, logits in fp32."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce as linear
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from megatron_steps import configured
    config = configured({**w, "virtual": None, "sequence_parallel": False, "recompute": "none"})
    config.gradient_accumulation_fusion = False

    class EmbeddingPipe(LanguageModelEmbedding):
        def __init__(self) -> None:
            super().__init__(config, w["vocab"], w["sequence"])

        @property
        def weight(self) -> torch.Tensor:
            return self.word_embeddings.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens, torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens))

    class ParallelTransformerLayerPipe(TransformerLayer):
        def __init__(self, number: int) -> None:
            super().__init__(config, get_gpt_layer_local_spec().submodules, number)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x, None)[0]

    def logits(own: Any, x: torch.Tensor) -> torch.Tensor:
        return linear(x, own.weight, None, gradient_accumulation_fusion=False, async_grad_allreduce=True,
                      sequence_parallel=False)
    norm = get_gpt_layer_local_spec().submodules.input_layernorm
    spec = {"tied_weight_attr": "weight"}
    return [TiedLayerSpec("embed", EmbeddingPipe, **spec),
            *[LayerSpec(ParallelTransformerLayerPipe, 1 + number) for number in range(w["layers"])],
            LayerSpec(norm, config=config, hidden_size=w["hidden"], eps=1e-5),
            TiedLayerSpec("embed", EmbeddingPipe, forward_fn=logits, **spec), lambda x: x.float()]


def as_it_was() -> None:
    """Megatron of 2022 had no buffer that stays for scores (what it had was gone behind their product); and what a sum
    over rows takes for a moment (a MiB for each SM, sim/memory/README.md) is left out, where Python asks for it."""
    from megatron.core.utils import GlobalMemoryBuffer

    def nothing(_: Any, shape: Any, dtype: torch.dtype, name: str) -> torch.Tensor:
        return torch.empty(1, dtype=dtype, device="cuda").expand(shape)
    GlobalMemoryBuffer.get_tensor = nothing
    summed = torch.Tensor.sum

    def over_rows(x: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        rows = named.get("dim") in (0, (0, 1)) and not given
        return torch.empty(x.size(-1), dtype=x.dtype, device=x.device) if rows else summed(x, *given, **named)
    torch.Tensor.sum = over_rows


def cut_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Megatron's own."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
    return vocab_parallel_cross_entropy(logits, labels.t().contiguous()).mean()


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of the last stage."""
    return torch.nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


def main(w: dict[str, Any]) -> dict[str, Any]:
    """A few optimizer steps."""
    cut = w.get("tensor", 1) > 1
    if cut:
        before()
    calls = begin(w)
    blind()
    if cut:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        torch.cuda.set_device(0)
        parallel_state.initialize_model_parallel(w["tensor"], w["pipeline"])
        after()
        as_it_was()
        model_parallel_cuda_manual_seed(1)
    import deepspeed
    import deepspeed.runtime.pipe.engine as engine_module
    import deepspeed.runtime.pipe.p2p as p2p
    import deepspeed.runtime.utils as utils
    from_meta, share = utils.PartitionedTensor.from_meta, w["batch"] * w["sequence"] * w["hidden"] // w.get("tensor", 1)
    stand_ins()
    deepspeed.init_distributed(dist_backend="nccl")
    p2p.can_send_recv = lambda: True
    half = torch.bfloat16 if w["precision"] == "bf16" else torch.float16
    shape = (w["sequence"], w["batch"]) if cut else (w["batch"], w["sequence"])
    shape = (*shape, w["hidden"])

    # what PartitionedTensor.to_meta says
    parts = [len(shape), *shape, w.get("tensor", 1), 0, *[number * share for number in range(w.get("tensor", 1) + 1)]]

    def told(_: Any, meta: torch.Tensor, local_part: torch.Tensor, group: Any) -> Any:
        return from_meta(torch.LongTensor(parts), local_part, group)
    utils.PartitionedTensor.from_meta = classmethod(told)

    def met(self: Any, stage: int) -> Any:
        if cut:
            return (torch.zeros(len(parts), dtype=torch.int64, device=self.device),
                    torch.zeros(share, dtype=half, device=self.device))
        tensors = [torch.LongTensor(data=[0] * size).to(self.device) for size in (1, 1, 3)]
        for tensor in tensors:
            p2p.recv(tensor, stage)
        return torch.zeros(shape, dtype=half, device=self.device, requires_grad=False)
    engine_module.PipelineEngine._recv_tensor_meta = met
    engine_module.PipelineEngine._aggregate_total_loss = lambda self: torch.zeros(1)
    from deepspeed.pipe import PipelineModule

    class GPTModelPipe(PipelineModule):
        pass
    if cut:
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology as Topology
        deepspeed.checkpointing.configure(parallel_state, partition_activations=w.get("partition_activations", False))
        stages = {"topology": Topology(w["pipeline"], w["tensor"], w["world"] // w["pipeline"] // w["tensor"])}
    else:
        stages = {"num_stages": w["pipeline"]}
    model = GPTModelPipe(cut_layers(w) if cut else layers_of(w), **stages, loss_fn=cut_loss if cut else loss,
                         partition_method="type:transformer",
                         activation_checkpoint_interval=int(w["recompute"] == "full"))
    config = {"train_micro_batch_size_per_gpu": w["batch"], "gradient_accumulation_steps": w["micro_steps"],
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "zero_optimization": w["zero"],
              "steps_per_print": 1000, w["precision"]: {"enabled": True}, **w.get("config", {})}
    engine = deepspeed.initialize(model=model, model_parameters=[p for p in model.parameters() if p.requires_grad],
                                  config=config, dist_init_required=False)[0]

    class Data:
        def __next__(self) -> Any:
            size = (w["batch"], w["sequence"])
            return [torch.randint(0, w["vocab"], size) for _ in range(2)]
    reserved, states = 0, torch.cuda.memory_stats()["allocated_bytes.all.current"]
    for _ in range(w.get("steps", _STEPS)):
        torch.cuda.reset_peak_memory_stats()
        calls.clear()
        engine.train_batch(Data())
        stats = torch.cuda.memory_stats()
        reserved = max(reserved, stats["reserved_bytes.all.peak"])
    return {"allocated": stats["allocated_bytes.all.peak"], "reserved": reserved, "states": states,
            "after": stats["allocated_bytes.all.current"], "parameters": sum(p.numel() for p in model.parameters()),
            "calls": calls}


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        found = main(json.loads(sys.argv[1]))
    print(json.dumps(found), flush=True)
    os._exit(0)
