"""The `roll` command.

Nothing heavy is imported here: each command imports what it needs when it runs, so `roll --help` and a
misspelt key answer at once.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of the console script."""
    from roll.cli.main import run

    sys.exit(run(sys.argv[1:], own_process=True))
