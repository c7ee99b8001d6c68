"""Connects the terminal of this process to a program in a sandbox, and restores the terminal afterwards.

keys ──► (Enter ~ . detaches) ──► the program's terminal ──► output ──► this terminal, then `Job.update_terminal`
SIGWINCH ──► the size of both terminals
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

_REPORT_INTERVAL_BYTES = 2**17
"""Bytes of output shown between two calls of `Job.update_terminal`; after 1 MiB without a call, the program waits."""
_RESET_SEQUENCES = (
    b"\x1b[?1047l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?2004l\x1b[?1004l\x1b[?1l\x1b>\x1b[?25h\x1b[0m"
)
"""Control sequences that reset a terminal: main screen, no mouse, no bracketed paste, no focus events, plain keys,
visible cursor, no color."""


class KeyFilter:
    """Filters typed keys: at the beginning of a line, `~.` detaches from the program, and `~~` sends one `~`."""

    def __init__(self) -> None:
        self.has_left = False
        self._fresh = True
        self._tilde = False

    def feed(self, data: bytes) -> bytes:
        """Return the part of the typed bytes to send to the program; set `has_left` if the user detaches."""
        forwarded = bytearray()
        for code in data:
            if self._tilde:
                self._tilde = False
                if code == ord("."):
                    self.has_left = True
                    break
                forwarded += b"~" if code == ord("~") else bytes((ord("~"), code))
                self._fresh = code in b"\r\n"
            elif self._fresh and code == ord("~"):
                self._tilde = True
            else:
                forwarded.append(code)
                self._fresh = code in b"\r\n"
        return bytes(forwarded)


def get_terminal_size() -> tuple[int, int]:
    """Return the rows and columns of the terminal.

    LINES and COLUMNS are only a fallback: they do not change when the terminal is resized.
    """
    try:
        size = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        size = shutil.get_terminal_size()
    return size.lines, size.columns


@contextlib.contextmanager
def _raw_mode(terminal: int) -> Iterator[None]:
    """Put the terminal in raw mode in a `with` block, and reset all terminal modes afterwards."""
    before = termios.tcgetattr(terminal)
    try:
        tty.setraw(terminal)
        yield
    finally:
        with contextlib.suppress(OSError):  # the terminal no longer exists
            os.write(sys.stdout.fileno(), _RESET_SEQUENCES)
        with contextlib.suppress(termios.error):
            # TCSAFLUSH discards unread input, such as the terminal's replies to queries of the program.
            termios.tcsetattr(terminal, termios.TCSAFLUSH, before)


async def attach_terminal(job: Job) -> ExecutionResult | None:
    """Connect this terminal to the terminal of a program until the program ends.

    Returns:
        the program's result; `None` if the user detached or this terminal was closed while the program is running.
    """
    loop = asyncio.get_running_loop()
    keyboard, keys, leaving = sys.stdin.fileno(), KeyFilter(), asyncio.Event()

    def forward_keys() -> None:
        try:
            data = os.read(keyboard, 2**16)
        except OSError:
            data = b""
        if forwarded := keys.feed(data):
            job.write(forwarded)
        if keys.has_left or not data:
            loop.remove_reader(keyboard)
            leaving.set()

    with _raw_mode(keyboard):
        loop.add_reader(keyboard, forward_keys)
        loop.add_signal_handler(signal.SIGWINCH, lambda: job.update_terminal(*get_terminal_size()))
        for number in (signal.SIGHUP, signal.SIGTERM):
            loop.add_signal_handler(number, leaving.set)
        job.update_terminal(*get_terminal_size())  # the program may have been started with another size
        showing, left = asyncio.create_task(_show_output(job)), asyncio.create_task(leaving.wait())
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


async def _show_output(job: Job) -> ExecutionResult:
    unreported_bytes = 0
    async for chunk in job.stream():
        await asyncio.to_thread(_write, chunk.data)  # a stopped terminal (Ctrl-S) must not block the loop
        unreported_bytes += len(chunk.data)
        if unreported_bytes >= _REPORT_INTERVAL_BYTES:
            job.update_terminal(*get_terminal_size(), unreported_bytes)
            unreported_bytes = 0
    return await job.wait()


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(sys.stdout.fileno(), view) :]
