"""Stand-ins that let Megatron compute on a CPU, for tests: it names CUDA, its current device and its types."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _OnCpu(TorchFunctionMode):
    """What is made on, moved to or said to be on CUDA is on the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if str(given.get("device", "")).startswith("cuda"):
            given["device"] = "cpu"
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1 and not given:
            return str(func(*args)).replace("torch.", "torch.cuda.").replace("DoubleTensor", "FloatTensor")
        return func(*args, **given)


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Inside the block the back-end accepts a CPU, and Megatron computes on it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from roll.training.megatron import initialize
    cpu = torch.device("cpu")
    with (
        mock.patch.object(initialize, "SUPPORTED_DEVICE_TYPES", ("cpu",)),
        mock.patch.object(torch.cuda, "current_device", lambda: cpu),
        _OnCpu(),
    ):
        yield
