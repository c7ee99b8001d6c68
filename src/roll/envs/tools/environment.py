"""Adds tools to any environment.

    action ──► has calls? ──► tools ──► results are the observation; the inner environment is not stepped
                    └─ no ──► the inner environment's step

A reply with calls is a separate turn: its remaining text is not an action of the environment. After `max_tool_uses`
calls, replies go to the environment unchanged.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from roll.envs.base import ResetResult, StepResult, await_if_needed
from roll.envs.tools.base import Tool, ToolCall, ToolResult, ToolSource, describe_tool
from roll.envs.tools.calls import TEMPLATE, get_tool_call_format
from roll.envs.tools.toolbox import Toolbox
from roll.types import Content, TextPart, get_content_key, join_content, list_media

__all__ = ["ToolEnv", "ToolRewards"]

_LAST_USE_NOTE = "\nThat was the last use of a tool: answer now."


@dataclass(frozen=True, kw_only=True)
class ToolRewards:
    """Rewards for tool calls."""

    call: float = 0.0
    """Reward of each call, successful or not."""
    success: float = 0.0
    """Additional reward of each successful call."""
    error: float = 0.0
    """Additional reward of each failed call: invalid arguments, or a program that fails."""
    format: float = 0.0
    """Reward of each malformed call."""


@dataclass
class _Counts:
    uses: int = 0
    successes: int = 0
    errors: int = 0
    malformed: int = 0

    def to_info(self, prefix: str = "") -> dict[str, int]:
        """Return the counts by their keys in `info`, with `prefix`; counts that exist in GEM have GEM's names."""
        return {
            f"{prefix}tool_use_counter": self.uses,
            f"{prefix}tool_success_counter": self.successes,
            f"{prefix}tool_error_counter": self.errors,
            f"{prefix}tool_format_error_counter": self.malformed,
        }


@dataclass
class _Episode:
    counts: _Counts = field(default_factory=_Counts)
    state: str = ""
    """The last `info["state"]` of the environment."""
    digest: Any = field(default_factory=hashlib.blake2b)
    """Digest of all calls and results: episodes with different results are in different states."""

    def copy(self) -> _Episode:
        """Return an independent copy of the episode's state."""
        return _Episode(counts=replace(self.counts), state=self.state, digest=self.digest.copy())


class ToolEnv:
    """An `Env` that adds tools to an inner environment. Its methods return awaitables if the inner environment or a
    tool is asynchronous, and plain results otherwise.

    Args:
        env: Any environment.
        tools: Tools and sources of tools, with distinct names.
        tool_format: Format of tool calls: see `TOOL_CALL_FORMATS`.
        parse_reasoning: Whether to run calls inside the model's reasoning as well.
        max_tool_uses: Maximum number of calls in one episode, including malformed calls.
        rewards: Rewards of calls.
        explain: Whether the first observation lists the tools and explains the call format. Otherwise, the prompt must
            do so. With the format `template`, `info["tools"]` has the tools for the chat template instead.
        max_result_chars: Maximum length of a result; longer results are truncated in the middle.
        call_time_limit_s: See `Toolbox`.
    """

    def __init__(
        self,
        env: Any,
        tools: Sequence[Tool | ToolSource],
        *,
        tool_format: str = "auto",
        parse_reasoning: bool = False,
        max_tool_uses: int = 10,
        rewards: ToolRewards | Mapping[str, float] | None = None,
        explain: bool = True,
        max_result_chars: int = 8_000,
        call_time_limit_s: float = 120.0,
    ) -> None:
        if max_tool_uses < 0:
            raise ValueError(f"max_tool_uses must be >= 0, got {max_tool_uses}")
        self.env = env
        self._tools = tuple(tools)
        self._format_name, self._format = (
            tool_format,
            get_tool_call_format(tool_format, parse_reasoning=parse_reasoning),
        )
        self._reads_reasoning = parse_reasoning
        self._max_tool_uses = max_tool_uses
        self._rewards = rewards if isinstance(rewards, ToolRewards) else ToolRewards(**(rewards or {}))
        self._explain = explain
        self._limits = {"max_result_chars": max_result_chars, "call_time_limit_s": call_time_limit_s}
        self._toolbox = Toolbox(tools=[tool for tool in tools if isinstance(tool, Tool)], **self._limits)
        waiting = [env.reset, env.step, *(tool.call for tool in self._toolbox.tools)]
        self._waits = len(self._toolbox.tools) < len(self._tools) or any(map(inspect.iscoroutinefunction, waiting))
        self._episode = _Episode()

    @property
    def unwrapped(self) -> Any:
        """The environment inside all wrappers."""
        return getattr(self.env, "unwrapped", self.env)

    def reset(self, seed: int | None = None) -> ResetResult | Awaitable[ResetResult]:
        """See `Env`."""
        return self._run_synchronously(self._reset(seed))

    def step(self, action: str) -> StepResult | Awaitable[StepResult]:
        """See `Env`."""
        return self._run_synchronously(self._step(action))

    def sample_random_action(self) -> str:
        """Return a random action of the inner environment."""
        return self.env.sample_random_action()

    def spawn(self, same_state: bool = False, **options: Any) -> ToolEnv:
        """Return another environment that shares the tools; `options` are passed to the inner environment."""
        arguments = {"tool_format": self._format_name, "max_tool_uses": self._max_tool_uses, "rewards": self._rewards}
        arguments |= {"parse_reasoning": self._reads_reasoning}
        env = self.env.spawn(same_state=same_state, **options)
        other = ToolEnv(env, self._tools, explain=self._explain, **arguments, **self._limits)  # type: ignore[arg-type]
        if same_state:
            other._toolbox, other._episode = self._toolbox, self._episode.copy()
        return other

    async def check_tools(self) -> None:
        """Await the method `check` of each tool that has one, to find errors before the first call.

        `reset` must be called first.

        Raises:
            InfraError: A tool cannot be used.
        """
        for tool in self._toolbox.tools:
            check = getattr(tool, "check", None)
            if check is not None:
                await check()

    @property
    def counts(self) -> dict[str, int]:
        """The tool counts of this episode so far, by their keys in `info`."""
        return self._episode.counts.to_info()

    async def close(self) -> None:
        """Close the environment and the sources of tools."""
        try:
            await self.close_tools()
        finally:
            if hasattr(self.env, "close"):
                await await_if_needed(self.env.close())

    async def close_tools(self) -> None:
        """Close all sources of tools, even if one fails; leave the environment open. Calling it twice is safe."""
        async with AsyncExitStack() as stack:
            for source in reversed(self._list_sources()):
                stack.push_async_callback(source.close)

    def _list_sources(self) -> list[ToolSource]:
        return [source for source in self._tools if not isinstance(source, Tool)]

    def _run_synchronously(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if self._waits:
            return coroutine
        try:
            coroutine.send(None)  # the coroutine awaits nothing, so it runs to its end
        except StopIteration as end:
            return end.value
        coroutine.close()
        raise TypeError("the environment or a tool returned an awaitable: make its methods `async def`")

    async def _reset(self, seed: int | None) -> ResetResult:
        previous = self._episode.counts
        sources = self._list_sources()
        if sources:
            tools: list[Tool] = [tool for tool in self._tools if isinstance(tool, Tool)]
            for source in sources:
                tools += await source.open()
            self._toolbox = Toolbox(tools=tools, **self._limits)  # type: ignore[arg-type]
        observation, info = await await_if_needed(self.env.reset(seed))
        self._episode = _Episode(state=str(info.get("state", "")))
        if self._explain and self._max_tool_uses and self._format_name != TEMPLATE:
            observation = join_content([observation, self._format.explain(self._toolbox.tools)])
        counts = self._episode.counts.to_info() | previous.to_info("prev_ep_")
        tool_info = (
            {"tools": [describe_tool(tool) for tool in self._toolbox.tools]} if self._format_name == TEMPLATE else {}
        )
        return observation, {**info, **counts, **tool_info, "use_tool": False}

    async def _step(self, action: str) -> StepResult:
        episode = self._episode
        counts = episode.counts
        parsed = None
        if counts.uses < self._max_tool_uses:
            action = action.encode(errors="replace").decode()  # files and pipes reject unpaired surrogates
            parsed = self._format.parse(action, self._toolbox.by_name)
        if not parsed:
            observation, reward, ended, cut_off, info = await await_if_needed(self.env.step(action))
            episode.state = str(info.get("state", ""))
            state = {"state": self._encode_state()} if "state" in info else {}
            return observation, float(reward), ended, cut_off, {**info, **state, **counts.to_info(), "use_tool": False}
        results, reward = await self._run_calls(parsed.calls)
        problems = parsed.problems[: self._max_tool_uses - counts.uses]
        # Malformed calls count too: otherwise a model could repeat them without limit.
        counts.uses += len(problems)
        counts.malformed += len(problems)
        reward += self._rewards.format * len(problems)
        parts = [*map(self._format_result, results), *problems]
        observation = join_content(parts, "\n") or "No call was made: too many uses of tools."
        for part in (action, get_content_key(observation)):
            episode.digest.update(part.encode(errors="replace") + b"\0")
        if counts.uses >= self._max_tool_uses:
            observation = join_content([observation, _LAST_USE_NOTE], "")
        info = {"state": self._encode_state(), **counts.to_info(), "use_tool": True}
        return observation, reward, False, False, info

    def _format_result(self, result: ToolResult) -> Content:
        """Return a result as content: its text in the call format, then its images, audio and video."""
        written, media = self._format.format_result(result), list_media(result.content)
        return (TextPart(text=written), *media) if media else written

    async def _run_calls(self, calls: Sequence[ToolCall]) -> tuple[list[ToolResult], float]:
        """Run the calls one after another, up to `max_tool_uses` in the episode.

        Return the results of the calls, and the sum of the rewards.
        """
        counts, rewards = self._episode.counts, self._rewards
        results: list[ToolResult] = []
        reward = 0.0
        for call in calls[: self._max_tool_uses - counts.uses]:
            results.append(await self._toolbox.execute(call))
            ok = results[-1].ok
            counts.uses += 1
            counts.successes += ok
            counts.errors += not ok
            reward += rewards.call + (rewards.success if ok else rewards.error)
        return results, reward

    def _encode_state(self) -> str:
        episode = self._episode
        return f"{episode.state} tools:{episode.digest.hexdigest()[:16]}" if episode.counts.uses else episode.state
