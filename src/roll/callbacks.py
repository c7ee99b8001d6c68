"""The callbacks that a script passes to a run: `on_step`, `on_evaluation`, `on_save`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from roll.errors import CallbackError, ConfigError

__all__ = ["Callbacks", "OnMetrics", "OnSave"]

OnMetrics: TypeAlias = Callable[[int, dict[str, float]], object]
"""Called with a step's number and its metrics, as in `metrics.jsonl`."""
OnSave: TypeAlias = Callable[[int, Path], object]
"""Called with a step's number and the directory of its complete checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Callbacks:
    """Functions that the controller calls between two steps and waits for; their return values are ignored.

    Raises:
        ConfigError: A callback is not callable, or is a coroutine function, which would never be awaited.
    """

    on_step: OnMetrics | None = None
    on_evaluation: OnMetrics | None = None
    on_save: OnSave | None = None

    def __post_init__(self) -> None:
        for name in ("on_step", "on_evaluation", "on_save"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise ConfigError(f"{name} must be a function, got {type(function).__name__}.")
            if inspect.iscoroutinefunction(function):
                raise ConfigError(
                    f"{name} must be an ordinary function, got a coroutine function: callbacks are called between "
                    "steps."
                )

    def notify_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Call `on_step` after a step is done and recorded."""
        self._call("on_step", step, dict(metrics))

    def notify_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Call `on_evaluation` after an evaluation is done and recorded."""
        self._call("on_evaluation", step, dict(metrics))

    def notify_saved(self, step: int, path: Path) -> None:
        """Call `on_save` after a checkpoint is complete."""
        self._call("on_save", step, path)

    def _call(self, name: str, step: int, argument: Any) -> None:
        function = getattr(self, name)
        if function is None:
            return
        try:
            function(step, argument)
        except (Exception, KeyboardInterrupt) as error:  # the user's code may fail with anything, or be interrupted
            raise CallbackError(
                f"the callback {name} ({_describe_location(function)}) failed at step {step}: {_describe_error(error)}"
            ) from error


def _describe_error(error: BaseException) -> str:
    return ": ".join(filter(None, (type(error).__name__, str(error))))


def _describe_location(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(function, "__code__", None)
    return f"{name}, {code.co_filename}:{code.co_firstlineno}" if code is not None else name
