"""Stand-ins that let Megatron compute on a CPU, for tests: it asks for CUDA's seeds, streams and literal devices."""

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


class _NoRandomness:
    """Nothing of Megatron's draws: there is no dropout, and weights come from a checkpoint."""

    @contextlib.contextmanager
    def fork(self, *unused: Any) -> Iterator[None]:
        yield

    def get_states(self) -> dict[str, Tensor]:
        return {}

    def set_states(self, states: Any) -> None:
        pass


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Inside the block the back-end accepts a CPU, and Megatron computes on it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import tensor_parallel
        from megatron.core.tensor_parallel import random

        from roll.training.megatron import starting

    tracker = _NoRandomness()
    cpu = torch.device("cpu")
    with contextlib.ExitStack() as stack:
        for where, name, stand_in in (
            (starting, "DEVICES", ("cpu",)),
            (torch.cuda, "current_device", lambda: cpu),
            (tensor_parallel, "get_cuda_rng_tracker", lambda: tracker),
            (tensor_parallel, "model_parallel_cuda_manual_seed", lambda seed: None),
            (random, "get_cuda_rng_tracker", lambda: tracker),
            (random, "_get_cuda_rng_state", lambda **how: torch.empty(0)),
            (random, "_set_cuda_rng_state", lambda state, **how: None),
        ):
            stack.enter_context(mock.patch.object(where, name, stand_in))
        stack.enter_context(_OnCpu())
        yield
