"""What a sequence that is cut over context ranks asks of a model: one clear error, never a silent approximation."""

from __future__ import annotations

from collections.abc import Iterator

from sim.errors import Fault
from sim.parallel.support.documents import context_document_faults
from sim.scenario.fields.schema import Scenario
from sim.software import Stack


def context_faults(scenario: Scenario, stack: Stack) -> Iterator[Fault]:
    """Faults of a layout with several context ranks."""
    parallel, model, training = scenario.parallel, scenario.model, scenario.training
    for field, tokens in (("decoder_sequence", training.decoder_sequence),
                          ("predicted_tokens", training.predicted_tokens)):
        if tokens % parallel.context:
            yield Fault(f"context {parallel.context} does not divide {field} {tokens}", f"training.{field}",
                        hint=f"use a multiple of {parallel.context}")
    parts = causal_parts(scenario, stack)
    if model.kind == "decoder" and training.sequence % parts:
        yield Fault(f"a causal sequence of {training.sequence} tokens does not divide into {parts} "
                    f"parts: each of {parts // 2} context ranks takes an early and a late one",
                    "parallel.context", hint=f"use a sequence that is a multiple of {parts}")
    yield from context_document_faults(scenario, stack)
    if scenario.head_ranks > 1:
        yield from _exchanged(scenario, stack)


def causal_parts(scenario: Scenario, stack: Stack) -> int:
    """Equal parts a causal sequence divides into: an early and a late one of every rank that attends to a slice of it.
    Ranks that exchange tokens for heads attend to all tokens; TransformerEngine cuts the sequence so all the same."""
    context, heads = scenario.parallel.context, scenario.head_ranks
    if heads == context and stack.head_exchange != "reordered":
        return context
    return 2 * context


def _exchanged(scenario: Scenario, stack: Stack) -> Iterator[Fault]:
    """Heads that the ranks which exchange them cannot share out evenly, and what exchanges of heads do not know."""
    parallel, model, ranks = scenario.parallel, scenario.model, scenario.head_ranks
    field = "parallel.context" if ranks == parallel.context else "parallel.context_all_to_all"

    def hint(count: int) -> str:
        return (f"use a divisor of {count}, or " if count > 1 else "") + "write parallel.context_exchange: ring"

    heads = model.heads // parallel.tensor
    keys = heads if model.mla is not None else max(1, model.kv_heads // parallel.tensor)
    beside = f" of each of {parallel.tensor} tensor ranks" if parallel.tensor > 1 else ""
    if heads % ranks:
        yield Fault(f"{ranks} context ranks do not share the {heads} heads{beside} out evenly, which they exchange "
                    "tokens for", field, hint=hint(heads))
    elif keys % ranks and (stack.head_exchange == "reordered" or ranks % keys):
        why = ("TransformerEngine repeats none" if stack.head_exchange == "reordered"
               else "neither divides the other, and some would have more than others")
        shared = f"{keys} heads" if keys > 1 else "one head"
        yield Fault(f"{ranks} context ranks do not share the {shared} of keys and values{beside} out evenly: {why}",
                    field, hint=hint(keys))
    if ranks < parallel.context and stack.head_exchange == "packed":
        yield Fault("an exchange of heads inside a ring is Megatron's (cp_comm_type a2a+p2p)",
                    "parallel.context_all_to_all",
                    hint="use framework megatron, or leave it out: all context ranks exchange heads")
    if model.mla is not None and stack.head_exchange == "packed" and stack.modules == "transformers":
        yield Fault("DeepSpeed's exchange for Hugging Face's modules takes keys and values of one width, and latent "
                    "attention's differ (UlyssesSPAttentionHF)", "parallel.context_exchange",
                    hint="use ring or all-gather")


def even_contexts(scenario: Scenario, stack: Stack, tensor: int, context: int) -> bool:
    """Whether a search may try so many tensor and context ranks: nothing of the above stands against them."""
    parallel = scenario.parallel.model_copy(update={"tensor": tensor, "context": context})
    tried = scenario.model_copy(update={"parallel": parallel})
    inner = parallel.context_all_to_all
    if context > 1 and parallel.context_exchange == "all-to-all" and inner and context % inner:
        return False
    return context == 1 or next(iter(context_faults(tried, stack)), None) is None
