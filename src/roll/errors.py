"""The hierarchy of errors, and functions that format values and errors for messages.

Every error that ROLL raises on purpose derives from `RollError`. Each class also inherits the built-in exception that
it refines, so code outside ROLL may catch either. A message states what failed, the invalid value, and what to change.

    RollError
    ├── UserError (ValueError)          the user can fix it: the command prints only the message and exits with 2
    │   ├── ConfigError                 a configuration file, an override, or a combination of values
    │   ├── HubError                    the Hugging Face hub rejects a request, or cannot be reached
    │   ├── DataError                   a prompt source: missing, malformed (with the line), or empty
    │   ├── ModelError                  a model that cannot be found, loaded, or used here
    │   ├── PlacementError              a device mapping that this cluster cannot satisfy
    │   └── RunDirectoryError           a run directory that exists, is missing, or cannot be written
    ├── UnsupportedError (NotImplementedError)   the chosen engine or backend does not support the operation
    ├── InfraError (RuntimeError)       an infrastructure failure; retried up to a limit, never a reward of 0
    │   ├── EngineDiedError             an inference engine died
    │   ├── ReplayError                 an environment did not reproduce an earlier episode: not retried
    │   ├── RewardInfraError            a verifier crashed or timed out (not: judged the answer wrong)
    │   │   └── UnscorableError         this answer can never be scored: not retried
    │   │       └── MalformedPromptError    no answer to this prompt can be scored
    │   └── WorkerDiedError             a trainer rank or a pool worker died
    ├── CpuTimeoutError (TimeoutError)  a call in the worker pool used more CPU time than its limit
    ├── NoEngineError (RuntimeError)    all inference engines died, and none can be restarted
    ├── WeightSyncError (RuntimeError)  weights did not arrive as sent, or were not applied; names the tensor
    ├── CheckpointError (RuntimeError)  a checkpoint is incomplete or does not belong to this run
    │   └── CheckpointVersionError (UserError)  another version of ROLL wrote it, and this one cannot read it
    ├── PartialUpdateError (RuntimeError) an optimizer step failed while it updated the weights
    ├── EngineError (RuntimeError)      a user-defined inference engine failed; names it
    ├── LossError (RuntimeError)        a user-defined loss failed; names it
    ├── CallbackError (RuntimeError)    a callback of the user failed; names it
    ├── TrainingDivergedError (ArithmeticError)  non-finite loss or gradients, repeatedly
    └── AlarmError                      an alarm that the user configured stopped the run; its state is saved
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = [
    "AlarmError",
    "CallbackError",
    "CheckpointError",
    "CheckpointVersionError",
    "ConfigError",
    "CpuTimeoutError",
    "DataError",
    "EngineDiedError",
    "EngineError",
    "HubError",
    "InfraError",
    "LossError",
    "MalformedPromptError",
    "ModelError",
    "NoEngineError",
    "PartialUpdateError",
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
    "find_raise_location",
    "iterate_leaf_errors",
    "one_line_error",
    "shorten",
]


class RollError(Exception):
    """Base class of the errors that ROLL defines."""


class UserError(RollError, ValueError):
    """An error that the user can fix; shown without a traceback, exit code 2."""


class ConfigError(UserError):
    """A configuration that cannot be used."""


class DataError(UserError):
    """A source of prompts or examples that cannot be used."""


class HubError(UserError):
    """The Hugging Face hub rejects an upload, or cannot be reached."""


class ModelError(UserError):
    """A model that cannot be found, loaded, or used with these settings."""


class PlacementError(UserError):
    """The roles cannot be placed on the devices."""


class RunDirectoryError(UserError):
    """A run directory that exists already, is missing, or cannot be written."""


class UnsupportedError(RollError, NotImplementedError):
    """The chosen engine or backend does not support the operation."""


class InfraError(RollError, RuntimeError):
    """A failure of the infrastructure, as opposed to a failure of the model."""


class EngineDiedError(InfraError):
    """An inference engine died; its requests must be sent to another engine."""

    def __init__(self, engine_id: str, cause: str) -> None:
        super().__init__(engine_id, cause)
        self.engine_id = engine_id
        self.cause = cause

    def __str__(self) -> str:
        return f"inference engine '{self.engine_id}' died: {self.cause}"


class ReplayError(InfraError):
    """An environment did not reproduce an earlier episode, so no rollout can start inside that episode."""


class RewardInfraError(InfraError):
    """A verifier could not judge an answer: it crashed or timed out."""


class UnscorableError(RewardInfraError):
    """An answer that can never be scored; its rollout fails without a retry."""


class MalformedPromptError(UnscorableError):
    """A prompt whose answers can never be scored; its rollouts fail, and no more rollouts of it are generated."""

    def __init__(self, uid: str, problem: str) -> None:
        super().__init__(uid, problem)
        self.uid = uid
        self.problem = problem

    def __str__(self) -> str:
        return f"prompt '{self.uid}': {self.problem}"


class WorkerDiedError(InfraError):
    """A trainer rank or a pool worker died."""


class CpuTimeoutError(RollError, TimeoutError):
    """A call in the worker pool used more CPU time than its limit."""


class NoEngineError(RollError, RuntimeError):
    """No inference engine is left: all died or hung, and could not be restarted."""


class WeightSyncError(RollError, RuntimeError):
    """The engines do not have the trainer's weights."""


class CheckpointError(RollError, RuntimeError):
    """A checkpoint cannot be read, is incomplete, or belongs to another run."""


class CheckpointVersionError(CheckpointError, UserError):
    """A checkpoint that another version of ROLL wrote and this version cannot read."""


class PartialUpdateError(RollError, RuntimeError):
    """An optimizer step failed while it updated the weights; the weights are now a mixture of old and new values."""


class EngineError(RollError, RuntimeError):
    """A user-defined inference engine failed."""


class LossError(RollError, RuntimeError):
    """A user-defined loss failed."""


class CallbackError(RollError, RuntimeError):
    """A callback of the user failed."""


class TrainingDivergedError(RollError, ArithmeticError):
    """Loss or gradients were not finite for too many consecutive steps."""


class AlarmError(RollError):
    """An alarm stopped the run after a step; the state after this step is saved. Exit code 3."""


def find_raise_location(error: BaseException) -> str:
    """Return the file and line where an error was raised, or of the code with the syntax error; empty if unknown."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{error.filename}:{error.lineno}"
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else ""


def iterate_leaf_errors(error: BaseException) -> Iterator[BaseException]:
    """Yield the error itself, or all errors inside an exception group."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from iterate_leaf_errors(inner)
    else:
        yield error


def shorten(value: object) -> str:
    """Return the beginning of a value's `repr`, for messages."""
    try:
        text = repr(value)
    except Exception:  # too deeply nested, too long a number, or a user-defined class
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def one_line_error(error: BaseException) -> str:
    """Return an error's type and the beginning of its message as one line; never raises, even for user-defined
    classes.
    """
    try:
        text = " ".join(str(error).split())
    except Exception:  # a user-defined class
        text = "its message cannot be formatted"
    return f"{type(error).__name__}: {text if len(text) <= 500 else f'{text[:497]}...'}"
