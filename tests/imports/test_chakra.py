"""Execution traces as scenarios: recorded steps of known models, trimmed (`files/chakra`), and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sim.api import run
from sim.errors import UserError
from sim.imports.draft import Imported
from sim.imports.read import import_files

FILES = Path(__file__).parent / "files" / "chakra"
ON = ("cluster.topology=dgx-a100-80g",)
#: What `record.py` gave its models, in the words of a scenario.
GPT: dict[str, Any] = {
    "layers": 3, "hidden": 48, "heads": 6, "kv_heads": 6, "head_dim": 8, "ffn": 192, "gated_mlp": False, "vocab": 320,
    "max_positions": 64, "positions": "learned", "norm": "layernorm", "bias": True, "tied_embeddings": True,
    "activation": "gelu", "kind": "decoder"}
LLAMA: dict[str, Any] = {
    "layers": 3, "hidden": 64, "heads": 8, "kv_heads": 4, "head_dim": 8, "ffn": 176, "gated_mlp": True, "vocab": 512,
    "positions": "rotary", "norm": "rmsnorm", "bias": False, "tied_embeddings": False, "activation": "silu",
    "kind": "decoder"}
QWEN = {**LLAMA, "layers": 2, "head_dim": 16, "kv_heads": 2, "ffn": 96, "vocab": 256, "tied_embeddings": True,
        "qk_norm": "head"}
SMALL = {"hidden": 64, "layers": 2, "vocab": 256}
PRECISE = {"name": "fsdp-bf16", "reduce": "fp32"}
#: Trace -> fields of the model, of training, of parallel, GPUs.
TRUTH: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int]] = {
    "gpt_ddp_drop_acc_ckpt.0": ({**GPT, "dropout": 0.1}, {"micro_steps": 3, "recompute": "full", "precision": "fp32"},
                                {"strategy": "ddp", "reduce_every_micro_step": False}, 2),
    "gpt_hsdp2_acc_keep.0": (GPT, {"micro_steps": 3, "precision": PRECISE, "recompute": "none"},
                             {"strategy": "fsdp", "sharding_factor": 2, "reshard_after_forward": False,
                              "reduce_every_micro_step": False}, 4),
    "gpt_fsdp1.0": (GPT, {"precision": "fsdp-bf16"},
                    {"strategy": "fsdp", "sharding_factor": 2, "reshard_after_forward": True}, 2),
    "gpt_ddp_zro.0": (GPT, {"optimizer": "adamw", "precision": "fp32"}, {"strategy": "zero1"}, 2),
    "gpt_selop.0": (GPT, {"recompute": "selective-op"}, {"strategy": "none"}, 1),
    "gpt_pure_for.0": (GPT, {"precision": "pure-bf16", "optimizer": "adamw"}, {"strategy": "none"}, 1),
    "pp2.0": ({**GPT, "layers": 4, "tied_embeddings": False}, {"micro_steps": 4},
              {"pipeline": 2, "strategy": "none"}, 2),
    "llama_fsdp2_ckpt_acc.0": (LLAMA, {"micro_steps": 3, "precision": PRECISE, "recompute": "full"},
                               {"strategy": "fsdp", "sharding_factor": 2, "reshard_after_forward": True,
                                "reduce_every_micro_step": False}, 2),
    "llama_tp2_vocab.0": (LLAMA, {"precision": PRECISE}, {"strategy": "fsdp", "sharding_factor": 2, "tensor": 2}, 4),
    "llama_ddp_fused_pg.0": (LLAMA, {"precision": "amp-bf16", "micro_steps": 1}, {"strategy": "ddp"}, 2),
    "llama_eager.0": (LLAMA, {"attention": "eager", "precision": "amp-bf16"}, {"strategy": "none"}, 1),
    "zero1.0": (LLAMA, {"micro_steps": 2, "precision": "mixed-bf16"}, {"strategy": "zero1"}, 2),
    "zero2.0": (LLAMA, {"micro_steps": 2, "precision": "mixed-bf16"}, {"strategy": "zero2"}, 2),
    "zero3.0": (LLAMA, {"micro_steps": 2, "precision": "mixed-bf16"}, {"strategy": "zero3"}, 2),
    "llama_loraqv.0": (LLAMA, {"precision": "amp-bf16", "finetune": {
        "method": "lora", "rank": 4, "targets": ["query", "value"], "dropout": 0.05, "base": "fp32"}}, {}, 1),
    "gpt_bmm.0": (GPT, {"attention": "eager"}, {}, 1),
    "qwen.0": (QWEN, {"attention": "sdpa"}, {}, 1),
    "mixtral.0": ({**SMALL, "kv_heads": 2, "gated_mlp": True, "moe": {"experts": 4, "top_k": 2, "expert_ffn": 96}},
                  {"optimizer": "adamw", "precision": "amp-bf16"}, {}, 1),
    "deepseek.0": ({**SMALL, "layers": 3, "heads": 4, "ffn": 160, "norm": "rmsnorm", "block_norms": None,
                    "mla": {"q_rank": 24, "kv_rank": 16, "nope_dim": 16, "rope_dim": 8, "value_dim": 12},
                    "moe": {"experts": 8, "top_k": 2, "expert_ffn": 48, "shared_experts": 1, "first_dense": 1,
                            "groups": 2, "top_groups": 1}}, {"precision": "amp-bf16"}, {}, 1),
    "neox.0": ({**SMALL, "heads": 4, "ffn": 256, "parallel_block": True, "parallel_norms": 2, "norm": "layernorm"},
               {}, {}, 1),
    "bert.0": ({**SMALL, "heads": 4, "ffn": 128, "kind": "encoder", "dropout": 0.1, "max_positions": 64}, {}, {}, 1),
    "gpt2_sgd.0": ({"layers": 2, "hidden": 48, "heads": 4, "ffn": 192, "vocab": 300, "activation": "gelu-new"},
                   {"optimizer": "sgd-momentum"}, {}, 1),
    "gpt_compile.0": ({"layers": 3, "hidden": 48, "heads": 6, "ffn": 192, "vocab": 320, "gated_mlp": False},
                      {"recompute": "none", "precision": "fp32"}, {}, 1),
}


def imported(*names: str, sets: tuple[str, ...] = ON) -> Imported:
    return import_files("chakra", [str(FILES / f"{name}.json.gz") for name in names], sets)


@pytest.mark.parametrize("name", TRUTH)
def test_what_was_recorded_is_what_is_read(name: str) -> None:
    model, training, parallel, gpus = TRUTH[name]
    found = imported(name)
    training = {"micro_batch": 2, "sequence": 32, **training}
    for section, truth in (("model", model), ("training", training), ("parallel", parallel)):
        told = found.data.get(section, {})
        assert {field: told.get(field) for field in truth} == truth
    assert found.scenario.gpus == gpus


def test_every_field_says_which_call_told_it_and_what_is_assumed_is_told() -> None:
    found = imported("llama_tp2_vocab.0")
    by = {note.field: note for note in found.of("taken")}
    assert by["model.hidden"].said.endswith("aten::embedding 512x64, 2x32")
    assert by["parallel.tensor"].said.endswith("## process_group:init ## mesh_tp")
    assert "FSDP::" in by["parallel.strategy"].said and by["model.layers"].text == "3 calls of attention in a forward"
    assert {note.field for note in found.of("assumed")} == {"software.framework", "software.modules"}
    assert [note.value for note in found.of("left")] == ["cpu"]


def test_software_is_told_by_names_and_kernels() -> None:
    software = imported("gpt_compile.0").data["software"]
    assert (software["compile"], software["optimizer_kernel"], software["year"]) == (True, "loop", 2026)
    assert imported("llama_ddp_fused_pg.0").data["software"]["optimizer_kernel"] == "fused"
    assert imported("gpt_pure_for.0").data["software"]["optimizer_kernel"] == "foreach"
    assert [imported(f"{name}.0").data["software"]["fsdp"] for name in ("gpt_fsdp1", "llama_tp2_vocab")] == [1, 2]


def test_an_imported_trace_runs() -> None:
    assert 0 < run(imported("llama_fsdp2_ckpt_acc.0").scenario).step_time_s < 1


def test_a_models_config_beside_a_trace_says_the_model(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 176, "vocab_size": 512}))
    found = import_files("chakra", [str(FILES / "llama_tp2_vocab.0.json.gz"), str(config)], ON)
    assert found.data["model"] == {"hf": str(config)} and found.scenario.model.layers == 3
    config.write_text(config.read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 4'))
    found = import_files("chakra", [str(FILES / "llama_tp2_vocab.0.json.gz"), str(config)], ON)
    assert any("is it this model's?" in note.text for note in found.of("left"))


def test_products_that_transformers_joins_are_told() -> None:
    assert any("model.fused_qkv" in note.text for note in imported("neox.0").of("left"))
    assert not any("model.fused_qkv" in note.text for name in ("gpt2_sgd.0", "gpt_fsdp1.0", "qwen.0")
                   for note in imported(name).of("left"))


def raw(name: str = "qwen.0") -> dict[str, Any]:
    return json.loads(gzip.decompress((FILES / f"{name}.json.gz").read_bytes()))


def write(folder: Path, data: Any, name: str = "t.json") -> str:
    path = folder / name
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(path)


def test_ranks_of_one_job_are_taken_and_others_refused(tmp_path: Path) -> None:
    first, other = raw("gpt_fsdp1.0"), raw("gpt_fsdp1.0")
    files = [write(tmp_path, first, "a.json"), write(tmp_path, other, "b.json")]
    assert import_files("chakra", files, ON).scenario.gpus == 2
    for strange, words in (("qwen.0", "of a job of 1 ranks"), ("gpt_hsdp2_acc_keep.0", "has ranks in all 4")):
        with pytest.raises(UserError, match=words):
            imported("gpt_fsdp1.0" if "hsdp" in strange else "qwen.0", strange)
    with pytest.raises(UserError, match="one of 3 files, but of a job of 2 ranks"):
        import_files("chakra", [*files, write(tmp_path, other, "c.json")], ON)


def without(data: dict[str, Any], *parts: str) -> dict[str, Any]:
    return {**data, "nodes": [one for one in data["nodes"] if not any(part in one["name"] for part in parts)]}


def test_wrong_files_are_told(tmp_path: Path) -> None:
    whole = json.dumps(raw())
    wrong = {
        "": "is empty", "[1, 2]": "no list of nodes", '{"nodes": []}': "neither number", "{": "no list of nodes",
        '{"traceEvents": [{"ph": "X"}], "nodes": []}': "drystep diff", whole[:20_000]: "is cut off behind",
        '{"nodes": [{"id": 1, "name": "a"}, %, {"id": 2, "name": "b"}]}': "is not JSON behind 1 nodes",
        '{"nodes": [1, "a", null]}': "neither",
        json.dumps(without(raw(), "evaluate_function")): "of inference",
        json.dumps(without(raw(), "aten::")): "holds no product",
        json.dumps(without(raw(), "scaled_dot")): "holds no attention", "no such thing": "neither JSON nor",
    }
    for text, words in wrong.items():
        with pytest.raises(UserError, match=words):
            import_files("chakra", [write(tmp_path, text)], ON)
    forward = raw()
    first = next(at for at, one in enumerate(forward["nodes"]) if "ackward" in one["name"])
    with pytest.raises(UserError, match="of inference"):
        import_files("chakra", [write(tmp_path, {"nodes": forward["nodes"][:first]})], ON)
    (tmp_path / "t.gz").write_bytes(gzip.compress(whole.encode())[:3000])
    for file in (str(tmp_path / "t.gz"), str(tmp_path), str(tmp_path / "none.json")):
        with pytest.raises(UserError):
            import_files("chakra", [file], ON)


def call(number: int, name: str, parent: int, *inputs: tuple[Any, Any, str], **attrs: Any) -> dict[str, Any]:
    values, shapes, types = ([one[at] for one in inputs] for at in range(3))
    told = [{"name": key, "value": value} for key, value in {"tid": 1, **attrs}.items()]
    return {"id": number, "name": name, "ctrl_deps": parent, "attrs": told, "outputs": {},
            "inputs": {"values": values, "shapes": shapes, "types": types}}


def test_groups_of_nccls_record_say_degrees_and_keep_tensor_ranks_sums_apart(tmp_path: Path) -> None:
    data = raw("gpt2_sgd.0")
    nodes = list(data["nodes"])
    top = max(one["id"] for one in nodes)
    tensor = {"pg_name": "3", "pg_desc": "TENSOR_MODEL_PARALLEL_GROUP", "pg_size": 2}
    added = []
    for at, (group, dtype) in enumerate(((tensor, "c10::BFloat16"), ({"pg_name": "1", "pg_desc": "DATA_PARALLEL_GROUP",
                                                                      "pg_size": 4}, "float"))):
        mine = (("", [[2048]], f"GenericList[Tensor({dtype})]"),)
        number = top + 10 * at + 1
        added += [call(number + 1, "record_param_comms", number, *mine, **group),
                  call(number, "c10d::allreduce_", -1, *mine)]
    world = [{"pg_name": "0", "pg_desc": "default_pg", "ranks": [], "group_size": 8}]
    added.append(call(top + 50, "## process_group:init ##", -1, (json.dumps(world), [], "String")))
    found = import_files("chakra", [write(tmp_path, {"nodes": nodes + added})], ON)
    assert (found.data["parallel"]["tensor"], found.scenario.gpus) == (2, 8)
    assert (found.data["model"]["heads"], found.data["model"]["ffn"]) == (8, 384)  # of two ranks
    assert found.data["parallel"]["strategy"] == "ddp" and found.data["training"]["precision"] == "fp32"
    assert found.data["software"]["framework"] == "megatron"


def test_what_one_backward_cannot_say_is_assumed(tmp_path: Path) -> None:
    data = raw("zero1.0")
    second = [one["id"] for one in data["nodes"] if one["name"] == "aten::embedding"][1]
    half = {**data, "nodes": [one for one in data["nodes"] if one["id"] >= second or "process_group" in one["name"]]}
    found = import_files("chakra", [write(tmp_path, half)], ON)
    assert found.data["parallel"]["strategy"] == "zero1"
    assert "parallel.strategy" in [note.field for note in found.of("assumed")]


def test_weights_without_gradients_are_told(tmp_path: Path) -> None:
    found = import_files("chakra", [write(tmp_path, {"nodes": [
        one for at, one in enumerate(raw()["nodes"])
        if at % 5 == 0 or one["name"] != "torch::autograd::AccumulateGrad"]})], ON)
    assert any("not all weights are trained" in note.text for note in found.of("left"))


def test_an_optimizer_on_the_cpu_beside_a_model_on_a_gpu_is_offloaded(tmp_path: Path) -> None:
    text = json.dumps(raw("gpt_fsdp1.0")["nodes"])
    nodes = json.loads(text)
    for one in nodes:
        if one["name"] == "aten::linear":
            one["inputs"]["values"] = json.loads(json.dumps(one["inputs"]["values"]).replace('"cpu"', '"cuda:0"'))
    found = import_files("chakra", [write(tmp_path, {"nodes": nodes})], ON)
    assert found.data["parallel"]["offload"] == {"optimizer": "cpu", "parameters": "cpu"}


def test_a_trace_without_an_optimizers_step_is_taken_as_one(tmp_path: Path) -> None:
    found = import_files("chakra", [write(tmp_path, without(raw(), "Optimizer."))], ON)
    assert found.data["training"]["micro_steps"] == 1
    assert "training.optimizer" in [note.field for note in found.of("assumed")]
    assert any("taken as one step" in note.text for note in found.of("left"))


# ---------------------------------------------------------------------------------------------------- Chakra's protobuf
def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def message(number: int, content: bytes | int) -> bytes:
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    return varint(number << 3 | 2) + varint(len(content)) + content


def chakra(data: dict[str, Any]) -> bytes:
    """The file that Chakra's converter makes of a PyTorch trace, by its schema as `wire.py` has it."""
    parts = [message(1, b"0.0.4")]
    for node in data["nodes"]:
        body = message(1, node["id"]) + message(2, node["name"].encode()) + message(4, node["ctrl_deps"])
        for number, key in ((8, "inputs"), (9, "outputs")):
            lists = b"".join(message(field, str(node[key][what]).encode())
                          for field, what in ((1, "values"), (2, "shapes"), (3, "types")) if what in node.get(key, {}))
            body += message(number, lists)
        for one in node["attrs"]:
            body += message(10, message(1, one["name"].encode()) + message(13, int(one["value"])))
        parts.append(body)
    return b"".join(varint(len(part)) + part for part in parts)


def test_chakras_protobuf_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "rank.0.et"
    path.write_bytes(chakra(raw("llama_tp2_vocab.0")))
    mine, other = import_files("chakra", [str(path)], ON).data, imported("llama_tp2_vocab.0").data
    assert {key: mine[key] for key in ("model", "training", "parallel")} == {
        key: other[key] for key in ("model", "training", "parallel")}


@pytest.mark.parametrize("damage", [lambda raw: raw[:-7], lambda raw: raw[:5], lambda raw: b"\x00" + raw,
                                    lambda raw: b"\xff\xff\xff\xff\xff\xff" + raw, lambda raw: raw[40:],
                                    lambda raw: b"\x05\xff\xff\xff\xff\xff"])
def test_damaged_protobuf_is_told(damage: Any, tmp_path: Path) -> None:
    path = tmp_path / "rank.0.et"
    path.write_bytes(damage(chakra(raw("qwen.0"))))
    with pytest.raises(UserError, match=r"PyTorch's JSON|no product"):
        import_files("chakra", [str(path)], ON)
