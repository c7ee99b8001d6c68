"""The controller's handle to a process of the worker pool; the process is killed together with its descendants."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from typing import IO

from roll.cluster.pool_worker import FRAME_HEADER, describe_exit
from roll.errors import WorkerDiedError

__all__ = ["PoolProcess"]

START_TIMEOUT_S = 120.0
"""Timeout for a process to start and import a function's dependencies."""
END_TIMEOUT_S = 5.0
LOG_BYTES = 2**20
"""Approximate limit of a process's log, which is kept to explain the process's death."""


class PoolProcess:
    """A process that reads and writes frames.

    Args:
        module: The module that the process runs.
        memory_limit_bytes: The memory limit; beyond it the called function gets a `MemoryError`. 0 means no limit.
    """

    def __init__(self, module: str, memory_limit_bytes: int) -> None:
        self._module = module
        self._memory_limit_bytes = memory_limit_bytes
        self._process: Process | None = None
        self._log: IO[bytes] | None = None
        self._closed = False

    @property
    def has_died(self) -> bool:
        """True if the process has ended without being killed by this object."""
        return self._process is not None and self._process.returncode is not None

    @property
    def exit_code(self) -> int | None:
        """Exit code of a process that has ended, negative for a signal; `None` if it runs or was killed by this
        object.
        """
        return None if self._process is None else self._process.returncode

    async def start(self) -> None:
        """Start the process, unless it runs already.

        Raises:
            WorkerDiedError: the process cannot be started, or the pool is closed.
        """
        if self._process is not None:
            return
        # There are as many workers as cores; threads of one worker would only take cores from the others.
        single_threaded = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        # A fixed hash seed: sets of strings iterate in the same order in every worker, so results do not depend on it.
        fixed = {**single_threaded, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        # -P: a file in the current directory must not replace a module of the standard library.
        command = (sys.executable, "-P", "-m", self._module, str(self._memory_limit_bytes))
        self._log = self._log or tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=self._log,
                env={**os.environ, **fixed},
                start_new_session=True,  # no Ctrl-C from the terminal; descendants can be killed as a group
            )
        except OSError as error:
            raise WorkerDiedError(f"a pool worker cannot be started: {error}") from error
        self._process = process
        if self._closed:  # closed while the process was starting
            await self.end()
            raise WorkerDiedError("the worker pool is closed")

    async def write(self, body: bytes) -> None:
        """Send one frame.

        Raises:
            ConnectionError: the process has ended.
        """
        self.send(body)
        assert self._process is not None and self._process.stdin is not None
        await self._process.stdin.drain()

    def send(self, body: bytes) -> None:
        """Send one frame without waiting until it is read; the frame is lost if the process has ended."""
        self._shorten_log()
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(FRAME_HEADER.pack(len(body)) + body)

    async def read(self) -> bytes:
        """Return the next frame.

        Raises:
            IncompleteReadError: the process has ended.
        """
        assert self._process is not None and self._process.stdout is not None
        (length,) = FRAME_HEADER.unpack(await self._process.stdout.readexactly(FRAME_HEADER.size))
        return await self._process.stdout.readexactly(length)

    async def send_first(self, body: bytes) -> bytes:
        """Send one frame and return the next reply, with a timeout that is long enough to start and import.

        Raises:
            ConnectionError: the process has ended.
            IncompleteReadError: the process has ended.
            WorkerDiedError: the process was not ready in time.
        """
        try:
            # The timeout includes the write: a process that hangs while it starts does not read a frame that is larger
            # than the pipe's buffer, such as an image.
            async with asyncio.timeout(START_TIMEOUT_S):
                await self.write(body)
                return await self.read()
        except TimeoutError:
            raise self.build_not_ready_error() from None

    def build_not_ready_error(self) -> WorkerDiedError:
        """Return the error for a process that was not ready in time."""
        process_id = self._process.pid if self._process else 0
        return WorkerDiedError(
            f"a pool worker (process {process_id}) was not ready within {START_TIMEOUT_S:g} "
            f"s{self._read_last_printed_line()}"
        )

    def _shorten_log(self) -> None:
        if self._log is not None and os.fstat(self._log.fileno()).st_size > LOG_BYTES:
            self._log.seek(0)
            self._log.truncate()

    async def describe_end(self) -> str:
        """Describe how a process that closed its pipe ended, with the last line that it printed."""
        process = self._process
        if process is None:
            return "a pool worker was killed"
        code = await _wait_for_exit(process)
        return f"a pool worker (process {process.pid}) ended with {describe_exit(code)}{self._read_last_printed_line()}"

    def _read_last_printed_line(self) -> str:
        """Return `: ` and the last line that the process printed; empty if it printed nothing."""
        if self._log is None:
            return ""
        descriptor = self._log.fileno()
        size = os.fstat(descriptor).st_size
        lines = os.pread(descriptor, 2000, max(0, size - 2000)).decode(errors="replace").strip().splitlines()
        return f": {lines[-1].strip()}" if lines else ""

    async def end(self) -> None:
        """Kill the process and its descendants; `start` may be called again."""
        (process, self._process), (log, self._log) = (self._process, None), (self._log, None)
        if process is not None:
            _kill(process)
            await process.wait()
        if log is not None:
            log.close()

    async def end_gracefully(self) -> None:
        """Close the process's input, so that it ends its children, and wait for its exit until a timeout."""
        process = self._process
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_TIMEOUT_S):
                await process.wait()

    async def close(self) -> None:
        """Kill the process; later calls of `start` raise an error."""
        self._closed = True
        await self.end()


async def _wait_for_exit(process: Process) -> int:
    """Wait for a process that closed its pipe, and return its exit code; kill it if it does not exit in time."""
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            return await process.wait()
    except TimeoutError:
        _kill(process)
        return await process.wait()


def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
