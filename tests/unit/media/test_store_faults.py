"""Faults of the file system below a media store: full disks, truncated files, and copies that are interrupted."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from roll.errors import DataError, InfraError
from roll.media import MediaStore, copy_store
from roll.tracking import RunDirectory, atomic


def draw(value: int) -> Image.Image:
    """Return an image of one color."""
    return Image.new("RGB", (16, 12), (value, 2, 3))


def list_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("num_bytes", [0, 20])
def test_media_store_a_truncated_file_is_replaced_when_its_medium_is_added_again(
    tmp_path: Path, num_bytes: int
) -> None:
    """A resumed run reads its rows again, so the engines and ranks get whole files."""
    digest = MediaStore(tmp_path).add_image(draw(1))
    (path,) = list_files(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:num_bytes])
    with pytest.raises(DataError, match=rf"image {digest[:12]}"):
        MediaStore(tmp_path).get(digest)
    MediaStore(tmp_path).add_image(draw(1))
    assert path.read_bytes() == whole
    assert MediaStore(tmp_path).get(digest) == draw(1)


def test_media_store_a_replaced_file_is_never_returned(tmp_path: Path) -> None:
    store = MediaStore(tmp_path)
    one, two = store.add_image(draw(1)), store.add_image(draw(2))
    shutil.copyfile(store._get_path(two), store._get_path(one))
    with pytest.raises(DataError, match="so the file was modified: restore it, or delete it and resume the run"):
        MediaStore(tmp_path).get(one)
    store._get_path(one).unlink()
    MediaStore(tmp_path).add_image(draw(1))
    assert MediaStore(tmp_path).get(one) == draw(1)


def test_media_store_a_full_disk_is_an_infrastructure_error_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_bytes

    def fill(path: Path, data: bytes) -> int:
        write(path, data[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = MediaStore(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", fill)
        with pytest.raises(InfraError, match=r"cannot be written to the media store '.*': No space left on device"):
            store.add_image(draw(1))
    assert list_files(tmp_path) == []
    digest = store.add_image(draw(1))
    assert MediaStore(tmp_path).get(digest) == draw(1)


def test_media_store_a_read_that_fails_for_a_moment_is_an_infrastructure_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    digest = MediaStore(tmp_path).add_image(draw(1))
    store = MediaStore(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        with pytest.raises(InfraError, match=r"cannot be read from the media store '.*': Stale file handle"):
            store.get(digest)
    assert store.get(digest) == draw(1)


def test_media_store_an_interrupted_copy_leaves_no_part_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    def fill(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    source, target = tmp_path / "source", tmp_path / "target"
    digest = MediaStore(source).add_image(draw(1))
    monkeypatch.setattr(os, "link", fail)  # another file system
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", fill)
        with pytest.raises(InfraError, match=r"cannot be copied to the media store '.*': No space left on device"):
            copy_store(source, target)
    assert list_files(target) == []
    target.joinpath(digest[:2], digest).write_bytes(b"part")  # of a process that was killed
    copy_store(source, target)
    assert MediaStore(target).get(digest) == draw(1)
    assert list_files(target) == [target / digest[:2] / digest]


def test_media_store_files_of_interrupted_writes_are_removed_when_the_run_resumes(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, {"name": "run"})
    digest = MediaStore(run.media_dir).add_image(draw(1))
    (whole,) = list_files(run.media_dir)
    old, new = (atomic.make_temporary_path(whole) for _ in range(2))  # the new one may be another run's
    for path in (old, new):
        path.write_bytes(b"part")
    os.utime(old, (1, 1))
    run.close()
    with RunDirectory.open(run.path, lock=True):
        assert list_files(run.media_dir) == sorted([whole, new])
    copy_store(run.media_dir, tmp_path / "copy")
    assert [path.name for path in list_files(tmp_path / "copy")] == [digest]
