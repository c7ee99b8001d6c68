"""Starts and ends vLLM's processes."""

from __future__ import annotations

import asyncio
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
from roll.inference.vllm.arguments import CPU_KV_CACHE_BYTES, build_engine_arguments
from roll.inference.vllm.environment import is_cpu_build, prepare_environment
from roll.inference.vllm.prefork import PreforkedProcess, kill_unless_used, open_preforked_process, use_preforked
from roll.inference.vllm.stats import StatsCollector
from roll.models.sizes import read_config
from roll.process_environment import SPIN_COUNT, override_environment

__all__ = ["VLLMServer", "cancel_launch", "launch", "prestart_engine", "shut_down_abandoned"]

logger = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 1.0
"""Time limit for processes to exit before they are killed; they have no state to save."""
LOG_STREAM = "ext://roll.inference.vllm.child.LOG_STREAM"
_ERROR_LINE_PATTERN = re.compile(r"\b(\w*(?:Error|Exception)): (.+)$")
_SUMMARY_LINE_PATTERN = re.compile(r"Engine core init|EngineDeadError|EngineGenerateError|Worker failed with error")
"""Pattern of log lines that only summarize an earlier error."""
_launch_lock = threading.Lock()
"""Held while environment variables are changed for the start of an engine."""
_canceled_launches: set[str] = set()
"""Names of canceled launches."""


class VLLMServer:
    """A running vLLM server: the client in this process, and vLLM's processes."""

    def __init__(self, spec: EngineSpec, llm: Any, *, cpu: bool, stats: StatsCollector, log_size: int = 0) -> None:
        self.llm = llm
        self.cpu = cpu
        self.stats = stats
        self.vocab_size = int(llm.model_config.get_vocab_size())
        self._spec = spec
        self._log_size = log_size
        self._processes: dict[int, psutil.Process] = {}
        self._files: set[str] = set()

    def add_resources(self, process_ids: Iterable[int], files: Iterable[str] = ()) -> None:
        """Add processes that `shutdown` must end, and files that it must delete."""
        for process_id in process_ids:
            self._processes[process_id] = psutil.Process(process_id)
        self._files.update(files)

    @property
    def processes(self) -> tuple[psutil.Process, ...]:
        """All processes that vLLM started, including EngineCore."""
        return tuple(self._processes.values())

    def find_cause_of_death(self) -> str:
        """Return the cause of death that the log reports, or a generic description."""
        gone = [str(process_id) for process_id, process in self._processes.items() if not process.is_running()]
        state = f"its process {', '.join(gone)} ended" if gone else "vLLM stopped serving"
        root = _find_last_error(self._spec.log_path, self._log_size)
        return f"{state}{f': {root}' if root else ''}{_build_log_hint(self._spec.log_path)}"

    def shutdown(self) -> None:
        """End all processes, and kill those that do not exit in time. This call blocks; calling it twice is safe."""
        try:
            self.llm.shutdown(timeout=SHUTDOWN_TIMEOUT_S)
        finally:
            self.llm.shutdown = lambda timeout=None: None  # vLLM's __del__ calls it again, and fails when Python exits
            alive = [process for process in self._processes.values() if process.is_running()]
            for process in alive:
                process.kill()
            psutil.wait_procs(alive, timeout=SHUTDOWN_TIMEOUT_S)
            for file in self._files:
                Path(file).unlink(missing_ok=True)


def cancel_launch(name: str) -> None:
    """Cancel a launch in progress: kill its processes and prevent it from starting more. The launch then fails."""
    from roll.inference.vllm import child

    _canceled_launches.add(
        name
    )  # before the loop, so that a process that starts during it is rejected by `_check_not_canceled`
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.environ().get(child.LAUNCH_VARIABLE) == name:
                process.kill()


def launch(spec: EngineSpec, name: str, preforked: PreforkedProcess | None = None) -> VLLMServer:
    """Start vLLM's processes and load the model. This call blocks for seconds to minutes.

    Args:
        spec: The spec of the engine.
        name: A unique name of this launch, for `cancel_launch`.
        preforked: A preforked process, which becomes EngineCore's process or is killed.

    Raises:
        ModelError: vLLM rejects the model or the settings.
        EngineDiedError: vLLM's process ended while it loaded.
    """
    with kill_unless_used(preforked), _launch_lock:
        _check_not_canceled(spec, name)
        prepare_environment()
        cpu = is_cpu_build()
        log_size = spec.log_path.stat().st_size if spec.log_path and spec.log_path.exists() else 0
        variables = _build_environment(name, spec.num_threads, spec.log_path, cpu=cpu)
        with override_environment(variables), _patch_multiprocessing(spec, name), use_preforked(preforked):
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            if spec.log_path is not None:
                from roll.inference.vllm.child import LOG_STREAM as stream

                stream.redirect(spec.log_path)
            _check_model_type(spec)
            stats = StatsCollector()
            try:
                arguments = AsyncEngineArgs(**build_engine_arguments(spec, cpu=cpu))
                llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[stats.build_logger_class()])
            except (ValueError, TypeError) as error:
                raise ModelError(
                    f"vLLM rejected {spec.model_path} with these settings: {error}{_build_option_hint(spec)}"
                ) from error
            except Exception as error:
                raise _build_start_error(spec, log_size, error) from error
    started = VLLMServer(spec, llm, cpu=cpu, stats=stats, log_size=log_size)
    try:
        _check_not_canceled(spec, name)  # `cancel_launch` may have been called after the processes were ready
    except EngineDiedError:
        started.shutdown()
        raise
    return started


def _check_model_type(spec: EngineSpec) -> None:
    if str(read_config(Path(spec.model_path)).get("model_type", "")).endswith("_thinker"):
        raise ModelError(
            f"vLLM cannot serve '{spec.model_path}', which contains only the thinker of an omni model: use the "
            "complete model's directory (its config.json has thinker_config), or the engine 'hf'."
        )


def _check_not_canceled(spec: EngineSpec, name: str) -> None:
    if name in _canceled_launches:
        raise EngineDiedError(spec.engine_id, "its start was canceled")


def shut_down_abandoned(future: asyncio.Future[VLLMServer]) -> None:
    """Shut vLLM down if its start succeeded after the caller was canceled."""
    if not future.cancelled() and future.exception() is None:
        future.result().shutdown()


@contextmanager
def prestart_engine(num_threads: int | None) -> Generator[None]:
    """Start a process that imports vLLM before the engine is configured; see `prefork`.

    No process is started if another engine is starting in this process, because that engine changes the environment
    variables. An engine without a prestarted process spawns a process itself.
    """
    with ExitStack() as stack:
        prepare_environment()
        if is_cpu_build() and _launch_lock.acquire(blocking=False):
            try:
                variables = _build_environment(uuid.uuid4().hex, num_threads, Path(os.devnull), cpu=True)
                # The resource tracker is a separate Python process, and reads these variables only when it starts.
                read_at_start = ("PYTHONWARNINGS", "PYTHONSAFEPATH")
                with override_environment({name: variables[name] for name in read_at_start}):
                    resource_tracker.ensure_running()
                stack.enter_context(open_preforked_process(variables, num_threads))
            except (OSError, ValueError) as error:
                logger.warning(
                    "the process that imports vLLM in advance failed to start, so the engine starts more slowly: %s",
                    error,
                )
            finally:
                _launch_lock.release()
        yield


def _build_environment(name: str, num_threads: int | None, log_path: Path | None, *, cpu: bool) -> dict[str, str]:
    """Return the environment variables that are set only for the engine's processes."""
    from roll.inference.vllm import child

    # When Python's resource tracker frees the semaphores of a killed engine, it prints a warning to the terminal.
    warnings = [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker:UserWarning"]
    # `cancel_launch` finds processes by their environment, which setproctitle overwrites unless this is set:
    variables = {child.OWNER_VARIABLE: str(os.getpid()), child.LAUNCH_VARIABLE: name, "SPT_NOENV": "1"}
    # A file in the current directory must not replace a module that a spawned process imports.
    variables["PYTHONSAFEPATH"] = "1"
    variables["PYTHONWARNINGS"] = ",".join(filter(None, warnings))
    if cpu:
        # If cores are shared, threads that spin while they wait slow the engine down (measured next to other work: at
        # most 50 tok/s instead of 300). But a decoding step has a thousand short parallel regions, and waking threads
        # for each costs 8 % of the step. So threads spin for about as long as the gap between two regions, then sleep.
        variables["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "passive")
        if variables["OMP_WAIT_POLICY"].lower() == "passive":
            variables["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", SPIN_COUNT)
    if num_threads is not None:
        variables["OMP_NUM_THREADS"] = str(num_threads)
    if log_path is not None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        variables[child.LOG_VARIABLE] = str(log_path.absolute())
        if not {"VLLM_LOGGING_STREAM", "VLLM_LOGGING_CONFIG_PATH", "VLLM_CONFIGURE_LOGGING"} & os.environ.keys():
            variables["VLLM_LOGGING_STREAM"] = LOG_STREAM
    return variables


@contextmanager
def _patch_multiprocessing(spec: EngineSpec, launch_name: str) -> Generator[None]:
    """Patch `multiprocessing` for the processes of one launch; undo the patch on exit.

    A patched process does not start if the launch was canceled, and does not run the user's script again.
    """
    # `multiprocessing` imports the parent's main module in every spawned child, so a script without `if __name__ ==
    # "__main__"` would start another training in each child. vLLM's processes do not need that module. vLLM has no
    # setting for this; the patch can be removed once it has one.
    original, this_thread = spawn.get_preparation_data, threading.get_ident()

    def get_data_without_main(name: str) -> dict[str, Any]:
        data = original(name)
        if threading.get_ident() == this_thread:
            _check_not_canceled(spec, launch_name)
            data = {key: value for key, value in data.items() if not key.startswith("init_main_from")}
        return data

    spawn.get_preparation_data = get_data_without_main
    try:
        yield
    finally:
        spawn.get_preparation_data = original


def _build_start_error(spec: EngineSpec, log_size: int, error: Exception) -> Exception:
    """Return the error for an engine that failed to start, with the cause from its log."""
    cause = _find_last_error(spec.log_path, log_size) or f"{type(error).__name__}: {error}"
    if cause.startswith(("ValueError", "NotImplementedError", "ValidationError")):
        cache = spec.kv_cache_bytes or (CPU_KV_CACHE_BYTES if is_cpu_build() else "the device's share")
        advice = f" In ROLL: raise inference.kv_cache_bytes ({cache})." if "cache" in cause else ""
        return ModelError(
            f"vLLM cannot serve {spec.model_path} with these settings: {cause}{_build_option_hint(spec)}{advice}"
            f"{_build_log_hint(spec.log_path)}"
        )
    return EngineDiedError(spec.engine_id, f"it did not start: {cause}{_build_log_hint(spec.log_path)}")


def _find_last_error(log_path: Path | None, start: int) -> str:
    """Return the last error in the log after byte `start`; empty if there is none.

    vLLM's summaries of earlier errors are skipped.
    """
    if log_path is None or not log_path.exists():
        return ""
    with log_path.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    matches = [
        match
        for line in lines
        if (match := _ERROR_LINE_PATTERN.search(line)) and not _SUMMARY_LINE_PATTERN.search(line)
    ]
    return f"{matches[-1][1]}: {matches[-1][2]}" if matches else ""


def _build_option_hint(spec: EngineSpec) -> str:
    """Return a hint that lists the vLLM options that the user has set."""
    return f" (inference.options sets {', '.join(spec.options)})" if spec.options else ""


def _build_log_hint(log_path: Path | None) -> str:
    return f" (see {log_path})" if log_path else ""
