"""The trainer's store of a broadcast: one address, and nothing for those who do not know its secret."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist
from weight_helpers import TENSORS, DictSource, Peer, transfer

from roll.errors import WeightSyncError
from roll.weights import Sender, authenticated_store, open_update
from roll.weights.authenticated_store import AuthenticatedStore, StoreServer
from roll.weights.broadcast import BroadcastHandle

SECOND = timedelta(seconds=1)


@pytest.fixture
def server():
    server = StoreServer("127.0.0.1")
    yield server
    server.close()


def listening() -> set[str]:
    """Addresses that this process listens on."""
    found = psutil.Process().net_connections(kind="tcp")
    return {connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN}


def test_weight_sync_store_a_broadcast_listens_on_its_own_address_alone(peers: list[Peer]) -> None:
    before = listening()
    sender = Sender(bucket_bytes=200, timeout_s=20)
    transfer(sender, TENSORS, "broadcast", peers[:1])
    assert listening() - before <= {"127.0.0.1"}
    assert "127.0.0.1" in listening()
    sender.close()


def ask_as_a_stranger(port: int, words: bytes) -> bytes:
    """All that the store says to somebody who answers its nonce with these words."""
    with socket.create_connection(("127.0.0.1", port), timeout=15) as line:
        said = b""
        with contextlib.suppress(OSError):  # it may hang up at any moment
            line.sendall(words)
            line.shutdown(socket.SHUT_WR)
            while more := line.recv(4096):
                said += more
        return said


def test_weight_sync_store_a_stranger_on_the_port_gets_nothing_and_holds_up_nobody(peers: list[Peer]) -> None:
    sender = Sender(bucket_bytes=200, timeout_s=20)
    try:
        update = sender.stage(DictSource(TENSORS), 1, "broadcast")
        assert update is not None
        handle: BroadcastHandle = update.handle
        port = handle.port
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        said = [ask_as_a_stranger(port, words) for words in (b"", bytes(64), os.urandom(64), b"\x01" + bytes(999))]
        assert all(len(each) <= 32 for each in said), "a nonce, and nothing more"
        with pytest.raises(dist.DistNetworkError):
            AuthenticatedStore("127.0.0.1", port, "00" * 32, timeout=SECOND)
        with pytest.raises(RuntimeError):
            dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=0.3), wait_for_workers=False)
        sender.release(failed=True)
        checksums, answers = transfer(sender, TENSORS, "broadcast", peers)
        assert [found for _, found in answers] == [checksums, checksums]
        for line in silent:
            assert len(line.recv(4096)) == 32
            line.close()
    finally:
        sender.close()


def test_weight_sync_store_an_engine_with_the_wrong_secret_does_not_join() -> None:
    from dataclasses import replace

    sender = Sender(bucket_bytes=200, timeout_s=5)
    try:
        update = sender.stage(DictSource(TENSORS), 1, "broadcast")
        assert update is not None
        assert update.handle.secret not in repr(update.handle)
        forged = replace(update, handle=replace(update.handle, secret="11" * 32))
        with (
            pytest.raises(WeightSyncError, match="cannot reach the trainer"),
            open_update(forged, timeout_s=2) as receiver,
        ):
            list(receiver)
        sender.release(failed=True)
    finally:
        sender.close()


def test_weight_sync_store_a_client_does_not_talk_to_who_cannot_prove_the_secret() -> None:
    """Somebody in the trainer's place must not be told which group to trust."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def answer() -> None:
            line, _ = impostor.accept()
            with line:
                line.sendall(bytes(32))
                line.recv(64)
                line.sendall(bytes(32))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(dist.DistNetworkError, match="does not know the secret"):
            AuthenticatedStore("127.0.0.1", impostor.getsockname()[1], "22" * 32, timeout=SECOND)
        thread.join()


def test_weight_sync_store_more_silent_strangers_than_are_let_in_hold_up_nobody(server: StoreServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(authenticated_store._MAX_UNAUTHENTICATED + 3):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        store = AuthenticatedStore("127.0.0.1", server.port, server.secret, timeout=timedelta(seconds=5))
        store.set("a", "b")
        assert store.get("a") == b"b"


def test_weight_sync_store_it_listens_again_after_the_system_refused_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accept, refused = socket.socket.accept, []

    def sometimes(listener: socket.socket) -> object:
        if not refused:
            refused.append(True)
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", sometimes)
    server = StoreServer("127.0.0.1")
    try:
        store = AuthenticatedStore("127.0.0.1", server.port, server.secret, timeout=timedelta(seconds=5))
        store.set("a", "b")
        assert store.get("a") == b"b" and refused
    finally:
        server.close()


def test_weight_sync_store_it_does_what_a_store_of_pytorch_does(server: StoreServer) -> None:
    ours = AuthenticatedStore("127.0.0.1", server.port, server.secret, timeout=SECOND)
    for store in (dist.PrefixStore("a", ours), dist.PrefixStore("a", dist.HashStore())):
        store.set("text", "value")
        assert store.get("text") == b"value"
        assert (store.add("sum", 3), store.add("sum", -1), store.get("sum")) == (3, 2, b"2")
        assert (store.check(["text", "sum"]), store.check(["text", "none"])) == (True, False)
        assert store.compare_set("text", "other", "new") == b"value"
        assert store.compare_set("text", "value", "new") == b"new"
        store.wait(["text"], SECOND)
        assert store.multi_get(["text", "sum"]) == [b"new", b"2"]
        assert (store.delete_key("text"), store.delete_key("text")) == (True, False)
        with pytest.raises(RuntimeError):
            store.wait(["none"], timedelta(milliseconds=20))


def test_weight_sync_store_waiting_ends_with_the_trainer(server: StoreServer) -> None:
    store = AuthenticatedStore("127.0.0.1", server.port, server.secret, timeout=timedelta(seconds=60))
    threading.Timer(0.05, server.close).start()
    with pytest.raises(dist.DistError):
        store.get("never")
