"""`python -m roll`: what the console script `roll` does."""

from __future__ import annotations

from roll_rl import main

main()
