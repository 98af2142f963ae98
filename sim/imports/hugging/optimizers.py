"""The Trainer's `optim`. Source: transformers 5.24 training_args.py (OptimizerNames), trainer_optimizer.py."""

from __future__ import annotations

import re

from sim.errors import Fault, UserError, nearest
from sim.imports.hugging.facts import Job
from sim.imports.settings import Said, Settings, switch

#: Name -> ours, how its kernels are launched ("" = as the stack does).
_NAMES = {
    "adamw_torch": ("adamw", "foreach"), "adamw_torch_fused": ("adamw", "fused"), "adamw_hf": ("adamw", "loop"),
    "adamw_apex_fused": ("adamw", "fused"), "adafactor": ("adafactor", ""), "sgd": ("sgd", "foreach"),
    "adamw_bnb_8bit": ("adamw-8bit", ""), "adamw_8bit": ("adamw-8bit", ""), "adamw_torch_8bit": ("adamw-8bit", ""),
    "paged_adamw_8bit": ("adamw-8bit", ""), "paged_adamw_32bit": ("adamw", ""), "paged_adamw": ("adamw", ""),
}
#: Name -> the nearest of ours by the states it keeps, and what it is not.
_NEAREST = {
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit", "rmsprop", "rmsprop_bnb", "rmsprop_bnb_32bit", "adagrad",
                     "schedule_free_sgd"), ("sgd-momentum", "one state per parameter, as here")),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit", "rmsprop_bnb_8bit"),
                    ("adamw-8bit", "it keeps one state of 8 bits per parameter, not two")),
    **dict.fromkeys(("stable_adamw", "grokadamw", "schedule_free_adamw", "schedule_free_radam", "adamw_anyprecision",
                     "adamw_torch_xla", "adamw_torch_npu_fused"), ("adamw", "states are taken for AdamW's")),
    **dict.fromkeys(("ademamix", "paged_ademamix_32bit"), ("adamw", "its third state is not counted")),
    **dict.fromkeys(("ademamix_8bit", "paged_ademamix_8bit"), ("adamw-8bit", "its third state is not counted")),
    "adamw_torch_4bit": ("adamw-8bit", "its states are half as large"),
    **dict.fromkeys(("galore_adamw", "galore_adamw_layerwise", "apollo_adamw", "apollo_adamw_layerwise"),
                    ("adamw", "its low-rank states are not simulated")),
    **dict.fromkeys(("galore_adamw_8bit", "galore_adamw_8bit_layerwise"),
                    ("adamw-8bit", "its low-rank states are not simulated")),
    **dict.fromkeys(("galore_adafactor", "galore_adafactor_layerwise"),
                    ("adafactor", "its low-rank states are not simulated")),
    "lomo": ("sgd", "gradients are freed as they are applied"),
    "adalomo": ("adafactor", "gradients are freed as they are applied"),
}
_IN_BACKWARD = ("lomo", "adalomo")
#: bitsandbytes with optim_bits=32: fp32 states whatever dtype the weights have (bitsandbytes optim/optimizer.py,
#: init_state; trainer_optimizer.py, _get_bitsandbytes_optimizer). Torch's optimizers keep the weights' dtype.
_WIDE = ("paged_adamw", "paged_adamw_32bit", "lion_32bit", "paged_lion_32bit", "rmsprop_bnb", "rmsprop_bnb_32bit",
         "ademamix", "paged_ademamix_32bit")


def read_optimizer(settings: Settings, job: Job) -> None:
    """The Trainer's optimizer, unless DeepSpeed's JSON has one."""
    said = settings.get("optim")
    if (old := switch(settings, "adafactor")) is not None:  # transformers 4's training_args.py: it goes over optim
        job.keep("optimizer", "adafactor", old)
        if said is not None and said.value != "adafactor":
            job.draft.leave(said, "adafactor goes over it")
        return
    if said is None:
        # torch 2.8 and later; before, adamw_torch.
        job.facts.setdefault("default optimizer", ("adamw", Said(settings.file, "optim", "adamw_torch_fused")))
        return
    name = said.word()
    if name in _NEAREST:
        ours, why = _NEAREST[name]
        job.draft.leave(said, f"simulated as {ours}: {why}")
        job.draft.assume("training.optimizer", ours, f"the nearest to {name}")
        if name in _IN_BACKWARD or name.endswith("_layerwise"):
            job.draft.take("training.optimizer_in_backward", True, said)
    elif name in _NAMES:
        ours, kernel = _NAMES[name]
        options = settings.get("optim_args")
        momentum = re.search(r"momentum\s*=\s*([\d.]+)", str(options.value)) if options is not None else None
        if ours == "sgd" and momentum is not None and momentum[1].strip("0."):
            ours = "sgd-momentum"
        job.keep("optimizer", ours, said)
        if kernel:
            job.keep("kernel", kernel, said)
    else:
        raise said.wrong(f"one of {', '.join([*_NAMES, *_NEAREST])}", nearest(name, [*_NAMES, *_NEAREST]))
    if name in _WIDE:
        job.keep("wide states", True, said)
    if name.startswith("paged_"):
        place_optimizer(job, "paged", said)


def place_optimizer(job: Job, where: str, said: Said, text: str = "") -> None:
    """Where an optimizer's states are: "cpu", with its step, or "paged". Raises UserError where another setting says
    the other."""
    path, draft = "parallel.offload.optimizer", job.draft
    origin, earlier = draft.origin(path), draft.value(path)
    if origin is not None and {earlier, where} == {"cpu", "paged"} and not draft.overridden(path):
        paged, other = (said, origin) if where == "paged" else (origin, said)
        place = f" (line {other.line})" if other.line else ""
        raise UserError(Fault(
            f"{paged.word()} steps on the GPU and pages its states out as memory runs short, but {other}{place} keeps "
            "the optimizer and its step in host memory: the two exclude each other", paged.name, paged.file, paged.line,
            f"take adamw_torch beside the offload, or drop the offload; --set {path}=cpu or {path}=paged chooses here"))
    draft.take(path, where, said, text)


def settle_optimizer(job: Job) -> None:
    """The Trainer's optimizer where no DeepSpeed JSON names its own (which then makes the optimizer)."""
    draft, said = job.draft, job.said("optimizer")
    if draft.has("training.optimizer"):
        if said is not None and job.of("optimizer") != draft.value("training.optimizer"):
            draft.leave(said, "DeepSpeed's JSON makes the optimizer")
        return
    if said is not None:
        draft.take("training.optimizer", job.of("optimizer"), said)
        kernel = job.said("kernel")
        if kernel is not None:
            draft.take("software.optimizer_kernel", job.of("kernel"), kernel)
    elif job.said("default optimizer") is not None:
        draft.assume("training.optimizer", "adamw", "the Trainer's default of optim")
        draft.assume("software.optimizer_kernel", "fused", "the Trainer's default of optim since torch 2.8: "
                                                           "adamw_torch_fused")
