"""Engines of several widths in a run's configuration: what they resolve to, and a line for everything that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.cluster.devices import PlacementSlot, resolve_placement
from roll.config.engines import EngineCapabilities, check_engine
from roll.config.load import load_config
from roll.config.rollout_run import RolloutRunConfig
from roll.errors import ConfigError, PlacementError
from roll.pipelines.colocation import explain_sharing_rule, list_released_engines, resolve_sharing_rule
from roll.pipelines.engine_checks import check_heads

ROOT = Path(__file__).parents[3]
CLUSTER = (
    "inference.engine=hf",
    "cluster.type=ray",
    "cluster.device_mapping.actor_infer=0-3",
    "cluster.device_mapping.actor_train=3",
)
ONE_TWO = "inference.tensor_parallel=[1, 2]"


def load(*overrides: str) -> RolloutRunConfig:
    config = load_config(ROOT / "examples" / "gsm8k.yaml", [*CLUSTER, *overrides])
    assert isinstance(config, RolloutRunConfig)
    return config


def test_config_widths_engines_of_each_width_use_the_same_devices() -> None:
    config = load("inference.tensor_parallel=[1, 2, 4]", "cluster.devices_per_node=4")
    slots = resolve_placement(config.cluster, config.roles, 4).slots["actor_infer"]
    parts = [(0,), (1,), (2,), (3,), (0, 1), (2, 3), (0, 1, 2, 3)]
    assert list(slots) == [PlacementSlot(node=0, local_devices=part) for part in parts]
    assert config.num_engines == 4
    assert config.find_shared_engines() == [3, 5, 6]  # those on device 3, which the trainer uses
    assert list_released_engines(config, "colocated") == list(range(7))


def test_config_widths_a_policy_that_is_not_trained_uses_the_first_width() -> None:
    assert load("inference.tensor_parallel=[2, 4]").with_first_width().inference.tensor_parallel == 2
    assert load().with_first_width() == load()


def test_config_widths_sharing_rule_of_auto_releases_all_engines_or_none() -> None:
    together, ahead = load(ONE_TWO), load(ONE_TWO, "rollout.scheduling.async_ratio=1")
    assert resolve_sharing_rule(together, accelerated=True) == "colocated"
    assert resolve_sharing_rule(ahead, accelerated=True) == "disaggregated"
    assert explain_sharing_rule(ahead, accelerated=True) == (
        "cluster.sharing auto: disaggregated, because the run is asynchronous, and its engines have several widths "
        "(inference.tensor_parallel)"
    )
    one_width = load("rollout.scheduling.async_ratio=1")
    assert resolve_sharing_rule(one_width, accelerated=True) == "elastic_overlap"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["inference.tensor_parallel=[1]"],
            r"must be a number, or a list of at least two numbers, got \[1\]: set it to 1",
        ),
        (["inference.tensor_parallel=[]"], r"or a list of numbers, got \[\]: set it to 1"),
        (["inference.tensor_parallel=[2, 1]"], "must be ascending, and each width a multiple of the previous one, got"),
        (["inference.tensor_parallel=[1, 1]"], "must be ascending, and each width a multiple"),
        (["inference.tensor_parallel=[2, 3]"], "must be ascending, and each width a multiple"),
        (["inference.tensor_parallel=[0, 1]"], r"must be at least 1, got \[0, 1\]"),
        (
            ["inference.tensor_parallel=[1, 8]"],
            "actor_infer has 4 devices, .* divisible by inference.tensor_parallel 8",
        ),
        (["inference.tensor_parallel=two"], "'inference.tensor_parallel' .* must be an integer or a list of integers"),
        (
            [ONE_TWO, "cluster.type=local"],
            r"tensor_parallel \[1, 2\] requires several engines, but cluster.type local has one: set cluster.type=ray",
        ),
        *(
            (
                [ONE_TWO, f"rollout.scheduling.async_ratio={ratio}", f"cluster.sharing={rule}"],
                f"cannot be combined with cluster.sharing {rule}, .* set sharing to colocated or disaggregated",
            )
            for rule, ratio in (("partial_overlap", 1), ("elastic_overlap", 1), ("stream_training", 0))
        ),
        (
            [ONE_TWO, "cluster.address=auto", "cluster.elastic={max_engines: 2}"],
            "cannot be combined with cluster.elastic, whose engines have one width: set tensor_parallel to one number",
        ),
        (
            [ONE_TWO, "cluster.device_classes={a: {devices: 0-3}}"],
            "cannot be combined with cluster.device_classes, .* remove device_classes",
        ),
    ],
)
def test_config_widths_what_is_wrong_is_one_line_with_the_remedy(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(*overrides)
    assert "\n" not in str(caught.value).strip()


def test_config_widths_a_wide_engine_must_not_span_machines() -> None:
    config = load("inference.tensor_parallel=[1, 4]", "cluster.num_nodes=2", "cluster.devices_per_node=2")
    with pytest.raises(
        PlacementError, match=r"\[0, 1, 2, 3\] are on machines \[0, 1\]: lower inference.tensor_parallel"
    ):
        resolve_placement(config.cluster, config.roles, 2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.lora={rank: 4}", "weight_sync.lora=adapter"],
            r"weight_sync.lora adapter is not supported by engine 'hf' with inference.tensor_parallel \[1, 2\]: set "
            "inference.tensor_parallel to 1, use another engine .*, or set weight_sync.lora to merged",
        ),
        (["training.router_replay=engine"], "training.router_replay engine is not supported by engine 'hf' with"),
    ],
)
def test_config_widths_what_an_engine_cannot_do_on_several_devices_is_named(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_engine("hf", load(ONE_TWO, *overrides).required_engine_capabilities)
    check_engine("hf", load(*overrides).required_engine_capabilities)


def test_config_widths_devices_that_do_not_divide_the_heads_of_the_model_are_named() -> None:
    config = load("inference.tensor_parallel=[1, 2, 4]")
    check_heads(config, 12)
    with pytest.raises(ConfigError, match=r"\[1, 2, 4\]: 4 devices do not divide the 6 attention heads of the model"):
        check_heads(config, 6)
    check_heads(load(), 9)


def test_config_widths_an_engine_that_cannot_sleep_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = EngineCapabilities(
        tensor_parallel=True, missing_reasons={"can_sleep": "vLLM cannot release its memory on a CPU"}
    )
    config = load(ONE_TWO)
    check_engine("hf", config.required_engine_capabilities)
    monkeypatch.setattr("roll.config.engines.get_engine_capabilities", lambda kind: on_cpu)
    with pytest.raises(ConfigError) as caught:
        check_engine("hf", config.required_engine_capabilities)
    assert str(caught.value) == (
        "inference.tensor_parallel [1, 2] requires an engine that can free its memory (can_sleep), but "
        "inference.engine is hf (vLLM cannot release its memory on a CPU): set inference.tensor_parallel to one number."
        " No installed engine has this capability."
    )
    check_engine("hf", load("inference.tensor_parallel=2").required_engine_capabilities)
