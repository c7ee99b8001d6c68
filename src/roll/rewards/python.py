"""A function of the user's: `def reward(text, answer, metadata) -> float`, given by import path or by file.

It may be a coroutine function. Annotated `-> bool`, it decides whether the task was solved; a `Judgement` (annotated
so) also gives a verdict; a plain number does neither.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import inspect
import math
import numbers
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from roll.config.rewards import PythonReward
from roll.errors import ConfigError
from roll.protocols import WorkerPool
from roll.registry import import_object, nearest
from roll.rewards.base import Judgement, Verifier, in_pool
from roll.types import Rollout

__all__ = ["call_reward", "load_reward", "python_verifier"]


@functools.cache
def load_reward(path: str) -> Callable[..., Any]:
    """Import the function; files and modules are looked for from the current directory on.

    Raises:
        ConfigError: it cannot be imported, or is no function.
    """
    place, _, name = path.rpartition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = _from_file(Path(place).expanduser(), name) if place.endswith(".py") else import_object(path)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # the user's module may fail with anything while it is imported
        line = _last_line(error)
        raise ConfigError(
            f"reward function '{path}' cannot be imported{line}: {type(error).__name__}: {error}"
        ) from error
    if not callable(function):
        raise ConfigError(f"reward function '{path}' is of type {type(function).__name__}, not a function.")
    return function


def _from_file(file: Path, name: str) -> object:
    if not file.is_file():
        raise ConfigError(f"reward function: there is no file '{file}' (looked for from '{os.getcwd()}').")
    spec = importlib.util.spec_from_file_location(f"roll_reward_{file.stem}", file)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles in it look their module up
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        known = [entry for entry in vars(module) if not entry.startswith("_")]
        raise ConfigError(f"reward function: '{file}' has no '{name}'.{nearest(name, known)}")
    return getattr(module, name)


def _last_line(error: BaseException) -> str:
    """Where the error was raised: ` (file:line)`."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace is not None else ""


def call_reward(path: str, text: str, answer: str, metadata: Mapping[str, Any], options: dict[str, Any]) -> Judgement:
    """Call it, also where it is a coroutine function, and check what it returns.

    Raises:
        ConfigError: it did not return a finite number, a truth value, or a `Judgement`.
    """
    result = load_reward(path)(text, answer, dict(metadata), **options)
    if inspect.isawaitable(result):
        result = asyncio.run(_wait(result))
    if isinstance(result, Judgement):
        _finite(path, result.value)
        return result
    value = _finite(path, result)
    if _decides(load_reward(path)):
        return Judgement(value=value, verdict="correct" if value else "wrong", correct=bool(value))
    return Judgement(value=value, verdict=f"{value:g}")


async def _wait(result: Any) -> Any:
    return await result


def _finite(path: str, value: object) -> float:
    # NumPy's truth values and torch's scalars are numbers to everyone but `numbers`
    is_number = isinstance(value, numbers.Real) or (hasattr(value, "item") and hasattr(value, "__float__"))
    if not is_number:
        raise ConfigError(
            f"reward function '{path}' returned {_short(value)}: return a number, a truth value, or a Judgement."
        )
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ConfigError(f"reward function '{path}' returned {_short(value)}: return one number.") from None
    if not math.isfinite(number):
        raise ConfigError(f"reward function '{path}' returned {number}: return a finite number.")
    return number


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _decides(function: Callable[..., Any]) -> bool:
    """Whether its annotation promises a truth value or a `Judgement`."""
    try:
        promised = inspect.signature(function).return_annotation
    except (TypeError, ValueError):  # a built-in without a signature
        return False
    return promised in (bool, Judgement, "bool", "Judgement")


def python_verifier(config: PythonReward, pool: WorkerPool) -> Verifier:
    """Imports the function at once, so that a mistake shows before training; calls it in the pool.

    Raises:
        ConfigError: it cannot be imported, or does not take the arguments it will get.
    """
    function = load_reward(config.function)
    try:
        inspect.signature(function).bind("text", "answer", {}, **config.options)
    except TypeError as error:
        options = "".join(f", {name}=…" for name in config.options)
        raise ConfigError(
            f"reward function '{config.function}' cannot be called as (text, answer, metadata{options}): {error}."
        ) from None
    except ValueError:
        pass  # a built-in without a signature: its first call will tell

    async def judge(rollout: Rollout) -> Judgement:
        arguments = (rollout.text, rollout.prompt.answer, dict(rollout.prompt.metadata), config.options)
        return await in_pool(pool, call_reward, config.function, *arguments, time_limit_s=config.time_limit_s)

    return Verifier(judge=judge, decides=_decides(function))
