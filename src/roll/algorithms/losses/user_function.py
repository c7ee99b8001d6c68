"""A loss of the user's: `def loss(inputs: LossInputs) -> LossOutputs`, by import path or by file."""

from __future__ import annotations

from dataclasses import dataclass

from roll.errors import ConfigError, LossError, raised_at
from roll.types import LossInputs, LossOutputs, Needs
from roll.user_code import load_function

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
            ConfigError: it cannot be imported, or its `needs` are something else.
        """
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
            what = f"{type(error).__name__}: {error}"
            raise LossError(f"loss '{self.path}' failed at {raised_at(error)}: {what}") from error
        if not isinstance(outputs, LossOutputs):
            raise LossError(f"loss '{self.path}' returned {type(outputs).__name__}, not a LossOutputs.")
        return outputs
