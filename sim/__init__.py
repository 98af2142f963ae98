"""drystep: a discrete-event simulator of distributed training.

The Python API is the command line's verbs: `load`, `run`, `validate`.
"""

__version__ = "0.1.0"
