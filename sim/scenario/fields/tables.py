"""What the tables of the schema are made of: their base class, how fields are declared, and the sizes allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError


class Table(BaseModel):
    """A mapping of the scenario: no unknown fields, no silent conversions, read-only."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, defer_build=True, protected_namespaces=(), allow_inf_nan=False
    )


@dataclass(frozen=True)
class Given:
    """What a user wrote, and the folder that paths in it are relative to. Scenarios that say the same are equal however
    they were written, so this takes no part in comparisons."""

    data: Mapping[str, Any] = field(compare=False)
    folder: Path = field(compare=False)


def late(description: str) -> Any:
    """An optional field whose default depends on other fields."""
    return Field(default=None, description=description)


def has(default: Any, description: str) -> Any:
    """An optional field with a fixed default."""
    return Field(default=default, description=description)


def needs(description: str) -> Any:
    """A required field."""
    return Field(description=description)


def count(limit: int) -> Any:
    """A whole number from 1 to `limit`."""
    return Field(ge=1, le=limit)


def word_or_number(word: str, other: str, limit: float, *, whole: bool = True, result: Any = ...) -> PlainValidator:
    """Accepts `word` (read as `result`) or a number from 1 (any positive one unless whole) to `limit`."""

    def read(value: Any) -> Any:
        if isinstance(value, str) and value == word:
            return word if result is ... else result
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise PydanticCustomError("word", "", {"word": word, "or": other})
        if value < 1 or value > limit:
            raise PydanticCustomError("range", "", {"low": "1", "high": f"{limit:,}"})
        return value

    return PlainValidator(read)


def switch_or_count(value: Any) -> Any:
    """True, false or a whole number of GPUs, as it is."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, int):
        raise PydanticCustomError("plain", "expected true, false or a whole number of GPUs")
    if value < 1 or value > 1_000_000:
        raise PydanticCustomError("range", "", {"low": "1", "high": "1,000,000"})
    return value


def or_word(word: str) -> WithJsonSchema:
    """JSON Schema of a positive whole number or `word`."""
    return WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": word}]})


# Upper limits of sizes: an order of magnitude or more beyond anything trained, there to catch slips of the keyboard.
Layers = Annotated[int, count(10_000)]
LayersOrNone = Annotated[int, Field(ge=0, le=10_000)]
Width = Annotated[int, count(10_000_000)]
Heads = Annotated[int, count(100_000)]
Vocab = Annotated[int, count(100_000_000)]
Tokens = Annotated[int, count(100_000_000)]
TokensOrNone = Annotated[int, Field(ge=0, le=100_000_000)]
Sequences = Annotated[int, count(1_000_000_000)]
Nodes = Annotated[int, count(200_000)]
NodeGpus = Annotated[int, count(1024)]
Degree = Annotated[int, count(1_000_000)]
Experts = Annotated[int, count(100_000)]
Year = Annotated[int, Field(ge=2016, le=2040)]
Text = Annotated[str, Field(min_length=1, max_length=300)]
