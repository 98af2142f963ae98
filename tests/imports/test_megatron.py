"""Megatron-LM's launch scripts as scenarios."""

from __future__ import annotations

import contextlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import UserError
from sim.imports.draft import Draft, Imported
from sim.imports.megatron.read import read
from sim.imports.read import import_files
from sim.scenario.fields.schema import Scenario

FILES = Path(__file__).parent / "files"
#: examples/gpt3/train_gpt3_175b_distributed.sh of Megatron-LM, as remembered.
GPT = (FILES / "train_gpt3_175b_distributed.sh").read_text(encoding="utf-8")
#: examples/mixtral/train_mixtral_8x7b_distributed.sh, as remembered.
MIXTRAL = (FILES / "train_mixtral_8x7b_distributed.sh").read_text(encoding="utf-8")
#: A script in the manner of examples/llama (2025), fp8 on H100.
LLAMA = (FILES / "train_llama3_8b_fp8.sh").read_text(encoding="utf-8")


def finished(files: list[str], sets: tuple[str, ...]) -> Imported:
    draft = Draft("job", sets)
    read(files, draft)
    return draft.finish()


def imported(text: str, *sets: str, name: str = "run.sh", cluster: str = "dgx-h100") -> Imported:
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(text, encoding="utf-8")
        return finished([str(path)], (f"cluster.topology={cluster}", *sets))


def names(found: Imported, kind: Any) -> set[str]:
    return {note.said.rpartition(": ")[2] for note in found.of(kind)}


#: The least a script says.
LEAST = ("python pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
         "--max-position-embeddings 1024 --micro-batch-size 2 --vocab-size 50257 --world-size 8 ")


def scenario(more: str = "", *sets: str) -> Scenario:
    return imported(LEAST + more, "cluster.nodes=1", *sets).scenario


def test_settings_of_the_allocator() -> None:
    found = imported("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,garbage_collection_threshold:0.8,"
                     f"max_split_size_mb:512 {LEAST}", "cluster.nodes=1")
    asked = found.scenario.software.allocator
    assert (asked.expandable_segments, asked.max_split_size_mb) == (True, 512)
    (left,) = [note for note in found.of("left") if "ALLOC_CONF" in note.said]
    assert left.text.startswith("garbage_collection_threshold:")
    for wrong in ("expandable_segments:yes", "max_split_size_mb:20"):
        with pytest.raises(UserError, match="PYTORCH_CUDA_ALLOC_CONF: expected"):
            imported(f"export PYTORCH_CUDA_ALLOC_CONF={wrong}\n{LEAST}", "cluster.nodes=1")


def test_gpt_175b() -> None:
    found = imported(GPT)
    s = found.scenario
    assert (s.cluster.nodes, s.cluster.gpus_per_node, s.data_parallel, s.micro_steps) == (16, 8, 1, 1536)
    assert (s.model.layers, s.model.hidden, s.model.heads, s.model.ffn, s.model.vocab) == (96, 12288, 96, 49152, 50257)
    assert (s.model.dropout, s.model.positions, s.model.tied_embeddings, s.model.bias) == (0.1, "learned", True, True)
    assert (s.training.precision.name, s.training.recompute, s.training.attention) == ("megatron-fp16", "none", "flash")
    assert (s.parallel.tensor, s.parallel.pipeline, s.parallel.strategy, s.parallel.overlap) == (8, 16, "ddp", False)
    assert (s.software.framework, s.software.max_connections) == ("megatron", 1)
    assert names(found, "left") == {"--rampup-batch-size"}
    assert names(found, "unknown") == set()
    line = next(note for note in found.notes if note.field == "training.global_batch")
    assert (line.value, line.kind) == (1536, "taken")


def test_mixtral() -> None:
    found = imported(MIXTRAL)
    s = found.scenario
    assert s.gpus == 32
    assert s.model.moe is not None
    assert (s.model.moe.experts, s.model.moe.top_k, s.model.moe.expert_ffn) == (8, 2, 14336)
    assert (s.model.kv_heads, s.model.gated_mlp, s.model.activation, s.model.norm) == (8, True, "silu", "rmsnorm")
    assert (s.model.bias, s.model.tied_embeddings, s.model.positions, s.model.dropout) == (False, False, "rotary", 0)
    assert (s.model.vocab, s.model.max_positions) == (32000, 32768)
    assert (s.parallel.pipeline, s.parallel.virtual_stages, s.parallel.schedule) == (4, 2, "interleaved")
    assert (s.parallel.expert, s.parallel.strategy, s.parallel.overlap) == (8, "zero1", True)
    assert not s.parallel.sequence_parallel  # one tensor rank
    assert s.training.precision.name == "megatron-bf16"
    assert names(found, "unknown") == set()
    assert names(found, "left") == {"--moe-permute-fusion"}  # off, where today's stack has it
    assert s.software.dispatcher == "alltoall"
    assert names(imported(MIXTRAL, "software.year=2024"), "left") == set()


def test_llama_in_fp8() -> None:
    found = imported(LLAMA)
    s = found.scenario
    precision = s.training.precision
    assert (s.cluster.nodes, s.data_parallel) == (2, 8)
    assert (s.model.layers, s.model.head_dim, s.model.vocab) == (32, 128, 128257)
    assert (precision.compute, precision.parameters, precision.gradients, precision.gather, precision.reduce) == (
        "fp8", "bf16", "bf16", "fp8", "bf16")
    assert (s.training.recompute, s.training.attention, s.parallel.sequence_parallel) == ("selective", "flash", True)
    assert names(found, "left") == {"--cross-entropy-loss-fusion"}
    assert names(found, "unknown") == set()


@pytest.mark.parametrize(("more", "field", "value"), [
    ("", "training.global_batch", 16),
    ("--global-batch-size 64", "training.global_batch", 64),
    ("", "training.precision.name", "fp32"),
    ("--bf16", "training.precision.name", "megatron-bf16"),
    ("--bf16 --accumulate-allreduce-grads-in-fp32", "training.precision.name", "megatron-bf16"),
    ("--bf16 --grad-reduce-in-bf16", "training.precision.reduce", "bf16"),
    ("--fp16 --accumulate-allreduce-grads-in-fp32", "training.precision.gradients", "fp32"),
    ("--fp16", "training.precision.gradients", "fp16"),
    ("--bf16 --fp8-format hybrid", "training.precision.name", "fp8"),
    ("--bf16 --fp8-hybrid", "training.precision.compute", "fp8"),
    ("--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
     "training.precision.optimizer", "bf16"),
    ("--bf16 --exp-avg-dtype bf16", "training.precision.optimizer", "fp32"),
    ("--bf16 --use-torch-fsdp2", "training.precision.name", "mixed-bf16"),
    ("--bf16 --use-torch-fsdp2", "parallel.strategy", "fsdp"),
    ("", "parallel.strategy", "ddp"),
    ("--use-distributed-optimizer", "parallel.strategy", "zero1"),
    ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", "parallel.strategy", "fsdp"),
    ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "parallel.strategy", "zero2"),
    ("--deepspeed --zero-stage 3 --bf16", "parallel.strategy", "zero3"),
    ("--deepspeed --zero-stage 1 --bf16", "software.framework", "deepspeed"),
    ("", "parallel.overlap", False),
    ("--overlap-grad-reduce", "parallel.overlap", True),
    ("--use-megatron-fsdp", "parallel.overlap", True),
    ("--bf16 --ddp-bucket-size 40000000", "parallel.bucket_mb", 153),
    ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "training.recompute", "full"),
    ("--recompute-granularity selective", "training.recompute", "selective"),
    ("--recompute-activations", "training.recompute", "selective"),
    ("--checkpoint-activations", "training.recompute", "full"),
    ("--recompute-granularity full --recompute-method block --recompute-num-layers 3", "training.recompute.layers", 3),
    ("--recompute-granularity selective --recompute-modules core_attn mlp", "training.recompute.modules",
     ["core_attn", "mlp"]),
    ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 --recompute-granularity full "
     "--recompute-method block --recompute-num-layers 1", "training.recompute.layers", 2),
    ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4", "parallel.virtual_stages", 1),
    ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4", "parallel.virtual_stages", 4),
    ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3", "parallel.split", [3, 5]),
    ("--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 1",
     "parallel.split", [3, 2, 2, 1]),
    ("--pipeline-model-parallel-size 2 --account-for-embedding-in-pipeline-split", "parallel.split_slots.embedding", 1),
    ("--tensor-model-parallel-size 2 --sequence-parallel", "parallel.sequence_parallel", True),
    ("--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap", "parallel.async_tensor", True),
    ("--context-parallel-size 2 --cp-comm-type all_gather", "parallel.context_exchange", "all-gather"),
    ("--context-parallel-size 2 --cp-comm-type a2a", "parallel.context_exchange", "all-to-all"),
    ("--context-parallel-size 2 --cp-comm-type a2a", "parallel.context_all_to_all", None),
    ("--context-parallel-size 8 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4",
     "parallel.context_all_to_all", 2),
    ("--context-parallel-size 8 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4",
     "parallel.context_exchange", "all-to-all"),
    ("--ds-sequence-parallel-size 4", "parallel.context_exchange", "all-to-all"),
    ("--ds-sequence-parallel-size 4", "parallel.context", 4),
    ("--use-tp-pp-dp-mapping", "parallel.order", ["tensor", "context", "expert", "pipeline", "data"]),
    ("--optimizer sgd", "training.optimizer", "sgd-momentum"),
    ("--use-distributed-optimizer --bf16 --optimizer-cpu-offload --optimizer-offload-fraction 0.5",
     "parallel.offload.optimizer_fraction", 0.5),
    ("--attention-backend unfused", "training.attention", "eager"),
    ("--transformer-impl local --bf16", "training.attention", "eager"),
    ("--transformer-impl local --bf16 --use-flash-attn", "training.attention", "flash"),
    ("--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion", "software.fused", False),
    ("--no-masked-softmax-fusion", "software.fused", True),
    ("--cuda-graph-impl local", "software.cuda_graphs", True),
    ("--deterministic-mode", "software.deterministic", True),
    ("--no-gradient-accumulation-fusion", "software.fused_accumulation", False),
    ("--swiglu", "model.ffn", 2688),
    ("--swiglu --ffn-hidden-size 4096", "model.ffn", 4096),
    ("--squared-relu", "model.activation", "relu"),
    ("--num-query-groups 4", "model.kv_heads", 16),
    ("--pad-vocab-size-to 51200", "model.vocab", 51200),
    ("--vocab-extra-ids 100", "model.vocab", 50357),
    ("--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16", "training.precision.gradients", "bf16"),
    ("--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16", "training.precision.reduce", "bf16"),
    ("--bf16", "training.attention", "flash"),
    ("", "training.attention", "eager"),
    ("--bf16 --deepspeed", "training.attention", "eager"),
    ("--bf16 --deepspeed --use-flash-attn-v2", "training.attention", "flash"),
    ("--bf16 --DDP-impl local", "training.attention", "eager"),
    ("--bf16 --attention-backend auto", "training.attention", "flash"),
    ("--bf16 --deepspeed --zero-stage 0", "parallel.strategy", "ddp"),
    ("--bf16 --deepspeed --zero-stage 0 --pipeline-model-parallel-size 2", "parallel.strategy", "zero1"),
    ("--bf16 --deepspeed --zero-stage 0 --pipeline-model-parallel-size 2", "training.precision.gradients", "fp32"),
    ("--bf16 --deepspeed --zero-stage 0 --pipeline-model-parallel-size 2", "training.precision.reduce", "bf16"),
    ("--fp16 --deepspeed --zero-stage 0 --pipeline-model-parallel-size 2", "parallel.strategy", "ddp"),
    ("--pipeline-model-parallel-size 2 --pp-partition-method 'type:transformer|embedding'",
     "parallel.split_slots.head", 1),
    ("--pipeline-model-parallel-size 2 --pp-partition-method type:transformer", "parallel.split_slots.head", 0),
    ("--group-query-attention --num-query-groups 4", "model.kv_heads", 4),
    ("--kv-channels 128", "model.head_dim", 128),
    ("--qk-layernorm", "model.qk_norm", "head"),
    ("--add-qkv-bias", "model.qkv_bias", True),
    ("--window-size 127,0", "model.window", 128),
    ("--window-size '(127,0)' --window-attn-skip-freq 4", "model.full_every", 4),
    ("--make-vocab-size-divisible-by 1024", "model.vocab", 51200),
    ("--hidden-dropout 0", "model.dropout", 0),
    ("--num-experts 8 --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 1024", "model.moe.shared_experts",
     2),
    ("--num-experts 8 --moe-layer-freq 2", "model.moe.every", 2),
    ("--num-experts 8 --moe-layer-freq '([0]*3+[1]*5)'", "model.moe.first_dense", 3),
    ("--num-experts 8 --moe-layer-freq [1,0,1,0,1,0,1,0]", "model.moe.every", 2),
    ("--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 2", "model.moe.top_groups", 2),
    ("--num-experts 8 --moe-expert-capacity-factor 1.25", "model.moe.capacity", 1.25),
    ("--num-experts 8 --moe-expert-capacity-factor 1.25", "model.moe.padded", False),
    ("--num-experts 8 --moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity", "model.moe.padded", True),
    ("--num-experts 8 --expert-model-parallel-size 4 --moe-ffn-hidden-size 512 --moe-shared-expert-overlap "
     "--moe-shared-expert-intermediate-size 512", "parallel.overlap_experts", "shared"),
    ("--num-experts 8 --expert-model-parallel-size 4 --moe-token-dispatcher-type flex", "software.dispatcher", "flex"),
    ("--num-experts 8 --expert-model-parallel-size 4 --moe-enable-deepep", "software.dispatcher", "flex"),
    ("--num-experts 8 --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall", "software.dispatcher",
     "alltoall"),
    ("--num-experts 8 --expert-model-parallel-size 4", "software.dispatcher", "alltoall"),
    ("--num-experts 8 --expert-model-parallel-size 4 --tensor-model-parallel-size 2 --sequence-parallel "
     "--expert-tensor-parallel-size 1", "parallel.expert_tensor", 1),
    ("--num-experts 8 --expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
     "parallel.expert_tensor", 2),
    ("--num-experts 8 --expert-model-parallel-size 4", "parallel.expert_tensor", None),
    ("--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512", "model.mla.kv_rank", 512),
    ("--multi-latent-attention --qk-layernorm", "model.mla.rope_dim", 64),
    ("--bf16 --optimizer muon", "training.optimizer", "muon"),
    ("--bf16 --optimizer muon", "parallel.strategy", "ddp"),
    ("--bf16 --optimizer dist_muon", "training.optimizer", "muon"),
    ("--bf16 --optimizer dist_muon", "parallel.strategy", "zero1"),
    ("--bf16 --optimizer dist_muon --muon-num-ns-steps 8", "training.muon.ns_steps", 8),
    ("--bf16 --optimizer muon --muon-tp-mode duplicated", "training.muon.tensor", "duplicated"),
    ("--bf16 --optimizer muon --muon-use-nesterov", "training.muon.nesterov", True),
    ("--bf16 --optimizer muon", "training.muon.nesterov", None),
    ("--bf16 --optimizer muon --muon-no-split-qkv", "training.muon.split_qkv", False),
])
def test_one_field(more: str, field: str, value: Any) -> None:
    found: Any = scenario(more)
    for part in field.split("."):
        found = getattr(found, part)
    assert found == value


@pytest.mark.parametrize(("more", "left"), [
    ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 4", "--recompute-num-layers"),
    ("--qk-l2-norm", "--qk-l2-norm"),
    ("--optimizer soap", "--optimizer"),
    ("--bf16 --optimizer muon --muon-fp32-matmul-prec high", "--muon-fp32-matmul-prec"),
    ("--deepspeed --bf16 --optimizer muon", "--optimizer"),
    ("--attention-dropout 0", "--attention-dropout"),
    ("--num-experts 8 --moe-layer-freq [1,0,0,1,1,1,1,1]", "--moe-layer-freq"),
    ("--use-distributed-optimizer --overlap-grad-reduce", "--overlap-grad-reduce"),
    ("--context-parallel-size 2 --cp-comm-type a2a+p2p", "--cp-comm-type"),
    ("--context-parallel-size 2 --cp-comm-type p2p p2p a2a p2p p2p p2p p2p p2p", "--cp-comm-type"),
    ("--no-bias-dropout-fusion", "--no-bias-dropout-fusion"),
    ("--pipeline-model-parallel-size 2 --pp-partition-method parameters", "--pp-partition-method"),
    ("--num-experts 8", "--moe-grouped-gemm"),
    ("--num-experts 8 --moe-grouped-gemm", "--moe-permute-fusion"),
    ("--num-experts 8 --moe-router-dtype fp32", "--moe-router-dtype"),
    ("--num-experts 8 --moe-router-fusion", "--moe-router-fusion"),
    ("--num-experts 8 --moe-router-padding-for-fp8", "--moe-router-padding-for-fp8"),
    ("--num-experts 8 --moe-router-padding-for-quantization", "--moe-router-padding-for-quantization"),
    ("--cuda-graph-impl transformer_engine --cuda-graph-scope attn mlp", "--cuda-graph-scope"),
    ("--enable-cuda-graph --cuda-graph-scope attn", "--cuda-graph-scope"),
    ("--num-experts 8 --expert-model-parallel-size 4 --moe-token-dispatcher-type flex --moe-shared-expert-overlap "
     "--moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 512", "--moe-shared-expert-overlap"),
    ("--embed-layernorm", "--embed-layernorm"), ("--sft", "--sft"),
    ("--reset-attention-mask", "--reset-attention-mask"),
    ("--no-masked-softmax-fusion --attention-backend unfused", "--no-masked-softmax-fusion"),
    ("--use-distributed-optimizer --bf16 --fp8-format hybrid --fp8-recipe blockwise", "--fp8-recipe"),
])
def test_what_no_field_says(more: str, left: str) -> None:
    assert left in names(imported(LEAST + more, "cluster.nodes=1"), "left")


@pytest.mark.parametrize("more", [
    "--cuda-graph-impl local --cuda-graph-scope full_iteration", "--cuda-graph-impl transformer_engine",
    "--cuda-graph-impl none --cuda-graph-scope attn", "--cuda-graph-impl local --cuda-graph-scope full"])
def test_graphs_of_whole_layers_leave_nothing(more: str) -> None:
    found = imported(LEAST + more, "cluster.nodes=1")
    assert "--cuda-graph-scope" not in names(found, "left") | names(found, "unknown")
    assert found.scenario.software.cuda_graphs == ("none" not in more)


@pytest.mark.parametrize(("more", "words"), [
    ("--num-layers x", "run.sh:1: --num-layers: expected a whole number of at least 1, found 'x'"),
    ("--num-layers $N", "found '$N' (give the variable a value in the script, or --set model.layers=N)"),
    ("--normalization $(cat a b)", "found '$(cat...)' (give the variable a value in the script, or --set model.norm="),
    ("--normalization GroupNorm", "expected one of layernorm, rmsnorm, found 'GroupNorm'"),
    ("--position-embedding-type sine", "learned_absolute"),
    ("--recompute-granularity some", "one of full, selective"),
    ("--recompute-granularity full --recompute-method block", "--recompute-num-layers beside it"),
    ("--recompute-granularity selective --recompute-modules core", "training.recompute"),
    ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3", "divides 8 layers"),
    ("--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 3", "equal shares"),
    ("--window-size wide", "two whole numbers"),
    ("--num-experts 8 --moe-layer-freq [1,0", "ones and zeros"),
    ("--num-experts 8 --moe-layer-freq __import__('os')", "ones and zeros"),
    ("--bf16 maybe", "expected true or false"),
    ("--data-parallel-sharding-strategy all --use-megatron-fsdp", "no_shard"),
    ("--attention-backend new", "flash"),
])
def test_bad_values(more: str, words: str) -> None:
    with pytest.raises(UserError) as raised:
        scenario(more)
    assert words in str(raised.value)


def test_a_log_of_arguments() -> None:
    values = {"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "ffn_hidden_size": 4096,
              "encoder_num_layers": 8, "seq_length": 1024, "encoder_seq_length": 1024, "micro_batch_size": 2,
              "global_batch_size": 32, "padded_vocab_size": 50304, "world_size": 16, "bf16": True, "fp16": False,
              "params_dtype": "torch.bfloat16", "add_bias_linear": False, "group_query_attention": False,
              "num_query_groups": 1, "kv_channels": 64, "attention_backend": "AttnBackend.auto",
              "tensor_model_parallel_size": 2, "sequence_parallel": True, "use_distributed_optimizer": True,
              "overlap_grad_reduce": True, "overlap_param_gather": True, "virtual_pipeline_model_parallel_size": None,
              "hidden_dropout": 0.0, "attention_dropout": 0.0, "recompute_granularity": None, "lr": 0.1,
              "mtp_num_layers": None, "cross_entropy_loss_fusion": False, "bias_gelu_fusion": True,
              "masked_softmax_fusion": True, "moe_token_dropping": False, "something_new": False}
    text = "\n".join(f"  {key} {'.' * (48 - len(key))} {value}" for key, value in values.items())
    found = imported(text, name="log.txt")
    s = found.scenario
    assert (s.gpus, s.parallel.tensor, s.parallel.strategy, s.parallel.overlap) == (16, 2, "zero1", True)
    assert (s.model.bias, s.model.kv_heads, s.model.vocab, s.training.precision.name) == (
        False, 16, 50304, "megatron-bf16")
    assert names(found, "left") == set()
    assert names(found, "unknown") == set()


def test_yaml_and_other_kinds_of_models() -> None:
    text = "language_model: {num_layers: 8, hidden_size: 1024, num_attention_heads: 16, add_bias_linear: false}\n" \
           "model_parallel: {tensor_model_parallel_size: 2, bf16: true}\nmicro_batch_size: 2\nseq_length: 512\n" \
           "vocab_size: 1000\n"
    s = imported(text, "cluster.nodes=1", name="a.yaml").scenario
    assert (s.parallel.tensor, s.model.bias, s.training.precision.name) == (2, False, "megatron-bf16")
    bert = imported(LEAST.replace("pretrain_gpt", "pretrain_bert"), "cluster.nodes=1").scenario
    assert bert.model.kind == "encoder"
    t5 = imported(LEAST.replace("pretrain_gpt", "pretrain_t5").replace("--num-layers 8", "--encoder-num-layers 8 "
                  "--decoder-num-layers 6").replace("--seq-length 1024", "--encoder-seq-length 512 "
                                                    "--decoder-seq-length 128"), "cluster.nodes=1").scenario
    assert (t5.model.kind, t5.model.layers, t5.model.decoder_layers, t5.training.sequence,
            t5.training.decoder_sequence) == ("encoder-decoder", 8, 6, 512, 128)


def test_a_script_and_the_file_it_sources(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("MODEL_ARGS=(--num-layers 8 --hidden-size 1024 --num-attention-heads 16)\n"
                                   "MORE='--seq-length 512 --vocab-size 1000'\n", encoding="utf-8")
    (tmp_path / "b.sh").write_text("source a.sh\npython pretrain_gpt.py ${MODEL_ARGS[@]} $MORE --micro-batch-size 1 "
                                   "--bf16\n", encoding="utf-8")
    found = finished([str(tmp_path / name) for name in ("a.sh", "b.sh")], ("cluster.topology=dgx-h100",))
    assert (found.scenario.model.layers, found.scenario.training.sequence) == (8, 512)


@given(st.text(max_size=60), st.sampled_from(
    ["num-layers", "fp8-format", "moe-layer-freq", "window-size", "recompute-modules", "recompute-granularity",
     "nproc-per-node", "tokenizer-model", "vocab-size", "bf16", "cp-comm-type", "optimizer-offload-fraction"]),
    st.sampled_from(["x.sh", "x.yaml", "x.json"]))
def test_any_value_ends_well(value: str, name: str, file: str) -> None:
    text = LEAST + f"--num-experts 8 --{name} {value}\n" if file == "x.sh" else f"{name}: {value}"
    with contextlib.suppress(UserError):
        imported(text, "cluster.nodes=1", name=file)


def test_instances_of_the_optimizer_share_the_ranks() -> None:
    more = "--use-distributed-optimizer --num-distributed-optimizer-instances 4"
    assert imported(LEAST + more).scenario.parallel.sharding_factor == 2  # of eight GPUs


def test_a_value_of_the_command_line_for_one_that_is_not_known() -> None:
    text = LEAST.replace("--num-layers 8", "--num-layers $2") + (
        "--tensor-model-parallel-size $1 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
        "--normalization $NORM")
    found = imported(text, "cluster.nodes=1", "parallel.tensor=4", "model.layers=8", "model.norm=rmsnorm")
    s = found.scenario
    assert (s.parallel.tensor, s.model.layers, s.parallel.virtual_stages, s.model.norm) == (4, 8, 2, "rmsnorm")
    assert sorted(note.said.rpartition(": ")[2] for note in found.of("left")) == [
        "--normalization", "--num-layers", "--tensor-model-parallel-size"]
    whole = imported(LEAST + "--tensor-model-parallel-size $1", "cluster.nodes=1", "parallel={tensor: 2}").scenario
    assert whole.parallel.tensor == 2
    with pytest.raises(UserError, match=r"or --set parallel\.tensor=N"):
        imported(text, "cluster.nodes=1", "model.layers=8", "model.norm=rmsnorm")


SIZES = ("pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
         "--micro-batch-size 2 --bf16 ")


def test_eager_attention_where_the_gpu_is_older() -> None:
    one = imported(f"python {SIZES}".replace("--bf16", "--fp16"), cluster="single-v100-32g-sxm")
    assert one.scenario.training.attention == "eager"
    assert any(note.field == "training.attention" and "bf16" in note.text for note in one.of("assumed"))


@pytest.mark.parametrize(("text", "nodes", "gpus"), [
    (f"#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=1\n#SBATCH --gres=gpu:8\nsrun torchrun --nproc-per-node $N {SIZES}",
     4, 8),
    (f"#SBATCH <SLURM OPTIONS> --nodes=16 --exclusive --ntasks-per-node=8 # all\nsrun python {SIZES}", 16, 8),
    (f"#SBATCH -N 2 --ntasks-per-node 4\nsrun python {SIZES}", 2, 4),
    (f"#SBATCH -N2 --gpus-per-node=a100:4 --ntasks-per-node=1\nsrun python {SIZES}", 2, 4),
    (f"#SBATCH --nodes=3\ntorchrun --nnodes $SLURM_NNODES --nproc_per_node 8 {SIZES}", 3, 8),
    (f"mpirun -np 16 python {SIZES}", 2, 8),
    (f"srun --nodes 2 --ntasks-per-node 8 python {SIZES}", 2, 8),
    (f"torchrun {SIZES}", 1, 1),
    (f"torchrun --nnodes 2 {SIZES}", 2, 1),
    (f"python3 -u {SIZES}", 1, 1),
    (f"python -m torch.distributed.run --nproc_per_node 4 {SIZES}", 1, 4),
    (f"python {SIZES} --tensor-model-parallel-size 2", 1, 8),
    (f"WORLD_SIZE=16\npython {SIZES}", 1, 8),
    (f"deepspeed {SIZES}", 1, 8),
])
def test_how_many_gpus(text: str, nodes: int, gpus: int) -> None:
    cluster = imported(text).scenario.cluster
    assert (cluster.nodes, cluster.gpus_per_node) == (nodes, gpus)


@pytest.mark.parametrize(("program", "vocab"), [("gpt", 50257), ("bert", 30522), ("t5", 30522)])
def test_a_program_has_a_tokenizer_of_its_own(program: str, vocab: int) -> None:
    found = imported(LEAST.replace("pretrain_gpt", f"pretrain_{program}").replace("--vocab-size 50257", ""),
                     "cluster.nodes=1")
    assert found.scenario.model.vocab == vocab
    assert any(note.field == "model.vocab" and f"pretrain_{program}.py's own" in note.text
               for note in found.of("assumed"))


def test_two_files_that_contradict_each_other(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("ARGS=(--num-layers 8\n --seq-length 512)\n", encoding="utf-8")
    (tmp_path / "b.sh").write_text(LEAST, encoding="utf-8")
    (tmp_path / "c.sh").write_text("ARGS=(--num-layers 8 --seq-length $SEQ)\n", encoding="utf-8")
    files = [str(tmp_path / name) for name in ("a.sh", "b.sh", "c.sh")]
    with pytest.raises(UserError) as raised:
        finished(files[:2], ("cluster.topology=dgx-h100",))
    assert f"{files[1]}:1: --seq-length: says '1024', but {files[0]}: --seq-length (line 2) says '512'" in str(
        raised.value)
    assert finished(files[1:], ("cluster.topology=dgx-h100",)).scenario.training.sequence == 1024


def test_a_models_config_beside_a_script(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8, '
        '"num_attention_heads": 16, "intermediate_size": 2816, "vocab_size": 32000, "attention_dropout": 0.0}',
        encoding="utf-8")
    (tmp_path / "run.sh").write_text("torchrun --nproc_per_node 8 pretrain_gpt.py --micro-batch-size 1 --bf16 "
                                     "--seq-length 512 --attention-dropout 0.1", encoding="utf-8")
    found = finished([str(tmp_path / name) for name in ("run.sh", "config.json")], ("cluster.topology=dgx-h100",))
    assert (found.scenario.model.layers, found.scenario.model.vocab) == (8, 32000)


def test_grouped_heads_of_a_file_of_settings() -> None:
    text = ("num_layers: 8\nhidden_size: 1024\nnum_attention_heads: 16\nnum_query_groups: 8\nvocab_size: 1000\n"
            "activation_func: swiglu\nmicro_batch_size: 2\nseq_length: 512\n")
    model = imported(text, name="a.yaml").scenario.model
    assert (model.kv_heads, model.gated_mlp, model.activation) == (8, True, "silu")


@pytest.mark.parametrize(("name", "text", "words"), [
    ("a.toml", "[job]\ndescription = 'x'\n[training]\nglobal_batch_size = 8\n", "drystep import torchtitan"),
    ("a.yaml", "colour: red\nshape: {sides: 4}\n", "holds no argument of Megatron-LM"),
])
def test_files_of_other_tools(name: str, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        imported(text, name=name)


DEEP = ("--untie-embeddings-and-output-weights --position-embedding-type rope --mtp-num-layers 1 "
        "--pipeline-model-parallel-size 2 --disable-bias-linear --normalization RMSNorm --swiglu ")


@pytest.mark.parametrize(("layout", "split", "virtual"), [
    ("'Ettt|ttt|tt|mL'", [5, 3], 2), ("'Et*4,|t*4mL'", [4, 4], 1), ("'Et|(tt|)*3tm|L'", [4, 4], 3),
    ("'E(t)*4|(t)*2t*2mL'", [4, 4], 1),
])
def test_a_layout_of_stages_and_further_tokens(layout: str, split: list[int], virtual: int) -> None:
    s = scenario(f"{DEEP} --pipeline-model-parallel-layout {layout}", "training.micro_steps=8")
    assert (s.model.mtp_layers, s.parallel.split, s.parallel.virtual_stages) == (1, split, virtual)


@pytest.mark.parametrize("layout", ["'Ettt|ttt|tt'", "'Exx|tL'", "Ettt|tttL", "((((", "'(t*9999)*9999|L'"])
def test_a_layout_that_is_none(layout: str) -> None:
    with pytest.raises(UserError, match="E, t, m and L for the layers of 2 pipeline ranks, 8 of them t"):
        scenario(f"{DEEP} --pipeline-model-parallel-layout \"{layout}\"")


# ------------------------------------------------------------------------------------------- what scripts export
def test_variables_of_nccl() -> None:
    nccl = imported("export NCCL_ALGO=Tree NCCL_PROTO=LL128 NCCL_MIN_NCHANNELS=8 NCCL_MAX_NCHANNELS=8\n" + LEAST,
                    "cluster.nodes=1").scenario.software.nccl
    assert (nccl.algorithm, nccl.protocol, nccl.channels) == ("tree", "ll128", 8)
    found = imported("export NCCL_ALGO=^NVLS NCCL_MAX_NCHANNELS=8 NCCL_IB_DISABLE=1 NCCL_P2P_DISABLE=0\n"
                     f"export CUDA_LAUNCH_BLOCKING=1 NCCL_NVLS_ENABLE=0\n{LEAST}", "cluster.nodes=1")
    assert {name for name in names(found, "left") if name.isupper()} == {
        "NCCL_ALGO", "NCCL_MAX_NCHANNELS", "NCCL_IB_DISABLE", "CUDA_LAUNCH_BLOCKING", "NCCL_NVLS_ENABLE"}
    with pytest.raises(UserError, match="NCCL_MIN_NCHANNELS: expected a whole number"):
        imported(f"export NCCL_MIN_NCHANNELS=x NCCL_MAX_NCHANNELS=x\n{LEAST}", "cluster.nodes=1")


@pytest.mark.parametrize(("exported", "more", "kernel"), [
    ("NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=0", "--bf16", "eager"),
    ("NVTE_FLASH_ATTN=1 NVTE_FUSED_ATTN=0", "--bf16", "flash"),
    ("NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=0", "--bf16 --attention-backend flash", "flash")])
def test_attention_without_the_engine_s_kernels(exported: str, more: str, kernel: str) -> None:
    found = imported(f"export {exported}\n{LEAST}{more}", "cluster.nodes=1")
    assert found.scenario.training.attention == kernel


@pytest.mark.parametrize(("year", "more", "kernel"), [
    (2023, "--bf16", "eager"), (2023, "--bf16 --use-flash-attn", "flash"), (2025, "--bf16", "flash"),
    (2023, "--bf16 --transformer-impl transformer_engine", "flash")])
def test_scripts_of_before_the_engine_s_layers(year: int, more: str, kernel: str) -> None:
    """--transformer-impl was local by default until the end of 2023 (recalled)."""
    assert scenario(more, f"software.year={year}").training.attention == kernel


def test_pytorch_s_ddp_overlaps() -> None:
    assert scenario("--DDP-impl torch").parallel.overlap is True
    assert scenario("--DDP-impl local").parallel.overlap is False


def test_checkpoints_in_host_memory() -> None:
    found = scenario("--deepspeed --zero-stage 1 --checkpoint-activations --checkpoint-in-cpu --bf16")
    assert (found.training.recompute, found.parallel.offload.activations) == ("full", "cpu")


@pytest.mark.parametrize("more", ["--use-checkpoint-args", "--no-async-tensor-model-parallel-allreduce",
                                  "--make-vocab-size-divisible-by 1", "--distribute-checkpointed-activations"])
def test_settings_that_had_no_word(more: str) -> None:
    found = imported(f"{LEAST}{more}", "cluster.nodes=1")
    assert more.split()[0] in names(found, "left")


def test_blocks_of_the_first_rank_by_the_config_s_name() -> None:
    text = "num_layers: 8\nhidden_size: 1024\nnum_attention_heads: 16\nseq_length: 512\nmicro_batch_size: 1\n" \
           "pipeline_model_parallel_size: 4\nnum_layers_in_first_pipeline_stage: 1\n" \
           "num_layers_in_last_pipeline_stage: 1\nvocab_size: 1000\nglobal_batch_size: 8\n"
    assert imported(text, "cluster.nodes=1", name="a.yaml").scenario.parallel.split == [1, 3, 3, 1]


def test_misspelt_arguments_are_told_where_something_is_missing() -> None:
    with pytest.raises(UserError, match="--micro-batch-sz: is not known here"):
        imported(LEAST.replace("--micro-batch-size", "--micro-batch-sz"), "cluster.nodes=1")
    with pytest.raises(UserError, match="did you mean 'full'"):
        scenario("--recompute-granularity ful")


@pytest.mark.parametrize(("more", "left", "states"), [
    ("", {"--use-precision-aware-optimizer"}, "fp32"),
    ("--exp-avg-dtype bf16", {"--use-precision-aware-optimizer", "--exp-avg-dtype"}, "bf16"),
    ("--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --main-params-dtype fp16", set(), "bf16")])
def test_states_and_masters_of_the_aware_optimizer(more: str, left: set[str], states: str) -> None:
    found = imported(f"{LEAST}--bf16 --use-distributed-optimizer --use-precision-aware-optimizer {more}",
                     "cluster.nodes=1")
    assert names(found, "left") == left and found.scenario.training.precision.optimizer == states


@pytest.mark.parametrize("size", ["1e300", "1" + "0" * 12])
def test_absurdly_many_pipeline_ranks(size: str) -> None:
    """Blocks are counted out rank by rank."""
    text = ("--num-layers: 8\n--hidden-size: 64\n--num-attention-heads: 2\n--seq-length: 64\n--micro-batch-size: 1\n"
            f"--pipeline-model-parallel-size: {size}\n--pipeline-model-parallel-layout: Et*8|L\n--vocab-size: 100\n")
    with pytest.raises(UserError, match="pipeline-model-parallel-size: expected a whole number"):
        imported(text, "cluster.nodes=1", name="a.yaml")


def test_files_of_axolotl_are_no_models_config_though_they_have_a_model_type(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text("base_model: x\nmodel_type: LlamaForCausalLM\nmicro_batch_size: 2\n")
    for kind in ("torchtitan", "nemo"):
        with pytest.raises(UserError, match=r"a\.yml:1: holds none of"):
            import_files(kind, [str(tmp_path / "a.yml")], ["cluster.topology=dgx-h100"])


def test_a_slip_of_an_argument_is_told_as_the_script_writes_arguments(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(
        "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 128 "
        "--max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 8 --bf16 --use-flash-atn\n")
    found = import_files("megatron", [str(tmp_path / "a.sh")], ["cluster.topology=dgx-h100"])
    assert [note.text for note in found.of("unknown")] == ["did you mean '--use-flash-attn'?"]
