"""`python -m roll`: same as the console script `roll`."""

from __future__ import annotations

from roll_rl import main

main()
