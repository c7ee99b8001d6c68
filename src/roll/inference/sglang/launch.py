"""Starts and ends an SGLang server in its own process group."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from roll.errors import ModelError
from roll.inference.sglang.conversion import INITIAL_VERSION
from roll.inference.sglang.lora_arguments import build_lora_arguments
from roll.inference.spec import EngineSpec

__all__ = ["CONTEXT_MARGIN", "OPTION_NAMES", "Server", "build_arguments", "find_free_port", "to_command"]

OPTION_NAMES = ("python", "url", "weights_dir")
"""Options of `inference.options` that ROLL reads; all others become arguments of the server."""
CONTEXT_MARGIN = 7
"""The number of tokens by which SGLang's context exceeds ROLL's. SGLang rejects a prompt that leaves fewer than 7
tokens, and ends an answer 2 tokens before the end of its context, with the finish reason `length`."""
SHUTDOWN_TIMEOUT_S = 5.0
_LOG_TAIL_BYTES = 32 * 2**10  # SGLang writes the stacks of its threads after the error


def build_arguments(spec: EngineSpec, port: int) -> list[str]:
    """Return the server's command-line arguments: those of the spec, then those of `inference.options`.

    An option `name: value` becomes `--name value`, and a list `--name value value`; `true` becomes `--name`, and
    `false` or `null` nothing.
    """
    arguments: dict[str, Any] = {
        "model-path": spec.model_path,
        "host": "127.0.0.1",
        "port": port,
        "skip-tokenizer-init": True,
        "dtype": spec.dtype,
        "context-length": spec.max_context + CONTEXT_MARGIN,
        "max-running-requests": spec.max_num_seqs,
        "tp-size": spec.tensor_parallel,
        "random-seed": spec.seed,
        "weight-version": INITIAL_VERSION,
        "enable-memory-saver": spec.sleeps,
        "trust-remote-code": spec.trust_remote_code,
    }
    arguments |= build_lora_arguments(spec)
    arguments |= {name.replace("_", "-"): value for name, value in spec.options.items() if name not in OPTION_NAMES}
    return to_command(arguments)


def to_command(arguments: Mapping[str, Any]) -> list[str]:
    """Return arguments for a command line; see `build_arguments`."""
    command: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        values = [] if value is True else value if isinstance(value, list | tuple) else [value]
        command += [f"--{name}", *map(str, values)]
    return command


class Server:
    """A server's process group.

    Args:
        spec: The spec of the engine.
        arguments: The arguments of the server; see `build_arguments`.
        port: The port in the arguments.

    Raises:
        ModelError: The interpreter cannot be started.
    """

    def __init__(self, spec: EngineSpec, arguments: Sequence[str], port: int) -> None:
        self.port = port
        self._log_path = spec.log_path
        python = str(spec.options.get("python") or sys.executable)
        command = [python, str(Path(__file__).with_name("server.py")), str(os.getpid())]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        # The server must not find ROLL's packages if it has an environment of its own.
        if "python" not in spec.options and "PYTHONPATH" in os.environ:
            environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
        # The margin may exceed the context of the model's configuration; no token is computed beyond `max_context`.
        environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
        if spec.num_threads is not None:
            environment["OMP_NUM_THREADS"] = str(spec.num_threads)
        log = spec.log_path.open("ab") if spec.log_path is not None else None
        try:
            self.process = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log or subprocess.DEVNULL,
                stderr=subprocess.STDOUT if log else subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise ModelError(
                f"engine '{spec.engine_id}': '{python}' cannot be started ({error.strerror}): set "
                "inference.options.python to the Python of an environment with SGLang."
            ) from error
        finally:
            if log is not None:
                log.close()

    @property
    def url(self) -> str:
        """The server's address."""
        return f"http://127.0.0.1:{self.port}"

    def find_cause_of_death(self) -> str:
        """Return a description of how the server ended, with the last error in its log; empty while it runs."""
        code = self.process.poll()
        if code is None:
            return ""
        return f"its server ended with exit code {code}{self._find_last_error()}"

    def _find_last_error(self) -> str:
        if self._log_path is None or not self._log_path.exists():
            return ""
        with self._log_path.open("rb") as file:
            file.seek(max(0, self._log_path.stat().st_size - _LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
        found = (line for word in ("Error", "crashed") for line in reversed(lines) if word in line)
        error = next(found, lines[-1] if lines else "")
        return f": {error.strip()[:300]} (see {self._log_path})"

    def close(self) -> None:
        """End all processes of the server. This call blocks for some seconds; calling it twice is safe."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(SHUTDOWN_TIMEOUT_S)
        self.kill()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(SHUTDOWN_TIMEOUT_S)

    def kill(self) -> None:
        """Kill all processes of the server without waiting for their end."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def find_free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
