"""Types for the content of messages to the agent: the sandbox's settings, and requests to start programs."""

from __future__ import annotations

__all__ = ["Request", "Settings"]


class _Record:
    """Base class whose instances have the received fields as attributes."""

    def __init__(self, fields):
        self.__dict__.update(fields)


class Limits(_Record):
    """The limits of the sandbox and its programs."""

    disk_bytes: int
    max_files: int
    max_open_files: int
    max_processes: int
    memory_bytes: int
    file_size_bytes: int


class Image(_Record):
    """The image of a sandbox: its layers, mounts, working directory and shell."""

    layers: int
    binds: list[str]
    cwd: str
    bash: list[str]


class Settings(_Record):
    """Settings of the sandbox, as the host sent them."""

    home: str
    mount_space: bool
    """True if the agent mounts file systems, and creates namespaces for programs."""
    isolated: bool
    has_own_cgroup: bool
    """True if the control group contains nothing but the sandbox (`docker`)."""
    counts_cpu: bool
    watch_memory: bool
    """True if the agent must sample the memory of programs, since no control group limits it. For the same reason,
    `limit_processes` and `limit_address_space` are then true.
    """
    limit_processes: bool
    limit_address_space: bool
    filter: bytes
    env: dict[str, str]
    python_path: list[str]
    preload: list[str]
    first_mount_namespace = -1
    """File descriptor of the mount namespace in which the agent started; only in a sandbox with an image."""

    def __init__(self, fields):
        super().__init__(fields)
        self.limits = Limits(fields["limits"])
        self.image = Image(fields["image"]) if fields["image"] else None


class Request(_Record):
    """A request to start a program, a session, or a command in a session (see `serve.py`)."""

    fresh: bool
    result: bool
    alone: bool
    stdin: int
    files: dict[str, bytes]
    cwd: str
    env: dict[str, str]
    cpu_s: float | None
    wall_s: float
    output_bytes: int
    source: str | None
    argv: list[str]
    command: str
    interactive: bool
    terminal: object
    terminal_fds = exit_code_fd = spare_fd = None
    """File descriptors: both ends of a terminal, the pipe for a session's exit codes, the socket of a spare child."""
