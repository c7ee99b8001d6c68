"""Stands for SGLang's package of kernels, which has no build for CPUs: every name of it exists and computes nothing.

SGLang imports its kernels when it starts, also where it then computes with its own PyTorch code
(`--device cpu --attention-backend torch_native --sampling-backend pytorch`). With this package on `PYTHONPATH`, its
server runs. A kernel that is called all the same returns a mock, which fails in the next operation of PyTorch.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any
from unittest.mock import MagicMock

__version__ = "9.9.9"  # newer than any version that SGLang asks for


class _Kernels(types.ModuleType):
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=name)
        setattr(self, name, value)
        return value


class _Modules(MetaPathFinder, Loader):
    """Finds every module below this package."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Kernels(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Modules())
sys.modules[__name__].__class__ = _Kernels
