"""Software stacks as tables of named facts."""

from sim.software.choice import stack_for, stack_of, trial
from sim.software.facts import (
    Fact,
    facts_of,
    free_figures,
    is_release,
    packages,
    profile_names,
    release,
)
from sim.software.fused_attention import sdpa_kernels
from sim.software.stack import Stack

__all__ = ["Fact", "Stack", "facts_of", "free_figures", "is_release", "packages", "profile_names", "release",
           "sdpa_kernels", "stack_for", "stack_of", "trial"]
