"""Records execution traces of a few steps of small transformers on the CPU."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F  # noqa: N812
from torch.profiler import ExecutionTraceObserver, profile
from torch.utils.checkpoint import checkpoint

JOINED = "bmm" in sys.argv[1] if len(sys.argv) > 1 else False


class Block(nn.Module):
    def __init__(self, h, a, f, drop):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.proj = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, f), nn.Linear(f, h)
        self.a, self.drop = a, drop

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = (t.view(b, s, self.a, -1).transpose(1, 2) for t in self.qkv(self.n1(x)).split(h, dim=2))
        if JOINED:  # batch and heads as one, as older code has it
            q, k, v = (t.reshape(b * self.a, s, -1) for t in (q, k, v))
            scores = torch.baddbmm(torch.zeros(1, s, s), q, k.transpose(1, 2)).softmax(-1)
            y = torch.bmm(scores, v).view(b, self.a, s, -1)
            return self.rest(x, y)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.drop if self.training else 0.0)
        return self.rest(x, y)

    def rest(self, x, y):
        b, s, h = x.shape
        x = x + F.dropout(self.proj(y.transpose(1, 2).reshape(b, s, h)), self.drop)
        return x + F.dropout(self.down(F.gelu(self.up(self.n2(x)))), self.drop)


class GPT(nn.Module):
    def __init__(self, layers=3, h=48, a=6, f=192, vocab=320, s=64, drop=0.0, ckpt=False):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, h), nn.Embedding(s, h)
        self.blocks = nn.ModuleList(Block(h, a, f, drop) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(h), nn.Linear(h, vocab, bias=False)
        self.head.weight = self.tok.weight
        self.ckpt = ckpt

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for b in self.blocks:
            if self.ckpt == "op":
                from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

                seen = [0]

                def policy(ctx, op, *a, **k):
                    if op == torch.ops.aten.mm.default or op == torch.ops.aten.addmm.default:
                        seen[0] += 1  # noqa: B023
                        if seen[0] % 2 == 0:  # noqa: B023
                            return CheckpointPolicy.MUST_SAVE
                    if "scaled_dot" in str(op):
                        return CheckpointPolicy.MUST_SAVE
                    return CheckpointPolicy.PREFER_RECOMPUTE

                x = checkpoint(
                    b, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
                )
            else:
                x = checkpoint(b, x, use_reentrant="reent" in str(self.ckpt)) if self.ckpt else b(x)
        return self.head(self.norm(x))


def llama(ckpt=False, **kw):
    from transformers import LlamaConfig, LlamaForCausalLM

    c = LlamaConfig(
        **{
            **{
                "num_hidden_layers": 3,
                "hidden_size": 64,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 8,
                "intermediate_size": 176,
                "vocab_size": 512,
                "tie_word_embeddings": False,
                "use_cache": False,
            },
            **kw,
        }
    )
    m = LlamaForCausalLM(c).train()
    if ckpt:
        m.gradient_checkpointing_enable()
    return m


def gpt2(**kw):
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=48, n_head=4, vocab_size=300, n_positions=64, use_cache=False, **kw)
    ).train()


def run(rank, world, name, out, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if world > 1 or name.endswith("_pg"):
        dist.init_process_group("gloo", rank=rank, world_size=world)
    if name.startswith("pp"):
        return pipeline(rank, world, name, out)
    model, b, s, vocab, acc, auto, opt, hf = build(name, rank, world)
    sync = getattr(model, "no_sync", None)

    def step():
        import contextlib

        for i in range(acc):
            ids = torch.randint(0, vocab, (b, s))
            ctx = sync() if sync is not None and i < acc - 1 else contextlib.nullcontext()
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(i == acc - 1)
            with ctx:
                with torch.autocast("cpu", torch.bfloat16, enabled=auto):
                    if hf:
                        loss = model(input_ids=ids, labels=ids).loss
                    else:
                        loss = F.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())
                (loss / acc).backward()
        if "tp2" not in name:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()

    for _ in range(2):
        step()
    path = f"{out}/{name}.{rank}.json"
    et = ExecutionTraceObserver().register_callback(path)
    if os.environ.get("STANDALONE"):
        et.start()
        step()
        et.stop()
    else:
        with profile(activities=[torch.profiler.ProfilerActivity.CPU], execution_trace_observer=et, record_shapes=True):
            for _ in range(int(os.environ.get("STEPS", "1"))):
                step()
    et.unregister_callback()
    if dist.is_initialized():
        dist.destroy_process_group()


def pipeline(rank, world, name, out):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("pp",))
    whole = GPT(layers=4)
    whole.head = nn.Linear(48, 320, bias=False)

    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.tok, self.pos = (whole.tok, whole.pos) if rank == 0 else (None, None)
            n = 4 // world
            self.blocks = nn.ModuleList(list(whole.blocks)[rank * n : (rank + 1) * n])
            self.norm, self.head = (whole.norm, whole.head) if rank == world - 1 else (None, None)

        def forward(self, x):
            if self.tok is not None:
                x = self.tok(x) + self.pos(torch.arange(x.shape[1]))
            for b in self.blocks:
                x = b(x)
            return self.head(self.norm(x)) if self.head is not None else x

    model = Stage()
    stage = PipelineStage(model, rank, world, torch.device("cpu"), group=mesh.get_group("pp"))
    sch = Schedule1F1B(stage, 4, loss_fn=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        ids = torch.randint(0, 320, (8, 32))
        if rank == 0:
            sch.step(ids)
        elif rank == world - 1:
            sch.step(target=ids, losses=[])
        else:
            sch.step()
        opt.step()
        opt.zero_grad()

    step()
    et = ExecutionTraceObserver().register_callback(f"{out}/{name}.{rank}.json")
    with profile(activities=[torch.profiler.ProfilerActivity.CPU], execution_trace_observer=et, record_shapes=True):
        step()
    et.unregister_callback()
    dist.destroy_process_group()


def build(name, rank, world):
    base = name.removesuffix("_pg")
    acc, auto, hf, b, s, vocab = 1, False, False, 2, 32, 320
    kw = {"fused": False}
    if base.startswith("llama"):
        hf, vocab, auto = True, 512, True
        model = llama(ckpt="ckpt" in base, **({"attn_implementation": "eager"} if "eager" in base else {}))
    elif base.startswith("mixtral"):
        from transformers import MixtralConfig, MixtralForCausalLM

        hf, vocab, auto = True, 256, True
        model = MixtralForCausalLM(
            MixtralConfig(
                num_hidden_layers=2,
                hidden_size=64,
                num_attention_heads=8,
                num_key_value_heads=2,
                intermediate_size=96,
                vocab_size=256,
                num_local_experts=4,
                num_experts_per_tok=2,
                use_cache=False,
            )
        ).train()
    elif base.startswith("deepseek"):
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

        hf, vocab, auto = True, 256, True
        model = DeepseekV3ForCausalLM(
            DeepseekV3Config(
                num_hidden_layers=3,
                hidden_size=64,
                num_attention_heads=4,
                num_key_value_heads=4,
                intermediate_size=160,
                moe_intermediate_size=48,
                n_routed_experts=8,
                num_experts_per_tok=2,
                n_shared_experts=1,
                n_group=2,
                topk_group=1,
                first_k_dense_replace=1,
                q_lora_rank=24,
                kv_lora_rank=16,
                qk_rope_head_dim=8,
                qk_nope_head_dim=16,
                v_head_dim=12,
                vocab_size=256,
                use_cache=False,
            )
        ).train()
    elif base.startswith("qwen"):
        from transformers import Qwen3Config, Qwen3ForCausalLM

        hf, vocab, auto = True, 256, True
        model = Qwen3ForCausalLM(
            Qwen3Config(
                num_hidden_layers=2,
                hidden_size=64,
                num_attention_heads=8,
                num_key_value_heads=2,
                head_dim=16,
                intermediate_size=96,
                vocab_size=256,
                tie_word_embeddings=True,
                use_cache=False,
            )
        ).train()
    elif base.startswith("bert"):
        from transformers import BertConfig, BertForMaskedLM

        hf, vocab = True, 256
        model = BertForMaskedLM(
            BertConfig(
                num_hidden_layers=2,
                hidden_size=64,
                num_attention_heads=4,
                intermediate_size=128,
                vocab_size=256,
                max_position_embeddings=64,
            )
        ).train()
    elif base.startswith("neox"):
        from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

        hf, vocab = True, 256
        model = GPTNeoXForCausalLM(
            GPTNeoXConfig(
                num_hidden_layers=2,
                hidden_size=64,
                num_attention_heads=4,
                intermediate_size=256,
                vocab_size=256,
                use_cache=False,
            )
        ).train()
    elif base.startswith("gpt2"):
        hf, vocab = True, 300
        model = gpt2()
    else:
        model = GPT(
            drop=0.1 if "drop" in base else 0.0,
            ckpt="reent" if "reent" in base else "op" if "selop" in base else "ckpt" in base,
        )
    if "lora" in base:
        from peft import LoraConfig, get_peft_model

        tg = ["q_proj", "v_proj"] if "loraqv" in base else "all-linear"
        model = get_peft_model(model, LoraConfig(r=4, target_modules=tg, task_type="CAUSAL_LM", lora_dropout=0.05))
        model.enable_input_require_grads()
    if "acc" in base:
        acc = 3
    if "fused" in base:
        kw = {"fused": True}
    if "pure" in base:
        model = model.to(torch.bfloat16)
        auto = False
    if "ddp" in base:
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.05)
    elif "fsdp2" in base or "hsdp2" in base or "tp2" in base:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        if "hsdp2" in base:
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        elif "tp2" in base:
            whole = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp_shard", "tp"))
            from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

            for blk in model.model.layers:
                parallelize_module(
                    blk,
                    whole["tp"],
                    {
                        "self_attn.q_proj": ColwiseParallel(),
                        "self_attn.k_proj": ColwiseParallel(),
                        "self_attn.v_proj": ColwiseParallel(),
                        "self_attn.o_proj": RowwiseParallel(),
                        "mlp.gate_proj": ColwiseParallel(),
                        "mlp.up_proj": ColwiseParallel(),
                        "mlp.down_proj": RowwiseParallel(),
                    },
                )
            if "vocab" in base:
                from torch.distributed.tensor import Replicate

                parallelize_module(
                    model,
                    whole["tp"],
                    {
                        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
                        "lm_head": ColwiseParallel(output_layouts=Replicate()),
                    },
                )
            mesh = whole["dp_shard"]
        else:
            mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        pol = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        auto = False
        blocks = model.model.layers if hf and base.startswith("llama") else model.transformer.h if hf else model.blocks
        for blk in blocks:
            fully_shard(blk, mesh=mesh, mp_policy=pol, reshard_after_forward="keep" not in base)
        fully_shard(model, mesh=mesh, mp_policy=pol)
    elif "fsdp1" in base:
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
        from torch.distributed.fsdp import MixedPrecision
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        cls = {type(m) for m in (model.model.layers if hf else model.blocks)}
        model = FSDP(
            model,
            auto_wrap_policy=ModuleWrapPolicy(cls),
            device_id=torch.device("cpu"),
            use_orig_params=True,
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        )
        auto = False
    if "compile" in base:
        model = torch.compile(model)
    if "zro" in base:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return (
            model,
            b,
            s,
            vocab,
            acc,
            auto,
            ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3),
            hf,
        )
    if "sgd" in base:
        opt = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    else:
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3, **(kw if "for" not in base else {"foreach": True}))
    return model, b, s, vocab, acc, auto, opt, hf


if __name__ == "__main__":
    name, world, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    os.makedirs(out, exist_ok=True)
    port = 29500 + os.getpid() % 2000
    if world == 1:
        run(0, 1, name, out, port)
    else:
        mp.spawn(run, (world, name, out, port), nprocs=world)
