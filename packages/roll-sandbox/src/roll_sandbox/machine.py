"""What this machine has left: memory and cores."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["CpuMeter", "free_memory_bytes", "memory_bytes", "num_cores"]

_GROUP = Path("/sys/fs/cgroup")


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory_bytes() -> int | None:
    """What programs may still take; `None`: the system does not say."""
    found = memory_bytes()
    return None if found is None else found[0]


def memory_bytes() -> tuple[int, int] | None:
    """What is free, and what there is, of the machine or of its container; `None`: the system does not say."""
    try:
        with open("/proc/meminfo") as lines:
            kibibytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        machine = kibibytes["MemAvailable"] * 1024, kibibytes["MemTotal"] * 1024
    except (OSError, ValueError, KeyError):
        return None
    try:
        most = int((_GROUP / "memory.max").read_text())
        group = max(0, most - int((_GROUP / "memory.current").read_text())), most
    except (OSError, ValueError):
        return machine  # no such file, or no bound ("max")
    return min(machine, group)


class CpuMeter:
    """Which share of the machine's cores worked since the last call."""

    def __init__(self) -> None:
        self._last = _jiffies()

    def busy(self) -> float:
        """From 0 to 1; 0 where the system does not say."""
        (idle, total), (idle_then, total_then) = _jiffies(), self._last
        self._last = idle, total
        return 1 - (idle - idle_then) / (total - total_then) if total > total_then else 0.0


def _jiffies() -> tuple[int, int]:
    """Idle, and all."""
    try:
        with open("/proc/stat") as file:
            counts = [int(count) for count in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return counts[3] + counts[4], sum(counts)
