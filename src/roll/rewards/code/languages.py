"""The languages of answers, and the tool chains that they need."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from roll_sandbox.system_plan import make_environment

__all__ = ["TOOL_CHAINS", "ToolChain", "describe_missing_tool"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolChain:
    """The tools that run programs of a language. Python needs none, since its programs are forked from a running
    interpreter.
    """

    file: str
    argv: tuple[str, ...]
    """The command; empty to use the running interpreter."""
    compile: tuple[str, ...] = ()
    needs: str = ""
    """The program that must be installed."""
    package: str = ""
    """The Debian package of that program."""


TOOL_CHAINS = {
    "python": ToolChain(file="solution.py", argv=()),
    "bash": ToolChain(file="solution.sh", argv=("bash", "solution.sh"), needs="bash", package="bash"),
    "javascript": ToolChain(file="solution.js", argv=("node", "solution.js"), needs="node", package="nodejs"),
    "cpp": ToolChain(
        file="solution.cpp",
        argv=("./solution",),
        compile=("g++", "-std=c++17", "-O2", "-o", "solution", "solution.cpp"),
        needs="g++",
        package="g++",
    ),
}


def describe_missing_tool(language: str) -> str:
    """Return a message that names the missing tool of a language; empty if nothing is missing on this machine."""
    tools = TOOL_CHAINS[language]
    if not tools.needs or shutil.which(tools.needs, path=make_environment()["PATH"]):
        return ""
    return (
        f"programs in {language} require '{tools.needs}', which is not in the sandbox's path on this machine "
        f"({make_environment()['PATH']}): install it (Debian: apt-get install {tools.package})"
    )
