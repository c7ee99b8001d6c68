"""Hosts of environments: this process, worker processes, a sandbox, or HTTP, all behind one interface.

    async with hosts.open(settings) as env:        # a separate instance, closed however the episode ends
        observation, info = await env.reset(seed)
        observation, reward, terminated, truncated, info = await env.step(action)

Invariants: a call never blocks the event loop, unless an environment was configured to run on it; any failure of an
environment (it raises, hangs, dies, breaks the protocol) is an `InfraError` of its own episode, with call and place; an
environment is closed even if its episode is canceled, and abandoned if it cannot be closed in time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from roll.envs.base import Started, Stepped, awaited
from roll.envs.equipping import Equipment, EquippedEnv
from roll.envs.protocol import ProtocolError
from roll.envs.registration import ENVS, make
from roll.envs.sanitize import sanitize_reset, sanitize_step
from roll.envs.timing import acting
from roll.envs.wrappers import wrapped
from roll.errors import ConfigError, InfraError, UnscorableError, UserError
from roll.types import EnvironmentHost, EnvironmentSettings

__all__ = ["EnvHosts", "Host", "HostedEnv", "LoopHost", "build", "default_host"]

logger = logging.getLogger(__name__)

CLOSE_TIME_LIMIT_S = 10.0

T = TypeVar("T")


class HostedEnv(Protocol):
    """One episode's environment, in any host."""

    async def reset(self, seed: int | None = None) -> Started:
        """Begin the episode.

        Raises:
            InfraError: The environment failed.
        """
        ...

    async def step(self, action: str) -> Stepped:
        """Take an action.

        Raises:
            InfraError: The environment failed.
        """
        ...

    async def close(self) -> None:
        """Close the environment, even if this call is canceled at its first wait. `EnvHosts` calls it."""
        ...


class Host(Protocol):
    """A place where environments run. They may raise anything: `EnvHosts` converts the exceptions."""

    async def start(self, settings: EnvironmentSettings) -> HostedEnv:
        """Start a new instance."""
        ...

    async def close(self) -> None:
        """End everything that runs in this host; may be called twice."""
        ...


def default_host(name: str) -> EnvironmentHost:
    """Return the host of an environment whose settings name none: `loop` for a shipped one, `pool` for a user's own."""
    return "loop" if name in ENVS else "pool"


@dataclass(eq=False)
class EnvHosts:
    """Opens environments in the hosts that their settings name.

    If a user's own class runs in the pool by default and there is no pool, it runs on the event loop.
    """

    hosts: Mapping[str, Host] = field(default_factory=dict)
    """Hosts by name, in addition to `loop`."""
    equipment: Equipment = field(default_factory=Equipment)
    """Builds the tools."""
    counts: Counter[tuple[str, str]] = field(init=False, default_factory=Counter)
    """Counts by environment and kind: `calls`, `seconds`, `failures` (of which `time_limits`), since the last
    `metrics`."""
    num_open: int = field(init=False, default=0)
    """Number of open environments."""

    @asynccontextmanager
    async def open(self, settings: EnvironmentSettings) -> AsyncIterator[HostedEnv]:
        """Run the body with a new environment, whose every failure is raised as an `InfraError`.

        Raises:
            InfraError: The environment cannot be started.
            ConfigError: The environment does not exist, or this run does not have its host.
            DataError: The environment rejects its options.
        """
        host = self._host(settings)
        env = _Guarded(settings=settings, hosts=self)
        tools: EquippedEnv | None = None
        self.num_open += 1
        try:
            await env.start(host)
            if settings.tools:
                tools = await self.equipment.around(env, settings.name, settings.tools)
            yield tools or env
        finally:
            self.num_open -= 1
            try:
                if tools is not None:
                    self._note_uses(settings.name, tools, failed=tools.failed and not env.failed)
                    await _closed(tools, f"the tools of environment '{settings.name}'")
            finally:
                await env.close()

    def _note_uses(self, name: str, tools: EquippedEnv, failed: bool) -> None:
        counts = tools.counts()
        self.counts[name, "failures"] += failed
        self.counts[name, "tool_episodes"] += 1
        self.counts[name, "tool_uses"] += counts["tool_use_counter"]
        self.counts[name, "tool_errors"] += counts["tool_error_counter"] + counts["tool_format_error_counter"]

    def _host(self, settings: EnvironmentSettings) -> Host:
        name = settings.host or default_host(settings.name)
        if name == "loop" or (settings.host is None and name not in self.hosts):
            return _LOOP
        if name not in self.hosts:
            raise ConfigError(
                f"environment '{settings.name}' asks for the host '{name}', which this run does not have: it has "
                f"{', '.join(['loop', *self.hosts])}."
            )
        return self.hosts[name]

    def metrics(self) -> dict[str, float]:
        """Return the seconds per call and per start, and the failures, of each environment since the last call.

        Starts are counted separately: starting a process and importing the class takes seconds, and calls take
        microseconds, so a common mean would show only the starts.
        """
        found: dict[str, float] = {}
        for name in sorted({name for name, _ in self.counts}):
            calls, failures = self.counts[name, "calls"], self.counts[name, "failures"]
            short = name.rpartition("/")[2]
            if calls:
                found[f"env/{short}/call_s"] = self.counts[name, "seconds"] / calls
            if starts := self.counts[name, "starts"]:
                found[f"env/{short}/start_s"] = self.counts[name, "start_seconds"] / starts
            found[f"env/{short}/failures"] = float(failures)
            found[f"env/{short}/time_limits"] = float(self.counts[name, "time_limits"])
            if episodes := self.counts[name, "tool_episodes"]:
                uses = self.counts[name, "tool_uses"]
                found[f"env/{short}/tool_uses"] = uses / episodes
                found[f"env/{short}/tool_error_share"] = self.counts[name, "tool_errors"] / max(uses, 1)
        self.counts.clear()
        return found

    async def close(self) -> None:
        """Close all hosts."""
        try:
            await self.equipment.close()
        finally:
            await asyncio.gather(*(host.close() for host in self.hosts.values()))


@dataclass(eq=False)
class _Guarded:
    """Adds timeouts, protocol checks, and uniform errors to an environment of any host."""

    settings: EnvironmentSettings
    hosts: EnvHosts
    failed: bool = field(init=False, default=False)
    _env: HostedEnv | None = field(init=False, default=None)

    async def start(self, host: Host) -> None:
        self._env = await self._call("start", self.settings.reset_time_limit_s, lambda: host.start(self.settings))

    async def reset(self, seed: int | None = None) -> Started:
        env = self._opened()
        found = await self._call("reset", self.settings.reset_time_limit_s, lambda: env.reset(seed))
        return self._sanitize("reset", found, sanitize_reset)

    async def step(self, action: str) -> Stepped:
        env = self._opened()
        found = await self._call("step", self.settings.step_time_limit_s, lambda: env.step(action))
        return self._sanitize("step", found, sanitize_step)

    async def close(self) -> None:
        """Close the environment, without raising; may be called twice."""
        env, self._env = self._env, None
        if env is not None:
            await _closed(env, f"environment '{self.settings.name}'")

    def _opened(self) -> HostedEnv:
        if self._env is None:
            raise InfraError(f"environment '{self.settings.name}' is closed")
        return self._env

    async def _call(self, what: str, limit_s: float, call: Callable[[], Awaitable[Any]]) -> Any:
        """Run a call with a timeout; its exceptions are infrastructure failures of this rollout only."""
        name, loop = self.settings.name, asyncio.get_running_loop()
        begun, scope = loop.time(), asyncio.timeout(limit_s)
        try:
            with acting():
                async with scope:
                    return await call()
        except (UnscorableError, UserError):
            self._count("failures")
            raise
        except Exception as error:
            self._count("failures")
            if isinstance(error, TimeoutError) and scope.expired():
                self._count("time_limits")
                raise InfraError(f"environment '{name}': its {what} took longer than {limit_s:g} s") from None
            raise InfraError(f"environment '{name}': its {what} failed: {_described(error)}") from error
        finally:
            is_start = what == "start"
            self._count("starts" if is_start else "calls")
            self._count("start_seconds" if is_start else "seconds", loop.time() - begun)

    def _count(self, kind: str, number: float = 1) -> None:
        self.failed |= kind == "failures"
        self.hosts.counts[self.settings.name, kind] += number  # type: ignore[assignment]

    def _sanitize(self, what: str, found: Any, sanitize: Callable[[Any], T]) -> T:
        """Convert a returned value to plain values; objects of the user's classes in it may raise any exception."""
        name = self.settings.name
        try:
            return sanitize(found)
        except ProtocolError as error:
            self._count("failures")
            raise InfraError(f"environment '{name}': {error}") from None
        except Exception as error:
            self._count("failures")
            raise InfraError(f"environment '{name}': what its {what} returned failed: {_described(error)}") from error


async def _closed(opened: HostedEnv, what: str) -> None:
    """Close an environment with a timeout; failures are only logged."""
    try:
        async with asyncio.timeout(CLOSE_TIME_LIMIT_S):
            await opened.close()
    except Exception as error:
        logger.warning("%s: it does not close: %s: %s", what, type(error).__name__, error)


def _described(error: BaseException) -> str:
    """Return the exception's type, message and, if known, place."""
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
        env = wrapped(env, name, options)
    return env


class LoopHost:
    """This process's event loop: for environments that take microseconds, or whose methods are asynchronous."""

    async def start(self, settings: EnvironmentSettings) -> HostedEnv:
        """See `Host`."""
        return _InLoop(build(settings))

    async def close(self) -> None:
        """See `Host`."""


_LOOP = LoopHost()


class _InLoop:
    def __init__(self, env: Any) -> None:
        self._env = env

    async def reset(self, seed: int | None = None) -> Started:
        return await awaited(self._env.reset(seed))

    async def step(self, action: str) -> Stepped:
        return await awaited(self._env.step(action))

    async def close(self) -> None:
        close = getattr(self._env, "close", None)
        if close is not None:
            await awaited(close())
