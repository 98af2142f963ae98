"""Fields that are of another mode, strategy or cut of the model than the scenario has: written, and read by nothing.

What a user wrote counts (`Scenario.given`), not what defaults fill in; a field at its default asks for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from sim.parallel.lower import shards
from sim.scenario import Scenario
from sim.scenario.fields.schema import Inference, Parallel, Prefetch, Training
from sim.scenario.fields.tables import Table
from sim.software import stack_of

#: Fields of `training` that are of training alone, beside the sizes of its batch.
_TRAINS = ("optimizer", "muon", "recompute", "optimizer_in_backward", "sample_bytes")
_BATCH = ("micro_batch", "micro_steps", "global_batch")
#: Fields of `parallel` that say something of stages, and of context ranks.
_STAGES = ("overlap_p2p", "pipeline_scatter", "split_slots")
_CONTEXT = ("context_exchange", "context_all_to_all")


def elsewhere(scenario: Scenario) -> list[str]:
    """All warnings of this file about a scenario."""
    return [*_of_training(scenario), *_of_cuts(scenario), *_of_sharding(scenario), *_of_finetuning(scenario),
            *_of_a_quantised_config(scenario)]


def _of_training(scenario: Scenario) -> list[str]:
    """A warning where a request is asked for and how to train is written too, a batch other than its own among it."""
    mode = scenario.training.mode
    if not isinstance(mode, Inference):
        return []
    written = _written(scenario, "training")
    told = _asked(written, Training, _TRAINS)
    own = {"global_batch": scenario.replica_ranks}  # as a result's JSON has it
    told += [name for name in _BATCH if written.get(name) not in (None, 1, mode.inference.batch, own.get(name))]
    return [f"training: {_listed(told)} nothing: they are of training, and this is a request of "
            f"{mode.inference.batch:,} sequences (training.mode.inference)"] if told else []


def _of_cuts(scenario: Scenario) -> list[str]:
    """Warnings where something is said of stages, context ranks or spread experts and there are none."""
    parallel, written = scenario.parallel, _written(scenario, "parallel")
    found = []
    if parallel.pipeline == 1 and (told := _asked(written, Parallel, _STAGES)):
        found.append(f"parallel: {_listed(told)} nothing: there is no pipeline (parallel.pipeline is 1)")
    if parallel.context == 1 and (told := _asked(written, Parallel, _CONTEXT)):
        found.append(f"parallel: {_listed(told)} nothing: there are no context ranks (parallel.context is 1)")
    if parallel.expert == 1 and _written(scenario, "software").get("dispatcher"):
        found.append("software: dispatcher changes nothing: no experts are spread (parallel.expert is 1)")
    return found


def _of_sharding(scenario: Scenario) -> list[str]:
    """Warnings where FSDP's settings are written and parameters are not sharded its way, or DDP's where they are."""
    stack, strategy = stack_of(scenario.software), scenario.parallel.strategy
    written = _written(scenario, "parallel")
    prefetch = written.get("prefetch")
    told = [f"prefetch.{name}" for name in _asked(prefetch, Prefetch, Prefetch.model_fields)] if (
        isinstance(prefetch, Mapping)) else []
    told += _asked(written, Parallel, ("wrap",))
    found = []
    if told and not shards(scenario, stack):
        found.append(f"parallel: {_listed(told)} nothing: {strategy} of {scenario.software.framework} does not gather "
                     "parameters as FSDP does")
    if scenario.parallel.gradient_as_bucket_view and shards(scenario, stack) and scenario.training.mode == "train":
        found.append("parallel: gradient_as_bucket_view true changes nothing: it is of DDP's buckets, not of "
                     f"{strategy}")
    return found


def _of_finetuning(scenario: Scenario) -> list[str]:
    """A warning where LoRA's dropout is written and everything is trained."""
    tuned = _written(scenario, "training").get("finetune")
    if scenario.training.finetune.method != "full" or not isinstance(tuned, Mapping) or not tuned.get("dropout"):
        return []
    return ["training: finetune.dropout changes nothing: all is trained (finetune.method is full)"]


def _of_a_quantised_config(scenario: Scenario) -> list[str]:
    """A warning where a model's config.json calls its weights quantised and they are counted as wide: `hf` gives
    sizes, what weights are stored in is the precision's. Training all of them needs wide ones anyway."""
    training, path, given = scenario.training, scenario.model.hf, scenario.given
    if path is None or given is None or (training.mode == "train" and training.finetune.method == "full"):
        return []
    stored = training.finetune.base if training.mode == "train" else training.precision.parameters
    file = given.folder / path
    file = file / "config.json" if file.is_dir() else file
    try:
        said = json.loads(file.read_text(encoding="utf-8")).get("quantization_config")
    except (OSError, ValueError):
        return []  # moved since it was read
    how = said.get("quant_method") if isinstance(said, Mapping) else None
    if how is None or stored not in ("fp32", "bf16", "fp16"):
        return []
    bits = f", {said['bits']} bits" if isinstance(said.get("bits"), int) else ""
    return [f"precision: {path} says that weights are quantised ({how}{bits}), and they are counted in {stored}: "
            "training.precision.parameters (of LoRA finetune.base) says what they are stored in"]


def _written(scenario: Scenario, section: str) -> Mapping[str, Any]:
    """What the user wrote of a section; empty where a scenario was made without a text."""
    found = scenario.given.data.get(section) if scenario.given is not None else None
    return found if isinstance(found, Mapping) else {}


def _asked(written: Mapping[str, Any], table: type[Table], names: Iterable[str]) -> list[str]:
    """Names of those that are written, and as something else than nothing or the default."""
    return [name for name in names if name in written
            and written[name] not in (None, False, "none", table.model_fields[name].default)
            and not (isinstance(written[name], Mapping) and not any(written[name].values()))]


def _listed(names: list[str]) -> str:
    return f"{', '.join(names)} {'change' if len(names) > 1 else 'changes'}"
