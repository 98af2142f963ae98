"""Which stack a scenario's `software` asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache
from typing import Any, Protocol

from sim.software.facts import TRIED, facts_of
from sim.software.stack import Stack

#: Fields of `Stack` that are not facts of a profile.
_GIVEN = ("framework", "modules", "compile")


def stack_for(
    framework: str = "pytorch", year: int = 2026, compile_: bool = False, versions: Mapping[str, str] | None = None,
    modules: str = "plain", *, fused: bool = True, cuda_graphs: bool = False, deterministic: bool = False,
    fused_accumulation: bool = True,
) -> Stack:
    """The stack a scenario's `software` asks for; memoised.

    Args:
        framework: profile name (`profile_names`).
        year: selects the release where `versions` is silent.
        compile_: torch.compile.
        versions: released versions by package, e.g. {"torch": "2.1.0", "flash_attn": "triton"}.
        modules: plain, transformers or megatron.
        fused: false turns off the framework's optional fused kernels.
        cuda_graphs: forward and backward are replayed as graphs.
        deterministic: kernels give the same bits every time.
        fused_accumulation: false turns off products that add weight gradients up.

    Raises:
        UserError: no profile of that name.
    """
    return _stack(framework, year, compile_, tuple(sorted((versions or {}).items())), modules, fused, cuda_graphs,
                  deterministic, fused_accumulation)


class Asked(Protocol):
    """What names a stack, as a scenario's `software` has it."""

    @property
    def framework(self) -> str: ...
    @property
    def year(self) -> int: ...
    @property
    def compile(self) -> bool: ...
    @property
    def versions(self) -> Mapping[str, str]: ...
    @property
    def modules(self) -> str: ...
    @property
    def fused(self) -> bool: ...
    @property
    def cuda_graphs(self) -> bool: ...
    @property
    def deterministic(self) -> bool: ...
    @property
    def fused_accumulation(self) -> bool: ...


def stack_of(software: Asked) -> Stack:
    """`stack_for` with everything that a scenario's `software` says.

    Raises:
        UserError: no profile of that name.
    """
    return stack_for(software.framework, software.year, software.compile, software.versions, software.modules,
                     fused=software.fused, cuda_graphs=software.cuda_graphs, deterministic=software.deterministic,
                     fused_accumulation=software.fused_accumulation)


@lru_cache(maxsize=64)
def _stack(
    framework: str, year: int, compile_: bool, versions: tuple[tuple[str, str], ...], modules: str, fused: bool,
    cuda_graphs: bool, deterministic: bool, fused_accumulation: bool,
) -> Stack:
    facts = facts_of(framework, year, compile_, dict(versions), fused, cuda_graphs, modules, deterministic,
                     fused_accumulation)
    values: dict[str, Any] = {f.name: facts[f.name].value for f in fields(Stack) if f.name not in _GIVEN}
    return Stack(framework=framework, modules=modules, compile=compile_, **values)


@contextmanager
def trial(values: Mapping[tuple[str, str], float]) -> Iterator[None]:
    """Stacks with other values of `free_figures`, for as long as the context lasts."""
    TRIED.update(values)
    _stack.cache_clear()
    try:
        yield
    finally:
        TRIED.clear()
        _stack.cache_clear()
