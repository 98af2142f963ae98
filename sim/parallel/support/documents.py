"""What documents inside a sequence ask of attention: kernels, and exchanges over context ranks, that keep to them."""

from __future__ import annotations

from collections.abc import Iterator

from sim.errors import Fault
from sim.scenario.fields.schema import Scenario
from sim.software import Stack

_FIELD = "training.document"
_EXCHANGES = {"ring": "a ring", "all-gather": "gathered keys and values", "all-to-all": "an exchange of heads"}


def document_faults(scenario: Scenario, stack: Stack) -> Iterator[Fault]:
    """Faults of documents, however a job is laid out."""
    training = scenario.training
    if training.packed and training.attention == "flash" and stack.attention_kernel == "triton":
        yield Fault("this release's attention is Triton's kernel, which knows no documents (LLM Foundry: "
                    "attn_uses_sequence_id is for attn_impl torch and flash)", _FIELD,
                    hint="use attention: eager or a later software.year, or remove it")


def context_document_faults(scenario: Scenario, stack: Stack) -> Iterator[Fault]:
    """Faults of documents in a sequence that is cut over context ranks."""
    training, parallel = scenario.training, scenario.parallel
    if not training.packed:
        return
    ways = stack.document_exchanges.split(", ")
    if parallel.context_exchange not in ways:
        yield Fault(f"{stack.framework} has no attention within documents over context ranks by "
                    f"{_EXCHANGES[parallel.context_exchange]}", "parallel.context_exchange",
                    hint=f"use {' or '.join(ways)}, or remove training.document")
    elif training.attention == "eager":
        yield Fault("documents in a sequence cut over context ranks are simulated with flash kernels alone",
                    "training.attention", hint="use flash")
    elif parallel.context_exchange == "ring" and training.attended < 2 * parallel.context:
        yield Fault(f"a ring gives each of {parallel.context} context ranks an early and a late part of every "
                    f"document, and one of {training.attended:g} tokens has not so many", _FIELD,
                    hint=f"at least {2 * parallel.context} (with their padding), or fewer context ranks")
