"""The fields of a scenario: names, kinds, units and what each allows."""
