"""The public types: sandbox specs, programs and results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, TypeAlias

__all__ = [
    "Chunk",
    "Command",
    "ExecutionResult",
    "Limit",
    "Limits",
    "Mount",
    "Outcome",
    "Program",
    "PythonCode",
    "SandboxSpec",
    "Snapshot",
    "Usage",
]

Trust: TypeAlias = Literal["untrusted", "trusted"]


class Limit(StrEnum):
    """A limit that a program can hit."""

    WALL_TIME = "wall_time"
    CPU_TIME = "cpu_time"
    MEMORY = "memory"
    PROCESSES = "processes"
    OUTPUT = "output"
    FILE_SIZE = "file_size"
    DISK = "disk"


class Outcome(StrEnum):
    """The outcome of a program. If the program hit a limit, the outcome has the name of that `Limit`."""

    EXITED = "exited"
    """The program exited by itself, with an exit code."""
    SIGNALLED = "signalled"
    """A signal ended the program, and no limit was the cause."""
    WALL_TIME = "wall_time"
    CPU_TIME = "cpu_time"
    MEMORY = "memory"
    PROCESSES = "processes"
    OUTPUT = "output"
    FILE_SIZE = "file_size"
    DISK = "disk"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of a sandbox and of each program in it."""

    wall_s: float = 10.0
    """Wall time of one program, in seconds from its start."""
    cpu_s: float | None = None
    """CPU seconds of one program and everything that it starts; `None` for no limit."""
    memory_bytes: int = 512 * 2**20
    """Memory of everything in the sandbox, including its files."""
    max_processes: int = 64
    """Live processes and threads in the sandbox, including the init process of each session, and the inits of programs
    beyond the first few that run at the same time.
    """
    max_open_files: int = 256
    file_size_bytes: int = 64 * 2**20
    """Size of one file."""
    disk_bytes: int = 64 * 2**20
    """Total size of all files in home, /tmp and /dev/shm, which are in memory."""
    max_files: int = 16384
    output_bytes: int = 2**20
    """Total output of one program: stdout, stderr and result. Reaching this limit ends the program."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise ValueError(f"sandbox limit {name} must be positive, got {value}.")


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A file or directory of the host that programs may read. It must be readable for every user of the host.

    Its content should not change while sandboxes use it, because they may still read the old content.
    """

    source: str
    target: str
    upload: bool = False
    """If True, upload the content (up to 16 MiB) to a service; otherwise `source` is a path on its machine."""


@dataclass(frozen=True, kw_only=True)
class SandboxSpec:
    """The properties of a sandbox. Unused sandboxes with identical specs are interchangeable: each spec has a pool."""

    limits: Limits = field(default_factory=Limits)
    trust: Trust = "untrusted"
    """The origin of the code. The `subprocess` runtime runs only `trusted` code."""
    mounts: tuple[Mount, ...] = ()
    """Files and directories of the host to show in the sandbox, such as a directory of Python packages."""
    python_path: tuple[str, ...] = ()
    """Directories in the sandbox from which Python programs may import, in addition to the standard library."""
    preload: tuple[str, ...] = ()
    """Modules that a sandbox imports in advance, so that importing them in a program is fast."""
    pool: str = ""
    """Name of a separate pool. Programs of different pools never use the same sandbox, not even one after the other. A
    checker whose data a candidate must not see (the expected output) needs a separate pool: the agent may keep a copy
    in its memory, and programs are forks of the agent.
    """
    image: str | None = None
    """Image whose files and programs replace this machine's: a name that the runtime knows (`docker`: an image of the
    engine; `bubblewrap`: an image of `roll-sandbox image list`).
    """
    affinity: str = ""
    """Sandboxes with the same affinity are placed on the same worker of a service, if it has room."""


@dataclass(frozen=True, kw_only=True)
class _ProgramSettings:
    """The settings of all types of programs."""

    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Content by path, written before the program starts; relative paths are below home."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables, in addition to those of every program (PATH, HOME, LANG)."""
    cwd: str | None = None
    """Working directory; by default home."""
    interactive: bool = False
    """True if standard input stays open after `stdin`: `Job.write` sends more, `Job.end_input` closes it."""
    terminal: tuple[int, int] | None = None
    """Rows and columns of a terminal for input and output (`stdout`), with `Sandbox.start` only. Its output has no
    limit unless `output_bytes` is given: the program waits for `Job.update_terminal`, and only the last 4 MiB are kept.
    """
    result: bool = False
    """If True, open file descriptor 3, whose data becomes `ExecutionResult.result`, separate from stdout and stderr.
    """
    wall_s: float | None = None
    """Wall-clock limit in seconds, instead of the spec's."""
    cpu_s: float | None = None
    """CPU limit in seconds, instead of the spec's."""
    output_bytes: int | None = None
    """Output limit in bytes, instead of the spec's."""

    def __post_init__(self) -> None:
        size = self.terminal
        if size is not None and not (len(size) == 2 and all(type(each) is int and 0 < each < 2**16 for each in size)):
            raise ValueError(f"a terminal must have rows and columns from 1 to 65535, got {str(size)[:80]}.")


@dataclass(frozen=True, kw_only=True)
class Command(_ProgramSettings):
    """A program given by its arguments; the first argument is looked up in PATH."""

    argv: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PythonCode(_ProgramSettings):
    """Python source, run as `__main__` by a fork of a running interpreter, so that no interpreter has to start."""

    source: str
    argv: tuple[str, ...] = ()
    """`sys.argv[1:]`."""


Program: TypeAlias = Command | PythonCode


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A chunk of output, as received."""

    stream: Literal["stdout", "stderr", "result"]
    data: bytes


@dataclass(frozen=True, kw_only=True)
class ExecutionResult:
    """The result of a program. Everything in it comes from the program and must not be trusted."""

    outcome: Outcome
    exit_code: int | None
    """Exit code as in a shell: 128 + signal if a signal ended it; `None` if a limit ended it."""
    stdout: bytes = b""
    stderr: bytes = b""
    result: bytes = b""
    """Data written to file descriptor 3, if `result` was set."""
    limits_hit: frozenset[Limit] = frozenset()
    """All limits that the program hit, including those that it survived."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """CPU seconds of the program and everything that it started, as counted by the kernel. docs/security.md lists
    exceptions.
    """
    peak_memory_bytes: int = 0
    """Peak memory of the largest process."""

    @property
    def ok(self) -> bool:
        """True if the program exited by itself with exit code 0."""
        return self.outcome is Outcome.EXITED and self.exit_code == 0


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The resource usage of a sandbox."""

    cpu_s: float
    """CPU seconds since the sandbox's start."""
    memory_bytes: int
    """Current memory of the sandbox's processes; shared pages are counted once."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The files of a sandbox at one moment (home and /tmp), without its processes."""

    archive: bytes
    """A tar archive made in the sandbox. It is not trusted, and is only unpacked in sandboxes."""
