"""Tools for environments in any host: built-in tools run in the controller's process, user-defined tools in a worker.

    episode ─► ToolEnv ─┬─ calls in the reply ─► tools
                        └─ no call ────────────► the environment, in its host

A search index is therefore loaded only once, and environments on servers or in sandboxes can also have tools.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roll.envs.timing import report_activity
from roll.envs.tools.base import Tool, ToolSource
from roll.envs.tools.build import SANDBOXED_TOOLS, build_tools, get_tool_name
from roll.envs.tools.environment import ToolEnv
from roll.envs.tools.sandboxes import SandboxLease, SandboxOptions
from roll.envs.tools.user_tools import UserTools
from roll.errors import InfraError, UnscorableError, UserError
from roll.protocols import WorkerPool
from roll_sandbox import Limits

__all__ = ["HostedToolEnv", "ToolBuilder"]


@dataclass(eq=False)
class ToolBuilder:
    """Builds the tools of episodes.

    Args:
        pool: The pool for user-defined tools; `None` runs user-defined tools in this process.
        sandbox: Options of tools that run programs: `runtime`, `trust_programs`, `image`.
    """

    pool: WorkerPool | None = None
    sandbox: Mapping[str, Any] = field(default_factory=dict)
    _lease: SandboxLease | None = field(init=False, default=None)

    async def add_tools(self, env: Any, name: str, options: Mapping[str, Any]) -> HostedToolEnv:
        """Add tools to an environment, and return the result.

        Args:
            env: The environment of one episode.
            name: The environment's name, for messages.
            options: The tools and their options, as arguments of `with_tools`.

        Raises:
            ConfigError: A tool does not exist, or rejects its options.
            SandboxUnavailableError: A tool runs programs, and this machine cannot isolate them.
        """
        arguments = dict(options)
        limit_s = float(arguments.get("call_time_limit_s", 120.0))
        entries = [self._add_sandbox_options(entry) for entry in arguments.pop("tools")]
        if any(get_tool_name(entry) in SANDBOXED_TOOLS for entry in entries):
            if self._lease is None:  # held until the end, so that no step has to start sandboxes again
                self._lease = SandboxLease(SandboxOptions(**self.sandbox), Limits())
            await self._lease.acquire()
        return HostedToolEnv(ToolEnv(env, [self._build_tool(entry, limit_s) for entry in entries], **arguments), name)

    def _add_sandbox_options(self, entry: str | Mapping[str, Any]) -> str | Mapping[str, Any]:
        if get_tool_name(entry) not in SANDBOXED_TOOLS:
            return entry
        return {**self.sandbox, **({"tool": entry} if isinstance(entry, str) else entry)}

    def _build_tool(self, entry: str | Mapping[str, Any], limit_s: float) -> Tool | ToolSource:
        if self.pool is not None and ":" in get_tool_name(entry):
            return UserTools(self.pool, entry, limit_s)
        return build_tools([entry])[0]

    async def close(self) -> None:
        """Release the sandboxes. Calling it twice is safe."""
        lease, self._lease = self._lease, None
        if lease is not None:
            await lease.release()


@dataclass(eq=False)
class HostedToolEnv:
    """A `HostedEnv` with tools."""

    tools: ToolEnv
    name: str
    failed: bool = field(init=False, default=False)
    """True if a tool or the inner environment has failed."""

    async def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """See `HostedEnv`."""
        return await self._call("open", self.tools.reset(seed))

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """See `HostedEnv`."""
        return await self._call("work", self.tools.step(action))

    async def _call(self, action: str, result: Any) -> Any:
        try:
            with report_activity():
                return await result if inspect.isawaitable(result) else result
        except (UnscorableError, UserError, InfraError):
            self.failed = True
            raise
        except Exception as error:
            self.failed = True
            label = f"environment '{self.name}': its tools failed to {action}"
            raise InfraError(f"{label}: {error!r}") from error

    async def check(self) -> None:
        """See `ToolEnv.check_tools`."""
        await self._call("work", self.tools.check_tools())

    def get_counts(self) -> dict[str, int]:
        """Return the tool counts of the episode, such as `tool_use_counter`: see `ToolEnv`."""
        return self.tools.counts

    async def close(self) -> None:
        """Close the tools. The environment is closed by the code that opened it."""
        await self.tools.close_tools()
