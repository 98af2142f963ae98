"""What `scaled_dot_product_attention` runs where it is not a flash kernel, which is what people expect of it."""

from __future__ import annotations

from sim.hardware import gpu
from sim.model.architecture import Architecture
from sim.model.attention.core_choice import core_dtype, fused_kernel, masked, uses_flash
from sim.model.build import build
from sim.model.scenario_style import style_of
from sim.model.style import Style
from sim.scenario import Scenario
from sim.software import stack_of
from sim.work import DTYPE_BYTES

_NAME = "scaled_dot_product_attention"
_HOPPER = "9.0"  # compute capability


def not_flash(scenario: Scenario) -> list[str]:
    """Warnings of calls that are masked, or that no flash kernel takes."""
    if scenario.training.attention != "sdpa" or scenario.model.kind == "layers":
        return []
    style = style_of(scenario, stack_of(scenario.software), scenario.training.micro_batch)
    kernel = fused_kernel(style)
    if masked(style):
        return [_of_mask(style, kernel)]
    if kernel == "efficient" and not style.biased:
        return [f"attention: {_NAME} runs its memory-efficient kernel: {_why(style)}"]
    if not kernel:
        bytes_ = style.batch * style.heads * style.sequence * style.keys * DTYPE_BYTES[core_dtype(style)]
        return [f"attention: {_NAME} materialises the scores ({_size(bytes_)} a block), no fused kernel takes the "
                f"call: {_why(style)}"]
    return []


def _of_mask(style: Style, kernel: str) -> str:
    what = ("documents" if style.document else f"the window of {style.window} tokens" if style.window else
            "causality (Falcon's modules always do so)")
    size = _size(style.batch * style.sequence * style.keys * DTYPE_BYTES[style.act])
    runs = {"efficient": "the memory-efficient kernel runs and skips nothing",
            "cudnn": "cuDNN's kernel runs and skips nothing"}
    return (f"attention: {_NAME} gets {what} as a mask of {size}: "
            f"{runs.get(kernel, 'no fused kernel takes it, the scores are materialised')}; attention: flash "
            "(flash_attention_2) needs no mask")


def _why(style: Style) -> str:
    """The first reason against a flash kernel."""
    if DTYPE_BYTES[style.act] > 2:
        grouped = style.heads != style.kv_heads and not fused_kernel(style)
        return f"{style.act}{', and heads of keys that are shared' if grouped else ' has no flash kernel'}"
    if style.broadcasts_keys:
        return "one head of keys is broadcast over all queries' heads (Falcon)"
    if not {"flash", "cudnn"} & set(style.sdpa):
        return "this GPU has no flash kernel in this release of PyTorch"
    if style.latent is not None:
        return "values are not as wide as keys"
    return f"heads of {style.head_dim} elements"


def _size(count: float) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


def third_in_vain(scenario: Scenario) -> list[str]:
    """A warning where FlashAttention-3 is named and another kernel runs."""
    named = scenario.software.versions.get("flash_attn", "")
    if named.partition(".")[0] != "3" or scenario.model.kind == "layers":
        return []
    what, why = f"software: versions.flash_attn {named} changes nothing: ", ""
    if scenario.training.attention != "flash":
        why = f"training.attention is {scenario.training.attention}, not flash"
    elif stack_of(scenario.software).attention_kernel != "flash3":
        why = f"{scenario.software.framework} is predicted to call its own kernels (framework: pytorch calls them)"
    elif gpu(scenario.cluster.topology.gpu).compute_capability != _HOPPER:
        why = f"its own kernels are Hopper's; {scenario.cluster.topology.gpu} runs FlashAttention-2's"
    return [what + why] if why else []


def documents_in_vain(scenario: Scenario) -> list[str]:
    """A warning where attention is spelled out, so that documents are a mask and nothing is skipped."""
    training = scenario.training
    if not training.packed or training.attention == "sdpa":
        return []
    if uses_flash(style_of(scenario, stack_of(scenario.software), training.micro_batch)):
        return []
    return ["attention: document changes neither time nor FLOPs: products and softmax spelled out compute all pairs "
            "of the sequence under a mask; flash kernels in 16 bits skip those of two documents"]


def of_whole_sequences(scenario: Scenario, architecture: Architecture) -> float:
    """FLOPs of a model whose sequences are one document each, over those with documents inside."""
    training = scenario.training.model_copy(update={"document": None})
    parallel = scenario.parallel.model_copy(update={"tensor": 1, "context": 1, "expert": 1})
    whole = build(scenario.model_copy(update={"training": training, "parallel": parallel}),
                  stack_of(scenario.software), architecture.batch)
    return (whole.forward_flops + whole.backward_flops) / (architecture.forward_flops + architecture.backward_flops)


def joint_beside_frozen(scenario: Scenario) -> list[str]:
    """A warning where adapters stand beside projections that the model has in one."""
    model, software = scenario.model, scenario.software
    joint = model.fused_qkv is not None or model.fused_gate
    if not joint or software.modules != "transformers" or scenario.training.finetune.method == "full":
        return []
    return ["model: fine-tuning is predicted as beside separate projections, each with matrices of its own; this model "
            "has them in one (fused_qkv, fused_gate)"]
