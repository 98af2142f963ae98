"""Published benchmark tables: which kernel a row timed, and what the benchmark's own method adds to it.

A property of measurements, never of a machine: used where predictions are held against tables or fitted to them, and
nowhere in the prediction of a step.
"""
