"""Everything a user can say and every error they can make.

`load_scenario(path)` reads a file, `load_mapping(data)` what one would hold, `resolve(mapping)` the same for a
single point; all give a `Scenario` with every default filled in,
or raise `UserError` with all faults at once.
"""

from __future__ import annotations

from sim.scenario.expect import Bound
from sim.scenario.fields.schema import Scenario
from sim.scenario.load import Loaded, load_mapping, load_scenario, resolve

__all__ = ["Bound", "Loaded", "Scenario", "load_mapping", "load_scenario", "resolve"]
