"""Keep OpenMP's threads from spinning while other programs use this machine's cores.

A parallel region ends at a barrier, where threads spin for a while before they sleep. On an idle machine this is fast:
a model's step consists of thousands of short regions, and waking threads for each makes a decoding step up to twice as
slow. On a machine with shared cores it is slow: a thread spins on a core that another thread of the same region needs.
With one busy program on two cores, decoding took 3.4 times as long as without it, and 1.7 times with threads that sleep
immediately.

GNU's OpenMP reads its settings once, but it has a special rule: while a process has more OpenMP threads than cores, no
thread spins (`do_spin` in libgomp's wait.h). `SpinControl` uses this rule. The kernel's pressure stall information
reports the fraction of time in which some thread waited for a core; while it is high, `SpinControl` keeps a team of
idle threads, one more than the number of cores. The number of computing threads, and therefore every result, stays the
same. With another OpenMP runtime, or a kernel without pressure stall information, this module has no effect.

libgomp terminates the process if it cannot start a thread. Therefore a team is created only if this process can start
twice the number of additional threads, which is tested with Python threads.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = [
    "IdleTeam",
    "SpinControl",
    "can_start_threads",
    "find_loaded_libgomp",
    "find_pressure_file",
    "start_spin_control",
    "watch",
]

SAMPLE_INTERVAL_S = 0.25
CONTENTION_THRESHOLD = 0.3
"""Fraction of time with a waiting thread above which cores are treated as shared; 0.4 to 1 was measured with one other
program.
"""
IDLE_THRESHOLD = 0.15
"""Fraction below which cores are treated as not shared; up to 0.08 was measured without other programs."""


def find_loaded_libgomp(maps: Path = Path("/proc/self/maps")) -> str | None:
    """Return the path of PyTorch's libgomp; `None` if PyTorch uses another OpenMP runtime or has not loaded it."""
    try:
        lines = maps.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    found = {line.split(maxsplit=5)[-1] for line in lines if "/libgomp" in line}
    # other packages ship their own copies, whose threads are not PyTorch's
    own = sorted(path for path in found if "torch" in Path(path).parent.parts)
    return own[0] if own else next(iter(found), None) if len(found) == 1 else None


class IdleTeam:
    """A team of idle OpenMP threads, owned by a dedicated thread.

    Args:
        library: Path of libgomp.
        num_threads: Number of threads in the team.
    """

    def __init__(self, library: str, num_threads: int) -> None:
        self._gomp = ctypes.CDLL(library)
        self._num_threads = num_threads
        self._end = threading.Event()
        self._there = threading.Event()
        self._thread = threading.Thread(target=self._run, name="idle-openmp-team", daemon=True)
        self._thread.start()
        self._there.wait()

    def close(self) -> None:
        """Tell the team's threads to end; they may end shortly after this call returns."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        # A region that calls a function without effects creates the threads; they stay until this thread ends.
        without_effect = ctypes.cast(self._gomp.omp_get_num_threads, ctypes.c_void_p)
        self._gomp.GOMP_parallel(without_effect, None, ctypes.c_uint(self._num_threads), ctypes.c_uint(0))
        self._there.set()
        self._end.wait()


def can_start_threads(num_threads: int) -> bool:
    """Briefly start `num_threads` more threads, and return whether this was possible."""
    end, threads = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(num_threads):
            threads.append(threading.Thread(target=end.wait, name="trial", daemon=True))
            threads[-1].start()
    except RuntimeError:  # a limit of the container, the user or the machine
        threads.pop()
        return False
    finally:
        end.set()
        for thread in threads:
            thread.join()
    return True


class SpinControl:
    """Decides whether this process's OpenMP threads may spin.

    Args:
        make_team: Creates an idle team, which prevents spinning until it is closed; returns `None` if impossible.
    """

    def __init__(self, make_team: Callable[[], IdleTeam | None]) -> None:
        self._make_team = make_team
        self._team: IdleTeam | None = None
        self._last: tuple[float, float] | None = None

    @property
    def may_spin(self) -> bool:
        """True if threads may spin before they sleep."""
        return self._team is None

    def observe(self, now_s: float, stalled_s: float) -> None:
        """Compare the time that threads waited since the last call with the thresholds.

        Args:
            now_s: Monotonic time.
            stalled_s: Total time in which some thread had to wait for a core.
        """
        before, self._last = self._last, (now_s, stalled_s)
        if before is None or now_s <= before[0]:
            return
        share = (stalled_s - before[1]) / (now_s - before[0])
        if self._team is None and share > CONTENTION_THRESHOLD:
            self._team = self._make_team()
        elif share < IDLE_THRESHOLD:
            self._allow_spinning()

    def reset(self) -> None:
        """Allow spinning and reset the state; called when the stall counter cannot be read."""
        self._last = None
        self._allow_spinning()

    def _allow_spinning(self) -> None:
        team, self._team = self._team, None
        if team is not None:
            team.close()


def find_pressure_file(root: Path = Path("/")) -> Path | None:
    """Return the pressure stall file for this process's cores; `None` if the kernel has none.

    The file of the process's cgroup is preferred. The machine-wide file includes the threads of other processes, so it
    is used only if this process may use all cores.
    """
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            number, _, group = line.split(":", 2)
            own = root / "sys/fs/cgroup" / group.lstrip("/") / "cpu.pressure"
            if number == "0" and _read_stalled_seconds(own) is not None:
                return own
    machine = root / "proc/pressure/cpu"
    if _read_stalled_seconds(machine) is None:
        return None
    return machine if len(os.sched_getaffinity(0)) == os.cpu_count() else None


def _read_stalled_seconds(path: Path) -> float | None:
    """Return the total stall time in seconds from the first line, `some avg10=0.00 … total=MICROSECONDS`, of a file."""
    try:
        return int(path.read_text(encoding="ascii").splitlines()[0].rpartition("total=")[2]) / 1e6
    except (OSError, ValueError, IndexError):
        return None


_start_lock = threading.Lock()


def start_spin_control() -> None:
    """Start the thread that controls spinning in this process; do nothing if it has already been started."""
    if _start_lock.acquire(blocking=False):
        threading.Thread(target=_run_spin_control, name="spin-control", daemon=True).start()


def _run_spin_control() -> None:
    path = find_pressure_file()
    if path is not None:
        watch(SpinControl(_create_team), path, threading.Event().wait)


def watch(control: SpinControl, path: Path | None, pause: Callable[[float], bool]) -> None:
    """Call `control.observe` repeatedly, until `pause` returns true or a team cannot be created.

    If the pressure file `path` can no longer be read (too many open files, or a changed cgroup), it is looked up again.
    """
    while not pause(SAMPLE_INTERVAL_S):
        stalled_s = None if path is None else _read_stalled_seconds(path)
        if stalled_s is None:
            control.reset()
            path = find_pressure_file()
            continue
        try:
            control.observe(time.monotonic(), stalled_s)
        except (OSError, RuntimeError):
            return


def _create_team() -> IdleTeam | None:
    """Create a thread team; return `None` if PyTorch does not use libgomp.

    Raises:
        OSError: The file of libgomp was changed after it was loaded.
        RuntimeError: No more threads can be started.
    """
    library = find_loaded_libgomp()
    num_threads = len(os.sched_getaffinity(0)) + 1
    if library is None:
        return None
    if not can_start_threads(2 * num_threads):  # threads of the trial may end later, and other code starts threads too
        raise RuntimeError("this process cannot start any more threads")
    return IdleTeam(library, num_threads)
