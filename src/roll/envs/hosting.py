"""Hosts of environments: this process, worker processes, a sandbox, or HTTP, all behind one interface.

    async with hosts.open(settings) as env:        # a separate instance, which is always closed at the end
        observation, info = await env.reset(seed)
        observation, reward, terminated, truncated, info = await env.step(action)

Invariants: a call never blocks the event loop, unless an environment was configured to run on it; any failure of an
environment (it raises, hangs, dies, violates the protocol) raises an `InfraError` for its episode only, and names the
call and the location; an environment is closed even if its episode is canceled, and abandoned if it cannot be closed in
time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

from roll.envs.base import ResetResult, StepResult, await_if_needed
from roll.envs.hosted_tools import HostedToolEnv, ToolBuilder
from roll.envs.images import has_images
from roll.envs.protocol import ProtocolError
from roll.envs.registration import ENVS, make
from roll.envs.sanitize import check_media_kinds, sanitize_reset, sanitize_step
from roll.envs.timing import report_activity
from roll.envs.wrappers import wrap
from roll.errors import ConfigError, InfraError, UnscorableError, UserError
from roll.running import run_in_thread
from roll.types import EnvironmentHost, EnvironmentSettings, list_media

__all__ = ["EnvHosts", "Host", "HostedEnv", "LoopHost", "ResultStorage", "build", "get_default_host"]

logger = logging.getLogger(__name__)

CLOSE_TIME_LIMIT_S = 10.0

T = TypeVar("T")


class HostedEnv(Protocol):
    """Interface of an episode's environment, which may run in this process, in another process, or on a server."""

    async def reset(self, seed: int | None = None) -> ResetResult:
        """Begin the episode.

        Raises:
            InfraError: The environment failed.
        """
        ...

    async def step(self, action: str) -> StepResult:
        """Take an action.

        Raises:
            InfraError: The environment failed.
        """
        ...

    async def close(self) -> None:
        """Close the environment; it must close even if this call is canceled at its first `await`."""
        ...


class Host(Protocol):
    """Interface of a host, which runs environments. A host may raise any exception: `EnvHosts` converts it."""

    async def start(self, settings: EnvironmentSettings) -> HostedEnv:
        """Start a new instance of the environment that `settings` describes."""
        ...

    async def close(self) -> None:
        """End all environments of this host and release its resources. Calling it twice is safe."""
        ...


class ResultStorage(Protocol):
    """Stores the images of observations; `roll.envs.image_storage` implements it."""

    async def store_result(self, result: Any, environment: str) -> Any:
        """Return the result of `reset` or `step` with its images stored.

        Raises:
            InfraError: An image cannot be decoded, or the model's processor rejects it.
        """
        ...


def get_default_host(name: str) -> EnvironmentHost:
    """Return the default host of an environment: `loop` if it is built in, `pool` if it is user-defined."""
    return "loop" if name in ENVS else "pool"


@dataclass(eq=False)
class EnvHosts:
    """Opens environments in the hosts that the environments' settings select.

    User-defined environments run in the pool by default; without a pool, they run on the event loop.
    """

    hosts: Mapping[str, Host] = field(default_factory=dict)
    """Hosts by name, in addition to `loop`."""
    tool_builder: ToolBuilder = field(default_factory=ToolBuilder)
    """Builds the tools of environments."""
    images: ResultStorage | None = None
    """Stores the images of observations; `None` if no model reads them."""
    counts: Counter[tuple[str, str]] = field(init=False, default_factory=Counter)
    """Counts by environment and type: `calls`, `seconds`, `failures` (of which `time_limits`), since the last
    `collect_metrics`.
    """
    num_open: int = field(init=False, default=0)
    """Number of open environments."""

    @asynccontextmanager
    async def open(self, settings: EnvironmentSettings) -> AsyncIterator[HostedEnv]:
        """Start a new environment, yield it, and close it at the end; its failures are raised as `InfraError`.

        Raises:
            InfraError: The environment cannot be started.
            ConfigError: The environment does not exist, or requires a host that this run does not have.
            DataError: The environment rejects its options.
        """
        host = self._find_host(settings)
        env = _GuardedEnv(settings=settings, hosts=self)
        tools: HostedToolEnv | None = None
        self.num_open += 1
        try:
            await env.start(host)
            if settings.tools:
                tools = await self.tool_builder.add_tools(env, settings.name, settings.tools)
            yield tools or env
        finally:
            self.num_open -= 1
            try:
                if tools is not None:
                    self._count_tool_uses(settings.name, tools, failed=tools.failed and not env.failed)
                    await _close(tools, f"the tools of environment '{settings.name}'")
            finally:  # even if closing the tools was canceled
                await env.close()

    def _count_tool_uses(self, name: str, tools: HostedToolEnv, failed: bool) -> None:
        counts = tools.get_counts()
        self.counts[name, "failures"] += failed
        self.counts[name, "tool_episodes"] += 1
        self.counts[name, "tool_uses"] += counts["tool_use_counter"]
        self.counts[name, "tool_errors"] += counts["tool_error_counter"] + counts["tool_format_error_counter"]

    async def store_images(self, result: T, environment: str) -> T:
        """Return the result of `reset` or `step` with its images in the run's media store.

        Args:
            result: The result of an environment that runs in one of the hosts.
            environment: The environment's name.

        Raises:
            DataError: The model cannot read a part of the observation.
            InfraError: An image cannot be decoded, or the model's processor rejects it.
        """
        observation, *_, info = cast(tuple[Any, ...], result)
        contents = [observation, *(one["content"] for one in info.get("tool_results") or ())]
        if not any(map(list_media, contents)):
            return result
        for content in contents:
            check_media_kinds(content, environment, reads_images=self.images is not None)
        assert self.images is not None, "`check_media_kinds` refuses images without it"
        try:
            return await self.images.store_result(result, environment)
        except InfraError:
            self.counts[environment, "failures"] += 1
            raise

    def _find_host(self, settings: EnvironmentSettings) -> Host:
        name = settings.host or get_default_host(settings.name)
        if name == "loop" or (settings.host is None and name not in self.hosts):
            return _LOOP_HOST
        if name not in self.hosts:
            raise ConfigError(
                f"environment '{settings.name}' requires the host '{name}', but this run does not have it. Available "
                f"hosts: {', '.join(['loop', *self.hosts])}."
            )
        return self.hosts[name]

    def collect_metrics(self) -> dict[str, float]:
        """Return metrics of each environment since the last call of this method, and reset them.

        The metrics are the mean seconds per call and per start, the numbers of failures and timeouts, the tool calls
        per episode, and the fraction of failed tool calls.

        Starts are counted separately: starting a process and importing the class takes seconds, and calls take
        microseconds, so a joint mean would be dominated by starts.
        """
        metrics: dict[str, float] = {}
        for name in sorted({name for name, _ in self.counts}):
            calls, failures = self.counts[name, "calls"], self.counts[name, "failures"]
            short = name.rpartition("/")[2]
            if calls:
                metrics[f"env/{short}/call_s"] = self.counts[name, "seconds"] / calls
            if starts := self.counts[name, "starts"]:
                metrics[f"env/{short}/start_s"] = self.counts[name, "start_seconds"] / starts
            metrics[f"env/{short}/failures"] = float(failures)
            metrics[f"env/{short}/time_limits"] = float(self.counts[name, "time_limits"])
            if episodes := self.counts[name, "tool_episodes"]:
                uses = self.counts[name, "tool_uses"]
                metrics[f"env/{short}/tool_uses"] = uses / episodes
                metrics[f"env/{short}/tool_error_share"] = self.counts[name, "tool_errors"] / max(uses, 1)
        self.counts.clear()
        return metrics

    async def close(self) -> None:
        """Close all hosts."""
        try:
            await self.tool_builder.close()
        finally:
            await asyncio.gather(*(host.close() for host in self.hosts.values()))


@dataclass(eq=False)
class _GuardedEnv:
    """Adds timeouts, protocol checks and uniform errors to an environment of any host."""

    settings: EnvironmentSettings
    hosts: EnvHosts
    failed: bool = field(init=False, default=False)
    _env: HostedEnv | None = field(init=False, default=None)

    async def start(self, host: Host) -> None:
        self._env = await self._call("start", self.settings.reset_time_limit_s, lambda: host.start(self.settings))

    async def reset(self, seed: int | None = None) -> ResetResult:
        env = self._require_open()
        result = await self._call("reset", self.settings.reset_time_limit_s, lambda: env.reset(seed))
        return await self._sanitize_and_store("reset", result, sanitize_reset)

    async def step(self, action: str) -> StepResult:
        env = self._require_open()
        result = await self._call("step", self.settings.step_time_limit_s, lambda: env.step(action))
        return await self._sanitize_and_store("step", result, sanitize_step)

    async def close(self) -> None:
        """Close the environment, without raising. Calling it twice is safe."""
        env, self._env = self._env, None
        if env is not None:
            await _close(env, f"environment '{self.settings.name}'")

    def _require_open(self) -> HostedEnv:
        if self._env is None:
            raise InfraError(f"environment '{self.settings.name}' is closed")
        return self._env

    async def _call(self, action: str, limit_s: float, call: Callable[[], Awaitable[Any]]) -> Any:
        """Await a call with a timeout and return its result.

        A timeout or an exception is raised as `InfraError`, except errors that a retry cannot fix.
        """
        name, loop = self.settings.name, asyncio.get_running_loop()
        begun, scope = loop.time(), asyncio.timeout(limit_s)
        try:
            with report_activity():
                async with scope:
                    return await call()
        # These keep their types: repeating the rollout cannot help.
        except (UnscorableError, UserError):
            self._count("failures")
            raise
        except Exception as error:
            self._count("failures")
            # A `TimeoutError` that the environment itself raised is an ordinary failure.
            if isinstance(error, TimeoutError) and scope.expired():
                self._count("time_limits")
                raise InfraError(
                    f"environment '{name}': its {action} exceeded the time limit of {limit_s:g} s"
                ) from None
            raise InfraError(f"environment '{name}': its {action} failed: {_describe_error(error)}") from error
        finally:
            is_start = action == "start"
            self._count("starts" if is_start else "calls")
            self._count("start_seconds" if is_start else "seconds", loop.time() - begun)

    def _count(self, kind: str, number: float = 1) -> None:
        self.failed |= kind == "failures"
        self.hosts.counts[self.settings.name, kind] += number  # type: ignore[assignment]

    async def _sanitize_and_store(self, action: str, result: Any, sanitize: Callable[[Any], T]) -> T:
        """Return `sanitize(result)`; encode images in a thread, because an image takes milliseconds."""
        if not has_images(result):
            return self._sanitize(action, result, sanitize)
        return await run_in_thread(self._sanitize, action, result, sanitize)

    def _sanitize(self, action: str, result: Any, sanitize: Callable[[Any], T]) -> T:
        """Return `sanitize(result)`; raise any exception, such as one from a user's object, as an `InfraError`."""
        name = self.settings.name
        try:
            return sanitize(result)
        except ProtocolError as error:
            self._count("failures")
            raise InfraError(f"environment '{name}': {error}") from None
        except Exception as error:
            self._count("failures")
            raise InfraError(
                f"environment '{name}': the result of its {action} cannot be read: {_describe_error(error)}"
            ) from error


async def _close(env: HostedEnv, label: str) -> None:
    """Close an environment with a timeout; failures are only logged."""
    try:
        async with asyncio.timeout(CLOSE_TIME_LIMIT_S):
            await env.close()
    except Exception as error:
        logger.warning("%s: cannot be closed: %s: %s", label, type(error).__name__, error)


def _describe_error(error: BaseException) -> str:
    """Return the exception's type, message and, if known, location."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ())[:1])
    return f"{type(error).__name__}: {error}{notes}"


def build(settings: EnvironmentSettings) -> Any:
    """Build the environment with its wrappers, in this process.

    Raises:
        ConfigError: The environment or a wrapper does not exist.
        DataError: The environment or a wrapper rejects its options.
    """
    env = make(settings.name, settings.options)
    for name, options in settings.wrappers:
        env = wrap(env, name, options)
    return env


class LoopHost:
    """Runs environments on this process's event loop.

    Suitable for asynchronous environments, and for those whose calls take microseconds.
    """

    async def start(self, settings: EnvironmentSettings) -> HostedEnv:
        """See `Host`."""
        return _LoopEnv(build(settings))

    async def close(self) -> None:
        """See `Host`."""


_LOOP_HOST = LoopHost()


class _LoopEnv:
    def __init__(self, env: Any) -> None:
        self._env = env

    async def reset(self, seed: int | None = None) -> ResetResult:
        return await await_if_needed(self._env.reset(seed))

    async def step(self, action: str) -> StepResult:
        return await await_if_needed(self._env.step(action))

    async def close(self) -> None:
        close = getattr(self._env, "close", None)
        if close is not None:
            await await_if_needed(close())
