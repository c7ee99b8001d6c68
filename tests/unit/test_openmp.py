"""OpenMP threads spin on a quiet machine and sleep on a shared one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from roll import openmp
from roll.openmp import SpinControl, find_loaded_libgomp, find_pressure_file, watch


class Team:
    """Counts what is open."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        log.append("made")

    def close(self) -> None:
        self.log.append("closed")


@pytest.mark.parametrize(
    ("shares", "log"),
    [
        ([0.0, 0.08, 0.29], []),
        ([0.0, 0.4, 0.9, 0.5], ["made"]),
        ([0.4, 0.2, 0.4], ["made"]),  # between the two limits nothing changes
        ([0.4, 0.1, 0.0, 0.2, 1.0], ["made", "closed", "made"]),
    ],
)
def test_openmp_threads_spin_unless_threads_wait_for_cores(shares: list[float], log: list[str]) -> None:
    seen: list[str] = []
    make_team: Any = lambda: Team(seen)  # noqa: E731
    control = SpinControl(make_team)
    stalled_s = 7.0
    control.observe(100.0, stalled_s)
    for number, share in enumerate(shares, 1):
        stalled_s += 0.25 * share
        control.observe(100.0 + 0.25 * number, stalled_s)
    assert seen == log
    assert control.may_spin == (not log or log[-1] == "closed")


def test_openmp_without_a_team_goes_on_spinning() -> None:
    control = SpinControl(lambda: None)
    control.observe(0.0, 0.0)
    control.observe(1.0, 1.0)
    assert control.may_spin


def test_openmp_the_first_counts_and_a_clock_that_stands_still_decide_nothing() -> None:
    seen: list[str] = []
    make_team: Any = lambda: Team(seen)  # noqa: E731
    control = SpinControl(make_team)
    control.observe(5.0, 3600.0)
    control.observe(5.0, 3601.0)
    assert seen == []


def test_openmp_counts_that_cannot_be_read_for_a_while_are_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    monkeypatch.setattr(openmp, "find_pressure_file", lambda: second if second.exists() else None)
    seen: list[str] = []
    make_team: Any = lambda: Team(seen)  # noqa: E731
    # far more between two looks than the time that can be between them: cores are shared
    events: list[Any] = [(first, 7), (first, 10**9), "gone", "still gone", (second, 3), (second, 4), (second, 10**9)]
    log: list[str] = []

    def pause(seconds: float) -> bool:
        log.append(" ".join(seen))
        if not events:
            return True
        event = events.pop(0)
        if isinstance(event, str):
            first.unlink(missing_ok=True)
        else:
            event[0].write_text(f"some avg10=0.00 avg60=0.00 avg300=0.00 total={event[1]}000000\n")
        return False

    watch(SpinControl(make_team), first, pause)
    closed = "made closed"  # the second file is found with 3, counts from 4 on, and says nothing of what was before
    assert log == ["", "", "made", closed, closed, closed, closed, "made closed made"]


@pytest.mark.parametrize("error", [OSError("the file is another one"), RuntimeError("can't start new thread")])
def test_openmp_where_no_team_can_be_had_nothing_is_watched_any_more(tmp_path: Path, error: Exception) -> None:
    counts, total_s, pauses = tmp_path / "counts", [0.0], []

    def make_team() -> None:
        raise error

    def pause(seconds: float) -> bool:
        pauses.append(seconds)
        total_s[0] += 1e6
        counts.write_text(f"some avg10=0.00 avg60=0.00 avg300=0.00 total={total_s[0]:.0f}\n")
        return len(pauses) > 9

    watch(SpinControl(make_team), counts, pause)
    assert len(pauses) < 9


def test_openmp_a_process_that_may_start_no_more_threads_gets_no_team(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """libgomp would end the process."""
    start, left, made = threading.Thread.start, [5], []

    def start_some(thread: threading.Thread) -> None:
        if left[0] == 0:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    monkeypatch.setattr(openmp, "IdleTeam", lambda *arguments: made.append(arguments))
    monkeypatch.setattr(openmp, "find_loaded_libgomp", lambda: "libgomp.so.1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="cannot start any more threads"):
        openmp._create_team()
    assert made == [] and threading.active_count() == before
    left[0] = 6  # twice as many as the team has: one more than there are cores
    openmp._create_team()
    assert made == [("libgomp.so.1", 3)] and threading.active_count() == before


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (["/x/torch/lib/libgomp.so.1", "/x/sentencepiece.libs/libgomp-6a.so.1"], "/x/torch/lib/libgomp.so.1"),
        (["/usr/lib/libgomp.so.1"], "/usr/lib/libgomp.so.1"),
        (["/x/a.libs/libgomp-1.so", "/x/b.libs/libgomp-2.so"], None),
        (["/x/torch/lib/libiomp5.so"], None),
        (["/x y/torch/lib/libgomp.so.1"], "/x y/torch/lib/libgomp.so.1"),
    ],
)
def test_openmp_the_runtime_is_the_one_that_pytorch_computes_with(
    tmp_path: Path, paths: list[str], found: str | None
) -> None:
    maps = tmp_path / "maps"
    maps.write_text("".join(f"7f00-7f01 r-xp 00000000 fe:00 12   {path}\n" for path in paths))
    assert find_loaded_libgomp(maps) == found
    assert find_loaded_libgomp(tmp_path / "none") is None


def test_openmp_the_pressure_of_the_own_control_group_comes_first(tmp_path: Path) -> None:
    def write(path: str, text: str) -> Path:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    line = "some avg10=0.00 avg60=0.00 avg300=0.00 total=123456\n"
    assert find_pressure_file(tmp_path) is None
    write("proc/self/cgroup", "1:cpu:/old\n0::/mine\n")
    machine = write("proc/pressure/cpu", line)
    every = len(os.sched_getaffinity(0)) == os.cpu_count()
    assert find_pressure_file(tmp_path) == (machine if every else None)
    own = write("sys/fs/cgroup/mine/cpu.pressure", "")
    assert find_pressure_file(tmp_path) != own
    own.write_text(line)
    assert find_pressure_file(tmp_path) == own


PROCESS = """
import os, torch
from roll.openmp import IdleTeam, find_loaded_libgomp
def threads():
    return len(os.listdir("/proc/self/task"))
torch.set_num_threads(2)
x = torch.randn(256, 256)
x @ x
library = find_loaded_libgomp()
if library is None:
    raise SystemExit(77)
before, numbers = threads(), torch.get_num_threads()
for _ in range(3):
    team = IdleTeam(library, 5)
    assert threads() == before + 5, (before, threads())
    assert torch.get_num_threads() == numbers
    assert torch.equal(x @ x, x @ x)
    team.close()
    while threads() != before:  # they end after the call
        os.sched_yield()
"""


def test_openmp_a_team_of_idle_threads_comes_and_goes_and_the_computing_threads_stay() -> None:
    done = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, timeout=120)
    if done.returncode == 77:
        pytest.skip("PyTorch computes with another OpenMP runtime here")
    assert done.returncode == 0, done.stderr
