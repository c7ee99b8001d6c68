"""Memory of a process and all its descendants.

Shared pages are counted once (PSS), so workers that were forked or map one model file are not counted twice. Reading
PSS walks page tables, which takes milliseconds per gigabyte; resident size (RSS) takes microseconds. So the sampler
watches RSS, and reads PSS only when a new peak is possible.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

__all__ = ["PeakMemory", "process_tree", "proportional_bytes"]

_PROC = Path("/proc")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_INTERVAL_S = 1.0
"""Interval between readings of RSS."""
_REFRESH_S = 15.0
"""PSS is read at least this often, since it may grow while RSS does not (when pages are no longer shared)."""


def process_tree(root: int | None = None) -> list[int]:
    """Process ids of `root` (default: this process) and all its descendants, children after their parents."""
    import psutil

    root = os.getpid() if root is None else root
    with contextlib.suppress(psutil.NoSuchProcess):
        return [root, *(child.pid for child in psutil.Process(root).children(recursive=True))]
    return []


def proportional_bytes(process_ids: list[int]) -> int:
    """Return the summed PSS; a process that has ended counts 0, one that hides its PSS counts its RSS."""
    return sum(_proportional(pid) for pid in process_ids)


def _proportional(pid: int) -> int:
    try:
        for line in (_PROC / str(pid) / "smaps_rollup").read_bytes().splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except OSError:
        return _resident(pid)
    return 0


def _resident(pid: int) -> int:
    try:
        return int((_PROC / str(pid) / "statm").read_bytes().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


class PeakMemory:
    """Samples the summed PSS of this process's tree in a thread until `stop`."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._resident_at_peak = 0
        self._read_at = -_REFRESH_S
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="roll-memory", daemon=True)

    def start(self) -> PeakMemory:
        """Start sampling."""
        self._thread.start()
        return self

    def stop(self) -> int:
        """Stop sampling after a last sample, and return the peak in bytes. May be called twice."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self.sample(force=True)
        return self.peak_bytes

    def sample(self, *, force: bool = False) -> None:
        """Take a sample; PSS is read only if it may exceed the peak."""
        process_ids = process_tree()
        resident = sum(_resident(pid) for pid in process_ids)
        now = time.monotonic()
        if force or resident > self._resident_at_peak * 1.002 or now - self._read_at >= _REFRESH_S:
            self._read_at = now
            self._resident_at_peak = max(self._resident_at_peak, resident)
            self.peak_bytes = max(self.peak_bytes, proportional_bytes(process_ids))

    def _run(self) -> None:
        while not self._stopping.is_set():
            began = time.thread_time()
            self.sample()
            # Take at most 1 % of a core, for any number of processes.
            self._stopping.wait(max(_INTERVAL_S, 100 * (time.thread_time() - began)))
