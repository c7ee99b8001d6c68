"""Ray that does not start, or is not there; here, no process is started."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ray")

from roll.cluster import ray_cluster
from roll.config.cluster import ClusterConfig
from roll.errors import InfraError, PlacementError


@pytest.mark.parametrize(
    ("address", "error", "says"),
    [
        (
            None,
            InfraError,
            r"^Ray failed to start on this machine: raylet timed out\. Retry with fewer other programs running",
        ),
        (
            "auto",
            PlacementError,
            r"^cannot connect to a Ray cluster at cluster\.address 'auto': raylet timed out\.",
        ),
    ],
    ids=["started here", "joined"],
)
def test_ray_cluster_what_ray_meets_is_one_message(
    monkeypatch: pytest.MonkeyPatch, address: str | None, error: type[Exception], says: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise Exception("raylet timed out.")  # as Ray does: it has no class for it

    monkeypatch.setattr(ray_cluster.ray, "init", refuse)
    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: False)
    config = ClusterConfig(type="ray", address=address, devices_per_node=1)
    with pytest.raises(error, match=says):
        ray_cluster.open_ray(config, {})
