"""Lets the tests of this room import their helpers, and those of the trainer."""

import sys
from pathlib import Path

for directory in (Path(__file__).parent, Path(__file__).parents[1] / "training"):
    sys.path.insert(0, str(directory))
