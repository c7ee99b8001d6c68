"""Checks of the network between nodes: this node's name and interfaces, Ray's ports, and connections to peers.

node A   roll doctor --listen 29500        sends versions and clock, then a payload, on every connection
node B   roll doctor --peer A:29500        compares versions and clocks, and measures the bandwidth
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
from roll.preflight.doctor.finding import Finding, report_ok, report_problem, report_warning
from roll.preflight.doctor.software import read_versions

__all__ = ["answer_peers", "check_peer", "examine"]

CONNECT_TIMEOUT_S = 5.0
PAYLOAD_BYTES = 16 * 2**20
MIN_BYTES_PER_S = 100e6
"""Minimum bandwidth for fast weight syncs: on a gigabit link, a sync of 7B parameters takes minutes."""
MAX_CLOCK_SKEW_S = 5.0
RAY_PORT = 6379
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_CURRENT_CLUSTER_FILE = Path("/tmp/ray/ray_current_cluster")


def examine() -> Iterator[Finding]:
    """Check host name, network interfaces and Ray without contacting other nodes, and yield the findings."""
    yield _check_host_name()
    for variable in _INTERFACE_VARIABLES:
        if os.environ.get(variable):
            yield _check_interface(variable, os.environ[variable])
    yield _check_ray_cluster()
    yield _check_ray_token()


def _check_host_name() -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return report_warning(
            "host name",
            f"'{name}' does not resolve to an address",
            "add the name to DNS or /etc/hosts, or pass --node-ip-address to Ray.",
        )
    if not address.startswith("127."):
        return report_ok("host name", f"{name}, {address}")
    found = f"{name}, {address}: other nodes cannot reach this address"
    if int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) > 1:  # no problem for a run on one node
        return report_warning(
            "host name", found, "pass an address that other nodes can reach: ray start --node-ip-address=…"
        )
    return report_ok("host name", found)


def _check_interface(variable: str, value: str) -> Finding:
    import psutil

    known = sorted(psutil.net_if_addrs())
    # NCCL: a list of prefixes; `=` asks for exact names, and `^` excludes names.
    wanted = [name.removeprefix("=") for name in value.removeprefix("^").split(",")]
    if value.startswith("^") or any(there.startswith(name) for name in wanted for there in known):
        return report_ok(variable, value)
    return report_problem(
        variable,
        f"'{value}' is not an interface of this node",
        f"set {variable} to one of {', '.join(known)}, or unset the variable.",
    )


def _check_ray_cluster() -> Finding:
    """Check whether the Ray cluster that `ray.init` would join here can be reached."""
    address = os.environ.get("RAY_ADDRESS", "")
    if not address and _CURRENT_CLUSTER_FILE.is_file():
        address = _CURRENT_CLUSTER_FILE.read_text().strip()
    if not address or address in ("auto", "local"):
        return report_ok(
            "ray cluster", "none: `cluster.type: ray` starts a private cluster, or joins `cluster.address`"
        )
    plain = address.partition("://")[2] or address
    host, _, port = plain.partition(":")
    error = _find_connection_error(host, int(port) if port.isdigit() else RAY_PORT)
    if error is None:
        return report_ok("ray cluster", f"{address} can be reached")
    stale = not os.environ.get("RAY_ADDRESS")
    return report_warning(
        "ray cluster",
        f"{address}: {error}",
        "run `ray stop` to remove the stale address, or start the cluster's head again."
        if stale
        else "start the cluster's head, or unset RAY_ADDRESS.",
    )


def _check_ray_token() -> Finding:
    """Check whether Ray clusters on this node require a token and, if so, whether it is set."""
    name, mode = "ray token", os.environ.get("RAY_AUTH_MODE", "").lower()
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "") or Path.home() / ".ray" / "auth_token")
    known = bool(os.environ.get("RAY_AUTH_TOKEN")) or file.is_file()
    if mode == "token" and not known:
        return report_problem(
            name, "RAY_AUTH_MODE=token, but there is no token", "set RAY_AUTH_TOKEN to the cluster's token."
        )
    if mode:
        return report_ok(name, f"RAY_AUTH_MODE={mode}")
    if known:
        advice = "other nodes and `roll` require RAY_AUTH_MODE=token and the same token in RAY_AUTH_TOKEN."
        return report_ok(name, f"{file} exists: a cluster of `ray start --head` requires this token", advice)
    return report_ok(name, "none: any process that reaches a cluster's ports can use the cluster")


def _find_connection_error(host: str, port: int) -> str | None:
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def check_peer(peer: str) -> Iterator[Finding]:
    """Connect to the node `HOST:PORT`, where `answer_peers` runs; check versions, clocks and bandwidth.

    Raises:
        ConfigError: `peer` is not of the form `HOST:PORT`.
    """
    host, _, port = peer.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ConfigError(f"peer '{peer}' must be of the form HOST:PORT, such as node2:29500.")
    began = time.perf_counter()
    try:
        connection = socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S)
    except ConnectionRefusedError:
        yield report_warning(
            peer,
            "the host can be reached, but no process listens on this port",
            f"start `roll doctor --listen {port}` on that host.",
        )
        return
    except socket.gaierror as error:
        yield report_problem(
            peer, f"the name does not resolve ({error.strerror})", "add the name to DNS or /etc/hosts."
        )
        return
    except OSError as error:
        yield report_problem(
            peer,
            f"no connection within {CONNECT_TIMEOUT_S:g} s ({error.strerror or error})",
            f"allow TCP to port {port} in the firewall, security group or network policy (docs/operations).",
        )
        return
    milliseconds = 1000 * (time.perf_counter() - began)
    with closing(connection):
        yield report_ok(peer, f"connected in {milliseconds:.1f} ms")
        yield from _check_reply(peer, connection)


def _check_reply(peer: str, connection: socket.socket) -> Iterator[Finding]:
    connection.settimeout(CONNECT_TIMEOUT_S)
    with connection.makefile("rb") as stream:
        try:
            peer_versions: dict[str, Any] = json.loads(stream.readline(4096))
            theirs_versions, clock = dict(peer_versions["versions"]), float(peer_versions["time"])
        except (OSError, ValueError, KeyError, TypeError):
            yield report_ok(f"{peer} versions", "unknown: `roll doctor --listen` does not run there")
            return
        yield _compare_versions(f"{peer} versions", theirs_versions)
        apart = abs(time.time() - clock)
        name = f"{peer} clock"
        if apart > MAX_CLOCK_SKEW_S:
            yield report_warning(
                name,
                f"{apart:.0f} s difference",
                "times in logs and traces of the nodes cannot be compared: run an NTP client.",
            )
        else:
            yield report_ok(name, f"{apart:.1f} s difference")
        began, received = time.perf_counter(), 0
        try:
            while received < PAYLOAD_BYTES and (part := stream.read(2**20)):
                received += len(part)
        except OSError:
            pass
        rate = received / max(time.perf_counter() - began, 1e-9)
    found = f"{rate / 1e6:,.0f} MB/s over one connection ({received / 2**20:.0f} MiB)"
    if received < PAYLOAD_BYTES:
        yield report_problem(
            f"{peer} bandwidth", found, "the connection was interrupted: check for a proxy, or for different MTUs."
        )
    elif rate < MIN_BYTES_PER_S:
        yield report_warning(f"{peer} bandwidth", found, "weight syncs will be slow: choose a faster interface.")
    else:
        yield report_ok(f"{peer} bandwidth", found)


def _compare_versions(name: str, peer_versions: dict[str, str]) -> Finding:
    differ = [
        f"{package} {peer_versions.get(package) or 'missing'} (here {here or 'missing'})"
        for package, here in read_versions().items()
        if peer_versions.get(package, "") != here
    ]
    if differ:
        return report_problem(
            name, ", ".join(differ), "install the same versions on every node, or use one container image."
        )
    return report_ok(name, "the same as on this machine")


def answer_peers(
    port: int, *, seconds: float, max_peers: int | None = None, report_progress: Callable[[str], object] = print
) -> int:
    """Listen on all interfaces, and answer nodes that run `check_peer`, one after another.

    Each node receives versions, the time, and a payload of zeros; data from the node is not read.

    Args:
        port: port to listen on; 0 chooses a free one.
        seconds: maximum time to wait for peers.
        max_peers: maximum number of peers to answer; `None` for no limit.
        report_progress: called with a message when listening begins, and for each peer.

    Returns:
        The number of answered peers.

    Raises:
        ConfigError: the port is already in use, or this user may not listen on it.
    """
    end, count = time.monotonic() + seconds, 0
    try:
        server = socket.create_server(("", port))
    except OSError as error:
        raise ConfigError(f"cannot listen on port {port}: {error.strerror}. Choose another port.") from None
    with server:
        report_progress(f"listening on port {server.getsockname()[1]} for {seconds:g} s")
        while (left := end - time.monotonic()) > 0 and count != max_peers:
            server.settimeout(left)
            try:
                connection, address = server.accept()
            except TimeoutError:
                break
            count += 1
            report_progress(f"peer {address[0]}")
            with connection:
                _send_reply(connection)
    return count


def _send_reply(connection: socket.socket) -> None:
    connection.settimeout(CONNECT_TIMEOUT_S)
    hello = json.dumps({"versions": read_versions(), "time": time.time()}) + "\n"
    try:
        connection.sendall(hello.encode())
        for _ in range(PAYLOAD_BYTES // 2**20):
            connection.sendall(bytes(2**20))
    except OSError:  # the peer closed the connection
        return
