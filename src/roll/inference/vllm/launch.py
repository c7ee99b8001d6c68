"""Start and end of vLLM's processes."""

from __future__ import annotations

import logging
import os
import re
import threading
import uuid
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import resource_tracker, spawn
from pathlib import Path
from typing import Any

import psutil

from roll.errors import EngineDiedError, ModelError
from roll.inference.spec import EngineSpec
from roll.inference.vllm.arguments import CPU_KV_CACHE_BYTES, engine_arguments
from roll.inference.vllm.environment import is_cpu_build, prepare_environment
from roll.inference.vllm.prefork import PreforkedProcess, kill_unless_used, process_ahead, use_preforked
from roll.inference.vllm.stats import Stats
from roll.process_environment import SPIN_COUNT, temporary_environment

__all__ = ["Launch", "end_launch", "launch", "prestart_engine"]

logger = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 1.0
"""Timeout after which processes are killed; they hold no state that must be saved."""
LOG_STREAM = "ext://roll.inference.vllm.child.LOG_STREAM"
_ERROR_LINE = re.compile(r"\b(\w*(?:Error|Exception)): (.+)$")
_SUMMARY = re.compile(r"Engine core init|EngineDeadError|EngineGenerateError|Worker failed with error")
"""Summaries of an error that an earlier line names."""
_starting = threading.Lock()
"""Held while environment variables are changed for the start of an engine."""
_ended: set[str] = set()
"""Names of launches that must fail."""


class Launch:
    """A started vLLM: its client in this process, and its processes."""

    def __init__(self, spec: EngineSpec, llm: Any, *, cpu: bool, stats: Stats, log_size: int = 0) -> None:
        self.llm = llm
        self.cpu = cpu
        self.stats = stats
        self.vocab_size = int(llm.model_config.get_vocab_size())
        self._spec = spec
        self._log_size = log_size
        self._processes: dict[int, psutil.Process] = {}
        self._files: set[str] = set()

    def adopt(self, process_ids: Iterable[int], files: Iterable[str] = ()) -> None:
        """Track processes and files that must be gone after `shutdown`."""
        for process_id in process_ids:
            self._processes[process_id] = psutil.Process(process_id)
        self._files.update(files)

    @property
    def processes(self) -> tuple[psutil.Process, ...]:
        """All processes that vLLM started, including EngineCore."""
        return tuple(self._processes.values())

    def cause_of_death(self) -> str:
        """Return the known reasons why the processes ended."""
        gone = [str(process_id) for process_id, process in self._processes.items() if not process.is_running()]
        which = f"its process {', '.join(gone)} ended" if gone else "vLLM stopped serving"
        root = _last_error(self._spec.log_path, self._log_size)
        return f"{which}{f': {root}' if root else ''}{_log_hint(self._spec.log_path)}"

    def shutdown(self) -> None:
        """End all processes, by force if needed. Blocking; may be called twice."""
        try:
            self.llm.shutdown(timeout=SHUTDOWN_TIMEOUT_S)
        finally:
            self.llm.shutdown = lambda timeout=None: None  # vLLM's __del__ calls it again, and fails while Python exits
            alive = [process for process in self._processes.values() if process.is_running()]
            for process in alive:
                process.kill()
            psutil.wait_procs(alive, timeout=SHUTDOWN_TIMEOUT_S)
            for file in self._files:
                Path(file).unlink(missing_ok=True)


def end_launch(name: str) -> None:
    """Kill the processes of a launch in progress, which then fails; prevent it from starting any if it has none yet."""
    from roll.inference.vllm import child

    _ended.add(name)
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.environ().get(child.LAUNCH) == name:
                process.kill()


def launch(spec: EngineSpec, name: str, ahead: PreforkedProcess | None = None) -> Launch:
    """Start vLLM's processes and load the model. Blocking: seconds to minutes.

    Args:
        spec: The spec of the engine.
        name: A unique name of this launch, for `end_launch`.
        ahead: A prepared process of that name, which becomes EngineCore's process or is killed.

    Raises:
        ModelError: vLLM rejects the model or the settings.
        EngineDiedError: vLLM's process ended while it loaded.
    """
    with kill_unless_used(ahead), _starting:
        _check_not_ended(spec, name)
        prepare_environment()
        cpu = is_cpu_build()
        log_size = spec.log_path.stat().st_size if spec.log_path and spec.log_path.exists() else 0
        variables = _variables(name, spec.num_threads, spec.log_path, cpu=cpu)
        with temporary_environment(variables), _children_of(spec, name), use_preforked(ahead):
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            if spec.log_path is not None:
                from roll.inference.vllm.child import LOG_STREAM as stream

                stream.redirect(spec.log_path)
            stats = Stats()
            try:
                arguments = AsyncEngineArgs(**engine_arguments(spec, cpu=cpu))
                llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[stats.logger_class()])
            except (ValueError, TypeError) as error:
                raise ModelError(
                    f"vLLM refuses {spec.model_path} with these settings: {error}{_option_hint(spec)}"
                ) from error
            except Exception as error:
                raise _start_error(spec, log_size, error) from error
    started = Launch(spec, llm, cpu=cpu, stats=stats, log_size=log_size)
    try:
        _check_not_ended(spec, name)
    except EngineDiedError:
        started.shutdown()
        raise
    return started


def _check_not_ended(spec: EngineSpec, name: str) -> None:
    if name in _ended:
        raise EngineDiedError(spec.engine_id, "its start was cancelled")


@contextmanager
def prestart_engine(num_threads: int | None) -> Generator[None]:
    """Prepare a process that imports vLLM while the engine is not yet configured; see `prefork`.

    No process is prepared if it cannot be started, or if another engine is starting in this process, because the
    environment is then not the run's. An engine then spawns its own process.
    """
    with ExitStack() as stack:
        prepare_environment()
        if is_cpu_build() and _starting.acquire(blocking=False):
            try:
                variables = _variables(uuid.uuid4().hex, num_threads, Path(os.devnull), cpu=True)
                read_at_start = ("PYTHONWARNINGS", "PYTHONSAFEPATH")
                with temporary_environment({name: variables[name] for name in read_at_start}):
                    resource_tracker.ensure_running()
                stack.enter_context(process_ahead(variables, num_threads))
            except (OSError, ValueError) as error:
                logger.warning("no process imports vLLM ahead of time: %s", error)
            finally:
                _starting.release()
        yield


def _variables(name: str, num_threads: int | None, log_path: Path | None, *, cpu: bool) -> dict[str, str]:
    """Return environment variables for the engine's processes only."""
    from roll.inference.vllm import child

    # Python's resource tracker frees a killed engine's semaphores, and would print a warning to the terminal.
    warnings = [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker:UserWarning"]
    # setproctitle overwrites a process's environment, by which `end_launch` finds it, unless this is set:
    variables = {child.OWNER: str(os.getpid()), child.LAUNCH: name, "SPT_NOENV": "1"}
    # A file in the current directory must not replace a module that a spawned process imports.
    variables["PYTHONSAFEPATH"] = "1"
    variables["PYTHONWARNINGS"] = ",".join(filter(None, warnings))
    if cpu:
        # Threads that spin while they wait halve the speed if cores are shared (measured next to other work: at most
        # 50 tok/s, against 300). But a decoding step has a thousand short parallel regions, and waking threads for each
        # costs 8 % of it. So threads spin for as long as such a gap lasts, and then sleep.
        variables["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "passive")
        if variables["OMP_WAIT_POLICY"].lower() == "passive":
            variables["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", SPIN_COUNT)
    if num_threads is not None:
        variables["OMP_NUM_THREADS"] = str(num_threads)
    if log_path is not None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        variables[child.LOG] = str(log_path.absolute())
        if not {"VLLM_LOGGING_STREAM", "VLLM_LOGGING_CONFIG_PATH", "VLLM_CONFIGURE_LOGGING"} & os.environ.keys():
            variables["VLLM_LOGGING_STREAM"] = LOG_STREAM
    return variables


@contextmanager
def _children_of(spec: EngineSpec, launch_name: str) -> Generator[None]:
    """Prevent processes of a canceled launch from starting, and all processes from running the user's script again.

    `multiprocessing` imports the parent's main module in every spawned child, so a script without `if __name__ ==
    "__main__"` would start its training anew in each. vLLM's processes do not need that module. vLLM has no setting for
    this; the patch can be removed once it has one.
    """
    original, this_thread = spawn.get_preparation_data, threading.get_ident()

    def without_main(name: str) -> dict[str, Any]:
        data = original(name)
        if threading.get_ident() == this_thread:
            _check_not_ended(spec, launch_name)
            data = {key: value for key, value in data.items() if not key.startswith("init_main_from")}
        return data

    spawn.get_preparation_data = without_main
    try:
        yield
    finally:
        spawn.get_preparation_data = original


def _start_error(spec: EngineSpec, log_size: int, error: Exception) -> Exception:
    """Return an error for a failed child process, with the cause from its log."""
    cause = _last_error(spec.log_path, log_size) or f"{type(error).__name__}: {error}"
    if cause.startswith(("ValueError", "NotImplementedError", "ValidationError")):
        cache = spec.kv_cache_bytes or (CPU_KV_CACHE_BYTES if is_cpu_build() else "the device's share")
        advice = f" In ROLL: raise inference.kv_cache_bytes ({cache})." if "cache" in cause else ""
        return ModelError(
            f"vLLM cannot serve {spec.model_path} with these settings: {cause}{_option_hint(spec)}{advice}"
            f"{_log_hint(spec.log_path)}"
        )
    return EngineDiedError(spec.engine_id, f"it did not start: {cause}{_log_hint(spec.log_path)}")


def _last_error(log_path: Path | None, start: int) -> str:
    """Return the last line after byte `start` that names an exception, other than vLLM's own summaries of it."""
    if log_path is None or not log_path.exists():
        return ""
    with log_path.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    found = [match for line in lines if (match := _ERROR_LINE.search(line)) and not _SUMMARY.search(line)]
    return f"{found[-1][1]}: {found[-1][2]}" if found else ""


def _option_hint(spec: EngineSpec) -> str:
    """Return a hint at the user's own options for vLLM."""
    return f" (inference.options sets {', '.join(spec.options)})" if spec.options else ""


def _log_hint(log_path: Path | None) -> str:
    return f" (see {log_path})" if log_path else ""
