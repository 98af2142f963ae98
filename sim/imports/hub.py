"""Models by the names they have on Hugging Face's hub, which other tools use too, as presets."""

from __future__ import annotations

import re

from sim.errors import bare
from sim.scenario.presets import preset_names

#: What a maker writes in front of a model's name, and what a checkpoint's name adds to it: none of it changes sizes.
_START = re.compile(r"\A(meta-|open-)")
_END = re.compile(r"-(hf|v0\.[123]|instruct|chat|base|it|pt|2[345]\d\d|fp16|bf16|4k|128k)\Z")
#: Models with the sizes of an older one: what sets them apart (rotary scaling, tokens trained on) costs no time.
_SAME = {
    "llama-3.1-8b": "llama-3-8b", "llama-3.1-70b": "llama-3-70b", "llama-3.1-405b": "llama-3-405b",
    "llama-3.3-70b": "llama-3-70b", "qwen2-0.5b": "qwen2.5-0.5b", "qwen2-1.5b": "qwen2.5-1.5b",
    "qwen2-7b": "qwen2.5-7b", "qwen2-72b": "qwen2.5-72b", "phi-3.5-mini": "phi-3-mini",
    "mistral-nemo": "mistral-nemo-12b", "phi-4-14b": "phi-4",
}


def preset_of(name: str) -> str | None:
    """The preset of a model by its name on the hub (`meta-llama/Llama-3.1-8B-Instruct`), None where none has its sizes.

    Sizes of the same: config.json of each on the hub (recalled).
    """
    short = _START.sub("", name.rstrip("/").rpartition("/")[2].lower())
    while short:
        wanted = next((same for other, same in _SAME.items() if bare(other) == bare(short)), short)
        if found := [one for one in preset_names() if bare(one) == bare(wanted)]:
            return found[0]
        shorter = _END.sub("", short)
        short = shorter if shorter != short else ""
    return None
