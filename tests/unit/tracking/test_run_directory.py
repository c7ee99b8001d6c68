"""Run directories: created once, locked by one process, and never overwritten."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from roll.config.document import read
from roll.errors import RunDirectoryError
from roll.tracking import RunDirectory, atomic


def test_run_directory_a_new_run_has_its_directories_and_its_configuration(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "runs" / "a", {"name": "a", "seed": 0, "text": "α: [1]"}) as run:
        names = sorted(p.name for p in run.path.iterdir() if not p.name.startswith("."))
        assert names == ["checkpoints", "config.yaml", "logs", "rollouts", "tensorboard"]
        assert read(run.config_path).tree == {"name": "a", "seed": 0, "text": "α: [1]"}
        assert run.get_checkpoint_path(20) == tmp_path / "runs/a/checkpoints/step-000020"
        assert run.get_log_path("engine", 1).name == "engine-1.log"


def test_run_directory_an_existing_run_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "a", {"seed": 0}).close()
    (tmp_path / "a-2").mkdir()
    with pytest.raises(RunDirectoryError, match=rf"roll resume {tmp_path}/a`.*`name=a-3`"):
        RunDirectory.create(tmp_path / "a", {"seed": 1})
    assert read(RunDirectory.open(tmp_path / "a").config_path).tree == {"seed": 0}


def test_run_directory_a_directory_with_something_else_in_it_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunDirectoryError, match=r"not a run of ROLL\. Nothing was changed"):
        RunDirectory.create(tmp_path, {})
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_run_directory_an_empty_directory_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    RunDirectory.create(tmp_path / "a", {"seed": 1}).close()
    assert read(RunDirectory.open(tmp_path / "a").config_path).tree == {"seed": 1}


def test_run_directory_a_creation_that_was_interrupted_anywhere_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(path: Path, text: str) -> None:
        atomic.make_temporary_path(path).write_text(text[:3])
        raise Killed

    monkeypatch.setattr(atomic, "write_text", die)
    with pytest.raises(Killed):
        RunDirectory.create(tmp_path / "a", {"seed": 0})
    monkeypatch.undo()
    with pytest.raises(RunDirectoryError, match=r"it has no config\.yaml"):
        RunDirectory.open(tmp_path / "a")
    RunDirectory.create(tmp_path / "a", {"seed": 0}).close()


RECORDED = ["loss.png", "metrics.jsonl", "recording/steps", "rollouts/step-000001.parquet", "tensorboard/events"]


@pytest.mark.parametrize("moved", range(len(RECORDED) + 1))
def test_run_directory_what_is_set_aside_stays_together_also_where_that_was_killed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    class Killed(BaseException):
        pass

    def record() -> None:
        for name in RECORDED:
            (tmp_path / "a" / name).parent.mkdir(exist_ok=True)
            (tmp_path / "a" / name).write_text("first")

    rename, left = Path.rename, [moved]

    def rename_some(path: Path, target: Path) -> Path:
        if left[0] == 0:
            raise Killed
        left[0] -= 1
        return rename(path, target)

    RunDirectory.create(tmp_path / "a", {}).close()
    record()
    with RunDirectory.open(tmp_path / "a", lock=True) as run, monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename_some)
        try:
            run.move_earlier_files()
        except Killed:
            assert moved < len(RECORDED)
    with RunDirectory.open(tmp_path / "a", lock=True) as run:
        aside = run.move_earlier_files()
        assert aside == (run.path / "before-restart-1" if moved < len(RECORDED) else None)
        assert [name for name in RECORDED if (run.path / name).exists()] == []
        assert all((run.path / "before-restart-1" / name).read_text() == "first" for name in RECORDED)
        record()
        assert run.move_earlier_files() == run.path / "before-restart-2"
        assert all((run.path / "before-restart-2" / name).exists() for name in RECORDED)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("file/a", "is a file, not a directory"),
        ("file", "is a file: choose another `name`"),
        ("x" * 300, "name is too long"),
        ("/proc/roll/a", "cannot write '/proc/roll"),
        ("/sys/roll", "cannot write '/sys/roll"),
    ],
)
def test_run_directory_a_place_that_cannot_be_written_is_named_with_a_remedy(
    place: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match=message):
        RunDirectory.create(tmp_path / place, {})


def test_run_directory_a_full_disk_is_called_a_full_disk() -> None:
    from roll.tracking.run_directory import convert_write_errors

    with (
        pytest.raises(RunDirectoryError, match=r"'/dev/full': the disk is full.*output_dir"),
        convert_write_errors(Path("/dev/full")),
        open("/dev/full", "wb", buffering=0) as full,
    ):
        full.write(b"x")


def test_run_directory_a_missing_run_is_answered_with_the_nearest_one(tmp_path: Path) -> None:
    for name in ("quickstart", "gsm8k"):
        RunDirectory.create(tmp_path / name, {}).close()
    with pytest.raises(RunDirectoryError, match=r"Did you mean 'quickstart'\?.*: gsm8k, quickstart"):
        RunDirectory.open(tmp_path / "quikstart")
    with pytest.raises(RunDirectoryError, match="There are no runs in"):
        RunDirectory.open(tmp_path / "nowhere" / "quickstart")


def test_run_directory_a_directory_of_runs_is_answered_with_the_runs_in_it(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "runs" / "mine", {}).close()
    with pytest.raises(RunDirectoryError, match=r"no config\.yaml\. Runs in '.*/runs': mine\.$"):
        RunDirectory.open(tmp_path / "runs")


def test_run_directory_a_second_writer_is_refused_with_the_process_id_of_the_first(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "a", {}):
        with pytest.raises(RunDirectoryError, match=f"process {os.getpid()} on "):
            RunDirectory.open(tmp_path / "a", lock=True)
        RunDirectory.open(tmp_path / "a")  # reading is allowed
    RunDirectory.open(tmp_path / "a", lock=True).close()


def test_run_directory_a_killed_writer_frees_the_run_even_if_its_forked_child_lives_on(tmp_path: Path) -> None:
    script = """
import os, sys, signal
from roll.tracking import RunDirectory
run = RunDirectory.create(sys.argv[1], {})
if os.fork() == 0:
    os.write(1, b"%d\\n" % os.getpid())
    signal.pause()
os.write(1, b"locked\\n")
signal.pause()
"""
    path = tmp_path / "a"
    process = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = {process.stdout.readline().strip(), process.stdout.readline().strip()}
    child = int(next(line for line in lines if line != "locked"))
    try:
        with pytest.raises(RunDirectoryError, match=f"process {process.pid} on "):
            RunDirectory.open(path, lock=True)
        process.kill()
        process.wait()
        os.kill(child, 0)  # still there
        RunDirectory.open(path, lock=True).close()
    finally:
        process.kill()
        os.kill(child, 9)
        process.stdout.close()
        process.wait()


def test_run_directory_where_nothing_can_be_locked_the_run_goes_on_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    RunDirectory.create(tmp_path / "a", {}).close()
    assert "cannot be locked on this file system" in caplog.text and "do not run a second process on it" in caplog.text


def test_run_directory_opening_for_writing_removes_what_a_crash_left(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "a", {}).close()
    leftover = atomic.make_temporary_path(tmp_path / "a" / "rollouts" / "step-000001.parquet")
    leftover.touch()
    RunDirectory.open(tmp_path / "a")
    assert leftover.exists()
    RunDirectory.open(tmp_path / "a", lock=True).close()
    assert not leftover.exists()
