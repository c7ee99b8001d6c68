"""`python -m roll`: the command line without its console script."""

from __future__ import annotations

from roll.cli import main

main()
