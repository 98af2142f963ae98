"""Which stack a scenario's `software` asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache
from typing import Any, Protocol

from sim.software.facts import TRIED, Switches, facts_of
from sim.software.stack import Stack

#: Fields of `Stack` that are not facts of a profile.
_GIVEN = ("framework", "modules", "compile")


def stack_for(
    framework: str = "pytorch", year: int = 2026, compile_: bool = False, versions: Mapping[str, str] | None = None,
    modules: str = "plain", **others: Any,
) -> Stack:
    """The stack a scenario's `software` asks for; memoised.

    Args:
        framework: profile name (`profile_names`).
        year: selects the release where `versions` is silent.
        compile_: torch.compile.
        versions: released versions by package, e.g. {"torch": "2.1.0", "flash_attn": "triton"}.
        modules: plain, transformers or megatron.
        others: more of `Switches`.

    Raises:
        UserError: no profile of that name.
    """
    return _stack(framework, year, tuple(sorted((versions or {}).items())), modules,
                  Switches(compile=compile_, **others))


class Asked(Protocol):
    """What names a stack, as a scenario's `software` has it, which also has every field of `Switches`."""

    @property
    def framework(self) -> str: ...
    @property
    def year(self) -> int: ...
    @property
    def versions(self) -> Mapping[str, str]: ...
    @property
    def modules(self) -> str: ...


def stack_of(software: Asked) -> Stack:
    """The stack of everything that a scenario's `software` says.

    Raises:
        UserError: no profile of that name.
    """
    return _stack(software.framework, software.year, tuple(sorted(software.versions.items())), software.modules,
                  Switches(*(getattr(software, name) for name in Switches._fields)))


@lru_cache(maxsize=64)
def _stack(framework: str, year: int, versions: tuple[tuple[str, str], ...], modules: str, switches: Switches) -> Stack:
    facts = facts_of(framework, year, dict(versions), modules, switches)
    values: dict[str, Any] = {f.name: facts[f.name].value for f in fields(Stack) if f.name not in _GIVEN}
    return Stack(framework=framework, modules=modules, compile=switches.compile, **values)


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
