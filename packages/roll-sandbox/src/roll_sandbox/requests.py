"""Builds messages to an agent: the sandbox's settings, and requests to run programs."""

from __future__ import annotations

from typing import Any

from roll_sandbox.errors import OversizedUploadError
from roll_sandbox.types import Command, Limits, Program, PythonCode, SandboxSpec

__all__ = ["check_strings", "make_agent_settings", "make_run_request"]


_UNLIMITED_BYTES = 2**52
"""Output limit of a program with a terminal: practically unlimited, since the program waits until its output is
shown."""


def make_agent_settings(
    spec: SandboxSpec, *, home: str, env: dict[str, str], image: dict[str, Any] | None = None, **flags: Any
) -> dict[str, Any]:
    """Return the settings of a sandbox, which are the first message to its agent.

    Args:
        spec: the sandbox's spec.
        home: home directory in the sandbox.
        env: environment variables of programs.
        image: layers that the agent mounts (`images/system.py`).
        flags: the remaining fields of `agent.requests.Settings`.
    """
    return {
        "home": home,
        "env": env,
        "image": image,
        "limits": dict(vars(spec.limits)),
        "preload": list(spec.preload),
        "python_path": list(spec.python_path),
        **flags,
    }


def make_run_request(program: Program, limits: Limits, *, alone: bool, fresh: bool) -> dict[str, Any]:
    """Return the request to the agent to run a program.

    Args:
        program: the program.
        limits: the sandbox's limits.
        alone: true if no other program runs in the sandbox at the same time.
        fresh: true if the program gets its own namespaces and files.

    Raises:
        TypeError: `program` is not a program, or its input or a file is not bytes.
        ValueError: a string has a null byte, or a limit is not a positive number.
        OversizedUploadError: the files or the input do not fit into the sandbox.
    """
    _check_types(program)
    request = {
        "alone": alone,
        "fresh": fresh,
        "result": program.result,
        "interactive": program.interactive,
        "files": dict(program.files),
        "env": dict(program.env),
        "cwd": program.cwd,
        "wall_s": limits.wall_s if program.wall_s is None else program.wall_s,
        "cpu_s": limits.cpu_s if program.cpu_s is None else program.cpu_s,
        "output_bytes": limits.output_bytes if program.output_bytes is None else program.output_bytes,
        "terminal": None if program.terminal is None else list(program.terminal),
        "source": program.source if isinstance(program, PythonCode) else None,
        "argv": list(program.argv),
    }
    if program.terminal is not None:
        if alone:
            raise ValueError(
                "a program with a terminal requires its own sandbox: call `create`, then `start` the program in that "
                "sandbox."
            )
        request["output_bytes"] = program.output_bytes or _UNLIMITED_BYTES
    check_strings(request)
    _check_size(program, limits)
    return request


def check_strings(request: dict[str, Any]) -> None:
    """Check that the arguments, variables and paths in a request have no null bytes.

    Raises:
        ValueError: an argument, a variable or a path has a null byte.
    """
    texts = [*request.get("argv", ()), *request["env"], *request["env"].values(), *request.get("files", ())]
    texts += [request["cwd"]] if request["cwd"] else []
    for text in texts:
        if "\0" in text:
            raise ValueError(f"arguments, variables and paths must not contain a null byte, got {text[:80]!r}.")


def _check_types(program: Program) -> None:
    if not isinstance(program, PythonCode | Command):
        raise TypeError(f"a program must be PythonCode(source=…) or Command(argv=(…)), got {type(program).__name__}.")
    if isinstance(program.argv, str):
        raise TypeError(f"argv must be a tuple of strings such as ('ls', '-l'), got the string {program.argv[:80]!r}.")
    for part, data in (("standard input", program.stdin), *program.files.items()):
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"'{part}' of a program must be bytes (text.encode()), got {type(data).__name__}.")
    for name in ("wall_s", "cpu_s", "output_bytes"):
        limit = getattr(program, name)
        if limit is not None and not (isinstance(limit, int | float) and limit > 0):
            raise ValueError(f"{name} of a program must be a positive number, got {str(limit)[:80]!r}.")


def _check_size(program: Program, limits: Limits) -> None:
    """Check that a program's files and input fit into its sandbox.

    Raises:
        OversizedUploadError: the files or the input do not fit.
    """
    files = sum(map(len, program.files.values()))
    source = len(program.source) if isinstance(program, PythonCode) else 0
    for part, size, most in (
        ("files", files, limits.disk_bytes),
        ("standard input and source", len(program.stdin) + source, limits.memory_bytes // 4),
    ):
        if size > most:
            raise OversizedUploadError(
                f"the size of a program's {part} must not exceed {most:,} bytes, got {size:,}: increase the limit "
                f"({'disk_bytes' if part == 'files' else 'memory_bytes; input may fill a quarter of it'}) or send "
                "less."
            )
