"""Tools that need something opened: Python, a shell with files, an MCP server."""

from __future__ import annotations

import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from roll.envs.tools import Tool, Toolbox, ToolCall, ToolEnv, ToolResult, ToolSource, build_tools
from roll.envs.tools.base import ToolError
from roll.envs.tools.mcp import McpTools
from roll.envs.tools.python import PythonTool
from roll.envs.tools.workspace import WorkspaceTools
from roll.errors import ConfigError, InfraError

needs_bubblewrap = pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap is not installed")


async def used(source: ToolSource, name: str, **arguments: Any) -> ToolResult:
    return await Toolbox(tools=await source.open()).execute(ToolCall(name=name, arguments=arguments))


@needs_bubblewrap
async def test_tool_sandbox_programs_run_and_their_failures_are_the_models() -> None:
    source = PythonTool(time_limit_s=1.0, only_last_error_line=True)
    try:
        assert (await used(source, "python", code="print(6 * 7)")).text == "42"
        failed = await used(source, "python", code="print('so far')\n1 / 0")
        assert (failed.ok, failed.text) == (False, "so far\nZeroDivisionError: division by zero\n(Exit code 1.)")
        endless = await used(source, "python", code="while True: pass")
        assert not endless.ok
        assert "time" in endless.text
        assert (await used(source, "python", code="\0")).ok is False
    finally:
        await source.close()
        await source.close()


class Box:
    def __init__(self, tools: list[Tool]) -> None:
        self._box = Toolbox(tools=tools)

    async def __call__(self, name: str, **arguments: str) -> str:
        return (await self._box.execute(ToolCall(name=name, arguments=arguments))).text


@pytest_asyncio.fixture
async def workspace() -> AsyncIterator[WorkspaceTools]:
    if not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    source = WorkspaceTools(time_limit_s=2.0)
    yield source
    await source.close()


async def test_tool_sandbox_a_workspace_keeps_its_shell_and_files_for_an_episode_and_no_longer(
    workspace: WorkspaceTools,
) -> None:
    use = Box(list(await workspace.open()))
    assert await use("write_file", path="notes/a.txt", content="one\ntwo\n") == "Wrote 8 characters to notes/a.txt."
    await use("shell", command="cd notes; X=5")
    assert await use("shell", command="cat a.txt; echo $X") == "one\ntwo\n5"
    assert await use("edit_file", path="notes/a.txt", old="two", new="three") == "Replaced it in notes/a.txt."
    assert await use("read_file", path="notes/a.txt") == "one\nthree\n"
    assert "exactly once in the file, but occurs 3 times" in await use(
        "edit_file", path="notes/a.txt", old="e", new="x"
    )
    assert "cannot read" in await use("read_file", path="missing")
    assert await use("shell", command="false") == "(Exit code 1.)"
    await use("shell", command="exit")
    assert await use("shell", command="echo $X again") == "again", "a new shell"
    assert "the path must name a file" in await use("read_file", path="\0")
    use = Box(list(await workspace.open()))
    assert "cannot read" in await use("read_file", path="notes/a.txt"), "a new episode has a new sandbox"


async def test_tool_sandbox_a_model_that_removes_its_home_hears_so(workspace: WorkspaceTools) -> None:
    use = Box(list(await workspace.open()))
    await use("shell", command="rm -rf ~; exit")
    assert "check that the home directory still exists" in await use("shell", command="pwd")


def test_tool_sandbox_programs_without_isolation_must_be_trusted() -> None:
    with pytest.raises(ConfigError, match="does not isolate programs"):
        build_tools([{"tool": "python", "runtime": "subprocess"}])


SERVER = """
from mcp.server.mcpserver import MCPServer
server = MCPServer("test")

@server.tool(description="Adds.")
def add(a: int, b: int) -> str:
    return str(a + b)

@server.tool(name="fail-now", description="Fails.")
def fail() -> str:
    raise ValueError("no luck")

server.run()
"""


class Refuses(Exception):
    code = -32602


async def test_tool_sandbox_a_server_that_refuses_arguments_says_so_to_the_model() -> None:
    pytest.importorskip("mcp")
    source = McpTools(command=["server"])

    async def call_tool(name: str, arguments: dict[str, Any]) -> Any:
        raise Refuses("a is no number") if arguments else ConnectionError("gone")

    source._client = SimpleNamespace(call_tool=call_tool)
    with pytest.raises(ToolError, match="a is no number"):
        await source.call_tool("add", {"a": "x"})
    with pytest.raises(InfraError, match="gone"):
        await source.call_tool("add", {})


class Still:
    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 0.0, True, False, {}


@pytest.mark.slow
async def test_tool_sandbox_tools_of_an_mcp_server_are_called_over_its_pipes(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(SERVER)
    import os

    paths = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, str(tmp_path / "server.py")]
    (source,) = build_tools([{"tool": "mcp", "command": command, "env": {"PYTHONPATH": paths}}])
    env = ToolEnv(Still(), [source], tool_format="hermes")
    try:
        observation, _ = await env.reset(0)
        assert '"add"' in observation
        for _ in range(2):
            call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
            assert "\n5\n" in (await env.step(call))[0]
            await env.reset(1)  # the connection stays
        observation, *_, info = await env.step('<tool_call>{"name": "fail_now", "arguments": {}}</tool_call>')
        assert "fail-now" in observation
        assert info["tool_error_counter"] == 1
        observation, *_ = await env.step('<tool_call>{"name": "add", "arguments": {"a": "x", "b": 3}}</tool_call>')
        assert "not of type 'integer'" in observation
    finally:
        await env.close()
    (source,) = build_tools([{"tool": "mcp", "command": [sys.executable, "-c", "1"], "connect_time_limit_s": 5}])
    with pytest.raises(InfraError, match="MCP server"):
        await source.open()
    await source.close()
