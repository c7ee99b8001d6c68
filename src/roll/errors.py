"""One tree of errors, and how messages show a value and a place.

Every error that a run can meet derives from `RollError`. Each class also inherits the built-in exception it refines,
so code outside ROLL may catch either. A message says what failed, the value seen, and what to change.

    RollError
    ├── UserError (ValueError)          the user can fix it: the command prints the message alone and exits with 2
    │   ├── ConfigError                 a configuration file, an override, or a combination of values
    │   ├── HubError                    the Hugging Face hub refuses, or cannot be reached
    │   ├── DataError                   a prompt source: missing, malformed (with its line), empty
    │   ├── ModelError                  a model that cannot be found, loaded, or used here
    │   ├── PlacementError              a device mapping that this cluster cannot serve
    │   └── RunDirectoryError           a run directory that exists, is missing, or cannot be written
    ├── UnsupportedError (NotImplementedError)   the chosen engine or back-end has no such ability
    ├── InfraError (RuntimeError)       work that *we* failed; re-issued within its budget, never a reward of 0
    │   ├── EngineDiedError             an inference engine is gone
    │   ├── ReplayError                 an environment does not repeat an earlier episode: given up at once
    │   ├── RewardInfraError            a verifier crashed or ran out of its time (not: judged the answer wrong)
    │   │   └── UnscorableError         this answer can never be scored: it is given up at once
    │   │       └── MalformedPromptError    no answer to this prompt can
    │   └── WorkerDiedError             a trainer rank or a pool worker is gone
    ├── NoEngineError (RuntimeError)    every inference engine is gone, and none can be started again
    ├── WeightSyncError (RuntimeError)  weights did not arrive as sent, or were not applied; names the tensor
    ├── CheckpointError (RuntimeError)  a checkpoint is incomplete or does not belong to this run
    │   └── CheckpointVersionError (UserError)  another version of ROLL wrote it, and this one cannot read it
    ├── HalfUpdatedError (RuntimeError) an optimiser step failed while it moved the weights
    ├── EngineError (RuntimeError)      an inference engine of the user's own failed; names it
    ├── LossError (RuntimeError)        a loss of the user's own failed; names it
    ├── CallbackError (RuntimeError)    a function that the user gave to be called during a run failed; names it
    ├── TrainingDivergedError (ArithmeticError)  non-finite loss or gradients, repeatedly
    └── AlarmError                      an alarm that the user set stopped the run; everything is saved
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = [
    "AlarmError",
    "CallbackError",
    "CheckpointError",
    "CheckpointVersionError",
    "ConfigError",
    "DataError",
    "EngineDiedError",
    "EngineError",
    "HalfUpdatedError",
    "HubError",
    "InfraError",
    "LossError",
    "MalformedPromptError",
    "ModelError",
    "NoEngineError",
    "PlacementError",
    "ReplayError",
    "RewardInfraError",
    "RollError",
    "RunDirectoryError",
    "TrainingDivergedError",
    "UnscorableError",
    "UnsupportedError",
    "UserError",
    "WeightSyncError",
    "WorkerDiedError",
    "in_one_line",
    "leaves",
    "raised_at",
    "short",
]


class RollError(Exception):
    """Base of all errors that ROLL raises on purpose."""


class UserError(RollError, ValueError):
    """Something the user can mend; shown without a traceback, exit code 2."""


class ConfigError(UserError):
    """A configuration that cannot be used."""


class DataError(UserError):
    """A source of prompts or examples that cannot be used."""


class HubError(UserError):
    """The Hugging Face hub refuses an upload, or cannot be reached."""


class ModelError(UserError):
    """A model that cannot be found, loaded, or used with these settings."""


class PlacementError(UserError):
    """Roles and devices that do not fit together."""


class RunDirectoryError(UserError):
    """A run directory that exists already, is missing, or cannot be written."""


class UnsupportedError(RollError, NotImplementedError):
    """The chosen engine or back-end does not have this ability."""


class InfraError(RollError, RuntimeError):
    """Work that the infrastructure failed, as opposed to the model."""


class EngineDiedError(InfraError):
    """An inference engine is gone; its requests must be issued again elsewhere."""

    def __init__(self, engine_id: str, cause: str) -> None:
        super().__init__(engine_id, cause)
        self.engine_id = engine_id
        self.cause = cause

    def __str__(self) -> str:
        return f"inference engine {self.engine_id} died: {self.cause}"


class ReplayError(InfraError):
    """An environment does not repeat an earlier episode, so that nothing can begin in its midst."""


class RewardInfraError(InfraError):
    """A verifier could not judge: it crashed or exceeded its time."""


class UnscorableError(RewardInfraError):
    """This answer can never be scored, however often it is tried: the rollout is given up at once."""


class MalformedPromptError(UnscorableError):
    """No answer to this prompt can ever be scored: all its rollouts are given up, and no more are generated."""

    def __init__(self, uid: str, problem: str) -> None:
        super().__init__(uid, problem)
        self.uid = uid
        self.problem = problem

    def __str__(self) -> str:
        return f"prompt '{self.uid}': {self.problem}"


class WorkerDiedError(InfraError):
    """A trainer rank or a pool worker is gone."""


class NoEngineError(RollError, RuntimeError):
    """No inference engine is left: each died, or hung, and could not be started again."""


class WeightSyncError(RollError, RuntimeError):
    """The engines do not hold the trainer's weights."""


class CheckpointError(RollError, RuntimeError):
    """A checkpoint cannot be read, is incomplete, or belongs to another run."""


class CheckpointVersionError(CheckpointError, UserError):
    """A checkpoint that another version of ROLL wrote, and this one cannot read."""


class HalfUpdatedError(RollError, RuntimeError):
    """An optimiser step failed while it moved the weights: they are neither the old nor the new ones."""


class EngineError(RollError, RuntimeError):
    """An inference engine of the user's own failed."""


class LossError(RollError, RuntimeError):
    """A loss of the user's own failed."""


class CallbackError(RollError, RuntimeError):
    """A function that the user gave to be called during a run failed."""


class TrainingDivergedError(RollError, ArithmeticError):
    """Loss or gradients were not finite for too many steps in a row."""


class AlarmError(RollError):
    """An alarm stopped the run at a step's boundary; everything up to there is saved. Exit code 3."""


def raised_at(error: BaseException) -> str:
    """File and line where it was raised, or of the text that is no Python; empty for one that was not."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{error.filename}:{error.lineno}"
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else ""


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield an error itself, or the errors inside a group of them."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


def short(value: object) -> str:
    """A value as a message shows it: its beginning."""
    try:
        text = repr(value)
    except Exception:  # it nests too deeply, holds too long a number, or is of a class of the user's own
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def in_one_line(error: BaseException) -> str:
    """An error's type and the beginning of its message as a message of ours shows them; it may be the user's own."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # of a class of the user's own
        text = "its message cannot be made"
    return f"{type(error).__name__}: {text if len(text) <= 500 else f'{text[:497]}...'}"
