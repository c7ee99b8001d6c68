"""The transport `store`: what engines receive, what stays in the store, and what happens when files are corrupted."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from weight_helpers import TENSORS, DictSource, Peer, same_bytes

from roll.errors import ConfigError, WeightSyncError
from roll.types import WeightStore, WeightUpdate
from roll.weights import Sender, compute_checksum, open_update
from roll.weights.store import files, lineage, local_copy
from roll.weights.store.files import DirectoryBackend, check_store
from roll.weights.store.handle import VersionManifest
from roll.weights.store.receiver import WeightPrefetcher

pytestmark = pytest.mark.integration

Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def fast_retries(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "BACKOFF_S", 0.0)
    monkeypatch.setattr(lineage, "BUCKET_BYTES", 4000)


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    (tmp_path / "local").mkdir()
    return WeightStore(url=str(tmp_path / "store"), session="run-1", local_dir=str(tmp_path / "local"))


@pytest.fixture
def sender() -> Iterator[Sender]:
    sender = Sender()
    yield sender
    sender.close()


@pytest.fixture
def engine() -> Iterator[WeightPrefetcher]:
    prefetcher = WeightPrefetcher()
    yield prefetcher
    prefetcher.close()


def build_tensors() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {
        f"layer {index}": torch.randn(40, 30, generator=generator, dtype=torch.float32).to(dtype)
        for index, dtype in enumerate([torch.bfloat16, torch.float32, torch.bfloat16, torch.float16])
    }


def change_tensors(tensors: Tensors, count: int, seed: int) -> None:
    """Move `count` elements of every tensor by one unit in the last place."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        bits = tensor.view(-1).view({2: torch.int16, 4: torch.int32}[tensor.itemsize])
        bits[torch.randperm(bits.numel(), generator=generator)[:count]] += 1


def stage(sender: Sender, tensors: Mapping[str, torch.Tensor], version: int, store: WeightStore) -> WeightUpdate:
    update = sender.stage(DictSource(tensors), version, "store", store)
    assert update is not None
    assert sender.send() == {name: compute_checksum(tensor) for name, tensor in tensors.items()}
    return update


def receive(engine: WeightPrefetcher, update: WeightUpdate, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fetch and receive an update, and compare every tensor."""
    engine.fetch(update, 5.0)
    with open_update(update) as receiver:
        received = [(name, tensor.clone()) for name, tensor in receiver]
    assert [name for name, _ in received] == list(tensors)
    assert all(same_bytes(tensor, tensors[name]) for name, tensor in received)


def list_versions(store: WeightStore) -> list[str]:
    return sorted(path.name for path in Path(store.url, store.session, "policy").iterdir())


def read_manifest(store: WeightStore, version: str) -> VersionManifest:
    return VersionManifest.from_json(Path(store.url, store.session, "policy", version, "manifest.json").read_bytes())


def test_store_transport_every_kind_of_tensor_arrives(sender: Sender, engine: WeightPrefetcher, store: WeightStore):
    receive(engine, stage(sender, TENSORS, 1, store), TENSORS)


def test_store_transport_writes_deltas_until_the_next_full_copy(
    sender: Sender, engine: WeightPrefetcher, store: WeightStore
):
    store, tensors, sizes = replace(store, full_copy_every=3), build_tensors(), []
    for version in range(6):
        change_tensors(tensors, 12, version)
        update = stage(sender, tensors, version, store)
        receive(engine, update, tensors)
        sender.release()
        sizes.append(update.handle.num_written_bytes)
        metrics = update.handle.compute_metrics()
        assert metrics["sync/deltas_since_full"] == version % 3
        assert metrics.get("sync/delta_density") == (None if version == 0 else pytest.approx(12 / 1200))
    assert max(sizes[1], sizes[2], sizes[4]) < sizes[0] / 3 < sizes[3]


def test_store_transport_keeps_the_newest_full_copy_and_its_deltas(
    sender: Sender, engine: WeightPrefetcher, store: WeightStore
):
    store, tensors, versions = replace(store, full_copy_every=3), build_tensors(), []
    for version in range(6):
        change_tensors(tensors, 12, version)
        receive(engine, stage(sender, tensors, version, store), tensors)
        sender.release()
        versions.append([int(name) for name in list_versions(store)])
    # An obsolete version is deleted by the sync after the one that made it obsolete, when all engines have confirmed.
    assert versions == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [3, 4], [3, 4, 5]]
    assert [read_manifest(store, name).base for name in list_versions(store)] == [None, 3, 4]
    sender.close()
    assert not Path(store.url, store.session).exists()


def test_store_transport_writes_a_full_copy_if_deltas_are_not_smaller(sender: Sender, store: WeightStore):
    for version in range(3):
        tensors = {"w": torch.randn(2000, generator=torch.Generator().manual_seed(version))}
        update = stage(sender, tensors, version, store)
        assert len(update.handle.chain) == 1
    assert update.handle.compute_metrics()["sync/delta_density"] > 0.99


@pytest.mark.parametrize("change", ["name", "shape", "dtype"])
def test_store_transport_writes_a_full_copy_if_the_tensors_are_others(
    change: str, sender: Sender, engine: WeightPrefetcher, store: WeightStore
):
    tensors = build_tensors()
    receive(engine, stage(sender, tensors, 0, store), tensors)
    last = tensors.pop("layer 3")
    others = {"name": ("layer 4", last), "shape": ("layer 3", last.T), "dtype": ("layer 3", last.view(torch.bfloat16))}
    name, tensor = others[change]
    tensors[name] = tensor
    update = stage(sender, tensors, 1, store)
    assert len(update.handle.chain) == 1
    receive(engine, update, tensors)


def test_store_transport_new_engine_fetches_the_full_copy_and_all_deltas(
    sender: Sender, store: WeightStore, tmp_path: Path
):
    tensors = build_tensors()
    for version in range(4):
        change_tensors(tensors, 12, version)
        update = stage(sender, tensors, version, store)
    prefetcher = WeightPrefetcher()
    receive(prefetcher, update, tensors)
    prefetcher.close()
    assert list(Path(store.local_dir or "").glob("*/*")) == [], "the last engine of a host deletes the local copy"


def test_store_transport_sync_of_unchanged_weights_to_a_new_engine_writes_nothing(
    sender: Sender, engine: WeightPrefetcher, store: WeightStore
):
    tensors = build_tensors()
    stage(sender, tensors, 7, store)
    update = stage(sender, tensors, 7, store)
    assert (list_versions(store), update.handle.num_written_bytes) == (["00000000"], 0)
    receive(engine, update, tensors)


def test_store_transport_after_a_failed_sync_a_full_copy_is_written(
    sender: Sender, engine: WeightPrefetcher, store: WeightStore
):
    tensors = build_tensors()
    stage(sender, tensors, 0, store)
    sender.release(failed=True)
    change_tensors(tensors, 12, 1)
    update = stage(sender, tensors, 1, store)
    assert len(update.handle.chain) == 1
    receive(engine, update, tensors)


def test_store_transport_keeps_adapters_apart(sender: Sender, engine: WeightPrefetcher, store: WeightStore):
    adapters: dict[str | None, Tensors] = {name: build_tensors() for name in (None, "judge", "../x")}
    for version in range(3):
        for seed, (name, tensors) in enumerate(adapters.items()):
            change_tensors(tensors, 12, 10 * version + seed)
            update = stage(sender, tensors, version, replace(store, adapter=name))
            assert len(update.handle.chain) == version + 1
            receive(engine, update, tensors)
    assert sorted(path.name for path in Path(store.url, store.session).iterdir()) == [
        "adapter=..%2Fx",
        "adapter=judge",
        "policy",
    ]


def test_store_transport_two_runs_share_a_store(store: WeightStore, engine: WeightPrefetcher):
    senders = [Sender(), Sender()]
    both = [replace(store, session="run-a"), replace(store, session="run-b")]
    weights = [build_tensors(), build_tensors()]
    for version in range(3):
        for index in range(2):
            change_tensors(weights[index], 12, 10 * version + index)
            receive(engine, stage(senders[index], weights[index], version, both[index]), weights[index])
    senders[0].close()
    assert [path.name for path in Path(store.url).iterdir()] == ["run-b"]
    senders[1].close()


def test_store_transport_resumed_run_deletes_the_files_of_its_killed_session(
    sender: Sender, engine: WeightPrefetcher, store: WeightStore
):
    killed = Sender()
    stage(killed, build_tensors(), 0, store)
    tensors = build_tensors()
    update = stage(sender, tensors, 1, replace(store, session="run-2", previous_session="run-1"))
    receive(engine, update, tensors)
    assert [path.name for path in Path(store.url).iterdir()] == ["run-2"]


# ---- faults


def find_bucket(store: WeightStore, number: int = 0) -> Path:
    return Path(store.url, store.session, "policy", list_versions(store)[-1], f"bucket-{number:05d}")


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (Path.unlink, "FileNotFoundError"),
    "truncated": (lambda path: os.truncate(path, 100), "the file has 100 bytes, expected"),
    "corrupted": (flip_byte, "the file is corrupted: its checksum is"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["bucket-00001", "manifest.json"])
def test_store_transport_bad_file_is_named_and_never_reaches_the_engine(
    damage: str, name: str, sender: Sender, engine: WeightPrefetcher, store: WeightStore
):
    update = stage(sender, build_tensors(), 0, store)
    path = find_bucket(store).with_name(name)
    inflict, message = DAMAGES[damage]
    inflict(path)
    with pytest.raises(WeightSyncError, match=f"weight store '{store.url}': 'run-1/policy/00000000/{name}'.*{message}"):
        engine.fetch(update, 5.0)
    with pytest.raises(WeightSyncError, match=name), open_update(update):
        pytest.fail("the engine received tensors")


def test_store_transport_read_that_fails_twice_is_repeated(
    sender: Sender, engine: WeightPrefetcher, store: WeightStore, monkeypatch: pytest.MonkeyPatch
):
    tensors = build_tensors()
    update = stage(sender, tensors, 0, store)
    failures = iter([ConnectionError("reset"), ConnectionError("reset")])
    read = DirectoryBackend.read

    def fail_first(self: DirectoryBackend, path: str) -> bytes:
        for error in failures:
            raise error
        return read(self, path)

    monkeypatch.setattr(DirectoryBackend, "read", fail_first)
    receive(engine, update, tensors)


def test_store_transport_hung_store_ends_with_an_error(
    sender: Sender, store: WeightStore, monkeypatch: pytest.MonkeyPatch
):
    import threading

    never = threading.Event()
    monkeypatch.setattr(files, "ATTEMPT_TIMEOUT_S", 0.02)
    monkeypatch.setattr(files, "NUM_ATTEMPTS", 2)
    monkeypatch.setattr(files, "MIN_BYTES_PER_S", 1e9)
    monkeypatch.setattr(DirectoryBackend, "write", lambda self, path, data: never.wait(10))
    with pytest.raises(WeightSyncError, match="cannot be written after 2 attempts: TimeoutError: the store did not"):
        stage(sender, build_tensors(), 0, store)
    never.set()


def test_store_transport_full_store_is_reported_at_once_and_later_syncs_work(
    sender: Sender, engine: WeightPrefetcher, store: WeightStore, monkeypatch: pytest.MonkeyPatch
):
    tensors, calls = build_tensors(), []

    def fail(self: DirectoryBackend, path: str, data: bytes) -> None:
        calls.append(path)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(DirectoryBackend, "write", fail)
        with pytest.raises(WeightSyncError, match=r"bucket-00000' cannot be written: OSError: .*No space left"):
            stage(sender, tensors, 0, store)
    assert len(calls) == len(set(calls)), "a full disk is not tried again"
    receive(engine, stage(sender, tensors, 1, store), tensors)


def test_store_transport_full_disk_of_an_engine_is_reported(
    sender: Sender, engine: WeightPrefetcher, store: WeightStore, monkeypatch: pytest.MonkeyPatch
):
    update = stage(sender, build_tensors(), 0, store)

    def fail(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(local_copy.os, "posix_fallocate", fail)
    with pytest.raises(WeightSyncError, match=r"local copy .* No space left.*set weight_sync\.local_copy_dir"):
        engine.fetch(update, 5.0)


def test_store_transport_corrupted_local_copy_is_fetched_again(
    sender: Sender, engine: WeightPrefetcher, store: WeightStore
):
    tensors = build_tensors()
    receive(engine, stage(sender, tensors, 0, store), tensors)
    (held,) = Path(store.local_dir or "").glob("*/*/*.weights")
    flip_byte(held)
    change_tensors(tensors, 12, 1)
    receive(engine, stage(sender, tensors, 1, store), tensors)


@pytest.mark.parametrize("content", [b"", b"short", None])
def test_store_transport_local_copy_of_another_size_is_fetched_again(
    sender: Sender, engine: WeightPrefetcher, store: WeightStore, content: bytes | None
):
    tensors = build_tensors()
    update = stage(sender, tensors, 0, store)
    receive(engine, update, tensors)
    (held,) = Path(store.local_dir or "").glob("*/*/*.weights")
    longer = held.read_bytes() + b"more"
    held.write_bytes(longer if content is None else content)
    receive(engine, update, tensors)
    held.write_bytes(longer if content is None else content)
    change_tensors(tensors, 12, 1)
    receive(engine, stage(sender, tensors, 1, store), tensors)


def test_store_transport_version_without_manifest_is_ignored_and_deleted(
    sender: Sender, engine: WeightPrefetcher, store: WeightStore, monkeypatch: pytest.MonkeyPatch
):
    tensors = build_tensors()
    receive(engine, stage(sender, tensors, 0, store), tensors)
    write = DirectoryBackend.write

    def fail_manifest(self: DirectoryBackend, path: str, data: bytes) -> None:
        if path.endswith("manifest.json"):
            raise PermissionError(errno.EACCES, "denied")
        write(self, path, data)

    with monkeypatch.context() as patch:
        patch.setattr(DirectoryBackend, "write", fail_manifest)
        with pytest.raises(WeightSyncError, match=r"00000001/manifest\.json' cannot be written"):
            stage(sender, tensors, 1, store)
    update = stage(sender, tensors, 2, store)
    assert len(update.handle.chain) == 1
    receive(engine, update, tensors)
    assert "00000001" not in list_versions(store)


def test_store_transport_leftovers_of_killed_processes_are_replaced(
    sender: Sender, engine: WeightPrefetcher, store: WeightStore
):
    tensors = build_tensors()
    update = stage(sender, tensors, 0, store)
    path = local_copy.find_local_file(update.handle)
    unused = path.parent.with_name("of a killed process")
    for directory in (path.parent, unused):
        directory.mkdir(parents=True)
        (directory / "building").write_bytes(b"half")
        (directory / "users.lock").touch()
    receive(engine, update, tensors)
    assert not unused.exists()


def test_store_transport_engine_killed_while_it_fetches_does_not_block_the_next(
    sender: Sender, engine: WeightPrefetcher, store: WeightStore, lone_peer: Peer
):
    tensors = build_tensors()
    update = stage(sender, tensors, 0, store)
    bucket = find_bucket(store)
    content = bucket.read_bytes()
    bucket.unlink()
    os.mkfifo(bucket)
    lone_peer.tell("receive", update, {"timeout_s": 20.0}, None)
    with bucket.open("wb"):  # returns when the peer reads the bucket, while it holds the lock of the local copy
        lone_peer.kill()
    bucket.unlink()
    bucket.write_bytes(content)
    receive(engine, update, tensors)


@pytest.mark.parametrize("seed", range(20))
def test_store_transport_survives_random_faults(seed: int, store: WeightStore, monkeypatch: pytest.MonkeyPatch):
    """Run ten schedules of syncs, crashes, failed reads and corrupted files: an engine never gets other weights."""
    chance = random.Random(seed)
    monkeypatch.setattr(files, "NUM_ATTEMPTS", 2)
    original = {name: getattr(DirectoryBackend, name) for name in ("read", "write", "delete")}
    rate = 0.0

    def disturb(name: str) -> Callable[..., Any]:
        def call(self: DirectoryBackend, path: str, *data: bytes) -> Any:
            if chance.random() < rate:
                raise ConnectionError("the connection was reset")
            result = original[name](self, path, *data)
            if name == "read" and chance.random() < rate:
                return result[: len(result) // 2]
            return result

        return call

    for name in original:
        monkeypatch.setattr(DirectoryBackend, name, disturb(name))
    for schedule in range(10):
        current = replace(store, session=f"run-{schedule}", full_copy_every=chance.choice([1, 2, 5]))
        sender, engines, tensors = Sender(), [WeightPrefetcher(), WeightPrefetcher()], build_tensors()
        rate = chance.choice([0.0, 0.1, 0.3])
        for version in range(6):
            change_tensors(tensors, chance.choice([0, 1, 30, 1200]), 100 * seed + version)
            index = chance.randrange(2)
            if chance.random() < 0.2:  # an engine is killed
                engines[index].close()
                engines[index] = WeightPrefetcher()
            failed = True
            try:
                update = stage(sender, tensors, version, current)
                receive(engines[index], update, tensors)
                failed = False
            except WeightSyncError as error:
                assert f"weight store '{store.url}'" in str(error)
            sender.release(failed=failed)
        rate = 0.0
        receive(engines[0], stage(sender, tensors, 9, current), tensors)
        sender.close()
        for prefetcher in engines:
            prefetcher.close()
    assert list(Path(store.url).iterdir()) == []


# ---- the check of a configuration


def test_store_check_accepts_a_new_directory_and_leaves_nothing(tmp_path: Path):
    check_store(str(tmp_path / "new"))
    check_store(f"file://{tmp_path}/other")
    assert list((tmp_path / "new").iterdir()) == list((tmp_path / "other").iterdir()) == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("xyz://host/path", "has the scheme 'xyz', which fsspec cannot open"),
        ("s3://bucket/path", "requires a package that is not installed .*s3fs"),
        ("/proc/weights", "cannot be written: .*Choose a directory or URL"),
    ],
)
def test_store_check_rejects_a_store_with_the_key_the_value_and_the_remedy(url: str, message: str):
    with pytest.raises(ConfigError, match=f"weight_sync.store '{url}' {message}"):
        check_store(url)


def test_store_check_names_fsspec_if_it_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(ConfigError, match="requires the package fsspec: install it with `pip install fsspec`"):
        check_store("memory://weights")


def test_store_transport_works_with_any_file_system_of_fsspec(
    sender: Sender, engine: WeightPrefetcher, store: WeightStore
):
    pytest.importorskip("fsspec")
    memory = replace(store, url="memory://weights")
    check_store(memory.url)
    tensors = build_tensors()
    for version in range(3):
        change_tensors(tensors, 12, version)
        receive(engine, stage(sender, tensors, version, memory), tensors)


def test_store_transport_manifest_is_json_with_checksums_and_versions(sender: Sender, store: WeightStore):
    tensors = build_tensors()
    for version in range(2):
        change_tensors(tensors, 12, version)
        stage(sender, tensors, 40 + version, store)
    path = find_bucket(store).with_name("manifest.json")
    manifest = json.loads(path.read_bytes())
    assert (manifest["policy_version"], manifest["serial"], manifest["base"]) == (41, 1, 0)
    assert {entry["name"]: entry["checksum"] for entry in manifest["tensors"]} == {
        name: compute_checksum(tensor) for name, tensor in tensors.items()
    }
