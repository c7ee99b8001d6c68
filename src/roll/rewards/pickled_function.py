"""A reward function that was passed as a Python object: `roll.train(config, reward=function)`.

    function ──► cloudpickle ──► bytes ──► every worker: unpickled once, then called
                     └── if it cannot be pickled or unpickled ──► a thread of this process, and a warning

The values that the function captured are pickled when the run starts. A worker's changes to these values are not
visible to other workers.
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

__all__ = ["PickledFunction", "pickle_function", "resolve_function"]

logger = logging.getLogger(__name__)

LARGE_FUNCTION_BYTES = 4 * 2**20
"""Size of a pickled function above which a warning is logged: it is sent with every call."""


@dataclass(frozen=True, kw_only=True)
class PickledFunction:
    """A function that was passed as an object, and is pickled for other processes. Its `str` is the function's name."""

    name: str
    pickle_bytes: bytes
    """The function, pickled by cloudpickle; empty if the function runs in this process."""
    paths: tuple[str, ...]
    """Search paths of the modules that the function refers to by name only."""
    function: Callable[..., Any] | None = field(default=None, compare=False)
    """The function itself; `None` after unpickling in another process."""

    def __str__(self) -> str:
        return self.name

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "function": None}

    @property
    def is_pickled(self) -> bool:
        """True if the function is pickled, so that other processes can call it."""
        return bool(self.pickle_bytes)

    def load(self) -> Callable[..., Any]:
        """Return the function; in other processes, it is unpickled once."""
        return self.function or _unpickle(self.pickle_bytes, self.paths)

    def select_pool(self, pool: WorkerPool) -> WorkerPool:
        """Return the pool in which to call the function: `pool`, or threads of this process if the function is not
        pickled.
        """
        return pool if self.is_pickled else cast("WorkerPool", _ThreadPool())


class _ThreadPool:
    """Runs functions in threads of this process, with the interface of a `WorkerPool`. Plain functions run one at a
    time, coroutine functions concurrently.

    A thread cannot be killed: a thread that hangs is abandoned, and the next call gets a new thread.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def submit(self, function: Callable[..., Any], *args: Any, time_limit_s: float) -> Any:
        """Call a function in a thread and return its result; raise `TimeoutError` after the time limit."""
        async with contextlib.nullcontext() if inspect.iscoroutinefunction(function) else self._turn:
            future: Future[Any] = Future()
            future.set_running_or_notify_cancel()  # so that a waiting caller cannot cancel it while the thread runs
            threading.Thread(target=_run_in_thread, args=(future, function, args), name="reward", daemon=True).start()
            async with asyncio.timeout(time_limit_s):
                return await asyncio.wrap_future(future)


def _run_in_thread(future: Future[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        result = function(*args)
        future.set_result(asyncio.run(result) if inspect.iscoroutine(result) else result)
    except (TimeoutError, SystemExit, asyncio.CancelledError) as error:  # raised by the function, not by the caller
        future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
    except Exception as error:
        future.set_exception(error)


@functools.lru_cache(maxsize=16)
def _unpickle(pickle_bytes: bytes, paths: tuple[str, ...]) -> Callable[..., Any]:
    import cloudpickle

    sys.path.extend(path for path in paths if path not in sys.path)
    return cloudpickle.loads(pickle_bytes)


def pickle_function(function: Callable[..., Any]) -> PickledFunction:
    """Pickle a function with the values that it captured; warn if it must run in this process."""
    import cloudpickle

    name = getattr(function, "__name__", type(function).__name__)
    paths = tuple(dict.fromkeys(os.path.abspath(path) for path in sys.path))
    try:
        pickle_bytes = cloudpickle.dumps(function)
        cloudpickle.loads(pickle_bytes)  # some objects can be pickled, but not unpickled
    except Exception as error:  # locks, connections, open files: each raises another exception
        logger.warning(
            "The reward '%s' cannot be sent to worker processes (%s: %s). It runs in this process, one answer at a "
            "time: a hanging call cannot be stopped, and a long computation slows down the run. Open connections and "
            "files inside the function, or specify the function by its file: {type: python, function: file.py:%s}.",
            name,
            type(error).__name__,
            error,
            name if name.isidentifier() else "reward",
        )
        return PickledFunction(name=name, pickle_bytes=b"", paths=(), function=function)
    if len(pickle_bytes) > LARGE_FUNCTION_BYTES:
        logger.warning(
            "The reward '%s' captures %.0f MiB of data, which is sent with every call. Load the data inside the "
            "function.",
            name,
            len(pickle_bytes) / 2**20,
        )
    return PickledFunction(name=name, pickle_bytes=pickle_bytes, paths=paths, function=function)


def resolve_function(config: PythonReward) -> str | PickledFunction:
    """Return the function of a reward, or its import path if the configuration specifies a path.

    Raises:
        ConfigError: The reward has no function.
    """
    if config.passed_function is not None:
        return pickle_function(config.passed_function)
    if config.function is not None:
        return config.function
    label = f" '{config.name}'" if config.name else ""
    raise ConfigError(
        f"the reward{label} is a Python object, which is not stored with the run: pass it again with "
        "`roll.train(config, reward=function)` or `roll.resume(run, reward=function)`, or specify it by its file: "
        "`function: rewards.py:name`."
    )
