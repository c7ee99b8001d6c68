"""Runs an SGLang server that ends with its parent. Start this file with the Python of an environment with SGLang.

    python server.py PARENT_PID --model-path … --port …

This file imports nothing of ROLL, which need not be installed in that environment.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

PARENT_POLL_S = 1.0


def end_with_parent(parent_id: int) -> None:
    """Kill the server's process group when its parent has ended, even if the parent was killed by SIGKILL."""

    def watch() -> None:
        while os.getppid() == parent_id:
            time.sleep(PARENT_POLL_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def main() -> None:
    """Run the server until it is stopped."""
    end_with_parent(int(sys.argv[1]))
    sys.path.pop(0)  # the directory of this file, whose modules must not be found by their short names
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args

    launch_server(prepare_server_args(sys.argv[2:]))


if __name__ == "__main__":  # SGLang's scheduler is spawned and imports this file again
    main()
