"""Helpers that adapters share: imports of optional packages, and separate random numbers per environment."""

from __future__ import annotations

import contextlib
import importlib
import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from roll.errors import ConfigError

__all__ = ["RandomState", "import_package"]


def import_package(module: str, package: str, feature: str, advice: str = "") -> ModuleType:
    """Import an optional package.

    Args:
        module: Name of the module to import.
        package: Name of the package for `pip install`.
        feature: The feature that needs the package, for the message.
        advice: How to install the package, if `pip install` is not enough.

    Raises:
        ConfigError: The package is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        how = advice or f"pip install '{package}'"
        raise ConfigError(f"{feature} requires the package '{package}': {how.rstrip('.')} ({error}).") from error


class RandomState:
    """An environment's own state of Python's and NumPy's random generators.

    If concurrent episodes shared the process-wide generators, they could not be reproduced from their seeds.
    """

    def __init__(self) -> None:
        self._python: Any = random.Random(0).getstate()
        self._numpy: Any = np.random.RandomState(0).get_state()

    def seed(self, seed: int | None) -> None:
        """Seed the state; without a seed, continue from the current state."""
        if seed is not None:
            self._python = random.Random(seed).getstate()
            self._numpy = np.random.RandomState(seed % 2**32).get_state()

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """Use this environment's random state within the `with` block, and restore the process-wide state afterward."""
        outside = random.getstate(), np.random.get_state()
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        try:
            yield
        finally:
            self._python, self._numpy = random.getstate(), np.random.get_state()
            random.setstate(outside[0])
            np.random.set_state(outside[1])
