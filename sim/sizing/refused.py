"""What a search is not made for, and what asks for training of a request or for a request of training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sim.errors import Fault, UserError
from sim.parallel.serving.request import run_of
from sim.report.numbers.troubles import troubled
from sim.scenario import Scenario
from sim.sizing.space.layouts import Choice
from sim.sizing.space.policies import POLICIES
from sim.sizing.wish import OBJECTIVES, SERVED_OBJECTIVES, Wish

_SERVED_AXES = "parallel.tensor, parallel.pipeline, parallel.expert, parallel.strategy, training.mode.inference.batch"


def refuse(scenario: Scenario, choice: Choice, wish: Wish, overlap_p2p: bool) -> None:
    """Refuse what the search of this scenario cannot be asked.

    Raises:
        UserError: a cluster with troubles, or options of training beside inference, or the reverse.
    """
    if troubled(scenario):
        raise UserError(Fault("sizing looks for layouts of a cluster whose GPUs and links are alike: its bounds do not "
                              "hold where some differ", "cluster", hint="take slow_gpus, other_gpus, clock_spread and "
                              "degraded out, size, then 'drystep run' the best with them"))
    training = run_of(scenario) is None
    faults = [*(_of_requests if training else _of_training)(scenario, choice, wish)]
    if overlap_p2p and not training:
        faults.append(Fault("transfers between stages are waited for in inference", "--overlap-p2p",
                            hint="leave it out"))
    if faults:
        raise UserError(faults)


def _of_requests(_scenario: Scenario, choice: Choice, wish: Wish) -> Iterator[Fault]:
    """Asked of a training step."""
    hint = "give a scenario with training.mode: {inference: {prompt: …, generate: …, batch: …}}, or leave it out"
    if wish.objective in SERVED_OBJECTIVES:
        yield Fault(f"{wish.objective} is of inference, and this scenario trains", "--objective",
                    hint=f"one of {', '.join(OBJECTIVES)}")
    for option, asked in _request_options(choice, wish):
        if asked:
            yield Fault("this is for inference, and this scenario trains", option, hint=hint)


def _request_options(choice: Choice, wish: Wish) -> Sequence[tuple[str, bool]]:
    return (("--latency", wish.latency_s is not None), ("--first-token", wish.first_token_s is not None),
            ("--throughput", wish.throughput is not None), ("--weights", bool(choice.weights)),
            ("--kv-cache", bool(choice.kv_cache)), ("--only training.mode.inference.batch", bool(choice.batch)))


def _of_training(scenario: Scenario, choice: Choice, wish: Wish) -> Iterator[Fault]:
    """Asked of a request."""
    if wish.deadline_s is not None or wish.budget is not None:
        yield Fault("a deadline and a budget bound a training run, and this scenario is inference",
                    "--deadline / --budget", hint="use --latency, --first-token, --throughput, or --objective cost")
    axes = {"parallel.context": choice.context, "parallel.expert_tensor": choice.expert_tensor,
            "parallel.virtual_stages": choice.virtual_stages, "training.micro_batch": choice.micro_batch,
            "parallel.schedule": choice.schedules,
            "training.recompute": choice.recompute if tuple(choice.recompute) != POLICIES else ()}
    for field, values in axes.items():
        if values:
            yield Fault(f"{field} is of training, and this scenario is inference", "--only",
                        hint=f"the axes are {_SERVED_AXES}")
    if choice.precision:
        yield Fault("precisions are those of training steps, and this scenario is inference", "--precision",
                    hint="--weights names formats of weights and of products, --kv-cache those of the cache")
    wrong = [name for name in choice.strategies if name not in ("none", "ddp", "fsdp", "zero3")]
    if wrong:
        yield Fault(f"strategy {wrong[0]} is of training, and this scenario is inference", "--only",
                    hint="ddp (whole weights), fsdp or zero3 (shared out)")
    run = run_of(scenario)
    if run is not None and run.generate < 2 and (wish.objective == "latency" or wish.latency_s is not None):
        yield Fault(f"latency is of the tokens behind the first, and generate is {run.generate}",
                    "--objective / --latency", hint="use time or first-token")
