"""Stands for SGLang's package of kernels, which has no build for CPUs: every name of it exists and computes nothing.

SGLang imports its kernels when it starts, also where it then computes with its own PyTorch code
(`--device cpu --attention-backend torch_native --sampling-backend pytorch`). With this package on `PYTHONPATH`, its
server runs. A kernel that is called all the same returns a mock, which fails in the next operation of PyTorch.

SGLang pins memory for adapters even on a CPU, where PyTorch has no pinned memory. With this package, pinning does
nothing.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any
from unittest.mock import MagicMock

import torch

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


def _ignore_pinning(create: Any) -> Any:
    """Wrap a function of PyTorch that creates a tensor, so that it ignores `pin_memory`."""

    @functools.wraps(create)
    def create_unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return create(*args, **kwargs)

    return create_unpinned


if not torch.cuda.is_available():
    for _name in ("arange", "empty", "full", "ones", "tensor", "zeros"):
        setattr(torch, _name, _ignore_pinning(getattr(torch, _name)))
    torch.Tensor.pin_memory = lambda self, device=None: self
