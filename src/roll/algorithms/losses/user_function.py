"""A loss of the user's: `def loss(inputs: LossInputs) -> LossOutputs`, by import path or by file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from roll.errors import ConfigError, LossError, in_one_line, raised_at
from roll.types import LossInputs, LossOutputs, Needs
from roll.user_code import check_call, load_function

__all__ = ["UserLoss"]


@dataclass(frozen=True, kw_only=True, slots=True)
class UserLoss:
    """Calls the function; it is imported where it runs, so it need not be picklable."""

    path: str

    @property
    def needs(self) -> Needs:
        """Its attribute `needs`; by default nothing but the policy's log-probs, of whole sequences, since what it does
        with a sequence's tokens is not known.
        """
        return getattr(load_function(self.path, "loss"), "needs", Needs(whole_sequences=True))

    def check(self) -> None:
        """Import it.

        Raises:
            ConfigError: it cannot be imported, does not take its argument, or its `needs` are something else.
        """
        check_call(load_function(self.path, "loss"), f"loss '{self.path}'", "inputs")
        if not isinstance(self.needs, Needs):
            raise ConfigError(f"loss '{self.path}': its needs are of type {type(self.needs).__name__}, not Needs.")

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """The micro-batch's share; see `LossInputs` for what it must divide by.

        Raises:
            ConfigError: it cannot be imported.
            LossError: it failed, or returned something else.
        """
        function = load_function(self.path, "loss")
        try:
            outputs = function(inputs)
        except Exception as error:
            raise LossError(f"loss '{self.path}' failed at {raised_at(error)}: {in_one_line(error)}") from error
        if (problem := _problem(outputs, inputs)) is not None:
            raise LossError(f"loss '{self.path}' returned {problem}.")
        return replace(outputs, metrics=_tensors(outputs.metrics), maxima=_tensors(outputs.maxima))


def _problem(outputs: object, inputs: LossInputs) -> str | None:
    """Return why a trainer cannot use what a loss returned; `None` where it can."""
    if not isinstance(outputs, LossOutputs):
        return f"{type(outputs).__name__}, not a LossOutputs"
    if not isinstance(outputs.loss, Tensor) or outputs.loss.ndim:
        shape = getattr(outputs.loss, "shape", None)
        what = type(outputs.loss).__name__ if shape is None else f"a tensor of shape {tuple(shape)}"
        return f"a loss that is {what}, not a tensor with one number"
    if inputs.logprobs is not None and inputs.logprobs.requires_grad and not outputs.loss.requires_grad:
        return "a loss without a gradient: compute it from inputs.logprobs, without `detach` or `item`"
    for name, value in {**outputs.metrics, **outputs.maxima}.items():
        if not isinstance(value, float | int | Tensor) or (isinstance(value, Tensor) and value.ndim):
            return f"the metric '{name}' as {type(value).__name__}, not a number"
    return None


def _tensors(metrics: Mapping[str, Tensor | float]) -> dict[str, Tensor]:
    """Return metrics as tensors, which add up over micro-batches."""
    return {name: torch.as_tensor(value) for name, value in metrics.items()}
