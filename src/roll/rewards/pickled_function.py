"""A reward function that was passed as a Python object: `roll.train(config, reward=function)`.

    function ──► cloudpickle ──► bytes ──► every worker: unpickled once, then called like one named by its path
                     └── it cannot be pickled, or not be unpickled elsewhere ──► a thread of this process, and a warning

The values that the function captured are pickled when the run starts: a worker's changes to them stay in that worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

from roll.config.rewards import PythonReward
from roll.errors import ConfigError
from roll.protocols import WorkerPool

__all__ = ["PickledFunction", "function_of", "give"]

logger = logging.getLogger(__name__)

LARGE_BYTES = 4 * 2**20
"""Pickled functions are sent with every call: larger ones cause a warning."""


@dataclass(frozen=True, kw_only=True)
class PickledFunction:
    """A function that was passed as an object, pickled for other processes; its `str` is its name."""

    name: str
    packed: bytes
    """The function, pickled by cloudpickle; empty if it stays in this process."""
    paths: tuple[str, ...]
    """The search paths of modules that the function refers to by name only."""
    function: Callable[..., Any] | None = field(default=None, compare=False)
    """The function itself; `None` after unpickling in another process."""

    def __str__(self) -> str:
        return self.name

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "function": None}

    @property
    def travels(self) -> bool:
        """Whether other processes can call it."""
        return bool(self.packed)

    def load(self) -> Callable[..., Any]:
        """Return the function; it is unpickled once in each process."""
        return self.function or _unpack(self.packed, self.paths)

    def runs_in(self, pool: WorkerPool) -> WorkerPool:
        """Return the pool that calls the function: the workers, or a thread of the controller."""
        return pool if self.travels else cast("WorkerPool", _ThreadPool())


class _ThreadPool:
    """Calls functions in threads of this process, as a `WorkerPool` for rewards: plain functions one at a time,
    coroutine functions concurrently.

    A thread cannot be ended: a thread that hangs is abandoned, and the next call gets another one.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def submit(self, function: Callable[..., Any], *args: Any, time_limit_s: float) -> Any:
        """See `WorkerPool.submit`."""
        async with contextlib.nullcontext() if inspect.iscoroutinefunction(function) else self._turn:
            done: Future[Any] = Future()
            done.set_running_or_notify_cancel()  # so that a waiting caller cannot cancel it while the thread runs
            threading.Thread(target=_settle, args=(done, function, args), name="reward", daemon=True).start()
            async with asyncio.timeout(time_limit_s):
                return await asyncio.wrap_future(done)


def _settle(done: Future[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        result = function(*args)
        done.set_result(asyncio.run(result) if inspect.iscoroutine(result) else result)
    except (TimeoutError, SystemExit, asyncio.CancelledError) as error:  # raised by the function, not by the caller
        done.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
    except Exception as error:
        done.set_exception(error)


@functools.lru_cache(maxsize=16)
def _unpack(packed: bytes, paths: tuple[str, ...]) -> Callable[..., Any]:
    import cloudpickle

    sys.path.extend(path for path in paths if path not in sys.path)
    return cloudpickle.loads(packed)


def give(function: Callable[..., Any]) -> PickledFunction:
    """Pickle a function with the values that it captured; warn if it must stay in this process."""
    import cloudpickle

    name = getattr(function, "__name__", type(function).__name__)
    paths = tuple(dict.fromkeys(os.path.abspath(path) for path in sys.path))
    try:
        packed = cloudpickle.dumps(function)
        cloudpickle.loads(packed)  # some objects can be pickled, but not unpickled
    except Exception as error:  # locks, connections, open files: each raises another exception
        logger.warning(
            "The reward '%s' cannot be sent to worker processes (%s: %s). It runs in this process, one answer at a "
            "time: one that hangs is not ended, and one that computes slows the run down. Let it open what it needs by "
            "itself, or name it by its file: {type: python, function: file.py:%s}.",
            name,
            type(error).__name__,
            error,
            name if name.isidentifier() else "reward",
        )
        return PickledFunction(name=name, packed=b"", paths=(), function=function)
    if len(packed) > LARGE_BYTES:
        logger.warning(
            "The reward '%s' takes %.0f MiB along to every call, since it captured that much: let it load its data "
            "itself.",
            name,
            len(packed) / 2**20,
        )
    return PickledFunction(name=name, packed=packed, paths=paths, function=function)


def function_of(config: PythonReward) -> str | PickledFunction:
    """Return the function that a reward names, or that was passed to it.

    Raises:
        ConfigError: The reward has no function.
    """
    if config.given is not None:
        return give(config.given)
    if config.function is not None:
        return config.function
    label = f" '{config.name}'" if config.name else ""
    raise ConfigError(
        f"the reward{label} is a Python object, which no file keeps: give it again, as "
        "`roll.train(config, reward=function)` or `roll.resume(run, reward=function)`; or name it by its file: "
        "`function: rewards.py:name`."
    )
