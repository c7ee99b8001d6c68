"""Modules of files that are not on the import path, such as examples."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

__all__ = ["load_module"]


def load_module(path: Path) -> ModuleType:
    """Return the module of a file, executed once more at every call."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
