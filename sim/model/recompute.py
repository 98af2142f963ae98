"""Selective recomputation: which kernels' outputs are kept, and what runs again in backward.

A policy is a word: "none", "full" (every block), "selective" (attention's core), "selective-op", or the names of
Megatron's modules joined with "+" (Megatron-LM core/transformer/transformer_config.py, `recompute_modules`).

By operator, torchtitan's policy (0.1.0 models/llama3/infra/parallelize.py, `_save_list`, `_get_custom_policy`; later
`torchtitan/distributed/activation_checkpoint.py`): outputs of fused attention and of reduce-scatters are kept, and of
the matrix products of linear layers the first, the third and so on; everything else runs again. Compiled, a product
that a kept reduce-scatter alone reads does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from sim.model.architecture import Layer, Operator
from sim.work import Kernel

#: Parts of a block that Megatron can recompute by name.
MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
#: Operators of latent attention between its compressions and its core.
_EXPANSION = frozenset({"q_proj", "q_norm", "q_up", "kv_norm", "kv_up", "assemble"})


def joined(modules: Iterable[str]) -> str:
    """The policy that recomputes these modules."""
    chosen = set(modules)
    return "+".join(name for name in MODULES if name in chosen)


def modules_of(policy: str) -> frozenset[str]:
    """Modules that a policy recomputes; none if it goes by whole blocks or by operators."""
    return frozenset({"core_attn"} if policy == "selective" else set(policy.split("+")) & set(MODULES))


def module_operators(layer: Layer, modules: frozenset[str]) -> tuple[Operator, ...]:
    """Operators of these modules, which run again in backward."""
    return tuple(op for op, names in _modules(layer) if names & modules and (op.core or op.recomputed))


def _modules(layer: Layer) -> Iterator[tuple[Operator, frozenset[str]]]:
    """Every operator of a block with the modules it is part of.

    Norms in front of a linear layer are one module with it (TELayerNormColumnParallelLinear) unless latent attention or
    a mixture follows: "layernorm" is those that stand alone, and a dense MLP's goes with it.
    """
    names = [op.name for op in layer.operators]
    latent, mixture = "kv_up" in names, "router" in names
    part: frozenset[str] = frozenset()  # between the second norm and the sum
    for op in layer.operators:
        name = op.name.split("_lora_")[0]  # a branch is part of what its linear layer is part of
        if op.name == "norm2":
            part = frozenset({"moe"} if mixture else {"mlp"})
            yield op, frozenset({"layernorm"}) if mixture else part
        elif name.startswith(("residual", "dropout")):
            part = frozenset()
            yield op, part
        elif "_adapter" in name:  # behind the module, outside its checkpoint
            yield op, frozenset()
        elif part:
            alone = op.name == "activation" and part == {"moe"}
            yield op, part | {"moe_act"} if alone else part - {"shared_experts"} if op.name == "shared_add" else part
            part |= {"shared_experts"} if op.name == "combine" else set()
        else:
            yield op, frozenset({"core_attn"} if op.core else {"mla_up_proj"} if name in _EXPANSION else
                                {"layernorm"} if op.name == "norm1" and latent else ())


def kept_kernels(layer: Layer) -> tuple[Kernel, ...]:
    """Kernels of forward whose outputs are kept."""
    return tuple(kernel for kernel, kept in _forward(layer) if kept)


def again_operators(layer: Layer) -> tuple[Operator, ...]:
    """Operators that run again in backward, with what is left of their forward."""
    kept = _forward(layer)
    left: list[tuple[Operator, tuple[Kernel, ...]]] = []
    for op in layer.operators:
        own, kept = kept[:len(op.forward)], kept[len(op.forward):]
        there = [is_kept for kernel, is_kept in own if kernel.op in ("gemm", "attention")]
        if op.core and op.again is not None and all(there):  # copies for attention, which does not run
            continue
        turn = iter(there)
        left.append((op, tuple(k for k in op.rerun.forward if not (k.op in ("gemm", "attention") and next(turn)))))
    return tuple(replace(op, forward=forward) for op, forward in left if forward and op.recomputed)


def output_elements(kernel: Kernel) -> int:
    """Elements that a product or a fused attention kernel writes."""
    if kernel.op == "attention":
        batch, heads, _, queries, _, dim = kernel.shape
        return batch * heads * queries * dim
    batch, m, n, _ = kernel.shape
    return batch * m * n


def _forward(layer: Layer) -> list[tuple[Kernel, bool]]:
    """Every kernel of forward, and whether its output is kept."""
    marked: list[tuple[Kernel, bool]] = []
    kept = iter(_kept_products(layer))
    for op in layer.operators:
        for kernel in op.forward:
            counted = kernel.op == "gemm" and not op.core
            marked.append((kernel, kernel.op == "attention" or (counted and next(kept))))
    return marked


def _kept_products(layer: Layer) -> list[bool]:
    """Whether the output of each product of linear layers is kept: of every second one in the order in which modules
    run them."""
    turns: list[int] = []
    covered = 0  # products whose turns an operator before has said
    for op in layer.operators:
        own = sum(kernel.op == "gemm" and not op.core for kernel in op.forward)
        if op.turns:
            first = 1 + max(turns, default=-1)
            turns += [first + turn if turn >= 0 else -1 for turn in op.turns]
            covered = len(op.turns)
        said = min(own, covered)
        covered -= said
        first = 1 + max(turns, default=-1)
        turns += range(first, first + own - said)
    return [turn >= 0 and turn % 2 == 0 for turn in turns]
