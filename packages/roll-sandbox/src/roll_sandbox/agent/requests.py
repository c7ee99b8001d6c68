"""Records that the host sends: the settings of the sandbox, and requests to start programs in it."""

from __future__ import annotations

__all__ = ["Request", "Settings"]


class _Fields:
    def __init__(self, given):
        self.__dict__.update(given)


class Limits(_Fields):
    """Bounds of the sandbox and its programs."""

    disk_bytes: int
    max_files: int
    max_open_files: int
    max_processes: int
    memory_bytes: int
    file_size_bytes: int


class Image(_Fields):
    """The image of a sandbox: its layers, and where its programs start."""

    layers: int
    binds: list[str]
    cwd: str
    bash: list[str]


class Settings(_Fields):
    """Settings of the sandbox, as the host sent them."""

    home: str
    mount_space: bool
    """Whether the sandbox makes namespaces."""
    isolated: bool
    has_own_cgroup: bool
    """Whether the control group is the sandbox's alone (`docker`)."""
    counts_cpu: bool
    watch_memory: bool
    """Whether the agent must sample the memory of programs, since no control group bounds it. The two fields below
    likewise replace a control group's bounds.
    """
    limit_processes: bool
    limit_address_space: bool
    filter: bytes
    env: dict[str, str]
    python_path: list[str]
    preload: list[str]
    beginning = -1
    """File descriptor of the mount namespace that the agent of a sandbox with an image began in."""

    def __init__(self, given):
        super().__init__(given)
        self.limits = Limits(given["limits"])
        self.image = Image(given["image"]) if given["image"] else None


class Request(_Fields):
    """A program, a session, or a command in one (see `serve.py`)."""

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
    pair = report = line = None
    """File descriptors: a terminal's pair, a session's exit codes, the socket of a spare child."""
