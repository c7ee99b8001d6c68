"""What a script wants to hear of a run while it goes on: `on_step`, `on_evaluation`, `on_save`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from roll.errors import CallbackError, ConfigError

__all__ = ["Callbacks", "OnMetrics", "OnSave"]

OnMetrics: TypeAlias = Callable[[int, dict[str, float]], object]
"""Called with a step's number and its metrics, as `metrics.jsonl` holds them."""
OnSave: TypeAlias = Callable[[int, Path], object]
"""Called with a step's number and the directory of its checkpoint, which is complete."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Callbacks:
    """Functions that the controller calls between two steps and waits for; what they return is not looked at.

    Raises:
        ConfigError: one cannot be called, or is a coroutine function, which nobody would wait for.
    """

    on_step: OnMetrics | None = None
    on_evaluation: OnMetrics | None = None
    on_save: OnSave | None = None

    def __post_init__(self) -> None:
        for name in ("on_step", "on_evaluation", "on_save"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise ConfigError(f"{name} is of type {type(function).__name__}: give a function.")
            if inspect.iscoroutinefunction(function):
                raise ConfigError(f"{name} is a coroutine function: give a plain one, which is called between steps.")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done and recorded."""
        self._call("on_step", step, dict(metrics))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation is done and recorded."""
        self._call("on_evaluation", step, dict(metrics))

    def saved(self, step: int, path: Path) -> None:
        """A checkpoint is complete."""
        self._call("on_save", step, path)

    def _call(self, name: str, step: int, what: Any) -> None:
        function = getattr(self, name)
        if function is None:
            return
        try:
            function(step, what)
        except (Exception, KeyboardInterrupt) as error:  # the user's code may fail with anything, or be interrupted
            raise CallbackError(
                f"the callback {name} ({_where(function)}) failed at step {step}: {_said(error)}"
            ) from error


def _said(error: BaseException) -> str:
    return ": ".join(filter(None, (type(error).__name__, str(error))))


def _where(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(function, "__code__", None)
    return f"{name}, {code.co_filename}:{code.co_firstlineno}" if code is not None else name
