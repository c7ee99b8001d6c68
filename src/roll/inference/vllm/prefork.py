"""A process that imports vLLM while model and data are still being read, and then becomes an engine's EngineCore.

    run begins ──► `open_preforked_process` starts Python ──► imports, six to eight seconds of one core ──► reads a pipe
    engine starts ──► vLLM creates its EngineCore's process ──► the pickled process object is written to that pipe

Only its start time differs from a process that `multiprocessing` spawns: it receives the same messages, sets its
environment and log file, and ends with its parent. If the process has died, if environment variables that libraries
read during import have changed, or if its work contains objects that can only be inherited, a process is spawned
instead, as for every later engine. Prefork is used only for vLLM's CPU build, because importing vLLM before a device is
assigned has not been tested.
"""

from __future__ import annotations

import io
import logging
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

__all__ = ["PreforkedProcess", "claim_process", "kill_unless_used", "open_preforked_process", "use_preforked"]

logger = logging.getLogger(__name__)

_IMPORT_VARIABLE_PREFIXES = (
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "DNNL_",
    "ONEDNN_",
    "MALLOC_",
    "GLIBC_",
    "LD_PRELOAD",
    "PYTHON",
)
# scikit-learn sets these when it is imported, and Transformers imports it if it is installed. They concern only Intel's
# OpenMP runtime, which PyTorch's wheels do not use.
_IGNORED_VARIABLES = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")
_CHILD_PROGRAM = "from roll.inference.vllm import child; child.wait_for_work(tracker_fd=%d, pipe_handle=%d)"


class PreforkedProcess:
    """A process that has imported vLLM and waits for its work.

    Args:
        variables: Environment variables in addition to those of this process.
        num_threads: The number of CPU threads; `None` for the default of the libraries.
    """

    def __init__(self, variables: Mapping[str, str], num_threads: int | None) -> None:
        self.name = variables[child.LAUNCH_VARIABLE]
        self.num_threads = num_threads
        self._settings = _read_import_environment()
        tracker_fd = resource_tracker.getfd()
        assert tracker_fd is not None
        module_path = os.pathsep.join(entry for entry in sys.path if entry and isinstance(entry, str))
        # After the start, this process closes the child's ends of both pipes; its own ends only if the start fails.
        with ExitStack() as child_ends, ExitStack() as parent_ends:
            ended, child_end = _create_pipe(parent_ends, child_ends)
            child_work, work = _create_pipe(child_ends, parent_ends)
            command = [os.fsdecode(part) for part in spawn.get_command_line(pipe_handle=child_work)]
            command[-2] = _CHILD_PROGRAM % (tracker_fd, child_work)
            command.insert(1, "-P")  # a file in the current directory must not replace a module that vLLM imports
            self.process = subprocess.Popen(
                command,
                env=os.environ | dict(variables) | {"PYTHONPATH": module_path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,
                pass_fds=(tracker_fd, child_work, child_end),
            )
            parent_ends.pop_all()
        self.ended = ended
        """A pipe that becomes readable when the process has ended."""
        self.work = work
        """The pipe through which the process receives its work."""
        self.is_used = False
        """True if the process has received its work."""

    def is_usable(self, num_threads: int | None) -> bool:
        """Return whether the process is alive and has the same settings as a new process."""
        return self.process.poll() is None and (num_threads, _read_import_environment()) == (
            self.num_threads,
            self._settings,
        )

    def describe_difference(self, num_threads: int | None) -> str:
        """Return why the process cannot be used; see `is_usable`."""
        if self.process.poll() is not None:
            return f"it ended with exit code {self.process.poll()}"
        if num_threads != self.num_threads:
            return f"it has {self.num_threads} threads, and the engine {num_threads}"
        now = _read_import_environment()
        changed = sorted(name for name in now | self._settings if now.get(name) != self._settings.get(name))
        return f"environment variables changed: {', '.join(changed)}"

    def close(self) -> None:
        """Kill the process, which has no state that must be saved."""
        self.process.kill()
        self.process.wait()
        self.close_pipes()

    def close_pipes(self) -> None:
        """Close the pipes. Afterwards, neither process detects the end of the other."""
        for descriptor in (self.ended, self.work):
            os.close(descriptor)


class _PreforkUnavailableError(Exception):
    """The work could not be sent to the preforked process."""


class _PreforkedPopen(Popen):
    """The handle with which `multiprocessing` controls a preforked process that has received work.

    Raises:
        _PreforkUnavailableError: the process has died, or its work contains objects that can only be inherited.
    """

    method = "spawn"

    def __init__(self, process_obj: Any, preforked: PreforkedProcess) -> None:
        self._preforked = preforked
        super().__init__(process_obj)

    def duplicate_for_child(self, fd: int) -> int:
        raise _PreforkUnavailableError  # a running process cannot inherit another descriptor

    def _launch(self, process_obj: Any) -> None:
        preforked, message = self._preforked, io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj._name), message)
            reduction.dump(process_obj, message)
        finally:
            set_spawning_popen(None)
        try:
            with open(preforked.work, "wb", closefd=False) as file:
                file.write(message.getbuffer())
        except BrokenPipeError as error:
            raise _PreforkUnavailableError from error
        preforked.is_used = True
        self.pid, self.sentinel = preforked.process.pid, preforked.ended
        self.finalizer = util.Finalize(self, preforked.close_pipes)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            self.returncode = self._preforked.process.poll() if flag else self._preforked.process.wait()
        return self.returncode


class _Process(SpawnProcess):
    """A process for `multiprocessing` that runs in a preforked process, or is spawned if that process has died."""

    preforked: PreforkedProcess | None = None

    def run(self) -> None:
        """Set the environment variables of the parent, then run the target. This method runs in the child process."""
        child.set_up_process(self._environment)
        super().run()

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def __getstate__(self) -> dict[str, Any]:
        # The handle has pipes of this process, which cannot be pickled.
        return {key: value for key, value in self.__dict__.items() if key != "preforked"}

    @staticmethod
    def _Popen(process_obj: Any) -> Popen:
        assert isinstance(process_obj, _Process) and process_obj.preforked is not None
        try:
            return _PreforkedPopen(process_obj, process_obj.preforked)
        except _PreforkUnavailableError:
            return SpawnProcess._Popen(process_obj)


class _Context(SpawnContext):
    def __init__(self, preforked: PreforkedProcess) -> None:
        super().__init__()
        self._preforked: PreforkedProcess | None = preforked

    def Process(self, *args: Any, **kwargs: Any) -> SpawnProcess:  # type: ignore[override]
        """Return a process. The first one runs in the preforked process; later ones are spawned."""
        preforked, self._preforked = self._preforked, None
        if preforked is None:
            return SpawnProcess(*args, **kwargs)
        process = _Process(*args, **kwargs)
        process.preforked = preforked
        return process


@contextmanager
def kill_unless_used(preforked: PreforkedProcess | None) -> Generator[None]:
    """Kill a preforked process on exit if it was not used."""
    try:
        yield
    finally:
        if preforked is not None and not preforked.is_used:
            preforked.close()


@contextmanager
def use_preforked(preforked: PreforkedProcess | None) -> Generator[None]:
    """Make the preforked process, if any, run the next process that vLLM starts from this thread."""
    if preforked is None:
        yield
        return
    # vLLM's start methods are `fork` and `spawn` only (`VLLM_WORKER_MULTIPROC_METHOD`). The patch can be removed once
    # vLLM accepts a context.
    from vllm.v1.engine import utils

    original, this_thread, context = utils.get_mp_context, threading.get_ident(), _Context(preforked)
    utils.get_mp_context = lambda: context if threading.get_ident() == this_thread else original()
    try:
        yield
    finally:
        utils.get_mp_context = original


_lock = threading.Lock()
_unclaimed_processes: list[PreforkedProcess] = []


@contextmanager
def open_preforked_process(variables: Mapping[str, str], num_threads: int | None) -> Generator[None]:
    """Start a preforked process that an engine can claim; kill it on exit if no engine has claimed it.

    Args:
        variables: See `PreforkedProcess`.
        num_threads: See `PreforkedProcess`.

    Raises:
        OSError, ValueError: the process cannot be started, or `sys.path` cannot be passed on.
    """
    preforked = PreforkedProcess(variables, num_threads)
    with _lock:
        _unclaimed_processes.append(preforked)
    try:
        yield
    finally:
        with _lock:
            left = preforked in _unclaimed_processes
            if left:
                _unclaimed_processes.remove(preforked)
        if left:
            preforked.close()


def claim_process(num_threads: int | None) -> PreforkedProcess | None:
    """Return a usable preforked process for an engine with this number of threads; `None` if there is none.

    The caller must use or close the process.
    """
    with _lock:
        process = next((preforked for preforked in _unclaimed_processes if preforked.is_usable(num_threads)), None)
        if process is not None:
            _unclaimed_processes.remove(process)
        elif _unclaimed_processes:
            reason = _unclaimed_processes[0].describe_difference(num_threads)
            logger.info("the process that imported vLLM in advance is not used, so the engine starts later: %s", reason)
    return process


def _create_pipe(reads: ExitStack, writes: ExitStack) -> tuple[int, int]:
    """Create a pipe; return (read end, write end), which the two exit stacks close."""
    reading, writing = os.pipe()
    reads.callback(os.close, reading)
    writes.callback(os.close, writing)
    return reading, writing


def _read_import_environment() -> dict[str, str]:
    """Return the environment variables that libraries read when they are imported."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_IMPORT_VARIABLE_PREFIXES) and name not in _IGNORED_VARIABLES
    }
