"""Which FlashAttention a file of Hugging Face's tools names.

Source: transformers 5.23.0 utils/import_utils.py (is_flash_attn_3_available: the package flash_attn_3) and
modeling_flash_attention_utils.py (flash_attention_3); kernels-community/flash-attn3; LLaMA-Factory's fa3 (recalled).
"""

from __future__ import annotations

import re

from sim.imports.draft import Draft
from sim.imports.settings import Said

_THIRD = re.compile(r"(flash[_-]attn[_-]?|flash_attention_|fa)3$", re.IGNORECASE)


def take_flash(draft: Draft, said: Said) -> None:
    """The release whose kernels a setting of attention names: FlashAttention-3's, which no year stands for."""
    if _THIRD.search(str(said.value).partition("@")[0].partition(":")[0]):
        draft.take("software.versions.flash_attn", "3.0", said, "FlashAttention-3's kernels, on Hopper")
