"""The worker thread of the `hf` engine, which does not prevent the process from exiting."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

from roll.inference.spec import EngineSpec

if TYPE_CHECKING:
    from roll.inference.hf_decoder import Decoder

__all__ = ["WorkerThread", "build_decoder"]

_Task = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class WorkerThread(Executor):
    """An executor that runs functions in order on one daemon thread.

    `ThreadPoolExecutor` joins its threads when the process exits. A thread that hangs in a computation would then block
    the exit forever, because threads cannot be killed.

    Args:
        name: The name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:  # type: ignore[override]
        """See `Executor.submit`."""
        future: Future[Any] = Future()
        self._work.put((future, fn, args))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the thread after its queued work; with `wait`, wait until it has ended."""
        self._work.put(None)
        if wait:
            self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            future, function, args = work
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(*args))
            except BaseException as error:  # SystemExit in a model's remote code must not end the thread silently
                future.set_exception(error)


def build_decoder(spec: EngineSpec) -> Decoder:
    """Set the thread count and build the decoder; torch's thread count applies only to the calling thread."""
    import torch

    from roll.inference.hf_decoder import Decoder

    if spec.num_threads is not None:
        torch.set_num_threads(spec.num_threads)
    wanted = spec.options.get("device")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = torch.device(wanted) if wanted else accelerator or torch.device("cpu")
    if spec.tensor_parallel > 1:
        from roll.inference.hf_parallel import ShardedDecoder

        return ShardedDecoder(spec, device)
    return Decoder(spec, device)
