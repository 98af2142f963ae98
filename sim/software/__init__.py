"""Software stacks as tables of named facts."""

from sim.software.stack import Fact, Stack, facts_of, profile_names, stack_for

__all__ = ["Fact", "Stack", "facts_of", "profile_names", "stack_for"]
