"""Connects this process's terminal to a program in a sandbox, and always restores it.

keys ──► (Enter ~ . leaves) ──► the program's terminal ──► output ──► this terminal, then `Job.update_terminal`
SIGWINCH ──► the size of both
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Iterator

from roll_sandbox import ExecutionResult, Job

__all__ = ["KeyFilter", "attach_terminal", "get_terminal_size"]

_REPORT_EVERY_BYTES = 2**17
"""Bytes shown between two reports; far below the most that a program may be ahead of its reader."""
_RESET_SEQUENCES = (
    b"\x1b[?1047l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?2004l\x1b[?1004l\x1b[?1l\x1b>\x1b[?25h\x1b[0m"
)
"""Main screen, no mouse, no bracketed paste, no focus events, plain keys, a cursor, no color."""


class KeyFilter:
    """Typed keys, without `~.` at the beginning of a line, which leaves. `~~` is one `~`."""

    def __init__(self) -> None:
        self.has_left = False
        self._fresh = True
        self._tilde = False

    def feed(self, data: bytes) -> bytes:
        """Return the bytes that are for the program."""
        said = bytearray()
        for code in data:
            if self._tilde:
                self._tilde = False
                if code == ord("."):
                    self.has_left = True
                    break
                said += b"~" if code == ord("~") else bytes((ord("~"), code))
                self._fresh = code in b"\r\n"
            elif self._fresh and code == ord("~"):
                self._tilde = True
            else:
                said.append(code)
                self._fresh = code in b"\r\n"
        return bytes(said)


def get_terminal_size() -> tuple[int, int]:
    """Return the rows and columns of the terminal.

    LINES and COLUMNS are only a fallback: they do not change when the terminal is resized.
    """
    try:
        found = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        found = shutil.get_terminal_size()
    return found.lines, found.columns


@contextlib.contextmanager
def _raw(terminal: int) -> Iterator[None]:
    """Run the body with the terminal in raw mode, and restore it even if a program left it in disorder."""
    before = termios.tcgetattr(terminal)
    try:
        tty.setraw(terminal)
        yield
    finally:
        with contextlib.suppress(OSError):  # the terminal is gone
            os.write(sys.stdout.fileno(), _RESET_SEQUENCES)
        with contextlib.suppress(termios.error):
            termios.tcsetattr(terminal, termios.TCSAFLUSH, before)


async def attach_terminal(job: Job) -> ExecutionResult | None:
    """Connect this terminal to a program with a terminal, until it ends.

    Returns:
        the program's result; `None` if the user left or this terminal is gone, and the program goes on.
    """
    loop = asyncio.get_running_loop()
    keyboard, keys, leaving = sys.stdin.fileno(), KeyFilter(), asyncio.Event()

    def typed() -> None:
        try:
            data = os.read(keyboard, 2**16)
        except OSError:
            data = b""
        if said := keys.feed(data):
            job.write(said)
        if keys.has_left or not data:
            loop.remove_reader(keyboard)
            leaving.set()

    with _raw(keyboard):
        loop.add_reader(keyboard, typed)
        loop.add_signal_handler(signal.SIGWINCH, lambda: job.update_terminal(*get_terminal_size()))
        for number in (signal.SIGHUP, signal.SIGTERM):
            loop.add_signal_handler(number, leaving.set)
        job.update_terminal(*get_terminal_size())
        showing, left = asyncio.create_task(_show(job)), asyncio.create_task(leaving.wait())
        try:
            await asyncio.wait([showing, left], return_when=asyncio.FIRST_COMPLETED)
            return await showing if showing.done() else None
        finally:
            for task in (showing, left):
                task.cancel()
            await asyncio.gather(showing, left, return_exceptions=True)
            loop.remove_reader(keyboard)
            for number in (signal.SIGWINCH, signal.SIGHUP, signal.SIGTERM):
                loop.remove_signal_handler(number)


async def _show(job: Job) -> ExecutionResult:
    unsaid = 0
    async for chunk in job.stream():
        await asyncio.to_thread(_write, chunk.data)  # a stopped terminal (Ctrl-S) must not block the loop
        unsaid += len(chunk.data)
        if unsaid >= _REPORT_EVERY_BYTES:
            job.update_terminal(*get_terminal_size(), unsaid)
            unsaid = 0
    return await job.wait()


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(sys.stdout.fileno(), view) :]
