"""Fields of `parallel` that are read where there is something they are about, and were written where there is not; and
generations of FSDP that a release does not have."""

from __future__ import annotations

from sim.parallel.lower import shards
from sim.scenario import Scenario
from sim.scenario.fields.schema import Parallel
from sim.software import stack_of


def without_ranks(scenario: Scenario) -> list[str]:
    """Warnings where tensor ranks or stages are said something of and there are none."""
    parallel = scenario.parallel
    said = [(f"{name} true", "there are no tensor ranks (parallel.tensor is 1)")
            for name in ("async_tensor", "sequence_parallel") if getattr(parallel, name) and parallel.tensor == 1]
    if parallel.pipeline == 1 and parallel.schedule not in ("1f1b", "interleaved"):
        said.append((f"schedule {parallel.schedule}", "there is no pipeline (parallel.pipeline is 1)"))
    return [f"parallel: {what} changes nothing: {why}" for what, why in said]


def buckets_in_vain(scenario: Scenario) -> list[str]:
    """A warning where `parallel.bucket_mb` is given and nothing fills buckets of that size."""
    parallel, stack = scenario.parallel, stack_of(scenario.software)
    if parallel.bucket_mb == Parallel.model_fields["bucket_mb"].default:
        return []
    name, strategy = scenario.software.framework, parallel.strategy
    why = ("it is of gradients, and nothing is trained" if scenario.training.mode != "train" else
           "no gradients are reduced between replicas" if scenario.replica_ranks == 1 else
           f"{strategy} reduces the gradients of each unit by themselves" if shards(scenario, stack) else
           f"{name} reduces without ZeRO in buckets of its own" if (
               stack.gradient_path == "ipg" and strategy in ("none", "ddp")) else "")
    return [f"parallel: bucket_mb {parallel.bucket_mb:g} changes nothing: {why}"] if why else []


def fsdp_of_another(scenario: Scenario) -> list[str]:
    """A warning where a release has no FSDP, or not the generation that is asked for (the fact `fsdp_generations`)."""
    software = scenario.software
    had = stack_of(software).generations
    if scenario.parallel.strategy != "fsdp" or scenario.training.mode != "train" or software.fsdp in had:
        return []
    torch = software.versions.get("torch")
    release = f"torch {torch}" if torch else f"{software.framework} of {software.year}"
    lacks = ("no FSDP 2, which came with torch 2.3 (fully_shard): software.fsdp=1 is what it has" if had else
             "no FSDP, which came with torch 1.11 (FairScale's came before)")
    return [f"software: {release} has {lacks}; the step is that of a fork which has it"]
