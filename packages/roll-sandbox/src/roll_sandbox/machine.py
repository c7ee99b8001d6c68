"""The free memory and the cores of this machine."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["CpuMeter", "count_cores", "read_free_memory_bytes", "read_memory_bytes"]

_CGROUP_ROOT = Path("/sys/fs/cgroup")


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_free_memory_bytes() -> int | None:
    """Return the free memory in bytes; `None` if the system does not report it."""
    memory = read_memory_bytes()
    return None if memory is None else memory[0]


def read_memory_bytes() -> tuple[int, int] | None:
    """Return the free and total memory of the machine or its container; `None` if the system does not report it."""
    try:
        with open("/proc/meminfo") as lines:
            kibibytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        machine = kibibytes["MemAvailable"] * 1024, kibibytes["MemTotal"] * 1024
    except (OSError, ValueError, KeyError):
        return None
    try:
        # With cgroup version 2, a container sees its own group at this path; MemAvailable is of the whole machine.
        most = int((_CGROUP_ROOT / "memory.max").read_text())
        group = max(0, most - int((_CGROUP_ROOT / "memory.current").read_text())), most
    except (OSError, ValueError):
        return machine  # no such file, or no bound ("max")
    return min(machine, group)


class CpuMeter:
    """Measures the fraction of the machine's cores that were busy since the last call."""

    def __init__(self) -> None:
        self._last = _read_jiffies()

    def measure_cpu_utilization(self) -> float:
        """Return the fraction of cores that were busy since the last call, from 0 to 1; 0 if the system has no data."""
        (idle, total), (idle_then, total_then) = _read_jiffies(), self._last
        self._last = idle, total
        return 1 - (idle - idle_then) / (total - total_then) if total > total_then else 0.0


def _read_jiffies() -> tuple[int, int]:
    """Return the idle and the total CPU time of all cores, in jiffies; zeros if the system does not report them."""
    try:
        with open("/proc/stat") as file:
            counts = [int(count) for count in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return counts[3] + counts[4], sum(counts)
