"""The agent program's working directory, one per rollout, and the answer in it."""

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

from roll.errors import ConfigError, InfraError, short

if TYPE_CHECKING:
    from roll.config.agents import AgentConfig

__all__ = ["FRESH", "answer_in", "check_workspace", "command_from", "files_of", "open_directory", "read_answer"]

FRESH = "fresh"
_COLUMN = re.compile(r"\{(\w+)\}")
MOST_BYTES_IN_SANDBOX = 64 * 2**20


def check_workspace(config: AgentConfig) -> None:
    """Check a command's program and directory before anything is started.

    Raises:
        ConfigError: The program or the directory is missing.
    """
    if config.command is None:
        return
    if config.directory not in (None, FRESH) and not _COLUMN.search(config.directory):
        _existing(config.directory)
    program = config.command[0]
    if not config.sandbox and "/" not in program and shutil.which(program, path=config.environment.get("PATH")) is None:
        raise ConfigError(f"agent.command: there is no program '{program}' on the PATH: install it, or give its path.")


def _existing(path: str) -> Path:
    found = Path(path).expanduser()
    if not found.is_dir():
        what = "is not a directory" if found.exists() else "does not exist"
        raise ConfigError(f"agent.directory: '{found}' {what} (looked for from '{Path.cwd()}').")
    return found


def _source(directory: str, metadata: Mapping[str, Any]) -> Path:
    """Return the directory that is copied for a rollout.

    Raises:
        ConfigError: The prompt lacks a column, or the directory does not exist.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in metadata:
            known = ", ".join(sorted(map(str, metadata))[:20]) or "none"
            raise ConfigError(f"agent.directory: a prompt has no column '{name}' (its columns: {known}).")
        return str(metadata[name])

    return _existing(_COLUMN.sub(value, directory))


@asynccontextmanager
async def open_directory(directory: str | None, metadata: Mapping[str, Any]) -> AsyncIterator[Path | None]:
    """Run the body with a directory for one rollout, which is removed at the end; `None` is the run's own directory.

    Args:
        directory: The value of `AgentConfig.directory`.
        metadata: The prompt's metadata.

    Raises:
        ConfigError: There is nothing to copy.
        InfraError: The directory cannot be created, for instance on a full disk.
    """
    if directory is None:
        yield None
        return
    source = None if directory == FRESH else _source(directory, metadata)
    try:
        top = Path(tempfile.mkdtemp(prefix="roll-agent-"))
    except OSError as error:
        raise InfraError(f"no directory can be made for an agent: {error}") from error
    try:
        work = top / (source.resolve().name if source is not None else "work")
        try:
            if source is None:
                work.mkdir()
            else:
                await asyncio.to_thread(shutil.copytree, source, work, symlinks=True)
        except (OSError, shutil.Error) as error:
            raise InfraError(f"agent.directory: '{source}' cannot be copied: {short(str(error))}") from error
        yield work
    finally:
        await asyncio.to_thread(shutil.rmtree, top, ignore_errors=True)


def command_from(command: Sequence[str], directory: str | None) -> list[str]:
    """Return the command for a program in another directory, with absolute paths for files of the run's directory."""
    if directory is None:
        return list(command)
    return [os.path.abspath(word) if Path(word).is_file() else word for word in command]


def files_of(directory: str | None, metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files of a directory, for a program in a sandbox, whose working directory is always separate.

    Raises:
        ConfigError: The directory is missing or too large.
    """
    if directory is None or directory == FRESH:
        return {}
    source = _source(directory, metadata)
    found: dict[str, bytes] = {}
    num_bytes = 0
    for path in sorted(source.rglob("*")):
        if not path.is_file():
            continue
        num_bytes += path.stat().st_size
        if num_bytes > MOST_BYTES_IN_SANDBOX:
            limit = MOST_BYTES_IN_SANDBOX // 2**20
            raise ConfigError(f"agent.directory: '{source}' has more than {limit} MiB, the most for a sandbox.")
        found[str(path.relative_to(source))] = path.read_bytes()
    return found


def read_answer(path: Path, most_bytes: int) -> str:
    """Return the text of a file that an agent may have written; empty if it does not exist."""
    try:
        with path.open("rb") as file:
            return file.read(most_bytes).decode(errors="replace")
    except OSError:
        return ""


def answer_in(text: str, pattern: str | None) -> str:
    """Return the last match of a pattern: its first group, or all of it; empty without a match."""
    if pattern is None:
        return text
    found = deque(re.finditer(pattern, text), maxlen=1)
    if not found:
        return ""
    [last] = found
    return (last[1] or "") if last.re.groups else last[0]
