"""A loss of the user's: `def loss(inputs: LossInputs) -> LossOutputs`, by import path or by file."""

from __future__ import annotations

from dataclasses import dataclass

from roll.algorithms.inputs import LossInputs, LossOutputs
from roll.errors import ConfigError
from roll.registry import load_function

__all__ = ["OwnLoss"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnLoss:
    """Calls the function; it is imported where it runs, so it need not be picklable."""

    path: str

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """The micro-batch's share; see `LossInputs` for what it must divide by.

        Raises:
            ConfigError: it cannot be imported, or returns something else.
        """
        outputs = load_function(self.path, "loss")(inputs)
        if not isinstance(outputs, LossOutputs):
            raise ConfigError(f"loss '{self.path}' returned a {type(outputs).__name__}: return a LossOutputs.")
        return outputs
