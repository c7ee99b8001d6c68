"""Workers of a service: they run its sandboxes, in the server's process or in one of their own.

`worker` starts sandboxes, `executions` the programs in one sandbox, and `outputs` keeps their output. `connection`
connects a worker to a server on another machine, and `run` starts and ends such a worker.
"""

from __future__ import annotations

from roll_sandbox.worker.connection import WorkerConnection
from roll_sandbox.worker.run import run_worker
from roll_sandbox.worker.worker import Worker

__all__ = ["Worker", "WorkerConnection", "run_worker"]
