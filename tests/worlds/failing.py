"""Where environments and tools are: processes, MCP servers and sandboxes that fail at any moment, without a real one.

Each counts what it opened and what was closed; production code drives them, under virtual time.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import xxhash

from roll.envs.hosting import build
from roll.errors import WorkerDiedError
from roll.types import EnvironmentSettings
from roll_sandbox import ExecutionResult, Outcome, SandboxError

__all__ = ["Chance", "FailingPool", "failing_servers"]


class Chance:
    """What becomes of a call: it takes its time, and then works, or not."""

    def __init__(self, seed: int, share: float) -> None:
        self._random, self._share = random.Random(f"chance/{seed}"), share
        self.open: Counter[str] = Counter()
        """By kind, what was opened and is not closed."""
        self.opened: Counter[str] = Counter()

    def of(self, *choices: str) -> str:
        return self._random.choice(choices)

    def under(self, share: float) -> bool:
        return self._random.random() < share

    async def call(self, *faults: str) -> str:
        """`works`, or what the caller has to do about a fault; the others happen here."""
        await asyncio.sleep(self._random.choice([0.0, 0.0, 0.1, 1.0, 4.0]))
        if not self.under(self._share):
            return "works"
        match fault := self._random.choice(faults):
            case "raise":
                raise KeyError("board")
            case "hang":
                await asyncio.Event().wait()
            case "slow":
                await asyncio.sleep(6.0)
                return "works"
        return fault

    def begin(self, kind: str) -> None:
        self.open[kind] += 1
        self.opened[kind] += 1

    def end(self, kind: str) -> None:
        self.open[kind] -= 1


class FailingPool:
    """A `WorkerPool` that keeps objects in processes, which die, hang and fail to start."""

    def __init__(self, chance: Chance) -> None:
        self.chance = chance

    async def create_actor(self, factory: Callable[..., Any], *args: Any, prepare: Any) -> _Kept:
        kept = _Kept(self.chance, Game(args[0]) if factory is build else OwnTools())
        try:
            if await self.chance.call("raise", "die", "hang", "slow") == "die":
                raise WorkerDiedError("signal SIGSEGV, as it started")
        except BaseException:
            kept.end()
            raise
        return kept


class _Kept:
    def __init__(self, chance: Chance, thing: Any) -> None:
        chance.begin("processes")
        self._chance, self._thing, self._ended = chance, thing, False
        self._busy = False

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._chance.end("processes")

    async def call(self, method: str, *args: Any) -> Any:
        if self._ended:
            raise WorkerDiedError("the process was ended")
        assert not self._busy, "two callers ask the same process at once"
        self._busy = True
        try:
            fault = await self._chance.call("raise", "die", "hang", "slow", "nonsense")
        except asyncio.CancelledError:
            self.end()
            raise
        finally:
            self._busy = False
        if fault == "die":
            self.end()
            raise WorkerDiedError("signal SIGSEGV")
        value = getattr(self._thing, method)(*args)
        return ("not", "as", "it should") if fault == "nonsense" and not isinstance(self._thing, OwnTools) else value

    async def close(self) -> None:
        self.end()
        if await self._chance.call("die", "hang", "slow") == "die":
            raise WorkerDiedError("it is gone already")


class Game:
    """What follows depends on the seed and the actions alone."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        self._said, self._turn, self._uses = "", 0, 0
        self._end = 2 + int(settings.options["n"]) % 4

    def reset(self, seed: int | None) -> Any:
        assert not self._said, "two rollouts share an environment"
        self._said = f"seed {seed}"
        return f"Obs {self._hash() % 100}", {"state": self._said}

    def step(self, action: str) -> Any:
        self._said, self._turn = f"{self._said}/{action}", self._turn + 1
        long = "x" * 150 if self._hash() % 7 == 0 else ""
        ended = self._turn == self._end
        return f"Obs {self._hash() % 100}{long}", 0.25, ended and self._end > 3, ended, {"state": f"{self._hash()}"}

    def _hash(self) -> int:
        return xxhash.xxh3_64_intdigest(self._said.encode())


class OwnTools:
    """The inside of a user's tool process."""

    def open(self) -> Any:
        schema = {"type": "object", "properties": {"at": {"type": "string"}}}
        return [("look", "Looks.", schema)]

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        return (arguments["at"] != "3", f"seen {arguments}")


# ---- MCP


class _Client:
    """In place of the SDK's; it has to be entered and left by one task."""

    def __init__(self, chance: Chance) -> None:
        self._chance, self._task, self._dead = chance, None, False

    async def __aenter__(self) -> _Client:
        self._task = asyncio.current_task()
        self._chance.begin("servers")
        try:
            if await self._chance.call("raise", "die", "hang", "slow") == "die":
                raise ConnectionError("the server ended")
        except BaseException:
            self._chance.end("servers")
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        assert asyncio.current_task() is self._task, "another task leaves the client"
        self._chance.end("servers")
        if await self._chance.call("raise", "die", "hang", "slow") == "die":
            raise ConnectionError("the server is gone")

    async def list_tools(self, cursor: str | None = None) -> Any:
        await self._met()
        schema = {"type": "object", "properties": {"at": {"type": "string"}}}
        return SimpleNamespace(tools=[SimpleNamespace(name="find", description="Finds.", input_schema=schema)])

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Any:
        await self._met()
        part = SimpleNamespace(type="text", text=f"found {dict(arguments)}")
        return SimpleNamespace(content=[part], is_error=arguments.get("at") == "4")

    async def _met(self) -> None:
        if self._dead or await self._chance.call("raise", "die", "hang", "slow") == "die":
            self._dead = True
            raise ConnectionError("the server ended")


# ---- sandboxes


class _Sandboxes:
    """In place of `SandboxManager`."""

    def __init__(self, chance: Chance) -> None:
        self._chance, self._open = chance, False

    async def start(self) -> None:
        assert not self._open, "it is started twice"
        if await self._chance.call("die", "slow") == "die":
            raise SandboxError("no room")
        self._open = True
        self._chance.begin("sandboxes")

    async def execute(self, program: Any, *, spec: Any) -> ExecutionResult:
        assert self._open, "its manager is closed"
        if await self._chance.call("die", "raise", "slow", "hang") == "die":
            raise SandboxError("it broke")
        outcome = Outcome.EXITED
        return ExecutionResult(outcome=outcome, exit_code=0, stdout=b"printed", stderr=b"", wall_s=0.1)

    async def close(self) -> None:
        if self._open:
            self._open = False
            self._chance.end("sandboxes")
        await self._chance.call("slow")


@contextmanager
def failing_servers(chance: Callable[[], Chance]) -> Iterator[None]:
    """MCP servers and sandboxes inside are these."""
    sdk: Any = ModuleType("mcp")
    sdk.Client = lambda server: _Client(chance())
    sdk.StdioServerParameters = dict
    stdio: Any = ModuleType("mcp.client.stdio")
    stdio.stdio_client = lambda parameters: parameters
    modules = {"mcp": sdk, "mcp.client": ModuleType("mcp.client"), "mcp.client.stdio": stdio}
    before = {name: sys.modules.pop(name) for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        with mock.patch("roll.envs.tools.sandboxes.build_manager", lambda *_, **__: _Sandboxes(chance())):
            yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(before)
