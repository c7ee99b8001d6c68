"""The recorded runs of `recorded/endings.py`, unpacked."""

from __future__ import annotations

import tarfile
from pathlib import Path

__all__ = ["extract_endings"]

ARCHIVE = Path(__file__).parents[1] / "recorded" / "endings.tar.xz"


def extract_endings(directory: Path) -> Path:
    """Unpack all recorded runs into a directory, and return it."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(directory, filter="data")
    return directory
