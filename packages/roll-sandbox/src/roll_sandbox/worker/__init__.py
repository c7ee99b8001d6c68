"""Workers of a service, which run its sandboxes, in the server's process or in a separate one.

`worker` starts sandboxes; `executions` runs the programs in one sandbox; `outputs` bounds their kept output.
`connection` connects a worker to a server on another machine; `run` runs such a worker.
"""

from __future__ import annotations

from roll_sandbox.worker.connection import WorkerConnection
from roll_sandbox.worker.run import run_worker
from roll_sandbox.worker.worker import Worker

__all__ = ["Worker", "WorkerConnection", "run_worker"]
