"""A process that imports vLLM while model and data are still being read, and then becomes an engine's EngineCore.

    run begins ──► `process_ahead` starts Python ──► imports, six to eight seconds of one core ──► reads a pipe
    engine starts ──► vLLM creates its EngineCore's process ──► the pickled process object goes into that pipe

It differs from a process that `multiprocessing` spawns only in its start time: it gets the same messages, and takes on
the environment, the log and its parent's lifetime just as a spawned process does at its beginning. Environment
variables that libraries read during import must be unchanged by then. If they changed, if the process has died, or if
it cannot be given objects that it would have to inherit, it is not used. A process is then spawned, as for every later
engine.

It is used only for vLLM's CPU build: the effect on devices of importing vLLM before a device is assigned has not been
tested.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing import reduction, resource_tracker, spawn, util
from multiprocessing.context import SpawnContext, SpawnProcess, set_spawning_popen
from multiprocessing.popen_spawn_posix import Popen
from typing import Any

from roll.inference.vllm import child

__all__ = ["PreforkedProcess", "kill_unless_used", "process_ahead", "take", "use_preforked"]

_READ_AT_IMPORT = ("OMP_", "GOMP_", "KMP_", "MKL_", "DNNL_", "ONEDNN_", "MALLOC_", "GLIBC_", "LD_PRELOAD", "PYTHON")
_PROGRAM = "from roll.inference.vllm import child; child.wait_for_work(tracker_fd=%d, pipe_handle=%d)"


class PreforkedProcess:
    """A process that waits for its work.

    Args:
        variables: Environment variables in addition to this process's.
        num_threads: The number of threads; `None` leaves it to the libraries.
    """

    def __init__(self, variables: Mapping[str, str], num_threads: int | None) -> None:
        self.name = variables[child.LAUNCH]
        self.num_threads = num_threads
        self._settings = _settings()
        tracker_fd = resource_tracker.getfd()
        assert tracker_fd is not None
        found_as_here = os.pathsep.join(entry for entry in sys.path if entry and isinstance(entry, str))
        with ExitStack() as its, ExitStack() as own:  # `its` pipe ends are closed here, `own` ends only on failure
            ended, own_end = _pipe(own, its)
            own_work, work = _pipe(its, own)
            command = [os.fsdecode(part) for part in spawn.get_command_line(pipe_handle=own_work)]
            command[-2] = _PROGRAM % (tracker_fd, own_work)
            command.insert(1, "-P")  # a file in the current directory must not replace a module that vLLM imports
            self.process = subprocess.Popen(
                command,
                env=os.environ | dict(variables) | {"PYTHONPATH": found_as_here},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,
                pass_fds=(tracker_fd, own_work, own_end),
            )
            own.pop_all()
        self.ended = ended
        """The end of a pipe that becomes readable once the process has ended."""
        self.work = work
        """The end of a pipe through which the process receives its work."""
        self.is_used = False
        """Whether the process has received its work."""

    def is_usable(self, num_threads: int | None) -> bool:
        """Return whether the process is alive and has the same settings as one started now."""
        return self.process.poll() is None and (num_threads, _settings()) == (self.num_threads, self._settings)

    def close(self) -> None:
        """Kill the process; it holds no state."""
        self.process.kill()
        self.process.wait()
        self.close_pipes()

    def close_pipes(self) -> None:
        """Close the pipes: afterwards neither process can detect the other's end through them."""
        for descriptor in (self.ended, self.work):
            os.close(descriptor)


class _NotHandedOverError(Exception):
    """The process has not received its work, and never will."""


class _Started(Popen):
    """The handle with which `multiprocessing` controls a prepared process once it has work.

    Raises:
        _NotHandedOverError: the process has died, or its work has objects that can only be inherited at its start.
    """

    method = "spawn"

    def __init__(self, process_obj: Any, ahead: PreforkedProcess) -> None:
        self._ahead = ahead
        super().__init__(process_obj)

    def duplicate_for_child(self, fd: int) -> int:
        raise _NotHandedOverError

    def _launch(self, process_obj: Any) -> None:
        ahead, message = self._ahead, io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj._name), message)
            reduction.dump(process_obj, message)
        finally:
            set_spawning_popen(None)
        try:
            with open(ahead.work, "wb", closefd=False) as file:
                file.write(message.getbuffer())
        except BrokenPipeError as error:
            raise _NotHandedOverError from error
        ahead.is_used = True
        self.pid, self.sentinel = ahead.process.pid, ahead.ended
        self.finalizer = util.Finalize(self, ahead.close_pipes)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            self.returncode = self._ahead.process.poll() if flag else self._ahead.process.wait()
        return self.returncode


class _Process(SpawnProcess):
    """A process that takes over a prepared one when `multiprocessing` starts it."""

    ahead: PreforkedProcess | None = None

    def run(self) -> None:
        """Run in the child process."""
        child.begin(self._environment)
        super().run()

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "ahead"}

    @staticmethod
    def _Popen(process_obj: Any) -> Popen:
        assert isinstance(process_obj, _Process) and process_obj.ahead is not None
        try:
            return _Started(process_obj, process_obj.ahead)
        except _NotHandedOverError:
            return SpawnProcess._Popen(process_obj)


class _Context(SpawnContext):
    def __init__(self, ahead: PreforkedProcess) -> None:
        super().__init__()
        self._ahead: PreforkedProcess | None = ahead

    def Process(self, *args: Any, **kwargs: Any) -> SpawnProcess:  # type: ignore[override]
        """Return the prepared process at the first call, and ordinary ones later."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return SpawnProcess(*args, **kwargs)
        process = _Process(*args, **kwargs)
        process.ahead = ahead
        return process


@contextmanager
def kill_unless_used(ahead: PreforkedProcess | None) -> Generator[None]:
    """Kill a prepared process after the body unless it was put to use."""
    try:
        yield
    finally:
        if ahead is not None and not ahead.is_used:
            ahead.close()


@contextmanager
def use_preforked(ahead: PreforkedProcess | None) -> Generator[None]:
    """Make the next process that vLLM starts in this thread the prepared one.

    vLLM's start methods are `fork` and `spawn` only (`VLLM_WORKER_MULTIPROC_METHOD`). The patch can be removed once
    vLLM accepts a context.
    """
    if ahead is None:
        yield
        return
    from vllm.v1.engine import utils

    original, this_thread, context = utils.get_mp_context, threading.get_ident(), _Context(ahead)
    utils.get_mp_context = lambda: context if threading.get_ident() == this_thread else original()
    try:
        yield
    finally:
        utils.get_mp_context = original


_lock = threading.Lock()
_waiting: list[PreforkedProcess] = []


@contextmanager
def process_ahead(variables: Mapping[str, str], num_threads: int | None) -> Generator[None]:
    """Keep a process ready during the body; it is killed afterwards unless an engine has taken it.

    Args:
        variables: See `Ahead`.
        num_threads: See `Ahead`.

    Raises:
        OSError, ValueError: the process cannot be started, or `sys.path` cannot be passed on.
    """
    ahead = PreforkedProcess(variables, num_threads)
    with _lock:
        _waiting.append(ahead)
    try:
        yield
    finally:
        with _lock:
            left = ahead in _waiting
            if left:
                _waiting.remove(ahead)
        if left:
            ahead.close()


def take(num_threads: int | None) -> PreforkedProcess | None:
    """Return a ready process for an engine with this number of threads, if any; the caller must use or close it."""
    with _lock:
        found = next((ahead for ahead in _waiting if ahead.is_usable(num_threads)), None)
        if found is not None:
            _waiting.remove(found)
    return found


def _pipe(reads: ExitStack, writes: ExitStack) -> tuple[int, int]:
    """Return the two ends of a pipe, each closed with its stack."""
    reading, writing = os.pipe()
    reads.callback(os.close, reading)
    writes.callback(os.close, writing)
    return reading, writing


def _settings() -> dict[str, str]:
    """Return the environment variables that libraries read when they are imported."""
    return {name: value for name, value in os.environ.items() if name.startswith(_READ_AT_IMPORT)}
