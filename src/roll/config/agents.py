"""Agent programs that generate rollouts."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Literal

from pydantic import field_validator, model_validator

from roll.config.base import FUNCTION, Section, option, path_option
from roll.config.rewards.base import check_pattern

__all__ = ["AgentConfig", "AgentLimits"]


class AgentLimits(Section):
    """Limits on one rollout's agent requests; a request beyond them is rejected, and the rollout is cut off."""

    turns: int = option(64, "Answers of the model.", ge=1)
    tokens: int = option(65536, "Tokens that the model writes in all.", unit="tokens", ge=1)
    time_s: float = option(600.0, "From the agent's start to its end.", unit="s", gt=0)
    parallel: int = option(16, "Requests at once.", ge=1)
    choices: int = option(8, "Answers that one request may ask for (`n`).", ge=1)


class AgentConfig(Section):
    """An agent program that generates rollouts: it gets an address and a key, and calls the policy like any model."""

    function: str | None = path_option(
        None,
        "Your coroutine `agent(task, base_url, api_key)`: `package.module:function`, or `path/to/file.py:function`. It "
        "may return its answer as text.",
        examples=["examples/agents/with_openai.py:agent"],
        pattern=FUNCTION,
    )
    command: list[str] | None = option(
        None,
        "A program and its arguments, instead of `function`. Its standard input has the task as plain text, and its "
        "environment the address and key (`OPENAI_BASE_URL`, `OPENAI_API_KEY` and Anthropic's). What it prints is its "
        "answer.",
        examples=[["python", "my_agent.py"]],
        min_length=1,
    )
    directory: str | None = path_option(
        None,
        "Where `command` works. `null`: in the run's own working directory, which all rollouts share. `fresh`: in an "
        "empty directory of each rollout's own. A path: in a copy of that directory for each rollout; `{column}` "
        "stands for the prompt's column. These directories are removed when the rollout ends.",
        examples=["fresh", "tasks/{task_id}"],
        min_length=1,
    )
    answer_file: str | None = option(
        None,
        "File that holds the answer when `command` has ended, instead of what it prints: a path in its directory. "
        "Where there is no such file, the answer is empty.",
        examples=["answer.txt"],
        min_length=1,
    )
    answer_pattern: str | None = option(
        None,
        "Regular expression whose last match in what the agent printed, returned or wrote is the answer: its first "
        "group, if it has one. Where nothing matches, the answer is empty.",
        examples=["ANSWER: (.*)"],
    )
    train: Literal["main_chain", "all"] = option(
        "main_chain",
        "What is trained of a rollout. `main_chain`: the longest conversation alone, by its number of answers, and not "
        "other requests (titles, summaries, sub-agents). `all`: every answer of the model. Choose `all` for agents "
        "that write their history anew with every request.",
    )
    sandbox: bool = option(
        False, "Run `command` in a sandbox (section `sandbox`), where it reaches the model and nothing else."
    )
    files: dict[str, str] = path_option(
        {},
        "Files that a `command` in a sandbox finds in its directory: name to path.",
        examples=[{"agent.sh": "agent.sh"}],
    )
    environment: dict[str, str] = option({}, "Further variables for `command`.")
    limits: AgentLimits = option(AgentLimits(), "Its budget.")
    tool_format: Literal["auto", "hermes", "llama3", "mistral", "harmony", "glm", "gemma4", "plain", "none"] = option(
        "auto", "How the model writes calls of tools; `auto` goes by its chat template."
    )
    format_constraints: Literal["reject", "prompt"] = option(
        "prompt",
        "Handling of requests that constrain the answer's format (`tool_choice: required` or one function, "
        "`response_format`). `prompt`: the constraint is appended to the last message as text. `reject`: the request "
        "is rejected. Decoding is never constrained, since the trained tokens must come from the policy's own "
        "distribution.",
    )
    on_failure: Literal["reissue", "score"] = option(
        "reissue",
        "What an agent's exception, exit code or time-out means: `reissue` counts it as a failure of ours, `score` "
        "scores the rollout as it stands. After its budget was used up, or an answer that was cut off at "
        "`max_new_tokens`, it is always scored.",
    )

    @field_validator("answer_pattern")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        return None if value is None else check_pattern(value)

    @field_validator("answer_file")
    @classmethod
    def _inside(cls, value: str | None) -> str | None:
        if value is not None and (PurePosixPath(value).is_absolute() or ".." in PurePosixPath(value).parts):
            raise ValueError(f"{value!r} must be a path inside of the agent's directory")
        return value

    @model_validator(mode="after")
    def _one_program(self) -> AgentConfig:
        if (self.function is None) == (self.command is None):
            raise ValueError("an agent is either a function or a command: give one of the two")
        of_commands = {
            "sandbox": self.sandbox,
            "files": self.files,
            "environment": self.environment,
            "directory": self.directory,
            "answer_file": self.answer_file,
        }
        given = [name for name, value in of_commands.items() if value]
        if self.command is None and given:
            raise ValueError(f"{' and '.join(given)} can be set for a command alone: a function runs in this process")
        if self.files and not self.sandbox:
            raise ValueError("files are for a command in a sandbox: set sandbox to true, or remove files")
        return self
