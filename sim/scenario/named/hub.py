"""Models by the names they have on Hugging Face's hub, which other tools use too, as presets."""

from __future__ import annotations

import re

from sim.errors import bare
from sim.scenario.named.presets import preset_names
from sim.scenario.text.other_names import same_sizes

#: What a maker writes in front of a model's name, and what a checkpoint's name adds to it: none of it changes sizes.
_START = re.compile(r"\A(meta-|open-)")
_END = re.compile(r"-(hf|v0\.[123]|instruct|chat|base|it|pt|2[345]\d\d|fp16|bf16|4k|128k)\Z")


def preset_of(name: str) -> str | None:
    """The preset of a model by its name on the hub (`meta-llama/Llama-3.1-8B-Instruct`), None where none has its sizes.

    Models with the sizes of another (`values` of other_names.yaml): what sets them apart (tokens trained on, rotary
    scaling) costs no time. Sizes: config.json of each on the hub (recalled).
    """
    short = _START.sub("", name.rstrip("/").rpartition("/")[2].lower())
    while short:
        wanted = same_sizes(short) or short
        if found := [one for one in preset_names() if bare(one) == bare(wanted)]:
            return found[0]
        shorter = _END.sub("", short)
        short = shorter if shorter != short else ""
    return None
