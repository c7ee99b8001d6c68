"""Keep OpenMP's threads from spinning while other programs use this machine's cores.

A parallel region ends at a barrier, where threads spin for a while before they sleep. On a quiet machine that is right:
a model's step is thousands of short regions, and waking threads for each makes a decoding step up to twice as slow. On
a machine whose cores are shared it is wrong: a thread spins on the core that the one it waits for should have. With
one busy program on two cores, decoding took 3.4 times as long as alone, and 1.7 times with threads that sleep at once.

GNU's OpenMP reads its settings once, but it has a rule of its own: as long as a process has more OpenMP threads than
cores, none spins (`do_spin` in libgomp's wait.h). `SpinControl` uses this rule. The kernel's pressure stall information
says for which share of time some thread waited for a core; while that is high, it keeps a team of idle threads, one
more than there are cores. The number of threads that compute stays the same, and so does every result. With another
OpenMP runtime, or a kernel without pressure stall information, nothing happens.

libgomp ends the process where it cannot start a thread. So a team is made only where this process may have twice as
many further threads, which is tried with Python's.
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
    "loaded_libgomp",
    "may_start",
    "pressure_file",
    "start_spin_control",
    "watch",
]

PERIOD_S = 0.25
CONTENDED = 0.3
"""Share of time for which some thread waits for a core, above which cores are shared: 0.4 to 1 beside one program."""
QUIET = 0.15
"""Share below which they are not: up to 0.08 alone."""


def loaded_libgomp(maps: Path = Path("/proc/self/maps")) -> str | None:
    """Return the path of PyTorch's OpenMP runtime, or `None` if that is not GNU's or not loaded."""
    try:
        lines = maps.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    found = {line.split(maxsplit=5)[-1] for line in lines if "/libgomp" in line}
    # other packages bring copies of their own, whose threads are not PyTorch's
    own = sorted(path for path in found if "torch" in Path(path).parent.parts)
    return own[0] if own else next(iter(found), None) if len(found) == 1 else None


class IdleTeam:
    """A team of OpenMP threads that does nothing, in a thread of its own.

    Args:
        library: path of libgomp.
        num_threads: of the team.
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
        """Let the team's threads end; they may do so after the call."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        # A region that calls a function without effects creates the threads; they stay until this thread ends.
        without_effect = ctypes.cast(self._gomp.omp_get_num_threads, ctypes.c_void_p)
        self._gomp.GOMP_parallel(without_effect, None, ctypes.c_uint(self._num_threads), ctypes.c_uint(0))
        self._there.set()
        self._end.wait()


def may_start(num_threads: int) -> bool:
    """Return whether this process may have so many further threads, by starting them for a moment."""
    end, threads = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(num_threads):
            threads.append(threading.Thread(target=end.wait, name="trial", daemon=True))
            threads[-1].start()
    except RuntimeError:  # of a container, a user or the machine, there may be no more
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
        make_team: makes what keeps them from spinning, as long as it is not closed; `None` where that is impossible.
    """

    def __init__(self, make_team: Callable[[], IdleTeam | None]) -> None:
        self._make_team = make_team
        self._team: IdleTeam | None = None
        self._last: tuple[float, float] | None = None

    @property
    def spins(self) -> bool:
        """Whether threads spin before they sleep."""
        return self._team is None

    def observe(self, now_s: float, stalled_s: float) -> None:
        """Compare the time that threads waited since the last call with the thresholds.

        Args:
            now_s: the monotonic time.
            stalled_s: total time for which some thread had to wait for a core.
        """
        before, self._last = self._last, (now_s, stalled_s)
        if before is None or now_s <= before[0]:
            return
        share = (stalled_s - before[1]) / (now_s - before[0])
        if self._team is None and share > CONTENDED:
            self._team = self._make_team()
        elif share < QUIET:
            self._let_spin()

    def forget(self) -> None:
        """Let threads spin, and begin anew: the counts cannot be read."""
        self._last = None
        self._let_spin()

    def _let_spin(self) -> None:
        team, self._team = self._team, None
        if team is not None:
            team.close()


def pressure_file(root: Path = Path("/")) -> Path | None:
    """Return the file in which the kernel counts how long threads waited for this process's cores, or `None`.

    That of the process's own control group comes first. The machine's counts threads of others too, so it is used only
    by a process that may use all cores.
    """
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            number, _, group = line.split(":", 2)
            own = root / "sys/fs/cgroup" / group.lstrip("/") / "cpu.pressure"
            if number == "0" and _stalled_s(own) is not None:
                return own
    machine = root / "proc/pressure/cpu"
    if _stalled_s(machine) is None:
        return None
    return machine if len(os.sched_getaffinity(0)) == os.cpu_count() else None


def _stalled_s(path: Path) -> float | None:
    """Return seconds of `some avg10=0.00 avg60=0.00 avg300=0.00 total=MICROSECONDS`, the first line of a file."""
    try:
        return int(path.read_text(encoding="ascii").splitlines()[0].rpartition("total=")[2]) / 1e6
    except (OSError, ValueError, IndexError):
        return None


_started = threading.Lock()


def start_spin_control() -> None:
    """Watch this process from now on, in a thread; does nothing when it is watched already."""
    if _started.acquire(blocking=False):
        threading.Thread(target=_watch, name="spin-control", daemon=True).start()


def _watch() -> None:
    path = pressure_file()
    if path is not None:
        watch(SpinControl(_team), path, threading.Event().wait)


def watch(control: SpinControl, path: Path | None, pause: Callable[[float], bool]) -> None:
    """Let a control observe this process, until `pause` returns true, or a team that is wanted cannot be had.

    A file that cannot be read any more (all files are open that may be, or the control group is another one) is looked
    for again.
    """
    while not pause(PERIOD_S):
        stalled_s = None if path is None else _stalled_s(path)
        if stalled_s is None:
            control.forget()
            path = pressure_file()
            continue
        try:
            control.observe(time.monotonic(), stalled_s)
        except (OSError, RuntimeError):
            return


def _team() -> IdleTeam | None:
    """Make a team; `None` where PyTorch computes with another runtime.

    Raises:
        OSError: the library's file is another one by now.
        RuntimeError: there may be no more threads.
    """
    library = loaded_libgomp()
    num_threads = len(os.sched_getaffinity(0)) + 1
    if library is None:
        return None
    if not may_start(2 * num_threads):  # those of the trial may end a moment later, and others start threads too
        raise RuntimeError("no more threads may be started")
    return IdleTeam(library, num_threads)
