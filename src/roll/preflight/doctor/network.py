"""Network between nodes: this node's name and interfaces, Ray's ports, and whether a peer can be reached.

node A   roll doctor --listen 29500        answers once per connection: its versions and clock, then bytes
node B   roll doctor --peer A:29500        compares versions and clocks, and takes the time of the bytes
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from roll.errors import ConfigError
from roll.preflight.doctor.finding import Finding, ok, problem, warning
from roll.preflight.doctor.software import versions

__all__ = ["answer_peers", "examine", "reach"]

CONNECT_S = 5.0
PAYLOAD_BYTES = 16 * 2**20
SLOW_BYTES_PER_S = 100e6
"""About a gigabit link, with which a weight sync of 7B parameters takes minutes."""
CLOCKS_APART_S = 5.0
RAY_PORT = 6379
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")


def examine() -> Iterator[Finding]:
    """Yield the findings of this section that need no peer."""
    yield _name()
    for variable in _INTERFACE_VARIABLES:
        if os.environ.get(variable):
            yield _interface(variable, os.environ[variable])
    yield _ray()
    yield _token()


def _name() -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return warning(
            "host name",
            f"'{name}' has no address",
            "add it to DNS or /etc/hosts, or tell Ray --node-ip-address.",
        )
    if not address.startswith("127."):
        return ok("host name", f"{name}, {address}")
    found = f"{name}, {address}: no other node reaches that"
    if int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) > 1:
        return warning("host name", found, "give Ray the address that others see: ray start --node-ip-address=…")
    return ok("host name", found)


def _interface(variable: str, value: str) -> Finding:
    import psutil

    known = sorted(psutil.net_if_addrs())
    asked = [name.removeprefix("=") for name in value.removeprefix("^").split(",")]
    if value.startswith("^") or any(there.startswith(name) for name in asked for there in known):
        return ok(variable, value)
    return problem(
        variable, f"'{value}' is no interface of this node", f"choose one of {', '.join(known)}, or unset it."
    )


def _ray() -> Finding:
    """Check whether the Ray cluster to which this environment points can be reached."""
    address = os.environ.get("RAY_ADDRESS", "")
    if not address and _CURRENT_CLUSTER.is_file():
        address = _CURRENT_CLUSTER.read_text().strip()
    if not address or address in ("auto", "local"):
        return ok("ray cluster", "none here: `cluster.type: ray` starts a private one, or joins `cluster.address`")
    plain = address.partition("://")[2] or address
    host, _, port = plain.partition(":")
    error = _refusal(host, int(port) if port.isdigit() else RAY_PORT)
    if error is None:
        return ok("ray cluster", f"{address} answers")
    stale = not os.environ.get("RAY_ADDRESS")
    return warning(
        "ray cluster",
        f"{address}: {error}",
        "`ray stop` forgets it, or start its head again." if stale else "start its head, or unset RAY_ADDRESS.",
    )


def _token() -> Finding:
    """Check whether clusters of this node require a token, which a variable or Ray's token file determines."""
    name, mode = "ray token", os.environ.get("RAY_AUTH_MODE", "").lower()
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "") or Path.home() / ".ray" / "auth_token")
    known = bool(os.environ.get("RAY_AUTH_TOKEN")) or file.is_file()
    if mode == "token" and not known:
        return problem(name, "RAY_AUTH_MODE=token, and no token", "set RAY_AUTH_TOKEN to that of the cluster.")
    if mode:
        return ok(name, f"RAY_AUTH_MODE={mode}")
    if known:
        advice = "other nodes and `roll` need RAY_AUTH_MODE=token and that token in RAY_AUTH_TOKEN."
        return ok(name, f"{file} is there: `ray start --head` asks for it", advice)
    return ok(name, "none: the process that reaches a cluster's ports can use it")


def _refusal(host: str, port: int) -> str | None:
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def reach(peer: str) -> Iterator[Finding]:
    """Connect to `HOST:PORT`, where `answer_peers` runs, and compare the two nodes.

    Raises:
        ConfigError: `peer` does not have that form.
    """
    host, _, port = peer.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ConfigError(f"peer '{peer}' is no HOST:PORT, such as node2:29500.")
    began = time.perf_counter()
    try:
        connection = socket.create_connection((host, int(port)), timeout=CONNECT_S)
    except ConnectionRefusedError:
        yield warning(
            peer,
            "the host answers, and nothing listens on this port",
            f"start a listener there: `roll doctor --listen {port}`.",
        )
        return
    except socket.gaierror as error:
        yield problem(peer, f"the name has no address ({error.strerror})", "add it to DNS or /etc/hosts.")
        return
    except OSError as error:
        yield problem(
            peer,
            f"no answer within {CONNECT_S:g} s ({error.strerror or error})",
            f"let TCP through to port {port}: firewall, security group, or a network policy (docs/operations).",
        )
        return
    milliseconds = 1000 * (time.perf_counter() - began)
    with closing(connection):
        yield ok(peer, f"connected in {milliseconds:.1f} ms")
        yield from _check_reply(peer, connection)


def _check_reply(peer: str, connection: socket.socket) -> Iterator[Finding]:
    connection.settimeout(CONNECT_S)
    with connection.makefile("rb") as stream:
        try:
            theirs: dict[str, Any] = json.loads(stream.readline(4096))
            theirs_versions, clock = dict(theirs["versions"]), float(theirs["time"])
        except (OSError, ValueError, KeyError, TypeError):
            yield ok(f"{peer} versions", "unknown: no `roll doctor --listen` there")
            return
        yield _compared(f"{peer} versions", theirs_versions)
        apart = abs(time.time() - clock)
        name = f"{peer} clock"
        if apart > CLOCKS_APART_S:
            yield warning(name, f"{apart:.0f} s apart", "logs and traces of nodes do not line up: run an NTP client.")
        else:
            yield ok(name, f"{apart:.1f} s apart")
        began, received = time.perf_counter(), 0
        try:
            while received < PAYLOAD_BYTES and (part := stream.read(2**20)):
                received += len(part)
        except OSError:
            pass
        rate = received / max(time.perf_counter() - began, 1e-9)
    found = f"{rate / 1e6:,.0f} MB/s over one connection ({received / 2**20:.0f} MiB)"
    if received < PAYLOAD_BYTES:
        yield problem(f"{peer} bandwidth", found, "the connection broke off: look for a proxy, or an MTU that differs.")
    elif rate < SLOW_BYTES_PER_S:
        yield warning(f"{peer} bandwidth", found, "weight syncs take long: choose a faster interface.")
    else:
        yield ok(f"{peer} bandwidth", found)


def _compared(name: str, theirs: dict[str, str]) -> Finding:
    differ = [
        f"{package} {theirs.get(package) or 'missing'} (here {here or 'missing'})"
        for package, here in versions().items()
        if theirs.get(package, "") != here
    ]
    if differ:
        return problem(name, ", ".join(differ), "install the same on every node, or use one container image.")
    return ok(name, "the same as here")


def answer_peers(port: int, *, seconds: float, most: int | None = None, say: Callable[[str], object] = print) -> int:
    """Listen on all interfaces for peers that `reach` this node, one after another.

    A peer receives versions, the clock, and meaningless bytes; nothing that it sends is read.

    Args:
        port: port to listen on; 0 chooses a free one.
        seconds: time after which it ends.
        most: number of peers after which it ends.
        say: called with the address, and for every peer.

    Returns:
        The number of peers.

    Raises:
        ConfigError: the port is taken, or may not be used.
    """
    end, count = time.monotonic() + seconds, 0
    try:
        server = socket.create_server(("", port))
    except OSError as error:
        raise ConfigError(f"cannot listen on port {port}: {error.strerror}. Choose another.") from None
    with server:
        say(f"listening on port {server.getsockname()[1]} for {seconds:g} s")
        while (left := end - time.monotonic()) > 0 and count != most:
            server.settimeout(left)
            try:
                connection, address = server.accept()
            except TimeoutError:
                break
            count += 1
            say(f"peer {address[0]}")
            with connection:
                _tell(connection)
    return count


def _tell(connection: socket.socket) -> None:
    connection.settimeout(CONNECT_S)
    hello = json.dumps({"versions": versions(), "time": time.time()}) + "\n"
    try:
        connection.sendall(hello.encode())
        for _ in range(PAYLOAD_BYTES // 2**20):
            connection.sendall(bytes(2**20))
    except OSError:  # the peer closed the connection
        return
