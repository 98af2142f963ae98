"""What computes the core of attention: one fused kernel, and which, or products and softmax of their own.

`attention: flash` is a kernel that takes whatever a block is (windows, documents, grouped heads), `sdpa` is PyTorch's
`scaled_dot_product_attention`, which takes the first of its kernels that takes the call: an explicit mask (a window,
documents), heads of different widths, fp32 or keys that are broadcast over the queries' heads leave fewer, or none
("math").

Sources: ATen native/transformers/sdp_utils_cpp.h (torch 2.4.1 to 2.13.0: check_for_attn_mask,
check_batch_size_and_num_heads_dense, check_for_dropout), cuda/sdp_utils.cpp (use_flash_attention,
use_mem_efficient_attention, use_cudnn_attention; recalled); transformers 4.36.2 to 5.24.0
integrations/sdpa_attention.py (use_gqa_in_sdpa) and masking_utils.py (_ignore_causal_mask_sdpa).
"""

from __future__ import annotations

from dataclasses import replace

from sim.model.style import Style
from sim.work import DTYPE_BYTES

#: Heads wider than this are never handed over in groups (transformers' use_gqa_in_sdpa).
_GROUPED_HEAD = 256
#: Widest head that cuDNN's backward takes, and what its widths, and the flash kernels' padded ones, are multiples of.
_CUDNN_HEAD, _HEAD_MULTIPLE = 128, 8
#: Bytes that a row of a head is a multiple of, for the memory-efficient kernel.
_ALIGNED = 16


def fused_kernel(style: Style) -> str:
    """The fused kernel: flash, cudnn or efficient (PyTorch's memory-efficient one, of CUTLASS); "" = spelled out."""
    if style.attention == "sdpa":
        return next((kernel for kernel in style.sdpa if _takes(style, kernel)), "")
    if style.attention == "eager" or (_wide(style) and style.heads != style.kv_heads):
        return ""
    return "efficient" if style.biased or unequal(style) else "flash"


def _takes(style: Style, kernel: str) -> bool:
    """Whether a kernel of `scaled_dot_product_attention` takes this block's call."""
    if kernel == "efficient":
        row = style.head_dim * DTYPE_BYTES[style.act]
        more = style.biased or masked(style) or style.dropout
        return not _grouped(style) and row % _ALIGNED == 0 and (style.stack.sdpa_masks or not more)
    if _wide(style) or style.biased or style.broadcasts_keys or unequal(style):
        return False
    if kernel == "cudnn":  # its backward keeps no order (cuda/sdp_utils.cpp, check_cudnn_deterministic; recalled)
        return not style.stack.fixed_order and style.head_dim <= _CUDNN_HEAD and style.head_dim % _HEAD_MULTIPLE == 0
    return not masked(style) and style.head_dim <= style.sdpa_head


def _wide(style: Style) -> bool:
    return DTYPE_BYTES[style.act] > 2


def kernel_name(style: Style) -> str:
    """Name by which the fused kernel has its rates. cuDNN's of Hopper and later are taken for FlashAttention-3's, about
    as fast (Shah et al. 2024, figure 5)."""
    kernel = fused_kernel(style)
    flash = style.stack.sdpa_flash if style.attention == "sdpa" else style.stack.attention_kernel
    return {"flash": flash, "cudnn": "flash3"}.get(kernel, kernel)


def uses_flash(style: Style) -> bool:
    """Whether one kernel computes attention."""
    return fused_kernel(style) != ""


def unequal(style: Style) -> bool:
    """Whether values are not as wide as keys, which PyTorch's flash kernel refuses: its memory-efficient one serves
    latent attention (ATen native/transformers/cuda/sdp_utils.cpp, check_head_dim_size_flash). Megatron has
    TransformerEngine's kernels, which take both widths."""
    latent = style.latent
    return latent is not None and latent.nope + latent.rope != latent.value and style.modules != "megatron"


def masked(style: Style) -> bool:
    """Whether the call has a mask: for a window or documents, which `scaled_dot_product_attention` has no word for, and
    in Falcon's modules of a release that always makes one."""
    if style.attention != "sdpa" or not style.causal or style.memory or style.biased:
        return False
    return style.window > 0 or style.document > 0 or (style.joint_qkv == "groups" and style.stack.sdpa_mask_always)


def _grouped(style: Style) -> bool:
    """Whether the call has fewer heads of keys than of queries."""
    return style.broadcasts_keys or (style.heads != style.kv_heads and not expands(style))


def expands(style: Style) -> bool:
    """Whether grouped keys and values are copied out to every query head in front of fused attention: by LitGPT,
    torchtune and torchtitan always (`Stack.expands_kv`), by Hugging Face's modules where the release does so or the
    call has a mask."""
    if style.heads == style.kv_heads or style.latent is not None or style.gathers or style.memory:
        return False
    if style.modules == "plain":
        return style.stack.expands_kv
    if style.attention != "sdpa" or style.modules != "transformers" or style.broadcasts_keys:
        return False
    return not style.stack.sdpa_groups or masked(style) or style.head_dim > _GROUPED_HEAD


def spread_groups(style: Style) -> Style:
    """The style behind a projection whose module copies keys and values of a group out to all its queries' heads:
    Falcon's with several groups."""
    return replace(style, kv_heads=style.heads) if style.joint_qkv == "groups" and style.kv_heads > 1 else style


def repeated(style: Style) -> bool:
    """Whether keys and values are copied out to every query head before the scores (Hugging Face's repeat_kv, LitGPT's
    and torchtune's expand and reshape)."""
    return style.heads != style.kv_heads and (expands(style) or not uses_flash(style))


def copies_output(style: Style) -> bool:
    """Whether attention's output is copied from heads to tokens: flash kernels write it as queries lie, which are heads
    in front of tokens once cut heads were joined (Hugging Face's `transpose(1, 2).contiguous()`)."""
    return style.cut_heads and fused_kernel(style) in ("flash", "cudnn") and DTYPE_BYTES[style.act] <= 2


def in_math(style: Style) -> bool:
    """Whether `scaled_dot_product_attention` runs its own products and softmax."""
    return style.attention == "sdpa" and not uses_flash(style)


def core_dtype(style: Style) -> str:
    """Dtype of queries, keys and values in the core: PyTorch's math computes halves in fp32 from 2.5 on."""
    return "fp32" if in_math(style) and style.stack.sdpa_math_widens else style.act
