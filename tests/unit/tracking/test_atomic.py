"""Whatever call of the operating system fails, the target is whole: old or new."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from roll.tracking import atomic

CALLS = ("open", "write", "fsync", "replace", "rename", "close")


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it but `finally`."""


class FailingOS:
    """`os`, whose n-th writing call does not happen."""

    def __init__(self, fail_at: int, error: BaseException) -> None:
        self.num_calls = 0
        self._fail_at = fail_at
        self._error = error

    def __getattr__(self, name: str) -> object:
        original = getattr(os, name)
        if name not in CALLS[:-1]:
            return original

        def call(*args: object, **kwargs: object) -> object:
            self.num_calls += 1
            if self.num_calls == self._fail_at:
                raise self._error
            return original(*args, **kwargs)

        return call


def count_calls(action: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> int:
    counting = FailingOS(-1, Killed())
    monkeypatch.setattr(atomic, "os", counting)
    action()
    monkeypatch.undo()
    return counting.num_calls


def test_tracking_atomic_write_a_failure_at_any_call_leaves_a_file_old_or_new_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    total = count_calls(lambda: atomic.write_text(path, "old"), monkeypatch)
    assert total >= 5  # open, write, fsync, replace, open the directory, fsync it
    outcomes = set()
    for fail_at in range(1, total + 1):
        atomic.write_text(path, "old")
        monkeypatch.setattr(atomic, "os", FailingOS(fail_at, OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            atomic.write_text(path, "new")
        monkeypatch.undo()
        outcomes.add(path.read_text())
        assert [p.name for p in tmp_path.iterdir()] == ["state.json"]
    assert outcomes == {"old", "new"}


def fill(directory: Path, text: str) -> Path:
    (directory / "model").mkdir(parents=True)
    (directory / "model" / "weights").write_text(text)
    (directory / "state.json").write_text(text)
    return directory


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("existing", [True, False])
def test_tracking_atomic_write_a_directory_is_replaced_whole(
    tmp_path: Path, existing: bool, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(atomic, "_exchange_names", lambda first, second: False)
    final = tmp_path / "step-000020"
    if existing:
        fill(final, "old")
        (final / "only-in-the-old-one").touch()
    temporary = fill(atomic.make_temporary_path(final), "new")
    atomic.replace_directory(temporary, final)
    assert sorted(p.name for p in final.iterdir()) == ["model", "state.json"]
    assert (final / "model" / "weights").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["step-000020"]


def test_tracking_atomic_write_a_death_at_any_call_leaves_a_directory_wholly_old_or_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "step-000020"
    fill(final, "old")
    total = count_calls(
        lambda: atomic.replace_directory(fill(atomic.make_temporary_path(final), "old"), final), monkeypatch
    )
    for fail_at in range(1, total + 1):
        temporary = fill(atomic.make_temporary_path(final), "new")
        monkeypatch.setattr(atomic, "os", FailingOS(fail_at, Killed()))
        with pytest.raises(Killed):
            atomic.replace_directory(temporary, final)
        monkeypatch.undo()
        content = {p.read_text() for p in final.rglob("*") if p.is_file()}
        assert content in ({"old"}, {"new"}), f"torn at call {fail_at}"
        atomic.remove_leftovers(tmp_path)
        assert [p.name for p in tmp_path.iterdir()] == ["step-000020"]


def test_tracking_atomic_write_json_refuses_what_json_cannot_hold(tmp_path: Path) -> None:
    atomic.write_json(tmp_path / "a.json", {"loss": 1.0})
    with pytest.raises(ValueError):
        atomic.write_json(tmp_path / "a.json", {"loss": float("nan")})
    assert (tmp_path / "a.json").read_text() == '{\n  "loss": 1.0\n}\n'


def test_tracking_atomic_write_only_leftovers_are_removed(tmp_path: Path) -> None:
    (tmp_path / "kept.tmp").touch()
    (tmp_path / ".hidden").touch()
    atomic.make_temporary_path(tmp_path / "x").touch()
    assert atomic.remove_leftovers(tmp_path) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == [".hidden", "kept.tmp"]
