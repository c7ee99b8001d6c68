"""The tools of a model in an environment, and how the model calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Discriminator, Tag, model_validator

from roll.config.base import FUNCTION, Section, option, path_option

__all__ = [
    "CalculatorTool",
    "HttpSearchTool",
    "McpTool",
    "OwnTool",
    "PythonTool",
    "SearchTool",
    "ToolCallsConfig",
    "ToolConfig",
    "ToolList",
    "WorkspaceTool",
    "as_tool_list",
    "tool_arguments",
]

OWN = "file.py:name"
"""Name of a user's own tool in lists of tools."""


class _Tool(Section):
    @property
    def entry(self) -> dict[str, Any]:
        """The tool's entry for `roll.envs.tools.build_tools`."""
        return self.model_dump(exclude_none=True)


class CalculatorTool(_Tool):
    """Arithmetic, exact with whole numbers: `calculator`."""

    tool: Literal["calculator"] = option(..., "Name of the tool.")


class PythonTool(_Tool):
    """Runs a program in a fresh sandbox, configured by the section `sandbox`, and returns its output: `python`."""

    tool: Literal["python"] = option(..., "Name of the tool.")
    time_limit_s: float = option(5.0, "Of one program.", unit="s", gt=0)
    memory_bytes: int = option(512 * 2**20, "Of one program, its files included.", unit="bytes", ge=2**25)
    only_last_error_line: bool = option(False, "Tell of an exception its last line alone, without the trace.")


class WorkspaceTool(_Tool):
    """`shell`, `read_file`, `write_file` and `edit_file` in a sandbox of the episode's own."""

    tool: Literal["workspace"] = option(..., "Name of the tools.")
    time_limit_s: float = option(10.0, "Of one command; a longer one is interrupted.", unit="s", gt=0)


class SearchTool(_Tool):
    """BM25 over the `.txt` and `.md` files of a folder: `search`."""

    tool: Literal["search"] = option(..., "Name of the tool.")
    folder: str = path_option(..., "The folder, with the folders in it.", min_length=1, examples=["notes"])
    num_results: int = option(3, "Passages that a search gives.", ge=1)
    name: str = option("search", "What the model calls it.", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")


class HttpSearchTool(_Tool):
    """Queries a retrieval server like that of Search-R1 or GEM: `search`."""

    tool: Literal["http_search"] = option(..., "Name of the tool.")
    url: str = option(..., "Of the server.", pattern=r"^https?://", examples=["http://127.0.0.1:8000/retrieve"])
    num_results: int = option(3, "Passages that a search gives.", ge=1)
    name: str = option("search", "What the model calls it.", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    timeout_s: float = option(30.0, "A longer search is a failure of ours.", unit="s", gt=0)


class McpTool(_Tool):
    """All or some tools of a server with the Model Context Protocol; one connection per episode."""

    tool: Literal["mcp"] = option(..., "Name of this kind of tools.")
    command: list[str] = option([], "A program and its arguments: a server that is started for every episode.")
    url: str | None = option(None, "Of a server that runs already, instead of `command`.", pattern=r"^https?://")
    env: dict[str, str] = option({}, "Environment variables for the command.")
    only: list[str] | None = option(None, "Names of the tools to offer; all without.", min_length=1)
    connect_time_limit_s: float = option(30.0, "Connecting and listing the tools may take this long.", unit="s", gt=0)

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if bool(self.command) == bool(self.url):
            raise ValueError("a server is reached by its `command` or by its `url`: give one of them")
        return self


class OwnTool(_Tool):
    """Your own function or class; it runs in a separate process, one for each episode."""

    tool: str = path_option(
        ...,
        "Where it is: `package.module:name`, or a file: `path/to/file.py:name`. A function's signature says which "
        "arguments it takes, and its docstring what it does; docs/tools.md says what a class has.",
        pattern=FUNCTION,
    )
    options: dict[str, Any] = option({}, "Arguments that the model does not give: of the class, or of the function.")

    @property
    def entry(self) -> dict[str, Any]:
        """See the base class."""
        return {**self.options, "tool": self.tool}


def _kind(value: Any) -> str:
    name = value.get("tool") if isinstance(value, dict) else getattr(value, "tool", None)
    return OWN if ":" in str(name) else str(name)


ToolConfig = Annotated[
    Annotated[CalculatorTool, Tag("calculator")]
    | Annotated[PythonTool, Tag("python")]
    | Annotated[WorkspaceTool, Tag("workspace")]
    | Annotated[SearchTool, Tag("search")]
    | Annotated[HttpSearchTool, Tag("http_search")]
    | Annotated[McpTool, Tag("mcp")]
    | Annotated[OwnTool, Tag(OWN)],
    Discriminator(_kind),
]
ToolList: TypeAlias = list[ToolConfig]


def as_tool_list(value: Any) -> Any:
    """Expand `calculator`, which is short for `{tool: calculator}`."""
    return (
        [{"tool": entry} if isinstance(entry, str) else entry for entry in value] if isinstance(value, list) else value
    )


class ToolRewardsConfig(Section):
    """Rewards of tool calls themselves, in addition to the environment's reward for the episode."""

    call: float = option(0.0, "Reward of each call, whether it works or not.")
    success: float = option(0.0, "Additional reward of each call that works.")
    error: float = option(0.0, "Additional reward of each call that fails: wrong arguments, or a program that fails.")
    format: float = option(0.0, "Reward of each malformed call.")


class ToolCallsConfig(Section):
    """How tools are called. A response with calls is a separate turn, which their results answer."""

    form: Literal["auto", "xml", "json", "hermes", "llama", "mistral", "harmony", "glm", "gemma4", "template"] = option(
        "auto",
        "How calls are written, and explained to the model. `template`: as the model's own chat template has it, which "
        "must show tools. `auto`: explained as `xml`, and any form is read.",
    )
    parse_reasoning: bool = option(
        False, "Whether calls inside of the model's reasoning (`<think>…</think>`, …) count; else only those behind it."
    )
    max_uses: int = option(10, "Calls of one episode, malformed ones included; then replies are answers.", ge=1)
    explain: bool = option(
        True, "Whether the first observation says which tools there are and how to call them; a `template` does it."
    )
    rewards: ToolRewardsConfig = option(ToolRewardsConfig(), "What calls are worth by themselves.")
    max_result_chars: int = option(8_000, "A longer result loses its middle.", unit="characters", ge=1)
    time_limit_s: float = option(120.0, "A call that takes longer is a failure of ours.", unit="s", gt=0)


def tool_arguments(tools: Sequence[ToolConfig], calls: ToolCallsConfig) -> dict[str, Any]:
    """Return the arguments of `roll.envs.tools.with_tools`; empty without tools."""
    if not tools:
        return {}
    return {
        "tools": [tool.entry for tool in tools],
        "form": calls.form,
        **({"parse_reasoning": True} if calls.parse_reasoning else {}),
        "max_tool_uses": calls.max_uses,
        "rewards": calls.rewards.model_dump(),
        "explain": calls.explain,
        "max_result_chars": calls.max_result_chars,
        "call_time_limit_s": calls.time_limit_s,
    }
