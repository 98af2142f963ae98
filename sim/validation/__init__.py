"""Published measurements and oracle files, held against the predictions. Floor 6.

`validate(paths, select=..., workers=...) -> Validation`; `sim.validation.words.text` prints it, `sim.validation.report`
writes reports/validation.md, `sim.validation.regression` holds it against reports/bounds.yaml. The case format is
described in sim/validation/cases/files.py.
"""

from __future__ import annotations

from sim.validation.runner import Validation, validate

__all__ = ["Validation", "validate"]
