"""Commands of `roll` in processes that are forked from one that has imported what ranks and runs need.

Importing torch and Transformers takes a process six seconds. The process from which others are forked is started by
the first test that needs it, has no threads of its own, and computes nothing. A process that fails, hangs, or is
killed leaves the next ones alone.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

__all__ = ["ForkedCommand", "prepare_server"]


def prepare_server() -> None:
    """Say what the process imports from which others are forked; has no effect once it runs."""
    multiprocessing.set_forkserver_preload(
        [
            "transformers.models.llama.modeling_llama",
            "matplotlib.backends.backend_agg",
            "pandas",
            "pyarrow.parquet",
            "roll.cli.main",
            "roll.inference.hf",
            "roll.pipelines.rlvr.pipeline",
            "roll.pipelines.online.loop",
            "roll.training.backend",
        ]
    )


class ForkedCommand:
    """A command of `roll` in a process and a process group of its own; it is used as a `subprocess.Popen` is.

    Args:
        command: the arguments of `roll`.
        environment: variables that the process sets.
    """

    def __init__(self, *command: str, environment: Mapping[str, str]) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._files = [Path(self._directory.name) / name for name in ("out", "err")]
        prepare_server()
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_run_command, args=(command, dict(environment), self._files))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, negative after a signal; none while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit status, or none while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end.

        Raises:
            subprocess.TimeoutExpired: it runs on.
        """
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("roll", timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[bytes, bytes]:
        """Wait for the end; return what was written to the standard output and to that of errors."""
        self.wait(timeout)
        out, errors = (file.read_bytes() if file.exists() else b"" for file in self._files)
        return out, errors

    def terminate(self) -> None:
        """Send SIGTERM."""
        os.kill(self.pid, signal.SIGTERM)


def _run_command(command: tuple[str, ...], environment: dict[str, str], files: list[Path]) -> None:
    import torch

    os.setsid()
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    for number, file in enumerate(files, 1):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv = ["roll", *command]
    from roll.cli.main import exit_process, run

    try:
        exit_process(run(sys.argv[1:], own_process=True))
    finally:
        atexit._run_exitfuncs()
