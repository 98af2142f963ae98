"""Files that are no scenarios, told by their fields: what they are, and which command takes them."""

from __future__ import annotations

from sim.scenario.text.document import Document

#: Fields that files of a kind have, the telling one first; what such a file is; the hint, in which {path} is its own.
_KINDS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("cases",), "is a file of measured cases", "drystep validate {path}"),
    (("step_time_s", "scenario"), "is a result of 'drystep run --json'",
     "give the scenario that it is of; its field 'scenario' is one, with every default written out"),
    (("points", "axes", "skipped"), "is the result of a sweep",
     "give the scenario that it is of; each point's field 'scenario' is one, with every default written out"),
    (("gpu", "gpus_per_node"), "is a topology", "a scenario names it: cluster: {{topology: {path}}}"),
    (("traceEvents",), "is a trace", "drystep diff {path} SCENARIO"),
    (("zero_optimization",), "is DeepSpeed's configuration", "drystep import deepspeed {path}"),
    (("train_micro_batch_size_per_gpu",), "is DeepSpeed's configuration", "drystep import deepspeed {path}"),
    (("model_type", "architectures"), "is a model's config.json", "model: {{hf: {path}}}"),
    (("compute_environment",), "is accelerate's configuration", "drystep import accelerate {path}"),
    (("per_device_train_batch_size",), "are the Trainer's arguments", "drystep import hf {path}"),
)


def what_else(document: Document) -> tuple[str, str, str] | None:
    """The field that tells, what a file without a cluster is, and a hint with {path} to fill in; None of a scenario."""
    if "cluster" in document.data:
        return None
    for names, what, hint in _KINDS:
        if document.data.keys() >= set(names):
            return names[0], what, hint
    return None
