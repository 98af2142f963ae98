"""`python -m sim` is the command `drystep`."""

from __future__ import annotations

from sim.cli import main

if __name__ == "__main__":
    main()
