"""A key-value store in the trainer for the rendezvous of a broadcast, protected by a secret.

A process that can write to the store can join the group that receives the weights. The store therefore listens on a
single address, and serves only clients that prove knowledge of the secret, which is part of the weight update that the
controller sends. PyTorch's TCPStore listens on every address and serves every client.

    server ─ nonce ─► client ─ nonce, HMAC(secret, "client", both) ─► server ─ HMAC(secret, "server", both) ─► client
    then repeatedly:       client ─ request ─► server ─ answer ─► client        (lists of bytes, see `_pack`)

Invariants: a connection's data is parsed as requests only after authentication. An unauthenticated connection is closed
after `_AUTHENTICATION_TIMEOUT_S`, and at most `_MAX_UNAUTHENTICATED` of them are open at a time: a new one replaces the
oldest, so unauthenticated clients cannot block others. The store recovers if the system temporarily has too many open
files or threads.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

__all__ = ["AuthenticatedStore", "StoreServer"]

_NONCE_BYTES = 32
_AUTHENTICATION_TIMEOUT_S = 10.0
_MAX_UNAUTHENTICATED = 64
_MAX_REQUEST_BYTES = 2**26
_RETRY_S = 0.1
"""Pause before accepting connections again after an error."""


class StoreServer:
    """The server of a key-value store. Until `close`, threads of this process handle requests of `AuthenticatedStore`
    clients.

    Args:
        host: The only address on which the server listens.
    """

    def __init__(self, host: str) -> None:
        self.secret = secrets.token_hex(_NONCE_BYTES)
        self._values: dict[bytes, bytes] = {}
        self._changed = threading.Condition()
        self._unauthenticated: dict[socket.socket, None] = {}
        """Connections that are not authenticated yet, oldest first."""
        self._authentication_lock = threading.Lock()
        self._closed = threading.Event()
        self._connections: set[socket.socket] = set()
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._requests: dict[bytes, Callable[..., list[bytes]]] = {
            b"set": self._set,
            b"append": self._append,
            b"add": self._add,
            b"compare_set": self._compare_set,
            b"delete": self._delete,
            b"get": self._get,
            b"num_keys": lambda: [b"%d" % len(self._values)],
        }
        threading.Thread(target=self._listen, daemon=True, name="roll-meeting").start()

    def close(self) -> None:
        """Stop listening and close all connections; waiting clients get an error."""
        self._closed.set()
        for connection in (self._listener, *list(self._connections)):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
                self._accept(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True, name="roll-meeting").start()
            except (OSError, RuntimeError):  # too many open files, or threads
                self._closed.wait(_RETRY_S)

    def _accept(self, connection: socket.socket) -> None:
        with self._authentication_lock:
            if len(self._unauthenticated) >= _MAX_UNAUTHENTICATED:
                oldest = next(iter(self._unauthenticated))
                del self._unauthenticated[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._unauthenticated[connection] = None

    def _serve(self, connection: socket.socket) -> None:
        self._connections.add(connection)
        try:
            with connection, contextlib.suppress(OSError, ValueError):
                try:
                    known = self._authenticate(connection)
                finally:
                    with self._authentication_lock:
                        self._unauthenticated.pop(connection, None)
                while known:
                    request, *arguments = _receive(connection)
                    with self._changed:
                        answer = self._requests[request](*arguments)
                        self._changed.notify_all()
                    connection.sendall(_pack(answer))
        finally:
            self._connections.discard(connection)

    def _authenticate(self, connection: socket.socket) -> bool:
        deadline = time.monotonic() + _AUTHENTICATION_TIMEOUT_S
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ours = secrets.token_bytes(_NONCE_BYTES)
        connection.settimeout(_AUTHENTICATION_TIMEOUT_S)
        connection.sendall(ours)
        theirs = _receive_exactly(connection, 2 * _NONCE_BYTES, deadline)
        nonces = ours + theirs[:_NONCE_BYTES]
        # Compared in constant time, so that the duration reveals nothing about the expected proof.
        if not hmac.compare_digest(theirs[_NONCE_BYTES:], _compute_proof(self.secret, b"client", nonces)):
            return False
        connection.sendall(_compute_proof(self.secret, b"server", nonces))
        connection.settimeout(None)
        return True

    def _set(self, key: bytes, value: bytes) -> list[bytes]:
        self._values[key] = value
        return []

    def _append(self, key: bytes, value: bytes) -> list[bytes]:
        return self._set(key, self._values.get(key, b"") + value)

    def _add(self, key: bytes, amount: bytes) -> list[bytes]:
        self._values[key] = b"%d" % (int(self._values.get(key, b"0")) + int(amount))
        return [self._values[key]]

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> list[bytes]:
        current = self._values.get(key)
        # As in TCPStore: a missing key is treated as empty.
        if current == expected or (current is None and not expected):
            current = self._values[key] = desired
        return [expected if current is None else current]

    def _delete(self, key: bytes) -> list[bytes]:
        return [b"1"] if self._values.pop(key, None) is not None else []

    def _get(self, wait_ms: bytes, *keys: bytes) -> list[bytes]:
        """Wait until all keys are set. Return an empty status field followed by the values, or an empty list after a
        timeout.
        """
        there = self._changed.wait_for(lambda: all(key in self._values for key in keys), int(wait_ms) / 1000)
        return [b"", *(self._values[key] for key in keys)] if there else []


class AuthenticatedStore(dist.Store):
    """A `torch.distributed.Store` that is a client of a `StoreServer`, with one connection and one request at a time.

    Args:
        host: The address of the trainer.
        port: The port of the `StoreServer`.
        secret: The secret of the `StoreServer`.
        timeout: The timeout for connecting, and for waiting for a value.

    Raises:
        DistError: the server does not respond, or does not prove knowledge of the secret.
    """

    def __init__(self, host: str, port: int, secret: str, *, timeout: timedelta) -> None:
        super().__init__()
        self._address = host, port, secret
        self._timeout = timeout
        # Requests and answers alternate on the connection; PyTorch calls a store from several threads.
        self._lock = threading.Lock()
        try:
            self._connection = socket.create_connection((host, port), timeout=timeout.total_seconds())
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nonces = _receive_exactly(self._connection, _NONCE_BYTES) + (ours := secrets.token_bytes(_NONCE_BYTES))
            self._connection.sendall(ours + _compute_proof(secret, b"client", nonces))
            proof = _receive_exactly(self._connection, _NONCE_BYTES)
            self._connection.settimeout(None)
        except OSError as error:
            raise dist.DistNetworkError(
                f"the store at {host}:{port} does not respond: {str(error) or type(error).__name__}"
            ) from error
        if not hmac.compare_digest(proof, _compute_proof(secret, b"server", nonces)):
            raise dist.DistNetworkError(f"the process at {host}:{port} does not know the secret of this sync")

    def _request(self, request: bytes, *arguments: str | bytes) -> list[bytes]:
        fields = [request, *(each.encode() if isinstance(each, str) else bytes(each) for each in arguments)]
        try:
            with self._lock:
                self._connection.sendall(_pack(fields))
                return _receive(self._connection)
        except (OSError, ValueError) as error:
            raise dist.DistNetworkError(
                f"the connection to the store was lost: {str(error) or type(error).__name__}"
            ) from error

    def _request_values(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        answer = self._request(b"get", b"%d" % (timeout.total_seconds() * 1000), *keys)
        if not answer:
            raise dist.DistStoreError(f"no process wrote {', '.join(keys)} within {timeout.total_seconds():g} s")
        return answer[1:]

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        self._request(b"set", key, value)

    def get(self, key: str) -> bytes:
        """Wait until a key is set, and return its value."""
        return self._request_values([key], self._timeout)[0]

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set, without waiting."""
        return bool(self._request(b"get", b"0", *keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        self._request_values(keys, timeout or self._timeout)

    def add(self, key: str, value: int) -> int:
        """Add to the number at a key and return the sum."""
        return int(self._request(b"add", key, b"%d" % value)[0])

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set the value if the current value is the expected one; return the resulting value."""
        return self._request(b"compare_set", key, expected_value, desired_value)[0]

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key."""
        self._request(b"append", key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait until all keys are set, and return their values."""
        return self._request_values(keys, self._timeout)

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Set the values of several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Return True, because `append`, `multi_get` and `multi_set` are supported."""
        return True

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was set."""
        return bool(self._request(b"delete", key))

    def num_keys(self) -> int:
        """Return the number of keys."""
        return int(self._request(b"num_keys")[0])

    deleteKey, getNumKeys = delete_key, num_keys  # the names that PyTorch's C++ code calls

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout for waiting for a value."""
        self._timeout = timeout

    def clone(self) -> AuthenticatedStore:
        """Return a new client with a separate connection."""
        return AuthenticatedStore(*self._address, timeout=self._timeout)


def _compute_proof(secret: str, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(bytes.fromhex(secret), side + nonces, "sha256")


def _pack(fields: Sequence[bytes]) -> bytes:
    """Serialize fields: the total length, then each field with its length."""
    body = b"".join(struct.pack("<I", len(field)) + field for field in fields)
    return struct.pack("<I", len(body)) + body


def _receive(connection: socket.socket) -> list[bytes]:
    (size,) = struct.unpack("<I", _receive_exactly(connection, 4))
    if size > _MAX_REQUEST_BYTES:
        raise ValueError(f"a message of the store must not exceed {_MAX_REQUEST_BYTES} bytes, got {size}")
    body, fields, place = _receive_exactly(connection, size), [], 0
    while place < size:
        (length,) = struct.unpack_from("<I", body, place)
        fields.append(body[place + 4 : place + 4 + length])
        place += 4 + length
    return fields


def _receive_exactly(connection: socket.socket, size: int, deadline: float | None = None) -> bytes:
    data = b""
    while len(data) < size:
        if deadline is not None:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionResetError("the peer closed the connection")
        data += more
    return data
