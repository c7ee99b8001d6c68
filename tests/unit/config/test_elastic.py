"""Keys of engines on nodes that join and leave, with values that do not work."""

from __future__ import annotations

from typing import Any

import pytest

from roll.config.load import load_config
from roll.errors import ConfigError

RLVR = {
    "pipeline": "rlvr",
    "name": "run",
    "model": "tiny",
    "data": [{"source": "arithmetic", "reward": "math"}],
    "training": {"num_steps": 1},
}
SFT = {
    "pipeline": "sft",
    "name": "run",
    "model": "tiny",
    "data": [{"source": "file", "path": "a.jsonl"}],
    "training": {"num_steps": 1},
}
RAY = {"type": "ray", "address": "auto"}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            RLVR | {"cluster": RAY | {"elastic": {"min_engines": 3, "max_engines": 2}}},
            "cluster.elastic.min_engines must be <= cluster.elastic.max_engines, got 3 and 2: lower min_engines",
        ),
        (
            RLVR | {"cluster": {"elastic": {"max_engines": 2}}},
            "cluster.elastic requires a Ray cluster that nodes can join, but cluster.type is local: set",
        ),
        (
            RLVR | {"cluster": {"type": "ray", "elastic": {"max_engines": 2}}},
            "cluster.elastic requires a Ray cluster that nodes can join, but cluster.address is null, which starts a",
        ),
        (
            RLVR | {"cluster": {"type": "ray", "address": "local", "elastic": {"max_engines": 2}}},
            "cluster.elastic requires a Ray cluster that nodes can join, but cluster.address is local, which starts a",
        ),
        (
            RLVR | {"cluster": {"type": "ray", "address": "", "elastic": {"max_engines": 2}}},
            "cluster.elastic requires a Ray cluster that nodes can join, but cluster.address is empty, which starts a",
        ),
        (
            RLVR | {"cluster": {"type": "ray", "address": "ray://head:10001", "elastic": {"max_engines": 2}}},
            "cluster.elastic is not supported with Ray Client (cluster.address ray://head:10001): run",
        ),
        (
            RLVR | {"cluster": RAY | {"elastic": {"max_engines": 2}}, "weight_sync": {"transport": "shared_memory"}},
            "weight_sync.transport is 'shared_memory', which reaches engines on one machine only, but cluster.elastic",
        ),
        (
            SFT | {"cluster": RAY | {"elastic": {"max_engines": 2}}},
            "cluster.elastic adds engines that generate rollouts, but the pipeline sft trains without rollouts: remove",
        ),
        (RLVR | {"cluster": RAY | {"elastic": {}}}, "missing key 'cluster.elastic.max_engines'"),
        (
            RLVR | {"cluster": RAY | {"elastic": {"max_engines": 2, "node_label": "spot"}}},
            "'cluster.elastic.node_label' must be a string (`key=value`, such as `market=spot`), or null, got 'spot'",
        ),
    ],
)
def test_elastic_config_says_what_does_not_work_and_what_to_do(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config)
    assert says in str(caught.value)


def test_elastic_config_loads_with_an_address() -> None:
    config = load_config(RLVR | {"cluster": RAY | {"elastic": {"max_engines": 2, "node_label": "market=spot"}}})
    elastic = config.cluster.elastic
    assert elastic is not None
    assert (elastic.min_engines, elastic.max_engines, elastic.min_engines_timeout_s) == (0, 2, 600.0)
