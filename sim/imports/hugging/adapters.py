"""peft's adapter_config.json, TRL's LoRA arguments, and quantised weights of bitsandbytes.

Source: transformers 5.24 utils/quantization_config.py (BitsAndBytesConfig), trl 1.16 trainer/model_config.py and
sft_trainer.py; peft 0.11.1 and 0.17.1 tuners/lora/config.py, LoraConfig, and utils/constants.py for the matrices it
picks by itself.
"""

from __future__ import annotations

from sim.imports.hugging.facts import Job
from sim.imports.settings import Said, Settings, mapping_at, peek, switch, take_whole, word_of

_QKV, _MLP = ("query", "key", "value"), ("mlp",)
#: Module names of transformers' models -> which of our matrices they are.
_MODULES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("q_proj", "q", "query", "q_lin", "wq", "q_b_proj", "q_a_proj"), ("query",)),
    **dict.fromkeys(("k_proj", "k", "key", "k_lin", "wk"), ("key",)),
    **dict.fromkeys(("v_proj", "v", "value", "v_lin", "wv"), ("value",)),
    **dict.fromkeys(("o_proj", "out_proj", "o", "dense", "out_lin", "wo", "attention.dense", "self_attention.dense"),
                    ("projection",)),
    **dict.fromkeys(("query_key_value", "qkv_proj", "c_attn", "wqkv", "w_pack", "qkv"), _QKV),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2", "fc_in", "fc_out", "c_fc", "w1",
                     "w2", "w3", "wi", "wi_0", "wi_1", "dense_h_to_4h", "dense_4h_to_h", "lin1", "lin2", "mlp.c_proj",
                     "ffn.up_proj", "ffn.down_proj"), _MLP),
    "c_proj": ("projection", "mlp"), "lm_head": ("head",), "embed_out": ("head",),
}
#: All matrices of an MLP by name: fewer of them are fewer than `mlp` stands for.
_WHOLE_MLPS = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"}, {"fc1", "fc2"}, {"w1", "w2", "w3"},
               {"dense_h_to_4h", "dense_4h_to_h"}, {"c_fc", "c_proj"}, {"fc_in", "fc_out"}, {"wi", "wo"},
               {"wi_0", "wi_1", "wo"}, {"c_fc", "mlp.c_proj"}, {"lin1", "lin2"})
_ORDER = ("query", "key", "value", "projection", "mlp", "head")
LINEAR = [one for one in _ORDER if one != "head"]  # peft's all-linear leaves the output layer out


def read_adapter(settings: Settings, job: Job) -> None:
    """peft's adapter_config.json."""
    said = settings.get("peft_type")
    if said is not None and said.word() != "lora":
        raise said.wrong("LORA; other kinds of peft are not simulated")
    read_lora(settings, job, said or Said(settings.file, "r", "LORA", settings.line("r")), "")
    settings.idle("task_type", "inference_mode", "base_model_name_or_path", "revision", "auto_mapping", "init_lora_*",
                  "fan_in_fan_out", "alpha_pattern*", "megatron_*", "loftq_config*", "corda_config*", "eva_config*",
                  "peft_version", "ensure_weight_tying", "runtime_config*", "lora_alpha", "use_rslora", "qalora_*",
                  "arrow_config*", "lora_ga_config*", "alora_*", "bdlora_*", "layer_replication", "lora_bias", "use_*",
                  "layers_pattern", "trainable_token_indices", "target_parameters", "bias", "rank_pattern*",
                  "modules_to_save", "exclude_modules", "layers_to_transform")


def read_lora_arguments(settings: Settings, job: Job) -> None:
    """LoRA among arguments: TRL's ModelConfig, or scripts that name it alike."""
    said = switch(settings, "use_peft", "use_lora", "lora")
    kind = word_of(settings, "adapter")  # axolotl, and scripts that name it alike
    if kind is not None and kind.word() in ("lora", "qlora"):
        said = said or kind
    elif kind is not None and kind.word() != "full":
        job.draft.leave(kind, "is simulated as training of all weights")
    if said is not None:
        read_lora(settings, job, said, "lora_")
        if peek(settings, "lora_r", "lora_rank") is None and job.trl:
            job.draft.assume("training.finetune.rank", 16, "TRL's default of lora_r")
        if peek(settings, "lora_dropout") is None and job.trl:
            job.draft.assume("training.finetune.dropout", 0.05, "TRL's default of lora_dropout")
    settings.idle("lora_*", "use_rslora", "use_dora")


def read_lora(settings: Settings, job: Job, said: Said, start: str) -> None:
    """LoRA's settings, whose names start with `start`; `said` is the one that turns it on."""
    draft = job.draft
    job.keep("lora", True, said)
    rank = settings.get(f"{start}r", f"{start}rank")
    if rank is not None:
        draft.take("training.finetune.rank", rank.whole(), rank)
    drop = settings.get(f"{start}dropout", "lora_dropout")
    if drop is not None:
        if not 0 <= drop.number() < 1:
            raise drop.wrong("a probability")
        draft.take("training.finetune.dropout", drop.number(), drop)
    modules = settings.get(f"{start}target_modules", f"{start}target", f"{start}modules")
    if modules is None:
        draft.assume("training.finetune.targets", ["query", "value"], "no modules are named: peft picks by model, "
                                                                      "queries and values in most")
    else:
        _targets(modules, job)
    if (dora := switch(settings, "use_dora")) is not None:
        draft.leave(dora, "DoRA's magnitudes are not simulated; LoRA is")
    for name in ("modules_to_save", "rank_pattern", "layers_to_transform", "target_parameters", "exclude_modules",
                 "trainable_token_indices", "layer_replication"):
        names = (name, f"{start}{name}")
        one = peek(settings, *names)
        if one is not None and one.value not in ([], {}, ""):
            draft.leave(one, "no field says it: what the targets name alone is trained, alike in all blocks")
            take_whole(settings, name if settings.has(name) else f"{start}{name}")
    bias = peek(settings, "bias", f"{start}bias")
    if bias is not None and bias.value not in ("none", False):
        draft.leave(settings.get("bias", f"{start}bias") or bias, "trained biases are not simulated")


def _targets(said: Said, job: Job) -> None:
    """Which matrices get one, from modules' names; the last part of a dotted name tells."""
    names = said.value
    if isinstance(names, str):
        if names.strip().lower() in ("all-linear", "all"):
            job.draft.take("training.finetune.targets", list(LINEAR), said)
            return
        names = names.replace(",", " ").split()
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise said.wrong("a list of modules' names, or all-linear")
    lower = [one.lower() for one in names]
    if any(one in ("all-linear", "all") for one in lower):
        job.draft.take("training.finetune.targets", list(LINEAR), said)
        return
    found: set[str] = set()
    strange = []
    for one in lower:
        matrices = _MODULES.get(one) or _MODULES.get(one.rpartition(".")[2])
        found.update(matrices or ())
        strange += [] if matrices else [one]
    if found:
        job.draft.take("training.finetune.targets", [one for one in _ORDER if one in found], said)
    if strange or not found:
        job.draft.leave(said, f"which matrices these are is not known here: {', '.join(strange)[:80] or 'none'}; "
                              f"--set training.finetune.targets=[query,value]")
    last = {one.rpartition(".")[2] for one in lower}
    if "mlp" in found and not any(whole <= (last | set(lower)) for whole in _WHOLE_MLPS):
        job.draft.leave(said, "some of the MLP's matrices alone: simulated for all of them")


def read_quantised(settings: Settings, job: Job, above: str = "") -> None:
    """Frozen weights as bitsandbytes keeps them. `above` names the mapping of a config, with a dot."""
    mapping_at(settings, above[:-1])
    four = switch(settings, f"{above}load_in_4bit", f"{above}_load_in_4bit")
    eight = switch(settings, f"{above}load_in_8bit", f"{above}_load_in_8bit")
    if four is not None and eight is not None:
        raise eight.wrong(f"false beside {four.name}")
    if four is not None:
        kind = settings.get(f"{above}bnb_4bit_quant_type")
        if kind is not None and kind.word() not in ("nf4", "fp4"):
            raise kind.wrong("nf4 or fp4")
        twice = switch(settings, f"{above}bnb_4bit_use_double_quant", f"{above}use_bnb_nested_quant")
        job.keep("base", "nf4-dq" if twice is not None else "nf4", four)
        if kind is not None and kind.word() == "fp4":
            job.draft.leave(kind, "simulated as nf4: as many bits, another table")
    elif eight is not None:
        job.keep("base", "int8", eight)
    method = settings.get(f"{above}quant_method") if above else None
    if method is not None and method.word() != "bitsandbytes":
        job.draft.leave(method, "weights quantised so are not simulated; they are as large as in training.precision")
    settings.idle(*(f"{above}{name}" for name in ("bnb_4bit_*", "use_bnb_nested_quant", "llm_int8_*", "_load_in_*")))


def settle_adapters(job: Job, weights: str, half: str | None, why: str) -> None:
    """Method and base of what is trained beside frozen weights.

    Args:
        weights: the dtype they are loaded in, for the reason `why`.
        half: the half type that computes, if one does.
    """
    draft, said, base = job.draft, job.said("lora"), job.said("base")
    if said is None:
        if base is not None:
            draft.leave(base, "weights quantised so are frozen, and no LoRA is said: give adapter_config.json too, or "
                              "--set training.finetune.method=qlora")
        return
    if base is not None:
        draft.take("training.finetune.method", "qlora", said)
        draft.take("training.finetune.base", job.of("base"), base)
        stays = job.of("unquantised")
        if stays in ("bf16", "fp16") and job.engine != "zero":  # which casts everything
            draft.assume("training.finetune.unquantised", stays,
                         f"{job.tool} leaves what is not quantised in the dtype it loads")
        return
    draft.take("training.finetune.method", "lora", said)
    if half is not None and job.engine in ("zero", "core"):
        # DeepSpeed casts the whole module to its half type (engine.py, _configure_distributed_model).
        draft.assume("training.finetune.base", half, "frozen weights are cast too")
    elif half is not None and job.engine == "fsdp" and weights != "fp32":
        draft.assume("training.finetune.base", half, why or "the dtype the frozen weights are loaded in")
    else:
        draft.assume("training.finetune.base", weights, why or "the dtype the frozen weights are loaded in")
