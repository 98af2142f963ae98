"""Continuous batching: which iterations an engine runs from the arrival of a request to the end of its answer.

An engine that is asked all the time keeps so many requests on their way: an answer that ends makes room for the next
prompt. Every iteration makes a token of each answer and reads beside them what prompts wait, up to a budget of tokens.
In the steady state, all requests alike, a request sees the prompt of each of the others read once while its own answer
is made, and the other answers are at their mean length.

Where there are more prompts to read than iterations to read them in, every iteration is full, requests wait for their
turn, and fewer answers than requests are made at a time.

Source: Yu et al. 2022, Orca (OSDI '22), section 3.1 (scheduling by iteration); Agrawal et al. 2024, Sarathi-Serve
(arXiv 2403.02310), section 4.2 (parts of prompts beside tokens, token budget); vLLM's max_num_batched_tokens,
TensorRT-LLM's max_num_tokens (recalled).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sim.scenario.fields.schema import InferenceRun


class Iteration(NamedTuple):
    """Iterations that are alike.

    Attributes:
        times: how many.
        prompts: prompts, or parts of one, that are read.
        tokens: of each of them.
        read: tokens of each that were read before, mean.
        answers: answers of which a token is made, each with `cached` tokens in the cache.
    """

    times: int
    prompts: int
    tokens: int
    read: int
    answers: int
    cached: int


class Life(NamedTuple):
    """What a request sees: until its first token, and behind it. Iterations of both are in order of first use."""

    opening: tuple[Iteration, ...]
    answering: tuple[Iteration, ...]


def life_of(run: InferenceRun) -> Life:
    """The iterations of one request among `run.batch` that are always on their way."""
    others, steps = run.batch - 1, run.generate - 1
    cached = run.prompt + steps // 2
    room = max(1, run.token_budget - others)  # for prompts, beside a token of every other answer
    parts = math.ceil(run.prompt / room)
    size = math.ceil(run.prompt / parts)
    own = Iteration(parts, 1, size, (parts - 1) * size // 2, others if steps else 0, cached)
    waited: tuple[Iteration, ...] = ()
    if others * parts <= steps:
        beside = own._replace(times=others * parts)
    else:
        # every iteration of a cycle that reads each prompt once, as long as the answers or the prompts ask for
        cycle = max(steps + parts, math.ceil(run.batch * run.prompt / room))
        prompts = max(1, round(run.batch * run.prompt / cycle / size))
        full = own._replace(prompts=prompts, tokens=math.ceil(run.batch * run.prompt / cycle / prompts),
                            answers=round(run.batch * steps / cycle))
        own, beside = full._replace(times=parts), full._replace(times=steps)
        if cycle > steps + parts:
            waited = (full._replace(times=cycle - steps - parts),)
    alone = Iteration(steps - beside.times, 0, 0, 0, run.batch, cached)
    return Life((*waited, own), tuple(one for one in (beside, alone) if one.times))
