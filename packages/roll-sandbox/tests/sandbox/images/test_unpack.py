"""What a layer's archive can do to the machine that unpacks it: nothing."""

from __future__ import annotations

import gzip
import io
import os
import stat
import sys
import tarfile
from pathlib import Path

import pytest
from sandbox.images.oci import Entry, archive, digest_of, entry, file, hardlink, symlink

from roll_sandbox import BadImageError
from roll_sandbox.images.merge import merge
from roll_sandbox.images.unpack import UnpackBudget, decompress, unpack


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("mine")
    path = tmp_path / "layer"
    path.mkdir()
    return path


def put(layer: Path, *entries: Entry, bounds: UnpackBudget | None = None) -> str:
    data = archive(entries)
    return unpack(iter([data]), str(layer), bounds or UnpackBudget(2**24))


def tree(path: Path) -> list[str]:
    return sorted(str(each.relative_to(path)) for each in path.rglob("*"))


def test_sandbox_image_unpack_a_layer_is_unpacked_as_it_is(layer: Path) -> None:
    entries = [
        entry("etc", mode=0o750),
        file("etc/motd", b"hello", 0o640),
        file("./deep/down/file", b"x", 0o4755),
        symlink("link", "../../outside/secret"),
        hardlink("same", "etc/motd"),
        entry("shared", mode=0o1777),
    ]
    digest = put(layer, *entries)
    assert digest == digest_of(archive(entries))
    assert (layer / "etc/motd").read_bytes() == b"hello"
    modes = {name: stat.S_IMODE(os.lstat(layer / name).st_mode) for name in ("etc", "etc/motd", "shared", "deep")}
    assert modes == {"etc": 0o750, "etc/motd": 0o640, "shared": 0o1777, "deep": 0o755}
    assert stat.S_IMODE((layer / "deep/down/file").stat().st_mode) == 0o755, "no set-user-id"
    assert os.readlink(layer / "link") == "../../outside/secret", "a link may say anything: it leads nowhere"
    assert (layer / "same").stat().st_ino == (layer / "etc/motd").stat().st_ino


def test_sandbox_image_unpack_the_owner_may_always_read_a_file_and_use_a_directory(layer: Path) -> None:
    put(layer, entry("closed", mode=0), file("closed/secret", b"x", 0))
    assert stat.S_IMODE((layer / "closed").stat().st_mode) == 0o700
    assert stat.S_IMODE((layer / "closed/secret").stat().st_mode) == 0o400


@pytest.mark.parametrize(
    "entries",
    [
        [file("../outside/new", b"x")],
        [file("a/../../outside/new", b"x")],
        [hardlink("a", "../outside/secret")],
        [file(".wh...")],
        [file("a/.wh..")],
        [file(".wh.")],
        [hardlink("a", "missing")],
        [entry("d"), hardlink("a", "d")],
        [file("f"), file("f/below", b"x")],
        [symlink("x", "y"), symlink("y", "x"), file("x/below", b"x")],
    ],
    ids=lambda entries: " ".join(info.name for info, _ in entries),
)
def test_sandbox_image_unpack_entries_that_lead_out_or_nowhere_are_refused(layer: Path, entries: list[Entry]) -> None:
    before = tree(layer.parent / "outside")
    with pytest.raises(BadImageError):
        put(layer, *entries)
    assert tree(layer.parent / "outside") == before


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([hardlink("a", "no/such/file")], "the hard link 'a' to 'no/such/file', which does not exist in the layer"),
        ([hardlink("a", "missing")], "the hard link 'a' to 'missing', which does not exist in the layer"),
        ([file(".wh.f"), hardlink("a", "f")], "the hard link 'a' to 'f', which the layer removes"),
        ([file("n" * 300)], "which cannot be created (File name too long)"),
        ([symlink("s", "")], "the entry 's', which cannot be created"),
        ([file("d/" * 300 + "f")], "nested more than 256 levels deep"),
        (
            [file("d/" * 200 + "f"), symlink("s", "d/" * 200), file("s/" + "e/" * 200 + "f")],
            "nested more than 256 levels deep",
        ),
    ],
)
def test_sandbox_image_unpack_entries_that_no_machine_can_make_are_the_images_fault(
    layer: Path, entries: list[Entry], words: str
) -> None:
    """The message of a full disk would send whoever reads it looking for room."""
    with pytest.raises(BadImageError) as caught:
        put(layer, *entries)
    assert words in str(caught.value)


@pytest.mark.parametrize("target", ["../outside", "../../../../outside", "/outside", "a/../../outside"])
def test_sandbox_image_unpack_a_link_among_the_parents_stays_in_the_layer(layer: Path, target: str) -> None:
    put(layer, entry("a"), symlink("way", target), file("way/new", b"x"), hardlink("way/again", "way/new"))
    assert tree(layer.parent / "outside") == ["secret"]
    assert (layer / "outside/new").read_bytes() == b"x"
    assert (layer / "outside/again").stat().st_nlink == 2


def test_sandbox_image_unpack_an_absolute_link_to_this_machine_is_followed_in_the_layer_alone(layer: Path) -> None:
    outside = str(layer.parent / "outside")
    put(layer, symlink("way", outside), file("way/secret", b"theirs"), file("/etc/passwd", b"x"))
    assert (layer.parent / "outside/secret").read_text() == "mine"
    assert (layer / outside.lstrip("/") / "secret").read_bytes() == b"theirs"
    assert (layer / "etc/passwd").read_bytes() == b"x"


def test_sandbox_image_unpack_a_hard_link_does_not_reach_through_a_symbolic_one(layer: Path) -> None:
    put(layer, symlink("way", str(layer.parent / "outside/secret")), hardlink("got", "way"))
    assert os.path.islink(layer / "got"), "it is the link that has a second name, not what it would lead to"
    put(layer, hardlink("got", "way"), file("got", b"theirs"))
    assert (layer.parent / "outside/secret").read_text() == "mine"


def test_sandbox_image_unpack_an_entry_replaces_an_earlier_one_without_following_it(layer: Path) -> None:
    put(layer, symlink("a", str(layer.parent / "outside/secret")), file("a", b"new"))
    put(layer, symlink("b", str(layer.parent / "outside")), entry("b"), file("b/x", b"y"))
    put(layer, entry("c"), file("c/x", b"1"), file("c", b"2"))
    assert (layer / "a").read_bytes() == b"new"
    assert tree(layer) == ["a", "b", "b/x", "c"]
    assert tree(layer.parent / "outside") == ["secret"]
    assert (layer.parent / "outside/secret").read_text() == "mine"


def test_sandbox_image_unpack_devices_and_pipes_are_left_out(layer: Path) -> None:
    kinds = (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, b"9")
    put(layer, *(entry(f"dev{number}", kind) for number, kind in enumerate(kinds[:3])), file("f"))
    assert tree(layer) == ["f"]


def test_sandbox_image_unpack_what_a_layer_removes_is_marked(layer: Path) -> None:
    put(layer, file("usr/.wh.gone"), entry("var"), file("var/.wh..wh..opq"), file("var/new"), file(".wh..wh.plnk"))
    assert tree(layer) == ["usr", "usr/gone", "var", "var/new"]
    found = os.lstat(layer / "usr/gone")
    assert stat.S_ISCHR(found.st_mode)
    assert found.st_rdev == 0
    assert os.getxattr(layer / "var", "user.overlay.opaque") == b"y"


def test_sandbox_image_unpack_what_was_in_a_directory_that_became_something_else_needs_no_removal(layer: Path) -> None:
    """As umoci 0.4.7 writes a directory that a file or a link has taken the place of."""
    put(layer, file("a", b"x"), file("a/.wh.f"), entry("real"), symlink("b", "real"), file("b/.wh.f"), file("b/new"))
    assert tree(layer) == ["a", "b", "real", "real/new"]


def test_sandbox_image_unpack_attributes_that_an_overlay_would_obey_are_not_taken_over(layer: Path) -> None:
    info, data = file("f", b"x")
    info.pax_headers = {"SCHILY.xattr.user.overlay.redirect": "/etc", "SCHILY.xattr.security.capability": "x"}
    put(layer, (info, data))
    assert os.listxattr(layer / "f") == []


def test_sandbox_image_unpack_layers_put_together_are_what_an_overlay_would_show(tmp_path: Path) -> None:
    layers = [tmp_path / name for name in ("low", "high", "all")]
    for each in layers:
        each.mkdir()
    put(layers[0], file("a/one", b"1"), file("a/two", b"2"), file("b/old", b"3"), symlink("c", "a"), file("d/x"))
    put(layers[1], file("a/.wh.one"), file("b/.wh..wh..opq"), file("b/new", b"4"), file("c/in", b"5"), file(".wh.d"))
    merge(map(str, layers[:2]), str(layers[2]))
    assert tree(layers[2]) == ["a", "a/two", "b", "b/new", "c", "c/in"]
    assert tree(layers[0] / "a") == ["one", "two"], "layers are not touched"


def test_sandbox_image_unpack_modes_are_those_of_the_highest_layer_that_has_the_directory(tmp_path: Path) -> None:
    layers = [tmp_path / name for name in ("low", "high", "all")]
    for each in layers:
        each.mkdir()
    put(layers[0], entry("a", mode=0o755), entry("tmp", mode=0o1777))
    put(layers[1], entry("a", mode=0o700))
    merge(map(str, layers[:2]), str(layers[2]))
    assert [stat.S_IMODE((layers[2] / name).stat().st_mode) for name in ("a", "tmp")] == [0o700, 0o1777]


def test_sandbox_image_unpack_zeros_at_the_end_belong_to_a_file(layer: Path) -> None:
    data = {"zeros": bytes(5), "end": b"x" * 2**20 + bytes(3), "empty": b""}
    put(layer, *(file(name, each) for name, each in data.items()))
    assert {name: (layer / name).read_bytes() for name in data} == data


def test_sandbox_image_unpack_more_bytes_than_may_be_are_refused_whatever_they_are_packed_as(layer: Path) -> None:
    bomb = gzip.compress(archive([file("zeros", bytes(2**25))]))
    assert len(bomb) < 2**16
    with pytest.raises(BadImageError, match="more bytes"):
        unpack(decompress(io.BytesIO(bomb)), str(layer), UnpackBudget(2**20))


def test_sandbox_image_unpack_holes_count_as_what_they_stand_for(layer: Path) -> None:
    info, _ = file("hole")
    info.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "hole",
        "GNU.sparse.realsize": str(2**40),
    }
    info.size = 512
    with pytest.raises(BadImageError, match="more bytes"):
        put(layer, (info, b"1\n0\n0\n".ljust(512, b"\0")), bounds=UnpackBudget(2**30))
    assert sum(each.lstat().st_size for each in layer.rglob("*")) == 0


def test_sandbox_image_unpack_more_files_than_may_be_are_refused(layer: Path) -> None:
    with pytest.raises(BadImageError, match="more files"):
        put(layer, *(entry(f"d{number}") for number in range(101)), bounds=UnpackBudget(2**24, entries_left=100))


def test_sandbox_image_unpack_a_header_that_would_fill_the_memory_is_refused(layer: Path) -> None:
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 2**33
    with pytest.raises(BadImageError, match="header"):
        unpack(iter([info.tobuf(tarfile.GNU_FORMAT)]), str(layer), UnpackBudget(2**34))


@pytest.mark.parametrize("cut", [1, 100, 600, 1000])
def test_sandbox_image_unpack_an_archive_that_is_cut_off_is_refused(layer: Path, cut: int) -> None:
    data = archive([file("f", bytes(range(256)) * 3)])[:cut]
    with pytest.raises(BadImageError):
        unpack(iter([data]), str(layer), UnpackBudget(2**24))


def test_sandbox_image_unpack_a_packed_layer_that_is_cut_off_or_changed_is_refused(layer: Path) -> None:
    packed = gzip.compress(archive([file("f", os.urandom(2**12))]))
    for broken in (packed[:-9], packed[: len(packed) // 2], packed[:100] + b"\0\0\0\0" + packed[104:]):
        with pytest.raises(BadImageError):
            unpack(decompress(io.BytesIO(broken)), str(layer), UnpackBudget(2**24))


def test_sandbox_image_unpack_gzip_of_several_members_is_one_archive(layer: Path) -> None:
    data = archive([file("f", b"x" * 5000)])
    packed = gzip.compress(data[:1000]) + gzip.compress(data[1000:])
    assert unpack(decompress(io.BytesIO(packed)), str(layer), UnpackBudget(2**24)) == digest_of(data)
    assert (layer / "f").read_bytes() == b"x" * 5000


def test_sandbox_image_unpack_noise_is_no_layer(layer: Path) -> None:
    for noise in (b"", b"\0" * 100, b"hello" * 500, os.urandom(4096)):
        with pytest.raises(BadImageError):
            unpack(decompress(io.BytesIO(noise)), str(layer), UnpackBudget(2**24))


def test_sandbox_image_unpack_layers_packed_with_zstd_need_its_package(
    layer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(BadImageError, match="pip install zstandard"):
        unpack(decompress(io.BytesIO(b"\x28\xb5\x2f\xfd rest")), str(layer), UnpackBudget(2**24))


def test_sandbox_image_unpack_layers_packed_with_zstd_are_unpacked(layer: Path) -> None:
    zstandard = pytest.importorskip("zstandard", reason="an image's zstd layers need it")
    data = archive([file("f", b"x" * 5000)])
    packed = zstandard.compress(data[:1000]) + zstandard.compress(data[1000:])
    assert unpack(decompress(io.BytesIO(packed)), str(layer), UnpackBudget(2**24)) == digest_of(data)
    with pytest.raises(BadImageError):
        unpack(decompress(io.BytesIO(packed[:-5])), str(layer), UnpackBudget(2**24))
    with pytest.raises(BadImageError, match="more bytes"):
        bomb = zstandard.compress(archive([file("f", bytes(2**24))]))
        unpack(decompress(io.BytesIO(bomb)), str(layer), UnpackBudget(2**20))
