"""What a sandbox is asked to do, and what it answers."""

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
    """How a program ended. Values that are limits have the names of `Limit`."""

    EXITED = "exited"
    """By itself, with an exit code."""
    SIGNALLED = "signalled"
    """By a signal that no limit sent."""
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
    """Of one program, from its start."""
    cpu_s: float | None = None
    """Of one program and all it starts, together; `None`: only `wall_s` bounds it."""
    memory_bytes: int = 512 * 2**20
    """Of everything in the sandbox, its files included."""
    max_processes: int = 64
    """Processes and threads alive in the sandbox at once. Each session, and each program beyond the first ones that run
    at the same time, counts as one more, which is its init."""
    max_open_files: int = 256
    file_size_bytes: int = 64 * 2**20
    """Of one file."""
    disk_bytes: int = 64 * 2**20
    """Of all files in home, /tmp and /dev/shm together; they live in memory."""
    max_files: int = 16384
    output_bytes: int = 2**20
    """Of one program: standard output, standard error and result together. Reaching it ends the program."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise ValueError(f"sandbox limit {name} is {value}; it must be positive.")


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A file or directory of the host that programs may read, if any user of the host may.

    Its content should not change while sandboxes use it: they may see the old content.
    """

    source: str
    target: str
    upload: bool = False
    """Whether a service elsewhere gets the content, once; else it mounts what is at `source` there. Up to 16 MiB."""


@dataclass(frozen=True, kw_only=True)
class SandboxSpec:
    """The kind of a sandbox. Unused sandboxes with equal specs are interchangeable: pools are kept per spec."""

    limits: Limits = field(default_factory=Limits)
    trust: Trust = "untrusted"
    """Who wrote the code. The `subprocess` runtime runs trusted code only."""
    mounts: tuple[Mount, ...] = ()
    """Read-only additions, for example a directory of Python packages."""
    python_path: tuple[str, ...] = ()
    """Directories in the sandbox from which Python programs may import, besides the standard library."""
    preload: tuple[str, ...] = ()
    """Modules that a warm sandbox has imported already, so that programs need not wait for them."""
    pool: str = ""
    """Programs of different pools never use the same sandbox, not even one after the other. A checker that is given
    what a candidate must not know (the expected output) belongs into a pool of its own: the agent that passes it on
    may keep a copy in its memory, and programs are forks of it."""
    image: str | None = None
    """Whose files and programs it has, in place of this machine's: a name that the runtime knows (`docker`: one of the
    engine's; `bubblewrap`: one of `roll-sandbox image list`)."""
    affinity: str = ""
    """Sandboxes of a service with the same word go to the same worker, where it has room."""


@dataclass(frozen=True, kw_only=True)
class _Settings:
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Written before the program starts; relative paths are below its home."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the few variables that every program gets (PATH, HOME, LANG)."""
    cwd: str | None = None
    """`None`: its home."""
    interactive: bool = False
    """Standard input stays open after `stdin`: `Job.write` brings more, `Job.end_input` ends it."""
    terminal: tuple[int, int] | None = None
    """Rows and columns of a terminal that it gets as input and output (`stdout`), for `Sandbox.start`. Its output has
    no limit unless `output_bytes` is given: it waits for `Job.shown`, and only the last 4 MiB are kept."""
    result: bool = False
    """Open file descriptor 3: what is written to it arrives as `ExecutionResult.result`, apart from what is printed."""
    wall_s: float | None = None
    """Instead of the spec's limit."""
    cpu_s: float | None = None
    """Instead of the spec's limit."""
    output_bytes: int | None = None
    """Instead of the spec's limit."""

    def __post_init__(self) -> None:
        size = self.terminal
        if size is not None and not (len(size) == 2 and all(type(each) is int and 0 < each < 2**16 for each in size)):
            raise ValueError(f"a terminal of {str(size)[:80]}: rows and columns are needed, from 1 to 65535.")


@dataclass(frozen=True, kw_only=True)
class Command(_Settings):
    """A program given by its arguments; the first is looked up in PATH."""

    argv: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PythonCode(_Settings):
    """Python source, run as `__main__` by a fork of a running interpreter, without the start of one."""

    source: str
    argv: tuple[str, ...] = ()
    """`sys.argv[1:]`."""


Program: TypeAlias = Command | PythonCode


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A piece of output, as received."""

    stream: Literal["stdout", "stderr", "result"]
    data: bytes


@dataclass(frozen=True, kw_only=True)
class ExecutionResult:
    """The result of a program. Everything in it comes from the program and must not be trusted."""

    outcome: Outcome
    exit_code: int | None
    """As a shell gives it: 128 + signal where a signal ended it; `None` where a limit ended it."""
    stdout: bytes = b""
    stderr: bytes = b""
    result: bytes = b""
    """What it wrote to file descriptor 3, where that was asked for."""
    limits_hit: frozenset[Limit] = frozenset()
    """Also those that it survived."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """Of it and all that it started, as the kernel counted it; see docs/security.md for where it cannot."""
    peak_memory_bytes: int = 0
    """Of its largest process."""

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.outcome is Outcome.EXITED and self.exit_code == 0


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What everything in a sandbox uses."""

    cpu_s: float
    """Since its start."""
    memory_bytes: int
    """Now, of its processes; pages that they share count once."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The files of a sandbox at one moment (home and /tmp), without its processes."""

    archive: bytes
    """A tar archive made in the sandbox. It is only ever unpacked in a sandbox: treat it as hostile."""
