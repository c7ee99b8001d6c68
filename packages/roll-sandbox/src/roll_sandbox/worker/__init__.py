"""The worker, which runs a service's sandboxes: in the server's process, or in a process of its own."""

from __future__ import annotations

from roll_sandbox.worker.joining import Joined
from roll_sandbox.worker.running import run_worker
from roll_sandbox.worker.worker import Worker

__all__ = ["Joined", "Worker", "run_worker"]
