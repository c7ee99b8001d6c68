"""Device classes in a run's configuration: what they resolve to, and a line for everything that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.config.load import load_config
from roll.config.rollout_run import RolloutRunConfig
from roll.errors import ConfigError
from roll.pipelines.generation import build_device_classes
from roll.rollout.device_classes import DeviceClasses

ROOT = Path(__file__).parents[3]
CLUSTER = ("cluster.type=ray", "cluster.device_mapping.actor_infer=0-3", "cluster.device_mapping.actor_train=4-5")
H800_H20 = "cluster.device_classes={h800: {devices: [0-1], price_per_hour: 5}, h20: {devices: 2-3, price_per_hour: 2}}"


def load(*overrides: str) -> RolloutRunConfig:
    config = load_config(ROOT / "examples" / "gsm8k.yaml", [*CLUSTER, *overrides])
    assert isinstance(config, RolloutRunConfig)
    return config


@pytest.mark.parametrize(
    ("preference", "chosen"),
    [("h20", "h20"), ("prefill_heavy", "h800"), ("decode_heavy", "h20"), ("measured", "measured")],
)
def test_config_device_classes_a_preference_is_resolved_to_a_class(preference: str, chosen: str) -> None:
    config = load(H800_H20, f"data.0.device_class={preference}")
    assert config.engine_classes == ["h800", "h800", "h20", "h20"]
    assert config.preferred_classes == {"gsm8k": chosen}


def test_config_device_classes_rates_are_compared_per_price() -> None:
    """An H200 has more bandwidth than an H20, but less for its price."""
    classes = "cluster.device_classes={{h200: {{devices: 0-1{0}}}, cheap: {{devices: 2-3, device: h20{1}}}}}"
    assert load(classes.format("", ""), "data.0.device_class=decode_heavy").preferred_classes == {"gsm8k": "h200"}
    priced = classes.format(", price_per_hour: 5", ", price_per_hour: 2")
    assert load(priced, "data.0.device_class=decode_heavy").preferred_classes == {"gsm8k": "cheap"}


def test_config_device_classes_the_router_gets_engines_with_prices() -> None:
    config = load(H800_H20, "data.0.device_class=h20", "inference.tensor_parallel=2")
    assert build_device_classes(config) == DeviceClasses(
        engine_classes={"engine-0": "h800", "engine-1": "h20"},
        engine_prices={"h800": 10.0, "h20": 4.0},
        preferences={"gsm8k": "h20"},
    )
    assert build_device_classes(load()) is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.0.device_class=h20"], "data.0.device_class is h20, but the run has no device classes: define them"),
        ([H800_H20, "data.0.device_class=h2O"], "data.0.device_class 'h2O' is not a class .* Did you mean 'h20'"),
        (
            ["cluster.device_classes={a: {devices: 0-2}, b: {devices: 2-3}}"],
            "device 2 is in the device_classes a and b: list each device in one class",
        ),
        (
            ["cluster.device_classes={a: {devices: 0-1, price_per_hour: 5.0}, b: {devices: 2-3}}"],
            "device_classes.b has no price_per_hour, but device_classes.a has one: set the prices of all",
        ),
        (["cluster.device_classes={a: {devices: 0-1}}"], "names device 2, which belongs to no class .* add it"),
        (
            ["cluster.device_classes={fast: {devices: 0-3}}", "data.0.device_class=prefill_heavy"],
            "cluster.device_classes.fast.device 'fast' is not known: set it to one of h200, .*, or prefer a class",
        ),
        (
            ["cluster.device_classes={a: {devices: 0-3}, b: {devices: 7}}", "data.0.device_class=b"],
            "the source 'gsm8k' prefers the device class b, but no engine runs on devices of this class: add them",
        ),
        (
            ["cluster.device_classes={a: {devices: 0-2}, b: {devices: 3}}", "inference.tensor_parallel=2"],
            "engine 1 has the devices 2, 3 of the classes a and b, but an engine needs devices of one class: align",
        ),
        (
            [H800_H20, "data.0.device_class=h20", "rollout.scheduling.type=batch"],
            "`rollout.scheduling.type: batch` assigns prompts to engines in turn: set the type to queue",
        ),
        (["cluster.device_classes={measured: {devices: 0-3}}"], "'measured' is a preference .* choose another name"),
        (["cluster.device_classes={a b: {devices: 0-3}}"], "'a b' must be a name of letters"),
        (["cluster.device_classes={a: {devices: x}}"], "'x' is not a valid list of devices: expected"),
        (
            ["cluster.device_classes={a: {devices: 0-3, price_per_hour: 0}}"],
            "'cluster.device_classes.a.price_per_hour' .* must be a number > 0 or null, got 0",
        ),
        (
            ["cluster.device_classes={a: 3}"],
            "'cluster.device_classes.a' .* must be a section .*, got 3",
        ),
        (["cluster.device_classes=3"], "'cluster.device_classes' .* must be a mapping of names to sections, got 3"),
        (["cluster.device_classes={a: {device: h800}}"], "missing key 'cluster.device_classes.a.devices'"),
        (
            ["cluster.device_classes={a: {devices: 0-3, prise_per_hour: 3}}"],
            "unknown key 'cluster.device_classes.a.prise_per_hour' .* Did you mean 'price_per_hour'",
        ),
    ],
)
def test_config_device_classes_what_is_wrong_is_one_line_with_the_remedy(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(*overrides)
    assert "\n" not in str(caught.value).strip()


def test_config_device_classes_a_key_of_a_class_can_be_overridden_by_its_name() -> None:
    config = load(H800_H20, "cluster.device_classes.h20.price_per_hour=3")
    assert config.cluster.device_classes["h20"].price_per_hour == 3
