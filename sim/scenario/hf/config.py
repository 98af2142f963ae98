"""A Hugging Face config with typed look-ups, whose faults are collected."""

from __future__ import annotations

from typing import Any

from sim.errors import Fault, nearest
from sim.scenario.text.document import describe

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu-new",
    "gelu_fast": "gelu",
    "relu": "relu",
    "gelu_pytorch_tanh": "gelu",
    "quick_gelu": "gelu",
}


class Config:
    """A config with typed look-ups; what is missing or mistyped becomes a fault."""

    def __init__(self, values: dict[str, Any], shown: str, text: str) -> None:
        self.values, self.shown, self._text = values, shown, text
        self.faults: list[Fault] = []

    def inside(self, key: str) -> Config:
        """The object under `key`, an empty one where there is none; its faults are this config's."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            self._fault(key, f"expected an object, not {describe(value)}")
        nested = Config(value if isinstance(value, dict) else {}, self.shown, self._text)
        nested.faults = self.faults
        return nested

    def whole(self, *keys: str, default: int | None = None) -> int:
        """A whole number under the first of `keys` that is there."""
        for key in keys:
            value = self.values.get(key)
            if value is not None:
                if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                    return value
                self._fault(key, f"expected a whole number, not {describe(value)}")
                return 1
        if default is None:
            self._fault(keys[0], f"the config has no '{keys[0]}'")
            return 1
        return default

    def optional(self, key: str) -> int | None:
        """A whole number, or None where it is absent or null."""
        return self.whole(key, default=0) or None

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            self._fault(key, f"expected true or false, not {describe(value)}")
            return default
        return value

    def rotary_share(self, *keys: str, default: float) -> float:
        """The share of a head that rotary positions turn, in `rope_parameters` (transformers 5) or under one of
        `keys`."""
        nested = self.values.get("rope_parameters")
        found = nested.get("partial_rotary_factor") if isinstance(nested, dict) else None
        for key in ("partial_rotary_factor", *keys):
            found = self.values.get(key) if found is None else found
        if found is None:
            return default
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found <= 1:
            self._fault("partial_rotary_factor", f"expected a share above 0 and up to 1, not {describe(found)}")
            return default
        return float(found)

    def activation(self, *keys: str, default: str) -> str:
        """Our name of the activation under the first of `keys` that is there."""
        for key in keys:
            if self.values.get(key) is not None:
                value = self.values[key]
                if value in _ACTIVATIONS:
                    return _ACTIVATIONS[value]
                self._fault(
                    key,
                    f"the activation {describe(value)} is not known",
                    nearest(str(value), _ACTIVATIONS) or f"known: {', '.join(_ACTIVATIONS)}",
                )
                return default
        return default

    def must(self, holds: bool, key: str, what: str) -> None:
        """A fault at `key` where a model has something that cannot be said here."""
        if not holds:
            self._fault(key, f"{what} cannot be expressed", "give kind, layers, hidden, heads … in place of hf")

    def _fault(self, key: str, message: str, hint: str = "") -> None:
        at = self._text.find(f'"{key}"')
        line = self._text.count("\n", 0, at) + 1 if at >= 0 else 0
        self.faults.append(Fault(message, field=key, file=self.shown, line=line, hint=hint))
