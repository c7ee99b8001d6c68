"""Reading below one directory alone, and following files that grow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from roll.errors import RunDirectoryError
from roll.tracking.reading.files import SafeDirectory, Tail


def lines(tail: Tail) -> bytes:
    return b"".join(content for _, content in tail.read_chunks())


def test_tracking_reader_a_half_line_is_read_once_it_is_whole(tmp_path: Path) -> None:
    path, tail = tmp_path / "f", Tail(SafeDirectory(tmp_path), "f")
    assert lines(tail) == b""
    path.write_bytes(b"one\ntw")
    assert lines(tail) == b"one\n"
    assert lines(tail) == b"" and not tail.has_changed()
    path.write_bytes(b"one\ntwo\n")
    assert tail.has_changed()
    assert list(tail.read_chunks()) == [(False, b"two\n")]


@pytest.mark.parametrize("after", [b"one\n", b"ONE\ntwo\nthree\n", b""])
def test_tracking_reader_a_file_that_was_cut_or_rewritten_is_read_from_its_start(tmp_path: Path, after: bytes) -> None:
    path, tail = tmp_path / "f", Tail(SafeDirectory(tmp_path), "f")
    path.write_bytes(b"one\ntwo\n")
    assert lines(tail) == b"one\ntwo\n"
    path.write_bytes(after)
    found = list(tail.read_chunks())
    assert found[0] == (True, b"")
    assert b"".join(content for _, content in found) == after


def test_tracking_reader_a_file_that_was_replaced_or_removed_begins_anew(tmp_path: Path) -> None:
    path, tail = tmp_path / "f", Tail(SafeDirectory(tmp_path), "f")
    path.write_bytes(b"one\n")
    assert lines(tail) == b"one\n"
    (tmp_path / "g").write_bytes(b"one\ntwo\n")
    os.replace(tmp_path / "g", path)
    assert list(tail.read_chunks()) == [(True, b""), (False, b"one\ntwo\n")]
    path.unlink()
    assert list(tail.read_chunks()) == [(True, b"")]
    assert list(tail.read_chunks()) == []


def test_tracking_reader_a_line_without_end_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "f").open("wb") as file:
        file.truncate(17 * 2**20)
    with pytest.raises(RunDirectoryError, match="16 MiB"):
        lines(Tail(SafeDirectory(tmp_path), "f"))


def test_tracking_reader_a_line_that_is_too_long_is_refused_again_without_being_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tail = tmp_path / "f", Tail(SafeDirectory(tmp_path), "f")
    path.write_bytes(b"one\n" + bytes(17 * 2**20))
    with pytest.raises(RunDirectoryError, match="16 MiB"):
        lines(tail)
    with monkeypatch.context() as patch:
        patch.setattr(SafeDirectory, "open", lambda *_: pytest.fail("it is read again"))
        with pytest.raises(RunDirectoryError, match="16 MiB"):
            lines(tail)
        assert tail.has_changed()
    path.write_bytes(b"one\ntwo\n")
    assert lines(tail) == b"two\n"
    assert lines(tail) == b""


def test_tracking_reader_a_file_that_is_rewritten_longer_while_it_is_read_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll.tracking.reading.files._CHUNK_BYTES", 8)
    path, tail = tmp_path / "f", Tail(SafeDirectory(tmp_path), "f")
    path.write_bytes(b"old-001\nold-002\nold-003\n")
    reading = tail.read_chunks()
    assert next(reading) == (False, b"old-001\n")
    path.write_bytes(b"new-001\nnew-002\nnew-003\nnew-004\n")
    assert list(reading) == []
    found = list(tail.read_chunks())
    assert found[0] == (True, b"")
    assert b"".join(content for _, content in found) == path.read_bytes()


def test_tracking_reader_nothing_is_read_through_a_link_a_pipe_or_a_name_that_leads_out(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "secret").write_text("secret")
    root = tmp_path / "run"
    (root / "own").mkdir(parents=True)
    (root / "file").symlink_to(tmp_path / "secret")
    (root / "directory").symlink_to(tmp_path / "out")
    os.mkfifo(root / "pipe")
    inside = SafeDirectory(root)
    refused = [
        ("file",), ("directory", "secret"), ("pipe",), ("..", "secret"), ("own", "..", "..", "secret"), ("own",),
        (str(tmp_path / "secret"),), ("",), ("own/../../secret",), ("a\0b",), ("missing",),
    ]  # fmt: skip
    for parts in refused:
        with pytest.raises(RunDirectoryError):
            inside.open(*parts)
    assert [inside.get_stamp(*parts) for parts in refused if parts != ("own",)] == [None] * (len(refused) - 1)
    assert set(inside.list_stamps()) == {"own"}
    assert inside.list_stamps("directory") == {} == inside.list_stamps("..")


def test_tracking_reader_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    assert SafeDirectory(tmp_path).read("f", limit=5) == b"12345"
    with pytest.raises(RunDirectoryError, match="larger"):
        SafeDirectory(tmp_path).read("f", limit=4)
