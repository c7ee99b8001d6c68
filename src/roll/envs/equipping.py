"""Tools around an environment, wherever it runs: shipped tools in the controller's process, a user's own in a worker.

    episode ─► ToolEnv ─┬─ calls in the reply ─► tools
                        └─ no call ────────────► the environment, in its host

So a search index is loaded once, the controller starts the sandboxes, and an environment on a server or in a sandbox
has tools like any other.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roll.envs.timing import acting
from roll.envs.tools.base import Tool, ToolSource
from roll.envs.tools.build import SANDBOXED, build_tools, name_of
from roll.envs.tools.environment import ToolEnv
from roll.envs.tools.own_process import OwnTools
from roll.envs.tools.sandboxes import SandboxLease, SandboxOptions
from roll.errors import InfraError, UnscorableError, UserError
from roll.protocols import WorkerPool
from roll_sandbox import Limits

__all__ = ["Equipment", "EquippedEnv"]


@dataclass(eq=False)
class Equipment:
    """Builds the tools of episodes.

    Args:
        pool: The pool for a user's own tools; without a pool, they run in this process.
        sandbox: Options of tools that run programs: `runtime`, `trust_programs`, `image`.
    """

    pool: WorkerPool | None = None
    sandbox: Mapping[str, Any] = field(default_factory=dict)
    _lease: SandboxLease | None = field(init=False, default=None)

    async def around(self, env: Any, name: str, given: Mapping[str, Any]) -> EquippedEnv:
        """Return the environment with tools.

        Args:
            env: The environment of one episode.
            name: The environment's name, for messages.
            given: Arguments of `with_tools`.

        Raises:
            ConfigError: A tool does not exist, or rejects its options.
            SandboxUnavailableError: A tool runs programs, and this machine cannot isolate them.
        """
        arguments = dict(given)
        limit_s = float(arguments.get("call_time_limit_s", 120.0))
        entries = [self._with_sandbox(entry) for entry in arguments.pop("tools")]
        if any(name_of(entry) in SANDBOXED for entry in entries):
            if self._lease is None:  # held until the end, so that no step has to start sandboxes again
                self._lease = SandboxLease(SandboxOptions(**self.sandbox), Limits())
            await self._lease.manager()
        return EquippedEnv(ToolEnv(env, [self._made(entry, limit_s) for entry in entries], **arguments), name)

    def _with_sandbox(self, entry: str | Mapping[str, Any]) -> str | Mapping[str, Any]:
        if name_of(entry) not in SANDBOXED:
            return entry
        return {**self.sandbox, **({"tool": entry} if isinstance(entry, str) else entry)}

    def _made(self, entry: str | Mapping[str, Any], limit_s: float) -> Tool | ToolSource:
        if self.pool is not None and ":" in name_of(entry):
            return OwnTools(self.pool, entry, limit_s)
        return build_tools([entry])[0]

    async def close(self) -> None:
        """Release the sandboxes; may be called twice."""
        lease, self._lease = self._lease, None
        if lease is not None:
            await lease.release()


@dataclass(eq=False)
class EquippedEnv:
    """A `HostedEnv` with tools."""

    tools: ToolEnv
    name: str
    failed: bool = field(init=False, default=False)
    """Whether a tool, or the inner environment, failed."""

    async def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """See `HostedEnv`."""
        return await self._call("open", self.tools.reset(seed))

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """See `HostedEnv`."""
        return await self._call("work", self.tools.step(action))

    async def _call(self, what: str, given: Any) -> Any:
        try:
            with acting():
                return await given if inspect.isawaitable(given) else given
        except (UnscorableError, UserError, InfraError):
            self.failed = True
            raise
        except Exception as error:
            self.failed = True
            place = f"environment '{self.name}': its tools do not {what}"
            raise InfraError(f"{place}: {type(error).__name__}: {error}") from error

    async def check(self) -> None:
        """See `ToolEnv.check_tools`."""
        await self._call("work", self.tools.check_tools())

    def counts(self) -> dict[str, int]:
        """Return the episode's tool counts: `tool_use_counter` and the others of `ToolEnv`."""
        return self.tools.counts

    async def close(self) -> None:
        """Close the tools; the opener of the environment closes the environment."""
        await self.tools.close_tools()
