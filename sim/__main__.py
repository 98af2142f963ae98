"""The command `drystep`, which `python -m sim` is too."""

from __future__ import annotations

import signal
from typing import NoReturn


def main() -> NoReturn:
    """Load the command line and run it; Ctrl-C while it loads ends it as any signal does, without a traceback."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else whoever started us wants it otherwise
    if usual:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from sim.cli import main as run

    if usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
