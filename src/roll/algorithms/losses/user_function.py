"""User-defined losses: `def loss(inputs: LossInputs) -> LossOutputs`, named by import path or file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from roll.errors import ConfigError, LossError, find_raise_location, one_line_error
from roll.types import LossInputs, LossOutputs, LossRequirements
from roll.user_code import check_call, load_function

__all__ = ["UserLoss"]


@dataclass(frozen=True, kw_only=True, slots=True)
class UserLoss:
    """A user-defined loss. It is imported in the process that uses it, so it does not have to be picklable."""

    path: str

    @property
    def needs(self) -> LossRequirements:
        """The function's attribute `needs`; by default the policy's log-probs of whole sequences.

        Whole sequences are the default because the function may combine the tokens of a sequence.
        """
        return getattr(load_function(self.path, "loss"), "needs", LossRequirements(whole_sequences=True))

    def check(self) -> None:
        """Import the function and check its signature.

        Raises:
            ConfigError: The function cannot be imported, does not accept one argument, or has an invalid `needs`.
        """
        check_call(load_function(self.path, "loss"), f"loss '{self.path}'", "inputs")
        if not isinstance(self.needs, LossRequirements):
            raise ConfigError(
                f"loss '{self.path}': `needs` must be of type LossRequirements, got {type(self.needs).__name__}."
            )

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Compute the micro-batch's contribution to the loss; `LossInputs` documents the counts to divide by.

        Raises:
            ConfigError: The function cannot be imported.
            LossError: The function failed, or did not return a valid `LossOutputs`.
        """
        function = load_function(self.path, "loss")
        try:
            outputs = function(inputs)
        except Exception as error:
            raise LossError(
                f"loss '{self.path}' failed at {find_raise_location(error)}: {one_line_error(error)}"
            ) from error
        if (problem := _find_problem(outputs, inputs)) is not None:
            raise LossError(f"loss '{self.path}' returned {problem}.")
        return replace(
            outputs, metrics=_convert_to_tensors(outputs.metrics), maxima=_convert_to_tensors(outputs.maxima)
        )


def _find_problem(outputs: object, inputs: LossInputs) -> str | None:
    """Return the problem with the return value of a loss; `None` if it is valid."""
    if not isinstance(outputs, LossOutputs):
        return f"{type(outputs).__name__}; expected LossOutputs"
    if not isinstance(outputs.loss, Tensor) or outputs.loss.ndim:
        shape = getattr(outputs.loss, "shape", None)
        what = type(outputs.loss).__name__ if shape is None else f"a tensor of shape {tuple(shape)}"
        return f"a loss that is {what}; expected a scalar tensor"
    if inputs.logprobs is not None and inputs.logprobs.requires_grad and not outputs.loss.requires_grad:
        return "a loss without a gradient: compute it from inputs.logprobs, without `detach` or `item`"
    for name, value in {**outputs.metrics, **outputs.maxima}.items():
        if not isinstance(value, float | int | Tensor) or (isinstance(value, Tensor) and value.ndim):
            return f"the metric '{name}' as {type(value).__name__}; expected a number"
    return None


def _convert_to_tensors(metrics: Mapping[str, Tensor | float]) -> dict[str, Tensor]:
    """Convert metrics to tensors, so that they can be summed over micro-batches."""
    return {name: torch.as_tensor(value) for name, value in metrics.items()}
