"""A checkpoint is whole or absent, at whichever write, fsync or rename the process dies or the disk fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def killswitch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("killswitch") / "killswitch.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, HERE / "killswitch.c", "-ldl"], check=True)
    return library


def save_under_fire(killswitch: Path, model: Path, tmp_path: Path, every: int, *how: str) -> str:
    done = subprocess.run(
        [sys.executable, HERE / "save_under_fire.py", model, tmp_path / "run", str(every), *how],
        env={**os.environ, "LD_PRELOAD": str(killswitch), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_resume_after_kill_in_checkpoint_a_few_moments_inside_a_save(
    killswitch: Path, tiny_model: Path, tmp_path: Path
) -> None:
    assert "0 losses" in save_under_fire(killswitch, tiny_model, tmp_path, every=31)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_resume_after_kill_in_checkpoint_every_moment_inside_a_save(
    killswitch: Path, tiny_model: Path, tmp_path: Path
) -> None:
    assert "0 losses" in save_under_fire(killswitch, tiny_model, tmp_path, every=1)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_resume_after_kill_in_checkpoint_every_moment_of_a_save_while_training_goes_on(
    killswitch: Path, tiny_model: Path, tmp_path: Path
) -> None:
    assert "0 losses" in save_under_fire(killswitch, tiny_model, tmp_path, 1, "asynchronous")


def test_resume_after_kill_in_checkpoint_a_few_moments_at_which_the_disk_fails_while_training_goes_on(
    killswitch: Path, tiny_model: Path, tmp_path: Path
) -> None:
    assert "0 losses" in save_under_fire(killswitch, tiny_model, tmp_path, 41, "asynchronous", "failing")


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", [["failing"], ["asynchronous", "failing"]], ids=" ".join)
def test_resume_after_kill_in_checkpoint_every_moment_at_which_the_disk_fails(
    killswitch: Path, tiny_model: Path, tmp_path: Path, how: list[str]
) -> None:
    assert "0 losses" in save_under_fire(killswitch, tiny_model, tmp_path, 1, *how)
