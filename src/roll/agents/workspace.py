"""The working directory of an agent program, one per rollout, and the answer that the program leaves in it."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.errors import ConfigError, InfraError, shorten

if TYPE_CHECKING:
    from roll.config.agents import AgentConfig

__all__ = [
    "FRESH_DIRECTORY",
    "check_workspace",
    "extract_answer",
    "open_directory",
    "read_answer",
    "read_files",
    "resolve_command",
]

FRESH_DIRECTORY = "fresh"
_COLUMN_PATTERN = re.compile(r"\{(\w+)\}")
MAX_BYTES_IN_SANDBOX = 64 * 2**20


def check_workspace(config: AgentConfig) -> None:
    """Check before the run starts that the agent's program and directory exist.

    Raises:
        ConfigError: The program or the directory is missing.
    """
    if config.command is None:
        return
    if config.directory not in (None, FRESH_DIRECTORY) and not _COLUMN_PATTERN.search(config.directory):
        _find_directory(config.directory)
    program = config.command[0]
    if not config.sandbox and "/" not in program and shutil.which(program, path=config.environment.get("PATH")) is None:
        raise ConfigError(f"agent.command: program '{program}' is not on the PATH: install it, or write its path.")


def _find_directory(path: str) -> Path:
    found = Path(path).expanduser()
    if not found.is_dir():
        what = "is not a directory" if found.exists() else "does not exist"
        raise ConfigError(f"agent.directory: '{found}' {what} (working directory: '{Path.cwd()}').")
    return found


def _resolve_source(directory: str, metadata: Mapping[str, Any]) -> Path:
    """Return the directory to copy for a rollout: `directory` with each `{column}` replaced from the prompt's metadata.

    Raises:
        ConfigError: The metadata lacks a column, or the directory does not exist.
    """

    def replace_field(match: re.Match[str]) -> str:
        name = match[1]
        if name not in metadata:
            known = ", ".join(sorted(map(str, metadata))[:20]) or "none"
            raise ConfigError(f"agent.directory: a prompt has no column '{name}'. Columns: {known}.")
        return str(metadata[name])

    return _find_directory(_COLUMN_PATTERN.sub(replace_field, directory))


@asynccontextmanager
async def open_directory(directory: str | None, metadata: Mapping[str, Any]) -> AsyncIterator[Path | None]:
    """Yield a directory for one rollout, and remove it at the end; yield `None` for the run's working directory.

    Args:
        directory: The value of `AgentConfig.directory`.
        metadata: The prompt's metadata.

    Raises:
        ConfigError: The path refers to a column that the prompt lacks, or the directory to copy does not exist.
        InfraError: The directory cannot be created, for instance on a full disk.
    """
    if directory is None:
        yield None
        return
    source = None if directory == FRESH_DIRECTORY else _resolve_source(directory, metadata)
    try:
        top = Path(tempfile.mkdtemp(prefix="roll-agent-"))
    except OSError as error:
        raise InfraError(f"the working directory of an agent cannot be created: {error}") from error
    try:
        work = top / (source.resolve().name if source is not None else "work")
        try:
            if source is None:
                work.mkdir()
            else:
                await asyncio.to_thread(shutil.copytree, source, work, symlinks=True)
        except (OSError, shutil.Error) as error:
            raise InfraError(f"agent.directory: '{source}' cannot be copied: {shorten(str(error))}") from error
        yield work
    finally:
        await asyncio.to_thread(shutil.rmtree, top, ignore_errors=True)


def resolve_command(command: Sequence[str], directory: str | None) -> list[str]:
    """Return a command that can run in `directory`: paths of files in the current directory become absolute.

    Without a directory, the command is returned unchanged.
    """
    if directory is None:
        return list(command)
    return [os.path.abspath(word) if Path(word).is_file() else word for word in command]


def read_files(directory: str | None, metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files of the agent's directory by relative path, for a program in a sandbox.

    Raises:
        ConfigError: The directory is missing or too large.
    """
    if directory is None or directory == FRESH_DIRECTORY:
        return {}
    source = _resolve_source(directory, metadata)
    found: dict[str, bytes] = {}
    num_bytes = 0
    for path in sorted(source.rglob("*")):
        if not path.is_file():
            continue
        num_bytes += path.stat().st_size
        if num_bytes > MAX_BYTES_IN_SANDBOX:
            limit = MAX_BYTES_IN_SANDBOX // 2**20
            raise ConfigError(
                f"agent.directory: '{source}' is larger than {limit} MiB, the maximum for a sandbox: remove files."
            )
        found[str(path.relative_to(source))] = path.read_bytes()
    return found


def read_answer(path: Path, max_bytes: int) -> str:
    """Return the first `max_bytes` bytes of a file as text, or an empty string if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(max_bytes).decode(errors="replace")
    except OSError:
        return ""


def extract_answer(text: str, pattern: str | None) -> str:
    """Return the first group of the last match of `pattern` in the text, or the whole match if it has no group.

    The result is an empty string if nothing matches, and the whole text if `pattern` is `None`.
    """
    if pattern is None:
        return text
    found = deque(re.finditer(pattern, text), maxlen=1)  # the last match, without a list of all
    if not found:
        return ""
    [last] = found
    return (last[1] or "") if last.re.groups else last[0]
