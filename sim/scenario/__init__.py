"""Everything a user can say and every error they can make.

`load_scenario(path)` reads a file, `resolve(mapping)` plain data; both give a `Scenario` with every default filled in,
or raise `UserError` with all faults at once.
"""

from __future__ import annotations

from sim.scenario.expect import Bound
from sim.scenario.fields.schema import Scenario
from sim.scenario.load import Loaded, load_scenario, resolve

__all__ = ["Bound", "Loaded", "Scenario", "load_scenario", "resolve"]
