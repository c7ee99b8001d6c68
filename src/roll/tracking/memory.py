"""Measure the memory of a process and all its descendants.

Memory is measured as PSS (proportional set size), which counts shared pages once, for example those of forked workers.
Reading PSS takes milliseconds per gigabyte, reading RSS (resident set size) microseconds. Therefore the sampler polls
RSS, and reads PSS only when a new peak is possible.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

__all__ = ["PeakMemory", "list_process_tree", "measure_proportional_bytes"]

_PROC_DIRECTORY = Path("/proc")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SAMPLE_INTERVAL_S = 1.0
"""Interval between readings of RSS."""
_REFRESH_INTERVAL_S = 15.0
"""Maximum interval between readings of PSS, which may grow while RSS is constant (when pages are no longer shared)."""


def list_process_tree(root: int | None = None) -> list[int]:
    """Return the process ids of `root` (default: this process) and all descendants, children after their parents."""
    import psutil

    root = os.getpid() if root is None else root
    with contextlib.suppress(psutil.NoSuchProcess):
        return [root, *(child.pid for child in psutil.Process(root).children(recursive=True))]
    return []


def measure_proportional_bytes(process_ids: list[int]) -> int:
    """Return the summed PSS of processes, with RSS where PSS is not readable; a process that has ended is counted as
    0."""
    return sum(_read_pss_bytes(pid) for pid in process_ids)


def _read_pss_bytes(pid: int) -> int:
    try:
        for line in (_PROC_DIRECTORY / str(pid) / "smaps_rollup").read_bytes().splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except OSError:
        return _read_rss_bytes(pid)
    return 0


def _read_rss_bytes(pid: int) -> int:
    try:
        return int((_PROC_DIRECTORY / str(pid) / "statm").read_bytes().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


class PeakMemory:
    """Samples the summed PSS of this process's tree in a thread until `stop`."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._resident_at_peak = 0
        self._read_at = -_REFRESH_INTERVAL_S
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="roll-memory", daemon=True)

    def start(self) -> PeakMemory:
        """Start sampling."""
        self._thread.start()
        return self

    def stop(self) -> int:
        """Stop sampling after a last sample, and return the peak in bytes. Calling it twice is safe."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self.sample(force=True)
        return self.peak_bytes

    def sample(self, *, force: bool = False) -> None:
        """Take a sample; PSS is read only if it may exceed the peak."""
        process_ids = list_process_tree()
        resident = sum(_read_rss_bytes(pid) for pid in process_ids)
        now = time.monotonic()
        if force or resident > self._resident_at_peak * 1.002 or now - self._read_at >= _REFRESH_INTERVAL_S:
            self._read_at = now
            self._resident_at_peak = max(self._resident_at_peak, resident)
            self.peak_bytes = max(self.peak_bytes, measure_proportional_bytes(process_ids))

    def _run(self) -> None:
        while not self._stopping.is_set():
            began = time.thread_time()
            self.sample()
            # Use at most 1 % of a core, for any number of processes.
            self._stopping.wait(max(_SAMPLE_INTERVAL_S, 100 * (time.thread_time() - began)))
