"""The tools that a model may call in an environment, and the format and limits of tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Discriminator, Tag, model_validator

from roll.config.base import FUNCTION_PATTERN, Section, option, path_option

__all__ = [
    "CalculatorTool",
    "HttpSearchTool",
    "McpTool",
    "PythonTool",
    "SearchTool",
    "ToolCallsConfig",
    "ToolConfig",
    "ToolList",
    "UserTool",
    "WorkspaceTool",
    "build_tool_arguments",
    "expand_tools",
]

USER_TOOL_TAG = "file.py:name"
"""Tag of user-defined tools in the union of tools."""


class _Tool(Section):
    @property
    def entry(self) -> dict[str, Any]:
        """The tool's entry for `roll.envs.tools.build_tools`."""
        return self.model_dump(exclude_none=True)


class CalculatorTool(_Tool):
    """The tool `calculator`: evaluates arithmetic expressions, exactly for integers."""

    tool: Literal["calculator"] = option(..., "Name of the tool.")


class PythonTool(_Tool):
    """The tool `python`: runs a program in a new sandbox (section `sandbox`) and returns its output."""

    tool: Literal["python"] = option(..., "Name of the tool.")
    time_limit_s: float = option(5.0, "Time limit of one program.", unit="s", gt=0)
    memory_bytes: int = option(512 * 2**20, "Memory limit of one program, including its files.", unit="bytes", ge=2**25)
    only_last_error_line: bool = option(
        False, "Whether only the last line of an exception is reported, without the traceback."
    )


class WorkspaceTool(_Tool):
    """The tools `shell`, `read_file`, `write_file` and `edit_file`; each episode has a separate sandbox."""

    tool: Literal["workspace"] = option(..., "Name of the tools.")
    time_limit_s: float = option(10.0, "Time limit of one command, after which it is interrupted.", unit="s", gt=0)


class SearchTool(_Tool):
    """The tool `search`: BM25 over the `.txt` and `.md` files of a folder."""

    tool: Literal["search"] = option(..., "Name of the tool.")
    folder: str = path_option(..., "The folder, including subfolders.", min_length=1, examples=["notes"])
    num_results: int = option(3, "Number of passages that a search returns.", ge=1)
    name: str = option("search", "Name under which the model calls the tool.", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")


class HttpSearchTool(_Tool):
    """The tool `search`: queries a retrieval server with the API of Search-R1 or GEM."""

    tool: Literal["http_search"] = option(..., "Name of the tool.")
    url: str = option(..., "URL of the server.", pattern=r"^https?://", examples=["http://127.0.0.1:8000/retrieve"])
    num_results: int = option(3, "Number of passages that a search returns.", ge=1)
    name: str = option("search", "Name under which the model calls the tool.", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    timeout_s: float = option(
        30.0, "Time limit of a search. A search that exceeds it is an infrastructure error.", unit="s", gt=0
    )


class McpTool(_Tool):
    """All or some tools of an MCP server (Model Context Protocol); one connection per episode."""

    tool: Literal["mcp"] = option(..., "Tool type.")
    command: list[str] = option([], "Program and arguments of a server that is started for every episode.")
    url: str | None = option(None, "URL of a running server, instead of `command`.", pattern=r"^https?://")
    env: dict[str, str] = option({}, "Environment variables for the command.")
    only: list[str] | None = option(None, "Names of the tools to offer; by default all.", min_length=1)
    connect_time_limit_s: float = option(30.0, "Time limit of connecting and listing the tools.", unit="s", gt=0)

    @model_validator(mode="after")
    def _check_one_address(self) -> Self:
        if bool(self.command) == bool(self.url):
            raise ValueError("exactly one of `command` and `url` must be set for an MCP server")
        return self


class UserTool(_Tool):
    """A user-defined function or class, which runs in a separate process per episode."""

    tool: str = path_option(
        ...,
        "Import path of the function or class: `package.module:name` or `path/to/file.py:name`. A function's "
        "signature defines the arguments, and its docstring is the description. docs/tools.md describes classes.",
        pattern=FUNCTION_PATTERN,
    )
    options: dict[str, Any] = option(
        {}, "Arguments of the function or class that are fixed by the configuration instead of chosen by the model."
    )

    @property
    def entry(self) -> dict[str, Any]:
        """The tool's entry for `roll.envs.tools.build_tools`, with its options."""
        return {**self.options, "tool": self.tool}


def _get_tool_type(value: Any) -> str:
    name = value.get("tool") if isinstance(value, dict) else getattr(value, "tool", None)
    return USER_TOOL_TAG if ":" in str(name) else str(name)


ToolConfig = Annotated[
    Annotated[CalculatorTool, Tag("calculator")]
    | Annotated[PythonTool, Tag("python")]
    | Annotated[WorkspaceTool, Tag("workspace")]
    | Annotated[SearchTool, Tag("search")]
    | Annotated[HttpSearchTool, Tag("http_search")]
    | Annotated[McpTool, Tag("mcp")]
    | Annotated[UserTool, Tag(USER_TOOL_TAG)],
    Discriminator(_get_tool_type),
]
ToolList: TypeAlias = list[ToolConfig]


def expand_tools(value: Any) -> Any:
    """Expand tool names, such as `calculator`, which is short for `{tool: calculator}`."""
    return (
        [{"tool": entry} if isinstance(entry, str) else entry for entry in value] if isinstance(value, list) else value
    )


ToolCallFormatName: TypeAlias = Literal[
    "auto", "xml", "json", "hermes", "llama", "mistral", "harmony", "glm", "gemma4", "template"
]


class ToolRewardsConfig(Section):
    """Rewards for tool calls, in addition to the environment's reward for the episode."""

    call: float = option(0.0, "Reward of each call, successful or not.")
    success: float = option(0.0, "Additional reward of each successful call.")
    error: float = option(
        0.0, "Additional reward of each failed call, for example with invalid arguments or a program that fails."
    )
    format: float = option(0.0, "Reward of each malformed call; usually negative.")


class ToolCallsConfig(Section):
    """Format and limits of tool calls. An answer with calls is a separate turn; the observation after it contains the
    results.
    """

    format: ToolCallFormatName = option(
        "auto",
        "Format of tool calls: how they are explained to the model and parsed. `template`: the format of the model's "
        "chat template, which must support tools. `auto`: `xml` is explained, and all formats are parsed.",
    )
    parse_reasoning: bool = option(
        False,
        "Whether calls inside the model's reasoning (`<think>…</think>` and similar) are executed. If false, only "
        "calls after the reasoning are executed.",
    )
    max_uses: int = option(
        10,
        "Maximum number of calls in one episode, including malformed ones; later calls are treated as answers.",
        ge=1,
    )
    explain: bool = option(
        True,
        "Whether the first observation lists the tools and explains how to call them; with `template`, the chat "
        "template does this.",
    )
    rewards: ToolRewardsConfig = option(ToolRewardsConfig(), "Rewards for tool calls.")
    max_result_chars: int = option(
        8_000, "Maximum length of a result; the middle of a longer result is removed.", unit="characters", ge=1
    )
    time_limit_s: float = option(
        120.0, "Time limit of a call. A call that exceeds it is an infrastructure error.", unit="s", gt=0
    )


def build_tool_arguments(tools: Sequence[ToolConfig], calls: ToolCallsConfig) -> dict[str, Any]:
    """Build the arguments with which `roll.envs.equipping` adds tools to an environment; empty without tools."""
    if not tools:
        return {}
    return {
        "tools": [tool.entry for tool in tools],
        "tool_format": calls.format,
        **({"parse_reasoning": True} if calls.parse_reasoning else {}),
        "max_tool_uses": calls.max_uses,
        "rewards": calls.rewards.model_dump(),
        "explain": calls.explain,
        "max_result_chars": calls.max_result_chars,
        "call_time_limit_s": calls.time_limit_s,
    }
