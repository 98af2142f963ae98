"""The local page (`drystep ui`): a scenario in an editor, its prediction beside it, and any two side by side."""

from __future__ import annotations
