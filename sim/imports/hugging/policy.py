"""Which dtypes a job really has: how weights are loaded, autocast or not, and who shards.

Sources: transformers 5.24 modeling_utils.py (from_pretrained and from_config load in config.json's dtype where none is
asked for; before 5 in fp32), trainer.py (leaves autocast to accelerate); accelerate 1.15 accelerator.py, prepare_model,
and utils/fsdp_utils.py (under mixed precision FSDP's trained weights are upcast to fp32), utils/dataclasses.py,
set_mixed_precision (param_dtype and reduce_dtype are the half type); deepspeed 0.19.8 runtime/engine.py
(get_data_types, _do_optimizer_sanity_check, communication_data_type) and runtime/torch_autocast.py; trl 1.16
trainer/model_config.py (fp32 weights), base_config.py (bf16), sft_trainer.py (bf16 adapters beside quantised weights).
"""

from __future__ import annotations

from typing import Any

from sim.imports.hugging.adapters import settle_adapters
from sim.imports.hugging.facts import Job, dtype_of
from sim.imports.settings import Said, word_of
from sim.scenario.fields.precisions import FIELDS, PRECISIONS

_PATH = "training.precision"


def settle_precision(job: Job) -> None:
    """`training.precision` and what is frozen."""
    if all(one is job.config for one in job.files):
        return  # a model's config alone says nothing of how it is trained
    weights, other, text = _weights(job)
    half, said = _half(job)
    settle_adapters(job, weights, half, text)
    policy = {"zero": _zero, "fsdp": _fsdp, "core": _core, "plain": _plain}[job.engine]
    asked, why = policy(job, weights, half)
    if policy(job, other, half)[0] == asked:
        text = ""
    if job.said("wide states") is not None and job.engine != "zero" and _row(asked)["optimizer"] != "fp32":
        asked = {"name": asked, "optimizer": "fp32"} if isinstance(asked, str) else {**asked, "optimizer": "fp32"}
        why = f"{why}; bitsandbytes' 32-bit states are fp32 all the same"
    if job.of("amp") == "fp8":
        asked, why = {**_row(asked), "compute": "fp8"}, f"{why}; fp8 for matrix products"
        narrow = job.said("fp8 gather")
        if narrow is not None and job.engine == "fsdp":
            asked["gather"] = "fp8"
            job.draft.share(f"{_PATH}.gather", "fp8", narrow)
    text = "; ".join(part for part in (why, text) if part)
    said = said or job.said("dtype") or job.said("tf32")
    if said is not None and said not in job.defaults:
        job.draft.take(_PATH, asked, said, text)
    else:
        job.draft.assume(_PATH, asked, text or "no mixed precision is said: the tools' default")


def _weights(job: Job) -> tuple[str, str, str]:
    """The dtype weights are loaded in, the one they would else be, and why."""
    stored = word_of(job.config, "dtype", "torch_dtype", "text_config.dtype", "text_config.torch_dtype"
                     ) if job.config is not None else None
    dtype = (dtype_of(stored) if stored is not None else None) or "fp32"
    if job.of("dtype") is not None:
        return job.of("dtype"), "fp32", f"weights loaded in {job.of('dtype')}: {job.said('dtype')}"
    if job.trl and job.said("dtype") is None:
        return "fp32", dtype, "weights loaded in fp32, TRL's default of dtype"
    if stored is None or not job.hugging or job.engine == "zero":
        return "fp32", "fp32", ""
    if dtype == "fp16" and job.of("amp") == "fp16" and job.said("lora") is None:
        # torch/amp/grad_scaler.py: "Attempting to unscale FP16 gradients."
        return "fp32", dtype, f"weights loaded in fp32, for autocast to fp16 refuses {stored.value} ones"
    return dtype, "fp32", f"weights loaded in {dtype}, as stored; transformers 4: in fp32"


def _half(job: Job) -> tuple[str | None, Said | None]:
    """The half type that computes, and the setting that says it."""
    amp = job.said("amp")
    if amp is not None:
        half = "bf16" if job.of("amp") == "fp8" else job.of("amp")
        if job.said("half") is not None:
            job.keep("half", half, amp)  # transformers and accelerate refuse what differs from DeepSpeed's JSON
        return half, amp
    if job.said("half") is not None:
        return job.of("half"), job.said("half")
    return ("bf16" if job.trl_half else None), None


def _row(asked: str | dict[str, str]) -> dict[str, str]:
    """The seven dtypes of a name, or of a name and what differs from it."""
    if isinstance(asked, str):
        return dict(PRECISIONS[asked])
    base = PRECISIONS[asked["name"]] if "name" in asked else {}
    return {**base, **{key: dtype for key, dtype in asked.items() if key != "name"}}


def _uniform(compute: str, stored: str) -> str | dict[str, str]:
    """Weights, gradients and optimizer states of one dtype; products maybe of another."""
    if stored == "fp32":
        return "fp32" if compute == "fp32" else f"amp-{compute}"
    if compute == stored:
        return f"pure-{stored}"
    return {**dict.fromkeys(FIELDS, stored), "compute": compute, "master": "none"}


def _plain(job: Job, weights: str, half: str | None) -> tuple[str | dict[str, str], str]:
    """Autocast over weights as they are loaded; their gradients and states have their dtype."""
    if job.said("lora") is not None:
        return _adapters(job, weights, half)
    if half is None and weights == "fp32":
        return ("tf32", "fp32 products run as TF32") if job.of("tf32") else ("fp32", "no mixed precision is said")
    if half is not None and weights == "fp32":
        return f"amp-{half}", "autocast over fp32 weights"
    asked = _uniform(half or weights, weights)
    return asked, f"gradients and optimizer states have the weights' dtype{', autocast or not' if half else ''}"


def _adapters(job: Job, weights: str, half: str | None) -> tuple[str | dict[str, str], str]:
    """peft keeps adapters in fp32 (autocast_adapter_dtype); TRL makes them bf16 beside quantised weights."""
    if job.said("base") is not None and job.trl:
        return "pure-bf16", "TRL makes adapters bf16 beside quantised weights"
    if half is not None:
        return f"amp-{half}", "peft's adapters are fp32"
    if job.said("base") is None:
        why = "no mixed precision is said" if weights == "fp32" else (
            f"no mixed precision is said: peft's adapters are fp32 and cast what they read, {weights} weights compute "
            "in their own dtype")
        return "tf32" if job.of("tf32") else "fp32", "fp32 products run as TF32" if job.of("tf32") else why
    computes = weights if weights != "fp32" else "bf16"
    return f"amp-{computes}", "peft's adapters are fp32; frozen weights compute in their own dtype"


def _fsdp(job: Job, weights: str, half: str | None) -> tuple[str | dict[str, str], str]:
    """Under mixed precision what is trained is fp32, gathered and reduced in the half type."""
    if half is not None and job.of("base") is not None and job.trl:
        return "pure-bf16", "TRL makes adapters bf16 beside quantised weights"
    if half is not None:
        return f"fsdp-{half}", "accelerate keeps FSDP's trained weights in fp32 and gathers and reduces half ones"
    return _plain(job, weights, None)


def _core(job: Job, weights: str, half: str | None) -> tuple[str | dict[str, str], str]:
    del job, weights
    return (f"megatron-{half}", "Megatron-LM's optimizer") if half is not None else ("fp32", "")


def _zero(job: Job, weights: str, half: str | None) -> tuple[str | dict[str, str], str]:
    """DeepSpeed casts the module and keeps fp32 masters of shards, whatever dtype weights had."""
    del weights
    row: dict[str, Any]
    if half is not None:
        row, why = dict(PRECISIONS[f"mixed-{half}"]), "DeepSpeed casts weights and keeps fp32 masters"
        if job.of("half master") == half:
            row["master"] = half
            row["optimizer"] = half if job.of("half states") == half else "fp32"
    elif job.of("autocast") is not None:
        cast = job.of("autocast")
        # What autocast casts is gathered (stage 3) and reduced in its type (torch_autocast.py).
        row, why = {**PRECISIONS[f"amp-{cast}"], "reduce": cast}, "DeepSpeed's torch_autocast over fp32 weights"
        row["gather"] = cast if job.of("stage") == 3 else "fp32"
    else:
        row, why = dict(PRECISIONS["fp32"]), "DeepSpeed computes in fp32 without bf16 or fp16"
        row["compute"] = "tf32" if job.of("tf32") else "fp32"
    for fact, name in (("accumulate", "gradients"), ("wire", "reduce")):
        if job.of(fact) is not None:
            row[name] = job.of(fact)
    row |= job.of("narrow") or {}
    if row["gather"] == "int8" and row["parameters"] == "bf16":
        job.draft.assume("software.versions.deepspeed", "0.19.8", "quantised gathers of bf16 parameters go wrong in "
                         "releases before 0.19")
    named = [name for name, known in PRECISIONS.items() if known == row]
    return (named[0] if named else row), why
