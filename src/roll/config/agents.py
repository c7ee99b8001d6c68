"""Agent programs that make rollouts."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from roll.config.base import FUNCTION, Section, option

__all__ = ["AgentConfig", "AgentLimits"]


class AgentLimits(Section):
    """What one rollout's agent may ask of the model; what goes beyond it is refused, and the rollout is cut off."""

    turns: int = option(64, "Answers of the model.", ge=1)
    tokens: int = option(65536, "Tokens that the model writes in all.", unit="tokens", ge=1)
    time_s: float = option(600.0, "From the agent's start to its end.", unit="s", gt=0)
    parallel: int = option(16, "Requests at once.", ge=1)
    choices: int = option(8, "Answers that one request may ask for (`n`).", ge=1)


class AgentConfig(Section):
    """An agent program that makes the rollouts: it gets an address and a key, and asks the policy like any model."""

    function: str | None = option(
        None,
        "Your coroutine `agent(task, base_url, api_key)`: `package.module:function`, or `path/to/file.py:function`. It "
        "may return its answer as text.",
        examples=["examples/agents/with_openai.py:agent"],
        pattern=FUNCTION,
    )
    command: list[str] | None = option(
        None,
        "A program and its arguments, in place of `function`: the task is in its standard input, the address and key "
        "in its environment (`OPENAI_BASE_URL`, `OPENAI_API_KEY` and Anthropic's). What it prints is its answer.",
        examples=[["python", "my_agent.py"]],
        min_length=1,
    )
    sandbox: bool = option(
        False, "Run `command` in a sandbox (section `sandbox`), where it reaches the model and nothing else."
    )
    files: dict[str, str] = option(
        {},
        "Files that a `command` in a sandbox finds in its directory: name to path.",
        examples=[{"agent.sh": "agent.sh"}],
    )
    environment: dict[str, str] = option({}, "Further variables for `command`.")
    limits: AgentLimits = option(AgentLimits(), "Its budget.")
    tool_format: Literal["auto", "hermes", "llama3", "mistral", "plain", "none"] = option(
        "auto", "How the model writes calls of tools; `auto` goes by its chat template."
    )
    demands: Literal["refuse", "tell"] = option(
        "refuse",
        "What becomes of a request that demands a form of its answer (`tool_choice: required` or one function, "
        "`response_format`): it is refused with what to do, or the model is told of it in words. Nothing enforces "
        "it, since what is trained must be the policy's own distribution.",
    )
    when_it_fails: Literal["reissue", "score"] = option(
        "reissue",
        "What an agent's exception, exit code or time-out means: `reissue` counts it as a failure of ours, `score` "
        "scores the rollout as it stands. After its budget was used up, or an answer that was cut off at "
        "`max_new_tokens`, it is always scored.",
    )

    @model_validator(mode="after")
    def _one_program(self) -> AgentConfig:
        if (self.function is None) == (self.command is None):
            raise ValueError("an agent is either a function or a command: give one of the two")
        if self.command is None and (self.sandbox or self.files or self.environment):
            raise ValueError("sandbox, files and environment are for a command: a function runs in this process")
        if self.files and not self.sandbox:
            raise ValueError("files are for a command in a sandbox: set sandbox to true, or remove files")
        return self
