"""A key-value store in the trainer through which the processes of a broadcast meet, protected by a secret.

A process that can write to such a store can join the group that receives the weights. So the store listens on only one
address and serves only clients that prove that they know the secret (which is sent with the offer, through the
controller). PyTorch's TCPStore listens on every address and serves every client.

    server ─ nonce ─► client ─ nonce, HMAC(secret, "client", both) ─► server ─ HMAC(secret, "server", both) ─► client
    then, again and again: client ─ request ─► server ─ answer ─► client        (lists of bytes, see `_pack`)

Invariants: no data of a connection is read as a request before its proof. A connection that does not prove itself in
`_AUTHENTICATION_TIMEOUT_S` is closed, and at most `_MAX_UNAUTHENTICATED` such connections are open at once. A new one
replaces the oldest, so unauthenticated clients cannot block others. After a temporary failure of the system (open
files, threads), the store works again.
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
"""Pause after a connection could not be accepted."""


class StoreServer:
    """Holds the values; threads of this process serve them until `close`.

    Args:
        host: The only address to listen on.
    """

    def __init__(self, host: str) -> None:
        self.secret = secrets.token_hex(_NONCE_BYTES)
        self._values: dict[bytes, bytes] = {}
        self._changed = threading.Condition()
        self._unauthenticated: dict[socket.socket, None] = {}
        """Connections without a proof so far, oldest first."""
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
        """Stop listening; waiting clients see their connection end."""
        self._closed.set()
        for line in (self._listener, *list(self._connections)):
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                line, _ = self._listener.accept()
                self._accept(line)
                threading.Thread(target=self._serve, args=(line,), daemon=True, name="roll-meeting").start()
            except (OSError, RuntimeError):  # too many open files, or threads
                self._closed.wait(_RETRY_S)

    def _accept(self, line: socket.socket) -> None:
        with self._authentication_lock:
            if len(self._unauthenticated) >= _MAX_UNAUTHENTICATED:
                oldest = next(iter(self._unauthenticated))
                del self._unauthenticated[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._unauthenticated[line] = None

    def _serve(self, line: socket.socket) -> None:
        self._connections.add(line)
        try:
            with line, contextlib.suppress(OSError, ValueError):
                try:
                    known = self._authenticate(line)
                finally:
                    with self._authentication_lock:
                        self._unauthenticated.pop(line, None)
                while known:
                    request, *arguments = _receive(line)
                    with self._changed:
                        answer = self._requests[request](*arguments)
                        self._changed.notify_all()
                    line.sendall(_pack(answer))
        finally:
            self._connections.discard(line)

    def _authenticate(self, line: socket.socket) -> bool:
        deadline = time.monotonic() + _AUTHENTICATION_TIMEOUT_S
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ours = secrets.token_bytes(_NONCE_BYTES)
        line.settimeout(_AUTHENTICATION_TIMEOUT_S)
        line.sendall(ours)
        theirs = _receive_exactly(line, 2 * _NONCE_BYTES, deadline)
        nonces = ours + theirs[:_NONCE_BYTES]
        if not hmac.compare_digest(theirs[_NONCE_BYTES:], _proof(self.secret, b"client", nonces)):
            return False
        line.sendall(_proof(self.secret, b"server", nonces))
        line.settimeout(None)
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
        found = self._values.get(key)
        if found == expected or (found is None and not expected):
            found = self._values[key] = desired
        return [expected if found is None else found]

    def _delete(self, key: bytes) -> list[bytes]:
        return [b"1"] if self._values.pop(key, None) is not None else []

    def _get(self, wait_ms: bytes, *keys: bytes) -> list[bytes]:
        """Return all values once all keys are set; return an empty list on timeout."""
        there = self._changed.wait_for(lambda: all(key in self._values for key in keys), int(wait_ms) / 1000)
        return [b"", *(self._values[key] for key in keys)] if there else []


class AuthenticatedStore(dist.Store):
    """A client with one connection, and one request at a time.

    Args:
        host: The address of the trainer.
        port: The port of its `StoreServer`.
        secret: The secret of its `StoreServer`.
        timeout: The timeout of connecting, and of waiting for a value.

    Raises:
        DistError: the server does not answer, or does not know the secret.
    """

    def __init__(self, host: str, port: int, secret: str, *, timeout: timedelta) -> None:
        super().__init__()
        self._address = host, port, secret
        self._timeout = timeout
        self._lock = threading.Lock()
        try:
            self._connection = socket.create_connection((host, port), timeout=timeout.total_seconds())
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nonces = _receive_exactly(self._connection, _NONCE_BYTES) + (ours := secrets.token_bytes(_NONCE_BYTES))
            self._connection.sendall(ours + _proof(secret, b"client", nonces))
            proof = _receive_exactly(self._connection, _NONCE_BYTES)
            self._connection.settimeout(None)
        except OSError as error:
            raise dist.DistNetworkError(f"the store at {host}:{port} does not answer: {error}") from error
        if not hmac.compare_digest(proof, _proof(secret, b"server", nonces)):
            raise dist.DistNetworkError(f"the process at {host}:{port} does not have the secret of this sync")

    def _request(self, request: bytes, *arguments: str | bytes) -> list[bytes]:
        fields = [request, *(each.encode() if isinstance(each, str) else bytes(each) for each in arguments)]
        try:
            with self._lock:
                self._connection.sendall(_pack(fields))
                return _receive(self._connection)
        except (OSError, ValueError) as error:
            raise dist.DistNetworkError(f"the connection to the store was lost: {error}") from error

    def _values(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        found = self._request(b"get", b"%d" % (timeout.total_seconds() * 1000), *keys)
        if not found:
            raise dist.DistStoreError(f"no process wrote {', '.join(keys)} within {timeout.total_seconds():g} s")
        return found[1:]

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._request(b"set", key, value)

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        return self._values([key], self._timeout)[0]

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set."""
        return bool(self._request(b"get", b"0", *keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        self._values(keys, timeout or self._timeout)

    def add(self, key: str, value: int) -> int:
        """Add to a number and return the sum."""
        return int(self._request(b"add", key, b"%d" % value)[0])

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Write if the value is the expected one; return the resulting value."""
        return self._request(b"compare_set", key, expected_value, desired_value)[0]

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value."""
        self._request(b"append", key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for several values."""
        return self._values(keys, self._timeout)

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Write several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Return true: `append`, `multi_get` and `multi_set` are supported."""
        return True

    def delete_key(self, key: str) -> bool:
        """Remove a value; return whether there was one."""
        return bool(self._request(b"delete", key))

    def num_keys(self) -> int:
        """Return the number of values."""
        return int(self._request(b"num_keys")[0])

    deleteKey, getNumKeys = delete_key, num_keys  # the names that PyTorch's C++ code calls

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of waits for a value."""
        self._timeout = timeout

    def clone(self) -> AuthenticatedStore:
        """Return a client with a connection of its own."""
        return AuthenticatedStore(*self._address, timeout=self._timeout)


def _proof(secret: str, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(bytes.fromhex(secret), side + nonces, "sha256")


def _pack(fields: Sequence[bytes]) -> bytes:
    """Serialize fields: the total length, then each field with its length."""
    body = b"".join(struct.pack("<I", len(field)) + field for field in fields)
    return struct.pack("<I", len(body)) + body


def _receive(line: socket.socket) -> list[bytes]:
    (size,) = struct.unpack("<I", _receive_exactly(line, 4))
    if size > _MAX_REQUEST_BYTES:
        raise ValueError(f"a message must have at most {_MAX_REQUEST_BYTES} bytes, got {size}")
    body, fields, place = _receive_exactly(line, size), [], 0
    while place < size:
        (length,) = struct.unpack_from("<I", body, place)
        fields.append(body[place + 4 : place + 4 + length])
        place += 4 + length
    return fields


def _receive_exactly(line: socket.socket, size: int, deadline: float | None = None) -> bytes:
    data = b""
    while len(data) < size:
        if deadline is not None:
            line.settimeout(max(0.001, deadline - time.monotonic()))
        more = line.recv(size - len(data))
        if not more:
            raise ConnectionResetError("the other end closed the connection")
        data += more
    return data
