"""Redirect all output except ROLL's display from the terminal to log files.

    descriptors 1 and 2 (Python, C++, child processes) ──► logs/<role>-<rank>.log
    a duplicate of the original descriptor 1 ──► `Terminal`, used only by ROLL's console

The file descriptors themselves are redirected, so neither a library's logger, nor `printf` in C++, nor a child process
can overwrite the display. The output of a user's reward function goes to the log as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

__all__ = ["Terminal", "read_tail", "redirect_infrastructure_logs", "redirect_logs"]

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class Terminal:
    """The original standard output, on which ROLL draws its display."""

    def __init__(self, file: TextIO) -> None:
        self.file = file

    @property
    def is_interactive(self) -> bool:
        """True if the terminal can redraw a display in place."""
        return self.file.isatty() and os.environ.get("TERM", "") not in ("", "dumb")

    @property
    def size(self) -> tuple[int, int]:
        """Current columns and rows; 100 × 25 without a terminal."""
        with contextlib.suppress(OSError, ValueError):
            columns, rows = os.get_terminal_size(self.file.fileno())
            if columns and rows:
                return columns, rows
        return 100, 25


@contextlib.contextmanager
def redirect_infrastructure_logs(path: Path, *, level: int = logging.INFO) -> Iterator[Terminal]:
    """Append standard output, standard error, Python's loggers and warnings to `path` within a `with` block.

    Yields:
        The terminal, for ROLL's display. If standard output has no file descriptor, as in a notebook, the terminal
        wraps `sys.stdout`.

    Raises:
        OSError: `path` cannot be written.
    """
    # O_APPEND: the log is also written by child processes, which would otherwise overwrite each other's output.
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    _flush()
    saved = {number: os.dup(number) for number in (1, 2)}
    # In a notebook, sys.stdout is an object that sends text to the browser, not descriptor 1.
    python_owns_terminal = _get_descriptor(sys.stdout) != 1
    copy = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
    terminal = Terminal(sys.stdout if python_owns_terminal else copy)
    try:
        for number in saved:
            os.dup2(log, number)
        with _enable_line_buffering(), _redirect_loggers(log, level), _redirect_faults(log):
            yield terminal
    finally:
        _flush()
        with contextlib.suppress(OSError, ValueError):
            copy.close()
        for number, original in saved.items():
            os.dup2(original, number)
            os.close(original)
        os.close(log)


@contextlib.contextmanager
def redirect_logs(name: str) -> Iterator[Path]:
    """Write output and logs to a temporary file instead of the terminal within a `with` block.

    ROLL's warnings are still printed to standard error. If an exception propagates, the file is kept, and the exception
    names it.

    Yields:
        The path of the file.
    """
    directory = Path(tempfile.mkdtemp(prefix=f"roll-{name}-"))
    path = directory / f"{name}.log"
    with os.fdopen(os.dup(2), "w", encoding="utf-8", errors="replace") as stderr:
        handler = logging.StreamHandler(stderr)
        handler.setLevel(logging.WARNING)
        handler.setFormatter(logging.Formatter("warning: %(message)s"))
        own = logging.getLogger("roll")
        own.addHandler(handler)
        try:
            with redirect_infrastructure_logs(path):
                yield path
        except Exception:
            handler.handle(own.makeRecord(own.name, logging.WARNING, "", 0, f"the log is {path}", (), None))
            raise
        finally:
            own.removeHandler(handler)
    shutil.rmtree(directory, ignore_errors=True)


def read_tail(path: Path, num_lines: int = 12) -> list[str]:
    """Return at most the last `num_lines` non-empty lines of a log; an empty list if the log cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 64 * 1024))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if line.strip()][-num_lines:]


def _get_descriptor(stream: TextIO | None) -> int | None:
    try:
        return stream.fileno() if stream is not None else None
    except (OSError, ValueError, AttributeError, io.UnsupportedOperation):
        return None


def _flush() -> None:
    """Flush the buffers of Python and C, so that earlier text is written to the previous destination."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).fflush(None)


@contextlib.contextmanager
def _enable_line_buffering() -> Iterator[None]:
    """Preserve the order of standard output and error in the log, even if standard output was a pipe."""
    stream = sys.stdout
    if not isinstance(stream, io.TextIOWrapper) or _get_descriptor(stream) != 1:
        yield
        return
    before = stream.line_buffering
    stream.reconfigure(line_buffering=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            stream.reconfigure(line_buffering=before)


@contextlib.contextmanager
def _redirect_loggers(descriptor: int, level: int) -> Iterator[None]:
    """Write Python's loggers and warnings to the log, with timestamps, within a `with` block."""
    stream = os.fdopen(os.dup(descriptor), "a", encoding="utf-8", errors="replace")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter(_LOG_FORMAT))
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(min(before, level) if before else level)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.setLevel(before)
        root.removeHandler(handler)
        with contextlib.suppress(OSError):  # a full disk: the error that ended the run reports it
            handler.close()
            stream.close()


@contextlib.contextmanager
def _redirect_faults(descriptor: int) -> Iterator[None]:
    """Write the Python stacks of crashes in native code to the log within a `with` block."""
    if faulthandler.is_enabled():  # by the user (PYTHONFAULTHANDLER) or by pytest
        yield
        return
    faulthandler.enable(file=descriptor)
    try:
        yield
    finally:
        faulthandler.disable()
