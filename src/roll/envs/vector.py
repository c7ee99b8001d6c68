"""Vectorized environments: several environments, all or some of which are stepped in one call.

    step({2: action, 5: action}) ─► each of these environments ─► observations [2], rewards [2], ..., infos [2]

Invariants: results are in the order of the actions; no observation is lost: if `step` returns the first observation of
the next episode, the info has the last observation of the old episode.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from roll.envs.base import StepResult, await_if_needed
from roll.errors import DataError, InfraError
from roll.running import wait_for_future

__all__ = ["AsyncVectorEnv", "Autoreset", "SyncVectorEnv", "VectorEnv", "VectorStep"]

Autoreset: TypeAlias = Literal["same_step", "next_step", "disabled"]
VectorStep: TypeAlias = tuple[list[str], np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]
"""Observations, rewards (float64), terminated and truncated (bool), infos: one per action."""

_AwaitValue: TypeAlias = Callable[[Any], Any]
"""A function that returns a value, after awaiting it if it is awaitable."""

_EnvCall: TypeAlias = Callable[[_AwaitValue], Any]

LAST_TASKS_TIMEOUT_S = 5.0
"""Timeout for tasks that closed environments left running."""


class VectorEnv:
    """Several environments that are stepped together: one after the other, or concurrently in `AsyncVectorEnv`.

    Args:
        envs: The environments.
        env_ids: Names of the environments, for messages.
        autoreset: The behavior at an episode's end. `same_step`: the same call begins the next episode and returns its
            first observation; `info["final_observation"]` and `info["final_info"]` are from the last step of the old
            episode. `next_step`: the next call ignores its action and begins the next episode, with reward 0.
            `disabled`: only `reset` begins the next episode, and a step before that is an error.
        seed: Seed of environment 0's first episode, if `reset` is called without a seed; environment i has `seed + i`.
    """

    def __init__(
        self,
        envs: Sequence[Any],
        env_ids: Sequence[str] | None = None,
        autoreset: Autoreset = "same_step",
        seed: int | None = None,
    ) -> None:
        if autoreset not in get_args(Autoreset):
            raise DataError(f"autoreset must be one of {', '.join(get_args(Autoreset))}, got '{autoreset}'.")
        self.envs = list(envs)
        self.env_ids = list(env_ids) if env_ids is not None else [type(env).__name__ for env in self.envs]
        self.autoreset: Autoreset = autoreset
        self._seed = seed
        self._over = [True] * self.num_envs
        self._started = [False] * self.num_envs
        self._loop = _Loop()

    @property
    def num_envs(self) -> int:
        return len(self.envs)

    def reset(
        self, seed: int | Sequence[int | None] | None = None, indices: Sequence[int] | None = None
    ) -> tuple[list[str], list[dict[str, Any]]]:
        """Begin an episode in each environment, or only in the environments at `indices`.

        Args:
            seed: A seed for each environment, in order; with a single number, environment i gets `seed + i`. Without a
                seed, the first episodes use the constructor's seeds, and later episodes derive new seeds.
            indices: Indices of the environments to reset; None for all.

        Raises:
            DataError: A seed is missing, or an index is invalid.
            InfraError: An environment failed; the message names it.
        """
        chosen = list(range(self.num_envs)) if indices is None else [self._check_index(index) for index in indices]
        if isinstance(seed, Sequence):
            if len(seed) != len(chosen):
                raise DataError(
                    f"expected one seed per environment, got {len(seed)} seeds for {len(chosen)} environments."
                )
            seeds = dict(zip(chosen, seed, strict=True))
        else:
            seeds = {index: self._get_seed(index) if seed is None else seed + index for index in chosen}
        results = self._run({index: partial(_reset, self.envs[index], seeds[index]) for index in chosen})
        for index, result in results.items():
            if not isinstance(result, Exception):
                self._over[index], self._started[index] = False, True
        started = self._raise_failures(results)
        return [started[index][0] for index in chosen], [started[index][1] for index in chosen]

    def step(self, actions: Sequence[str] | Mapping[int, str]) -> VectorStep:
        """Take an action in every environment (a sequence) or in some environments (`{index: action}`).

        Raises:
            DataError: A sequence does not have one action per environment, an index is invalid, or an episode is over.
            InfraError: An environment failed; the message names it. The other environments have taken their actions.
        """
        if not isinstance(actions, Mapping):
            if isinstance(actions, str) or len(actions) != self.num_envs:
                given = "a string" if isinstance(actions, str) else f"{len(actions)} actions"
                raise DataError(
                    f"expected one action per environment or {{index: action}}, got {given} for {self.num_envs} "
                    "environments."
                )
            actions = dict(enumerate(actions))
        work: dict[int, _EnvCall] = {}
        for index, action in actions.items():
            env = self.envs[self._check_index(index)]
            if not self._over[index]:
                work[index] = partial(_step, env, action, self.autoreset == "same_step")
            elif self.autoreset == "next_step" and self._started[index]:
                work[index] = partial(_restart, env)
            else:
                raise DataError(
                    f"environment {index} ({self.env_ids[index]}) has no running episode: call reset() first, or "
                    f"reset(indices=[{index}])."
                )
        results = self._run(work)
        for index, result in results.items():
            if not isinstance(result, Exception):
                ended = result[2] or result[3]
                self._over[index] = bool(ended) and self.autoreset != "same_step"
        succeeded = self._raise_failures(results)
        stepped = [succeeded[index] for index in actions]
        return (
            [step[0] for step in stepped],
            np.array([step[1] for step in stepped], np.float64),
            np.array([step[2] for step in stepped], np.bool_),
            np.array([step[3] for step in stepped], np.bool_),
            [step[4] for step in stepped],
        )

    def close(self) -> None:
        """Close every environment that can be closed."""
        closing = {i: partial(_close, env) for i, env in enumerate(self.envs) if callable(getattr(env, "close", None))}
        results = self._run(closing)  # an exception is raised once all are closed
        self._loop.close()
        self._raise_failures(results)

    def _run(self, work: Mapping[int, _EnvCall]) -> dict[int, Any]:
        """Run one function per environment and return the results by index.

        An exception that a function raises is returned as its result.
        """
        raise NotImplementedError

    def _run_and_catch(self, task: _EnvCall) -> Any:
        try:
            # An exception is returned, so that the other environments still act before it is raised.
            return task(self._loop.wait_for)
        except Exception as error:
            return error

    def _check_index(self, index: int) -> int:
        if not 0 <= index < self.num_envs:
            raise DataError(f"environment {index} does not exist: the indices are 0 to {self.num_envs - 1}.")
        return index

    def _get_seed(self, index: int) -> int | None:
        return None if self._started[index] or self._seed is None else self._seed + index

    def _raise_failures(self, results: dict[int, Any]) -> dict[int, Any]:
        failed = {index: result for index, result in results.items() if isinstance(result, Exception)}
        for index in failed:
            self._over[index] = True
        for index, error in failed.items():
            raise InfraError(
                f"environment {index} ({self.env_ids[index]}) failed: {type(error).__name__}: {error}"
            ) from error
        return results


class SyncVectorEnv(VectorEnv):
    """Environments that act one after the other."""

    def _run(self, work: Mapping[int, _EnvCall]) -> dict[int, Any]:
        return {index: self._run_and_catch(task) for index, task in work.items()}


class AsyncVectorEnv(VectorEnv):
    """Environments that step concurrently.

    Each environment steps in its own thread. Asynchronous environments share one event loop in another thread.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pool = ThreadPoolExecutor(max_workers=max(1, self.num_envs), thread_name_prefix="environment")

    def _run(self, work: Mapping[int, _EnvCall]) -> dict[int, Any]:
        futures = {index: self._pool.submit(self._run_and_catch, task) for index, task in work.items()}
        return {index: wait_for_future(future) for index, future in futures.items()}

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._pool.shutdown()


class _Loop:
    """An event loop in a separate thread, which is started on first use."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def wait_for(self, value: Any) -> Any:
        """Return the value; if it is awaitable, wait for its result in the event loop."""
        if not inspect.isawaitable(value):
            return value
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name="environments", daemon=True)
                self._thread.start()
        return wait_for_future(asyncio.run_coroutine_threadsafe(await_if_needed(value), self._loop))

    def close(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(timeout=LAST_TASKS_TIMEOUT_S)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop until it is stopped, then end the tasks that environments left running."""
    loop.run_forever()
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left, timeout=LAST_TASKS_TIMEOUT_S))
    loop.close()


def _reset(env: Any, seed: int | None, await_value: _AwaitValue) -> tuple[str, dict[str, Any]]:
    return await_value(env.reset(seed=seed))


def _step(env: Any, action: str, restart: bool, await_value: _AwaitValue) -> StepResult:
    observation, reward, terminated, truncated, info = await_value(env.step(action))
    if not (restart and (terminated or truncated)):
        return observation, reward, terminated, truncated, info
    final = {"final_observation": observation, "final_info": info}
    observation, info = await_value(env.reset())
    return observation, reward, terminated, truncated, {**info, **final}


def _restart(env: Any, await_value: _AwaitValue) -> StepResult:
    observation, info = await_value(env.reset())
    return observation, 0.0, False, False, info


def _close(env: Any, await_value: _AwaitValue) -> None:
    await_value(env.close())
