"""Environments of `make test-extras`, for tests that are skipped where one is absent."""

from __future__ import annotations

from pathlib import Path

import extras
import pytest

__all__ = ["extra_directory", "extra_python"]


def extra_directory(name: str) -> Path:
    """Return the directory of the environment `name`; skip the test where it is absent or out of date.

    npm packages have their programs in `node_modules/.bin` of it.
    """
    if reason := extras.missing(name):
        pytest.skip(reason)
    return extras.directory(name)


def extra_python(name: str) -> Path:
    """Return the Python of the environment `name`; skip the test where it is absent or out of date."""
    return extra_directory(name) / "bin" / "python"
