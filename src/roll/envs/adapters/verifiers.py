"""Environments for the library `verifiers` (0.1): `verifiers:wordle`.

    the library's own rollout ──calls its client──► new messages are the observation ──► action ──► the client's reply
           └─ ends ──► the score of its rubric is the reward

The environment's life cycle runs unchanged: setup, stop conditions, tools, cleanup. From version 0.2 on, the library
starts agent programs that talk to a served model; these are trained as agents, not as environments.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll.envs.adapters.packages import import_package
from roll.envs.tools.calls import get_tool_call_format
from roll.envs.tools.json_text import dump_json
from roll.errors import ConfigError, DataError, InfraError

__all__ = ["VerifiersEnv", "make"]

PACKAGE = "verifiers>=0.1.12,<0.2"
ADVICE = (
    "pip cannot install it together with ROLL, because it requires datasets <4.7 and ROLL >=5. Install it in a "
    "separate virtual environment, and run a program there that plays the environment through ROLL's endpoint "
    "(rollout.agent.command; docs/agents.md)."
)


@dataclass(frozen=True)
class _ToolDescription:
    """The description of a tool. `call` is not implemented, since the `verifiers` library itself calls the tool."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def call(self, arguments: Mapping[str, Any], /) -> str:
        raise NotImplementedError


class VerifiersEnv:
    """Wraps an environment of the `verifiers` library as an `Env` with asynchronous methods.

    `reset(seed)` begins an episode with row `seed` (modulo the number of rows) of the environment's data set. The last
    step returns the reward.

    Args:
        env: The result of `load_environment`.
        tool_format: The format of the model's tool calls: see `TOOL_CALL_FORMATS`.
    """

    def __init__(self, env: Any, tool_format: str = "auto") -> None:
        self.env = env
        self._format = get_tool_call_format(tool_format)
        self._rows = env.get_dataset()
        if not len(self._rows):
            raise DataError("the dataset of this `verifiers` environment is empty: choose another environment.")
        self._next = 0
        self._rollout: asyncio.Task[Any] | None = None
        self._asked: asyncio.Queue[str] = asyncio.Queue()
        self._answers: asyncio.Queue[str] = asyncio.Queue()
        self._tools: dict[str, _ToolDescription] = {}
        self._num_seen = 0

    @property
    def unwrapped(self) -> Any:
        """The library's environment."""
        return self.env

    async def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode with the row that `seed` selects; without a seed, with the next row.

        Raises:
            InfraError: The environment failed, or ended before its first request to the model.
        """
        await self.close()
        index = (self._next if seed is None else seed) % len(self._rows)
        self._next, self._num_seen = index + 1, 0
        self._asked, self._answers = asyncio.Queue(), asyncio.Queue()
        self._rollout = asyncio.create_task(self._run_episode(dict(self._rows[index])))
        observation = await self._wait_for_prompt()
        if observation is None:
            raise InfraError(f"the `verifiers` episode of row {index} ended before its first request to the model.")
        if self._tools:
            observation = f"{observation}\n\n{self._format.explain(list(self._tools.values()))}"
        return observation, {"state": observation}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """See `Env`.

        Raises:
            InfraError: The environment failed.
        """
        assert self._rollout is not None, "`reset` comes first"
        self._answers.put_nowait(action.encode(errors="replace").decode())
        observation = await self._wait_for_prompt()
        if observation is not None:
            return observation, 0.0, False, False, {"state": observation}
        state = self._rollout.result()
        if state.get("error") is not None:
            raise InfraError(f"the `verifiers` environment failed: {state.get('error')}")
        try:
            await self.env.rubric.score_rollout(state)
        except Exception as error:
            raise InfraError(f"the rubric of the `verifiers` environment failed: {error!r}") from error
        metrics = dict(state.get("metrics") or {})
        return "", float(state["reward"] or 0.0), True, False, {"state": "ended", "metrics": metrics}

    async def _wait_for_prompt(self) -> str | None:
        """Wait for the next prompt and return the text of its new messages, or `None` once the rollout has ended."""
        assert self._rollout is not None
        next_prompt = asyncio.create_task(self._asked.get())
        try:
            await asyncio.wait({next_prompt, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
            if next_prompt.done():
                return next_prompt.result()
        finally:
            next_prompt.cancel()
        try:
            self._rollout.result()
        except Exception as error:
            raise InfraError(f"the `verifiers` environment failed: {error!r}") from error
        return None

    async def _run_episode(self, row: dict[str, Any]) -> Any:
        return await self.env.rollout(row, client=_make_client(self), model="policy", sampling_args={})

    async def request_answer(
        self, prompt: Sequence[Any], tools: Sequence[Any] | None
    ) -> tuple[str, list[dict[str, str]]]:
        """Pass the new messages of `prompt` to the policy; return the answer and tool calls in the library's format."""
        self._tools = {
            tool.name: _ToolDescription(tool.name, tool.description or "", tool.parameters or {})
            for tool in tools or ()
        }
        new = prompt[self._num_seen :] if self._num_seen else prompt
        self._num_seen = len(prompt) + 1  # the prompt and the model's own message
        self._asked.put_nowait("\n\n".join(_get_text(message) for message in new))
        text = await self._answers.get()
        calls = self._format.parse(text, self._tools).calls if self._tools else ()
        return text, [
            {"id": call.id or f"call_{number}", "name": call.name, "arguments": dump_json(dict(call.arguments))}
            for number, call in enumerate(calls)
        ]

    async def close(self) -> None:
        """Cancel the episode, if it is running."""
        rollout, self._rollout = self._rollout, None
        if rollout is not None and not rollout.done():
            rollout.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await rollout


def _get_text(message: Any) -> str:
    content = message.get("content") if isinstance(message, Mapping) else getattr(message, "content", None)
    if isinstance(content, str):
        return content
    parts = content or []
    return "\n".join(
        str(part.get("text", "") if isinstance(part, Mapping) else getattr(part, "text", "")) for part in parts
    )


def _make_client(env: VerifiersEnv) -> Any:
    """Build a model client for `verifiers` whose replies are the actions passed to the environment's `step`."""
    base = import_package("verifiers.clients.client", PACKAGE, "an environment of verifiers", ADVICE).Client
    types = import_package("verifiers.types", PACKAGE, "an environment of verifiers", ADVICE)

    async def get_response(
        self: Any, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **rest: Any
    ) -> Any:
        text, calls = await env.request_answer(prompt, tools)
        message = types.ResponseMessage(
            content=text,
            tool_calls=[types.ToolCall(**call) for call in calls] or None,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
        )
        return types.Response(id="step", created=0, model=model, message=message)

    def reject_call(self: Any, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError

    methods = dict.fromkeys(base.__abstractmethods__, reject_call) | {"get_response": get_response}
    return type("SteppedClient", (base,), methods)(None)


def make(name: str, *, tool_format: str = "auto", **options: Any) -> VerifiersEnv:
    """Build `verifiers.load_environment(name, **options)`.

    Raises:
        ConfigError: The library or the environment's package is missing, or the environment is of an unsupported type.
    """
    verifiers = import_package("verifiers", PACKAGE, f"environment 'verifiers:{name}'", ADVICE)
    if not hasattr(verifiers, "load_environment"):
        version = getattr(verifiers, "__version__", "")
        raise ConfigError(
            f"environment 'verifiers:{name}': verifiers {version} has no environments with `step`, only agent "
            f"programs: train the agents through the endpoint (rollout.agent), or use {PACKAGE}. {ADVICE}"
        )
    try:
        env = verifiers.load_environment(name, **options)
    except (ValueError, RuntimeError, AttributeError, TypeError) as error:
        raise ConfigError(f"environment 'verifiers:{name}' cannot be created: {error}") from error
    if not all(hasattr(env, part) for part in ("rollout", "rubric", "get_dataset")):
        raise ConfigError(
            f"environment 'verifiers:{name}' has the unsupported type {type(env).__name__}: choose another."
        )
    return VerifiersEnv(env, tool_format)
