"""Functions for the worker pool whose process dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from roll.cluster import decoding

__all__ = ["decode_after_a_death", "die"]


def die(*_: Any) -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def decode_after_a_death(data: bytes, name: str, *others: Any) -> Any:
    """Kill this process unless the file `name` exists, and create it; otherwise decode the medium."""
    marker = Path(name)
    if not marker.exists():
        marker.touch()
        die()
    return decoding._decode(data, name, *others)
