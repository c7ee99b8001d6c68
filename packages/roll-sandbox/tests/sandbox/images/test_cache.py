"""The cache of images: whole or not there, within its budget, and nothing that is used is removed."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, Any

import pytest
from sandbox.images.oci import build, entry, file, symlink, write_layout, write_saved

from roll_sandbox import BadImageError, SandboxRequestError, SandboxUnavailableError, UnknownImageError
from roll_sandbox.images import ImageCache, parse_reference
from roll_sandbox.images.cache import get_default_budget_bytes
from roll_sandbox.images.sources import open_source

BASE = [entry("etc"), file("etc/passwd", b"root:x:0:0::/root:/bin/sh\napp:x:501:502::/app:/bin/sh\n")]
GROUPS = [file("etc/group", b"root:x:0:\nstaff:x:50:app\n")]


@pytest.fixture
def cache(tmp_path: Path) -> ImageCache:
    return ImageCache(tmp_path / "cache", budget_bytes=2**24)


def added(cache: ImageCache, path: Path, name: str = "world:1", tag: str | None = None) -> Any:
    with open_source(path, tag=tag) as source:
        return cache.add(name, source)


def layout(tmp_path: Path, *layers: Any, name: str = "layout", **config: Any) -> Path:
    return write_layout(tmp_path / name, build(layers or [BASE], **config))


def files_of(cache: ImageCache, image: Any) -> list[str]:
    return sorted(
        os.path.relpath(os.path.join(path, name), directory)
        for directory in cache.list_layer_directories(image)
        for path, _, names in os.walk(directory)
        for name in names
    )


def test_sandbox_image_cache_an_image_is_known_by_its_names_and_its_digest(cache: ImageCache, tmp_path: Path) -> None:
    image = added(cache, layout(tmp_path, BASE, [file("new", b"x")], Env=["A=b=c"], WorkingDir="/app"))
    assert cache.resolve("world:1") == cache.resolve(image.digest) == image
    assert (image.env, image.cwd, image.uid, image.gid) == ({"A": "b=c"}, "/app", 1000, 1000)
    assert len(image.layers) == 2
    assert ImageCache(cache.root).resolve("world:1") == image, "another process reads the same"
    with pytest.raises(UnknownImageError, match="roll-sandbox image pull"):
        cache.resolve("world:2")


@pytest.mark.parametrize("name", ["", "UPPER", "a b", "a/../b", "a:b:c", "x@sha256:12", "/abs", "a" * 300, "a:\0"])
def test_sandbox_image_cache_what_is_no_name_is_refused(cache: ImageCache, name: str) -> None:
    with pytest.raises(SandboxRequestError):
        cache.resolve(name)


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("python", "python:latest"),
        ("team/world:7", "team/world:7"),
        ("localhost/x", "localhost/x:latest"),
        ("127.0.0.1:5000/a/b:c", "127.0.0.1:5000/a/b:c"),
        ("r.example/x@sha256:" + "0" * 64, "r.example/x@sha256:" + "0" * 64),
        ("r.example/x:1@sha256:" + "0" * 64, "r.example/x@sha256:" + "0" * 64),
    ],
)
def test_sandbox_image_cache_names_are_read_as_docker_reads_them(name: str, whole: str) -> None:
    assert str(parse_reference(name)) == whole


@pytest.mark.parametrize(
    ("user", "ids"),
    [
        ("", (1000, 1000)),
        ("root:staff", (1000, 1000)),
        ("app", (501, 502)),
        ("501", (501, 502)),
        ("app:staff", (501, 50)),
        ("7:8", (7, 8)),
        ("7", (7, 0)),
    ],
)
def test_sandbox_image_cache_the_user_is_looked_up_in_the_image(
    cache: ImageCache, tmp_path: Path, user: str, ids: tuple[int, int]
) -> None:
    image = added(cache, layout(tmp_path, BASE, GROUPS, User=user))
    assert (image.uid, image.gid) == ids


def test_sandbox_image_cache_the_list_of_users_is_not_looked_for_outside_of_the_image(
    cache: ImageCache, tmp_path: Path
) -> None:
    with pytest.raises(BadImageError, match="is not in the image's"):
        added(cache, layout(tmp_path, [symlink("etc", "/etc")], User="daemon"))
    with pytest.raises(BadImageError, match="is not in the image's"):
        added(cache, layout(tmp_path, [symlink("etc/passwd", "/etc/passwd")], name="second", User="daemon"))


@pytest.mark.parametrize(
    "config",
    [{"Env": ["A=b\0c"]}, {"Env": ["A\nB=c"]}, {"Env": ["=x"]}, {"Env": "A=b"}, {"User": 7}, {"WorkingDir": "a\0"}],
    ids=str,
)
def test_sandbox_image_cache_a_configuration_that_no_program_can_be_given_is_refused(
    cache: ImageCache, tmp_path: Path, config: dict[str, Any]
) -> None:
    with pytest.raises(BadImageError):
        added(cache, layout(tmp_path, **config))
    assert cache.list() == []


def test_sandbox_image_cache_a_newline_in_a_value_is_a_value(cache: ImageCache, tmp_path: Path) -> None:
    assert added(cache, layout(tmp_path, Env=["A=b\nc"])).env == {"A": "b\nc"}


def test_sandbox_image_cache_all_ways_to_write_an_image_give_the_same_files(cache: ImageCache, tmp_path: Path) -> None:
    layers = [BASE, [file("new", b"x")]]
    nested = write_layout(tmp_path / "nested", build(layers), nested=True)
    saved = write_saved(tmp_path / "saved.tar", layers, "3")
    packed = tmp_path / "packed.tar.gz"
    _pack(nested, packed)
    plain = tmp_path / "root"
    (plain / "etc").mkdir(parents=True)
    (plain / "etc/passwd").write_bytes(BASE[1][1])
    (plain / "new").write_text("x")
    expected = files_of(cache, added(cache, layout(tmp_path, *layers)))
    assert expected == ["etc/passwd", "new"]
    for number, path in enumerate((nested, saved, packed, plain)):
        assert files_of(cache, added(cache, path, f"way:{number}")) == expected
    assert added(cache, saved, "tagged", tag="3").layers == cache.resolve("world:1").layers
    for path in (saved, nested):
        with pytest.raises(BadImageError, match=r"tag '4' was not found; available tags: (3|latest)"):
            added(cache, path, "none", tag="4")


def _pack(directory: Path, target: Path) -> None:
    with tarfile.open(target, "w:gz") as archive:
        archive.add(directory, ".")


def test_sandbox_image_cache_the_same_directory_is_the_same_image(cache: ImageCache, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
        os.utime(tmp_path / name / "file", (1, 1))
        os.utime(tmp_path / name, (1, 1))
    assert added(cache, tmp_path / "one").digest == added(cache, tmp_path / "two").digest


@pytest.mark.parametrize("which", ["config", "layer", "manifest", "missing"])
def test_sandbox_image_cache_content_that_is_not_what_its_name_says_is_refused(
    cache: ImageCache, tmp_path: Path, which: str
) -> None:
    built = build([BASE])
    path = write_layout(tmp_path / "layout", built)
    layer = next(each for each in built.blobs if each not in (built.config, built.manifest))
    blob = path / "blobs/sha256" / {"config": built.config, "manifest": built.manifest}.get(which, layer)[7:]
    if which == "missing":
        blob.unlink()
    else:
        blob.write_bytes(blob.read_bytes() + b" ")
    with pytest.raises(BadImageError, match="missing" if which == "missing" else "digest mismatch"):
        added(cache, path)
    assert cache.list() == []
    assert list((cache.root / "layers").glob("*")) == list((cache.root / "tmp").glob("*")) == []


def test_sandbox_image_cache_a_layer_must_be_the_one_that_the_configuration_means(
    cache: ImageCache, tmp_path: Path
) -> None:
    one, other = build([BASE], packed=False), build([GROUPS], packed=False)
    with open_source(write_layout(tmp_path / "one", one)) as source:
        source.open_layer = lambda number: contextlib.nullcontext(io.BytesIO(other.blobs[other.layers[0]]))
        with pytest.raises(BadImageError, match="digest mismatch"):
            cache.add("x", source)
    assert list((cache.root / "layers").iterdir()) == []


@pytest.mark.parametrize("said", [b"", b"[]", b"{}", b'{"manifests": 1}', b'{"manifests": [{}]}', b"[" * 100_000])
def test_sandbox_image_cache_a_layout_that_says_nonsense_is_refused(
    cache: ImageCache, tmp_path: Path, said: bytes
) -> None:
    path = layout(tmp_path)
    (path / "index.json").write_bytes(said)
    with pytest.raises(BadImageError):
        added(cache, path)


def test_sandbox_image_cache_a_saved_image_reads_no_file_of_this_machine(cache: ImageCache, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "layout").mkdir()
    (tmp_path / "layout" / "manifest.json").write_text(
        json.dumps([{"Config": "../secret", "RepoTags": [], "Layers": ["/etc/passwd"]}])
    )
    with pytest.raises(BadImageError, match="outside its directory"):
        added(cache, tmp_path / "layout")


def test_sandbox_image_cache_an_image_for_another_machine_is_refused(cache: ImageCache, tmp_path: Path) -> None:
    path = layout(tmp_path)
    index = json.loads((path / "index.json").read_text())
    index["manifests"][0]["platform"] = {"os": "linux", "architecture": "mips"}
    (path / "index.json").write_text(json.dumps(index))
    with pytest.raises(BadImageError, match="linux/mips"):
        added(cache, path)


def test_sandbox_image_cache_layers_are_shared_and_go_with_the_last_image(cache: ImageCache, tmp_path: Path) -> None:
    one = added(cache, layout(tmp_path, BASE, [file("a")], name="one"), "one")
    two = added(cache, layout(tmp_path, BASE, [file("b")], name="two"), "two")
    assert one.layers[0] == two.layers[0]
    assert len(list((cache.root / "layers").iterdir())) == 3
    cache.remove("one")
    assert files_of(cache, two) == ["b", "etc/passwd"]
    with pytest.raises(UnknownImageError):
        cache.resolve(one.digest)
    cache.remove("two")
    assert [list((cache.root / name).iterdir()) for name in ("layers", "images", "tmp")] == [[], [], []]


def test_sandbox_image_cache_a_name_that_comes_to_mean_another_image_leaves_the_old_one_to_its_digest(
    cache: ImageCache, tmp_path: Path
) -> None:
    old = added(cache, layout(tmp_path, BASE, name="one"))
    new = added(cache, layout(tmp_path, GROUPS, name="two"))
    assert cache.resolve("world:1") == new
    assert cache.resolve(old.digest) == old
    assert [each.names for each in cache.list() if each.image == old] == [()]


def test_sandbox_image_cache_what_was_used_least_lately_goes_when_the_budget_is_spent(tmp_path: Path) -> None:
    cache = ImageCache(tmp_path / "cache", budget_bytes=140_000)
    images = {}
    for number, name in enumerate(("first", "second", "third")):
        images[name] = added(cache, layout(tmp_path, [file("data", os.urandom(30_000))], name=name), name)
        os.utime(cache.root / "images" / f"{images[name].digest.replace(':', '-')}.json", (number, number))
    cache.lock_image(images["first"]).release()  # used now
    added(cache, layout(tmp_path, [file("data", os.urandom(30_000))], name="fourth"), "fourth")
    assert {name for each in cache.list() for name in each.names} == {
        f"{name}:latest" for name in ("first", "third", "fourth")
    }


def test_sandbox_image_cache_what_somebody_holds_stays(tmp_path: Path) -> None:
    cache = ImageCache(tmp_path / "cache", budget_bytes=50_000)
    held = added(cache, layout(tmp_path, [file("data", os.urandom(30_000))], name="held"), "held")
    hold = ImageCache(cache.root).lock_image(held)
    added(cache, layout(tmp_path, [file("data", os.urandom(30_000))], name="other"), "other")
    assert cache.resolve("held") == held
    assert {each.in_use for each in cache.list()} == {True, False}
    with pytest.raises(SandboxUnavailableError, match="stop them"):
        cache.remove("held")
    added(cache, tmp_path / "held", "held")
    with pytest.raises(SandboxUnavailableError, match="stop them"):
        cache.remove("held")
    hold.release()
    cache.remove("held")
    with pytest.raises(UnknownImageError):
        cache.lock_image(held)


def test_sandbox_image_cache_an_image_larger_than_the_budget_is_refused(tmp_path: Path) -> None:
    cache = ImageCache(tmp_path / "cache", budget_bytes=20_000)
    with pytest.raises(BadImageError, match="budget"):
        added(cache, layout(tmp_path, [file("data", bytes(2**20))]))
    assert list((cache.root / "layers").iterdir()) == []


def test_sandbox_image_cache_the_budget_can_be_set_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLL_SANDBOX_IMAGES_BYTES", "123")
    assert get_default_budget_bytes() == 123
    monkeypatch.setenv("ROLL_SANDBOX_IMAGES_BYTES", "1G")
    with pytest.raises(SandboxUnavailableError, match="1G"):
        get_default_budget_bytes()


def _add_and_die(root: Path, path: Path) -> None:
    class Dying:
        def __init__(self, source: Any) -> None:
            self.image, self.source = source.image, source

        @contextlib.contextmanager
        def open_layer(self, number: int) -> Iterator[IO[bytes]]:
            if number == 1:
                os._exit(9)
            with self.source.open_layer(number) as blob:
                yield blob

    with open_source(path) as source:
        ImageCache(root).add("world:1", Dying(source))


def test_sandbox_image_cache_who_is_killed_amid_an_import_leaves_no_half_image(
    cache: ImageCache, tmp_path: Path
) -> None:
    path = layout(tmp_path, BASE, GROUPS)
    child = multiprocessing.get_context("fork").Process(target=_add_and_die, args=(cache.root, path))
    child.start()
    child.join()
    assert child.exitcode == 9
    assert list((cache.root / "tmp").iterdir()) != []
    with pytest.raises(UnknownImageError):
        cache.resolve("world:1")
    added(cache, path)
    assert files_of(cache, cache.resolve("world:1")) == ["etc/group", "etc/passwd"]
    assert list((cache.root / "tmp").iterdir()) == []


def _add_many(root: Path, paths: list[Path], barrier: Any) -> None:
    barrier.wait()
    for number, path in enumerate(paths):
        added(ImageCache(root), path, f"world:{number}")


def test_sandbox_image_cache_imports_at_the_same_time_do_not_disturb_each_other(
    cache: ImageCache, tmp_path: Path
) -> None:
    paths = [layout(tmp_path, BASE, [file(f"f{number}")], name=f"l{number}") for number in range(4)]
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    children = [context.Process(target=_add_many, args=(cache.root, paths, barrier)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]
    for number in range(4):
        assert files_of(cache, cache.resolve(f"world:{number}")) == ["etc/passwd", f"f{number}"]


def test_sandbox_image_cache_a_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SandboxUnavailableError, match="ROLL_CACHE"):
        added(ImageCache(tmp_path / "file" / "cache"), layout(tmp_path))


def test_sandbox_image_cache_who_looks_at_an_image_does_not_keep_it_from_being_used(
    cache: ImageCache, tmp_path: Path
) -> None:
    image = added(cache, layout(tmp_path))
    with ThreadPoolExecutor(1) as thread:
        with cache._try_lock_image(cache._get_image_file(image.digest)) as free:
            assert free
            held = thread.submit(cache.lock_image, image)
            assert wait([held], 0.05).not_done, "it waits"
        held.result().release()
        with cache._try_lock_image(cache._get_image_file(image.digest)):
            held = thread.submit(cache.lock_image, image)
            assert wait([held], 0.05).not_done
            cache._get_image_file(image.digest).unlink()
        with pytest.raises(UnknownImageError, match="just removed"):
            held.result()
