"""Resources of this machine: cores, memory, accelerators, disk. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from roll.errors import RunDirectoryError

__all__ = ["Machine", "find_nearest_directory", "inspect_machine", "measure_free_disk"]

_TORCH_QUERY = """
import json, torch
count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
free = [torch.get_device_module().mem_get_info(i)[0] for i in range(count)]
print(json.dumps(free))
"""
QUERY_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Resources that a run can use."""

    num_cores: int
    memory_bytes: int
    """Available host memory, within the limit of a container."""
    accelerator_bytes: tuple[int, ...]
    """Free memory of each accelerator; empty without accelerators."""

    @property
    def has_accelerators(self) -> bool:
        """True if the machine has accelerators; if not, `device_mapping` refers to CPU cores."""
        return bool(self.accelerator_bytes)

    @property
    def devices(self) -> int:
        """Number of devices that `device_mapping` can refer to: accelerators or, without any, CPU cores."""
        return len(self.accelerator_bytes) or self.num_cores


def inspect_machine() -> Machine:
    """Return this machine's resources; accelerators are queried in a separate process, which takes about 3 s."""
    import psutil

    available = int(psutil.virtual_memory().available)
    limit = _read_container_memory()
    return Machine(
        num_cores=os.cpu_count() or 1,
        memory_bytes=available if limit is None else min(available, limit),
        accelerator_bytes=_query_accelerators(),
    )


def _read_container_memory() -> int | None:
    """Return the bytes of memory that are free within the limit of the container's cgroup; `None` without a limit."""
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            return max(0, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return None


def _query_accelerators() -> tuple[int, ...]:
    try:
        # The version decides without importing torch, which takes seconds.
        if importlib.metadata.version("torch").endswith("+cpu"):
            return ()
    except importlib.metadata.PackageNotFoundError:
        return ()
    try:
        # In a separate process: initializing CUDA here would prevent forks, and keep memory on every device.
        answer = subprocess.run(
            [sys.executable, "-c", _TORCH_QUERY], capture_output=True, timeout=QUERY_TIMEOUT_S, check=True, text=True
        )
        return tuple(json.loads(answer.stdout.strip().splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return ()


def find_nearest_directory(path: Path) -> Path:
    """Return `path` if it exists, otherwise its closest existing parent directory.

    Raises:
        RunDirectoryError: a part of the path is a file.
    """
    for candidate in (path, *path.absolute().parents):
        if candidate.is_dir():
            return candidate
        if candidate.exists():
            raise RunDirectoryError(
                f"'{candidate}' is a file, so '{path}' cannot be created: choose another `output_dir`."
            )
    return Path("/")


def measure_free_disk(path: Path) -> int:
    """Return the free bytes of the disk on which `path` is, or will be created.

    Raises:
        RunDirectoryError: the directory is not writable.
    """
    directory = find_nearest_directory(path)
    try:
        with tempfile.TemporaryDirectory(dir=directory, prefix=".roll-check-"):
            return shutil.disk_usage(directory).free
    except OSError as error:
        raise RunDirectoryError(
            f"cannot write to '{directory}': {error.strerror or error}. Choose another directory with `output_dir=…`."
        ) from None
