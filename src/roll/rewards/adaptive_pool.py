"""Applies adaptive limits to the calls of a verifier in the worker pool.

    judge(rollout) ──► AdaptivePool.submit ──► MeasuredFunction in a worker: a timer of CPU time, then the function
                                                  ├─ CPU time measured: recorded, if the answer is correct
                                                  └─ SIGPROF: the kernel ends the worker ──► `CpuTimeoutError`

The first call in a process also imports modules, which takes the same time for all prompts of a domain. Therefore the
times of first calls are recorded by domain, and the limit of a first call is the limit of the prompt plus that of first
calls. A call that waits uses no CPU time and is bounded only by `time_limit_s`.

A limit hides correct answers that would take longer. Therefore a fraction `audit_share` of the answers, selected by a
hash of their text, has no adaptive limit; `right_over_limit` is the fraction of these answers that are correct but
slower than the limit.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import signal
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from roll.config.rewards.adaptive import AdaptiveLimit
from roll.errors import CpuTimeoutError
from roll.protocols import ActorHandle, WorkerPool
from roll.rewards.adaptive_limits import AdaptiveLimits
from roll.rewards.base import TIMEOUT, Judgement, Verifier
from roll.types import Rollout

__all__ = ["AdaptivePool", "MeasuredFunction", "limit_adaptively"]

_WARM, _FIRST = 0, 1
"""Cases of `AdaptiveLimits`: a call in a process that has run the verifier before, and the first call in a process."""
_pool_numbers = itertools.count()
_started_pools: set[int] = set()
"""Numbers of the pools whose functions this process has called."""


@dataclass(kw_only=True, slots=True)
class _Call:
    """The limits and the CPU time of one judgement's calls in the pool."""

    limits_s: tuple[float | None, float | None]
    """Limits of a warm and of a first call; `None` for no limit."""
    cpu_s: float | None = None
    """Measured CPU time; `None` without a call in the pool."""
    is_first: bool = False


_current_call: ContextVar[_Call | None] = ContextVar("adaptive_limit", default=None)


class MeasuredFunction:
    """Wraps a function so that its CPU time is measured and its process ends if the time exceeds a limit.

    Args:
        function: The function; the wrapper has the same module and name, so that the worker prepares the same module.
        pool_number: Number of the pool. With it, a worker process detects its first call from this pool.
        limits_s: CPU time limit of later calls, and of the first call, in a process; `None` for no limit.
    """

    def __init__(
        self, function: Callable[..., Any], pool_number: int, limits_s: tuple[float | None, float | None]
    ) -> None:
        self.__module__ = function.__module__
        self.__qualname__ = function.__qualname__
        self._function, self._number, self._limits_s = function, pool_number, limits_s

    def __call__(self, *args: Any) -> tuple[Any, float, bool]:
        """Call the function; return its value, its CPU time, and True if this is the first call in its process."""
        is_first = self._number not in _started_pools
        _started_pools.add(self._number)
        limit_s = self._limits_s[_FIRST if is_first else _WARM]
        started_s = time.process_time()
        if limit_s is None or threading.current_thread() is not threading.main_thread():
            value = self._function(*args)
            return value, time.process_time() - started_s, is_first
        # The default action of the signal ends the process, even in C code that never returns to the interpreter.
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        try:
            value = self._function(*args)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
        return value, time.process_time() - started_s, is_first


class AdaptivePool:
    """A worker pool that measures and limits the CPU time of plain functions; implements `WorkerPool`."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._number = next(_pool_numbers)

    async def submit(self, function: Callable[..., Any], *args: Any, time_limit_s: float) -> Any:
        """Run a function in a worker, with the limits of the current judgement.

        Raises:
            CpuTimeoutError: The function used more CPU time than the adaptive limit.
        """
        call = _current_call.get()
        if call is None or inspect.iscoroutinefunction(function):
            return await self._pool.submit(function, *args, time_limit_s=time_limit_s)
        measured = MeasuredFunction(function, self._number, call.limits_s)
        value, cpu_s, is_first = await self._pool.submit(measured, *args, time_limit_s=time_limit_s)
        call.cpu_s = (call.cpu_s or 0.0) + cpu_s
        call.is_first = call.is_first or is_first
        return value

    async def create_actor(
        self, factory: Callable[..., Any], *args: Any, prepare: tuple[Callable[..., Any], tuple[Any, ...]]
    ) -> ActorHandle:
        """See `WorkerPool.create_actor`."""
        return await self._pool.create_actor(factory, *args, prepare=prepare)

    def create_sub_pool(self, num_workers: int) -> WorkerPool:
        """See `WorkerPool.create_sub_pool`."""
        return self._pool.create_sub_pool(num_workers)

    def health(self) -> dict[str, int]:
        """See `WorkerPool.health`."""
        return self._pool.health()

    async def close(self) -> None:
        """Do nothing, since the run closes the pool."""


def limit_adaptively(verifier: Verifier, config: AdaptiveLimit, time_limit_s: float) -> Verifier:
    """Return a verifier with adaptive limits.

    Args:
        verifier: A verifier whose functions run in an `AdaptivePool`.
        config: The settings of the limits.
        time_limit_s: The configured limit, which is the maximum of the adaptive limit.
    """
    limits = AdaptiveLimits(config.min_cpu_s, time_limit_s, config.factor, min_right=config.min_right)

    async def judge(rollout: Rollout) -> Judgement:
        domain = rollout.prompt.domain
        key = rollout.prompt.uid if config.scope == "prompt" else domain
        warm_s = limits.compute_cpu_limit_s(key, _WARM)
        first_s = warm_s + limits.compute_cpu_limit_s(domain, _FIRST)
        adapted = [limit_s if limit_s < time_limit_s else None for limit_s in (warm_s, first_s)]
        is_audit = _hash_to_unit_interval(rollout.text) < config.audit_share
        call = _Call(limits_s=(None, None) if is_audit else (adapted[_WARM], adapted[_FIRST]))
        token = _current_call.set(call)
        try:
            judgement = await verifier.judge(rollout)
        except CpuTimeoutError:
            correct = False if verifier.decides_correctness else None
            return Judgement(value=0.0, verdict=TIMEOUT, correct=correct, parts={"cut_early": 1.0})
        finally:
            _current_call.reset(token)
        parts = {**judgement.parts, "cut_early": 0.0}
        if call.cpu_s is None:
            return replace(judgement, parts=parts)
        case = _FIRST if call.is_first else _WARM
        is_right = judgement.value >= config.right_at if judgement.correct is None else judgement.correct
        limit_s = adapted[case]
        if is_audit and limit_s is not None:
            parts["right_over_limit"] = float(is_right and call.cpu_s > limit_s)
        if is_right:
            limits.record_pass(domain if call.is_first else key, case, call.cpu_s)
        return replace(judgement, parts=parts)

    return replace(verifier, judge=judge, state=limits.state, restore=limits.restore)


def _hash_to_unit_interval(text: str) -> float:
    """Return a pseudo-random number from 0 to 1 that depends only on the text."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
