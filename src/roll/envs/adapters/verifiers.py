"""Environments in packages for the library `verifiers` (0.1): `verifiers:wordle`.

    the library's own rollout ──calls its client──► new messages are the observation ──► action ──► the client's reply
           └─ ends ──► the score of its rubric is the reward

So an environment's own life cycle runs unchanged: set-up, stop conditions, tools, clean-up. From version 0.2 on, the
library starts agent programs that talk to a served model; these are trained as agents, not as environments.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll.envs.adapters.packages import imported
from roll.envs.tools.calls import form_named
from roll.envs.tools.json_text import shown
from roll.errors import ConfigError, DataError, InfraError

__all__ = ["VerifiersEnv", "make"]

PACKAGE = "verifiers>=0.1.12,<0.2"
ADVICE = (
    "pip cannot install it next to ROLL, since it requires datasets <4.7 and ROLL >=5. Install it in an environment of "
    "its own, and start a program there that plays the environment through ROLL's endpoint (rollout.agent.command; "
    "docs/agents.md)."
)


@dataclass(frozen=True)
class _Described:
    """A tool as the library describes it; the library itself calls the tool."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def call(self, arguments: Mapping[str, Any], /) -> str:
        raise NotImplementedError


class VerifiersEnv:
    """An `Env` with asynchronous methods around an environment of the library.

    `reset(seed)` plays row `seed` (modulo the number of rows) of its data set. The reward comes at the end.

    Args:
        env: The result of `load_environment`.
        form: The format of the model's tool calls: see `FORMS`.
    """

    def __init__(self, env: Any, form: str = "auto") -> None:
        self.env = env
        self._form = form_named(form)
        self._rows = env.get_dataset()
        if not len(self._rows):
            raise DataError("this environment of verifiers has an empty data set.")
        self._next = 0
        self._rollout: asyncio.Task[Any] | None = None
        self._asked: asyncio.Queue[str] = asyncio.Queue()
        self._answers: asyncio.Queue[str] = asyncio.Queue()
        self._tools: dict[str, _Described] = {}
        self._num_seen = 0

    @property
    def unwrapped(self) -> Any:
        """The library's environment."""
        return self.env

    async def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """See `Env`; without a seed, the row after the last one.

        Raises:
            InfraError: The environment failed, or ended before its first request to the model.
        """
        await self.close()
        index = (self._next if seed is None else seed) % len(self._rows)
        self._next, self._num_seen = index + 1, 0
        self._asked, self._answers = asyncio.Queue(), asyncio.Queue()
        self._rollout = asyncio.create_task(self._played(dict(self._rows[index])))
        observation = await self._until_asked()
        if observation is None:
            raise InfraError(f"verifiers: the episode of row {index} ended before the model was asked for anything.")
        if self._tools:
            observation = f"{observation}\n\n{self._form.explain(list(self._tools.values()))}"
        return observation, {"state": observation}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """See `Env`.

        Raises:
            InfraError: The environment failed.
        """
        assert self._rollout is not None, "`reset` comes first"
        self._answers.put_nowait(action.encode(errors="replace").decode())
        observation = await self._until_asked()
        if observation is not None:
            return observation, 0.0, False, False, {"state": observation}
        state = self._rollout.result()
        if state.get("error") is not None:
            raise InfraError(f"verifiers: the environment failed: {state.get('error')}")
        try:
            await self.env.rubric.score_rollout(state)
        except Exception as error:
            raise InfraError(f"verifiers: the rubric failed: {type(error).__name__}: {error}") from error
        metrics = dict(state.get("metrics") or {})
        return "", float(state["reward"] or 0.0), True, False, {"state": "ended", "metrics": metrics}

    async def _until_asked(self) -> str | None:
        """Wait for the next prompt and return its new part, or `None` once the rollout has ended."""
        assert self._rollout is not None
        asked = asyncio.create_task(self._asked.get())
        try:
            await asyncio.wait({asked, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
        finally:
            asked.cancel()
        try:
            self._rollout.result()
        except Exception as error:
            raise InfraError(f"verifiers: the environment failed: {type(error).__name__}: {error}") from error
        return None

    async def _played(self, row: dict[str, Any]) -> Any:
        return await self.env.rollout(row, client=_client(self), model="policy", sampling_args={})

    async def answered(self, prompt: Sequence[Any], tools: Sequence[Any] | None) -> tuple[str, list[dict[str, str]]]:
        """Return the model's answer to a prompt, and its tool calls in the library's form."""
        self._tools = {
            tool.name: _Described(tool.name, tool.description or "", tool.parameters or {}) for tool in tools or ()
        }
        new = prompt[self._num_seen :] if self._num_seen else prompt
        self._num_seen = len(prompt) + 1  # and the model's own message
        self._asked.put_nowait("\n\n".join(_text(message) for message in new))
        text = await self._answers.get()
        found = self._form.parse(text, self._tools).calls if self._tools else ()
        return text, [
            {"id": call.id or f"call_{number}", "name": call.name, "arguments": shown(dict(call.arguments))}
            for number, call in enumerate(found)
        ]

    async def close(self) -> None:
        """Cancel the episode, if it is running."""
        rollout, self._rollout = self._rollout, None
        if rollout is not None and not rollout.done():
            rollout.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await rollout


def _text(message: Any) -> str:
    content = message.get("content") if isinstance(message, Mapping) else getattr(message, "content", None)
    if isinstance(content, str):
        return content
    parts = content or []
    return "\n".join(
        str(part.get("text", "") if isinstance(part, Mapping) else getattr(part, "text", "")) for part in parts
    )


def _client(env: VerifiersEnv) -> Any:
    """Build a client of the library whose replies are the actions passed to the environment's `step`."""
    base = imported("verifiers.clients.client", PACKAGE, "an environment of verifiers", ADVICE).Client
    types = imported("verifiers.types", PACKAGE, "an environment of verifiers", ADVICE)

    async def get_response(
        self: Any, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **rest: Any
    ) -> Any:
        text, calls = await env.answered(prompt, tools)
        message = types.ResponseMessage(
            content=text,
            tool_calls=[types.ToolCall(**call) for call in calls] or None,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
        )
        return types.Response(id="step", created=0, model=model, message=message)

    def unused(self: Any, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError

    methods = dict.fromkeys(base.__abstractmethods__, unused) | {"get_response": get_response}
    return type("SteppedClient", (base,), methods)(None)


def make(name: str, *, form: str = "auto", **options: Any) -> VerifiersEnv:
    """Build `verifiers.load_environment(name, **options)`.

    Raises:
        ConfigError: The library or the environment's package is missing, or the environment is of an unsupported kind.
    """
    verifiers = imported("verifiers", PACKAGE, f"environment 'verifiers:{name}'", ADVICE)
    if not hasattr(verifiers, "load_environment"):
        version = getattr(verifiers, "__version__", "")
        raise ConfigError(
            f"environment 'verifiers:{name}': verifiers {version} has no environments that are stepped, only agent "
            f"programs: train its agents through the endpoint (rollout.agent), or use {PACKAGE}. {ADVICE}"
        )
    try:
        env = verifiers.load_environment(name, **options)
    except (ValueError, RuntimeError, AttributeError, TypeError) as error:
        raise ConfigError(f"environment 'verifiers:{name}': {error}") from error
    if not all(hasattr(env, part) for part in ("rollout", "rubric", "get_dataset")):
        raise ConfigError(f"environment 'verifiers:{name}' is a {type(env).__name__}, which cannot be stepped.")
    return VerifiersEnv(env, form)
