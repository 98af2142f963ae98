"""What a PyTorch profiler saw, held against a prediction: the verb `diff`.

`kineto.read_trace` reads a trace, `steps.measure` makes the terms of one step of it, `foreseen` those of a Result,
`diff.compare` puts them side by side.
"""

from __future__ import annotations
