"""Source and compiled code of the modules that run in other processes.

In those processes, the modules keep their names and need no installation. In this process they are ordinary modules,
for tests, type checkers and linters.
"""

from __future__ import annotations

import functools
import marshal
from pathlib import Path

__all__ = ["AGENT_READER", "get_agent_bytecode", "get_agent_source", "get_spawner_source", "get_zygote_bytecode"]

_ROOT = Path(__file__).parent
_AGENT_MODULES = (
    "agent.kernel",
    "agent.usage",
    "agent.termination",
    "agent.layers",
    "agent.locks",
    "agent.terminal",
    "agent.interpreter",
    "agent.programs",
    "agent.requests",
    "agent.spare",
    "agent.run",
    "agent.shell",
    "agent.serve",
)
_SPAWNER_MODULES = ("agent.kernel", "host.cgroup", "host.idmap", "host.image", "host.slots", "host.spawner")
_ZYGOTE_MODULES = (*_AGENT_MODULES, "host.zygote")

# The loader creates modules without files, so no file of this package has to be visible where they run.
_LOADER_SOURCE = """
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
_AGENT_MAIN = """
def run():
    from roll_sandbox.agent import programs, serve
    try:
        serve.main()
    except programs.UnwindAndRun as next_step:
        return next_step.function, next_step.arguments
step = run()
while True:
    step = step[0](*step[1])  # the next step, if a step returns: no frame of the agent is left below a program
"""
_ZYGOTE_MAIN = """
from roll_sandbox.host import zygote
zygote.main()
"""
_SPAWNER_MAIN = """
from roll_sandbox.host import spawner
spawner.main()
"""

AGENT_READER = "import marshal,os;a,b,c=marshal.loads(os.pread(3,1<<20,0));exec(a);load(b);exec(c)"
"""Code for `python -c` that reads the bytecode of `get_agent_bytecode` or `get_zygote_bytecode` from file descriptor 3,
and runs it.
"""


def _read_sources(modules: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(f"roll_sandbox.{name}", (_ROOT / f"{name.replace('.', '/')}.py").read_text()) for name in modules]


@functools.cache
def get_agent_source() -> str:
    """Return the agent's source as one Python program."""
    # The program is one argument of `python -c`, and the kernel limits an argument to 128 KiB (execve(2),
    # MAX_ARG_STRLEN).
    return f"{_LOADER_SOURCE}\nload({_read_sources(_AGENT_MODULES)!r})\n{_AGENT_MAIN}"


@functools.cache
def get_spawner_source() -> str:
    """Return the spawner's source as one Python program."""
    return f"{_LOADER_SOURCE}\nload({_read_sources(_SPAWNER_MODULES)!r})\n{_SPAWNER_MAIN}"


@functools.cache
def get_agent_bytecode() -> bytes:
    """Return the agent's bytecode for this Python, to be run by `AGENT_READER`."""
    return _compile_modules(_AGENT_MODULES, _AGENT_MAIN)


@functools.cache
def get_zygote_bytecode() -> bytes:
    """Return the bytecode of the zygote and of the agents that it forks, to be run by `AGENT_READER`."""
    return _compile_modules(_ZYGOTE_MODULES, _ZYGOTE_MAIN + _AGENT_MAIN)


def _compile_modules(modules: tuple[str, ...], main: str) -> bytes:
    parts = [(name, compile(text, f"<{name}>", "exec", dont_inherit=True)) for name, text in _read_sources(modules)]
    first, last = (compile(text, "<agent>", "exec", dont_inherit=True) for text in (_LOADER_SOURCE, main))
    return marshal.dumps((first, parts, last))
