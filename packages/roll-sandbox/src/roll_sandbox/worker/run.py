"""Runs a worker until it is drained."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Sequence
from typing import Any

from roll_sandbox.images import ImageCache
from roll_sandbox.manager import SandboxManager
from roll_sandbox.worker.connection import WorkerConnection
from roll_sandbox.worker.worker import Worker

__all__ = ["run_worker"]


async def run_worker(
    url: str,
    token: str,
    *,
    name: str,
    capacity: int,
    runtime: str = "bubblewrap",
    warm: int | None = None,
    mounts: Sequence[str] = (),
    **settings: Any,
) -> None:
    """Run sandboxes on this machine for a service, until the worker is drained or this call is canceled.

    The first SIGTERM drains the worker; a second SIGTERM cancels the call. Signals are handled only in the main thread.

    Args:
        url: address of the service.
        token: token with the scope `worker`.
        name: name of the worker, by which the service recognizes it after a restart.
        capacity: maximum number of concurrent sandboxes.
        runtime: name of the isolation runtime.
        warm: number of idle sandboxes to keep, as for `SandboxManager`.
        mounts: directories of this machine that specs may mount.
        settings: further arguments of `WorkerConnection`.

    Raises:
        SandboxUnavailableError: this machine cannot run sandboxes.
        SandboxAccessError: the service rejects the token.
    """
    async with SandboxManager(runtime, warm=warm, max_sandboxes=capacity) as manager:
        worker = Worker(manager, mounts=mounts, images=ImageCache().list_requestable_names)
        joined = WorkerConnection(worker, url, token, name=name, capacity=capacity, **settings)
        serving = asyncio.ensure_future(joined.serve())

        def terminate() -> None:
            loop.add_signal_handler(signal.SIGTERM, serving.cancel)
            joined.drain()

        loop = asyncio.get_running_loop()
        with contextlib.suppress(ValueError, NotImplementedError, RuntimeError):
            loop.add_signal_handler(signal.SIGTERM, terminate)
        try:
            await serving
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await worker.close()
            with contextlib.suppress(ValueError, NotImplementedError, RuntimeError):
                loop.remove_signal_handler(signal.SIGTERM)
