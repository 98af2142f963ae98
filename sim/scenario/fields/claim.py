"""A claim that a scenario puts to the test: what is said, what was predicted instead, and whether it holds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from sim.scenario.fields.tables import Table, has, needs

#: How a figure is written in words: bytes in units of ten (GB) or two (GiB), shares and changes in per cent, ratios.
Unit = Literal["GB", "GiB", "TB", "GB/s", "TFLOP/s", "s", "ms", "tokens/s", "%", "change", "x", "number"]
Fields = Annotated[list[str], Field(min_length=1, max_length=20)]


class Figure(Table):
    """One predicted number that a claim's reasons quote.

    Its value is the sum of `fields` at the point `at`, over the same sum at the point `relative_to`, over the sum of
    `share_of` at `at`, over the plain number `per`, each where given.
    """

    fields: Fields = needs("dotted fields of the result, summed")
    at: dict[str, Any] = has({}, "the point of the sweep: dotted field -> value of every axis")
    relative_to: dict[str, Any] = has({}, "the point whose value this one is divided by")
    share_of: list[str] = has([], "dotted fields whose sum at the same point divides")
    per: Annotated[float, Field(gt=0)] = has(1.0, "a number that divides")
    unit: Unit = has("number", "how it is written; change is the value less one, in per cent with a sign")


class Claim(Table):
    """What somebody said, held against the prediction."""

    text: Annotated[str, Field(min_length=1, max_length=1000)] = needs("what is claimed")
    source: Annotated[str, Field(max_length=300)] = has("", "who says so")
    verdict: Literal["holds", "holds roughly", "wrong"] = needs("what the prediction says of it")
    why: Annotated[str, Field(min_length=1, max_length=3000)] = needs("the reasons; {name} quotes a figure")
    figures: dict[str, Figure] = has({}, "predicted numbers that the reasons quote, by name")
