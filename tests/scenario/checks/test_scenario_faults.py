"""Wrong inputs, one fault each: field, line, words of the message, words of the hint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sim.errors import Fault, UserError
from sim.scenario import load_scenario

BASE = """\
name: base
cluster:
  topology: dgx-a100-80g
  nodes: 2
model:
  preset: llama-2-7b
training:
  micro_batch: 2
  global_batch: 64
  sequence: 4096
  precision: fsdp-bf16
parallel:
  strategy: fsdp
  sharding_factor: full
"""


def faults_of(text: str | bytes, tmp_path: Path, sets: tuple[str, ...] = ()) -> list[Fault]:
    file = tmp_path / "s.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as caught:
        load_scenario(file, sets)
    assert caught.value.faults
    for fault in caught.value.faults:
        assert "pydantic" not in str(fault).lower() and "http" not in str(fault) and "Traceback" not in str(fault)
    return list(caught.value.faults)


def edited(old: str, new: str) -> str:
    assert old in BASE
    return BASE.replace(old, new, 1)


#: (what to replace, by what, field, line, words of the message, words of the hint)
FIELDS = [
    ("nodes: 2", "nods: 2", "cluster.nods", 4, "no field 'nods'", "did you mean 'nodes'?"),
    ("sharding_factor", "shard_factor", "parallel.shard_factor", 14, "no field", "did you mean 'sharding_factor'?"),
    ("micro_batch: 2", "tensor: 2\n  micro_batch: 2", "training.tensor", 8, "no field", "parallel.tensor"),
    ("name: base", "title: base\nname: base", "title", 1, "no field 'title'", "known here: name, cluster"),
    ("name: base\n", "", "name", 1, "'name' is required", "add 'name"),
    ("  micro_batch: 2\n", "", "training.micro_batch", 7, "required", "add 'micro_batch"),
    ("  topology: dgx-a100-80g\n", "", "cluster.topology", 2, "required", "add 'topology"),
    ("  preset: llama-2-7b\n", "  kind: decoder\n", "model", 5, "'layers', 'hidden', 'heads', 'vocab'", "preset"),
    ("preset: llama", "presett: llama", "model.presett", 6, "no field 'presett'", "did you mean 'preset'?"),
    ("nodes: 2", "nodes: two", "cluster.nodes", 4, "expected a whole number, not the text 'two'", ""),
    ("nodes: 2", "nodes: 2.0", "cluster.nodes", 4, "expected a whole number, not 2.0", "write 2"),
    ("nodes: 2", "nodes: 2.5", "cluster.nodes", 4, "expected a whole number, not 2.5", ""),
    ("nodes: 2", "nodes: true", "cluster.nodes", 4, "expected a whole number, not true", ""),
    ("nodes: 2", "nodes: [2]", "cluster.nodes", 4, "expected a whole number, not a list", "write 2"),
    ("nodes: 2", 'nodes: "2"', "cluster.nodes", 4, "expected a whole number", "write 2 without quotes"),
    ("sequence: 4096", "sequence: 128k", "training.sequence", 10, "expected a whole number",
     "write 128000 or, in powers of two, 131072"),
    ("  nodes: 2", "  nodes: 2\nbudget: {tokens: 1.5T}", "budget.tokens", 5, "expected 'chinchilla'", "write 1.5e+12"),
    ("  nodes: 2", "  nodes: 2\nbudget: {mtbf_per_gpu: 50000}", "budget.mtbf_per_gpu", 5,
     "a plain number is in seconds", "write '50000 h'"),
    ("  nodes: 2", "  nodes: 2\nbudget: {price_per_gpu_hour: $2.5}", "budget.price_per_gpu_hour", 5,
     "expected a number", "write 2.5"),
    ("  topology: dgx-a100-80g", "  topology: dgxa100", "cluster.topology", 3, "no topology named",
     "did you mean 'dgx-a100-40g' or 'dgx-a100-80g'?"),
    ("preset: llama-2-7b", "preset: Llama2-7B", "model.preset", 6, "no model named", "did you mean 'llama-2-7b'?"),
    ("  topology: dgx-a100-80g", "  topology: {gpu: t4, gpus_per_node: 4, intra: {kind: pcie, gen: gen4x16}}",
     "cluster.topology.intra.gen", 3, "expected a whole number", "one of 3, 4, 5"),
    ("sequence: 4096", "sequence: 4_096", "training.sequence", 10, "expected a whole number", "write 4096"),
    ("nodes: 2", "nodes: 0", "cluster.nodes", 4, "too small: at least 1", ""),
    ("nodes: 2", "nodes: -2", "cluster.nodes", 4, "-2 is too small", ""),
    ("nodes: 2", "nodes: 1000000000", "cluster.nodes", 4, "absurdly large", ""),
    ("preset: llama-2-7b", "preset: llama-2-7b\n  layers: 1000000000", "model.layers", 7, "absurdly large", ""),
    ("preset: llama-2-7b", "preset: llama-2-7b\n  vocab: 1000000000000", "model.vocab", 7, "absurdly large", ""),
    ("sequence: 4096", "sequence: 10000000000", "training.sequence", 10, "absurdly large", ""),
    ("nodes: 2", "nodes: 1" + "0" * 60, "cluster.nodes", 4, "61 digits", ""),
    ("nodes: 2", "nodes: .nan", "cluster.nodes", 4, "not a number that can be used", "finite"),
    ("nodes: 2", "nodes: .inf", "cluster.nodes", 4, "not a number that can be used", "finite"),
    ("sharding_factor: full", "bucket_mb: 1e999", "parallel.bucket_mb", 14, "too large a number", ""),
    ("name: base", "name: 7", "name", 1, "expected text, not 7", "quotes"),
    ("name: base", "name: ''", "name", 1, "empty", ""),
    ("strategy: fsdp", "strategy: fsdb", "parallel.strategy", 13, "not one of none, ddp", "did you mean 'fsdp'?"),
    ("strategy: fsdp", "strategy: 3", "parallel.strategy", 13, "3 is not one of", ""),
    ("precision: fsdp-bf16", "precision: fsdp-bf61", "training.precision", 11, "not one of fp32", "fsdp-bf16"),
    (
        "precision: fsdp-bf16",
        "precision: {compute: bf16}",
        "training.precision.parameters",
        11,
        "'parameters' is required",
        "",
    ),
    ("precision: fsdp-bf16", "precision: 16", "training.precision", 11, "name of a precision", ""),
    ("precision: fsdp-bf16", "recompute: some", "training.recompute", 11, "not one of none, full", ""),
    (
        "precision: fsdp-bf16",
        "recompute: {layer: 3}",
        "training.recompute.layer",
        11,
        "no field",
        "did you mean 'layers'?",
    ),
    (
        "precision: fsdp-bf16",
        "optimizer: adam-w",
        "training.optimizer",
        11,
        "not one of adamw",
        "did you mean 'adamw'?",
    ),
    ("precision: fsdp-bf16", "document: 0", "training.document", 11, "0 is too small: at least 1", ""),
    ("precision: fsdp-bf16", "document: long", "training.document", 11, "expected a whole number", ""),
    ("precision: fsdp-bf16", "document: 4097", "training.document", 11, "documents of 4097 tokens are longer than the "
     "sequence of 4096", "at most 4096"),
    ("precision: fsdp-bf16", "document: {spread: 1}", "training.document.mean", 11, "'mean' is required", ""),
    ("precision: fsdp-bf16", "document: {mean: 500, std: 1}", "training.document.std", 11, "no field 'std'", ""),
    ("precision: fsdp-bf16", "document: {mean: 500, spread: -1}", "training.document.spread", 11, "too small", ""),
    ("precision: fsdp-bf16", "document: {mean: 1024, spread: 2}", "training.document.spread", 11, "a mean token would "
     "stand in one of 5,120", "at most 1.73"),
    ("precision: fsdp-bf16", "document: 500\n  mode: {inference: {prompt: 8, generate: 1, batch: 1}}",
     "training.document", 11, "this is inference", "remove it"),
    ("precision: fsdp-bf16", "packing: true", "training.packing", 11, "no field", "did you mean 'document'?"),
    ("precision: fsdp-bf16", "mode: infer", "training.mode", 11, "not one of train", ""),
    ("precision: fsdp-bf16", "mode: {inference: {prompt: 8}}", "training.mode.inference.generate", 11, "required", ""),
    ("precision: fsdp-bf16", "mode: {inference: {prompt: 8, generate: 0, batch: 1}}",
     "training.mode.inference.generate", 11, "for kind encoder", "1 is the prompt"),
    ("precision: fsdp-bf16", "chunked_loss: yes", "training.chunked_loss", 11, "expected true or false", "write true"),
    ("sharding_factor: full", "sharding_factor: ful", "parallel.sharding_factor", 14, "expected 'full' or", "'full'"),
    ("sharding_factor: full", "sharding_factor: 0", "parallel.sharding_factor", 14, "outside 1 to", ""),
    ("sharding_factor: full", "prefetch: pre", "parallel.prefetch", 14, "expected a mapping of fields", ""),
    ("sharding_factor: full", "prefetch: {limit: nope}", "parallel.prefetch.limit", 14, "expected 'none' or", "'none'"),
    (
        "sharding_factor: full",
        "prefetch: {backward: preload}",
        "parallel.prefetch.backward",
        14,
        "not one of pre",
        "'pre'",
    ),
    ("sharding_factor: full", "wrap: layer", "parallel.wrap", 14, "expected 'block'", ""),
    (
        "sharding_factor: full",
        "reshard_after_forward: maybe",
        "parallel.reshard_after_forward",
        14,
        "true, false or",
        "",
    ),
    ("sharding_factor: full", "overlap: on", "parallel.overlap", 14, "expected true or false", "write true"),
    ("sharding_factor: full", "split: 4", "parallel.split", 14, "expected a list", "[a, b"),
    ("sharding_factor: full", "order: [tensor, data]", "parallel.order", 14, "each of tensor, context", ""),
    ("sharding_factor: full", "schedule: 1f1c", "parallel.schedule", 14, "not one of gpipe", "1f1b"),
    ("sharding_factor: full", "bucket_mb: 25 s", "parallel.bucket_mb", 14, "unit 's', which is not a size in MiB", ""),
    (
        "sharding_factor: full",
        "offload: {optimizer: disk}",
        "parallel.offload.optimizer",
        14,
        "not one of none, cpu",
        "",
    ),
    ("topology: dgx-a100-80g", "topology: dgx-a100-80gb", "cluster.topology", 3, "no topology named", "'dgx-a100-80g'"),
    ("topology: dgx-a100-80g", "topology: nowhere/t.yaml", "cluster.topology", 3, "no such file", "no folder"),
    (
        "topology: dgx-a100-80g",
        "topology: {gpu: a100-80g, gpus_per_node: 8, intra: {kind: nvswitch}}",
        "cluster.topology.gpu",
        3,
        "no GPU named 'a100-80g'",
        "a100-80g-sxm",
    ),
    (
        "topology: dgx-a100-80g",
        "topology: {gpu: {memory: 80 GB}, gpus_per_node: 8}",
        "cluster.topology.gpu",
        3,
        "'like'",
        "like:",
    ),
    (
        "topology: dgx-a100-80g",
        "topology: {gpu: t4, gpus_per_node: 8, host: {memory: 2 TB/s}}",
        "cluster.topology.host.memory",
        3,
        "'TB/s', which is not a size",
        "",
    ),
    (
        "topology: dgx-a100-80g",
        "topology: {gpu: t4, gpus_per_node: 8, host: {nvme_read: 25 GB}}",
        "cluster.topology.host.nvme_read",
        3,
        "not a bandwidth",
        "",
    ),
    (
        "topology: dgx-a100-80g",
        "topology: {gpu: t4, gpus_per_node: 8, inter: {kind: fat-three}}",
        "cluster.topology.inter.kind",
        3,
        "not one of fat-tree",
        "did you mean 'fat-tree'?",
    ),
    ("topology: dgx-a100-80g", "topology: 8", "cluster.topology", 3, "expected a mapping", ""),
    ("preset: llama-2-7b", "preset: llama2-7b", "model.preset", 6, "no model named", "did you mean 'llama-2-7b'?"),
    ("preset: llama-2-7b", "preset: [x]", "model.preset", 6, "expected text, not a list", "write x"),
    ("preset: llama-2-7b", "preset: llama-2-7b\n  hf: config.json", "model.hf", 7, "both name", "keep one"),
    ("preset: llama-2-7b", "hf: nofile.json", "model.hf", 6, "no such file", ""),
    ("preset: llama-2-7b", "kind: layers", "model", 5, "needs 'table'", "table:"),
    ("preset: llama-2-7b", "preset: llama-2-7b\n  dropout: 1.5", "model.dropout", 7, "too large", ""),
    ("name: base", "name: base\nbudget: {deadline: 30 GB}", "budget.deadline", 2, "not a time", "30 days"),
    ("name: base", "name: base\nbudget: {tokens: optimal}", "budget.tokens", 2, "expected 'chinchilla' or", ""),
    (
        "name: base",
        "name: base\nsoftware: {framework: torch}",
        "software.framework",
        2,
        "not one of pytorch",
        "pytorch",
    ),
    ("name: base", "name: base\nsoftware: {year: 2022, allocator: {expandable_segments: true}}",
     "software.allocator.expandable_segments", 2, "from 2.1 on", "a later software.year"),
    ("name: base", "name: base\nsoftware: {allocator: {max_split_size_mb: 20}}",
     "software.allocator.max_split_size_mb", 2, "too small", ""),
    ("name: base", "name: base\nsoftware: {fsdp: 3}", "software.fsdp", 2, "3 is not one of 1, 2", ""),
    ("name: base", "name: base\nsoftware: {year: 1999}", "software.year", 2, "too small", ""),
    (
        "name: base",
        "name: base\nsoftware: {versions: {torch: 2.1}}",
        "software.versions.torch",
        2,
        "expected text",
        "quotes",
    ),
    ("name: base", "name: base\ncluster: {nodes: 1}", "cluster", 3, "given twice (first on line 2)", "remove one"),
    ("nodes: 2", "<<: {nodes: 2}", "cluster.<<", 4, "merge keys", "write the fields out"),
    (
        "name: base",
        "name: !!python/object:os.system x",
        "name",
        1,
        "tag '!!python/object:os.system' is refused",
        "plain",
    ),
    ("nodes: 2", "1: 2", "cluster", 4, "the name of a field is 1", ""),
]

#: Combinations that cannot be: (what to replace, by what, field, line, both numbers and more, hint)
COMBINATIONS = [
    ("sharding_factor: full", "tensor: 3", "parallel.tensor", 14, "does not divide 16 GPUs", "2 or 4 would divide"),
    ("sharding_factor: full", "pipeline: 32", "parallel.pipeline", 14, "= 32 does not divide 16", "16 would divide"),
    (
        "sharding_factor: full",
        "sharding_factor: 3",
        "parallel.sharding_factor",
        14,
        "3 does not divide the 16",
        "2 or 4",
    ),
    (
        "sharding_factor: full",
        "reshard_after_forward: 5",
        "parallel.reshard_after_forward",
        14,
        "5 does not divide",
        "4 or 8",
    ),
    ("global_batch: 64", "global_batch: 65", "training.global_batch", 9, "65 does not divide over 16", "64 or 80"),
    ("global_batch: 64", "global_batch: 8", "training.global_batch", 9, "8 does not divide over 16", "16 would"),
    ("micro_batch: 2", "micro_batch: 5", "training.micro_batch", 8, "5 is more than the 4", "at most 4"),
    (
        "nodes: 2",
        "gpus_per_node: 9",
        "cluster.gpus_per_node",
        4,
        "9 GPUs per node asked of 'dgx-a100-80g', which has 8",
        "",
    ),
    ("nodes: 2", "gpu: {memory: 80}", "cluster.gpu.memory", 4, "80 is too little to be a size of a machine", "80 GB"),
    ("nodes: 2", "gpu: {memory_bandwidth: 2 B/s}", "cluster.gpu.memory_bandwidth", 4, "too little", "25 GB/s"),
    ("nodes: 2", "gpu: {power_limit_w: 1}", "cluster.gpu.power_limit_w", 4, "too little to be a power", "400"),
    ("topology: dgx-a100-80g", "topology: dgx-a100", "cluster.topology", 3, "no topology", "-40g' or 'dgx-a100-80g'"),
    ("nodes: 2", "nodes: 200000", "cluster.nodes", 4, "1,600,000 GPUs, absurdly many", ""),
    ("topology: dgx-a100-80g", "topology: single-t4", "cluster.nodes", 4, "no network between nodes", "topology.inter"),
    ("strategy: fsdp", "strategy: none", "parallel.strategy", 13, "16 data-parallel replicas", "ddp"),
    (
        "strategy: fsdp\n  sharding_factor: full",
        "strategy: ddp\n  sharding_factor: 8",
        "parallel.sharding_factor",
        14,
        "ddp keeps whole copies",
        "zero1",
    ),
    (
        "preset: llama-2-7b",
        "preset: llama-2-7b\n  heads: 31",
        "model.heads",
        7,
        "4096 is not a multiple of heads 31",
        "32",
    ),
    (
        "preset: llama-2-7b",
        "preset: llama-2-7b\n  kv_heads: 5",
        "model.kv_heads",
        7,
        "5 does not divide heads 32",
        "4 or 8",
    ),
    ("preset: llama-2-7b", "preset: llama-2-7b\n  kv_heads: 64", "model.kv_heads", 7, "64 is more than heads 32", ""),
    (
        "preset: llama-2-7b",
        "preset: gpt2",
        "training.sequence",
        10,
        "4096 tokens but the model has 1024 learned",
        "4096",
    ),
    (
        "preset: llama-2-7b",
        "preset: mixtral-8x7b\n  moe: {experts: 2, top_k: 4}",
        "model.moe.top_k",
        7,
        "4 is more than",
        "",
    ),
    (
        "preset: llama-2-7b",
        "preset: mixtral-8x7b\n  moe: {groups: 3}",
        "model.moe.groups",
        7,
        "3 does not divide the 8 experts",
        "2 or 4",
    ),
    (
        "preset: llama-2-7b",
        "preset: mixtral-8x7b\n  moe: {groups: 4, top_groups: 5}",
        "model.moe.top_groups",
        7,
        "5 is more than groups 4",
        "at most 4",
    ),
    (
        "preset: llama-2-7b",
        "preset: mixtral-8x7b\n  moe: {groups: 8, top_groups: 1}",
        "model.moe.top_groups",
        7,
        "fewer than top_k 2",
        "more groups",
    ),
    ("sharding_factor: full", "expert: 2", "parallel.expert", 14, "the model has no experts", ""),
    (
        "sharding_factor: full",
        "context: 16\n  sequence_parallel: true\n  expert: 1\n  tensor: 2",
        "parallel.context",
        14,
        "= 32",
        "",
    ),
    ("sharding_factor: full", "virtual_stages: 2", "parallel.virtual_stages", 14, "pipeline of 2 or more", ""),
    (
        "sharding_factor: full",
        "pipeline: 2\n  virtual_stages: 2\n  schedule: 1f1b",
        "parallel.schedule",
        16,
        "one chunk",
        "interleaved",
    ),
    ("sharding_factor: full", "pipeline: 2\n  virtual_stages: 30", "parallel.pipeline", 14, "60 chunks", ""),
    (
        "sharding_factor: full",
        "pipeline: 2\n  split: [16, 15]",
        "parallel.split",
        15,
        "adds up to 31 blocks but the model has 32",
        "",
    ),
    (
        "sharding_factor: full",
        "pipeline: 2\n  split: [32]",
        "parallel.split",
        15,
        "1 entries for 2 pipeline ranks",
        "2 numbers",
    ),
    (
        "precision: fsdp-bf16",
        "predicted_tokens: 5000",
        "training.predicted_tokens",
        11,
        "5000 is more than the 4096",
        "",
    ),
    ("precision: fsdp-bf16", "decoder_sequence: 50", "training.decoder_sequence", 11, "encoder-decoder", "remove"),
    ("precision: fsdp-bf16", "finetune: {method: full, rank: 8}", "training.finetune.rank", 11, "method is full", ""),
    ("precision: fsdp-bf16", "finetune: {method: qlora, base: bf16}", "training.finetune.base", 11, "quantised", "nf4"),
    ("precision: fsdp-bf16", "finetune: {method: lora, base: bf16, unquantised: fp32}", "training.finetune.unquantised",
     11, "for a quantised base", "remove"),
    ("precision: fsdp-bf16", "finetune: {method: lora, targets: all-linar}", "training.finetune.targets", 11,
     "a list, all or all-linear, not the text 'all-linar'", "all-linear"),
    ("precision: fsdp-bf16", "recompute: {layers: 33}", "training.recompute.layers", 11, "33 recomputed blocks", ""),
]


@pytest.mark.parametrize(("old", "new", "field", "line", "message", "hint"), FIELDS + COMBINATIONS)
def test_fault_names_field_line_and_mend(
    old: str, new: str, field: str, line: int, message: str, hint: str, tmp_path: Path
) -> None:
    found = faults_of(edited(old, new), tmp_path)
    fault = next((f for f in found if f.field == field), None)
    assert fault is not None, [str(f) for f in found]
    assert (fault.line, fault.file) == (line, str(tmp_path / "s.yaml"))
    assert message in fault.message, str(fault)
    assert hint in fault.hint, str(fault)


#: Sweeps and bounds: (text added at the end, field, line, words, hint)
ADDED = [
    ("sweep: [1, 2]", "sweep", 15, "expected dotted fields", "cluster.nodes"),
    ("sweep: {cluster.nodes: 4}", "sweep.cluster.nodes", 15, "expected a list", "[4]"),
    ("sweep: {cluster.nodes: []}", "sweep.cluster.nodes", 15, "empty list", ""),
    (
        "sweep:\n  cluster.nods: [1]",
        "sweep.cluster.nods",
        16,
        "no field 'cluster.nods'",
        "did you mean 'cluster.nodes'?",
    ),
    ("sweep: {nodes: [1]}", "sweep.nodes", 15, "no field 'nodes'", "did you mean 'cluster.nodes'?"),
    ("sweep: {cluster.nodes.x: [1]}", "sweep.cluster.nodes.x", 15, "has no fields", "'cluster.nodes'"),
    ("sweep:\n  cluster.nodes: [1, two]", "sweep.cluster.nodes.1", 16, "expected a whole number", ""),
    (
        "sweep: {cluster.topology: [dgx-a100-80g, dgx-h1000]}",
        "sweep.cluster.topology.1",
        15,
        "no topology named",
        "dgx-h100",
    ),
    ("sweep: {model.preset: [lama-2-7b]}", "sweep.model.preset.0", 15, "no model named", "llama-2-7b"),
    ("sweep: {training.precision: [fp99]}", "sweep.training.precision.0", 15, "not one of", ""),
    ("sweep: {expect: [1]}", "sweep.expect", 15, "cannot vary", ""),
    ("expect: 3", "expect", 15, "expected result fields", "step_time_s"),
    ("expect: {step_time: 3}", "expect.step_time", 15, "no field 'step_time'", "did you mean 'step_time_s'?"),
    ("expect: {memory: 3}", "expect.memory", 15, "is a mapping", "memory.peak_allocated_bytes"),
    ("expect: {memory.peak_bytes: 3}", "expect.memory.peak_bytes", 15, "no field", "memory."),
    ("expect: {mfu: {valu: 3}}", "expect.mfu.valu", 15, "no 'valu'", "'value'"),
    ("expect: {mfu: {within: 5%}}", "expect.mfu", 15, "no bound", "value"),
    ("expect: {mfu: {value: 0.4, min: 0.3}}", "expect.mfu", 15, "value and range at once", ""),
    ("expect: {mfu: {value: 0.4, within: five}}", "expect.mfu.within", 15, "expected a percentage", "5%"),
    ("expect: {mfu: {min: 0.5, max: 0.4}}", "expect.mfu.min", 15, "min 0.5 is more than max 0.4", ""),
    ("expect: {mfu: {min: high}}", "expect.mfu.min", 15, "expected a number", ""),
    ("expect: {mfu: {ratio: 1.1}}", "expect.mfu.ratio", 15, "go together", "relative_to"),
    ("expect: {mfu: {ratio: 1.1, relative_to: o.yaml}}", "expect.mfu.relative_to", 15, "no file 'o.yaml'", ""),
    ("expect: {mfu: {value: 1, at: {cluster.nodes: 1}}}", "expect.mfu.at.cluster.nodes", 15, "not an axis", "sweep"),
    (
        "expect: {mfu: {ratio: 1, relative_to: {cluster.nods: 1}}}",
        "expect.mfu.relative_to.cluster.nods",
        15,
        "no field",
        "nodes",
    ),
]


@pytest.mark.parametrize(("text", "field", "line", "message", "hint"), ADDED)
def test_sweep_and_expect_faults(text: str, field: str, line: int, message: str, hint: str, tmp_path: Path) -> None:
    found = faults_of(BASE + text + "\n", tmp_path)
    fault = next((f for f in found if f.field == field), None)
    assert fault is not None, [str(f) for f in found]
    assert fault.line == line and message in fault.message and hint in fault.hint, str(fault)


#: Texts that are no scenario at all: (bytes, line, words)
TEXTS = [
    (b"", 0, "is empty"),
    (b"# nothing\n", 0, "is empty"),
    (b"title: t\ncases:\n  - {id: a}\n", 2, "is a file of measured cases"),
    (b'{"scenario": {"name": "a"},\n"step_time_s": 1.0}', 2, "is a result of 'drystep run --json', not a scenario"),
    (b'{"points": [], "axes": {}, "skipped": []}', 1, "is the result of a sweep"),
    (b"name: t\ngpu: h200\ngpus_per_node: 8\n", 2, "is a topology, not a scenario"),
    (b'{"traceEvents": []}', 1, "is a trace"),
    (b'{"zero_optimization": {"stage": 3}}', 1, "is DeepSpeed's configuration, not a scenario"),
    (b"- a\n- b\n", 1, "holds a list"),
    (b"just words\n", 1, "holds the text 'just words'"),
    (b"name: [1, 2\n", 2, "is not YAML"),
    (b"name: a\n\tcluster: b\n", 2, "tab"),
    (b"name: a: b\n", 1, "second ':'"),
    (b"name: \xff\n", 1, "not UTF-8"),
    (b"\xff\xfen\x00", 0, "UTF-16"),
    (b"a: 1\n---\nb: 2\n", 2, "more than one document"),
    (b"a: &x [*x]\n", 1, "contains itself"),
    (b"a: *x\n", 1, "repeats a value"),
    (b"a: " + b"[" * 5000, 1, "nested more than"),
    (b"x: " + b"y" * (1 << 20), 0, "larger than 1 MiB"),
    (b"? {a: 1}\n: 2\n", 1, "as the name of a field"),
    (b"name: a\x00b\n", 0, "is not YAML"),
    (
        b"a: &a [1,1,1,1,1,1,1,1,1,1]\n"
        + b"".join(b"%c: &%c [%s]\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 10)) for c in range(98, 106)),
        6,
        "expands to more than",
    ),
]


@pytest.mark.parametrize(("text", "line", "message"), TEXTS)
def test_texts_that_are_no_scenario(text: bytes, line: int, message: str, tmp_path: Path) -> None:
    found = faults_of(text, tmp_path)
    assert message in found[0].message and found[0].line == line, str(found[0])


def test_missing_file_names_a_neighbour_and_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    with pytest.raises(UserError, match=r"no such file.*did you mean 'base.yaml'"):
        load_scenario(tmp_path / "bas.yaml")
    with pytest.raises(UserError, match="is a folder"):
        load_scenario(tmp_path)
    with pytest.raises(UserError, match="not a regular file"):
        load_scenario("/dev/null")


def test_several_faults_come_together_in_file_order(tmp_path: Path) -> None:
    text = (
        BASE.replace("nodes: 2", "nods: 2")
        .replace("llama-2-7b", "lama-2-7b")
        .replace("fsdp-bf16", "bf17")
        .replace("micro_batch: 2", "micro_batch: true")
    )
    found = faults_of(text + "sweep: {cluster.node: [1]}\n", tmp_path, ("parallel.tensr=2",))
    assert [f.field for f in found] == [
        "parallel.tensr",
        "cluster.nods",
        "model.preset",
        "training.micro_batch",
        "training.precision",
        "sweep.cluster.node",
    ]
    assert [f.line for f in found] == [0, 4, 6, 8, 11, 15]


def test_combinations_are_reported_together(tmp_path: Path) -> None:
    found = faults_of(BASE.replace("micro_batch: 2", "micro_batch: 99").replace("full", "7"), tmp_path)
    assert {f.field for f in found} == {"training.micro_batch", "parallel.sharding_factor"}


#: Wrong --set texts: (text, field, words, hint)
SETS = [
    ("cluster.nodes", "", "has no '='", "path=value"),
    ("=3", "", "not a dotted path", ""),
    ("cluster..nodes=3", "", "not a dotted path", ""),
    ("cluster.nods=3", "cluster.nods", "no field", "did you mean 'nodes'?"),
    ("paralel.strategy=ddp", "paralel", "no field", "did you mean 'parallel'?"),
    ("software.nccl.foo.bar=1", "software.nccl.foo", "no field", "known here"),
    ("cluster.topology.gpu.memory=96 GB", "cluster.topology.gpu.memory", "single value", "cluster.gpu has"),
    ("cluster.nodes=three", "cluster.nodes", "expected a whole number", ""),
    ("cluster.nodes=3", "training.global_batch", "does not divide over 24", "48"),
    ("cluster.nodes=[1", "cluster.nodes", "is not YAML", ""),
    ("cluster.nodes=" + "[" * 3000, "cluster.nodes", "nested more than", ""),
    ("cluster.nodes=.nan", "cluster.nodes", "not a number", ""),
    ("cluster.nodes.x=3", "cluster.nodes.x", "single value", "set cluster.nodes"),
    ("model.preset=lama-2-7b", "model.preset", "no model named", "llama-2-7b"),
    ("sweep.cluster.nodes=3", "sweep.cluster.nodes", "expected a list", ""),
]


@pytest.mark.parametrize(("text", "field", "message", "hint"), SETS)
def test_set_faults_cite_the_command_line(text: str, field: str, message: str, hint: str, tmp_path: Path) -> None:
    fault = faults_of(BASE, tmp_path, (text,))[0]
    assert fault.field == field and message in fault.message and hint in fault.hint, str(fault)
    if field != "training.global_batch":
        assert (fault.file, fault.line) == ("--set", 0)


def test_faults_inside_a_topology_file_name_that_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "name: mine\ngpu: a100-80g-sxm\ngpus_per_node: eight\nintra: {kind: nvswitch}\nintre: 1\n"
    )
    found = faults_of(BASE.replace("dgx-a100-80g", "mine.yaml"), tmp_path)
    assert [(f.file, f.line, f.field) for f in found] == [
        ("mine.yaml", 3, "cluster.topology.gpus_per_node"),
        ("mine.yaml", 5, "cluster.topology.intre"),
    ]


@pytest.mark.parametrize(
    ("config", "line", "words"),
    [
        ("{", 1, "is not JSON"),
        ("[]", 1, "holds a list"),
        ('{"hidden_size": 8}', 0, "no 'model_type'"),
        ('{"model_type": "llama4"}', 0, "known: llama, mistral"),  # not typed by hand: another family, not a slip
        ('{"model_type": "flux"}', 0, "known: llama, mistral"),
        ('{"model_type": "llama", "num_hidden_layers": 2}', 0, "no 'hidden_size'"),
        (
            '{\n"model_type": "gpt2",\n"n_layer": "x", "n_embd": 8, "n_head": 2, "vocab_size": 9}',
            3,
            "expected a whole number",
        ),
    ],
)
def test_hugging_face_config_faults_name_the_config(config: str, line: int, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    fault = faults_of(BASE.replace("preset: llama-2-7b", "hf: config.json"), tmp_path)[0]
    assert words in str(fault)
    assert fault.file == "config.json" or fault.line
    assert not line or (fault.file, fault.line) == ("config.json", line)


@pytest.mark.parametrize(
    ("table", "line", "words"),
    [
        ("name,parameter,forward_flops,activation_bytes,output_bytes\n", 1, "no column 'parameters'"),
        ("name,parameters,forward_flops,activation_bytes,output_bytes\n", 1, "no layers"),
        ("name,parameters,forward_flops,activation_bytes,output_bytes\na,1,2,3,x\n", 2, "'x' is not a size"),
        ("name,parameters,forward_flops,activation_bytes,output_bytes\na,1,2,-3,4\n", 2, "'-3' is not a size"),
    ],
)
def test_layer_table_faults_name_the_table(table: str, line: int, words: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(table)
    fault = faults_of(BASE.replace("preset: llama-2-7b", "kind: layers\n  table: t.csv"), tmp_path)[0]
    assert words in fault.message and (fault.file, fault.line) == ("t.csv", line)


@pytest.mark.parametrize("field", ["hidden: 512", "norm: rmsnorm", "dropout: 0.3", "heads: 8"])
def test_parts_of_a_transformer_beside_a_table_of_layers(field: str, tmp_path: Path) -> None:
    text = BASE.replace("preset: llama-2-7b", f"preset: resnet-50\n  {field}").replace("  sequence: 4096\n", "")
    (fault,) = faults_of(text, tmp_path)
    assert (fault.field, fault.line) == (f"model.{field.split(':')[0]}", 7)
    assert "is of a transformer, and the model is a table of layers" in fault.message


@pytest.mark.parametrize("name", ["-", "pipe"])
def test_what_is_no_file_is_to_be_saved_to_one(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="standard input and pipes are not read: save it to a file"):
        load_scenario("-" if name == "-" else tmp_path / name)
