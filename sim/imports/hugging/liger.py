"""Liger Kernel, wherever a file of Hugging Face's tools turns it on: its loss in chunks, and its other kernels.

Source: trl 1.16 trainer/grpo_trainer.py (use_liger_kernel, liger_kernel_config); liger-kernel 0.8.5
transformers/monkey_patch.py (on by default: rope, rms_norm, swiglu or geglu, fused_linear_cross_entropy); that
transformers hands liger_kernel_config on as it is, and axolotl's names: recalled.
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.imports.draft import Draft
from sim.imports.settings import Said, Settings, peek, switch
from sim.software import release

_PACKAGE = "liger_kernel"
_CONFIG = "liger_kernel_config"
#: Kernels that the stack's facts take together, by their names in each tool; of a group any.
_TOGETHER = (("rms_norm",), ("rope",), ("swiglu", "geglu"))
_AXOLOTLS = (("liger_rms_norm",), ("liger_rope",), ("liger_glu_activation", "liger_swiglu"))
#: axolotl's switches of other kernels.
_OTHERS = {
    "liger_rms_norm_gated": "Liger's gated norm is not simulated",
    "liger_layer_norm": "Liger's layer norm is not simulated; models with RMSNorm have none",
    **dict.fromkeys(("liger_cross_entropy", "liger_cross_entropy_loss"),
                    "Liger's loss on whole logits is not simulated: PyTorch's is counted"),
}
_TEXT = "Liger's fused norms, rotary positions and MLPs, of a release of that year"
_APART = "simulated only all three together: Liger's norms, rotary positions and MLPs"


def take_kernels(draft: Draft, said: Said, text: str = _TEXT) -> None:
    """The kernels that stand in for modules, by the setting that turns them on."""
    year = draft.given("software.year")
    usual = release(_PACKAGE, year if isinstance(year, int) else None)
    draft.take(f"software.versions.{_PACKAGE}", usual, said, text)


def read_liger(settings: Settings, draft: Draft) -> None:
    """The Trainer's switch, and what its configuration turns off again."""
    said = switch(settings, "use_liger_kernel", "use_liger")
    if said is None:
        return
    if not _off(settings, ("fused_linear_cross_entropy",)):
        draft.take("training.chunked_loss", True, said, "Liger's fused linear cross-entropy")
    off = [one for names in _TOGETHER for one in _off(settings, names)]
    if off:
        draft.leave(settings.get(off[0].name) or off[0], _APART)
    else:
        take_kernels(draft, said)


def read_axolotls(settings: Settings, draft: Draft) -> None:
    """axolotl's switches, one a kernel."""
    found = [next((said for name in names if (said := switch(settings, name)) is not None), None)
             for names in _AXOLOTLS]
    on = [said for said in found if said is not None]
    if len(on) == len(found):
        take_kernels(draft, on[0], f"{_TEXT} ({', '.join(said.name for said in on)})")
    elif on:
        draft.leave(on[0], _APART + (f" ({', '.join(said.name for said in on)})" if len(on) > 1 else ""))
    for name, why in _OTHERS.items():
        if (said := switch(settings, name)) is not None:
            draft.leave(said, why)


def _off(settings: Settings, names: Sequence[str]) -> list[Said]:
    """Kernels of those names that the configuration turns off."""
    told = [said for name in names if (said := peek(settings, f"{_CONFIG}.{name}")) is not None]
    return [said for said in told if not said.flag()]
