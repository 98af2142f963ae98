"""What PyTorch's `scaled_dot_product_attention` is asked for and does not have, or is not simulated with it."""

from __future__ import annotations

from collections.abc import Iterator

from sim.errors import Fault
from sim.model.attention.core_choice import fused_kernel, masked
from sim.model.scenario_style import style_of
from sim.scenario.fields.schema import Scenario
from sim.software import Stack

_FIELD = "training.attention"


def attention_faults(scenario: Scenario, stack: Stack) -> Iterator[Fault]:
    """Faults of `attention: sdpa`."""
    model = scenario.model
    if scenario.training.attention != "sdpa" or model.kind == "layers":
        return
    if stack.modules == "megatron":
        yield Fault("Megatron's modules have kernels of their own for attention", _FIELD,
                    hint="use flash or eager, or software.modules plain or transformers")
    elif stack.sdpa_kernels == "none":
        yield Fault(f"{stack.framework} of this release has no scaled_dot_product_attention in its modules (PyTorch "
                    "2.0 and transformers 4.36 brought it)", _FIELD,
                    hint="use eager, or a later software.year or software.versions")
    elif model.score_softcap:
        yield Fault("scaled_dot_product_attention has no bound for scores (transformers refuses model.score_softcap "
                    "with it)", _FIELD, hint="use eager, or flash")
    elif model.positions == "alibi":
        yield Fault("ALiBi's biases in scaled_dot_product_attention are not simulated (transformers' BLOOM and MPT do "
                    "not call it)", _FIELD, hint="use eager, or flash")
    elif scenario.parallel.context > 1:
        style = style_of(scenario, stack, scenario.training.micro_batch)
        if masked(style) or fused_kernel(style) not in ("flash", "cudnn"):
            yield Fault("a sequence cut over context ranks is simulated with flash kernels, which take no mask (a "
                        "window's, documents'), no fp32 and not every GPU's call", _FIELD,
                        hint="use flash, or parallel.context: 1")
