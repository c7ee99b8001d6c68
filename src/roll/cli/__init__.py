"""The `roll` command.

Nothing heavy is imported here: each command imports what it needs when it runs, so `roll --help` and the error for a
misspelled key appear immediately.
"""

from __future__ import annotations

import sys
from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Run the console script."""
    from roll.cli.main import exit_process, run

    exit_process(run(sys.argv[1:], own_process=True))
