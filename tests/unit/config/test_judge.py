"""The section `judge`: what it needs of the rest of a configuration, and where its engines sit."""

from __future__ import annotations

from typing import Any

import pytest

from roll.cluster.devices import resolve_placement
from roll.config.load import dump_config, load_config
from roll.config.pipelines.rlvr import RLVRConfig
from roll.errors import ConfigError, PlacementError

ASKING = [{"source": "arithmetic", "reward": "judge"}]


def config(mapping: dict[str, Any] | None = None, **changes: Any) -> RLVRConfig:
    cluster = {"type": "ray", "device_mapping": {"actor_infer": "1-2", **mapping}} if mapping is not None else {}
    tree = {"name": "x", "model": "m", "training": {"num_steps": 1}, "data": ASKING, "cluster": cluster, **changes}
    return load_config(tree)


def test_config_judge_a_name_is_short_for_a_judge_of_one_engine() -> None:
    loaded = config(judge="other")
    assert loaded.judge is not None and loaded.judge.model == "other"
    assert (loaded.num_judges, loaded.judge_devices) == (1, [0])
    assert load_config(dump_config(loaded)) == loaded  # as a resumed run reads it
    assert config(judge={}).judge is not None and config(judge={"num_engines": 3}).num_judges == 3


@pytest.mark.parametrize(
    ("mapping", "judge", "number", "devices"),
    [
        ({}, {}, 1, [1]),  # beside the policy's first engine
        ({}, {"num_engines": 2}, 2, [1, 2]),
        ({}, {"tensor_parallel": 2}, 1, [1, 2]),
        ({"judge": "3-6"}, {}, 4, [3, 4, 5, 6]),
        ({"judge": "3-6"}, {"tensor_parallel": 2}, 2, [3, 4, 5, 6]),
    ],
)
def test_config_judge_engines_follow_from_devices(
    mapping: dict[str, Any], judge: dict[str, Any], number: int, devices: list[int]
) -> None:
    loaded = config(mapping, judge={"engine": "vllm", **judge})
    assert (loaded.num_judges, loaded.judge_devices) == (number, devices)
    seats = resolve_placement(loaded.cluster, loaded.roles, devices_per_node=8).slots["judge"]
    assert [device for seat in seats for device in seat.local_devices] == devices
    assert len(seats) == number


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "data.0.reward.0 uses the run's judge, but no judge is configured: add a section `judge`"),
        (
            {"judge": "m", "data": [{"source": "arithmetic", "reward": "math"}]},
            "the judge 'm' is not used by any reward",
        ),
        ({"judge": {"tensor_parallel": 2}}, "judge.tensor_parallel is 2, but cluster.type local has one device"),
        ({"judge": {"engine": "hf", "tensor_parallel": 2}}, "judge.tensor_parallel is 2, but cluster.type"),
        (
            {"judge": {"max_context": 1024}},
            "leaves no tokens for questions, because data.0.reward.0.max_reply_tokens is 1024",
        ),
        (
            {"judge": {"num_engines": 3}, "mapping": {}},
            r"requires 3 devices .* actor_infer, whose devices it shares, has only 2",
        ),
        ({"judge": {"num_engines": 2}, "mapping": {"judge": 3}}, "judge.num_engines 2 x .*device_mapping.judge has 1"),
        (
            {"judge": {"tensor_parallel": 2}, "mapping": {"judge": "3-5"}},
            "3 devices, but the number must be divisible by judge.tensor_parallel 2",
        ),
        (
            {"mapping": {"judge": 3}, "data": [{"source": "arithmetic", "reward": "math"}]},
            "device_mapping.judge is set, but the run has no judge",
        ),
        ({"judge": "m", "cluster": {"device_mapping": {"judge": 1}}}, "type local uses only device 0"),
    ],
)
def test_config_judge_a_judge_that_does_not_fit_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**changes)


def test_config_judge_devices_that_are_not_there_are_refused() -> None:
    with pytest.raises(PlacementError, match=r"device_mapping\.judge contains device 4, but 1 x 4 devices"):
        loaded = config({"judge": 4}, judge="m")
        resolve_placement(loaded.cluster, loaded.roles, devices_per_node=4)
