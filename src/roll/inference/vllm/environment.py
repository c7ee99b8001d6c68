"""Sets the environment variables that vLLM reads when it is imported and when its processes start.

Variables that the user has set are not changed.
"""

from __future__ import annotations

import os
import tempfile
from importlib import metadata

from roll.process_environment import find_socket_directory

__all__ = ["is_cpu_build", "prepare_environment"]

_COMMON_VARIABLES = {
    # If OpenMP or CUDA threads run in a process, a child forked from it may hang.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    # The engine's context is one token longer than `max_context`, so that `logprobs` can score a sequence of it.
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
}
_CPU_VARIABLES = {
    # Otherwise vLLM replaces the "uni" executor with an extra process, which spins for a second after every message.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Threads are not pinned: trainer and engine take turns on the same cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def is_cpu_build() -> bool:
    """Return whether the installed vLLM is a CPU build. Does not import vLLM."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return name == "vllm-cpu" or "cpu" in metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return False


def prepare_environment() -> None:
    """Set the environment variables of vLLM. Must be called before vLLM is imported; may be called again."""
    for name, value in (_COMMON_VARIABLES | (_CPU_VARIABLES if is_cpu_build() else {})).items():
        os.environ.setdefault(name, value)
    if (directory := find_socket_directory(relative_length=60)) != tempfile.gettempdir():
        os.environ.setdefault("VLLM_RPC_BASE_PATH", directory)
