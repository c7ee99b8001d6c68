"""The process environment: variables that libraries read once, when they are imported, and temporary variables.

Call `prepare_environment` before anything imports torch, transformers, datasets, or vLLM. A variable that the
user has set is not changed. `roll.inference` sets the `VLLM_*` variables.

    OMP_WAIT_POLICY=passive                threads that spin while they wait take cores from the engine, the trainer,
                                           or other processes: a step then takes up to ten times as long
    GOMP_SPINCOUNT=10000                   with it, threads spin for about 100 microseconds before they sleep: a step is
                                           thousands of short parallel regions, and waking threads for each costs 7 %
                                           of training and of decoding, and a fifth on some virtual machines
    TOKENIZERS_PARALLELISM=false           the tokenizer's threads do not survive a fork, and it warns about that
    HF_HUB_DISABLE_PROGRESS_BARS=1         bars would break the live display
    HF_DATASETS_DISABLE_PROGRESS_BARS=1
    RAY_USAGE_STATS_ENABLED=0              a run does not send usage reports
    TRANSFORMERS_NO_ADVISORY_WARNINGS=1    the advice does not apply to this program
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from roll.errors import ConfigError
from roll.proxies import exclude_local_host_from_proxy

__all__ = ["SPIN_COUNT", "find_socket_directory", "override_environment", "prepare_environment"]

logger = logging.getLogger(__name__)

SPIN_COUNT = "10000"
"""Iterations of the OpenMP runtime's waiting loop before a thread sleeps: about 100 microseconds."""
MAX_SOCKET_PATH_LENGTH = 103
"""Maximum length of a socket's path in bytes: 107 on Linux, 103 on other systems."""
_DEFAULT_VARIABLES = {
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "OMP_WAIT_POLICY": "passive",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}


def prepare_environment() -> None:
    """Set the module's environment variables, except those that are set already; child processes inherit them.

    This machine's addresses are added to `NO_PROXY`, which clients of other libraries and child processes read.
    """
    os.environ.update(exclude_local_host_from_proxy())
    if "OMP_WAIT_POLICY" not in os.environ and "torch" in sys.modules:
        logger.warning("OMP_WAIT_POLICY=passive has no effect in this process, because torch is already imported")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    for name, value in _DEFAULT_VARIABLES.items():
        os.environ.setdefault(name, value)


def find_socket_directory(relative_length: int) -> str:
    """Return a directory for sockets: the directory for temporary files, or `/tmp` if its path is too long.

    Args:
        relative_length: Length in bytes of the longest path below the directory.

    Raises:
        ConfigError: Neither directory can be used.
    """
    directory = tempfile.gettempdir()
    if len(os.fsencode(directory)) + 1 + relative_length <= MAX_SOCKET_PATH_LENGTH:
        return directory
    if os.path.isdir("/tmp") and os.access("/tmp", os.W_OK | os.X_OK):
        return "/tmp"
    raise ConfigError(
        f"the path of the temporary directory '{directory}' has {len(os.fsencode(directory))} bytes, but socket paths "
        f"in it must not exceed {MAX_SOCKET_PATH_LENGTH} bytes: set TMPDIR to a directory with a shorter path."
    )


@contextmanager
def override_environment(variables: Mapping[str, str]) -> Generator[None]:
    """Set environment variables within this context, for child processes; restore the old values on exit."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
