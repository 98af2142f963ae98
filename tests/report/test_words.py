"""What a person reads of a field's value is what a scenario would have."""

from __future__ import annotations

import pytest

from sim.report.words import written


@pytest.mark.parametrize(("value", "said"), [
    (True, "true"), (None, "none"), (0.5, "0.5"), (8, "8"), ("full", "full"), ([1, None], "[1, none]"),
    ({"layers": 4}, "{layers: 4}"), ({"forward": False, "limit": [2]}, "{forward: false, limit: [2]}")], ids=str)
def test_a_value_is_written_as_yaml_has_it(value: object, said: str) -> None:
    assert written(value) == said
