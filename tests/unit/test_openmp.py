"""OpenMP threads spin on a quiet machine and sleep on a shared one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roll.openmp import SpinControl, loaded_libgomp, pressure_file


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
    assert control.spins == (not log or log[-1] == "closed")


def test_openmp_without_a_team_goes_on_spinning() -> None:
    control = SpinControl(lambda: None)
    control.observe(0.0, 0.0)
    control.observe(1.0, 1.0)
    assert control.spins


def test_openmp_the_first_counts_and_a_clock_that_stands_still_decide_nothing() -> None:
    seen: list[str] = []
    make_team: Any = lambda: Team(seen)  # noqa: E731
    control = SpinControl(make_team)
    control.observe(5.0, 3600.0)
    control.observe(5.0, 3601.0)
    assert seen == []


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
    assert loaded_libgomp(maps) == found
    assert loaded_libgomp(tmp_path / "none") is None


def test_openmp_the_pressure_of_the_own_control_group_comes_first(tmp_path: Path) -> None:
    def write(path: str, text: str) -> Path:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    line = "some avg10=0.00 avg60=0.00 avg300=0.00 total=123456\n"
    assert pressure_file(tmp_path) is None
    write("proc/self/cgroup", "1:cpu:/old\n0::/mine\n")
    machine = write("proc/pressure/cpu", line)
    every = len(os.sched_getaffinity(0)) == os.cpu_count()
    assert pressure_file(tmp_path) == (machine if every else None)
    own = write("sys/fs/cgroup/mine/cpu.pressure", "")
    assert pressure_file(tmp_path) != own
    own.write_text(line)
    assert pressure_file(tmp_path) == own


PROCESS = """
import os, torch
from roll.openmp import IdleTeam, loaded_libgomp
def threads():
    return len(os.listdir("/proc/self/task"))
torch.set_num_threads(2)
x = torch.randn(256, 256)
x @ x
library = loaded_libgomp()
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
