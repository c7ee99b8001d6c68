"""The modules that run in other processes, as source or compiled code for the Python there.

They keep their names, so they are ordinary modules here (tests, types, linters) and need no installation there.
"""

from __future__ import annotations

import functools
import marshal
from pathlib import Path

__all__ = ["AGENT_READER", "agent_bytecode", "agent_source", "spawner_source", "zygote_bytecode"]

_ROOT = Path(__file__).parent
_AGENT = (
    "agent.kernel",
    "agent.usage",
    "agent.termination",
    "agent.layers",
    "agent.locks",
    "agent.terminal",
    "agent.programs",
    "agent.requests",
    "agent.spare",
    "agent.run",
    "agent.shell",
    "agent.serve",
)
_SPAWNER = ("agent.kernel", "host.cgroup", "host.idmap", "host.image", "host.slots", "host.spawner")
_ZYGOTE = (*_AGENT, "host.zygote")

_LOADER = """
import sys
def load(parts):
    kind = type(sys)
    def parent(name):
        above, _, short = name.rpartition(".")
        if above and above not in sys.modules:
            package = sys.modules[above] = kind(above)
            package.__path__ = []
            parent(above)
        return sys.modules.get(above), short
    for name, code in parts:
        package, short = parent(name)
        module = sys.modules[name] = kind(name)
        exec(code, module.__dict__)
        setattr(package, short, module)
"""
_RUN_AGENT = """
def run():
    from roll_sandbox.agent import programs, serve
    try:
        serve.main()
    except programs.RunAtTop as become:
        return become.function, become.arguments
found = run()
while True:
    found = found[0](*found[1])  # what it goes on with, if it returns: no frame of the agent is left below a program
"""
_RUN_ZYGOTE = """
from roll_sandbox.host import zygote
zygote.main()
"""
_RUN_SPAWNER = """
from roll_sandbox.host import spawner
spawner.main()
"""

AGENT_READER = "import marshal,os;a,b,c=marshal.loads(os.pread(3,1<<20,0));exec(a);load(b);exec(c)"
"""Code for `python -c`, with file descriptor 3 on the bytes of `agent_bytecode` or `zygote_bytecode`."""


def _read_sources(modules: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(f"roll_sandbox.{name}", (_ROOT / f"{name.replace('.', '/')}.py").read_text()) for name in modules]


@functools.cache
def agent_source() -> str:
    """Return the source of the agent as one Python program."""
    return f"{_LOADER}\nload({_read_sources(_AGENT)!r})\n{_RUN_AGENT}"


@functools.cache
def spawner_source() -> str:
    """Return the source of the spawner as one Python program."""
    return f"{_LOADER}\nload({_read_sources(_SPAWNER)!r})\n{_RUN_SPAWNER}"


@functools.cache
def agent_bytecode() -> bytes:
    """Return the agent, compiled for this Python, for `AGENT_READER`."""
    return _compile_modules(_AGENT, _RUN_AGENT)


@functools.cache
def zygote_bytecode() -> bytes:
    """Return the zygote, compiled for this Python, for `AGENT_READER`; after its forks it is an agent."""
    return _compile_modules(_ZYGOTE, _RUN_ZYGOTE + _RUN_AGENT)


def _compile_modules(modules: tuple[str, ...], run: str) -> bytes:
    parts = [(name, compile(text, f"<{name}>", "exec", dont_inherit=True)) for name, text in _read_sources(modules)]
    first, last = (compile(text, "<agent>", "exec", dont_inherit=True) for text in (_LOADER, run))
    return marshal.dumps((first, parts, last))
