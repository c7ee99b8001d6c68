"""Lets the tests of this room import `training_helpers`, also in processes that they start."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
