"""Where a Ray cluster is to be joined: an address at which nobody listens is said at once."""

from __future__ import annotations

import socket
import time

import pytest

pytest.importorskip("ray")

from roll.cluster.ray_cluster import _build_job_config, _check_address
from roll.errors import PlacementError


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_ray_address_without_a_server_is_refused_at_once(scheme: str) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # and does not listen
        address = f"{scheme}127.0.0.1:{server.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(PlacementError, match=rf"cannot reach a Ray cluster at .*'{address}' \(.*refused"):
            _check_address(address)
        assert time.monotonic() - began < 5
        server.listen()
        _check_address(address)


@pytest.mark.parametrize("address", ["ray://127.0.0.1:99999", "ray://127.0.0.1:port", "nowhere.invalid:6379"])
def test_ray_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(PlacementError, match="cannot reach a Ray cluster"):
        _check_address(address)


@pytest.mark.parametrize("address", ["auto", "local"])
def test_ray_address_that_ray_resolves_is_left_to_it(address: str) -> None:
    _check_address(address)


def test_ray_address_ray_workers_do_not_search_the_current_directory_first() -> None:
    config = _build_job_config()
    config._py_driver_sys_path.extend(["/here"])  # as `ray.init` does
    assert not config._py_driver_sys_path
