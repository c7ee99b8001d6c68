"""What this machine has left: memory and cores."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["CpuMeter", "free_memory_bytes", "num_cores"]

_GROUP = Path("/sys/fs/cgroup")


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory_bytes() -> int | None:
    """What programs may still take, of the machine and of the container; `None`: the system does not say."""
    free = []
    try:
        with open("/proc/meminfo") as lines:
            free += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        free.append(int((_GROUP / "memory.max").read_text()) - int((_GROUP / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no such file, or no bound ("max")
    return max(0, min(free)) if free else None


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
