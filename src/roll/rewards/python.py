"""A user's function as a reward: `def reward(text, answer, metadata) -> float`, given by import path or by file.

Functions written for verl (`data_source, solution_str, ground_truth, extra_info`) are also supported: see `signatures`.

A coroutine function runs for up to `max_concurrent` answers concurrently. A function annotated `-> bool` or `->
Judgement` also decides whether the task was solved; a plain number does not.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from roll.config.data import DataConfig
from roll.config.rewards import PythonReward
from roll.errors import ConfigError, RewardInfraError, shorten
from roll.protocols import WorkerPool
from roll.rewards.base import Judgement, Verifier, run_in_pool
from roll.rewards.pickled_function import PickledFunction, resolve_function
from roll.rewards.signatures import bind_arguments, build_argument_values, check_signature
from roll.types import Rollout
from roll.user_code import load_function

__all__ = ["await_reward", "build_python_verifier", "call_reward", "check_reward_functions", "load_reward"]


def load_reward(path: str | PickledFunction) -> Callable[..., Any]:
    """Return a reward function: import it if `path` is a path, or unpickle it if it was passed as an object."""
    return path.load() if isinstance(path, PickledFunction) else load_function(path, "reward function")


def check_reward_functions(data: Iterable[DataConfig]) -> None:
    """Import all reward functions of the data sources, so that an invalid path is reported before the run starts.

    Raises:
        ConfigError: A function cannot be imported.
    """
    for reward in (reward for entry in data for reward in entry.reward):
        if isinstance(reward, PythonReward) and reward.passed_function is None:
            load_reward(resolve_function(reward))


def call_reward(path: str | PickledFunction, values: Mapping[str, Any], options: dict[str, Any]) -> Judgement:
    """Call a reward function, which may be a coroutine function, and convert its result to a judgement.

    Args:
        path: The function's path, or the pickled function.
        values: The values that the function may receive, by name.
        options: Further keyword arguments.

    Raises:
        RewardInfraError: The function did not return a finite number, a bool, or a `Judgement`.
    """
    function = load_reward(path)
    arguments, named = bind_arguments(function, values, options)
    result = function(*arguments, **named)
    if inspect.isawaitable(result):  # returned by a function that is not declared as a coroutine function
        result = asyncio.run(_await_value(result))
    return _make_judgement(path, result)


async def await_reward(path: str | PickledFunction, values: Mapping[str, Any], options: dict[str, Any]) -> Judgement:
    """Call a reward that is a coroutine function on the running event loop: see `call_reward`."""
    function = load_reward(path)
    arguments, named = bind_arguments(function, values, options)
    return _make_judgement(path, await function(*arguments, **named))


def _make_judgement(path: str | PickledFunction, result: object) -> Judgement:
    if isinstance(result, Judgement):
        _check_finite(path, result.value)
        return result
    if isinstance(result, Mapping) and "score" in result:  # a dict, as verl's functions may return
        numbers_of = {str(key): value for key, value in result.items() if isinstance(value, numbers.Real)}
        parts = {key: float(value) for key, value in numbers_of.items() if key != "score" and math.isfinite(value)}
        value = _check_finite(path, result["score"])
        return Judgement(value=value, verdict=f"{value:g}", parts=parts)
    value = _check_finite(path, result)
    if _returns_verdict(load_reward(path)):
        return Judgement(value=value, verdict="correct" if value else "wrong", correct=bool(value))
    return Judgement(value=value, verdict=f"{value:g}")


async def _await_value(result: Any) -> Any:
    return await result


def _check_finite(path: object, value: object) -> float:
    # NumPy's bools and torch's scalars are not registered with `numbers`
    is_number = isinstance(value, numbers.Real) or (hasattr(value, "item") and hasattr(value, "__float__"))
    if not is_number:
        raise RewardInfraError(
            f"reward function '{path}' must return a number, a bool or a Judgement, got {shorten(value)}."
        )
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise RewardInfraError(f"reward function '{path}' must return one number, got {shorten(value)}.") from None
    if not math.isfinite(number):
        raise RewardInfraError(f"reward function '{path}' must return a finite number, got {number}.")
    return number


def _returns_verdict(function: Callable[..., Any]) -> bool:
    """Return whether the function's return annotation is `bool` or `Judgement`."""
    try:
        promised = inspect.signature(function).return_annotation
    except (TypeError, ValueError):  # a built-in without a signature
        return False
    return promised in (bool, Judgement, "bool", "Judgement")


def build_python_verifier(config: PythonReward, pool: WorkerPool) -> Verifier:
    """Build the verifier of the reward `python`, which calls the user's function in the worker pool.

    The function is imported immediately, so that a mistake is reported before training.

    Raises:
        ConfigError: The function cannot be imported, or does not accept the arguments that it will receive.
    """
    source = resolve_function(config)
    function = load_reward(source)
    check_signature(function, source, config.options)
    if config.adaptive_limit is not None and inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"reward function '{source}' is an `async def` function, whose calls share a process, so their CPU time "
            "cannot be measured: remove `adaptive_limit`, or define the function with `def`."
        )
    slots = asyncio.Semaphore(config.max_concurrent)
    runs_in = source.select_pool(pool) if isinstance(source, PickledFunction) else pool

    async def judge(rollout: Rollout) -> Judgement:
        arguments = (build_argument_values(rollout.text, rollout.prompt), config.options)
        if not inspect.iscoroutinefunction(function):
            return await run_in_pool(runs_in, call_reward, source, *arguments, time_limit_s=config.time_limit_s)
        async with slots:
            return await run_in_pool(runs_in, await_reward, source, *arguments, time_limit_s=config.time_limit_s)

    return Verifier(judge=judge, decides_correctness=_returns_verdict(function))
