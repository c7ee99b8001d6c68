"""Agent programs that generate rollouts."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Literal

from pydantic import field_validator, model_validator

from roll.config.base import FUNCTION_PATTERN, Section, option, path_option
from roll.config.rewards.base import check_pattern

__all__ = ["AgentConfig", "AgentLimitsConfig"]


class AgentLimitsConfig(Section):
    """Limits on an agent's requests in one rollout. Requests beyond a limit are rejected, and the rollout is marked as
    truncated.
    """

    turns: int = option(64, "Maximum number of model answers.", ge=1)
    tokens: int = option(65536, "Maximum number of generated tokens over all answers.", unit="tokens", ge=1)
    time_s: float = option(600.0, "Time limit of the agent, from start to end.", unit="s", gt=0)
    parallel: int = option(16, "Maximum number of concurrent requests.", ge=1)
    choices: int = option(8, "Maximum number of answers in one request (`n`).", ge=1)


class AgentConfig(Section):
    """An agent program that generates rollouts. It calls the policy through a URL and an API key, like any LLM API."""

    function: str | None = path_option(
        None,
        "Your coroutine function `agent(task, base_url, api_key)`: `package.module:function` or "
        "`path/to/file.py:function`. It may return the answer as text.",
        examples=["examples/agents/with_openai.py:agent"],
        pattern=FUNCTION_PATTERN,
    )
    command: list[str] | None = option(
        None,
        "A program and its arguments, instead of `function`. The program reads the task as plain text from standard "
        "input, and the URL and the key from environment variables (`OPENAI_BASE_URL`, `OPENAI_API_KEY`, and the "
        "corresponding variables for Anthropic). The answer is the program's standard output.",
        examples=[["python", "my_agent.py"]],
        min_length=1,
    )
    directory: str | None = path_option(
        None,
        "Working directory of `command`. `null`: the run's working directory, which all rollouts share. `fresh`: an "
        "empty directory for each rollout. A path: a copy of that directory for each rollout; `{column}` is replaced "
        "by the value of that column in the prompt's row. These directories are removed when the rollout ends.",
        examples=["fresh", "tasks/{task_id}"],
        min_length=1,
    )
    answer_file: str | None = option(
        None,
        "File from which the answer is read when `command` has ended, instead of standard output: a path inside the "
        "working directory. If the file does not exist, the answer is empty.",
        examples=["answer.txt"],
        min_length=1,
    )
    answer_pattern: str | None = option(
        None,
        "Regular expression that extracts the answer from the agent's output. The answer is the last match, or the "
        "first group of that match if the expression has groups. If the expression does not match, the answer is "
        "empty.",
        examples=["ANSWER: (.*)"],
    )
    train: Literal["main_chain", "all"] = option(
        "main_chain",
        "Which answers of a rollout are trained on. `main_chain`: only the answers of the conversation "
        "with the most answers, without other requests (titles, summaries, sub-agents). `all`: every answer of the "
        "model. Choose `all` for agents that rewrite their history with every request.",
    )
    sandbox: bool = option(
        False, "Whether to run `command` in a sandbox (section `sandbox`), whose only network access is the model."
    )
    files: dict[str, str] = path_option(
        {},
        "Files to copy into the working directory if `command` runs in a sandbox: a mapping from the name in that "
        "directory to the file's path.",
        examples=[{"agent.sh": "agent.sh"}],
    )
    environment: dict[str, str] = option({}, "Additional environment variables for `command`.")
    limits: AgentLimitsConfig = option(AgentLimitsConfig(), "Limits on each rollout's agent requests.")
    tool_format: Literal["auto", "hermes", "llama3", "mistral", "harmony", "glm", "gemma4", "plain", "none"] = option(
        "auto", "Format of the model's tool calls; `auto` detects it from the chat template."
    )
    format_constraints: Literal["reject", "prompt"] = option(
        "prompt",
        "How to handle requests that constrain the answer's format (`response_format`, or a `tool_choice` that "
        "requires a call). `prompt`: the constraint is appended to the last message as text. `reject`: the request "
        "is rejected. Decoding is never constrained, because trained tokens must be sampled from the policy's "
        "distribution.",
    )
    on_failure: Literal["reissue", "score"] = option(
        "reissue",
        "How to handle an agent's exception, non-zero exit code or timeout. `reissue`: treat it as an infrastructure "
        "error. `score`: score the rollout as it is. A rollout that reached a limit, or whose answer was truncated at "
        "`max_new_tokens`, is always scored.",
    )

    @field_validator("answer_pattern")
    @classmethod
    def _check_answer_pattern(cls, value: str | None) -> str | None:
        return None if value is None else check_pattern(value)

    @field_validator("answer_file")
    @classmethod
    def _check_answer_file(cls, value: str | None) -> str | None:
        if value is not None and (PurePosixPath(value).is_absolute() or ".." in PurePosixPath(value).parts):
            raise ValueError(f"{value!r} must be a path inside the agent's directory")
        return value

    @model_validator(mode="after")
    def _check_one_program(self) -> AgentConfig:
        if (self.function is None) == (self.command is None):
            raise ValueError("exactly one of function and command must be set")
        of_commands = {
            "sandbox": self.sandbox,
            "files": self.files,
            "environment": self.environment,
            "directory": self.directory,
            "answer_file": self.answer_file,
        }
        given = [name for name, value in of_commands.items() if value]
        if self.command is None and given:
            raise ValueError(
                f"{' and '.join(given)} can be set only with a command, because a function runs in this process"
            )
        if self.files and not self.sandbox:
            raise ValueError("files requires a command in a sandbox: set sandbox to true, or remove files")
        return self
